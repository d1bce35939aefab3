"""Gated units with every activation against float64, on every device at hand; torch's own code is the yardstick."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from bastile.ops import _glu
from bastile.ops._glu import Activation, unit_of
from bastile.ops.gated_mlp import gated_mlp
from bastile.ops.glu import _GLU, glu, glu_mlp
from oracle import (
    DTYPES,
    EMULATED,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_same_bits,
    devices,
    few_examples,
    random_tensor,
)


def gpt_oss(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Transformers' own code, which takes both in one tensor."""
    module = SimpleNamespace(limit=7.0, alpha=1.702)
    return GptOssExperts._apply_gate(module, torch.stack((gate, up), dim=-1).flatten(-2))


#: What torch computes, written as the models that use it write it.
STOCK = {
    "silu": lambda a, b: functional.silu(a) * b,
    "gelu_tanh": lambda a, b: functional.gelu(a, approximate="tanh") * b,
    "gelu": lambda a, b: functional.gelu(a) * b,
    "relu": lambda a, b: functional.relu(a) * b,
    "relu2": lambda a, b: functional.relu(a).square() * b,
    "swiglu_oai": gpt_oss,
}
each_activation = pytest.mark.parametrize("activation", STOCK)


def case(activation: str, a: torch.Tensor, b: torch.Tensor) -> Case:
    stock = STOCK[activation]
    return Case(ours=lambda a, b: glu(a, b, activation), stock=stock, exact=stock, inputs={"a": a, "b": b})


# Each shape has its reason.
SHAPES = [
    (3, 5, 256),  # ordinary: whole vectors
    (0, 8),  # no row
    (4, 0),  # no column
    (7, 1),  # the narrowest row
    (5, 33),  # odd: single-element accesses
    (3, 4098),  # 4-byte accesses, several blocks
    (17,),  # one dimension
]


@each_activation
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_as_well_as_torch(shape, dtype, device, activation):
    a, b = random_tensor(shape, dtype, device, scale=3.0), random_tensor(shape, dtype, device)
    assert_no_worse(case(activation, a, b))


@each_activation
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, -3.0])
def test_pooled_error_is_no_larger(offset, dtype, device, activation):
    """Gates on both sides of zero, and such that little is left of them."""
    shape = (8, 512) if EMULATED else (64, 512)
    assert_no_worse_pooled(
        lambda: case(
            activation, random_tensor(shape, dtype, device, offset=offset), random_tensor(shape, dtype, device)
        )
    )


ANY_SHAPE: dict[str, st.SearchStrategy] = {
    "rows": st.integers(0, 9),
    "columns": st.integers(1, 700),
    "dtype": st.sampled_from(DTYPES),
    "device": st.sampled_from(devices()),
    "scale": st.sampled_from([1e-3, 1.0, 50.0]),
    "wide": st.booleans(),
}


@few_examples
@given(activation=st.sampled_from(list(STOCK)), **ANY_SHAPE)
def test_any_shape(rows, columns, dtype, device, activation, scale, wide):
    """As two tensors, or as the halves of one."""
    if wide:
        a, b = random_tensor((rows, 2 * columns), dtype, device, scale=scale).chunk(2, dim=-1)
    else:
        a, b = (random_tensor((rows, columns), dtype, device, scale=scale) for _ in range(2))
    assert_no_worse(case(activation, a, b))


