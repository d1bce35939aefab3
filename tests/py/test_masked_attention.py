"""Attention of padded, packed and windowed batches: what PyTorch's gives beneath the mask that Transformers makes."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from bastile.ops import _efficient as efficient
from bastile.ops import _flash as flash
from bastile.ops._segments import seen
from bastile.ops.masked_attention import Segments, masked_attention, of_padding, of_sequences
from oracle import (
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    devices,
    devices_and_types,
    few_examples,
    random_tensor,
)

LENGTH = 37
ROWS = torch.tensor(
    [[1] * 21 + [0] * 16, [0] * 5 + [1] * 21 + [0] * 11, [1] * LENGTH, [0] * 36 + [1], [1] + [0] * 36]
).bool()
PADDED = {"right": ROWS[[0, 2, 4]], "left": ROWS[[3, 2]], "both": ROWS, "none": ROWS[[2, 2]]}
IDS = torch.tensor([[0] * 9 + [1] * 20 + [2] + [3] * 7, [0] * LENGTH, list(range(LENGTH))])
TYPES = [each for each in devices_and_types() if each[1] in flash.HALVES]


def on(device: str, segments: Segments | None) -> Segments:
    assert segments is not None
    return segments._replace(cuts=segments.cuts.to(device))


def dense(length: int, window: int, allowed: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """[B, 1, S, S], of [B, S] that may be seen, or [B, S, S]."""
    at = torch.arange(length)
    before = at[:, None] - at
    is_seen = (before >= 0 if causal else before > -(window or length)) & (before < (window or length))
    return (is_seen & (allowed[:, None] if allowed.dim() == 2 else allowed))[:, None]


def same(ids: torch.Tensor) -> torch.Tensor:
    return ids[:, :, None] == ids[:, None]


def kinds(window: int = 0, causal: bool = True) -> dict[str, tuple[Segments | None, torch.Tensor]]:
    """What is seen, as segments and as a mask."""
    found = {
        name: (of_padding(rows, window, causal=causal), dense(LENGTH, window, rows, causal))
        for name, rows in PADDED.items()
    }
    return {**found, "packed": (of_sequences(IDS, window, causal=causal), dense(LENGTH, window, same(IDS), causal))}


def case(
    dtype: torch.dtype,
    device: str,
    segments: Segments | None,
    mask: torch.Tensor,
    unread: torch.Tensor | None = None,
    widths: tuple[int, int] = (16, 16),
) -> Case:
    """unread: rows that nobody looks at, [B, S]. What sees nothing has zeros here, for which a softmax has none.
    widths: of keys' heads, and of values'."""
    said, allowed = on(device, segments), mask.to(device)
    nothing = ~allowed.any(-1).transpose(1, 2)[..., None]
    if unread is not None:
        nothing = nothing | unread.to(device)[..., None, None]

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        y = scaled_dot_product_attention(q, keys, values, attn_mask=allowed, scale=0.3)
        return y.transpose(1, 2).masked_fill(nothing, 0.0)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return masked_attention(q, k, v, said, scale=0.3).masked_fill(nothing, 0.0)

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = (q @ keys.mT * 0.3).masked_fill(~allowed, torch.finfo(q.dtype).min)
        return (scores.softmax(-1) @ values).transpose(1, 2).masked_fill(nothing, 0.0)

    shapes = {"q": (4, widths[0]), "k": (2, widths[0]), "v": (2, widths[1])}
    inputs = {n: random_tensor((len(mask), h, LENGTH, width), dtype, device) for n, (h, width) in shapes.items()}
    # Where padding has a gradient, those of keys and values are sums of two that are rounded.
    twice = {} if unread is not None else {"dk": 1.25, "dv": 1.25}
    rows = len(mask) * 4 * LENGTH  # of a query and head, whose error its gradient shares
    return Case(ours, theirs, exact, inputs, times_stock=twice, independent=rows if widths != (16, 16) else 0)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("kind", ["none", "left", "right", "both", "packed"])
def test_segments_stand_for_the_mask(kind: str, window: int) -> None:
    segments, mask = kinds(window)[kind]
    if window and kind in ("right", "both"):
        assert segments is None
    else:
        assert segments is not None
        assert torch.equal(seen(segments, len(mask), LENGTH), mask)
        assert segments.behind == (kind == "right")


@pytest.mark.parametrize(("device", "dtype"), TYPES)
@pytest.mark.parametrize(
    ("kind", "window"),
    [("none", 6), ("left", 0), ("left", 6), ("right", 0), ("both", 0), ("packed", 0), ("packed", 6)],
)
def test_errors_are_no_larger_than_pytorch_s(device: str, dtype: torch.dtype, kind: str, window: int) -> None:
    """As models are trained, whose losses do not read what stands behind sequences."""
    unread = ~PADDED[kind] if kind in PADDED else torch.zeros(IDS.shape, dtype=torch.bool)
    # A window of few keys: little is summed up before it is rounded, and in another order.
    assert_no_worse_pooled(lambda: case(dtype, device, *kinds(window)[kind], unread), times=1.05 if window else 1.0)


@pytest.mark.parametrize(("device", "dtype"), TYPES)
@pytest.mark.parametrize("widths", [(24, 16), (16, 24), (512, 512), (264, 512)], ids=str)
@pytest.mark.parametrize("kind", ["none", "left", "right", "both", "packed"])
def test_errors_of_other_widths(device: str, dtype: torch.dtype, kind: str, widths: tuple[int, int]) -> None:
    """DeepSeek's values are narrower than its keys, and Gemma 4's heads wider than flash attention on CUDA has them."""
    unread = ~PADDED[kind] if kind in PADDED else torch.zeros(IDS.shape, dtype=torch.bool)
    assert_no_worse_pooled(lambda: case(dtype, device, *kinds()[kind], unread, widths))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["left", "both"])
@pytest.mark.parametrize("causal", [True, False])
def test_wide_heads_without_keys_or_queries(device: str, kind: str, causal: bool) -> None:
    """For segments without keys, or without queries, PyTorch's attention of wide heads writes nothing at all."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    segments, mask = kinds(causal=causal)[kind]
    leaves = [random_tensor((len(mask), 2, LENGTH, 320), dtype, device).requires_grad_() for _ in range(3)]
    full = [torch.full((len(mask) * LENGTH * 640,), math.nan, dtype=dtype, device=device) for _ in range(8)]
    del full  # what is handed out next has these numbers
    y = masked_attention(*leaves, on(device, segments))
    grads = torch.autograd.grad(y, leaves, torch.randn_like(y))
    assert all(bool(each.isfinite().all()) for each in (y, *grads))
    nothing = ~mask.any(-1)[:, 0]
    unseen = ~mask.any(-2)[:, 0]
    assert not y[nothing.to(device)].any()
    for grad, none in zip(grads, (nothing, unseen, unseen), strict=True):
        assert not grad.transpose(1, 2)[none.to(device)].any()


