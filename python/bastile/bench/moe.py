"""The experts of a mixture of experts: inputs, and their products alone.

A case's shape is (tokens, hidden size, size between the products, experts, experts of a token)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def inputs(case: Any, random: Any) -> Tensors:
    """A router that has learnt nothing: every expert is as likely, and rows fall unevenly by chance."""
    tokens, width, inner, experts, choices = case.shape
    scores, indices = torch.randn((tokens, experts), device=random.device).topk(choices)
    return {
        "hidden": random(tokens, width),
        "indices": indices,
        "weights": scores.softmax(-1).to(random.dtype),
        "gate_up": random(experts, width, 2 * inner, scale=width**-0.5),
        "gate_up_bias": random(experts, 2 * inner, scale=0.1),
        "down": random(experts, inner, width, scale=inner**-0.5),
        "down_bias": random(experts, width, scale=0.1),
        "upstream 0": random(tokens, width),
    }


def products(case: Any, tensors: Tensors) -> Callable[[Tensors], tuple[torch.Tensor, ...]]:
    """The products alone, on operands like the true ones: rows, and gradients of the size that they have."""
    from bastile.ops._grouped import grouped_matrices, grouped_rows

    order, _, ends = torch.ops.bastile.moe_sort(tensors["indices"], case.shape[3])
    rows = torch.ops.bastile.moe_gather(tensors["hidden"], order)
    drows = torch.ops.bastile.moe_gather(tensors["upstream 0"], order)
    h = grouped_rows(rows, tensors["gate_up"].detach(), ends)
    y = torch.ops.bastile.moe_glu_forward(h, tensors["gate_up_bias"].detach(), ends, 1.702, 7.0)

    def run(t: Tensors) -> tuple[torch.Tensor, ...]:
        gate_up, down = t["gate_up"].detach(), t["down"].detach()
        grouped_rows(rows, gate_up, ends)
        grouped_rows(y, down, ends)
        if case.backward:
            grouped_rows(drows, down.transpose(1, 2), ends)
            grouped_matrices(y, drows, ends)
            grouped_rows(h, gate_up.transpose(1, 2), ends)
            grouped_matrices(rows, h, ends)
        return ()

    return run
