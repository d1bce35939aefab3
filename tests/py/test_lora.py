"""Linear layers with adapters as one node, against float64, on every device at hand; what PEFT's layers compute is the
yardstick."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import dropout, linear, silu
from torch.utils.checkpoint import checkpoint

from bastile.ops import _adapted, _adapted_mlp, lora
from bastile.ops._random import seeds
from bastile.ops.dropout import dropout as dropout_of_seed
from bastile.ops.lora import Adapted, adapted_gated_mlp, adapted_linears
from memory import Memory
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

#: The types of x and the base weights, of adapters, and whether autocast is on: 32 bits; PEFT's default, whose adapters
#: have 32 bits and run under autocast; adapters of 16 bits; adapters of 32 bits beside a model of 16, without autocast.
MIXES = [
    (torch.float32, torch.float32, False),
    (torch.bfloat16, torch.float32, True),
    (torch.float16, torch.float32, True),
    (torch.float32, torch.float32, True),
    (torch.bfloat16, torch.bfloat16, False),
    (torch.float16, torch.float16, False),
    (torch.bfloat16, torch.float32, False),
]
SCALE = 1.7
ONE_PASS = "bastile.low_rank_backward_into.default"
TOGETHER = "bastile.low_rank_glu_backward.default"


class Layer:
    """A layer's sizes; its tensors by name, and what makes an Adapted of them again."""

    def __init__(self, width: int, outputs: int, rank: int, bias: bool) -> None:
        self.width, self.outputs, self.rank, self.bias = width, outputs, rank, bias

    def inputs(self, name: str, dtype, adapters, device) -> dict[str, torch.Tensor]:
        """The base's part is as large as x, the adapter's a fraction of it: B begins at zero and is trained from
        there."""
        width, outputs, rank = self.width, self.outputs, self.rank
        found = {f"{name}weight": random_tensor((outputs, width), dtype, device, scale=width**-0.5)}
        if self.bias:
            found[f"{name}bias"] = random_tensor((outputs,), dtype, device)
        if rank:
            found[f"{name}a"] = random_tensor((rank, width), adapters, device, scale=width**-0.5)
            found[f"{name}b"] = random_tensor((outputs, rank), adapters, device, scale=0.2 * rank**-0.5)
        return found

    def take(self, tensors: list[torch.Tensor]) -> Adapted:
        weight = tensors.pop(0)
        bias = tensors.pop(0) if self.bias else None
        a, b = (tensors.pop(0), tensors.pop(0)) if self.rank else (None, None)
        return Adapted(weight, bias, a, b, SCALE)


def peft(x: torch.Tensor, layer: Adapted, drop: Callable[..., torch.Tensor] = dropout) -> torch.Tensor:
    """What PEFT's Linear computes (test_peft.py compares it with the real one)."""
    y = linear(x, layer.weight, layer.bias)
    if layer.a is None:
        return y
    result = y + linear(linear(drop(x.to(layer.a.dtype), layer.dropout), layer.a), layer.b) * layer.scale
    return result.to(y.dtype)


def peft_mlp(x, gate, up, down, drop=dropout):
    return peft(silu(peft(x, gate, drop)) * peft(x, up, drop), down, drop)


def under(autocast: torch.dtype | None, device: str, function):
    """The function under autocast to this type; None: without."""
    if autocast is None:
        return function

    def run(*args):
        with torch.autocast(torch.device(device).type, autocast):
            return function(*args)

    return run


def group_case(layers, shape, mix, device, ours=adapted_linears) -> Case:
    dtype, adapters, autocast = mix
    inputs = {"x": random_tensor(shape, dtype, device)}
    for i, layer in enumerate(layers):
        inputs |= layer.inputs(f"{i} ", dtype, adapters, device)

    def of(function):
        def run(x, *tensors):
            left = list(tensors)
            return function(x, [layer.take(left) for layer in layers])

        return run

    cast = (torch.bfloat16 if dtype is torch.float32 else dtype) if autocast else None
    stock = of(lambda x, given: tuple([peft(x, layer) for layer in given]))
    tokens = max(1, math.prod(shape[:-1]))
    return Case(under(cast, device, of(ours)), under(cast, device, stock), stock, inputs, independent=tokens)


