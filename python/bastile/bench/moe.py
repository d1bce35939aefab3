"""The experts of a mixture of experts: inputs, and their products alone.

A case's shape is (tokens, hidden size, size between the products, experts, experts of a token). There are two forms of
experts: GPT-OSS's, with weights as their products read them, biases, gate and up interleaved and clamped; and that of
most models, with weights as linear layers have them and SwiGLU of halves."""

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


def swiglu_inputs(case: Any, random: Any) -> Tensors:
    """Without biases, and the weights turned."""
    found = inputs(case, random)
    turned = {name: found[name].transpose(1, 2).contiguous() for name in ("gate_up", "down")}
    return {name: t for name, t in {**found, **turned}.items() if "bias" not in name}


def products(case: Any, tensors: Tensors) -> Callable[[Tensors], tuple[torch.Tensor, ...]]:
    """The products alone, on operands like the true ones: rows, and gradients of the size that they have."""
    is_oai = "gate_up_bias" in tensors
    from bastile.ops._grouped import grouped_matrices, grouped_rows

    _, position, ends = torch.ops.bastile.moe_sort(tensors["indices"], case.shape[3])
    rows, drows = (torch.ops.bastile.moe_gather(tensors[n], position.view(-1)) for n in ("hidden", "upstream 0"))
    h = grouped_rows(rows, _weights(tensors, is_oai)[0], ends)
    y = h[:, : case.shape[2]].contiguous()

    def run(t: Tensors) -> tuple[torch.Tensor, ...]:
        gate_up, down = _weights(t, is_oai)
        grouped_rows(rows, gate_up, ends)
        grouped_rows(y, down, ends)
        if case.backward:
            grouped_rows(drows, down.transpose(1, 2), ends)
            left, right = (y, drows) if is_oai else (drows, y)
            grouped_matrices(left, right, ends)
            grouped_rows(h, gate_up.transpose(1, 2), ends)
            left, right = (rows, h) if is_oai else (h, rows)
            grouped_matrices(left, right, ends)
        return ()

    return run


def _weights(tensors: Tensors, is_oai: bool) -> list[torch.Tensor]:
    """As the products read them."""
    found = [tensors[name].detach() for name in ("gate_up", "down")]
    return found if is_oai else [t.transpose(1, 2) for t in found]
