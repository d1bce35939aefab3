"""Attention of one query a row: against float64, with PyTorch's `scaled_dot_product_attention` as the yardstick, as an
operator on every device at hand, and in the attention that models call, where the CPU stands for a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from bastile.models import sdpa
from bastile.ops import _token_attention
from bastile.ops._token_attention import serves_token, token_attention
from oracle import DTYPES, EMULATED, assert_same_bits, devices, far_apart, few_examples, random_tensor

ATTEND = torch.ops.bastile.token_attention.default
each_device = pytest.mark.parametrize("device", devices())


def drawn(
    rows: int, heads: int, groups: int, keys: int, dim: int, dtype: torch.dtype, device: str, unseen: bool = True
) -> tuple[torch.Tensor, ...]:
    """q, k, v and a bias that hides some keys, of which there is nothing to be read."""
    q = random_tensor((rows, heads, dim), dtype, device, scale=2.0)
    k, v = (random_tensor((rows, groups, keys, dim), dtype, device) for _ in range(2))
    bias = random_tensor((rows, keys), dtype, device)
    if unseen:
        hidden = (
            torch.arange(keys, device=device).expand(rows, -1) % 5 == torch.arange(rows, device=device)[:, None] % 5
        )
        hidden = hidden & (torch.arange(keys, device=device) > 0)
        bias = bias.masked_fill(hidden, -torch.inf)
    return q, k, v, bias


def stock(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float | None = None
) -> Any:
    """As Transformers has it, each head's keys beside it."""
    each = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    mask = None if bias is None else bias[:, None, None]
    return scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, scale=scale)[:, :, 0]


def error(y: torch.Tensor, right: torch.Tensor) -> float:
    return float((y.double() - right).square().mean().sqrt())


def is_served(dtype: torch.dtype, dim: int, device: str) -> bool:
    """CUDA has 16 bits, and heads of multiples of 8, aligned."""
    return (device == "cpu" and not EMULATED) or (dtype is not torch.float32 and dim % 8 == 0)


def assert_no_worse(given_: tuple[torch.Tensor, ...], scale: float | None = None) -> None:
    q = given_[0]
    right = stock(*[t.double() for t in given_], scale=scale)
    if not is_served(q.dtype, q.shape[2], q.device.type):
        with pytest.raises(RuntimeError, match="on CUDA multiples of 8 up to 256 of bfloat16 or float16 are supported"):
            ATTEND(*given_, scale or 0.0)
        return
    y = ATTEND(*given_, scale or 0.0)
    assert y.dtype is given_[0].dtype
    assert y.is_contiguous()
    most = error(stock(*given_, scale=scale), right)
    assert error(y, right) <= 1.1 * most + 1e-7 * float(right.abs().max())
    assert_same_bits(y, ATTEND(*given_, scale or 0.0))


@each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "groups", "keys", "dim"),
    [
        (8, 16, 8, 208, 128),
        (3, 14, 2, 300, 64),
        (2, 32, 8, 1100, 128),  # in parts
        (1, 8, 4, 2500, 256),
        (2, 22, 2, 70, 96),  # more heads share keys than a block has
        (5, 4, 4, 1, 64),
        (2, 3, 1, 33, 37),  # nothing is aligned
    ],
)
def test_errors_are_no_larger_than_pytorchs(
    rows: int, heads: int, groups: int, keys: int, dim: int, dtype: torch.dtype, device: str
) -> None:
    assert_no_worse(drawn(rows, heads, groups, keys, dim, dtype, device))
    q, k, v, bias = drawn(rows, heads, groups, keys, dim, dtype, device, unseen=False)
    assert_no_worse((q, k, v, bias), scale=0.3)
    wide = torch.cat([q, q], 1)[:, :heads], torch.cat([k, k], 2)[:, :, :keys], torch.cat([v] * 2, 3)[..., :dim], bias
    assert_no_worse(wide)  # type: ignore[arg-type]


@each_device
@few_examples
@given(
    rows=st.integers(1, 4),
    groups=st.integers(1, 4),
    each=st.integers(1, 9),
    keys=st.integers(1, 600),
    dim=st.sampled_from([1, 8, 30, 64, 80, 128]),
    dtype=st.sampled_from(DTYPES),
    unseen=st.booleans(),
)
def test_shapes(
    device: str, rows: int, groups: int, each: int, keys: int, dim: int, dtype: torch.dtype, unseen: bool
) -> None:
    """By what roundings can be worth: of few numbers one may be luckier than the other. Tensor cores multiply weights
    that are rounded."""
    if not is_served(dtype, dim, device):
        return
    q, k, v, bias = drawn(rows, groups * each, groups, keys, dim, dtype, device, unseen)
    right = stock(*[t.double() for t in (q, k, v, bias)])
    score = float(q.abs().max() * k.abs().max()) * dim**0.5 + 4
    of_sums = (keys + dim + 16 + (dim + 4) * score) * 2**-23 * float(v.abs().max())
    of_weights = torch.finfo(dtype).eps / 2 * stock(q.double(), k.double(), v.double().abs(), bias.double())
    most = torch.finfo(dtype).eps / 2 * right.abs() + of_sums + of_weights
    assert bool(((ATTEND(q, k, v, bias, 0.0).double() - right).abs() <= most).all())


