"""Several projections of one input, whose gradients of it are added up by the products themselves.

Autograd adds the gradients that a tensor gets from its readers in passes over memory of their own. A matrix product can
add its result to what is there, so one node for all readers needs no such pass."""

from __future__ import annotations

import torch
from torch._C import _is_any_autocast_enabled  # a fraction of the host time of asking for one device
from torch.nn.functional import linear

from bastile.ops._common import PLAIN, Function, in_transform

__all__ = ["projections"]


class _Projections(Function):
    @staticmethod
    def forward(ctx, x, *weights):
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:]) else None, *weights)
        return tuple([linear(x, weight) for weight in weights])

    @staticmethod
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        if not _is_any_autocast_enabled():
            return _gradients(ctx, gradients, x, weights)
        # The products would be cast here, but not the sum that the second one adds to.
        with torch.autocast(weights[0].device.type, enabled=False):
            return _gradients(ctx, gradients, x, weights)


def _gradients(ctx, gradients, x, weights):
    """Of x and the weights. Made of what autograd knows, so they can be differentiated.

    The sum begins with the last weight, as autograd's does: so its partial sums are autograd's, and what is rounded
    here is rounded there too."""
    wanted = ctx.needs_input_grad
    rows = x if x is None else x.flatten(0, -2)
    dx, dweights = None, [None] * len(weights)
    for i in range(len(weights) - 1, -1, -1):
        dy = gradients[i]
        if dy is not None:
            dy = dy.flatten(0, -2)
            dx = dy.mm(weights[i]) if dx is None else dx.addmm_(dy, weights[i])
            if wanted[i + 1]:
                dweights[i] = dy.t().mm(rows)
    return dx if dx is None else dx.view(ctx.shape), *dweights


def _served(x: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> bool:
    """Whether the products of these may share a node: PyTorch's own tensors, which autocast leaves as they are."""
    if not (x.is_cuda or x.is_cpu) or x.dim() < 2 or any([type(t) not in PLAIN for t in (x, *weights)]):
        return False
    return not in_transform(x, *weights) and not (_is_any_autocast_enabled() and _is_cast(x, weights))


def _is_cast(x: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> bool:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device)
    return torch.is_autocast_enabled(device) and any(t.dtype is not dtype for t in (x, *weights))


def projections(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x @ weight.T for each weight, as linear layers without bias compute it.

    Args:
        x: [..., H], any type and strides.
        weights: [N, H] each, each with its own N, of x's type.

    Returns:
        One [..., N] for each weight, the bits that the layers give. Gradients flow to x and the weights, where they are
        wanted; x's is summed within the products, from the last weight to the first. Kept for them are x and the
        weights. Where that gains nothing (one weight, an x without gradient) or is not served (autocast to another
        type, an x of one dimension, devices other than CPU and CUDA, subclasses of tensors, functorch), each product is
        a node of its own.
    """
    if x.requires_grad and torch.is_grad_enabled() and len(weights) > 1 and _served(x, weights):
        return _Projections.apply(x, *weights)
    return tuple([linear(x, weight) for weight in weights])
