"""A linear layer of float32 under autocast, as one node of autograd.

Autocast casts what a layer multiplies to 16 bits by nodes of their own, and so is each gradient cast back: rounded to
16 bits, written, read and written again. Here the products of the backward pass write float32."""

from __future__ import annotations

import torch
from torch._C import _is_any_autocast_enabled  # a fraction of the host time of asking for one device
from torch.compiler import is_compiling
from torch.nn.functional import linear

from bastile.ops._common import HALVES, Function, cast_type, first_order_only, no_view, served, without_autocast
from bastile.ops._products import column_sums, product

__all__ = ["autocast_linear"]


class _AutocastLinear(Function):
    """Keeps what the products read: x and the weight, cast."""

    @staticmethod
    def forward(ctx, x, weight, bias, dtype):
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.cast_from = x.shape, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        want_x, want_weight, *_ = ctx.needs_input_grad
        way_back = x.new_empty(0)  # for first_order_only, as inputs are not kept: an output without elements
        x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x if want_weight else None, weight if want_x else None, way_back)
        return no_view(linear(x, weight, None if bias is None else bias.to(dtype))), way_back

    @staticmethod
    def backward(ctx, dy, _):
        if dy is None:
            return None, None, None, None
        with without_autocast(dy.device.type):  # what the products read has one type
            return *_gradients(ctx, dy), None


def _gradients(ctx, dy):
    x, weight, way_back = ctx.saved_tensors
    want_x, want_weight, want_bias, _ = ctx.needs_input_grad
    of_x, of_weight, of_bias = ctx.cast_from
    rows = dy.reshape(-1, dy.shape[-1])
    dx = product(rows, weight, of_x).view(ctx.shape) if want_x else None
    dweight = product(rows.t(), x.reshape(-1, x.shape[-1]), of_weight) if want_weight else None
    dbias = column_sums(rows, of_bias) if want_bias else None
    gradients = dx, dweight, dbias
    if torch.is_grad_enabled():
        gradients = tuple([first_order_only("autocast_linear", g, dy, x, weight, way_back) for g in gradients])
    return gradients


def autocast_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch.nn.functional.linear, whose gradients under autocast to 16 bits are not rounded to these.

    Args:
        x: [..., H]; float32, bfloat16 or float16, CPU or CUDA, any strides.
        weight: [N, H], likewise.
        bias: [N], likewise.

    Returns:
        [..., N] in autocast's type, the bits that `linear` gives. Gradients flow to all three, each in its own type: of
        float32 inputs they are, on CUDA, the products' own sums, dbias a sum in float32; on CPU, where PyTorch has no
        such product, dx and dweight are rounded as autograd's are. They cannot be differentiated. Without autocast,
        where nothing but 16 bits is given, for other types and devices, under torch.compile and functorch, `linear`
        itself.
    """
    if _is_any_autocast_enabled() and torch.is_grad_enabled() and not is_compiling():
        given = (x, weight) if bias is None else (x, weight, bias)
        if served(*given) and x.dim() > 1 and any([t.dtype is torch.float32 and t.requires_grad for t in given]):
            dtype = cast_type(x)
            if dtype in HALVES:
                return _AutocastLinear.apply(x, weight, bias, dtype)[0]
    return linear(x, weight, bias)
