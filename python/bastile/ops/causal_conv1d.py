"""The short convolution over time before a recurrence: each channel with a window of its own, which ends at the token
that it is for (Gu and Dao, 2023)."""

from __future__ import annotations

import torch
from torch.nn import functional

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import Function, first_order_only, need_floats, no_view, served

__all__ = ["causal_conv1d"]

_forward = torch.ops.bastile.causal_conv1d_forward.default
_backward = torch.ops.bastile.causal_conv1d_backward.default

#: The longest window that the kernels serve.
MOST_TAPS = 8
#: Whether an activation is SiLU, by the names that it has in models.
ACTIVATIONS = {None: False, "silu": True, "swish": True}


class _CausalConv1d(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, silu):
        ctx.save_for_backward(x, weight, bias)
        ctx.silu = silu
        y = _forward(x.transpose(1, 2), weight, bias, silu).transpose(1, 2)
        return y if torch.compiler.is_compiling() else no_view(y)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        grads = list(_backward(dy.transpose(1, 2), x.transpose(1, 2), weight, bias, ctx.silu, *wanted))
        grads[0] = grads[0].transpose(1, 2) if wanted[0] else None
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grads = [first_order_only("causal_conv1d", g, dy, x, weight, bias) for g in grads]
        return *[g if want else None for g, want in zip(grads, wanted, strict=True)], None


def refusal(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> str | None:
    """Why no kernel serves this call; None where one does. Of a call whose shapes fit."""
    if activation not in ACTIVATIONS:
        return "its activation is not SiLU"
    if weight.shape[-1] > MOST_TAPS:
        return f"its windows are of more than {MOST_TAPS} tokens"
    if bias is not None and bias.dtype != weight.dtype:
        return "its bias is not of its weight's type"
    return None if served(x, weight, bias) else "its tensors are of a kind that no kernel serves"


def original(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """The same in plain torch, of weight's type and rounded to x's."""
    window = weight.shape[-1]
    z = functional.conv1d(x.to(weight.dtype), weight[:, None], bias, padding=window - 1, groups=x.shape[1])
    z = z[..., : x.shape[-1]]
    return (functional.silu(z) if ACTIVATIONS[activation] else z).to(x.dtype)


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """bias[c] + sum over k of weight[c, k] x[b, c, t - (K - 1) + k], then SiLU if it is asked for; x is 0 before a
    sequence begins. In float32 throughout, and rounded once.

    Args:
        x: [B, C, T]; float32, bfloat16 or float16, any strides. Best is the transpose of [B, T, C], which a linear
            layer made; what has no channels side by side is copied first.
        weight: [C, K], of any of the three types. Windows of more than 8 tokens run the original torch code.
        bias: [C], of weight's type, or None.
        activation: None, "silu" or "swish", its other name.

    Returns:
        [B, C, T] of x's type, the transpose of a contiguous [B, T, C]. Gradients flow to x, weight and bias; nothing
        but these is kept for them.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"causal_conv1d: activation is {activation!r}; None, 'silu' or 'swish' is needed")
    need_floats("causal_conv1d", x=x, weight=weight, bias=bias)
    if x.dim() != 3:
        raise ValueError(f"causal_conv1d: x has shape {list(x.shape)}; [B, C, T] is needed")
    if weight.dim() != 2 or weight.shape[0] != x.shape[1] or not weight.shape[1]:
        raise ValueError(f"causal_conv1d: weight has shape {list(weight.shape)}; [{x.shape[1]}, K] is needed")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"causal_conv1d: bias has shape {list(bias.shape)}; [{x.shape[1]}] is needed")
    if refusal(x, weight, bias, activation) is not None:
        return original(x, weight, bias, activation)
    return _CausalConv1d.apply(x, weight, bias, ACTIVATIONS[activation])
