"""QK-norm and rotary embedding in one pass: RMSNorm over each head of queries and keys, then the rotation (Qwen3)."""

from __future__ import annotations

import torch

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import Function, first_order_only, served
from bastile.ops._heads import MOST_DIM, Layout, check_heads, dense, layout_code, tokens_first, turn
from bastile.ops.rms_norm import _CASTING, Casting, check_weight
from bastile.ops.rms_norm import _reference as norm
from bastile.recompute import offer

__all__ = ["qk_norm_rope"]

_forward = torch.ops.bastile.qk_norm_rope_forward.default
_backward = torch.ops.bastile.qk_norm_rope_backward.default


class _QKNormRope(Function):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, cos, sin, options):
        ctx.options = options
        q_out, k_out = _forward(q, k, q_weight, k_weight, cos, sin, *options)
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        # Attention computes no gradient for the one whose projection and norm are frozen.
        needs = ctx.needs_input_grad
        frozen = [t for t, x, weight in ((q_out, 0, 2), (k_out, 1, 3)) if not (needs[x] or needs[weight])]
        if frozen:
            ctx.mark_non_differentiable(*frozen)
        return q_out, k_out

    @staticmethod
    def backward(ctx, dq_out, dk_out):
        saved = ctx.saved_tensors
        want_dq, want_dk, want_dq_weight, want_dk_weight = wanted = ctx.needs_input_grad[:4]
        gradients = _backward(
            dense(dq_out) if want_dq or want_dq_weight else None,
            dense(dk_out) if want_dk or want_dk_weight else None,
            *saved,
            *ctx.options,
            *wanted,
        )
        results = [g if want else None for g, want in zip(gradients, wanted, strict=True)]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            results = [first_order_only("qk_norm_rope", g, dq_out, dk_out, *saved[:4]) for g in results]
        return *results, None, None, None


def _kernels_serve(q, k, q_weight, k_weight, cos, sin) -> bool:
    return (
        served(q, k, q_weight, k_weight, cos, sin)
        and q.dtype == k.dtype
        and q_weight.dtype == k_weight.dtype
        and cos.dtype == sin.dtype
        and not (cos.requires_grad or sin.requires_grad)
        and q.dim() == k.dim() == 4
        and q.shape[-1] <= MOST_DIM
    )


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
    interleaved: bool = False,
    layout: Layout | None = None,
    half_tables: bool = False,
    keep_type: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over each head of q and of k, then the rotary embedding: one pass forward, one backward.

    Args:
        q: [B, heads, S, D]; float32, bfloat16 or float16, any strides: usually a transposed view of [B, S, heads, D].
        k: [B, kv_heads, S, D], of q's type.
        q_weight: [D], the factor of q's normalised heads; any of the three types.
        k_weight: [D], of q_weight's type.
        cos: [B or 1, S, R], R even and at most D: the first R elements of a head turn. Any of the three types. Its
            columns lie as the result's do.
        sin: as cos. Tables that want gradients, heads wider than 2048, and q and k, or their weights, of two types run
            the original torch code.
        eps: added to the mean of squares.
        casting: "llama" (Llama, Qwen) and "none": the factor is weight; "gemma": 1 + weight. As in `rms_norm`, the
            weight's type counts for the result's in "llama" alone.
        interleaved: True is layout="interleaved".
        layout: "halves" (as in Qwen), "interleaved" or "interleaved_to_halves", as for `rope`; weights lie as q does.
        half_tables: cos and sin have an element for each pair and are [B or 1, S, R/2].
        keep_type: the results have q's type, whatever the tables' and the weights'.

    Returns:
        q and k normalised and turned, in the memory order in which they came and in the promoted type of q, cos and
        ("llama") the weights; computed in float32 and rounded once, where the two operators one after the other round
        twice or three times. Gradients flow to q, k and the weights; the weights' are summed in float32 in a fixed
        order.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    code = _CASTING.get(casting)
    if code is None:
        raise ValueError(f"qk_norm_rope: casting is {casting!r}; one of {', '.join(map(repr, _CASTING))} is needed")
    turning = layout_code("qk_norm_rope", layout, interleaved), half_tables, keep_type
    if not _kernels_serve(q, k, q_weight, k_weight, cos, sin):
        check_heads("qk_norm_rope", q, k, cos, sin, half_tables)
        check_weight("qk_norm_rope", "q_weight", q_weight, q)
        check_weight("qk_norm_rope", "k_weight", k_weight, k)
        turned = (turn(norm(x, w, eps, casting), cos, sin, *turning) for x, w in ((q, q_weight), (k, k_weight)))
        q_out, k_out = (y.to(q.dtype) if keep_type else y for y in turned)
        return q_out, k_out
    tensors = dense(q), dense(k), dense(q_weight), dense(k_weight), dense(cos), dense(sin)
    options = eps, code, *turning, tokens_first(q), tokens_first(k)
    q_out, k_out = _QKNormRope.apply(*tensors, options)
    offer(_forward, (*tensors, *options), q_out, k_out)
    return q_out, k_out