@pytest.mark.parametrize(("device", "dtype"), TYPES)
@pytest.mark.parametrize("kind", ["left", "right", "both"])
def test_rows_of_padding_are_those_beneath_a_mask(device: str, dtype: torch.dtype, kind: str) -> None:
    assert_no_worse(case(dtype, device, *kinds()[kind]))


@settings(few_examples, max_examples=40)
@given(
    length=st.integers(1, 70),
    groups=st.integers(1, 3),
    times=st.integers(1, 3),
    dim=st.sampled_from([8, 24, 64, 128, 320]),
    of_values=st.sampled_from([None, 8, 64, 264]),
    window=st.integers(0, 80),
    packed=st.booleans(),
    data=st.data(),
)
def test_any_shape(
    length: int, groups: int, times: int, dim: int, of_values: int | None, window: int, packed: bool, data: Any
) -> None:
    rows = []
    for _ in range(data.draw(st.integers(1, 3))):
        first = data.draw(st.integers(0, length - 1))
        count = data.draw(st.integers(1, length - first))
        rows.append([0] * first + [1] * count + [0] * (length - first - count))
    if packed:
        ids = torch.tensor(rows).diff(dim=1, prepend=torch.ones(len(rows), 1, dtype=torch.long)).abs().cumsum(1)
        segments, mask = of_sequences(ids, window), dense(length, window, same(ids))
    else:
        segments, mask = of_padding(torch.tensor(rows), window), dense(length, window, torch.tensor(rows).bool())
    if segments is None:
        assert not packed
        assert 0 < window < length
        return
    assert torch.equal(seen(segments, len(rows), length), mask)
    for device in devices():
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        shapes = ((groups * times, dim), (groups, dim), (groups, of_values or dim))
        leaves = [random_tensor((len(rows), h, length, width), dtype, device) for h, width in shapes]
        leaves = [t.requires_grad_() for t in leaves]
        if device == "cuda" and segments.window and max(dim, of_values or 0) > flash.MOST_DIM:
            with pytest.raises(ValueError, match="have no window"):
                masked_attention(*leaves, on(device, segments))
            continue
        wide = [t.detach().double().requires_grad_() for t in leaves]
        y = masked_attention(*leaves, on(device, segments))
        keys, values = [t.repeat_interleave(times, 1) for t in wide[1:]]
        scores = (wide[0] @ keys.mT * dim**-0.5).masked_fill(~mask.to(device), -math.inf)
        want = (scores.softmax(-1).nan_to_num(0.0) @ values).transpose(1, 2)
        upstream = torch.randn_like(y)
        got = torch.autograd.grad(y, leaves, upstream)
        exact = torch.autograd.grad(want, wide, upstream.double())
        bound = 2e-5 if device == "cpu" else 5e-2
        for one, other in zip((y, *got), (want, *exact), strict=True):
            assert (one.double() - other.nan_to_num(0.0)).abs().max() <= bound * max(1.0, other.abs().max().item())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["none", "left", "right", "both", "packed"])
