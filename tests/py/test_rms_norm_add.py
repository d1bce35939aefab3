"""The residual behind an RMSNorm, added in one pass: against float64; the yardstick is what OLMo 2's layers run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bastile.ops.rms_norm import rms_norm, rms_norm_add
from oracle import (
    DTYPES,
    EMULATED,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    devices,
    devices_and_types,
    few_examples,
    random_tensor,
)
from test_rms_norm import EPS, exact, stock

CASTINGS = ["llama", "gemma", "none"]


def random_case(shape, dtype, device, casting, weight_type=None) -> Case:
    x, residual = (random_tensor(shape, dtype, device, scale=2.0) for _ in range(2))
    offset = 0.0 if casting == "gemma" else 1.0
    weight = random_tensor(shape[-1:], weight_type or dtype, device, offset=offset)
    narrow = x.numel() and shape[-1] < 4  # as for rms_norm
    terms = ((1 + weight.double().abs().max()) / x.double().abs().min().clamp_min(1e-3)).item() if narrow else 0.0
    return Case(
        ours=lambda x, r, w: rms_norm_add(x, r, w, EPS, casting=casting),
        stock=lambda x, r, w: r + stock(x, w, casting),
        exact=lambda x, r, w: r + exact(x, w, casting),
        inputs={"x": x, "residual": residual, "weight": weight},
        terms={"dx": terms},
    )


# A row, a few, one element a row, none; odd widths; more than the forward kernel's registers hold.
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 100), (5, 1), (0, 8), (3, 4097), (1, 65536)], ids=str)
def test_matches_float64_as_well_as_stock(shape, casting, dtype, device):
    if EMULATED and shape[-1] > 60000 and casting != "llama":
        pytest.skip("the widest rows once, thread by thread")
    assert_no_worse(random_case(shape, dtype, device, casting))


@pytest.mark.parametrize(("device", "dtype"), devices_and_types())
@pytest.mark.parametrize("casting", CASTINGS)
def test_pooled_error_is_no_larger(casting, device, dtype):
    assert_no_worse_pooled(lambda: random_case((8, 512) if EMULATED else (64, 512), dtype, device, casting))


@few_examples
@given(
    rows=st.integers(0, 9),
    hidden=st.integers(1, 700),
    dtype=st.sampled_from(DTYPES),
    casting=st.sampled_from(CASTINGS),
    device=st.sampled_from(devices()),
)
def test_any_shape(rows, hidden, dtype, casting, device):
    assert_no_worse(random_case((rows, hidden), dtype, device, casting))


@pytest.mark.parametrize("device", devices())
def test_layouts_types_and_what_is_frozen(device):
    """Tokens that lie apart and rows that are not aligned give the bits of dense ones; a float32 weight that promotes
    the norm's result leaves the addition to torch; each gradient alone is that of all together."""
    x, residual, weight, upstream = (
        random_tensor(s, torch.bfloat16, device) for s in [(4, 6, 40)] * 2 + [(40,), (4, 6, 40)]
    )
    dense = rms_norm_add(x, residual, weight, EPS)
    wide = torch.empty(4, 6, 81, dtype=torch.bfloat16, device=device)[..., 1:41]
    turned = residual.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(rms_norm_add(wide.copy_(x), turned, weight, EPS), dense)
    assert dense.is_contiguous()
    wide_weight = weight.float()
    assert torch.equal(rms_norm_add(x, residual, wide_weight, EPS), residual + rms_norm(x, wide_weight, EPS))
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    every = torch.autograd.grad(rms_norm_add(*leaves, EPS), leaves, upstream)
    assert torch.equal(every[1], upstream)
    for number, want in enumerate(every):
        given = [t if n == number else t.detach() for n, t in enumerate(leaves)]
        (got,) = torch.autograd.grad(rms_norm_add(*given, EPS), [given[number]], upstream)
        assert torch.equal(got, want)


def test_errors_name_the_argument():
    x, weight = torch.randn(2, 4), torch.randn(4)
    with pytest.raises(ValueError, match=r"rms_norm_add: residual has shape \[4\]; \[2, 4\], that of x, is needed"):
        rms_norm_add(x, x[0], weight)
    with pytest.raises(ValueError, match="rms_norm_add: casting is 'gemma9'"):
        rms_norm_add(x, x, weight, casting="gemma9")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="weight has shape"):
        rms_norm_add(x, x, weight[:3])
