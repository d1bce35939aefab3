"""Softmax cross-entropy over a vocabulary: loss and gradient without float32 copies of the logits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from bastile.ops import _fakes  # registers the operators, with their fakes
from bastile.ops._common import Function, first_order_only, is_batched, is_last_pass, need_floats, served

__all__ = ["BastileCrossEntropyLoss", "cross_entropy"]

Reduction = Literal["none", "mean", "sum"]
#: bst_reduction in bastile.h.
REDUCTION = {"mean": 0, "sum": 1, "none": _fakes.NOT_REDUCED}

_forward = torch.ops.bastile.cross_entropy_forward.default
_forward_inplace = torch.ops.bastile.cross_entropy_forward_inplace.default
_backward = torch.ops.bastile.cross_entropy_backward.default
_scale = torch.ops.bastile.scale_.default


def scaled(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """For a backward pass: gradient · factor, in the gradient's own memory unless a second pass over a retained graph
    may need it again."""
    if torch.compiler.is_compiling() or is_batched(factor):
        return (gradient * factor).to(gradient.dtype)
    if not is_last_pass(factor) or not gradient.is_contiguous():
        gradient = gradient.clone(memory_format=torch.contiguous_format)
    _scale(gradient, factor)
    return gradient


class _CrossEntropy(Function):
    """Reads the logits in each pass, and leaves them alone."""

    @staticmethod
    def forward(ctx, logits, target, weight, num_items, *options):
        loss, lse = _forward(logits, target, weight, num_items, *options)
        ctx.save_for_backward(logits, target, weight, num_items, lse)
        ctx.options = options
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        logits, target, weight, num_items, lse = ctx.saved_tensors
        dlogits = _backward(grad_loss.contiguous(), logits, target, weight, num_items, lse, *ctx.options)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            dlogits = first_order_only("cross_entropy", dlogits, grad_loss, logits)
        return dlogits, *[None] * (3 + len(ctx.options))


class _CrossEntropyInplace(Function):
    """Writes the gradient, for an upstream gradient of one, over the logits in the forward pass."""

    @staticmethod
    def forward(ctx, logits, target, weight, num_items, *options):
        loss = _forward_inplace(logits, target, weight, num_items, *options)
        torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits)
        ctx.options = len(options)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        (logits,) = ctx.saved_tensors
        dlogits = scaled(logits.detach(), grad_loss)
        torch.autograd.graph.increment_version(dlogits)
        if torch.is_grad_enabled():
            dlogits = first_order_only("cross_entropy", dlogits, grad_loss, logits)
        return dlogits, *[None] * (3 + ctx.options)


def reference(logits, target, weight, num_items, ignore_index, reduction, smoothing, softcap, logit_scale, square):
    """The definition in plain torch, for devices and types without kernels."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    z = z.flatten(0, -2) if z.dim() != 1 else z[None]
    target = target.reshape(-1)
    z = z * logit_scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    by = "sum" if num_items is not None else reduction
    weight = None if weight is None else weight.to(z.dtype)
    loss = nn.functional.cross_entropy(
        z, target, weight, ignore_index=ignore_index, reduction=by, label_smoothing=smoothing
    )
    if square:
        kept = target != ignore_index
        squares = square * torch.logsumexp(z, -1).square() * kept
        loss = loss + (squares if by == "none" else squares.sum() / kept.sum() if by == "mean" else squares.sum())
    return loss if num_items is None else loss / num_items