def test_heads_as_a_projection_leaves_them(device: str, kind: str) -> None:
    """And as a rotary function does, heads first in memory; a gradient that is no tensor of its own, too."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    segments, mask = kinds()[kind]
    made = [random_tensor((len(mask), LENGTH, heads, 16), dtype, device).transpose(1, 2) for heads in (4, 2, 2)]
    formats = (torch.preserve_format, torch.contiguous_format)
    given, copied = ([t.clone(memory_format=f).requires_grad_() for t in made] for f in formats)
    one, other = (masked_attention(*each, on(device, segments)) for each in (given, copied))
    assert one.is_contiguous()
    torch.testing.assert_close(one, other)
    for a, b in zip(torch.autograd.grad(one.sum(), given), torch.autograd.grad(other.sum(), copied), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 if device == "cpu" else 2e-2, rtol=1e-2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["none", "left", "right", "both", "packed"])
def test_gradients_of_a_batch_at_once_and_second_ones(kind: str, causal: bool) -> None:
    segments, mask = kinds(causal=causal)[kind]
    q, k, v = [torch.randn(len(mask), heads, LENGTH, 16, requires_grad=True) for heads in (4, 2, 2)]
    y = masked_attention(q, k, v, on("cpu", segments))
    upstream = torch.randn(3, *y.shape)
    several = torch.autograd.grad(y, (q, k, v), upstream, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        each = torch.autograd.grad(y, (q, k, v), upstream[i], retain_graph=True)
        for one, other in zip(several, each, strict=True):
            torch.testing.assert_close(one[i], other, atol=1e-5, rtol=1e-5)
    (first,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="masked_attention cannot be differentiated twice"):
        first.sum().backward()


def test_padding_takes_nothing_from_sequences() -> None:
    """NaN in the keys and values of padding would be seen in each row that has a weight for them, be it 0."""
    for kind in ("left", "right", "both"):
        segments, mask = kinds()[kind]
        q, k, v = [torch.randn(len(mask), heads, LENGTH, 8) for heads in (2, 1, 1)]
        is_padding = ~PADDED[kind][:, None, :, None]
        y = masked_attention(q, k.masked_fill(is_padding, 1e30), v.masked_fill(is_padding, 1e30), on("cpu", segments))
        torch.testing.assert_close(y, masked_attention(q, k, v, on("cpu", segments)))


def test_what_segments_cannot_say() -> None:
    hole, nothing = PADDED["right"].clone(), PADDED["right"].clone()
    hole[1, 3], nothing[0] = False, False
    assert of_padding(hole) is None
    assert of_padding(nothing) is None
    assert of_padding(PADDED["right"], window=LENGTH - 1) is None
    found = of_padding(PADDED["right"], window=LENGTH)
    assert found is not None
    assert not found.window


def test_few_kinds_of_packed_batches() -> None:
    """The shapes of cuts, and the longest sequence, make a kind of a step (docs/graphs.md)."""
    for count in range(1, 20):
        ids = torch.arange(64).expand(2, -1) * count // 64
        segments = of_sequences(ids)
        assert segments.cuts.shape == (2, 1 + (1 << (2 * count - 1).bit_length()))
        assert segments.longest & (segments.longest - 1) == 0
        assert segments.longest >= -(-64 // count)
    assert of_sequences(torch.zeros(1, 0, dtype=torch.long)).cuts.shape[0] == 2


def test_empty_and_one_token() -> None:
    q = torch.randn(0, 4, 9, 16, requires_grad=True)
    y = masked_attention(q, q[:, :2], q[:, :2])
    assert y.shape == (0, 9, 4, 16)
    y.sum().backward()
    assert masked_attention(q, q[:, :2], q[:, :2, :, :8]).shape == (0, 9, 4, 8)
    assert masked_attention(q[..., :8], q[:, :2, :, :8], q[:, :2]).shape == (0, 9, 4, 16)
    q, v = torch.randn(3, 4, 1, 16), torch.randn(3, 2, 1, 16)
    torch.testing.assert_close(masked_attention(q, v, v), v.repeat_interleave(2, 1).transpose(1, 2))


@pytest.mark.parametrize("known", ["_FLASH", "_CUDNN", "_EFFICIENT"])
def test_what_is_called_in_pytorch_is_as_it_was(known: str) -> None:
    where = efficient if known == "_EFFICIENT" else flash
    asks = {"_FLASH": flash.is_known, "_CUDNN": flash.cudnn_is_known, "_EFFICIENT": efficient.is_known}[known]
    assert asks()
    with pytest.MonkeyPatch.context() as patch:
        function, names, *rest = getattr(where, known)[1]
        patch.setattr(where, known, ((function, f"{names} more", *rest),))
        asks.cache_clear()
        assert not asks()
    asks.cache_clear()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k": torch.randn(2, 3, 9, 16)}, "queries, keys and values are of other shapes"),
        ({"q": torch.randn(4, 9, 16)}, "queries, keys and values are of other shapes"),
        ({"v": torch.randn(2, 2, 8, 24)}, "queries, keys and values are of other shapes"),
        ({"v": torch.randn(2, 2, 9, 16).double()}, "of different types or devices"),
        ({"segments": Segments(torch.zeros(3, 2, dtype=torch.int32), 9)}, r"cuts are torch.int32 of shape \[3, 2\]"),
        ({"segments": Segments(torch.zeros(2, 2), 9)}, "cuts are torch.float32"),
        ({"segments": Segments(torch.zeros(4, 2, dtype=torch.int32), 9, causal=False)}, r"shape \[4, 2\].*0 or 2, N"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    tensors = {"q": torch.randn(2, 4, 9, 16), **{name: torch.randn(2, 2, 9, 16) for name in ("k", "v")}}
    with pytest.raises(ValueError, match=f"masked_attention: .*{said}"):
        masked_attention(**{**tensors, **changes})
