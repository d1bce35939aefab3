"""Attention over sequences of different lengths in one batch, or within a window, causal or not, without a mask.

A mask of a number for each pair of tokens keeps PyTorch's attention from its fast kernels: all pairs are computed, also
those that are masked, and keys are repeated for each head of queries. What such a mask says is said in a few numbers,
where sequences begin and end among the batch's tokens. Attentions that are told so compute what is seen alone.

Two calls make a batch with padding. In the first each token of a sequence sees those before it: where padding stands
behind sequences alone, that is a causal attention of whole rows; else an attention, Bastile's own or PyTorch's flash
attention, is told where sequences are. In the second what stands behind a sequence sees all of it, as it does beneath a
mask: the same of those rows alone.
So every row has the numbers that a mask would give it. Where tokens see what stands behind them too, as in encoders,
one call has all rows: padding sees what its row's sequence sees."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bastile.ops import _efficient as efficient
from bastile.ops import _flash as flash
from bastile.ops._attentions import Pieces, Rows, tokens
from bastile.ops._common import Function, first_order_only, is_batched
from bastile.ops._segments import Segments, is_behind, of_padding, of_sequences, of_whole_rows, seen

__all__ = ["Segments", "masked_attention", "of_padding", "of_sequences"]


def _calls(segments: Segments, scale: float, dropout: float) -> tuple[Rows | Pieces, Pieces | None]:
    """The two calls, the second where there is one."""
    cuts, longest, window, behind, causal = segments
    how = window, scale, dropout
    first = Rows(causal, *how) if behind or not len(cuts) else Pieces(cuts[:2], causal, longest, *how)
    return first, Pieces(cuts[-2:], False, longest, 0, scale, dropout) if behind or len(cuts) > 2 else None


class _MaskedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, cuts, how, scale, dropout):
        segments, (rows, heads, length, dim) = Segments(cuts, *how), q.shape
        first, second = _calls(segments, scale, dropout)
        if isinstance(first, Rows):
            y, lse, more = first.forward(q, k, v)
        else:
            y, lse, more = first.forward(*tokens(q, k, v))
        y, other, random = y.reshape(rows, length, heads, dim), None, []
        if second is not None:
            padding, other, random = second.forward(*tokens(q, k, v))
            right = is_behind(segments, rows, length)[..., None, None]
            y = torch.where(right, padding.view_as(y), y)
        y = y.contiguous()
        ctx.how, ctx.scale, ctx.dropout = how, scale, dropout
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
            if ctx.dropout:
                raise RuntimeError("masked_attention: with dropout, differentiate one result at a time")
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
                calls = _calls(segments, ctx.scale, ctx.dropout)
                grads = _gradients(segments, calls, dy.contiguous(), (q, k, v), y, *of_both)
        if torch.is_grad_enabled():
            grads = [first_order_only("masked_attention", g, dy, y) for g in grads]
        return *grads, None, None, None, None


def _gradients(
    segments: Segments,
    calls: tuple[Rows | Pieces, Pieces | None],
    dy: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    y: Tensor,
    of_first: tuple[Any, list[Any]],
    of_second: tuple[Any, list[Any]],
) -> list[Tensor]:
    """of_first, of_second: each call's lse, and what else its backward pass takes."""
    rows, length = y.shape[:2]
    first, second = calls

    def of_tokens(call: Pieces, given: tuple[Any, list[Any]]) -> list[Tensor]:
        q, k, v = tokens(*qkv)
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


