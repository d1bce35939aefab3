"""Several projections of one input, whose gradients of it are added up by the products themselves.

Autograd adds the gradients that a tensor gets from its readers in passes over memory of their own. A matrix product can
add its result to what is there, so one node for all readers needs no such pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C import _is_any_autocast_enabled  # a fraction of the host time of asking for one device
from torch.compiler import is_compiling
from torch.nn.functional import linear

from bastile.ops import low_rank
from bastile.ops._common import FLOATS, PLAIN, Function, cast_type, first_order_only, in_transform, is_batched, no_view
from bastile.ops._held_casts import cast_once
from bastile.ops._products import add_product, column_sums, product

__all__ = ["projections"]


class _Projections(Function):
    """dtype: None, or what autocast makes of x, the weights and biases, which are cast here: gradients have their own
    types, in which x's is summed. given: `count` weights, and as many biases or none."""

    @staticmethod
    def forward(ctx, x, dtype, count, *given):
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.cast_from, ctx.count, way_back = x.shape, None, count, None
        ctx.types = [None if t is None else t.dtype for t in given]
        if dtype is not None and any([t is not None and t.dtype is not dtype for t in (x, *given)]):
            if not is_compiling():  # for first_order_only, as inputs are not what is kept: an output without elements
                way_back = x.new_empty(0)
            ctx.cast_from = None if x.dtype is dtype else x.dtype
            x, *given = [None if t is None else t.to(dtype) for t in (x, *given)]
        weights, biases = given[:count], given[count:] or [None] * count
        ctx.save_for_backward(x if any(ctx.needs_input_grad[_BEFORE:][:count]) else None, way_back, *weights)
        products = [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        if not is_compiling() and any([bias is not None for bias in biases]):  # a layer with one returns a view
            products = [no_view(y) for y in products]
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


_BEFORE = 3  # what _Projections takes before its weights


def _gradients(ctx, gradients, x, way_back, weights):
    """Of x, the weights and biases. Made of what autograd knows, so they can be differentiated, but where something was
    cast.

    The sum begins with the last weight, as autograd's does: so its partial sums are autograd's, and nothing is rounded
    here that is not rounded there too: each product, and the sum of those to the type of x."""
    wanted, cast_from, count = ctx.needs_input_grad[_BEFORE:], ctx.cast_from, ctx.count
    rows = x if x is None else x.flatten(0, -2)
    which = [i for i in range(count - 1, -1, -1) if gradients[i] is not None]
    batched = is_batched(gradients[which[0]]) if which else False
    # vmap has no rule for flatten, which is the faster
    dys = [
        dy.reshape(dy.shape[:-1].numel(), dy.shape[-1]) if batched else dy.flatten(0, -2)
        for dy in [gradients[i] for i in which]
    ]
    dx, found = None, [None] * len(wanted)
    want_x = ctx.needs_input_grad[0]
    if want_x and which and cast_from is None and not torch.is_grad_enabled():
        dx = low_rank.input_gradient(dys, [weights[i] for i in which])
    in_parts = want_x and dx is None
    for i, dy in zip(which, dys, strict=True):
        if in_parts and dx is None:
            dx = product(dy, weights[i], cast_from or dy.dtype)
        elif in_parts:
            add_product(dx, dy, weights[i])
        if wanted[i]:
            found[i] = product(dy.t(), rows, ctx.types[i])
        if len(wanted) > count and wanted[count + i]:
            found[count + i] = column_sums(dy, ctx.types[count + i])
    dx = dx if dx is None else dx.view(ctx.shape)
    if way_back is not None and torch.is_grad_enabled() and not is_compiling():
        sources = *gradients, *weights, way_back
        dx, *found = [first_order_only("projections", g, *sources) for g in (dx, *found)]
    return dx, *[None] * (_BEFORE - 1), *found


def _served(x: torch.Tensor, given: tuple[torch.Tensor, ...]) -> bool:
    """Whether the products of these may share a node: PyTorch's own tensors."""
    if any([type(t) not in PLAIN for t in (x, *given)]) or not (x.is_cuda or x.is_cpu) or x.dim() < 2:
        return False
    return not in_transform(x, *given)


def projections(
    x: torch.Tensor, *weights: torch.Tensor, biases: Sequence[torch.Tensor | None] = ()
) -> tuple[torch.Tensor, ...]:
    """x @ weight.T for each weight, and its bias added, as linear layers compute it.

    Args:
        x: [..., H], any type and strides.
        weights: [N, H] each, each with its own N, of x's type (under autocast all are cast as linear layers cast them,
            x once for all; gradients of what is cast are then products' own sums, which CUDA does not round).
        biases: [N] for each weight, or None, likewise; empty: none has one.

    Returns:
        One [..., N] for each weight, the bits that the layers give, but in a call without gradients for one token of
        each of a few rows on a GPU, where all weights are read in one launch. Gradients flow to x, the weights and
        biases, where they are wanted; x's is summed within the products, from the last weight to the first. Kept for
        them are x and the weights, as the products read them. Where that gains nothing (one weight, an x without
        gradient) or is not served (an x of one dimension, devices other than CPU and CUDA, types that autocast does not
        cast under it, subclasses of tensors, functorch), each product is a node of its own. A second differentiation is
        an error where something was cast.

    Raises:
        ValueError: for another number of biases than of weights.
    """
    if biases and len(biases) != len(weights):
        raise ValueError(f"projections: {len(biases)} biases of {len(weights)} weights; as many are needed, or none")
    if torch.is_grad_enabled() and len(weights) > 1:
        given = (*weights, *[bias for bias in biases if bias is not None])
        if _served(x, given) and x.requires_grad:
            dtype = cast_type(x) if _is_any_autocast_enabled() else None
            if dtype is None or all([t.dtype in FLOATS for t in (x, *given)]):
                return _Projections.apply(x, dtype, len(weights), *weights, *biases)[: len(weights)]
    x, cast = cast_once(x, [*weights, *(biases or [None] * len(weights))])
    of_weights, of_biases = cast[: len(weights)], cast[len(weights) :]
    found = low_rank.one_token_layers(x, of_weights, of_biases)
    if found is not None:
        return tuple(found)
    return tuple([linear(x, weight, bias) for weight, bias in zip(of_weights, of_biases, strict=True)])
