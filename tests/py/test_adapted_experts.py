"""Experts with an adapter on each of their matrices, against float64; the yardstick is PEFT's way, which multiplies by
the sums of matrices and adapters."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bastile.ops.adapted_experts import ExpertAdapters, adapted_experts, spread
from bastile.ops.moe import moe_experts
from oracle import DTYPES, Case, assert_no_worse, assert_same_bits, devices, few_examples, random_tensor
from test_moe import SHAPES, inputs, roomy_limit, routing
from test_moe import stock as stock_experts

FROZEN = ("gate_up", "gate_up_bias", "down", "down_bias")
SCALE = 0.75
IN_ANOTHER_ORDER = ("dweights", "dgate_up_a", "dgate_up_b", "ddown_a", "ddown_b")


def adapted_inputs(shape, dtype, device, rank=8, on=("gate_up", "down"), **more):
    """Adapters that change an expert's result by about a third."""
    tensors = inputs(shape, dtype, device, **more)
    for name in on:
        experts, outer, inner = tensors[name].shape
        tensors[f"{name}_a"] = random_tensor((experts, outer, rank), dtype, device, scale=outer**-0.5)
        tensors[f"{name}_b"] = random_tensor((experts, rank, inner), dtype, device, scale=0.6 * rank**-0.5)
    return tensors


def pair(given, name):
    return ExpertAdapters(given[f"{name}_a"], given[f"{name}_b"], SCALE) if f"{name}_a" in given else None


def ours(indices, limit, **given):
    order = [given["hidden"], indices, given["weights"], *[given[name] for name in FROZEN]]
    return adapted_experts(*order, pair(given, "gate_up"), pair(given, "down"), limit=limit)


def summed(given, name):
    adapters = pair(given, name)
    return given[name] if adapters is None else given[name] + SCALE * (adapters.a @ adapters.b)


def stock(indices, limit, **given):
    whole = {name: given[name] for name in FROZEN}
    whole |= {name: summed(given, name) for name in ("gate_up", "down")}
    return stock_experts(given["hidden"], given["weights"], **whole, indices=indices, limit=limit)