@each_activation
@pytest.mark.parametrize("device", devices())
def test_strided_inputs(device, activation):
    """Halves of one tensor, unaligned, transposed, and columns that need a copy: the bits of dense inputs."""
    base = random_tensor((4, 6, 5, 200), torch.bfloat16, device)
    pairs = [
        base.transpose(1, 2).chunk(2, dim=-1),
        (base[..., 3:67], base[..., 70:134]),
        (random_tensor((64, 5), torch.bfloat16, device).t(), random_tensor((5, 64), torch.bfloat16, device)),
    ]
    for a, b in pairs:
        dy = random_tensor((*a.shape[:-1], a.shape[-1] + 8), torch.bfloat16, device)[..., 8:]
        results = []
        for left, right, upstream in ((a, b, dy), (a.contiguous(), b.contiguous(), dy.contiguous())):
            left, right = left.detach().requires_grad_(), right.detach().requires_grad_()
            y = glu(left, right, activation)
            results.append([y.detach(), *torch.autograd.grad(y, (left, right), upstream)])
        for got, want in zip(*results, strict=True):
            assert_same_bits(got, want)


@each_activation
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_far_from_zero(dtype, device, activation):
    """Where exponentials overflow or vanish, and NaN. Of infinite gates torch's own values are NaN for some
    activations and the limit for others: y alone."""
    a = [-3e38, -1e20, -1e4, -104, -89, -88.5, -20, -14, -5, -0.0, 0.0, 5, 14, 20, 89, 1e4, 1e20, 3e38, torch.nan]
    a = torch.tensor([v for v in a if not abs(v) > torch.finfo(dtype).max], dtype=torch.float64)
    results = []
    for function, kind in ((lambda a, b: glu(a, b, activation), dtype), (STOCK[activation], torch.float64)):
        left = a.to(dtype).to(device).to(kind).requires_grad_()
        right = torch.ones_like(left, requires_grad=True)
        y = function(left, right)
        gradients = torch.autograd.grad(y, (left, right), torch.ones_like(y))
        results.append([t.detach().to(dtype) for t in (y, *gradients)])
    for got, want in zip(*results, strict=True):
        rounding = 4 if dtype is torch.float32 else 2
        torch.testing.assert_close(got, want, equal_nan=True, atol=2e-6, rtol=rounding * torch.finfo(dtype).eps)
    ends, ones = torch.tensor([-torch.inf, torch.inf]), torch.ones(2)
    low, high = glu(ends.to(device, dtype), ones.to(device, dtype), activation)
    torch.testing.assert_close(high.cpu(), STOCK[activation](ends.double(), ones.double())[1].to(dtype))
    assert low == 0 or low.isnan()  # torch: NaN where it multiplies by a zero


@each_activation
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [296, 301])
def test_all_forms_of_the_backward_pass(width, dtype, device, activation):
    """Each gradient alone, with y or without, over new memory or the inputs': the same bits; y those of forward."""
    unit = unit_of("glu", activation)
    dy, a, b = (random_tensor((3, width), dtype, device) for _ in range(3))
    y, (da, db) = unit.forward(a, b), unit.backward(dy, a, b, True, True)
    assert_same_bits(unit.backward(dy, a, b, True, False)[0], da)
    assert_same_bits(unit.backward(dy, a, b, False, True)[1], db)
    for want in ((True, True), (True, False), (False, True), (False, False)):
        for wanted, got, expected in zip(
            (*want, True), unit.backward_with_y(dy, a, b, *want), (da, db, y), strict=True
        ):
            if wanted:
                assert_same_bits(got, expected)
    unit.backward_inplace(dy, a, b, True, True, True)
    for got, expected in ((a, da), (b, db), (dy, y)):
        assert_same_bits(got, expected)


# ---- activations alone ----------------------------------------------------------------------------------------------

#: What the models' MLPs call.
ALONE = {
    "silu": ACT2FN["silu"],
    "gelu_tanh": ACT2FN["gelu_new"],
    "gelu": ACT2FN["gelu"],
    "relu": ACT2FN["relu"],
    "relu2": ACT2FN["relu2"],
    "quick_gelu": ACT2FN["quick_gelu"],
}
each_alone = pytest.mark.parametrize("activation", ALONE)


def alone_case(activation: str, a: torch.Tensor) -> Case:
    unit = Activation("glu", activation)
    return Case(
        ours=lambda a: _GLU.apply(a, None, unit), stock=ALONE[activation], exact=ALONE[activation], inputs={"a": a}
    )


