"""MLPs without a gate, down(act(up(x))), as one node against float64, on every device at hand: of plain layers, with
biases and without, where separate layers are the yardstick, and with adapters, where PEFT's are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from bastile.ops import _adapted, _adapted_mlp
from bastile.ops.lora import Adapted, adapted_mlp
from memory import Memory, Peak, kept_by
from oracle import (
    DTYPES,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_same_bits,
    devices,
    few_examples,
    random_tensor,
)
from products import assert_near
from test_glu import ALONE as STOCK
from test_glu import each_alone as each_activation
from test_lora import MIXES, ONE_PASS, POOLED, ROUNDED, SCALE, Layer, peft, total_of, under


def mlp_case(
    sizes: tuple[Layer, Layer],
    shape: tuple[int, ...],
    mix: Any,
    device: str,
    activation: str,
    ours: Callable[..., torch.Tensor] = adapted_mlp,
) -> Case:
    """All of x, weights, biases, A and B want gradients."""
    dtype, adapters, autocast = mix
    inputs = {"x": random_tensor(shape, dtype, device)}
    for name, layer in zip(("up ", "down "), sizes, strict=True):
        inputs |= layer.inputs(name, dtype, adapters, device)

    def of(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
            left = list(tensors)
            return function(x, *[layer.take(left) for layer in sizes], activation)

        return run

    def stock(x: torch.Tensor, up: Adapted, down: Adapted, activation: str) -> torch.Tensor:
        return peft(STOCK[activation](peft(x, up)), down)

    cast = (torch.bfloat16 if dtype is torch.float32 else dtype) if autocast else None
    tokens = max(1, math.prod(shape[:-1]))
    return Case(under(cast, device, of(ours)), under(cast, device, of(stock)), of(stock), inputs, independent=tokens)


def is_promoted(mix: Any, device: str) -> bool:
    """Whether autocast takes powers, and so relu2 and Transformers' gelu_new, to float32: there the two gradients of an
    MLP's activation, of a layer and of its adapter, are added up without a rounding, which ours is of small layers
    (docs/lora.md)."""
    return mix[2] and device == "cuda"


PLAIN = [(dtype, dtype, False) for dtype in DTYPES]

# Each has its reason: x's shape, the size between the products, the result's; ranks, biases.
SHAPES = [
    ((2, 9, 64), 96, 64, (0, 0), (True, True)),  # ordinary: StarCoder2, GPT-NeoX, vision towers
    ((2, 9, 64), 96, 64, (0, 0), (False, False)),  # Nemotron
    ((2, 9, 64), 96, 40, (0, 0), (True, False)),  # a projector
    ((64,), 24, 64, (0, 0), (True, True)),  # one dimension
    ((7, 5), 33, 3, (0, 0), (False, True)),  # odd widths: single-element accesses
    ((0, 16), 24, 16, (0, 0), (True, True)),  # no token
    ((3, 130), 1, 130, (0, 0), (True, True)),  # the narrowest row between the products
    ((2, 9, 64), 96, 64, (8, 8), (True, True)),  # adapters on both
    ((2, 9, 64), 96, 64, (8, 0), (True, True)),  # on one of them
    ((2, 9, 64), 96, 64, (0, 4), (False, True)),
    ((5, 33), 17, 9, (1, 3), (False, False)),
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize(("shape", "inner", "outputs", "ranks", "biases"), SHAPES, ids=str)
def test_matches_float64_as_well_as_stock(shape, inner, outputs, ranks, biases, mix, device):
    sizes = Layer(shape[-1], inner, ranks[0], biases[0]), Layer(inner, outputs, ranks[1], biases[1])
    assert_no_worse(mlp_case(sizes, shape, mix, device, "gelu" if is_promoted(mix, device) else "gelu_tanh"))


@few_examples
@given(
    tokens=st.integers(0, 40),
    width=st.integers(1, 96),
    inner=st.integers(1, 160),
    ranks=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    biases=st.tuples(st.booleans(), st.booleans()),
    activation=st.sampled_from(list(STOCK)),
    mix=st.sampled_from(MIXES),
    device=st.sampled_from(devices()),
)
def test_any_shape(tokens, width, inner, ranks, biases, activation, mix, device):
    sizes = Layer(width, inner, ranks[0], biases[0]), Layer(inner, width, ranks[1], biases[1])
    case = mlp_case(sizes, (tokens, width), mix, device, activation)
    case.independent = max(1, min(tokens, width, inner, *[rank for rank in ranks if rank]))
    assert_no_worse(case)


@each_activation
@pytest.mark.parametrize(("device", "mix"), [(d, m) for d in devices() for m in PLAIN], ids=str)
def test_pooled_errors(mix, device, activation):
    """The rule itself: the result and every gradient."""
    sizes = Layer(128, 192, 0, bias=True), Layer(192, 128, 0, bias=True)
    assert_no_worse_pooled(lambda: mlp_case(sizes, (256, 128), mix, device, activation))


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("device", "mix"), POOLED, ids=str)
def test_pooled_errors_with_adapters(mix, biases, device):
    sizes = Layer(128, 192, 16, biases), Layer(192, 128, 16, biases)
    activation = "gelu" if is_promoted(mix, device) else "relu2"
    assert_no_worse_pooled(lambda: mlp_case(sizes, (256, 128), mix, device, activation))


@pytest.mark.parametrize(("device", "mix"), ROUNDED, ids=str)
def test_pooled_errors_of_one_pass_through_b(mix, device, monkeypatch):
    """As on a GPU: B's gradient and that of the thin results by one operator, of each adapter."""
    monkeypatch.setattr(_adapted, "on_gpu", lambda t: True)
    sizes = Layer(128, 192, 16, bias=True), Layer(192, 128, 8, bias=False)
    with Memory() as memory:
        case = mlp_case(sizes, (8, 128), mix, device, "gelu")
        out = case.ours(*[t.requires_grad_() for t in case.inputs.values()])
        (out * out).sum().backward()
    assert memory.calls.count(ONE_PASS) == 2
    assert_no_worse_pooled(lambda: mlp_case(sizes, (256, 128), mix, device, "gelu"))