def case(tensors, indices, frozen=FROZEN) -> Case:
    limit = roomy_limit({**tensors, "gate_up": summed(tensors, "gate_up")}, indices)
    leaves = {name: t for name, t in tensors.items() if name not in frozen}
    constants = {**{name: tensors[name] for name in frozen}, "indices": indices}
    names = [*leaves, *constants]

    def called(function, *given):
        return function(limit=limit, **dict(zip(names, given, strict=True)))

    return Case(
        ours=partial(called, ours),
        stock=partial(called, stock),
        exact=partial(called, stock),
        inputs=leaves,
        constants=constants,
        independent=max(1, indices.numel() * tensors["down"].shape[1] // 8),
        # Of dy, where stock rounds y, and of what the adapters add to it. The adapters' are sums over an expert's rows
        # of t1 dh, x u1, w t2 and w y u2; stock rounds sums over rows, whose errors the product behind them averages.
        extra_roundings={"dweights": 2, **dict.fromkeys(("dgate_up_a", "dgate_up_b", "ddown_a", "ddown_b"), 2)},
        # In float32, whose error is that of the sums: matrices are multiplied in another order, so that a long sum,
        # over an expert's rows or a token's columns, has a short one before it, and not behind it, where that averages
        # its errors.
        times_stock=dict.fromkeys(IN_ANOTHER_ORDER if leaves["hidden"].dtype is torch.float32 else (), 2.0),
    )


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_as_well_as_the_sums(shape, dtype, device):
    assert_no_worse(case(adapted_inputs(shape, dtype, device), routing(*shape[:3], device)))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("on", [("gate_up",), ("down",), ()], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_some_of_the_matrices(on, bias, device):
    tensors = adapted_inputs((40, 3, 6, 24, 16), torch.bfloat16, device, on=on, bias=bias)
    if bias:
        assert_no_worse(case(tensors, routing(40, 3, 6, device)))
        return
    tensors = {name: t for name, t in tensors.items() if t is not None}
    indices = routing(40, 3, 6, device)
    given = {**dict.fromkeys(("gate_up_bias", "down_bias")), **tensors}
    got = ours(indices, 7.0, **given)
    want = ours(indices, 7.0, **{n: t if t is None else t.double() for n, t in given.items()})
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


@few_examples
@given(
    tokens=st.integers(12, 40),
    choices=st.integers(1, 5),
    experts=st.integers(5, 20),
    sizes=st.tuples(st.integers(8, 40), st.integers(4, 40)),
    rank=st.integers(2, 19),
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from(devices()),
)
def test_any_shape(tokens, choices, experts, sizes, rank, dtype, device):
    shape = (tokens, choices, experts, *sizes)
    assert_no_worse(case(adapted_inputs(shape, dtype, device, rank=rank), routing(*shape[:3], device, seed=tokens)))


@pytest.mark.parametrize("device", devices())
def test_no_adapters_are_moe_experts(device):
    """To the bit, and so do adapters of zeros: a policy that has not moved agrees with its reference."""
    tensors = adapted_inputs((40, 3, 6, 24, 16), torch.bfloat16, device)
    indices = routing(40, 3, 6, device)
    bare = {name: t for name, t in tensors.items() if name[-2:] not in ("_a", "_b")}
    zeros = {name: torch.zeros_like(t) if name.endswith("_b") else t for name, t in tensors.items()}
    order = (bare["hidden"], indices, bare["weights"], *[bare[name] for name in FROZEN])
    want = moe_experts(*order, limit=7.0)
    assert torch.equal(ours(indices, 7.0, **bare), want)
    assert torch.equal(ours(indices, 7.0, **zeros), want)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("without", ["hidden", "weights", "gate_up_a", "gate_up_b", "down_a", "down_b"])
def test_gradients_that_are_not_wanted(without, device):
    """Leave the others as they are."""
    tensors, indices = adapted_inputs((40, 3, 6, 24, 16), torch.float32, device), routing(40, 3, 6, device)
    leaves = [name for name in tensors if name not in FROZEN]

    def gradients(names):
        given = {name: t.clone().requires_grad_(name in names) for name, t in tensors.items()}
        ours(indices, 7.0, **given).square().sum().backward()
        return {name: given[name].grad for name in given}

    want, got = gradients(leaves), gradients([name for name in leaves if name != without])
    assert got[without] is None
    for name in leaves:
        assert name == without or torch.equal(got[name], want[name])
    alone = gradients([without])
    assert torch.equal(alone[without], want[without])


@pytest.mark.parametrize("device", devices())
def test_matrices_that_are_trained_too(device):
    """Are added up, and get their gradients."""
    tensors = adapted_inputs((40, 3, 6, 24, 16), torch.float32, device)
    assert_no_worse(case(tensors, routing(40, 3, 6, device), frozen=()))


@pytest.mark.parametrize("device", devices())
def test_a_graph_that_is_kept(device):
    tensors, indices = adapted_inputs((40, 3, 6, 24, 16), torch.bfloat16, device), routing(40, 3, 6, device)
    given = {name: t.requires_grad_(name not in FROZEN) for name, t in tensors.items()}
    leaves = [t for t in given.values() if t.requires_grad]
    loss = ours(indices, 7.0, **given).float().square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_turned_matrices_and_adapters():
    """As linear layers and PEFT have them: the same numbers."""
    tensors, indices = adapted_inputs((40, 3, 6, 24, 16), torch.bfloat16, "cpu"), routing(40, 3, 6, "cpu")
    turned = {n: t.mT.contiguous().mT if t.dim() == 3 else t for n, t in tensors.items()}
    assert torch.equal(ours(indices, 7.0, **turned), ours(indices, 7.0, **tensors))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_weight", DTYPES)
def test_second_matrices_out_of_one(of_weight, dtype, device):
    """As PyTorch permutes them, and the gradient back, to the bit."""
    experts, rank, columns = 5, 8, 70
    weight = random_tensor((columns, rank * experts), of_weight, device).requires_grad_()
    got, want = spread(weight, experts, dtype), weight.reshape(columns, rank, experts).permute(2, 1, 0).to(dtype)
    assert_same_bits(got, want)
    assert got.stride(2) == 1
    upstream = random_tensor(want.shape, dtype, device)
    for g in (upstream, upstream.mT.contiguous().mT, upstream[:1].expand_as(upstream)):
        of_got, of_want = (torch.autograd.grad(result, weight, g, retain_graph=True)[0] for result in (got, want))
        assert_same_bits(of_got, of_want)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gate_up_a", lambda t: t[:-1], r"gate_up_adapters.a has shape .*\[E, A, r\] is needed"),
        ("gate_up_b", lambda t: t[..., :-1], r"gate_up_adapters.b has shape .*\[E, r, B\] is needed"),
        ("down_b", lambda t: t[:, :-1], r"down_adapters.b has shape .*\[E, r, B\] is needed"),
        ("down_a", lambda t: t[0], r"down_adapters.a has shape .*\[E, A, r\] is needed"),
        ("down_a", lambda t: t.double(), r"down_adapters.a is torch.float64; its matrices are torch.float32"),
        ("hidden", lambda t: t[:, :-1], r"adapted_experts: gate_up_proj has shape .* is needed"),
    ],
)
def test_errors(name, change, words):
    tensors, indices = adapted_inputs((40, 3, 6, 24, 16), torch.float32, "cpu"), routing(40, 3, 6, "cpu")
    with pytest.raises(RuntimeError, match=words):
        ours(indices, 7.0, **{**tensors, name: change(tensors[name])})