@each_alone
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_alone_matches_float64_as_well_as_transformers(shape, dtype, device, activation):
    assert_no_worse(alone_case(activation, random_tensor(shape, dtype, device, scale=3.0)))


@each_alone
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, -3.0])
def test_pooled_error_alone(offset, dtype, device, activation):
    shape = (8, 512) if EMULATED else (64, 512)
    assert_no_worse_pooled(lambda: alone_case(activation, random_tensor(shape, dtype, device, offset=offset)))


@few_examples
@given(activation=st.sampled_from(list(ALONE)), **ANY_SHAPE)
def test_any_shape_alone(rows, columns, dtype, device, activation, scale, wide):
    """Rows without gaps, or a half of each."""
    a = random_tensor((rows, columns * (1 + wide)), dtype, device, scale=scale)
    assert_no_worse(alone_case(activation, a[:, :columns]))


@each_alone
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [296, 301])
def test_all_forms_of_the_backward_pass_alone(width, dtype, device, activation):
    """With y or without, over new memory or the inputs', of tensors with gaps: the same bits; y those of forward."""
    unit = Activation("glu", activation)
    dy, a = (random_tensor((3, width), dtype, device) for _ in range(2))
    y, (da, none) = unit.forward(a), unit.backward(dy, a, None, True, False)
    assert none is None
    apart = torch.cat((a, a), 1)[:, width:]
    assert_same_bits(unit.forward(apart), y)
    assert_same_bits(unit.backward(dy, apart, None, True, False)[0], da)
    for want in (True, False):
        found, _, again = unit.backward_with_y(dy, a, None, want, False)
        assert_same_bits(again, y)
        if want:
            assert_same_bits(found, da)
    only_a, only_y = (dy.clone(), a.clone()), (dy.clone(), a.clone())
    unit.backward_inplace(*only_a, None, True, False, False)
    unit.backward_inplace(*only_y, None, False, False, True)
    unit.backward_inplace(dy, a, None, True, False, True)
    assert_same_bits(only_a[1], da)
    assert_same_bits(only_y[0], y)
    assert_same_bits(a, da)
    assert_same_bits(dy, y)


@pytest.mark.parametrize("device", devices())
def test_what_the_compiler_is_told_of_activations_is_true(device):
    a, dy = (random_tensor((3, 16), torch.bfloat16, device) for _ in range(2))
    told = Activation("glu", "gelu").told
    torch.library.opcheck(torch.ops.bastile.activation_forward.default, (*told, a))
    torch.library.opcheck(torch.ops.bastile.activation_backward.default, (*told, dy, a, True))
    torch.library.opcheck(torch.ops.bastile.activation_backward_with_y.default, (*told, dy, a, True))
    torch.library.opcheck(torch.ops.bastile.activation_backward_inplace.default, (*told, dy, a, True, True))


# ---- gate and up in one tensor --------------------------------------------------------------------------------------


def parts(h: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, dim=-1)


def joined_case(activation: str, interleaved: bool, h: torch.Tensor, limit: float | None = None) -> Case:
    """Gate and up in one tensor. Of all units but GPT-OSS's a limit is torch.clamp before them."""

    def stock(h: torch.Tensor) -> torch.Tensor:
        gate, up = parts(h, interleaved)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return STOCK[activation](gate, up)

    options = {"interleaved": interleaved, "limit": limit}
    return Case(ours=lambda h: glu(h, None, activation, **options), stock=stock, exact=stock, inputs={"h": h})


each_layout = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])


@each_activation
@each_layout
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_joined_matches_float64_as_well_as_torch(shape, dtype, device, interleaved, activation):
    assert_no_worse(joined_case(activation, interleaved, random_tensor((*shape[:-1], 2 * shape[-1]), dtype, device)))