def mlp_case(widths, ranks, shape, mix, device) -> Case:
    dtype, adapters, autocast = mix
    width, inner = widths
    gate, up, down = (
        Layer(k, n, r, bias=False)
        for (k, n), r in zip([(width, inner), (width, inner), (inner, width)], ranks, strict=True)
    )
    inputs = {"x": random_tensor(shape, dtype, device)}
    for name, layer in (("gate ", gate), ("up ", up), ("down ", down)):
        inputs |= layer.inputs(name, dtype, adapters, device)

    def of(function):
        def run(x, *tensors):
            left = list(tensors)
            return function(x, *[layer.take(left) for layer in (gate, up, down)])

        return run

    cast = (torch.bfloat16 if dtype is torch.float32 else dtype) if autocast else None
    tokens = max(1, math.prod(shape[:-1]))
    ours = under(cast, device, of(adapted_gated_mlp))
    return Case(ours, under(cast, device, of(peft_mlp)), of(peft_mlp), inputs, independent=tokens)


# Each has its reason: x's shape, and the layers' outputs, ranks and biases.
GROUPS = [
    ((3, 5, 64), [(96, 8, False)]),  # one layer
    ((3, 5, 64), [(96, 8, False), (32, 8, False), (32, 8, False)]),  # queries, keys, values
    ((3, 5, 64), [(96, 8, True), (32, 0, False), (24, 3, True)]),  # biases, one without adapter, another rank
    ((7, 33), [(5, 1, True), (17, 256, False)]),  # odd sizes, the narrowest and a wide adapter
    ((64,), [(24, 4, False)]),  # one dimension
    ((1, 64), [(24, 4, False), (8, 4, False)]),  # one token
    ((0, 16), [(24, 4, True), (8, 0, False)]),  # none
    ((2, 9, 16), [(24, 0, True), (8, 0, False)]),  # no adapter at all
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize(("shape", "layers"), GROUPS, ids=str)
def test_groups_match_float64_as_well_as_peft(shape, layers, mix, device):
    assert_no_worse(group_case([Layer(shape[-1], *layer) for layer in layers], shape, mix, device))


@few_examples
@given(
    tokens=st.integers(0, 40),
    width=st.integers(1, 96),
    layers=st.lists(st.tuples(st.integers(1, 64), st.integers(0, 9), st.booleans()), min_size=1, max_size=3),
    mix=st.sampled_from(MIXES),
    device=st.sampled_from(devices()),
)
def test_any_group(tokens, width, layers, mix, device):
    case = group_case([Layer(width, *layer) for layer in layers], (tokens, width), mix, device)
    case.independent = max(1, min(tokens, width, *[min(o, r or o) for o, r, _ in layers]))
    assert_no_worse(case)


MLPS = [
    ((2, 9, 64), (64, 96), (8, 8, 8)),
    ((2, 9, 64), (64, 96), (8, 0, 4)),  # one layer without adapter
    ((2, 9, 64), (64, 96), (0, 3, 0)),  # none behind the activation
    ((5, 33), (33, 17), (1, 2, 3)),  # odd
    ((64,), (64, 24), (4, 4, 4)),
    ((0, 16), (16, 24), (4, 4, 4)),
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize(("shape", "widths", "ranks"), MLPS, ids=str)
def test_the_mlp_matches_float64_as_well_as_peft(shape, widths, ranks, mix, device):
    assert_no_worse(mlp_case(widths, ranks, shape, mix, device))


WIDE = MIXES[-1]
#: What pooled errors judge: float32 on CPU alone, as a library's products of other sizes sum in other orders on CUDA;
#: test_lora_wide.py judges adapters of float32 beside bfloat16 there.
POOLED = [(d, m) for d in devices() for m in MIXES if d == "cpu" or m not in (MIXES[0], WIDE)]
#: Of adapters that are rounded to 16 bits, which operators of ours read.
ROUNDED = [(device, mix) for device, mix in POOLED if mix[0] is not torch.float32 and mix != WIDE]


@pytest.mark.parametrize(("device", "mix"), POOLED, ids=str)
def test_pooled_errors(mix, device):
    """The rule itself: results, dx and the adapters' gradients. Those of trained base weights are the same products."""
    layers = [Layer(128, 96, 16, bias=False), Layer(128, 64, 16, bias=True), Layer(128, 64, 0, bias=False)]
    assert_no_worse_pooled(lambda: group_case(layers, (256, 128), mix, device))


@pytest.mark.parametrize(("device", "mix"), POOLED, ids=str)
def test_pooled_errors_of_the_mlp(mix, device):
    assert_no_worse_pooled(lambda: mlp_case((128, 192), (16, 16, 16), (256, 128), mix, device))


@pytest.mark.parametrize(("device", "mix"), ROUNDED, ids=str)
def test_pooled_errors_of_one_pass_through_b(mix, device, monkeypatch):
    """As on a GPU: B's gradient and that of the thin results by one operator, where it serves the rank."""
    monkeypatch.setattr(_adapted, "on_gpu", lambda t: True)
    layers = [Layer(128, 96, 16, bias=False), Layer(128, 64, 8, bias=True), Layer(128, 64, 5, bias=False)]
    with Memory() as memory:
        case = group_case(layers, (8, 128), mix, device)
        results = case.ours(*[t.requires_grad_() for t in case.inputs.values()])
        torch.autograd.grad(sum([(y * y).sum() for y in results]), list(case.inputs.values()))
    assert memory.calls.count(ONE_PASS) == 2
    assert_no_worse_pooled(lambda: group_case(layers, (256, 128), mix, device))
    assert_no_worse_pooled(lambda: mlp_case((128, 192), (16, 24, 32), (256, 128), mix, device))


#: What adapters an MLP has, and how often the operators run in its backward pass: that around the unit, that of one
#: adapter. Down's layer always calls the latter.
AROUND = [((16, 16, 16), 1, 1), ((16, 16, 8), 1, 1), ((16, 16, 0), 1, 0), ((16, 8, 16), 0, 3), ((16, 0, 16), 0, 2)]


@pytest.mark.parametrize(("device", "mix"), ROUNDED, ids=str)
@pytest.mark.parametrize(("ranks", "together", "alone"), AROUND, ids=str)
def test_pooled_errors_of_one_pass_around_the_unit(ranks, together, alone, mix, device, monkeypatch):
    """As on a GPU: the unit's gradients with all that its adapters read of them, where these have one rank."""
    monkeypatch.setattr(_adapted, "on_gpu", lambda t: True)
    with Memory() as memory:
        case = mlp_case((128, 192), ranks, (8, 128), mix, device)
        out = case.ours(*[t.requires_grad_() for t in case.inputs.values()])
        (out * out).sum().backward()
    assert memory.calls.count(TOGETHER) == together
    assert memory.calls.count(ONE_PASS) == alone
    assert_no_worse_pooled(lambda: mlp_case((128, 192), ranks, (256, 128), mix, device))


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("frozen", [(), (0,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("kind", ["kept", "checkpoint", "parts"])
def test_one_pass_around_the_unit_makes_what_is_wanted(kind, frozen, p, monkeypatch):
    """The same gradients as one operator after the other, of adapters that train; with dropout in down's, too."""
    layers = make("cpu", width=64, outputs=96, rank=8, dtype=torch.bfloat16)
    layers += make("cpu", count=1, width=96, outputs=64, rank=8, dtype=torch.bfloat16, p=p)
    for i in frozen:
        layers[i].a.requires_grad_(False)
    x = random_tensor((48, 64), torch.bfloat16, "cpu").requires_grad_()
    monkeypatch.setattr(_adapted_mlp, "_LEAST_WORK", 1 if kind == "parts" else math.inf)
    monkeypatch.setattr(_adapted_mlp, "_ROWS", 16)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            if kind == "kept":
                out = adapted_gated_mlp(x, *layers)
            else:
                out = checkpoint(adapted_gated_mlp, x, *layers, use_reentrant=False)
        return gradients([out], layers, x)

    apart = run()
    monkeypatch.setattr(_adapted, "on_gpu", lambda t: True)
    with Memory() as memory:
        found = run()
    assert memory.calls.count(TOGETHER) == (2 if kind == "parts" and not p else 1)
    for got, want in zip(found, apart, strict=True):
        # In bfloat16, of some hundred terms: what is left out, or scaled wrongly, is off by far more.
        assert (got.double() - want.double()).norm() <= 0.02 * want.double().norm()


def test_one_pass_around_the_unit_only_where_nobody_reads_its_inputs_again(monkeypatch):
    """It takes their place: not in a backward pass that is to be repeated."""
    monkeypatch.setattr(_adapted, "on_gpu", lambda t: True)
    layers = [Layer(64, 96, 8, False), Layer(64, 96, 8, False), Layer(96, 64, 8, False)]
    case = mlp_case((64, 96), [each.rank for each in layers], (16, 64), MIXES[4], "cpu")
    inputs = [t.requires_grad_() for t in case.inputs.values()]
    out = case.ours(*inputs)
    with Memory() as memory:
        first = torch.autograd.grad(out.float().sum(), inputs, retain_graph=True)
        assert memory.calls.count(TOGETHER) == 0
        second = torch.autograd.grad(out.float().sum(), inputs)
        assert memory.calls.count(TOGETHER) == 1
    for got, want in zip(second, first, strict=True):
        assert (got.double() - want.double()).norm() <= 0.02 * want.double().norm()


def tensors_of(layer: Adapted) -> list[torch.Tensor]:
    return [t for t in layer.tensors if t is not None]


def make(device, *, count=2, width=32, outputs=24, rank=4, dtype=torch.float32, p=0.0, frozen=True) -> list[Adapted]:
    """Adapters on frozen weights, as PEFT trains them."""
    layers = []
    for _ in range(count):
        tensors = list(Layer(width, outputs, rank, bias=False).inputs("", dtype, torch.float32, device).values())
        weight, a, b = (t.requires_grad_(i > 0 or not frozen) for i, t in enumerate(tensors))
        layers.append(Adapted(weight, None, a, b, SCALE, p))
    return layers


def trained(layers) -> list[torch.Tensor]:
    return [t for layer in layers for t in tensors_of(layer) if t.requires_grad]


def total_of(results) -> torch.Tensor:
    """One number, of which each element's gradient is another."""
    return sum([(y.float() * torch.arange(y.numel(), device=y.device).view_as(y).cos()).sum() for y in results])


def gradients(results, layers, x) -> list[torch.Tensor]:
    return list(torch.autograd.grad(total_of(results), [x, *trained(layers)]))


@pytest.mark.parametrize("device", devices())
def test_only_what_is_wanted_is_made_and_kept(device):
    """Frozen weights get no gradient; without trained A's x is not kept; the others' bits do not change."""
    layers, x = make(device), random_tensor((9, 32), torch.float32, device).requires_grad_()
    every = gradients(adapted_linears(x, layers), layers, x)
    for layer in layers:
        layer.a.requires_grad_(False)
    results = adapted_linears(x, layers)
    saved = [t for t in results[0].grad_fn.saved_tensors if t is not None]
    assert not any(t.data_ptr() == x.data_ptr() for t in saved)
    some = gradients(results, layers, x)
    for got, want in zip(some, [every[0], every[2], every[4]], strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("device", devices())
def test_a_result_that_nobody_differentiates(device):
    layers, x = make(device), random_tensor((9, 32), torch.float32, device).requires_grad_()
    first = adapted_linears(x, layers)[0]
    (dx,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
    (alone,) = torch.autograd.grad(adapted_linears(x, layers[:1])[0].sum(), x)
    torch.testing.assert_close(dx, alone)
    assert torch.autograd.grad(first.sum(), layers[1].b, allow_unused=True)[0] is None


def one_by_one(device: torch.device, count: int) -> torch.Tensor:
    """Seeds as several dropouts draw them."""
    return torch.cat([seeds(device, 1) for _ in range(count)])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("ps", [(0.1, 0.1, 0.1), (0.5, 0.0, 0.2)], ids=str)
def test_each_adapter_has_a_dropout_of_its_own(ps, mix, device, monkeypatch):
    """PEFT's formula with dropouts that draw seeds as ours do, layer by layer: results, all gradients, and where the
    generator ends. float64 says which of the two is nearer, with the masks that both have."""
    monkeypatch.setattr(lora, "seeds", one_by_one)
    dtype, adapters, autocast = mix
    shape, width, inner = (33, 48), 48, 64
    inputs = {"x": random_tensor(shape, dtype, device)}
    sizes = [Layer(width, inner, 5, bias=True), Layer(width, inner, 3, bias=True), Layer(inner, width, 4, bias=True)]
    for i, layer in enumerate(sizes):
        inputs |= layer.inputs(f"{i} ", dtype, adapters, device)

    def of(linears, mlp):
        def run(x, *tensors):
            left = list(tensors)
            given = [layer.take(left)._replace(dropout=p) for layer, p in zip(sizes, ps, strict=True)]
            torch.manual_seed(5)
            results = (*linears(x, given[:2]), mlp(x, *given))
            return (*results, results[0] + torch.rand(1, device=device).to(results[0].dtype))

        return run

    stock = of(
        lambda x, given: tuple([peft(x, layer, dropped) for layer in given]),
        lambda x, *given: peft_mlp(x, *given, dropped),
    )
    cast = (torch.bfloat16 if dtype is torch.float32 else dtype) if autocast else None
    ours = under(cast, device, of(adapted_linears, adapted_gated_mlp))
    assert_no_worse(Case(ours, under(cast, device, stock), stock, inputs, independent=33))


def dropped(x: torch.Tensor, p: float) -> torch.Tensor:
    """In float64, too."""
    return dropout_of_seed(x, p, seed=seeds(x.device, 1)[0]) if p else x


@pytest.mark.parametrize("device", devices())
def test_what_an_adapter_s_dropout_loses(device):
    """Of identity matrices the adapter's part is the dropped input: the share of zeros is binomial, what stays is
    divided by 1 - p, and neither hangs on the place."""
    p, size, tokens = 0.3, 32, 4096
    eye = torch.eye(size, device=device)
    layer = Adapted(torch.zeros(size, size, device=device), None, eye.clone().requires_grad_(), eye, 1.0, p)
    (y,) = adapted_linears(torch.ones(tokens, size, device=device), [layer])
    kept = y.detach() != 0
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - p)))
    deviation = (p * (1 - p)) ** 0.5
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * deviation / (tokens * size) ** 0.5
    for dim, count in ((0, tokens), (1, size)):
        assert (kept.double().mean(dim) - (1 - p)).abs().max().item() < 6 * deviation / count**0.5


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_checkpoints_recompute_the_same(p, reentrant, device):
    layers, x = make(device, p=p), random_tensor((9, 32), torch.float32, device).requires_grad_()
    (down,) = make(device, count=1, width=24, p=p)
    both = lambda x: (*adapted_linears(x, layers), adapted_gated_mlp(x, *layers, down))  # noqa: E731
    found = []
    for again in (False, True):
        torch.manual_seed(3)
        results = checkpoint(both, x, use_reentrant=reentrant) if again else both(x)
        total_of(results).backward()  # reentrant checkpoints do not work with autograd.grad
        leaves = [x, *trained([*layers, down])]
        found.append([*results, *[leaf.grad for leaf in leaves], torch.rand(3, device=device)])
        for leaf in leaves:
            leaf.grad = None
    for ours, theirs in zip(*found, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("device", devices())
def test_a_backward_pass_draws_nothing(device):
    """And finds its masks again, whatever was drawn meanwhile."""
    layers, x = make(device, p=0.4), random_tensor((9, 32), torch.float32, device).requires_grad_()
    torch.manual_seed(3)
    results = adapted_linears(x, layers)
    first = torch.autograd.grad(total_of(results), [x, *trained(layers)], retain_graph=True)
    behind = torch.rand(3, device=device)
    second = torch.autograd.grad(total_of(results), [x, *trained(layers)])
    for one, other in zip(first, second, strict=True):
        assert_same_bits(one, other)
    torch.manual_seed(3)
    adapted_linears(x, layers)
    assert_same_bits(torch.rand(3, device=device), behind)


@pytest.mark.parametrize("device", devices())
def test_batched_gradients_with_dropout(device):
    """Several at once: nothing is written over then that they share."""
    layers, x = make(device, p=0.4), random_tensor((9, 32), torch.float32, device).requires_grad_()
    (down,) = make(device, count=1, width=24, outputs=32, p=0.4)
    for out in (sum(adapted_linears(x, layers)), adapted_gated_mlp(x, *layers, down)):
        upstream = random_tensor((2, *out.shape), torch.float32, device)
        want = [torch.autograd.grad(out, [x, layers[0].a], each, retain_graph=True) for each in upstream]
        got = torch.autograd.grad(out, [x, layers[0].a], upstream, is_grads_batched=True)
        for one, other in zip(got, zip(*want, strict=True), strict=True):
            torch.testing.assert_close(one, torch.stack(other))


@pytest.mark.parametrize("device", devices())
def test_two_passes_over_one_graph(device):
    """The first keeps the graph, and so everything that it needs."""
    gate, up = make(device, outputs=24)
    (down,) = make(device, count=1, width=24, outputs=32)
    x = random_tensor((9, 32), torch.float32, device).requires_grad_()
    out = adapted_gated_mlp(x, gate, up, down)
    first = torch.autograd.grad(out.sum(), [x, gate.a, down.b], retain_graph=True)
    second = torch.autograd.grad(out.sum(), [x, gate.a, down.b])
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_second_derivatives_are_refused(p, device):
    layers, x = make(device, p=p), random_tensor((9, 32), torch.float32, device).requires_grad_()
    gate, up, down = *layers, *make(device, count=1, width=24, outputs=32, p=p)
    for op, result in (
        ("adapted_linears", adapted_linears(x, layers)[0]),
        ("adapted_gated_mlp", adapted_gated_mlp(x, gate, up, down)),
    ):
        (dx,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=f"{op} cannot be differentiated twice"):
            dx.sum().backward()


@pytest.mark.parametrize("device", devices())
def test_results_may_be_changed_in_place(device):
    layers, x = make(device), random_tensor((2, 9, 32), torch.float32, device).requires_grad_()
    first, second = adapted_linears(x, layers)
    first.mul_(2)
    second.add_(1)
    (first.sum() + second.sum()).backward()


def test_layers_without_adapters_have_the_bits_of_linear_layers():
    x = random_tensor((4, 9, 32), torch.bfloat16, "cpu")
    layer = Adapted(random_tensor((24, 32), torch.bfloat16, "cpu"), random_tensor((24,), torch.bfloat16, "cpu"))
    assert_same_bits(adapted_linears(x, [layer])[0], linear(x, layer.weight, layer.bias))


def test_a_weight_that_is_made_when_it_is_needed():
    """It is asked for once a pass, of x's type, and not kept."""
    (layer,) = make("cpu", count=1)
    weight, asked = layer.weight, []

    def dequantise(dtype: torch.dtype) -> torch.Tensor:
        asked.append(dtype)
        return weight.clone()

    x = random_tensor((9, 32), torch.float32, "cpu").requires_grad_()
    given: Any = layer._replace(weight=None, dequantise=dequantise)
    results = adapted_linears(x, [given])
    assert all(t is None or t.shape != weight.shape for t in results[0].grad_fn.saved_tensors)
    for got, want in zip(
        gradients(results, [given], x), gradients(adapted_linears(x, [layer]), [layer], x), strict=True
    ):
        assert_same_bits(got, want)
    assert asked == [torch.float32] * 2


def test_strided_and_unaligned_inputs():
    (layer,) = make("cpu", count=1)
    wide = random_tensor((5, 9, 70), torch.float32, "cpu")
    for x in (wide[:, :, 3:35], wide.transpose(0, 1)[:, :, :32], wide[:, ::2, 1:33]):
        torch.testing.assert_close(adapted_linears(x, [layer])[0], peft(x, layer))


def test_other_types_run_the_original():
    (layer,) = make("cpu", count=1)
    exact = Adapted(*[t.double() if t is not None else None for t in layer.tensors], SCALE)
    x = random_tensor((3, 32), torch.float64, "cpu")
    assert torch.equal(adapted_linears(x, [exact])[0], peft(x, exact))
    mixed = layer._replace(weight=layer.weight.bfloat16())
    assert adapted_linears(x.bfloat16(), [mixed])[0].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"weight": torch.ones(24, 31)}, r"layers\[0\].weight is of shape \[24, 31\]; \[N, 32\] is needed"),
        ({"a": None}, r"layers\[0\].a is missing; with one of a and b the other is needed"),
        ({"a": torch.ones(4, 31)}, r"layers\[0\].a is of shape \[4, 31\]; \[r, 32\] is needed"),
        ({"b": torch.ones(24, 5)}, r"layers\[0\].b is of shape \[24, 5\]; \[24, 4\] is needed"),
        ({"bias": torch.ones(23)}, r"layers\[0\].bias is of shape \[23\]; \[24\] is needed"),
        ({"weight": None}, "needs either a weight or dequantise"),
        ({"dropout": 1.0}, "a probability from 0 to below 1 is needed"),
    ],
)
def test_bad_layers_are_named(change, sentence):
    (layer,) = make("cpu", count=1)
    with pytest.raises((RuntimeError, ValueError), match=sentence):
        adapted_linears(torch.ones(3, 32), [layer._replace(**change)])


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_without_a_graph_break(dtype, p):
    layers = [Adapted(each.weight.to(dtype), None, each.a, each.b, SCALE, p) for each in make("cpu")]
    (down,) = make("cpu", count=1, width=24, outputs=32, p=p)
    down = down._replace(weight=down.weight.to(dtype))
    x = random_tensor((9, 32), dtype, "cpu").requires_grad_()

    def both(x):
        return (*adapted_linears(x, layers), adapted_gated_mlp(x, *layers, down))

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    wanted = [x, *[t for layer in (*layers, down) for t in (layer.a, layer.b)]]
    found = []
    for function in (both, compiled):
        torch.manual_seed(3)
        results = function(x)
        found.append([*results, *torch.autograd.grad(sum(y.float().sum() for y in results), wanted)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_a_layer_keeps():
    """x, [tokens, r] numbers, the A's as one, two numbers a dropout: neither the result, nor a float32 copy of x, nor a
    mask."""
    tokens, width = 512, 256
    for p in (0.0, 0.1):
        layers = make("cpu", count=3, width=width, outputs=width, rank=8, p=p)
        x = random_tensor((tokens, width), torch.float32, "cpu").requires_grad_()
        results = adapted_linears(x, layers)
        kept = {t.data_ptr(): t.numel() for t in results[0].grad_fn.saved_tensors if t is not None}
        own = {t.data_ptr() for layer in layers for t in tensors_of(layer)} | {x.data_ptr()}
        assert sum(n for pointer, n in kept.items() if pointer not in own) == 3 * 8 * (tokens + width) + 6 * (p > 0)
