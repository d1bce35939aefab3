"""LayerNorm of 16 bits with a result in float32, as autocast on CUDA has it, and of sums of two types: against float64,
where the yardstick is F.layer_norm of what was cast, and the sum as torch adds it."""

import pytest
import torch
from torch.nn.functional import layer_norm as stock

from bastile.ops.norm import add_layer_norm, layer_norm
from memory import Memory
from oracle import (
    EMULATED,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_same_bits,
    devices,
    random_tensor,
)
from test_rms_norm import SHAPES
from test_unaligned import unaligned

EPS = 1e-5
HALVES = [torch.bfloat16, torch.float16]
F32 = torch.float32


def widened(t: torch.Tensor | None) -> torch.Tensor | None:
    """As autocast casts: 16 bits, and nothing else."""
    return t if t is None or t.dtype.itemsize > 2 else t.float()


def cast(x, weight, bias):
    return stock(widened(x), x.shape[-1:], widened(weight), widened(bias), EPS)


def case(x, residual=None, weight=None, bias=None) -> Case:
    """What is None stays out of it."""
    given = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    names = [name for name, t in given.items() if t is not None]

    def of(norm, add):
        def run(*tensors):
            t = dict.fromkeys(given) | dict(zip(names, tensors, strict=True))
            columns = t["weight"], t["bias"]
            return norm(t["x"], *columns) if t["residual"] is None else add(t["x"], t["residual"], *columns)

        return run

    plain = of(cast, lambda x, residual, *columns: (cast(x + residual, *columns), x + residual))
    ours = of(
        lambda *tensors: layer_norm(*tensors, EPS, float32_output=True),
        lambda *tensors: add_layer_norm(*tensors, EPS, float32_output=True),
    )
    return Case(ours, plain, plain, inputs={name: given[name] for name in names})


def random_case(shape, dtype, device, *, add=None, columns=F32, leave="") -> Case:
    """add: the residual's type."""
    w, b = (
        None if name in leave else random_tensor(shape[-1:], columns, device, offset=offset)
        for name, offset in (("w", 1.0), ("b", 0.0))
    )
    x = random_tensor(shape, dtype, device, scale=2.0, offset=0.5)
    residual = None if add is None else random_tensor(shape, add, device, scale=2.0, offset=0.5)
    return case(x, residual, w, b)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("add", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_as_well_as_what_is_cast(shape, add, dtype, device):
    assert_no_worse(random_case(shape, dtype, device, add=dtype if add else None))


# Frozen bases of PEFT have weights of 16 bits; a norm without a weight has a bias of x's type.
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("columns", "leave"), [(torch.bfloat16, ""), (torch.float16, ""), (F32, "b"), (F32, "wb")])
@pytest.mark.parametrize("shape", [(6, 96), (5, 33)], ids=str)
def test_weights_of_any_type_or_none(shape, columns, leave, device):
    assert_no_worse(random_case(shape, torch.bfloat16, device, columns=columns, leave=leave))
    assert_no_worse(random_case(shape, torch.bfloat16, device, columns=torch.bfloat16, leave="w"))


# As in BERT's layers: a product's 16 bits and what runs from layer to layer in float32. 65536: its sum is read again.
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("types", [(h, F32) for h in HALVES] + [(F32, h) for h in HALVES], ids=str)
@pytest.mark.parametrize("shape", [(6, 48), (5, 37), (0, 48), (1, 48), (2, 65536)], ids=str)
def test_a_sum_of_two_types_in_one_pass(shape, types, device):
    made = random_case(shape, types[0], device, add=types[1])
    assert_no_worse(made)
    with Memory() as memory:
        y, total = made.ours(*made.inputs.values())
    assert memory.calls.count("bastile.add_norm_forward.default") == 1
    x, residual, *columns = made.inputs.values()
    assert_same_bits(total, x + residual)
    assert_same_bits(y, layer_norm(total, *columns, EPS))  # whose type is float32 either way
    assert_same_bits(add_layer_norm(*made.inputs.values(), EPS)[0], y)


@pytest.mark.parametrize("device", devices())
def test_two_types_that_promote_to_a_third_are_added_by_torch(device):
    assert_no_worse(random_case((3, 48), torch.bfloat16, device, add=torch.float16))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", HALVES)
def test_the_sum_is_rounded_before_it_is_normed(dtype, device):
    """As where torch adds outside of the norm."""
    x, residual = (random_tensor((4, 200), dtype, device, scale=3.0) for _ in range(2))
    y, total = add_layer_norm(x, residual, float32_output=True)
    assert (y.dtype, total.dtype) == (F32, dtype)
    assert_same_bits(total, x + residual)
    assert_same_bits(y, layer_norm(total, float32_output=True))
    assert (y - layer_norm(x.float() + residual.float())).abs().max() > 1e-4


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("columns", "add"), [(None, None), (None, "x"), (F32, None), (F32, "x"), (F32, F32)], ids=str)
def test_pooled_error_is_no_larger(columns, add, dtype, device):
    shape = (8, 512) if EMULATED else (64, 512)
    add = dtype if add == "x" else add
    names = () if device == "cpu" and not EMULATED else ("dx",)  # what is float32 shows that roots are the hardware's
    assert_no_worse_pooled(lambda: random_case(shape, dtype, device, add=add, columns=columns or dtype), names)


