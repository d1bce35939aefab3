"""What only a node's result needs: a checkpoint that runs its function again ends before it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bastile.ops.gated_mlp import gated_mlp, gated_mlp_of_halves
from bastile.ops.lora import Adapted, adapted_gated_mlp, adapted_linears
from memory import Memory
from oracle import assert_same_bits, devices, random_tensor

WIDTH, INNER, ROWS, RANK = 32, 48, 40, 4


def layer(inputs: int, outputs: int, device: str) -> Adapted:
    """With weights that need no memory of another layer: made anew, as those of four bits."""
    weight, a, b = (
        random_tensor(s, torch.float32, device) for s in ((outputs, inputs), (RANK, inputs), (outputs, RANK))
    )
    return Adapted(None, None, a.requires_grad_(), b.requires_grad_(), 0.5, dequantise=lambda _: weight.clone())


def cases(device: str) -> dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[torch.Tensor], int]]:
    """A function, what it trains, and the products that make what its backward pass reads."""
    gate, up, down, both = (
        random_tensor(s, torch.float32, device).requires_grad_()
        for s in ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER), (2 * INNER, WIDTH))
    )
    layers = [layer(WIDTH, INNER, device), layer(WIDTH, INNER, device), layer(INNER, WIDTH, device)]
    trained = [t for each in layers for t in (each.a, each.b) if t is not None]
    return {
        "gated_mlp": (lambda x: gated_mlp(x, gate, up, down), [gate, up, down], 2),
        "halves": (lambda x: gated_mlp_of_halves(x, both, down), [both, down], 1),
        "adapted_gated_mlp": (lambda x: adapted_gated_mlp(x, *layers), trained, 6),  # two thin ones, and two each
        "adapted_linears": (lambda x: adapted_linears(x, layers[:2])[1], trained[2:4], 1),
    }


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", ["gated_mlp", "halves", "adapted_gated_mlp", "adapted_linears"])
def test_the_last_products_are_not_made_twice(name, device):
    function, trained, read = cases(device)[name]
    x = random_tensor((2, ROWS // 2, WIDTH), torch.float32, device).requires_grad_()

    def products(calls: list[str]) -> int:
        return sum([call.startswith(("aten.mm", "aten.addmm")) for call in calls])

    found = []
    for again in (False, True):
        with Memory() as memory:
            y = checkpoint(function, x, use_reentrant=False) if again else function(x)
            forward = products(memory.calls)
            gradients = torch.autograd.grad(y.square().sum(), [x, *trained])
        found.append(([y.detach(), *gradients], products(memory.calls) - forward))
        assert memory.calls.count("bastile.swiglu_forward.default") == (name != "adapted_linears")
    for ours, theirs in zip(found[0][0], found[1][0], strict=True):
        assert_same_bits(ours, theirs)
    assert found[1][1] - found[0][1] == read
