"""The gated MLP as one function against float64, on every device at hand; the Hugging Face code's error is the
yardstick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import bastile
from bastile.ops import glu as glu_module
from bastile.ops.gated_mlp import gated_mlp
from bastile.ops.rms_norm import rms_norm
from bastile.ops.swiglu import BastileSwiGLUMLP, swiglu
from bastile.recompute import recomputing
from memory import Memory, Peak, kept_by
from oracle import (
    DTYPES,
    Case,
    assert_no_worse,
    assert_rounds_to,
    assert_same_bits,
    devices,
    few_examples,
    random_tensor,
)
from products import assert_near

NAMES = ("x", "gate", "up", "down")


def stock(x, gate, up, down):
    """What Qwen3MLP computes."""
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def unfused(x, gate, up, down):
    return linear(swiglu(linear(x, gate), linear(x, up)), down)


def inputs(shape, inner, dtype, device, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Weights of a size that keeps what they make as large as x."""
    width = shape[-1]
    return {
        "x": random_tensor(shape, dtype, device, scale=scale),
        "gate": random_tensor((inner, width), dtype, device, scale=width**-0.5),
        "up": random_tensor((inner, width), dtype, device, scale=width**-0.5),
        "down": random_tensor((width, inner), dtype, device, scale=inner**-0.5),
    }


def leaves(tensors: dict[str, torch.Tensor], wanted=NAMES) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone().requires_grad_(name in wanted) for name, t in tensors.items()}


def run(function: Callable[..., Any], given: dict[str, torch.Tensor], dout: torch.Tensor | None = None):
    """The output, and the gradients of what wants one."""
    out = function(*given.values())
    wanted = {name: t for name, t in given.items() if t.requires_grad}
    dout = torch.ones_like(out) if dout is None else dout
    return out.detach(), dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), dout), strict=True))


# Each shape has its reason: x and the size between the products.
SHAPES = [
    ((3, 5, 64), 96),  # ordinary
    ((1, 64), 96),  # one token
    ((64,), 24),  # one dimension
    ((2, 2, 3, 8), 16),  # four dimensions
    ((7, 5), 33),  # odd widths: single-element accesses
    ((0, 16), 24),  # no token
    ((2, 0, 16), 24),
    ((3, 130), 1),  # the narrowest row between the products
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "inner"), SHAPES, ids=str)
def test_matches_float64_as_well_as_stock(shape, inner, dtype, device):
    # A row's elements share the errors of what they are summed from.
    tokens = max(1, torch.Size(shape[:-1]).numel())
    case = Case(gated_mlp, stock, stock, inputs(shape, inner, dtype, device), independent=tokens)
    assert_no_worse(case)


@few_examples
@given(
    tokens=st.integers(0, 40),
    width=st.integers(1, 96),
    inner=st.integers(1, 160),
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from(devices()),
    scale=st.sampled_from([0.1, 1.0, 8.0]),
)
def test_any_shape(tokens, width, inner, dtype, device, scale):
    tensors = inputs((tokens, width), inner, dtype, device, scale)
    assert_no_worse(Case(gated_mlp, stock, stock, tensors, independent=max(1, min(tokens, width, inner))))


@pytest.mark.parametrize("device", devices())
def test_the_gradient_of_x_is_rounded_less_often_than_stock_s(device):
    """Stock rounds both halves and their sum; here the second half is added before it is rounded. Enough elements to
    tell the two apart."""
    tensors = inputs((512, 64), 96, torch.bfloat16, device)
    dout = random_tensor((512, 64), torch.bfloat16, device)
    exact = run(stock, leaves({name: t.double() for name, t in tensors.items()}), dout.double())[1]["x"]
    ours, theirs = (
        (run(function, leaves(tensors), dout)[1]["x"].double() - exact).square().mean().sqrt()
        for function in (gated_mlp, stock)
    )
    assert ours < 0.97 * theirs


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_but_the_gradient_of_x_has_the_bits_of_the_unfused_layers(dtype, device):
    """They are the same products of the same operands."""
    tensors, dout = inputs((2, 9, 64), 96, dtype, device), random_tensor((2, 9, 64), dtype, device)
    out, gradients = run(gated_mlp, leaves(tensors), dout)
    want, want_gradients = run(unfused, leaves(tensors), dout)
    # Not so float32 on CPU: there a product's last bits may depend on where its operands lie in memory.
    same = torch.testing.assert_close if (dtype, device) == (torch.float32, "cpu") else assert_same_bits
    same(out, want)
    for name in ("gate", "up", "down"):
        same(gradients[name], want_gradients[name])
    with torch.no_grad():
        same(gated_mlp(*tensors.values()), want)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("wanted", [NAMES[i:j] for i in range(4) for j in range(i + 1, 5)] + [("x", "up"), ("down",)])