@each_activation
@each_layout
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_pooled_error_within_limits(dtype, device, interleaved, activation):
    """A limit in the middle of the gates: some of either kind, and those without gradient."""
    shape = (8, 1024) if EMULATED else (64, 1024)
    limit = 7.0 if activation == "swiglu_oai" else 1.0
    assert_no_worse_pooled(
        lambda: joined_case(activation, interleaved, random_tensor(shape, dtype, device, scale=limit), limit)
    )


def clamped(x: torch.Tensor, low: float, high: float, is_open: bool) -> torch.Tensor:
    """torch.clamp with the gradient at a limit that its releases have: to 2.13, and from 2.14 on."""
    passes = (x > low) & (x < high) if is_open else (x >= low) & (x <= high)
    return torch.where(passes, x, x.detach().clamp(low, high))


@each_activation
@each_layout
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_at_a_limit(dtype, device, is_open, interleaved, activation, monkeypatch):
    """Gates and ups that are limits, to the bit."""
    monkeypatch.setattr(_glu, "OPEN_LIMIT", is_open)
    h = (random_tensor((5, 34), torch.float32, device).mul(2).round() / 2).to(dtype)
    limit = 1.0 if activation != "swiglu_oai" else 1.5

    def stock(h: torch.Tensor) -> torch.Tensor:
        gate, up = parts(h, interleaved)
        gate, up = clamped(gate, -math.inf, limit, is_open), clamped(up, -limit, limit, is_open)
        return STOCK[activation](gate, up)

    def ours(h: torch.Tensor) -> torch.Tensor:
        return glu(h, None, activation, interleaved=interleaved, limit=limit)

    assert (h == limit).any()
    assert_no_worse(Case(ours=ours, stock=stock, exact=stock, inputs={"h": h}))