# As SigLIP's patches lie, [B, C, N] transposed; rows with gaps; an offset that vectors do not allow.
@pytest.mark.parametrize("device", devices())
def test_strides(device):
    base = random_tensor((2, 40, 24), torch.bfloat16, device)
    w, b = random_tensor((40,), F32, device), random_tensor((40,), F32, device)
    for x in (base.transpose(1, 2), base.transpose(0, 2)[::2, :, 0], random_tensor((6, 43), base.dtype, device)[:, 3:]):
        assert_no_worse(case(x, weight=w, bias=b))
        assert_no_worse(case(x, x.flip(0), w, b))
        assert_no_worse(case(x, x.float(), w, b))


def test_unaligned():
    x, w = random_tensor((5, 24), torch.bfloat16, "cpu"), random_tensor((24,), F32, "cpu")
    dy = random_tensor((5, 24), F32, "cpu")
    results = []
    for place in (lambda t: t, unaligned):
        leaves = [place(t).requires_grad_() for t in (x, w)]
        y = layer_norm(*leaves, float32_output=True)
        results.append((y, *torch.autograd.grad(y, leaves, place(dy))))
    for got, want in zip(*results, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("device", devices())
def test_the_same_bits_again_and_for_one_gradient(device):
    """dx, with what reaches the sum from elsewhere; dweight; dbias."""
    shape = (70, 128)
    given = [random_tensor(shape, torch.bfloat16, device) for _ in range(2)]
    given += [random_tensor(shape[-1:], F32, device) for _ in range(2)]
    upstream = [random_tensor(shape, F32, device), random_tensor(shape, torch.bfloat16, device)]

    def gradients(*wanted: int):
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(given)]
        outputs = add_layer_norm(*leaves, float32_output=True)
        return torch.autograd.grad(outputs, [leaves[i] for i in wanted], upstream)

    whole = gradients(0, 1, 2, 3)
    for again in (gradients(0, 1, 2, 3), [gradients(i)[0] for i in range(4)]):
        for got, want in zip(again, whole, strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("device", devices())
def test_what_is_no_float32_result_is_as_without(device):
    x, w = random_tensor((5, 24), F32, device), random_tensor((24,), F32, device)
    assert_same_bits(layer_norm(x, w, float32_output=True), layer_norm(x, w))
    assert layer_norm(x.double(), w.double(), float32_output=True).dtype is torch.float64  # torch's code
    with torch.device("meta"):
        meta = torch.empty(3, 8, dtype=torch.bfloat16)
    assert layer_norm(meta, float32_output=True).dtype is F32


@pytest.mark.parametrize("device", devices())
def test_bad_input_is_named(device):
    x, f = (torch.ones(2, 8, device=device, dtype=dtype) for dtype in (torch.bfloat16, F32))
    backward = torch.ops.bastile.norm_backward
    rows = torch.ones(2, device=device)
    for function, message in (
        (lambda: layer_norm(x, f[0], x[0], float32_output=True), "bias is bfloat16; float32 is needed"),
        (lambda: torch.ops.bastile.norm_forward(x, None, None, 0.0, 1, 4), r"casting is 4; .* or 3 \(float32\) is"),
        (lambda: backward(x, x, None, rows, rows, 1, 3, True, False, False), "dy is bfloat16; float32 is needed"),
        (lambda: backward(f, x, None, rows, rows, 1, 2, True, False, False), "dy is float32; bfloat16 is needed"),
        (lambda: add_layer_norm(f, x[:, :4], float32_output=True), "residual has shape"),
        (lambda: add_layer_norm(x[:, :4], f, float32_output=True), "residual has shape"),
    ):
        with pytest.raises(RuntimeError, match=message):
            function()


@pytest.mark.parametrize("device", devices())
def test_compiles_without_a_break(device):
    torch._dynamo.reset()
    w, b = (torch.ones(24, device=device, requires_grad=True) for _ in range(2))

    def function(x, wide):
        y = layer_norm(x * 2, w, b, float32_output=True)
        return sum(add_layer_norm(x, wide, w, b)) + y + sum(add_layer_norm(x, x * 3, w, b, float32_output=True))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves = [random_tensor((3, 24), dtype, device).requires_grad_() for dtype in (torch.bfloat16, F32)]
    want = torch.autograd.grad(function(*leaves).square().sum(), (*leaves, w, b))
    for got, expected in zip(torch.autograd.grad(compiled(*leaves).square().sum(), (*leaves, w, b)), want, strict=True):
        torch.testing.assert_close(got, expected)  # gradients of several uses are added in another order
