"""Several projections of one input, whose gradients of it are added up by the products themselves.

Autograd adds the gradients that a tensor gets from its readers in passes over memory of their own. A matrix product can
add its result to what is there, so one node for all readers needs no such pass."""

from __future__ import annotations

import torch
from torch._C import _is_any_autocast_enabled  # a fraction of the host time of asking for one device
from torch.compiler import is_compiling
from torch.nn.functional import linear

from bastile.ops import low_rank
from bastile.ops._common import FLOATS, PLAIN, Function, cast_type, first_order_only, in_transform, is_batched
from bastile.ops._products import add_product, product

__all__ = ["projections"]


class _Projections(Function):
    """dtype: None, or what autocast makes of x and the weights, which are cast here: gradients have their own types, in
    which x's is summed."""

    @staticmethod
    def forward(ctx, x, dtype, *weights):
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.cast_from, way_back = x.shape, None, None
        ctx.of_weights = [weight.dtype for weight in weights]
        if dtype is not None and any([t.dtype is not dtype for t in (x, *weights)]):
            if not is_compiling():  # for first_order_only, as inputs are not what is kept: an output without elements
                way_back = x.new_empty(0)
            ctx.cast_from = None if x.dtype is dtype else x.dtype
            x, *weights = [t.to(dtype) for t in (x, *weights)]
        ctx.save_for_backward(x if any(ctx.needs_input_grad[2:]) else None, way_back, *weights)
        products = [linear(x, weight) for weight in weights]
        return tuple(products) if way_back is None else (*products, way_back)

    @staticmethod
    def backward(ctx, *gradients):
        x, way_back, *weights = ctx.saved_tensors
        if way_back is not None:
            gradients = gradients[:-1]
        if not _is_any_autocast_enabled():
            return _gradients(ctx, gradients, x, way_back, weights)
        # The products would be cast here, but not the sum that the second one adds to.
        with torch.autocast(weights[0].device.type, enabled=False):
            return _gradients(ctx, gradients, x, way_back, weights)


def _gradients(ctx, gradients, x, way_back, weights):
    """Of x and the weights. Made of what autograd knows, so they can be differentiated, but where something was cast.

    The sum begins with the last weight, as autograd's does: so its partial sums are autograd's, and nothing is rounded
    here that is not rounded there too: each product, and the sum of those to the type of x."""
    wanted, cast_from = ctx.needs_input_grad, ctx.cast_from
    rows = x if x is None else x.flatten(0, -2)
    which = [i for i in range(len(weights) - 1, -1, -1) if gradients[i] is not None]
    batched = is_batched(gradients[which[0]]) if which else False
    # vmap has no rule for flatten, which is the faster
    dys = [
        dy.reshape(dy.shape[:-1].numel(), dy.shape[-1]) if batched else dy.flatten(0, -2)
        for dy in [gradients[i] for i in which]
    ]
    dx, dweights = None, [None] * len(weights)
    if which and cast_from is None and not torch.is_grad_enabled():
        dx = low_rank.input_gradient(dys, [weights[i] for i in which])
    in_parts = dx is None
    for i, dy in zip(which, dys, strict=True):
        if in_parts and dx is None:
            dx = product(dy, weights[i], cast_from or dy.dtype)
        elif in_parts:
            add_product(dx, dy, weights[i])
        if wanted[i + 2]:
            dweights[i] = product(dy.t(), rows, ctx.of_weights[i])
    dx = dx if dx is None else dx.view(ctx.shape)
    if way_back is not None and torch.is_grad_enabled() and not is_compiling():
        sources = *gradients, *weights, way_back
        dx, *dweights = [first_order_only("projections", g, *sources) for g in (dx, *dweights)]
    return dx, None, *dweights


def _served(x: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> bool:
    """Whether the products of these may share a node: PyTorch's own tensors."""
    if any([type(t) not in PLAIN for t in (x, *weights)]) or not (x.is_cuda or x.is_cpu) or x.dim() < 2:
        return False
    return not in_transform(x, *weights)


def projections(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x @ weight.T for each weight, as linear layers without bias compute it.

    Args:
        x: [..., H], any type and strides.
        weights: [N, H] each, each with its own N, of x's type (under autocast all are cast as linear layers cast them,
            x once for all; gradients of what is cast are then products' own sums, which CUDA does not round).

    Returns:
        One [..., N] for each weight, the bits that the layers give. Gradients flow to x and the weights, where they are
        wanted; x's is summed within the products, from the last weight to the first. Kept for them are x and the
        weights, as the products read them. Where that gains nothing (one weight, an x without gradient) or is not
        served (an x of one dimension, devices other than CPU and CUDA, types that autocast does not cast under it,
        subclasses of tensors, functorch), each product is a node of its own. A second differentiation is an error where
        something was cast.
    """
    if torch.is_grad_enabled() and len(weights) > 1 and _served(x, weights) and x.requires_grad:
        dtype = cast_type(x) if _is_any_autocast_enabled() else None
        if dtype is None:
            return _Projections.apply(x, None, *weights)
        if all([t.dtype in FLOATS for t in (x, *weights)]):
            return _Projections.apply(x, dtype, *weights)[: len(weights)]
    return tuple([linear(x, weight) for weight in weights])
