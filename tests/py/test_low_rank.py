"""What the gradient of an adapter's second product leaves: against float64, as two products have it, on every device at
hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bastile.ops._glu import UNITS, unit_of
from bastile.ops.low_rank import (
    backward,
    backward_into,
    dx_into,
    glu_backward,
    input_gradient,
    linear_into,
    low_rank_backward,
)
from oracle import DTYPES, EMULATED, LUCK, devices, few_examples, random_tensor


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


# What gate's and up's adapters are, down's, and what of the unit's result is wanted: da_down, thin_down, y.
AROUND_A_UNIT = [
    ((130, 600, 16), (True, False, False)),
    ((70, 136, 8), (True, True, False)),
    ((100, 264, 24), (False, False, True)),
    ((65, 520, 32), (True, True, True)),
    ((37, 39, 16), (True, False, False)),
    ((20, 40, 5), (True, True, True)),
]


class AroundAUnit:
    """The tensors of one call, and a copy of them for each way."""

    def __init__(self, shape, wants, dtype, device):
        rows, columns, self.rank = shape
        self.wants, self.scales = wants, (0.75, -1.5)
        self.unit = [random_tensor((rows, columns), dtype, device) for _ in range(3)]  # dy, gate, up
        self.thin = random_tensor((rows, 2 * self.rank), dtype, device)
        self.b = [random_tensor((columns, self.rank), dtype, device) for _ in range(2)]
        self.g_down = random_tensor((rows, self.rank), dtype, device)
        self.a_down = random_tensor((self.rank, columns), dtype, device)

    def together(self, unit):
        """dgate, dup, g, db_gate, db_up, and what is wanted of da_down, thin_down, y."""
        dy, gate, up = [t.clone() for t in self.unit]
        da_down, thin_down, y = self.wants
        given = self.g_down if da_down else None, self.a_down if thin_down else None
        g = torch.full_like(self.thin, math.nan)
        *found, da, thin = glu_backward(
            *unit.apart, *self.scales, dy, gate, up, self.thin, *self.b, *given, g, y, da_down, thin_down
        )
        made = [t for t, wanted in zip((da, thin, dy), self.wants, strict=True) if wanted]
        return [gate, up, g, *found, *made]

    def one_by_one(self, unit, multiply=torch.matmul):
        dy, gate, up = [t.clone() for t in self.unit]
        unit.backward_inplace(dy, gate, up, True, True, True)
        halves = self.thin.chunk(2, 1)
        g = [multiply(d, b) * s for d, b, s in zip((gate, up), self.b, self.scales, strict=True)]
        db = [multiply(d.t(), t) * s for d, t, s in zip((gate, up), halves, self.scales, strict=True)]
        of_y = multiply(self.g_down.t(), dy), multiply(dy, self.a_down.t()), dy
        made = [t for t, wanted in zip(of_y, self.wants, strict=True) if wanted]
        return [gate, up, torch.cat(g, 1), *db, *made]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "wants"), AROUND_A_UNIT, ids=str)
def test_around_a_unit(shape, wants, dtype, device):
    """The unit's results to the bit of its own operator; products no further from float64 than PyTorch's."""
    call, unit = AroundAUnit(shape, wants, dtype, device), unit_of("test", "silu")
    found, theirs = call.together(unit), call.one_by_one(unit)
    exact = call.one_by_one(unit, lambda x, y: x.double() @ y.double())
    for i, (got, right, other) in enumerate(zip(found, exact, theirs, strict=True)):
        assert got.shape == right.shape
        if i < 2 or (wants[2] and i == len(found) - 1):
            assert torch.equal(got, right)
        else:
            assert error(got, right) <= 1.02 * error(other, right) + 4e-7
    assert all(map(torch.equal, found, call.together(unit)))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("activation", UNITS)
def test_around_any_unit(activation, device):
    call = AroundAUnit((40, 72, 16), (True, False, True), torch.bfloat16, device)
    for unit in (unit_of("test", activation), unit_of("test", activation, limit=0.5)):
        found, theirs = call.together(unit), call.one_by_one(unit)
        assert torch.equal(found[0], theirs[0])
        assert torch.equal(found[1], theirs[1])
        assert torch.equal(found[-1], theirs[-1])
        for got, other in zip(found[2:-1], theirs[2:-1], strict=True):
            torch.testing.assert_close(got.to(other.dtype), other)  # two roundings of bfloat16


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
def test_around_a_unit_beyond_32_bits():
    """The last row alone has a gradient."""
    rows, columns, rank = 180_000, 12_288, 16
    dy, up = (torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    gate = torch.ones_like(dy)
    dy[-1], up[-1] = 2, 3
    thin, g_down = (random_tensor((rows, n), torch.bfloat16, "cuda") for n in (2 * rank, rank))
    b = [random_tensor((columns, rank), torch.bfloat16, "cuda") for _ in range(2)]
    last = [t[-1:].clone() for t in (dy, gate, up)]
    unit, g = unit_of("test", "silu"), torch.empty_like(thin)
    db_gate, db_up, da, _ = glu_backward(
        *unit.apart, 1.0, 1.0, dy, gate, up, thin, *b, g_down, None, g, False, True, False
    )
    unit.backward_inplace(*last, True, True, True)
    y, dgate, dup = last
    assert torch.equal(gate[-1:], dgate)
    assert torch.equal(up[-1:], dup)
    assert not gate[:-1].any()
    assert not g[:-1].any()
    torch.testing.assert_close(g[-1:], torch.cat([dgate @ b[0], dup @ b[1]], 1))
    assert torch.equal(db_gate, dgate.t().float() * thin[-1:, :rank].float())
    assert torch.equal(db_up, dup.t().float() * thin[-1:, rank:].float())
    assert torch.equal(da, g_down[-1:].t().float() * y.float())


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


def linear(shape, rank, dtype, device):
    rows, width, columns = shape
    x, weight = random_tensor((rows, width), dtype, device), random_tensor((columns, width), dtype, device)
    thin = random_tensor((rows, rank + 16), dtype, device)[:, 8 : 8 + rank]
    b = random_tensor((columns, rank), dtype, device)
    return x, weight * width**-0.5, thin, b


def exact_linear(x, weight, thin, b, bias, scale):
    y = x.double() @ weight.double().t() + scale * (thin.double() @ b.double().t())
    return y if bias is None else y + bias.double()


def two_products(x, weight, thin, b, scale):
    return (thin @ b.t()).mul_(scale).addmm_(x, weight.t())


def layers_apart(x, weight, thin, b, bias, scale):
    """As modules of their own compute them."""
    return torch.nn.functional.linear(x, weight, bias) + (thin @ b.t()) * scale


def bias_of(shape, dtype, device, has_bias):
    return random_tensor((shape[2],), dtype, device) if has_bias else None


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer_with_its_adapter(has_bias, dtype, device):
    for shape, rank in (((37, 40, 24), 16), ((30, 33, 17), 5), ((0, 8, 8), 8), ((9, 8, 16), 0)):
        given = *linear(shape, rank, dtype, device), bias_of(shape, dtype, device, has_bias)
        y = torch.full((shape[0], shape[2] + 8), math.nan, dtype=dtype, device=device)
        linear_into(*given, y[:, : shape[2]], -0.75)
        right = exact_linear(*given, -0.75)
        # Without a bias the fallback is these very products. With one cuBLAS rounds once more than where a product
        # begins with a bias, 1.2 x the error in 16 bits: no more than the layers apart, and then luck of so many.
        other = layers_apart(*given, -0.75) if has_bias else two_products(*given[:4], -0.75)
        near = math.exp(LUCK / max(1, right.numel()) ** 0.5) if has_bias else 1.02
        if has_bias and not rank and device == "cuda":  # rounded twice where the layer alone is once
            near *= 2**0.5
        assert error(y[:, : shape[2]], right) <= near * error(other, right) + 4e-7
        assert y[:, shape[2] :].isnan().all()


# Tiles that fill the chip, all of them whole or not; ranks of one to four sixteens; pieces of x that are not whole.
FULL = [((2048, 4096, 2048), 16), ((2000, 136, 2040), 8), ((8188, 1024, 3072), 40), ((1990, 72, 2040), 64)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize(("shape", "rank"), FULL, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_cuda_linear_layers_that_fill_the_chip(has_bias, shape, rank, scale, dtype):
    """Rounded once: no further from float64 than what is rounded once, and nearer than two products."""
    given = *linear(shape, rank, dtype, "cuda"), bias_of(shape, dtype, "cuda", has_bias)
    wide = torch.full((shape[0], shape[2] + 8), math.nan, dtype=dtype, device="cuda")
    y = wide[:, : shape[2]]
    linear_into(*given, y, scale)
    right = exact_linear(*given, scale)
    other = layers_apart(*given, scale) if has_bias else two_products(*given[:4], scale)
    assert wide[:, shape[2] :].isnan().all()
    if torch.cuda.get_device_capability() == (9, 0):
        assert error(y, right) <= 1.002 * error(right.to(dtype), right)
        assert error(y, right) < error(other, right)
    else:
        assert error(y, right) <= 1.02 * error(other, right)
    first = y.clone()
    for _ in range(5):
        linear_into(*given, y, scale)
        assert torch.equal(y, first)


def gradients(rows, width, columns, rank, dtype, device):
    """Of layers of so many columns each, in memory with gaps: dy and weight of each, g and a."""
    dys = [random_tensor((rows, n + 8), dtype, device)[:, :n] for n in columns]
    weights = [random_tensor((n, width), dtype, device) * max(n, 1) ** -0.5 for n in columns]
    g, a = random_tensor((rows, rank), dtype, device), random_tensor((rank, width + 8), dtype, device)[:, :width]
    return dys, weights, g * 0.1, a


def dx_of(dys, weights, g, a, dx):
    pairs = [t for pair in zip(dys, weights, strict=True) for t in pair]
    dx_into(*pairs, *[None] * (8 - len(pairs)), g, a, dx)


def exact_dx(dys, weights, g, a):
    dx = sum(dy.double() @ w.double() for dy, w in zip(dys, weights, strict=True))
    return dx if g is None else dx + g.double() @ a.double()


def dx_by_products(dys, weights, g, a):
    dx = torch.zeros(dys[0].shape[0], weights[0].shape[1], dtype=dys[0].dtype, device=dys[0].device)
    if g is not None:
        dx.addmm_(g, a)
    for dy, w in zip(dys, weights, strict=True):
        dx.addmm_(dy, w)
    return dx


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adapter", [True, False])
def test_the_gradient_of_layers_input(adapter, dtype, device):
    for rows, width, columns, rank in (
        (37, 24, (40, 8, 16), 16),
        (30, 33, (17,), 5),
        (0, 8, (8,), 8),
        (9, 8, (0, 3), 0),
    ):
        dys, weights, *thin = gradients(rows, width, columns, rank, dtype, device)
        g, a = thin if adapter else (None, None)
        wide = torch.full((rows, width + 8), math.nan, dtype=dtype, device=device)
        dx_of(dys, weights, g, a, wide[:, :width])
        right = exact_dx(dys, weights, g, a)
        assert error(wide[:, :width], right) <= 1.02 * error(dx_by_products(dys, weights, g, a), right) + 4e-7
        assert wide[:, width:].isnan().all()


# Tiles that fill the chip, all of them whole or not: one layer to four, of pieces that are not whole; ranks within a
# piece and beyond it.
FULL_DX = [
    ((2048, 2048, (4096,)), 16),
    ((2000, 2040, (136, 72, 64)), 40),
    ((8188, 3072, (1032, 264)), 72),
    ((1990, 2040, (8, 72, 200, 64)), 136),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize(("shape", "rank"), FULL_DX, ids=str)
def test_cuda_gradients_of_input_that_fill_the_chip(shape, rank, adapter, dtype):
    """Rounded once: no further from float64 than what is rounded once, and nearer than products that are added up."""
    dys, weights, *thin = gradients(*shape, rank, dtype, "cuda")
    g, a = thin if adapter else (None, None)
    wide = torch.full((shape[0], shape[1] + 8), math.nan, dtype=dtype, device="cuda")
    dx = wide[:, : shape[1]]
    dx_of(dys, weights, g, a, dx)
    right = exact_dx(dys, weights, g, a)
    other = dx_by_products(dys, weights, g, a)
    assert wide[:, shape[1] :].isnan().all()
    if torch.cuda.get_device_capability() == (9, 0):
        assert error(dx, right) <= 1.002 * error(right.to(dtype), right)
        assert error(dx, right) < error(other, right) or len(dys) + adapter == 1
    else:
        assert error(dx, right) <= 1.02 * error(other, right)
    first = dx.clone()
    for _ in range(5):
        dx_of(dys, weights, g, a, dx)
        assert torch.equal(dx, first)


def test_gradients_of_input_on_cpu_are_products_of_their_own():
    assert input_gradient(*gradients(16, 16, (8, 8), 8, torch.bfloat16, "cpu")) is None


def other_class(weight):
    return weight.as_subclass(type("Other", (torch.Tensor,), {}))


SERVED = [{}, {"dtype": torch.float16}, {"columns": (8,)}, {"adapter": False}, {"columns": (8,) * 4}]
# float32, what is no sum, too many, no multiples of 8, another type, layout or class.
NOT_SERVED = [
    {"dtype": torch.float32},
    {"columns": (8,), "adapter": False},
    {"columns": (8,) * 5},
    {"columns": (8, 9)},
    {"width": 20},
    {"rank": 5},
    {"change": torch.Tensor.half},
    {"change": lambda w: w.t().contiguous().t()},
    {"change": other_class},
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("options", "served"), [(o, True) for o in SERVED] + [(o, False) for o in NOT_SERVED])
def test_cuda_gradients_of_input_that_are_one_product(options, served):
    chosen = {
        "columns": (8, 8),
        "width": 16,
        "rank": 8,
        "dtype": torch.bfloat16,
        "adapter": True,
        "change": None,
    } | options
    given = gradients(16, chosen["width"], chosen["columns"], chosen["rank"], chosen["dtype"], "cuda")
    dys, weights, *thin = given
    g, a = thin if chosen["adapter"] else (None, None)
    changed = weights if chosen["change"] is None else [chosen["change"](w) for w in weights]
    dx = input_gradient(dys, changed, g, a)
    assert (dx is not None) == served
    if served:
        assert error(dx, exact_dx(dys, weights, g, a)) < 4 * torch.finfo(dx.dtype).eps
