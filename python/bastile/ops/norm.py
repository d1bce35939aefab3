"""LayerNorm: y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias (Ba, Kiros and Hinton, 2016)."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import Function, first_order_only, need_floats, served
from bastile.ops.rms_norm import adds_as_torch, check_weight, gradients_of_terms, of_two_types

__all__ = ["add_layer_norm", "layer_norm"]

#: kind and casting of bst_norm_options, where y has x's type and where it is float32.
_LAYER, _IN_FLOAT32 = (1, 2), (1, 3)

_forward = torch.ops.bastile.norm_forward.default
_backward = torch.ops.bastile.norm_backward.default
_add_forward = torch.ops.bastile.add_norm_forward.default
_add_backward = torch.ops.bastile.add_norm_backward.default


class _LayerNorm(Function):
    """y, and with a residual the sum."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, kind):
        ctx.set_materialize_grads(False)
        ctx.types, ctx.kind, total = None, kind, None
        if residual is None:
            y, mean, rstd = _forward(x, weight, bias, eps, *kind)
        else:
            ctx.types, terms = of_two_types(x, residual)
            y, total, mean, rstd = _add_forward(*terms, weight, bias, eps, *kind)
        ctx.save_for_backward(x if total is None else total, weight, mean, rstd)
        ctx.added = total is not None
        return (y, total) if ctx.added else y

    @staticmethod
    def backward(ctx, dy, dsum=None):
        want_dx, want_dresidual, want_dweight, want_dbias, *_ = ctx.needs_input_grad
        dx, dweight, dbias = dsum, None, None  # where y went nowhere: what is left is the addition
        if dy is not None:
            total, *kept = ctx.saved_tensors
            how = *kept, *ctx.kind, want_dx or want_dresidual, want_dweight, want_dbias
            if dsum is None:
                dx, dweight, dbias = _backward(dy, total, *how)
            else:
                dx, dweight, dbias = _add_backward(dy, dsum, total, *how)
            if torch.is_grad_enabled() and not is_compiling():
                op = "add_layer_norm" if ctx.added else "layer_norm"
                dx = first_order_only(op, dx, dy, dsum, total, kept[0])
                dweight = first_order_only(op, dweight, dy, total, kept[0])
                dbias = first_order_only(op, dbias, dy)
        of_terms = gradients_of_terms(dx, ctx.types, ctx.needs_input_grad)
        return *of_terms, dweight if want_dweight else None, dbias if want_dbias else None, None, None


def _served(op: str, x, residual, weight, bias) -> bool:
    """Whether kernels serve these; what PyTorch's own code serves is checked for what it would broadcast."""
    if served(x, residual, weight, bias):
        return True
    need_floats(op, x=x, residual=residual)
    check_weight(op, "weight", weight, x)
    check_weight(op, "bias", bias, x)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"{op}: residual has shape {list(residual.shape)}; {list(x.shape)}, that of x, is needed")
    return False


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    float32_output: bool = False,
) -> torch.Tensor:
    """LayerNorm over the last dimension, in float32 and rounded to x's type once, or not at all.

    Args:
        x: [..., H], 1 <= H <= 65536; float32, bfloat16 or float16, any strides.
        weight: [H] of any of these types, or None for ones.
        bias: [H] of weight's type (without a weight x's), or None for zeros.
        eps: added to the variance.
        float32_output: what has 16 bits is normed to float32, as autocast on CUDA has it.

    Returns:
        [..., H] of x's type or float32, contiguous. Gradients flow to x, weight and bias, each in its own type.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    if not _served("layer_norm", x, None, weight, bias):
        if float32_output and x.dtype.itemsize == 2:
            weight, bias = [None if t is None else t.float() for t in (weight, bias)]
            x = x.float()
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return _LayerNorm.apply(x, None, weight, bias, eps, _IN_FLOAT32 if float32_output else _LAYER)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    float32_output: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The addition of a residual and the LayerNorm of the sum, in one pass; backward too.

    Returns y and sum = x + residual, rounded to the type that torch gives it, also where y is float32. Either of the
    two may be float32 and the other of 16 bits; bfloat16 and float16 are added by torch. The rest is as for
    `layer_norm`; changing the sum in place is an error where there is a backward pass.
    """
    if not _served("add_layer_norm", x, residual, weight, bias) or not adds_as_torch(x, residual):
        total = x + residual
        return layer_norm(total, weight, bias, eps, float32_output=float32_output), total
    return _LayerNorm.apply(x, residual, weight, bias, eps, _IN_FLOAT32 if float32_output else _LAYER)
