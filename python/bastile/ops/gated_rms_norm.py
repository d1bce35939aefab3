"""RMSNorm with a gate, of linear attention and Mamba-2: y = norm(x) · weight · act(gate), or norm(x · act(gate)) ·
weight (Dao and Gu, 2024)."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling
from torch.nn import functional

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import Function, first_order_only, need_floats, served
from bastile.ops.rms_norm import check_weight
from bastile.recompute import offer

__all__ = ["gated_rms_norm"]

_ACTIVATIONS = {"silu": functional.silu, "sigmoid": torch.sigmoid}
_CODES = {name: code for code, name in enumerate(_ACTIVATIONS)}

_forward = torch.ops.bastile.gated_rms_norm_forward.default
_backward = torch.ops.bastile.gated_rms_norm_backward.default


class _GatedRMSNorm(Function):
    @staticmethod
    def forward(ctx, x, gate, weight, *options):
        ctx.save_for_backward(x, gate, weight)
        ctx.options = options
        return _forward(x, gate, weight, *options)

    @staticmethod
    def backward(ctx, dy):
        inputs, wanted = ctx.saved_tensors, ctx.needs_input_grad[:3]
        gradients = _backward(dy, *inputs, *ctx.options, *wanted)
        if torch.is_grad_enabled() and not is_compiling():
            gradients = [first_order_only("gated_rms_norm", each, dy, *inputs) for each in gradients]
        gradients = [each if want else None for each, want in zip(gradients, wanted, strict=True)]
        return *gradients, *[None] * len(ctx.options)


def _reference(x, gate, weight, eps, activation, gate_first, group, promote):
    """The definition in plain torch, for devices and types without kernels."""
    y_type = torch.promote_types(x.dtype, weight.dtype) if promote else x.dtype
    exact = torch.promote_types(torch.promote_types(x.dtype, gate.dtype), torch.float32)
    u, value = x.to(exact), _ACTIVATIONS[activation](gate.to(exact))
    if gate_first:
        u = u * value
    grouped = u.unflatten(-1, (u.shape[-1] // group, group)) if group else u
    normed = (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)).view_as(u) * weight.to(exact)
    return (normed if gate_first else normed * value).to(y_type)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    activation: str = "silu",
    gate_first: bool = False,
    group: int = 0,
    promote: bool = False,
) -> torch.Tensor:
    """RMSNorm over the last dimension, or over groups of it, times weight and an activated gate; in float32 and rounded
    once.

    Args:
        x: [..., H], 1 <= H <= 65536; float32, bfloat16 or float16, any strides.
        gate: of x's shape, of any of these types and strides.
        weight: [H], of any of these types.
        eps: added to the mean of squares.
        activation: of the gate: "silu" or "sigmoid".
        gate_first: whether x is multiplied with act(gate) before the norm, as in Mamba-2, and not its result.
        group: how many neighbouring columns are normed together, a divisor of H; 0 for all.
        promote: whether the result has the type that PyTorch gives x * weight, and not x's.

    Returns:
        [..., H], contiguous. Gradients flow to x, gate and weight; nothing but these three is kept for them, and
        dweight is summed in float32 in a fixed order.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    code = _CODES.get(activation)
    if code is None:
        raise ValueError(f"gated_rms_norm: activation is {activation!r}; 'silu' or 'sigmoid' is needed")
    if not served(x, gate, weight):
        _check(x, gate, weight, group)
        return _reference(x, gate, weight, eps, activation, gate_first, group, promote)
    options = eps, code, gate_first, group, promote
    y = _GatedRMSNorm.apply(x, gate, weight, *options)
    offer(_forward, (x, gate, weight, *options), y)
    return y


def _check(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, group: int) -> None:
    """Raises for what the plain torch code would broadcast. For the branch that runs it: kernels check."""
    need_floats("gated_rms_norm", x=x, gate=gate)
    check_weight("gated_rms_norm", "weight", weight, x)
    if gate.shape != x.shape:
        raise ValueError(f"gated_rms_norm: gate has shape {list(gate.shape)}; {list(x.shape)}, that of x, is needed")
    if group < 0 or (group and x.shape[-1] % group):
        raise ValueError(f"gated_rms_norm: group is {group}, and x has rows of {x.shape[-1]}; a divisor is needed")
