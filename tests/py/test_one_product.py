"""Nodes that have products summed up by one operator, as on a GPU: how often it runs, and what comes of it. What the
operators compute is in test_low_rank.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bastile.ops import _adapted, low_rank
from bastile.ops.gated_mlp import gated_mlp
from bastile.ops.lora import Adapted, adapted_linears
from bastile.ops.projections import projections
from memory import Memory
from oracle import assert_no_worse_pooled, random_tensor
from test_lora import ROUNDED, Layer, group_case, make, mlp_case, trained

DX, LINEAR = "bastile.low_rank_dx.default", "bastile.low_rank_linear.default"
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_adapted, low_rank):
        monkeypatch.setattr(module, "on_gpu", lambda t: True)


def counts(run: Callable[[], Any]) -> tuple[int, int]:
    with Memory() as memory:
        run()
    return memory.calls.count(LINEAR), memory.calls.count(DX)


def differentiated(case: Any) -> Callable[[], Any]:
    inputs = [t.requires_grad_() for t in case.inputs.values()]

    def run() -> None:
        results = case.ours(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.grad(sum([(y * y).sum() for y in results]), inputs)

    return run


@pytest.mark.parametrize(("device", "mix"), ROUNDED, ids=str)
def test_layers_with_adapters(mix, device):
    layers = [Layer(128, 96, 16, bias=False), Layer(128, 64, 8, bias=True), Layer(128, 64, 0, bias=False)]
    assert counts(differentiated(group_case(layers, (8, 128), mix, device))) == (2, 1)
    assert_no_worse_pooled(lambda: group_case(layers, (256, 128), mix, device))


@pytest.mark.parametrize(("device", "mix"), ROUNDED, ids=str)
@pytest.mark.parametrize("ranks", [(16, 16, 16), (8, 16, 0)], ids=str)
def test_the_mlp_with_adapters(ranks, mix, device):
    """One of gate and up, and one of down, where down has an adapter."""
    adapted = 3 - ranks.count(0)
    assert counts(differentiated(mlp_case((128, 192), ranks, (8, 128), mix, device))) == (adapted, adapted - 1)
    assert_no_worse_pooled(lambda: mlp_case((128, 192), ranks, (256, 128), mix, device))


def weights_of(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    return [random_tensor(shape, BF16, "cpu", scale=shape[1] ** -0.5).requires_grad_() for shape in shapes]


PLAIN = {
    "projections": (lambda x, *w: sum([y.square().sum() for y in projections(x, *w)]), [(64, 32), (16, 32), (16, 32)]),
    "gated_mlp": (lambda x, *w: gated_mlp(x, *w).square().sum(), [(48, 32), (48, 32), (32, 48)]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_layers_without_adapters(name, monkeypatch):
    """As near to float64 as products that are added up, or nearer; to be differentiated twice it is these."""
    function, shapes = PLAIN[name]
    x, weights = random_tensor((40, 32), BF16, "cpu").requires_grad_(), weights_of(*shapes)
    found: list[Any] = []
    assert counts(lambda: found.append(torch.autograd.grad(function(x, *weights), [x, *weights]))) == (0, 1)
    assert counts(lambda: torch.autograd.grad(function(x, *weights), x, create_graph=True)) == (0, 0)
    monkeypatch.setattr(low_rank, "on_gpu", lambda t: False)
    assert counts(lambda: found.append(torch.autograd.grad(function(x, *weights), [x, *weights]))) == (0, 0)
    for one, other in zip(*found, strict=True):
        assert (one.double() - other.double()).norm() <= 0.01 * other.double().norm()


def four_bits(layers: list[Adapted]) -> list[Adapted]:
    """With weights that are made when they are asked for."""

    def made(layer: Adapted) -> Adapted:
        weight: Any = layer.weight
        return layer._replace(weight=None, dequantise=lambda dtype: weight.clone(), outputs=weight.shape[0])

    return [made(layer) for layer in layers]


#: Two layers of one input but where it says one, and how often both operators run. With dropout in an adapter dx is
#: more than a sum; weights that are made one at a time are not there at once; ranks count together.
OTHERS = {
    "dropout": (lambda: make("cpu", dtype=BF16, rank=8, p=0.2), (2, 0)),
    "four bits": (lambda: four_bits(make("cpu", dtype=BF16, rank=8)), (2, 0)),
    "one of four bits": (lambda: four_bits(make("cpu", count=1, dtype=BF16, rank=8)), (1, 1)),
    "float32": (lambda: make("cpu", rank=8), (0, 0)),
    "rank 5": (lambda: make("cpu", dtype=BF16, rank=5), (0, 0)),
    "rank 4": (lambda: make("cpu", dtype=BF16, rank=4), (0, 1)),
}


@pytest.mark.parametrize("name", ["x", "dy"])
def test_one_row_for_all(name):
    """An expanded x, or gradient, has no rows that a product of ours reads: PyTorch's do."""
    layers, row = make("cpu", dtype=BF16, rank=8), random_tensor((1, 32), BF16, "cpu")
    x = (row.expand(48, 32) if name == "x" else random_tensor((48, 32), BF16, "cpu")).detach().requires_grad_()
    with torch.autocast("cpu", BF16):
        results = adapted_linears(x, layers)
    dys = [random_tensor((1 if name == "dy" else 48, y.shape[1]), BF16, "cpu").expand(y.shape) for y in results]
    found = torch.autograd.grad(results, [x, *trained(layers)], dys)
    with torch.autocast("cpu", BF16):
        results = adapted_linears(x.detach().clone(memory_format=torch.contiguous_format).requires_grad_(), layers)
    dx = torch.autograd.grad(results, trained(layers), [dy.contiguous() for dy in dys])
    for one, other in zip(found[1:], dx, strict=True):
        assert (one.double() - other.double()).norm() <= 0.01 * other.double().norm()


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_one_product_and_what_is_not(name):
    layers_of, wanted = OTHERS[name]
    layers = layers_of()
    dtype = torch.float32 if name == "float32" else BF16
    x = random_tensor((48, 32), dtype, "cpu").requires_grad_()

    def run() -> None:
        with torch.autocast("cpu", BF16, enabled=dtype is BF16):
            results = adapted_linears(x, layers)
        torch.autograd.grad(sum([y.float().square().sum() for y in results]), [x, *trained(layers)])

    assert counts(run) == wanted
