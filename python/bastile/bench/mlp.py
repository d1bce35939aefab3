"""The gated MLP: inputs, and its products alone.

A case's shape is (tokens, hidden size, size between the products)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

ARGUMENTS = ("x", "gate", "up", "down")


def inputs(case: Any, random: Callable[..., torch.Tensor]) -> Tensors:
    tokens, width, inner = case.shape
    return {
        "x": random(tokens, width),
        "gate": random(inner, width, scale=width**-0.5),
        "up": random(inner, width, scale=width**-0.5),
        "down": random(width, inner, scale=inner**-0.5),
        "upstream 0": random(tokens, width),
    }


def products(case: Any, tensors: Tensors) -> Callable[[Tensors], tuple[torch.Tensor, ...]]:
    """The products alone, on the true operands: power limits products, and power depends on the values."""
    x, gate, up, down = (tensors[name].detach() for name in ARGUMENTS)
    dout = tensors["upstream 0"]
    a, b = x @ gate.t(), x @ up.t()
    y = torch.ops.bastile.swiglu_forward(a, b)
    dy = dout @ down
    da, db = torch.ops.bastile.swiglu_backward(dy, a, b, True, True)
    out, dx, of_weight = torch.empty_like(x), torch.empty_like(x), [torch.empty_like(w) for w in (gate, up, down)]

    def run(t: Tensors) -> tuple[torch.Tensor, ...]:
        x, gate, up, down = (t[name].detach() for name in ARGUMENTS)
        torch.mm(x, gate.t(), out=a)
        torch.mm(x, up.t(), out=b)
        torch.mm(y, down.t(), out=out)
        if case.backward:
            torch.mm(dout, down, out=dy)
            torch.mm(dout.t(), y, out=of_weight[2])
            torch.mm(da, gate, out=dx)
            torch.addmm(dx, db, up, out=dx)
            torch.mm(da.t(), x, out=of_weight[0])
            torch.mm(db.t(), x, out=of_weight[1])
        return ()

    return run