# ---- what is kept and what runs -------------------------------------------------------------------------------------

TENSORS = ("x", "weight", "bias", "down weight", "down bias")


def leaves(device: str, dtype: torch.dtype = torch.float32, wanted=TENSORS, tokens=(2, 9), width=64, inner=96):
    shapes = (*tokens, width), (inner, width), (inner,), (width, inner), (width,)
    made = [random_tensor(s, dtype, device, scale=s[-1] ** -0.5 if len(s) == 2 else 1.0) for s in shapes]
    return [t.requires_grad_(name in wanted) for name, t in zip(TENSORS, made, strict=True)]


def ours(x, weight, bias, down, down_bias, activation="gelu"):
    return adapted_mlp(x, Adapted(weight, bias), Adapted(down, down_bias), activation)


def stock(x, weight, bias, down, down_bias, activation="gelu"):
    return linear(STOCK[activation](linear(x, weight, bias)), down, down_bias)


def of_all(function: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    out = function(*given)
    return [out.detach(), *torch.autograd.grad(total_of([out]), [t for t in given if t.requires_grad])]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("wanted", [TENSORS[i:j] for i in range(5) for j in range(i + 1, 6)] + [("x", "bias")])
def test_frozen_parts_change_nothing_for_the_others(wanted, device):
    given = leaves(device, torch.bfloat16)
    every = dict(zip(TENSORS, of_all(ours, given)[1:], strict=True))
    out, *some = of_all(ours, [t.detach().requires_grad_(n in wanted) for n, t in zip(TENSORS, given, strict=True)])
    for name, gradient in zip([n for n in TENSORS if n in wanted], some, strict=True):
        assert_same_bits(gradient, every[name])
    with torch.no_grad():
        assert_same_bits(ours(*given), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_activation_has_the_bits_of_the_unit_and_products_of_linear_layers(dtype):
    """In 16 bits relu is exact, so that all of both is the same arithmetic."""
    given = leaves("cpu", dtype)
    found, expected = (of_all(lambda *t, f=f: f(*t, "relu"), given) for f in (ours, stock))
    for got, want in zip(found, expected, strict=True):
        assert_same_bits(got, want)


def test_keeps_its_input_and_the_first_product():
    given = leaves("cpu", torch.bfloat16)

    def saved(**frozen: torch.Tensor) -> list[tuple[int, ...]]:
        found: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            ours(*[frozen.get(n, t) for n, t in zip(TENSORS, given, strict=True)])
        return [tuple(t.shape) for t in found if t.numel() and t.dim() > 1]

    assert saved() == [(2, 9, 64), (2, 9, 96), (96, 64), (64, 96)]
    assert saved(weight=given[1].detach()) == [(2, 9, 96), (96, 64), (64, 96)]  # x is for its weight alone
    with torch.no_grad():
        assert saved() == []


# Rows that outweigh the weights, and weights that outweigh the rows.
@pytest.mark.parametrize(("tokens", "width", "inner"), [(512, 16, 64), (16, 64, 256)])
@pytest.mark.parametrize("device", devices())
def test_what_is_kept_and_the_peak(device, tokens, width, inner):
    """The activation is not kept, and its gradient takes the place of what it was made of."""
    given = leaves(device, tokens=(tokens,), width=width, inner=inner)
    rows = 4 * tokens * inner
    assert kept_by(lambda: stock(*given)) - kept_by(lambda: ours(*given)) == rows

    def peak(function: Callable[..., torch.Tensor]) -> int:
        with Peak() as memory:
            out = function(*given)
            torch.autograd.grad(out, given, torch.ones_like(out))
        return memory.most

    token, weight, biases = 4 * tokens * width, 4 * width * inner, 4 * (width + inner)
    # The unit's gradients and the second weight's; then the first one's and x's.
    steps = (2 * rows + weight, rows + 2 * weight + token)
    assert peak(ours) <= 2 * token + max(steps) + 2 * biases
    assert peak(stock) >= peak(ours) + (rows if rows > weight else 0)


def test_nothing_computes_the_activation_again_and_nothing_adds():
    """Six products, of which those with a bias add it, and the unit's two kernels."""
    given = leaves("cpu")
    with Memory() as memory:
        ours(*given, "gelu_tanh").backward(torch.ones(2, 9, 64))
    counts: dict[str, int] = {}
    for call in memory.calls:
        counts[call] = counts.get(call, 0) + 1
    kinds = ("t", "view", "detach", "ones", "empty", "new_empty", "slice")
    assert {name: n for name, n in counts.items() if name.split(".")[1] not in kinds} == {
        "aten.addmm.out": 2,
        "aten.mm.default": 4,
        "aten.sum.dim_IntList": 2,
        "bastile.activation_forward.default": 1,
        "bastile.activation_backward_inplace.default": 1,
    }


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_left_alone_and_bits_repeat(dtype, device):
    """In passes over a graph that is kept and in the last, which writes over what was kept."""
    given = leaves(device, dtype)
    copies = [t.detach().clone() for t in given]
    exact = of_all(stock, [t.detach().double().requires_grad_() for t in given])
    out, results = ours(*given), []
    for retain in (True, True, False):
        results.append(torch.autograd.grad(total_of([out]), given, retain_graph=retain))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total_of([out]), given)
    for other in results[1:]:
        for first, again in zip(results[0], other, strict=True):
            assert_same_bits(first, again)
    for result, want in zip((out.detach(), *results[0]), exact, strict=True):
        assert_near(result, want, terms=64 + 96 + 64 + 96 + 18, roundings=6)
    for tensor, copy in zip(given, copies, strict=True):
        assert_same_bits(tensor.detach(), copy)


def test_a_hook_that_keeps_what_is_written_over_can_tell():
    kept: list[tuple[torch.Tensor, int]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t, t._version)) or t, lambda t: t):
        out = ours(*leaves("cpu"))
    out.sum().backward(retain_graph=True)
    assert all(tensor._version == version for tensor, version in kept)
    out.sum().backward()
    assert [tuple(tensor.shape) for tensor, version in kept if tensor._version > version] == [(2, 9, 96)]


