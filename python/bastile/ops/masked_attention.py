"""Causal attention over sequences of different lengths in one batch, or within a window, without a mask.

A mask of a number for each pair of tokens keeps PyTorch's attention from its fast kernels: all pairs are computed, also
those that are masked, and keys are repeated for each head of queries. What such a mask says is said in a few numbers,
where sequences begin and end among the batch's tokens. Attentions that are told so compute what is seen alone.

Two calls make a batch with padding. In the first each token of a sequence sees those before it: where padding stands
behind sequences alone, that is a causal attention of whole rows; else flash attention is told where sequences are. In
the second what stands behind a sequence sees all of it, as it does beneath a mask: flash attention of those rows alone.
So every row has the numbers that a mask would give it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bastile.ops import _flash as flash
from bastile.ops._attentions import Pieces, Rows
from bastile.ops._common import Function, first_order_only, is_batched
from bastile.ops._segments import Segments, is_behind, of_padding, of_sequences, of_whole_rows, seen

__all__ = ["Segments", "masked_attention", "of_padding", "of_sequences"]


def _tokens(*heads_first: Tensor) -> list[Tensor]:
    """[B, heads, S, D] as [B S, heads, D]."""
    return [t.transpose(1, 2).flatten(0, 1) for t in heads_first]


def _calls(segments: Segments, scale: float) -> tuple[Rows | Pieces, Pieces | None]:
    """The two calls, the second where there is one."""
    cuts, longest, window, behind = segments
    first = Rows(window, scale) if behind or not len(cuts) else Pieces(cuts[:2], True, longest, window, scale)
    return first, Pieces(cuts[-2:], False, longest, 0, scale) if behind or len(cuts) > 2 else None


class _MaskedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, cuts, longest, window, behind, scale):
        segments, (rows, heads, length, dim) = Segments(cuts, longest, window, behind), q.shape
        first, second = _calls(segments, scale)
        if isinstance(first, Rows):
            y, lse, more = first.forward(q, k, v)
        else:
            y, lse, more = first.forward(*_tokens(q, k, v))
        y, other, random = y.reshape(rows, length, heads, dim), None, []
        if second is not None:
            padding, other, random = second.forward(*_tokens(q, k, v))
            right = is_behind(segments, rows, length)[..., None, None]
            y = torch.where(right, padding.view_as(y), y)
        y = y.contiguous()
        ctx.how, ctx.scale = segments[1:], scale
        # Tensors are saved, and numbers stand where they stood between them.
        ctx.numbers = {i: each for i, each in enumerate(more) if isinstance(each, int)}
        tensors = [each for i, each in enumerate(more) if i not in ctx.numbers]
        ctx.count = len(more)
        ctx.save_for_backward(q, k, v, cuts, y, lse, other, *tensors, *random)
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, cuts, y, lse, other, *rest = ctx.saved_tensors
        segments = Segments(cuts, *ctx.how)
        if is_batched(dy):
            mask = seen(segments, q.shape[0], q.shape[2])
            scores = q.float() @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).float().mT * ctx.scale
            total = scores.masked_fill(~mask, -math.inf).logsumexp(-1)
            delta = (dy.float() * y.float()).sum(-1).transpose(-1, -2)
            grads = flash.by_formula(dy, q, k, v, total.nan_to_num(neginf=math.inf), delta, mask, ctx.scale)
        else:
            with torch.no_grad():
                tensors = iter(rest)
                more = [ctx.numbers[i] if i in ctx.numbers else next(tensors) for i in range(ctx.count)]
                of_both = (lse, more), (other, [*tensors])
                grads = _gradients(segments, ctx.scale, dy.contiguous(), (q, k, v), y, *of_both)
        if torch.is_grad_enabled():
            grads = [first_order_only("masked_attention", g, dy, y) for g in grads]
        return *grads, None, None, None, None, None


def _gradients(
    segments: Segments,
    scale: float,
    dy: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    y: Tensor,
    of_first: tuple[Any, list[Any]],
    of_second: tuple[Any, list[Any]],
) -> list[Tensor]:
    """of_first, of_second: each call's lse, and what else its backward pass takes."""
    rows, length = y.shape[:2]
    first, second = _calls(segments, scale)

    def of_tokens(call: Pieces, given: tuple[Any, list[Any]]) -> list[Tensor]:
        q, k, v = _tokens(*qkv)
        grads = call.backward(dy.flatten(0, 1), q, k, v, y.flatten(0, 1), *given)
        return [g.unflatten(0, (rows, length)).transpose(1, 2) for g in grads]

    if isinstance(first, Rows):
        # What stands behind sequences has seen other keys here: no gradient comes from it.
        own = dy if second is None else dy.masked_fill(is_behind(segments, rows, length)[..., None, None], 0.0)
        grads = first.backward(own, *qkv, y, *of_first)
    else:
        grads = of_tokens(first, of_first)
    if second is not None:
        for grad, other in zip(grads, of_tokens(second, of_second), strict=True):
            grad += other
    return grads


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments | None = None, *, scale: float | None = None
) -> Tensor:
    """Causal attention of sequences of different lengths, side by side or with padding, within a window or not:

        y_i = sum over j of p_j v_j,  p_j = exp(s_j) / (sum over k of exp(s_k)),  s_j = scale q_i . k_j

    over the j that it sees: those of its own sequence that are not behind it and, with a window, fewer than that before
    it. Padding behind a sequence sees all of that, padding before one sees nothing: zeros.

    Args:
        q: [B, heads, S, D], on CUDA bfloat16 or float16 with D a multiple of 8 and at most 256; on a CPU float32 too.
        k: [B, groups, S, D], of q's type; heads is a multiple of groups.
        v: as k.
        segments: what `of_padding` or `of_sequences` says of this batch, with `cuts` on q's device. None: each row is
            one sequence.
        scale: None: 1 / sqrt(D).

    Returns:
        [B, S, heads, D], of q's type. Gradients flow to q, k and v; kept for them are these, the result and a float32 a
        query and head, two where there is padding. A second differentiation is an error. On a GPU the gradients of
        queries are summed in no fixed order, as by PyTorch's flash attention.

    Raises:
        ValueError: for tensors that are not served, with the reason.
    """
    why = flash.refusal(q, k, v)
    if segments is None:
        segments = of_whole_rows(q.shape[2] if q.dim() == 4 else 0, device=q.device)
    cuts = segments.cuts
    if why is None and (
        cuts.dtype is not torch.int32 or cuts.dim() != 2 or len(cuts) not in (0, 2, 4) or cuts.device != q.device
    ):
        why = (
            f"cuts are {cuts.dtype} of shape {list(cuts.shape)} on {cuts.device}; int32 [0, 2 or 4, N] there is needed"
        )
    if why is not None:
        raise ValueError(f"masked_attention: {why}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not q.numel():
        return q.transpose(1, 2).clone() + 0 * (k.sum() + v.sum())
    return _MaskedAttention.apply(q, k, v, cuts, segments.longest, segments.window, segments.behind, scale)