@each_device
def test_nothing_to_see(device: str) -> None:
    q, k, v, bias = drawn(3, 4, 2, 40, 64, torch.bfloat16, device)
    bias[1] = -torch.inf
    k[1], v[1] = torch.nan, torch.nan
    y = ATTEND(q, k, v, bias, 0.0)
    assert not y[1].any()
    assert y[[0, 2]].any(-1).all()
    assert not y.isnan().any()
    assert not ATTEND(q, k[:, :, :0], v[:, :, :0], bias[:, :0], 0.0).any()
    assert ATTEND(q[:0], k[:0], v[:0], None, 0.0).shape == (0, 4, 64)
    v[0, 0, 0] = torch.nan  # which is seen
    assert ATTEND(q, k, v, bias, 0.0)[0, :2].isnan().all()


@each_device
def test_offsets_have_64_bits(device: str) -> None:
    q, k, v, bias = drawn(2, 4, 2, 40, 64, torch.bfloat16, device)

    def apart(t: torch.Tensor) -> torch.Tensor:
        if device == "cpu":
            return far_apart(t)
        memory = torch.empty(2**32 + t.numel(), dtype=t.dtype, device=device)
        return memory.as_strided(t.shape, (2**32, *t.stride()[1:])).copy_(t)

    assert_same_bits(ATTEND(q, apart(k), apart(v), bias, 0.0), ATTEND(q, k, v, bias, 0.0))


# ---- in models ------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As if tensors were a GPU's. Counts calls."""
    calls: list[int] = []
    monkeypatch.setattr(_token_attention, "on_gpu", lambda t: True)
    monkeypatch.setattr(_token_attention, "_attend", lambda *given: (calls.append(1), ATTEND(*given))[1])
    return calls


def attention(original: Any = None) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa._attends(original or sdpa_attention_forward)


@pytest.mark.parametrize("device", devices())
def test_the_attention_that_models_call(device: str, on_gpu: list[int]) -> None:
    q, k, v, bias = drawn(3, 6, 2, 40, 64, torch.bfloat16, device)
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    with torch.no_grad():
        y, weights = attention()(module, q[:, :, None], k, v, bias[:, None, None], scaling=0.2)
        want = stock(*[t.double() for t in (q, k, v, bias)], scale=0.2)
        assert y.shape == (3, 1, 6, 64)
        assert weights is None
        assert error(y[:, 0], want) <= 1.1 * error(stock(q, k, v, bias, scale=0.2), want)
        assert on_gpu == [1]
        one = attention()(module, q[:, :, None], k, v, bias[:1, None, None])[0]  # one mask for all rows
        assert_same_bits(one, token_attention(q[:, :, None], k, v, bias[:1, None, None]))
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            cast = attention()(module, q[:, :, None].float(), k.float(), v, bias[:, None, None], scaling=0.2)[0]
        assert_same_bits(cast, y)


def test_calls_that_do_not(on_gpu: list[int]) -> None:
    """With gradients, of several tokens, without a mask or with one of booleans, of float32 or wide heads, with
    dropout, a bias of each head's own, other numbers of heads than the module says."""
    q, k, v, bias = drawn(2, 4, 2, 10, 64, torch.bfloat16, "cpu")
    q, bias = q[:, :, None], bias[:, None, None]
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    attend = attention()
    attend(module, q, k, v, bias)
    with torch.no_grad():
        attend(module, q.expand(-1, -1, 3, -1), k, v, bias.expand(-1, -1, 3, -1))
        attend(module, q, k, v, None)
        attend(module, q, k, v, bias == 0)
        attend(module, *[t.float() for t in (q, k, v, bias)])
        attend(module, q, k, v, bias, dropout=0.5)
        attend(module, q, k, v, bias.expand(-1, 4, -1, -1))
        attend(SimpleNamespace(num_key_value_groups=1), q[:, :2], k[:, :1].expand(-1, 2, -1, -1)[:, :2], v, bias)
        on_gpu.clear()
        for wrong in (q.float(), q.expand(-1, -1, -1, 64)[..., :32]):
            assert not serves_token(wrong, k, v, bias)
        assert not serves_token(q, k, v.transpose(2, 3).contiguous().transpose(2, 3), bias)
        assert not serves_token(*[torch.zeros(2, 2, 1, 264, dtype=torch.bfloat16)] * 3, bias)
        assert not serves_token(q[:, :2], k, v, bias)  # narrow heads with keys of their own
        assert serves_token(*[torch.zeros(2, 2, 1, 128, dtype=torch.bfloat16)] * 3, bias[..., :1])
        odd = [torch.zeros(2, heads, 1, 68, dtype=torch.bfloat16) for heads in (4, 2, 2)]
        assert not serves_token(*odd, bias[..., :1])
        moved = torch.zeros(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
        assert not serves_token(q, moved, v, bias)
        assert serves_token(q, k, v, bias)
    assert not on_gpu
