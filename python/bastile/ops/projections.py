"""Several projections of one input, whose gradients of it are added up by the products themselves.

Autograd adds the gradients that a tensor gets from its readers in passes over memory of their own. A matrix product can
add its result to what is there, so one node for all readers needs no such pass."""

from __future__ import annotations

import torch
from torch._C import _is_any_autocast_enabled  # a fraction of the host time of asking for one device
from torch.nn.functional import linear

from bastile.ops._common import FLOATS, PLAIN, Function, first_order_only, in_transform

__all__ = ["projections"]


class _Projections(Function):
    @staticmethod
    def forward(ctx, x, *weights):
        ctx.set_materialize_grads(False)
        dtype = _cast_type(x) or x.dtype
        ctx.shape, ctx.dtype, ctx.is_cast = x.shape, x.dtype, x.dtype is not dtype
        if ctx.is_cast:
            x = x.to(dtype)
        # For first_order_only, as what is kept is no longer x: an output without elements.
        way_back = x.new_empty(0) if ctx.is_cast and not torch.compiler.is_compiling() else None
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:]) else None, way_back, *weights)
        return *[linear(x, weight) for weight in weights], way_back

    @staticmethod
    def backward(ctx, *gradients):
        if not _is_any_autocast_enabled():
            return _gradients(ctx, gradients[:-1])
        # The products would be cast here, but not the sum that the second one adds to.
        with torch.autocast(ctx.saved_tensors[2].device.type, enabled=False):
            return _gradients(ctx, gradients[:-1])


def _gradients(ctx, gradients):
    """Of x and the weights. Made of what autograd knows, so they can be differentiated, but for an x that was cast.

    The sum begins with the last weight, as autograd's does: so its partial sums are autograd's, and what is rounded
    here is rounded there too: each product, and the sum of those to the type of x."""
    x, way_back, *weights = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    rows = x if x is None else _rows(x)
    dx, dweights = None, [None] * len(weights)
    for i in range(len(weights) - 1, -1, -1):
        dy = gradients[i]
        if dy is not None:
            dy = _rows(dy)
            if dx is None:
                dx = dy.mm(weights[i])
                dx = dx.to(ctx.dtype) if ctx.is_cast else dx
            elif ctx.is_cast:
                dx.add_(dy.mm(weights[i]))
            else:
                dx.addmm_(dy, weights[i])
            if wanted[i + 1]:
                dweights[i] = dy.t().mm(rows)
    dx = dx if dx is None else dx.view(ctx.shape)
    if ctx.is_cast and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return tuple([first_order_only("projections", g, *gradients, *weights, way_back) for g in (dx, *dweights)])
    return dx, *dweights


def _rows(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(t.shape[:-1].numel(), t.shape[-1])  # vmap has no rule for flatten


def _served(x: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> bool:
    """Whether the products of these may share a node: PyTorch's own tensors, that are of one type or cast to one."""
    if any([type(t) not in PLAIN for t in (x, *weights)]) or not (x.is_cuda or x.is_cpu) or x.dim() < 2:
        return False
    if in_transform(x, *weights):
        return False
    return _cast_type(x) is None or all([t.dtype in FLOATS for t in (x, *weights)])


def _cast_type(x: torch.Tensor) -> torch.dtype | None:
    """The type to which autocast casts what a linear layer multiplies; None where it is off."""
    if not _is_any_autocast_enabled() or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def projections(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x @ weight.T for each weight, as linear layers without bias compute it.

    Args:
        x: [..., H], any type and strides.
        weights: [N, H] each, each with its own N, of x's type (under autocast all are cast as linear layers cast them,
            x once for all).

    Returns:
        One [..., N] for each weight, the bits that the layers give. Gradients flow to x and the weights, where they are
        wanted; x's is summed within the products, from the last weight to the first. Kept for them are x and the
        weights, as the products read them. Where that gains nothing (one weight, an x without gradient) or is not
        served (an x of one dimension, devices other than CPU and CUDA, types that autocast does not cast under it,
        subclasses of tensors, functorch), each product is a node of its own. A second differentiation is an error where
        x was cast.
    """
    if torch.is_grad_enabled() and len(weights) > 1 and _served(x, weights) and x.requires_grad:
        dtype = _cast_type(x)  # x is cast within, so that the sum of its gradients has x's own type
        return _Projections.apply(x, *(weights if dtype is None else [weight.to(dtype) for weight in weights]))[:-1]
    return tuple([linear(x, weight) for weight in weights])