def test_frozen_parts_change_nothing_for_the_others(wanted, device):
    tensors, dout = inputs((9, 64), 96, torch.bfloat16, device), random_tensor((9, 64), torch.bfloat16, device)
    every, some = run(gated_mlp, leaves(tensors), dout)[1], run(gated_mlp, leaves(tensors, wanted), dout)[1]
    assert some.keys() == set(wanted)
    for name, gradient in some.items():
        assert_same_bits(gradient, every[name])


@pytest.mark.parametrize("device", devices())
def test_strides(device):
    """Tokens that lie apart, transposed weights, upstream gradients of zero strides and that are slices."""
    tensors = inputs((2, 5, 32), 48, torch.float32, device)
    apart = {
        "x": torch.cat([tensors["x"]] * 2, -1)[..., 32:].transpose(0, 1).contiguous().transpose(0, 1),
        **{name: tensors[name].t().contiguous().t() for name in NAMES[1:]},
    }
    one = torch.ones((), device=device)
    wide = random_tensor((2, 5, 40), torch.float32, device)
    for dout in (one.expand(2, 5, 32), wide[..., 8:], random_tensor((5, 2, 32), torch.float32, device).transpose(0, 1)):
        out, gradients = run(gated_mlp, {n: t.detach().requires_grad_() for n, t in apart.items()}, dout)
        want, want_gradients = run(gated_mlp, leaves(tensors), dout.contiguous())
        for got, other in zip((out, *gradients.values()), (want, *want_gradients.values()), strict=True):
            torch.testing.assert_close(got, other, rtol=1e-5, atol=1e-5)  # summed in another order


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_left_alone_and_bits_repeat(dtype, device):
    """In passes over a graph that is kept and in the last, which writes over what was kept; products on another number
    of threads may sum in another order."""
    tensors = inputs((40, 64), 200, dtype, device)
    given, dout = leaves(tensors), random_tensor((40, 64), dtype, device)
    exact, gradients = run(stock, leaves({name: t.double() for name, t in tensors.items()}), dout.double())
    exact = (exact, *gradients.values())
    threads = torch.get_num_threads()
    for count in (1, 4):
        torch.set_num_threads(count)
        out, results = gated_mlp(*given.values()), []
        for retain in (True, True, False):
            gradients = torch.autograd.grad(out, list(given.values()), dout, retain_graph=retain)
            results.append((out.detach(), *gradients))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, list(given.values()), dout)
        for other in results[1:]:
            for first, again in zip(results[0], other, strict=True):
                assert_same_bits(first, again)
        for result, want in zip(results[0], exact, strict=True):
            # Each product's terms; both products' results, y and its gradient, and the last are rounded.
            assert_near(result, want, terms=64 + 200 + 64 + 2 * 200, roundings=6)
    torch.set_num_threads(threads)
    for name, tensor in tensors.items():
        assert_same_bits(given[name].detach(), tensor)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("way", ["reentrant", "checkpoint", "hooks"])
def test_hooks_and_checkpoints_change_no_bit(way, device):
    """They hand the kept tensors to the backward pass in their own ways."""
    tensors, dout = inputs((9, 64), 96, torch.bfloat16, device), random_tensor((9, 64), torch.bfloat16, device)
    out, want = run(gated_mlp, leaves(tensors), dout)
    given = leaves(tensors)
    if way == "hooks":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu().clone(), lambda t: t.to(device)):
            got = gated_mlp(*given.values())
    else:
        got = checkpoint(gated_mlp, *given.values(), use_reentrant=way == "reentrant")
    for retain in (True, False):
        got.backward(dout, retain_graph=retain)
        for name, tensor in given.items():
            assert_same_bits(tensor.grad, want[name])
            tensor.grad = None
    assert_same_bits(got.detach(), out)


def test_a_hook_that_keeps_what_is_written_over_can_tell():
    kept: list[tuple[torch.Tensor, int]] = []
    given = leaves(inputs((9, 64), 96, torch.float32, "cpu"))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t, t._version)) or t, lambda t: t):
        out = gated_mlp(*given.values())
    out.sum().backward(retain_graph=True)
    assert all(tensor._version == version for tensor, version in kept)
    out.sum().backward()
    changed = [tuple(tensor.shape) for tensor, version in kept if tensor._version > version]
    assert changed == [(9, 96), (9, 96)]


