"""Rotary position embedding of queries and keys (Su et al., 2021)."""

from __future__ import annotations

import torch

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import FLOATS, Function, first_order_only, served
from bastile.ops._heads import MOST_DIM, check_heads, dense, tokens_first, turn

__all__ = ["rope"]

_forward = torch.ops.bastile.rope_forward.default
_backward = torch.ops.bastile.rope_backward.default


class _Rope(Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        ctx.dtype = FLOATS.index(q.dtype)
        ctx.tokens_first = tokens_first(q), tokens_first(k)
        turned = _forward(dense(q), dense(k), cos, sin, interleaved, *ctx.tokens_first)
        # Attention computes no gradient for the one whose projection is frozen.
        frozen = [t for t, wanted in zip(turned, ctx.needs_input_grad, strict=False) if not wanted]
        if frozen:
            ctx.mark_non_differentiable(*frozen)
        return turned

    @staticmethod
    def backward(ctx, dq_out, dk_out):
        cos, sin = ctx.saved_tensors
        want_dq, want_dk = ctx.needs_input_grad[:2]
        q_first, k_first = ctx.tokens_first
        dq = dk = None
        if want_dq and want_dk:
            dq, dk = _backward(dense(dq_out), dense(dk_out), cos, sin, ctx.interleaved, q_first, k_first, ctx.dtype)
        elif want_dq:
            dq, _ = _backward(dense(dq_out), None, cos, sin, ctx.interleaved, q_first, False, ctx.dtype)
        elif want_dk:
            dk, _ = _backward(dense(dk_out), None, cos, sin, ctx.interleaved, k_first, False, ctx.dtype)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            dq = first_order_only("rope", dq, dq_out)
            dk = first_order_only("rope", dk, dk_out)
        return dq, dk, None, None, None


def _kernels_serve(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return (
        served(q, k, cos, sin)
        and q.dtype == k.dtype
        and cos.dtype == sin.dtype
        and not (cos.requires_grad or sin.requires_grad)
        and q.dim() == k.dim() == 4
        and q.shape[-1] <= MOST_DIM
    )


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns q and k by the angles whose cosines and sines are given: x cos + partner(x) sin.

    Args:
        q: [B, heads, S, D]; float32, bfloat16 or float16, any strides: usually a transposed view of [B, S, heads, D].
        k: [B, kv_heads, S, D], of q's type.
        cos: [B or 1, S, R], R even and at most D: the first R elements of a head turn, the others are copied. Of any of
            the three types.
        sin: as cos. Tables that want gradients, and q and k of two types, run the original torch code.
        interleaved: pairs are neighbours (2i, 2i + 1), as in Cohere; else they are (i, i + R/2), as in Llama and Qwen.

    Returns:
        q and k turned, in the memory order in which they came and in the promoted type of q and cos; computed in
        float32 and rounded once. Gradients flow to q and k.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    if not _kernels_serve(q, k, cos, sin):
        check_heads("rope", q, k, cos, sin)
        return turn(q, cos, sin, interleaved), turn(k, cos, sin, interleaved)
    return _Rope.apply(q, k, dense(cos), dense(sin), interleaved)
