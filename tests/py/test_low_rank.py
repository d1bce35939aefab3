"""What the gradient of an adapter's second product leaves: against float64, as two products have it, on every device at
hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bastile.ops.low_rank import backward, backward_into, low_rank_backward
from oracle import DTYPES, EMULATED, devices, few_examples, random_tensor


def exact(dy, thin, b, scale):
    return scale * (dy.double() @ b.double()), scale * (dy.double().t() @ thin.double())


def products(dy, thin, b, scale):
    """PyTorch's, in the types that adapters have: g as dy, db in float32."""
    return (dy @ b).mul_(scale), (dy.t() @ thin).float().mul_(scale)


def error(got, want):
    return (got.double() - want).norm() / want.norm().clamp(min=1e-30)


# All that the kernel has, within a tile and beyond it; what two products do.
SHAPES = [
    (37, 40, 16),
    (130, 136, 8),
    (150, 264, 24),
    (200, 520, 32),
    (20, 39, 16),
    (20, 40, 5),
    (20, 40, 48),
    (1, 1, 1),
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_further_from_float64_than_two_products(shape, dtype, device):
    rows, columns, rank = shape
    dy, b = random_tensor((rows, columns), dtype, device), random_tensor((columns, rank), dtype, device)
    thin = random_tensor((rows, rank + 8), dtype, device)[:, :rank]
    found, want = low_rank_backward(dy, thin, b, 0.75), exact(dy, thin, b, 0.75)
    for got, right, theirs in zip(found, want, products(dy, thin, b, 0.75), strict=True):
        assert got.shape == right.shape
        # One sum in another order is worth a few roundings.
        assert error(got, right) <= 1.02 * error(theirs, right) + 4e-7
    assert (found[0].dtype, found[1].dtype) == (dtype, torch.float32)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_into_a_part_of_a_tensor(dtype, device):
    dy, thin, b = (random_tensor(shape, dtype, device) for shape in ((140, 72), (140, 16), (72, 16)))
    wide = torch.full((140, 48), 7.0, dtype=dtype, device=device)
    db = backward_into(dy, thin, b, wide[:, 16:32], 2.0)
    g, same = backward(dy, thin, b, 2.0)
    assert torch.equal(wide[:, 16:32], g)
    assert torch.equal(db, same)
    assert (wide[:, :16] == 7).all()
    assert (wide[:, 32:] == 7).all()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_nothing(dtype, device):
    for rows, columns in ((0, 40), (9, 0), (0, 0)):
        dy, thin, b = (random_tensor(shape, dtype, device) for shape in ((rows, columns), (rows, 16), (columns, 16)))
        g, db = low_rank_backward(dy, thin, b)
        assert g.shape == (rows, 16)
        assert db.shape == (columns, 16)
        assert not g.any()
        assert not db.any()


@few_examples
@given(st.integers(0, 300), st.integers(0, 40), st.integers(1, 6), st.sampled_from(DTYPES), st.floats(-3, 3))
def test_any_size(rows, eighths, rank, dtype, scale):
    device = devices()[-1]
    rank *= 8 if dtype is not torch.float32 else 3
    dy, thin, b = (random_tensor(s, dtype, device) for s in ((rows, 8 * eighths), (rows, rank), (8 * eighths, rank)))
    for got, right in zip(low_rank_backward(dy, thin, b, scale), exact(dy, thin, b, scale), strict=True):
        # Of g at most half a unit of each number, beside the sums' own roundings.
        unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 0}[dtype] if got.dtype is dtype else 0
        size = dy.abs().double().max().item() * 4 * abs(scale) if dy.numel() else 0.0
        assert (
            (got.double() - right).abs() <= unit * right.abs() + 2e-7 * (1 + size) * max(rows, 8 * eighths) + 1e-7
        ).all()


@pytest.mark.parametrize("device", devices())
def test_the_same_bits_again(device):
    dy, thin, b = (random_tensor(shape, torch.bfloat16, device) for shape in ((300, 264), (300, 16), (264, 16)))
    first = low_rank_backward(dy, thin, b)
    for _ in range(2 if EMULATED else 5):
        assert all(map(torch.equal, first, low_rank_backward(dy, thin, b)))


def test_what_is_no_plain_tensor_of_floats():
    x = torch.ones(4, 4, dtype=torch.float64)
    g, db = low_rank_backward(x, x, x, 0.5)
    assert torch.equal(g, 2 * x)
    assert torch.equal(db, 2 * x)
    with pytest.raises(TypeError, match=r"low_rank_backward: dy is torch\.int64"):
        low_rank_backward(x.long(), x, x)
    with pytest.raises(RuntimeError, match="b has shape"):
        low_rank_backward(x.float(), x.float(), torch.ones(3, 4))


def test_compiled():
    dy, thin, b = (random_tensor(shape, torch.bfloat16, "cpu") for shape in ((30, 24), (30, 8), (24, 8)))
    compiled = torch.compile(low_rank_backward, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(dy, thin, b), low_rank_backward(dy, thin, b)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_beyond_32_bits():
    """More than 2^31 elements of dy: the last rows and columns are read."""
    dy = torch.zeros(180_000, 12_288, dtype=torch.bfloat16, device="cuda")
    thin, b = (random_tensor(shape, torch.bfloat16, "cuda") for shape in ((180_000, 16), (12_288, 16)))
    dy[-1, -1] = 2
    g, db = low_rank_backward(dy, thin, b)
    assert torch.equal(g[-1], 2 * b[-1])
    assert not g[:-1].any()
    assert torch.equal(db[-1], 2 * thin[-1].float())
    assert not db[:-1].any()