@pytest.mark.parametrize("device", devices())
def test_strides(device):
    """Tokens that lie apart, transposed weights, as a Conv1D has them, upstream gradients of zero strides."""
    given = leaves(device)
    x, weight, bias, down, down_bias = (t.detach() for t in given)
    apart = torch.cat([x] * 2, -1)[..., 64:].transpose(0, 1).contiguous().transpose(0, 1)
    other = [apart, weight.t().contiguous().t(), bias, down.t().contiguous().t(), down_bias]
    other = [t.detach().requires_grad_() for t in other]
    for function in (lambda out: out.sum(), lambda out: total_of([out])):
        results = []
        for tensors in (given, other):
            out = ours(*tensors)
            results.append([out.detach(), *torch.autograd.grad(function(out), tensors)])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # summed in another order


# ---- checkpoints and parts ------------------------------------------------------------------------------------------


def adapters_on_frozen(device: str, p: float = 0.0, biases: bool = True) -> list[Adapted]:
    """As PEFT trains them, on a base with biases."""
    layers = []
    for width, outputs in ((32, 96), (96, 32)):
        tensors = Layer(width, outputs, 4, biases).inputs("", torch.bfloat16, torch.float32, device)
        a, b = (tensors[name].requires_grad_() for name in "ab")
        layers.append(Adapted(tensors["weight"], tensors.get("bias"), a, b, SCALE, p))
    return layers


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("way", ["reentrant", "checkpoint", "parts", "remade"])
def test_checkpoints_and_parts(way, p, device, monkeypatch):
    """The same gradients; in parts, which layers without dropout are worked off in, no row's result is kept."""
    monkeypatch.setattr(_adapted_mlp, "_LEAST_WORK", 1 if way in ("parts", "remade") else math.inf)
    monkeypatch.setattr(_adapted_mlp, "_ROWS", 16)
    layers = adapters_on_frozen(device, p)
    x = random_tensor((61, 32), torch.bfloat16, device).requires_grad_()

    def run(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        with torch.autocast(device, torch.bfloat16):
            out = call(x, *layers, "relu2")
        total_of([out]).backward()
        wanted = [x, *[t for layer in layers for t in (layer.a, layer.b)]]
        found = [out.detach(), *[t.grad for t in wanted]]
        for tensor in wanted:
            tensor.grad = None
        return found

    want = run(adapted_mlp)
    with Memory() as memory:
        if way == "remade":
            found = run(lambda *given: adapted_mlp(*given, remake=True))
        else:
            found = run(lambda *given: checkpoint(adapted_mlp, *given, use_reentrant=way == "reentrant"))
    in_parts = way in ("parts", "remade") and not p
    assert memory.calls.count("bastile.activation_backward_inplace.default") == (2 if in_parts else 1)
    for got, expected in zip(found, want, strict=True):
        if in_parts:  # sums over rows are of other parts
            assert (got.double() - expected.double()).norm() <= 0.02 * expected.double().norm()
        else:
            assert_same_bits(got, expected)


def test_parts_keep_nothing_of_the_inner_size(monkeypatch):
    monkeypatch.setattr(_adapted_mlp, "_LEAST_WORK", 1)
    monkeypatch.setattr(_adapted_mlp, "_ROWS", 16)
    layers = adapters_on_frozen("cpu")
    x = random_tensor((64, 32), torch.bfloat16, "cpu").requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        kept, remade = (kept_by(lambda way=way: adapted_mlp(x, *layers, remake=way)) for way in (False, True))
    assert kept - remade == 2 * 64 * (96 + 4)  # the second adapter's thin results neither


# ---- what it refuses, what runs other code --------------------------------------------------------------------------


def test_bad_input_is_named():
    x, weight, bias, down, _ = leaves("cpu")
    names = ", ".join(f'"{name}"' for name in STOCK)
    for arguments, error, message in (
        ((x, Adapted(weight[:, :63]), Adapted(down)), RuntimeError, r"up.weight is of shape \[96, 63\]; \[N, 64\]"),
        ((x, Adapted(weight, bias[:95]), Adapted(down)), RuntimeError, r"up.bias is of shape \[95\]; \[96\]"),
        ((x, Adapted(weight), Adapted(down), "tanh"), ValueError, f"activation is 'tanh'; one of {names} is needed"),
        ((x, Adapted(weight), Adapted(down), "swiglu_oai"), ValueError, "activation is 'swiglu_oai'"),
    ):
        with pytest.raises(error, match=f"adapted_mlp: {message}"):
            adapted_mlp(*arguments)


def test_second_derivatives_are_refused():
    given = leaves("cpu")
    for tensor in given[:2]:
        (gradient,) = torch.autograd.grad(ours(*given).sum(), tensor, create_graph=True)
        with pytest.raises(RuntimeError, match="adapted_mlp cannot be differentiated twice"):
            gradient.sum().backward()


@each_activation
def test_other_types_and_transforms_run_the_original_code(activation):
    given = [t.detach().double() for t in leaves("cpu")]
    torch.testing.assert_close(ours(*given, activation), stock(*given, activation), rtol=1e-12, atol=1e-12)
    assert ours(*[t.to("meta") for t in given], activation).device.type == "meta"
    x, *rest = (t.float() for t in given)
    per_token = torch.func.vmap(lambda x: ours(x, *rest, activation))(x)
    torch.testing.assert_close(per_token, stock(x, *rest, activation))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_without_a_break(autocast, device):
    torch._dynamo.reset()

    def function(x, *rest):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return ours(x * 2, *rest)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 5):
        given = leaves(device, tokens=(2, tokens), width=24, inner=40)
        for got, want in zip(of_all(compiled, given), of_all(function, given), strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_activation
def test_autocast_gives_the_types_of_separate_layers(activation, dtype, device):
    """Some activations of Transformers compute in float32 there; the result does not."""
    given = leaves(device)
    for first in (given[0], given[0].to(dtype)):
        results = []
        for function in (ours, stock):
            with torch.autocast(device, dtype):
                out = function(first, *given[1:], activation)
            results.append([out, *torch.autograd.grad(total_of([out]), given)])
        for got, want in zip(*results, strict=True):
            assert got.dtype == want.dtype
            assert (got.double() - want.double()).norm() <= 0.02 * want.double().norm()