@pytest.mark.parametrize("shape", [(2, 5, 16), (5, 16), (16,)], ids=str)
def test_the_output_may_be_changed_in_place(shape):
    tensors = inputs(shape, 24, torch.float32, "cpu")
    results = []
    for function in (gated_mlp, stock):
        given = leaves(tensors)
        function(*given.values()).mul_(2).square().sum().backward()
        results.append([leaf.grad for leaf in given.values()])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_linear_layers_do(dtype, device):
    """With float32 and with mixed inputs, in a backward pass within autocast too; float64 stays what it is."""
    tensors = inputs((2, 9, 64), 96, torch.float32, device)
    dout = random_tensor((2, 9, 64), dtype, device)
    for cast, inside in ((False, False), (True, False), (False, True)):
        if cast:
            tensors["x"] = tensors["x"].to(dtype)
        results = []
        for function in (gated_mlp, unfused):
            given = leaves(tensors)
            with torch.autocast(device, dtype):
                out = function(*given.values())
                if inside:
                    out.backward(dout)
            if not inside:
                out.backward(dout)
            results.append((out.detach(), *[t.grad for t in given.values()]))
        for name, got, want in zip(("out", *NAMES), *results, strict=True):
            if name == "x":
                assert got.dtype == want.dtype == tensors["x"].dtype
                torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
            elif name == "out":
                assert_same_bits(got, want)
            else:
                assert_rounds_to(got, want, dtype)
    with torch.autocast(device, dtype):
        double = {name: t.double() for name, t in tensors.items()}
        assert gated_mlp(*double.values()).dtype == torch.float64