def _unfused_on_cpu(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, dropout: float) -> Tensor:
    """Where weights are dropped, or values are as wide as keys are not, which a CPU's fused attention does not do."""
    first, second = _calls(segments, scale, dropout)
    shape = (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    y = first.unfused_on_cpu(q, k, v) if isinstance(first, Rows) else first.unfused_on_cpu(*tokens(q, k, v)).view(shape)
    if second is not None:
        right = is_behind(segments, q.shape[0], q.shape[2])[..., None, None]
        y = torch.where(right, second.unfused_on_cpu(*tokens(q, k, v)).view(shape), y)
    return y.contiguous()


def refusal(q: Tensor, k: Tensor, v: Tensor, window: int = 0, dropout: float = 0.0) -> str | None:
    """Why these are not served; None where they are."""
    why = flash.refusal(q, k, v, any_width=efficient.is_known())
    if why is None and q.is_cuda and (window or dropout) and max(q.shape[3], v.shape[3]) > flash.MOST_DIM:
        return f"heads of more than {flash.MOST_DIM} have no window and no dropout on CUDA"
    return why


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of sequences of different lengths, side by side or with padding, within a window or not:

        y_i = sum over j of p_j v_j,  p_j = exp(s_j) / (sum over k of exp(s_k)),  s_j = scale q_i . k_j

    over the j that it sees: those of its own sequence that are not behind it and, with a window, fewer than that before
    it. Padding behind a sequence sees all of that, padding before one sees nothing: zeros. Where segments are not
    causal it sees all of its own sequence, with a window those that are fewer than that before or behind it; and so
    does all padding of its row, without a window.

    Args:
        q: [B, heads, S, D], on CUDA bfloat16 or float16; on a CPU float32 too.
        k: [B, groups, S, D], of q's type; heads is a multiple of groups.
        v: [B, groups, S, Dv], of q's type. The wider of D and Dv is a multiple of 8 on CUDA; the other is padded.
        segments: what `of_padding` or `of_sequences` says of this batch, with `cuts` on q's device. None: each row is
            one sequence.
        scale: None: 1 / sqrt(D).
        dropout: the probability with which each p_j becomes 0, and else p_j / (1 - dropout); at least 0, below 1. Drawn
            from PyTorch's generator of q's device, as many numbers as flash attention takes. On CUDA heads of more
            than 256 have neither dropout nor a window.

    Returns:
        [B, S, heads, Dv], of q's type. Gradients flow to q, k and v; kept for them are these, the result and a float32
        a query and head, two where a causal attention has padding. A second differentiation is an error. On a GPU the
        gradients of queries may be summed in no fixed order, as PyTorch's attentions do; Bastile's, for segments on
        Hopper, has one. Heads that are too wide for flash attention go through PyTorch's memory-efficient attention. On
        a CPU its unfused attention of each segment, which keeps weights, drops them, and takes values of another width
        than keys.

    Raises:
        ValueError: for tensors that are not served, with the reason, and another dropout.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"masked_attention: dropout is {dropout}; at least 0 and less than 1 is needed")
    if segments is None:
        segments = of_whole_rows(q.shape[2] if q.dim() == 4 else 0, device=q.device)
    why = refusal(q, k, v, segments.window, dropout)
    cuts, rows = segments.cuts, (0, 2, 4) if segments.causal else (0, 2)
    if why is None and (
        cuts.dtype is not torch.int32 or cuts.dim() != 2 or len(cuts) not in rows or cuts.device != q.device
    ):
        wanted = "0, 2 or 4, N" if segments.causal else "0 or 2, N"
        why = f"cuts are {cuts.dtype} of shape {list(cuts.shape)} on {cuts.device}; int32 [{wanted}] there is needed"
    if why is not None:
        raise ValueError(f"masked_attention: {why}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    is_empty, of_values = not q.numel() or not v.numel(), v.shape[-1]
    if q.shape[-1] != of_values and (q.is_cuda or is_empty):
        width = max(q.shape[-1], of_values)
        q, k, v = [nn.functional.pad(t, [0, width - t.shape[-1]]) for t in (q, k, v)]
    if is_empty:
        y = q.transpose(1, 2).clone() + 0 * (k.sum() + v.sum())
    elif not q.is_cuda and (dropout or q.shape[-1] != of_values):
        y = _unfused_on_cpu(q, k, v, segments, scale, dropout)
    else:
        y = _MaskedAttention.apply(q, k, v, cuts, segments[1:], scale, dropout)
    return y if y.shape[-1] == of_values else y[..., :of_values].contiguous()
