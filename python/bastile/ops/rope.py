"""Rotary position embedding of queries and keys (Su et al., 2021)."""

from __future__ import annotations

import torch

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import FLOATS, Function, first_order_only, served
from bastile.ops._heads import MOST_DIM, Layout, check_heads, dense, layout_code, tokens_first, turn

__all__ = ["rope"]

_forward = torch.ops.bastile.rope_forward.default
_backward = torch.ops.bastile.rope_backward.default


class _Rope(Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, options):
        ctx.save_for_backward(cos, sin)
        ctx.options = options
        ctx.dtype = FLOATS.index(q.dtype)
        ctx.tokens_first = tokens_first(q), tokens_first(k)
        turned = _forward(dense(q), dense(k), cos, sin, *options, *ctx.tokens_first)
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
            dq, dk = _backward(dense(dq_out), dense(dk_out), cos, sin, *ctx.options, q_first, k_first, ctx.dtype)
        elif want_dq:
            dq, _ = _backward(dense(dq_out), None, cos, sin, *ctx.options, q_first, False, ctx.dtype)
        elif want_dk:
            dk, _ = _backward(dense(dk_out), None, cos, sin, *ctx.options, k_first, False, ctx.dtype)
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
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    layout: Layout | None = None,
    half_tables: bool = False,
    keep_type: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns q and k by the angles whose cosines and sines are given: x cos + partner(x) sin.

    Args:
        q: [B, heads, S, D]; float32, bfloat16 or float16, any strides: usually a transposed view of [B, S, heads, D].
        k: [B, kv_heads, S, D], of q's type.
        cos: [B or 1, S, R], R even and at most D: the first R elements of a head turn, the others are copied. Of any of
            the three types. Its columns lie as the result's do.
        sin: as cos. Tables that want gradients, and q and k of two types, run the original torch code.
        interleaved: True is layout="interleaved".
        layout: where the two members of pair i are: "halves", the usual, at i and i + R/2, as in Llama and Qwen;
            "interleaved", at 2i and 2i + 1, as in Cohere and GLM; "interleaved_to_halves", at 2i and 2i + 1 in q and k,
            and at i and i + R/2 in the results, as in DeepSeek V3.
        half_tables: cos and sin have an element for each pair and are [B or 1, S, R/2], as in GPT-OSS.
        keep_type: the results have q's type whatever the tables': as where a model turns in float32 and casts back.

    Returns:
        q and k turned, in the memory order in which they came and in the promoted type of q and cos; computed in
        float32 and rounded once. Gradients flow to q and k.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    options = layout_code("rope", layout, interleaved), half_tables, keep_type
    if not _kernels_serve(q, k, cos, sin):
        check_heads("rope", q, k, cos, sin, half_tables)
        return turn(q, cos, sin, *options), turn(k, cos, sin, *options)
    return _Rope.apply(q, k, dense(cos), dense(sin), options)