@pytest.mark.parametrize("name", NAMES)
def test_a_second_derivative_by_what_autocast_has_cast_is_an_error(name):
    """Not one that leaves it out in silence."""
    given = leaves(inputs((9, 64), 96, torch.float32, "cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        out = gated_mlp(*given.values())
    # Of a sum: the upstream gradient leads nowhere.
    gradients = torch.autograd.grad(out.sum(), list(given.values()), create_graph=True)
    with pytest.raises(RuntimeError, match="gated_mlp"):
        torch.autograd.grad(sum(g.square().sum() for g in gradients), given[name])


def test_a_backward_pass_within_autocast_of_what_ran_without():
    tensors = inputs((9, 64), 96, torch.float32, "cpu")
    want = run(gated_mlp, leaves(tensors))[1]
    given = leaves(tensors)
    out = gated_mlp(*given.values())
    with torch.autocast("cpu", torch.bfloat16):
        out.backward(torch.ones_like(out))
    for name, tensor in given.items():
        assert_same_bits(tensor.grad, want[name])


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_keeps_its_inputs_and_the_first_products():
    given = leaves(inputs((9, 64), 96, torch.bfloat16, "cpu"))

    def saved(**frozen: torch.Tensor) -> list[tuple[int, ...]]:
        found: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            gated_mlp(*{**given, **frozen}.values())
        return [tuple(t.shape) for t in found if t.numel()]

    rows, outward, inward = (9, 96), (96, 64), (64, 96)
    assert saved() == [(9, 64), outward, outward, inward, rows, rows]
    x, gate, up, down = (given[name].detach() for name in NAMES)
    assert saved(gate=gate, up=up, down=down) == [outward, outward, inward, rows, rows]  # x is for weights alone
    assert saved(x=x) == [(9, 64), inward, rows, rows]
    assert saved(x=x, gate=gate, up=up) == [rows]  # y, by the last product itself
    with torch.no_grad():
        assert saved() == []


def peak(run: Callable[[], object]) -> int:
    with Peak() as memory:
        run()
    return memory.most


# Rows that outweigh the weights, and weights that outweigh the rows.
@pytest.mark.parametrize(("tokens", "width", "inner"), [(512, 16, 64), (16, 64, 256)])
@pytest.mark.parametrize("device", devices())
def test_what_is_kept_and_the_peak(device, tokens, width, inner):
    """y is not kept; and of the backward pass each step has what it reads and makes, what later ones read, the
    gradients so far, the output and its gradient. Separate layers have da and db beside a and b."""
    given = leaves(inputs((tokens, width), inner, torch.float32, device))
    token, rows, weight = 4 * tokens * width, 4 * tokens * inner, 4 * width * inner
    assert kept_by(lambda: unfused(*given.values())) - kept_by(lambda: gated_mlp(*given.values())) == rows

    def step(function: Callable[..., torch.Tensor]) -> None:
        out = function(*given.values())
        torch.autograd.grad(out, list(given.values()), torch.ones_like(out))

    steps = (3 * rows + weight, 2 * rows + 2 * weight + token, rows + 3 * weight + token)
    assert peak(lambda: step(gated_mlp)) == 2 * token + max(steps)
    if rows > weight:
        assert peak(lambda: step(unfused)) == 2 * token + 5 * rows + weight
    with torch.no_grad():
        assert peak(lambda: gated_mlp(*given.values())) == max(3 * rows, rows + token)


def test_nothing_computes_y_again_and_nothing_adds():
    """Nine products, and SwiGLU's two kernels: the forward kernel runs once, and there is no addition of its own."""
    given = leaves(inputs((9, 64), 96, torch.float32, "cpu"))
    with Memory() as memory, recomputing():
        gated_mlp(*given.values()).backward(torch.ones(9, 64))
    counts: dict[str, int] = {}
    for call in memory.calls:
        counts[call] = counts.get(call, 0) + 1
    counts = {name: n for name, n in counts.items() if name.split(".")[1] not in ("t", "view", "detach", "ones")}
    assert counts == {
        "aten.mm.default": 8,
        "aten.addmm_.default": 1,
        "bastile.swiglu_forward.default": 1,
        "bastile.swiglu_backward_inplace.default": 1,
    }


@pytest.mark.parametrize("device", devices())
def test_an_x_that_is_a_norm_s_output_is_dropped_and_made_again(device):
    tensors = inputs((2, 9, 64), 96, torch.bfloat16, device)
    given = [t.requires_grad_() for t in (*tensors.values(), random_tensor((64,), torch.bfloat16, device))]

    def mlp(x, gate, up, down, weight):
        return gated_mlp(rms_norm(x, weight), gate, up, down).float().square().sum()

    plain = torch.autograd.grad(mlp(*given), given)
    with recomputing():
        loss = mlp(*given)
        kept = kept_by(lambda: mlp(*given))
    for got, want in zip(torch.autograd.grad(loss, given), plain, strict=True):
        assert_same_bits(got, want)
    assert kept_by(lambda: mlp(*given)) - kept == 2 * 2 * 9 * 64


# ---- what it refuses, what runs other code --------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
def test_bad_input_is_named(device):
    tensors = inputs((9, 64), 96, torch.float32, device)
    for name, change, message in (
        ("x", lambda t: t[:, :63], r"gate_weight has shape \[96, 64\]; \[I, 63\] is needed"),
        ("x", lambda t: t[0, 0], r"x has shape \[\]; \[..., H\] is needed"),
        ("gate", lambda t: t[0], r"gate_weight has shape \[64\]; \[I, 64\] is needed"),
        ("up", lambda t: t[:95], r"up_weight has shape \[95, 64\]; \[96, 64\] is needed"),
        ("down", lambda t: t.t(), r"down_weight has shape \[96, 64\]; \[H, 96\] is needed"),
    ):
        with pytest.raises(RuntimeError, match=f"gated_mlp: {message}"):
            gated_mlp(*{**tensors, name: change(tensors[name])}.values())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("retain", [None, False])
def test_double_backward_is_refused(retain, device):
    given = leaves(inputs((9, 64), 96, torch.float32, device))
    for name, tensor in given.items():
        out = gated_mlp(*given.values())
        (gradient,) = torch.autograd.grad(out.sum(), tensor, create_graph=True, retain_graph=retain)
        # Of an upstream gradient of zero strides, products may choose another kernel.
        torch.testing.assert_close(gradient.detach(), run(gated_mlp, given)[1][name])
        with pytest.raises(RuntimeError, match="gated_mlp cannot be differentiated twice"):
            gradient.sum().backward()


def test_other_types_and_transforms_run_the_original_code():
    tensors = inputs((9, 64), 96, torch.float64, "cpu")
    assert torch.equal(gated_mlp(*tensors.values()), stock(*tensors.values()))
    assert gated_mlp(*[t.to("meta") for t in tensors.values()]).device.type == "meta"
    single = {name: t.float() for name, t in tensors.items()}
    per_token = torch.func.vmap(lambda x: gated_mlp(x, *list(single.values())[1:]))(single["x"])
    torch.testing.assert_close(per_token, stock(*single.values()))
    with pytest.raises(RuntimeError, match="dtype"):  # as of linear layers
        gated_mlp(single["x"], *[t.bfloat16() for t in list(single.values())[1:]])


# ---- the compiler ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_without_a_break(autocast, device):
    torch._dynamo.reset()

    def function(x, *weights):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return gated_mlp(x * 2, *weights)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 5):
        tensors = inputs((2, tokens, 24), 40, torch.float32, device)
        got, want = leaves(tensors), leaves(tensors)
        compiled(*got.values()).square().sum().backward()
        function(*want.values()).square().sum().backward()
        for name in NAMES:
            if autocast and name != "x":  # what is compiled rounds, too
                assert_rounds_to(got[name].grad, want[name].grad, torch.bfloat16)
            else:
                assert_same_bits(got[name].grad, want[name].grad)


@pytest.mark.parametrize("device", devices())
def test_what_the_compiler_is_told_is_true(device):
    a, b, dy = (random_tensor((3, 16), torch.bfloat16, device) for _ in range(3))
    for wanted in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(torch.ops.bastile.swiglu_backward_with_y.default, (dy, a, b, *wanted))
        for y in (True, False):
            given = (dy.clone(), a.clone(), b.clone(), *wanted, y)
            torch.library.opcheck(torch.ops.bastile.swiglu_backward_inplace.default, given)


# ---- modules --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of x in the calls that modules make."""
    shapes: list[torch.Size] = []

    def call(x, *weights):
        shapes.append(x.shape)
        return gated_mlp(x, *weights)

    monkeypatch.setattr(glu_module, "gated_mlp", call)
    return shapes


@pytest.fixture(params=["patched", "module"])
def mlp(request: pytest.FixtureRequest) -> nn.Module:
    old = Qwen3MLP(Qwen3Config(hidden_size=16, intermediate_size=24))
    if request.param == "module":
        return BastileSwiGLUMLP.from_module(old)
    bastile.apply()
    return old


def output_and_gradients(mlp: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    out = mlp(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [p for p in mlp.parameters() if p.requires_grad])]


def test_plain_linear_layers_are_one_call(mlp: nn.Module, fused: list[torch.Size]) -> None:
    x = torch.randn(2, 5, 16)
    got = output_and_gradients(mlp, x)
    assert fused == [x.shape]
    for one, other in zip(got, output_and_gradients(OriginalMLP(mlp), x), strict=True):
        torch.testing.assert_close(one, other)


class OriginalMLP(nn.Module):
    """What Transformers computes, with another module's layers."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_a_hook_on_a_projection_runs(mlp: nn.Module, fused: list[torch.Size], name: str, register: str) -> None:
    seen: list[str] = []
    getattr(getattr(mlp, name), register)(lambda *_: seen.append(name))
    mlp(torch.randn(5, 16, requires_grad=True)).sum().backward()
    assert (fused, seen) == ([], [name])


def test_a_hook_on_all_modules_sees_the_projections(mlp: nn.Module, fused: list[torch.Size]) -> None:
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        mlp(torch.randn(5, 16))
    finally:
        handle.remove()
    assert fused == []
    assert set(map(id, seen)) >= {id(getattr(mlp, name)) for name in PROJECTIONS}
    mlp(torch.randn(5, 16))
    assert len(fused) == 1


def test_what_is_no_plain_linear_layer_is_called(mlp: nn.Module, fused: list[torch.Size]) -> None:
    """A bias, another class, a forward of its own, a parametrisation, a weight of another class of tensor."""

    class Other(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Weight(nn.Parameter):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(function, types, args, kwargs or {})

    def with_forward() -> nn.Linear:
        layer = nn.Linear(16, 24, bias=False)
        layer.forward = lambda x: nn.functional.linear(x, 2 * layer.weight)
        return layer

    def parametrised() -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.Linear(16, 24, bias=False))

    def with_weight() -> nn.Linear:
        layer = nn.Linear(16, 24, bias=False)
        layer.weight = Weight(layer.weight.detach())
        return layer

    x = torch.randn(5, 16)
    for layer in (nn.Linear(16, 24), Other(16, 24, bias=False), with_forward(), parametrised(), with_weight()):
        mlp.up_proj = layer
        for one, other in zip(output_and_gradients(mlp, x), output_and_gradients(OriginalMLP(mlp), x), strict=True):
            torch.testing.assert_close(one, other)
    assert fused == []


def test_modules_compile_without_a_break(mlp: nn.Module, fused: list[torch.Size]) -> None:
    torch._dynamo.reset()
    x = torch.randn(5, 16)
    want = output_and_gradients(mlp, x)
    got = output_and_gradients(torch.compile(mlp, fullgraph=True, backend="aot_eager"), x)
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)