def test_a_limit_s_gradient_is_that_of_this_torch():
    x = torch.tensor([1.0, -1.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(x.clamp(-1.0, 1.0).sum(), x)
    assert gradient.tolist() == [0.0 if _glu.OPEN_LIMIT else 1.0] * 2


@each_layout
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_joined_tensors_lie_anyhow(dtype, device, activation, interleaved):
    """Rows apart, folded, beginning between two accesses or two pairs, in columns that need a copy, with a strided
    gradient: the bits of the same numbers in two tensors without gaps."""
    base = random_tensor((4, 6, 5, 200), dtype, device)
    for h in (base.transpose(1, 2), base[..., 2:68], base[..., 3:69], base[..., 1:3], base.transpose(2, 3)[..., :4]):
        dy = random_tensor((*h.shape[:-1], h.shape[-1] // 2 + 3), dtype, device)[..., 3:]
        h = h.detach().requires_grad_()
        y = glu(h, None, activation, interleaved=interleaved)
        (dh,) = torch.autograd.grad(y, h, dy)
        gate, up = (t.detach().contiguous().requires_grad_() for t in parts(h, interleaved))
        # By the same loops: a limit that nothing reaches makes an ordinary unit take those of pairs on a CPU.
        limit = 1e30 if interleaved and activation == "silu" else None
        want = glu(gate, up, activation, limit=limit)
        assert_same_bits(y.detach(), want.detach())
        for got, expected in zip(
            parts(dh, interleaved), torch.autograd.grad(want, (gate, up), dy.contiguous()), strict=True
        ):
            assert_same_bits(got, expected)


@each_activation
@pytest.mark.parametrize("device", devices())
def test_gated_mlp_is_separate_layers(device, activation):
    shapes = (6, 16), (24, 16), (24, 16), (16, 24)
    leaves = [random_tensor(s, torch.float32, device).requires_grad_() for s in shapes]
    dout = random_tensor((6, 16), torch.float32, device)

    def separate(x, gate, up, down):
        return STOCK[activation](x @ gate.t(), x @ up.t()) @ down.t()

    out = gated_mlp(*leaves, activation)
    got = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    out = separate(*leaves)
    for one, other in zip(got, [out.detach(), *torch.autograd.grad(out, leaves, dout)], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(gated_mlp(*leaves, activation), separate(*leaves))
        double = [t.double() for t in leaves]
        torch.testing.assert_close(gated_mlp(*double, activation), separate(*double))


@each_activation
def test_mlp_of_modules(activation):
    """Plain layers, and one with a bias, which is called."""
    x = torch.randn(5, 16)
    for bias in (False, True):
        gate, up, down = (
            torch.nn.Linear(16, 24, bias=bias),
            torch.nn.Linear(16, 24, bias=False),
            torch.nn.Linear(24, 16, bias=False),
        )
        torch.testing.assert_close(
            glu_mlp(x, gate, up, down, activation), down(STOCK[activation](gate(x), up(x))), atol=1e-5, rtol=1e-5
        )


@each_activation
def test_other_types_and_devices_run_the_original_code(activation):
    a, b = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(glu(a, b, activation), STOCK[activation](a, b))
    assert glu(a.to("meta"), b.to("meta"), activation).device.type == "meta"


def test_bad_input_is_named():
    a = torch.ones(2, 8)
    names = ", ".join(f'"{name}"' for name in STOCK)
    for function in (lambda: glu(a, a, "tanh"), lambda: gated_mlp(a, a, a, a, "tanh")):
        with pytest.raises(ValueError, match=rf"(glu|gated_mlp): activation is 'tanh'; one of {names} is needed"):
            function()
    with pytest.raises(ValueError, match=r"glu: up has shape \[2, 7\]; \[2, 8\], that of gate, is needed"):
        glu(a.double(), a[:, :7].double())
    with pytest.raises(TypeError, match=r"glu: up is torch.int64; a floating-point type is needed"):
        glu(a, a.long())
    with pytest.raises(RuntimeError, match=r"glu_forward: activation is 99; 0 \(silu\).* is needed"):
        torch.ops.bastile.glu_forward(99, 0.0, 0.0, False, a, a)


def test_second_derivatives_are_refused():
    a, b = (torch.randn(2, 4, requires_grad=True) for _ in range(2))
    (gradient,) = torch.autograd.grad(glu(a, b).sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="glu cannot be differentiated twice"):
        gradient.sum().backward()


@each_activation
@pytest.mark.parametrize("device", devices())
def test_compiles_without_a_break(device, activation):
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: glu(a * 2, b, activation), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        leaves = [random_tensor((rows, 24), torch.float32, device).requires_grad_() for _ in range(2)]
        twins = [t.detach().clone().requires_grad_() for t in leaves]
        compiled(*leaves).square().sum().backward()
        glu(twins[0] * 2, twins[1], activation).square().sum().backward()
        for t, twin in zip(leaves, twins, strict=True):
            assert_same_bits(t.grad, twin.grad)


def test_what_the_compiler_is_told_is_true():
    unit, ops = (len(STOCK) - 1, 1.5, 2.0, True), torch.ops.bastile
    h = random_tensor((3, 16), torch.bfloat16, "cpu")
    a, b = h.chunk(2, dim=-1)
    torch.library.opcheck(ops.glu_forward.default, (*unit, a, b))
    for wanted in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(ops.glu_backward.default, (*unit, a, a, b, *wanted))
        torch.library.opcheck(ops.glu_backward_with_y.default, (*unit, a, a, b, *wanted))
        given = (*unit, a.clone(), a.contiguous(), b.contiguous(), *wanted, True)
        torch.library.opcheck(ops.glu_backward_inplace.default, given)
    for interleaved in (True, False):
        joined = unit[0], interleaved, *unit[1:]
        torch.library.opcheck(ops.glu_joined_forward.default, (*joined, h))
        torch.library.opcheck(ops.glu_joined_backward.default, (*joined, a, h))