def scalar_tensor(value: torch.Tensor | float | None, device: torch.device) -> torch.Tensor | None:
    """A number, or a tensor of one element, as float32 on a device, without waiting for it."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, torch.float32)
    return torch.full((), value, dtype=torch.float32, device=device)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    logit_scale: float = 1.0,
    num_items: torch.Tensor | float | None = None,
    inplace: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy(z, target)` of float32 z = softcap · tanh(logit_scale · logits / softcap).

    Args:
        logits: [T, V] or [..., V]; float32, bfloat16 or float16.
        target: [T] or [...], int64 (or uint8). On CPU a value outside [0, V) that is not ignore_index is an error; on
            CUDA, where checking would wait for the device, its row gives a NaN loss and a zero gradient.
        weight: [V], the weight of each class; it gets no gradient.
        ignore_index: rows with this target count for nothing.
        reduction: "mean" divides by the weights of the rows that count, as torch does; "sum"; or "none".
        label_smoothing: in [0, 1], as in torch.
        softcap: bounds z; None or 0 for no bound.
        lse_square_scale: adds this times log(sum exp(z))² to each row's loss; "mean" divides it by the number of rows
            that count.
        logit_scale: multiplies the logits.
        num_items: with "mean" or "sum", the sum is divided by this instead: a number, or a tensor of one element.
        inplace: writes the gradient over the logits in the forward pass: one read and one write per logit, no memory.
            The logits then hold their gradient, and autograd refuses to use them in any other backward pass. Not for
            reduction "none". The gradient is stored for an upstream gradient of one: with float16 and a loss scale,
            small elements may underflow before the scale reaches them. Where no gradient is wanted, or under
            torch.compile, which reuses memory by itself, the logits are left alone.

    Returns:
        float32: a scalar, or for "none" the shape of target.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    code = REDUCTION.get(reduction)
    if code is None:
        raise ValueError(
            f"cross_entropy: reduction is {reduction!r}; one of {', '.join(map(repr, REDUCTION))} is needed"
        )
    if inplace and reduction == "none":
        raise ValueError("cross_entropy: inplace needs reduction 'mean' or 'sum', not 'none'")
    if num_items is not None and reduction == "none":
        raise ValueError("cross_entropy: num_items divides a sum; reduction 'mean' or 'sum' is needed, not 'none'")
    is_served = served(logits)
    if not is_served:
        need_floats("cross_entropy", logits=logits)
    if weight is not None:
        need_floats("cross_entropy", weight=weight)
        if weight.requires_grad:
            raise ValueError("cross_entropy: weight requires a gradient, which is not computed; pass weight.detach()")
    if getattr(target, "shape", None) != logits.shape[:-1]:
        if not isinstance(target, torch.Tensor):
            raise TypeError(f"cross_entropy: target is a {type(target).__name__}; a tensor is needed")
        raise ValueError(
            f"cross_entropy: target has shape {list(target.shape)}; {list(logits.shape[:-1])}, that of logits without "
            "its last dimension, is needed"
        )
    options = (ignore_index, code, label_smoothing, softcap or 0.0, logit_scale, lse_square_scale)
    if not is_served:
        return reference(logits, target, weight, num_items, ignore_index, reduction, *options[2:]).view(
            target.shape if reduction == "none" else ()
        )
    if weight is not None:
        weight = weight.float()
    num_items = scalar_tensor(num_items, logits.device)
    arguments = (logits, target.reshape(-1), weight, num_items, *options)
    if inplace and logits.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        if logits.is_leaf:
            raise ValueError(
                "cross_entropy: inplace would overwrite logits, a leaf that requires a gradient; pass its clone"
            )
        return _CrossEntropyInplace.apply(*arguments)
    loss = _CrossEntropy.apply(*arguments)
    return loss.view(target.shape) if reduction == "none" else loss


class BastileCrossEntropyLoss(nn.Module):
    """`torch.nn.CrossEntropyLoss` for class indices, with the options of `cross_entropy`."""

    weight: torch.Tensor | None

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        lse_square_scale: float = 0.0,
        logit_scale: float = 1.0,
        inplace: bool = False,
    ):
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction: Reduction = reduction
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.lse_square_scale = lse_square_scale
        self.logit_scale = logit_scale
        self.inplace = inplace

    def forward(
        self, logits: torch.Tensor, target: torch.Tensor, *, num_items: torch.Tensor | float | None = None
    ) -> torch.Tensor:
        return cross_entropy(
            logits,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            lse_square_scale=self.lse_square_scale,
            logit_scale=self.logit_scale,
            num_items=num_items,
            inplace=self.inplace,
        )

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, inplace={self.inplace}"
