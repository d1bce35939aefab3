"""masked_attention where tokens see what stands behind them too, as in encoders, and where weights are dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bastile.ops import _flash as flash
from bastile.ops._segments import of_whole_rows, seen, with_more_behind
from bastile.ops.masked_attention import Segments, masked_attention, of_padding
from oracle import assert_no_worse_pooled, devices, few_examples, random_tensor
from test_masked_attention import LENGTH, PADDED, TYPES, case, dense, kinds, on

#: Of each, and a window or none.
SERVED = [("none", 0), ("none", 6), ("left", 0), ("right", 0), ("both", 0), ("packed", 0), ("packed", 6)]
P = 0.3  # with which weights are dropped


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("kind", ["none", "left", "right", "both", "packed"])
def test_segments_stand_for_the_mask(kind: str, window: int) -> None:
    segments, mask = kinds(window, causal=False)[kind]
    if (kind, window) not in SERVED:
        assert segments is None
        return
    assert segments is not None
    assert not segments.causal
    assert torch.equal(seen(segments, len(mask), LENGTH), mask)


@pytest.mark.parametrize(("device", "dtype"), TYPES)
@pytest.mark.parametrize(("kind", "window"), SERVED)
def test_errors_are_no_larger_than_pytorch_s(device: str, dtype: torch.dtype, kind: str, window: int) -> None:
    """Rows of padding too, which see what their sequence sees. On a GPU PyTorch's flash attention, which it takes where
    nothing is masked, has gradients that are off by up to 1.016 times what they are by its attention with a mask."""
    times = 1.05 if window else 1.02 if device == "cuda" else 1.0
    assert_no_worse_pooled(lambda: case(dtype, device, *kinds(window, causal=False)[kind]), times=times)


@settings(few_examples, max_examples=30)
@given(
    length=st.integers(1, 70),
    more=st.integers(0, 20),
    before=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    after=st.integers(0, 30),
)
def test_rows_with_more_padding_behind_them(length: int, more: int, before: list[int], after: int) -> None:
    rows = torch.zeros(len(before), length + after, dtype=torch.bool)
    for row, first in zip(rows, before, strict=True):
        row[min(first, length - 1) : length] = True
    longer = torch.nn.functional.pad(rows, [0, more])
    one = of_padding(rows, causal=False)
    assert one is not None
    found = with_more_behind(one, len(rows), more)
    seen_by_all = longer[:, None, None].expand(-1, 1, longer.shape[1], -1)
    assert torch.equal(seen(found, len(rows), longer.shape[1]), seen_by_all)
    assert found.longest == longer.shape[1]


@pytest.mark.parametrize(("length", "more"), [(9, 4), (9, 0), (30, 7)])
def test_rows_with_a_window_and_padding_behind_them(length: int, more: int) -> None:
    """Real tokens see what they saw; nobody reads the others."""
    found = with_more_behind(of_whole_rows(length, 4, causal=False), 2, more)
    got = seen(found, 2, length + more)
    want = dense(length, 4, torch.ones(2, length, dtype=torch.bool), causal=False)
    assert torch.equal(got[:, :, :length, :length], want)
    assert not bool(got[:, :, :length, length:].any())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "left", "right", "both", "packed"])
def test_weights_are_dropped(kind: str, causal: bool, device: str) -> None:
    """With values of ones at a place of their own each result is a row of the weights: zeros, or what they are without
    dropout over 1 - p. With the same numbers drawn, results and gradients are those of these weights."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    segments, mask = kinds(causal=causal)[kind]
    said, allowed = on(device, segments), mask.to(device)
    if not len(said.cuts) and not causal:
        said = of_whole_rows(LENGTH, device=torch.device(device), causal=False)
    rows, wide = len(mask), 40  # at least as many as there are keys
    q, k, v = (random_tensor((rows, 4, LENGTH, wide), dtype, device).requires_grad_() for _ in range(3))
    ones = torch.eye(LENGTH, wide, dtype=dtype, device=device).expand(rows, 4, -1, -1)

    def drawn(values: torch.Tensor, dropout: float = P) -> torch.Tensor:
        torch.manual_seed(3)
        return masked_attention(q, k, values, said, scale=0.2, dropout=dropout)

    weights = (q.double() @ k.double().mT * 0.2).masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    dropped = drawn(ones)[..., :LENGTH].transpose(1, 2).double()
    kept = dropped != 0
    torch.testing.assert_close(dropped, (weights / (1 - P)).masked_fill(~kept, 0), atol=1e-2, rtol=2e-2)
    large = (weights > 1e-3) & allowed
    share = (large & ~kept).sum().item() / large.sum().item()
    assert abs(share - P) < 5 * (P * (1 - P) / large.sum().item()) ** 0.5

    y, want = drawn(v), (weights / (1 - P) * kept) @ v.double()
    upstream = torch.randn_like(y)
    torch.manual_seed(3)
    got = torch.autograd.grad(y, (q, k, v), upstream)
    exact = torch.autograd.grad(want.transpose(1, 2), (q, k, v), upstream.double())
    bound = 1e-4 if device == "cpu" else 4e-2
    for one, other in zip((y, *got), (want.transpose(1, 2), *exact), strict=True):
        assert (one.double() - other).abs().max() <= bound * max(1.0, other.abs().max().item())
    assert not torch.equal(drawn(v, 0.5), y)
    torch.testing.assert_close(drawn(v, 0.0), masked_attention(q, k, v, said, scale=0.2))


@pytest.mark.skipif("cuda" not in devices(), reason="a CPU's are PyTorch's own operators, which vmap knows")
def test_gradients_of_a_batch_at_once_where_weights_are_dropped() -> None:
    q = torch.randn(1, 2, 9, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = masked_attention(q, q, q, dropout=P)
    with pytest.raises(RuntimeError, match="differentiate one result at a time"):
        torch.autograd.grad(y, q, torch.randn(3, *y.shape, device="cuda", dtype=q.dtype), is_grads_batched=True)


def test_what_is_empty_or_of_one_token() -> None:
    said: Any = Segments(torch.empty(0, 1, dtype=torch.int32), 1, causal=False)
    q, v = torch.randn(3, 4, 1, 16), torch.randn(3, 2, 1, 16)
    torch.testing.assert_close(masked_attention(q, v, v, said), v.repeat_interleave(2, 1).transpose(1, 2))
    assert masked_attention(q[:0], v[:0], v[:0], said).shape == (0, 1, 4, 16)
    assert masked_attention(q[:0], v[:0], v[:0], said, dropout=P).shape == (0, 1, 4, 16)


def test_a_window_beside_padding_cannot_be_said() -> None:
    assert of_padding(PADDED["left"], window=6, causal=False) is None
    assert of_padding(PADDED["left"], window=LENGTH, causal=False) is not None
    assert flash.window_of(4, causal=False) == {"window_size_left": 3, "window_size_right": 3}
