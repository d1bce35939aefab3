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
    def forward(ctx, x, weight, bias, seq_idx, silu):
        ctx.save_for_backward(x, weight, bias, seq_idx)
        ctx.silu = silu
        y = _forward(x.transpose(1, 2), weight, bias, seq_idx, silu).transpose(1, 2)
        return y if torch.compiler.is_compiling() else no_view(y)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, seq_idx = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        rows = dy.transpose(1, 2), x.transpose(1, 2)
        grads = list(_backward(*rows, weight, bias, seq_idx, ctx.silu, *wanted))
        grads[0] = grads[0].transpose(1, 2) if wanted[0] else None
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grads = [first_order_only("causal_conv1d", g, dy, x, weight, bias) for g in grads]
        return *[g if want else None for g, want in zip(grads, wanted, strict=True)], None, None


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


def _packed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, seq_idx: torch.Tensor) -> torch.Tensor:
    """The convolution of packed sequences, tap by tap: a token counts where no sequence has begun since."""
    begins = functional.pad((seq_idx[:, 1:] != seq_idx[:, :-1]).int(), (1, 0))
    number, before, tokens = begins.cumsum(1), weight.shape[1] - 1, x.shape[2]
    wide = torch.promote_types(weight.dtype, torch.float32)
    window, numbers = functional.pad(x.to(wide), (before, 0)), functional.pad(number, (before, 0), value=-1)
    z = torch.zeros((), dtype=wide, device=x.device) if bias is None else bias.to(wide)[:, None]
    for k, tap in enumerate(weight.to(wide).unbind(1)):
        counts = numbers[:, None, k : k + tokens] == number[:, None]
        z = z + torch.where(counts, window[..., k : k + tokens], 0) * tap[:, None]
    return z.to(weight.dtype)


def original(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, of weight's type and rounded to x's."""
    if seq_idx is None:
        window = weight.shape[-1]
        z = functional.conv1d(x.to(weight.dtype), weight[:, None], bias, padding=window - 1, groups=x.shape[1])
        z = z[..., : x.shape[-1]]
    else:
        z = _packed(x.to(weight.dtype), weight, bias, seq_idx)
    return (functional.silu(z) if ACTIVATIONS[activation] else z).to(x.dtype)


def _check_sequences(seq_idx: torch.Tensor, x: torch.Tensor) -> None:
    if not isinstance(seq_idx, torch.Tensor):
        raise TypeError(f"causal_conv1d: seq_idx is a {type(seq_idx).__name__}; a tensor is needed")
    if seq_idx.is_floating_point() or seq_idx.is_complex() or seq_idx.dtype is torch.bool:
        raise TypeError(f"causal_conv1d: seq_idx is {seq_idx.dtype}; an integer type is needed")
    if seq_idx.shape != (x.shape[0], x.shape[2]):
        needed = [x.shape[0], x.shape[2]]
        raise ValueError(f"causal_conv1d: seq_idx has shape {list(seq_idx.shape)}; {needed} is needed")


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """bias[c] + sum over k of weight[c, k] x[b, c, t - (K - 1) + k], then SiLU if it is asked for; x is 0 before the
    token's own sequence begins. In float32 throughout, and rounded once.

    Args:
        x: [B, C, T]; float32, bfloat16 or float16, any strides. Best is the transpose of [B, T, C], which a linear
            layer made; what has no channels side by side is copied first.
        weight: [C, K], of any of the three types. Windows of more than 8 tokens run the original torch code.
        bias: [C], of weight's type, or None.
        activation: None, "silu" or "swish", its other name.
        seq_idx: [B, T], for rows in which several sequences stand side by side (packing): which of them each token is
            of, as the package causal-conv1d has it. The tokens of a sequence stand next to each other: another begins
            wherever the number changes. Best is a contiguous int32; other integers are converted. None: each row is
            one sequence.

    Returns:
        [B, C, T] of x's type, the transpose of a contiguous [B, T, C]. Gradients flow to x, weight and bias; nothing
        but these, and seq_idx, is kept for them.

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
    if seq_idx is not None:
        _check_sequences(seq_idx, x)
        seq_idx = seq_idx.to(torch.int32).contiguous()
    if refusal(x, weight, bias, activation) is not None:
        return original(x, weight, bias, activation, seq_idx)
    return _CausalConv1d.apply(x, weight, bias, seq_idx, ACTIVATIONS[activation])
