"""Causal attention over sequences of different lengths in one batch, or within a window, without a mask.

A mask of a number for each pair of tokens keeps PyTorch's attention from its fast kernels: all pairs are computed, those
that are masked too, and keys are repeated for each head of queries. What such a mask says of sequences is said in a few
numbers: where each begins and ends among the batch's tokens. Attentions that are told so compute what is seen alone.

Two calls make a batch with padding. In the first each token of a sequence sees those before it: where padding stands
behind sequences alone, that is a causal attention of whole rows; else flash attention is told where sequences are. In
the second what stands behind a sequence sees all of it, as it does beneath a mask: flash attention of those rows alone.
So every row has the numbers that a mask would give it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bastile.ops import _flash as flash
from bastile.ops._common import Function, first_order_only, is_batched

__all__ = ["Segments", "masked_attention", "of_padding", "of_sequences"]

#: What PyTorch's choice of an attention calls cuDNN's.
_CUDNN = int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)
#: Segments of queries and of keys that a row with padding has in the first call, and in the second.
_OF_A_ROW, _BEHIND_A_ROW = 5, 4


class Segments(NamedTuple):
    """Which keys each query of a batch sees.

    cuts: int32 [M, N]. M is 0 where each row is one sequence, or 2, or 4: pairs of rows with the cuts between segments
        of queries, and between those of keys, among the batch's tokens. The queries of a segment see the keys of the
        segment of the same number: in the first pair of four, and in the only one of sequences side by side, those that
        are not behind themselves; in the second of four, and in the only one of `behind`, all.
    longest: at least as many tokens as any segment has.
    window: how many keys a query sees at most, itself among them; 0: all.
    behind: whether padding stands behind sequences alone. Then the only pair is of what stands there.
    """

    cuts: Tensor
    longest: int
    window: int = 0
    behind: bool = False


def of_padding(mask: Tensor, window: int = 0) -> Segments | None:
    """Segments of rows with padding.

    Args:
        mask: [B, S] on the CPU: of which tokens each row's sequence is, all others are padding.
        window: as in `Segments`; one of S or more is none.

    Returns:
        Segments on the CPU, or None for what these cannot say: a row whose sequence is not in one piece, or that has
        none; padding behind sequences that are longer than a window.
    """
    mask = mask.bool()
    rows, length = mask.shape
    window = window if window < length else 0
    count, first = mask.sum(1), mask.int().argmax(1)
    end = first + count
    at = torch.arange(length)
    in_one_piece = (at >= first[:, None]) & (at < end[:, None])
    if not bool(count.all()) or not torch.equal(in_one_piece, mask):
        return None
    if bool((count == length).all()):
        return Segments(torch.empty(0, 1, dtype=torch.int32), length, window)
    before, after = bool(first.any()), bool((end < length).any())
    if after and window:
        return None
    start = torch.arange(rows) * length
    first, end, following = start + first, start + end, start + length
    total = rows * length
    pairs = []
    if before:  # (left | none) (none | left) (real | real) (right | none) (none | right)
        pairs += [[start, first, first, end, following], [start, start, first, end, end]]
    if after:  # (all but right | none) (none | left) (right | real) (none | right)
        pairs += [[start, end, end, following], [start, start, first, end]]
    cuts = [torch.stack(each, 1).flatten() for each in pairs]
    most = max(len(each) for each in cuts) + 1
    padded = [torch.nn.functional.pad(each, [0, most - len(each)], value=total) for each in cuts]
    return Segments(torch.stack(padded).int(), length, window, behind=not before)


def of_sequences(ids: Tensor, window: int = 0) -> Segments:
    """Segments of sequences that stand one behind another in a row.

    Args:
        ids: [B, S] on the CPU: a number for each sequence of a row, the same for all of its tokens.
        window: as in `Segments`.

    Returns:
        Segments on the CPU. Their number, and the longest, are rounded up to a power of two, so that few kinds come.
    """
    rows, length = ids.shape
    begins = torch.ones(rows, length, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = [*begins.flatten().nonzero().flatten().tolist(), rows * length]
    longest = max((end - start for start, end in zip(starts, starts[1:], strict=False)), default=0)
    count = 1 << (len(starts) - 2).bit_length()
    cuts = torch.tensor([starts + [rows * length] * (count + 1 - len(starts))], dtype=torch.int32)
    # Of segments of one token PyTorch's flash attention takes as many as there are tokens, and no empty ones.
    longest = max(min(length, 1 << (longest - 1).bit_length()), 2)
    return Segments(cuts.expand(2, -1).contiguous(), longest, window if window < longest else 0)


def seen(segments: Segments, rows: int, length: int) -> Tensor:
    """[rows, 1, S, S]: the mask that these segments stand for."""
    cuts, _, window, behind = segments
    at = torch.arange(length, device=cuts.device)
    before = at[:, None] - at[None, :]
    causal = (before >= 0) & (before < window) if window else before >= 0
    if not len(cuts):
        return causal.expand(rows, 1, -1, -1)
    token = torch.arange(rows * length, device=cuts.device, dtype=cuts.dtype)
    of = [torch.searchsorted(each, token, right=True).view(rows, length) for each in cuts]
    same = [q[:, None, :, None] == k[:, None, None, :] for q, k in zip(of[::2], of[1::2], strict=True)]
    if behind:
        right = _is_behind(segments, rows, length)[:, None, :, None]
        return torch.where(right, same[0], causal)
    return (same[0] & causal) | same[1] if len(same) > 1 else same[0] & causal


def _is_behind(segments: Segments, rows: int, length: int) -> Tensor:
    """[B, S]: which tokens stand behind their row's sequence."""
    end = segments.cuts[-2, 1 : rows * _BEHIND_A_ROW : _BEHIND_A_ROW]
    token = torch.arange(rows * length, device=end.device, dtype=end.dtype).view(rows, length)
    return token >= end[:, None]


# ---- calls: whole rows, and segments of a batch's tokens --------------------------------------------------------------


def _rows_forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor, list[Any]]:
    """Causal attention of each row: y [B, S, heads, D], lse [B, heads, S], and what else its backward pass takes."""
    if not q.is_cuda:
        keys, values = _repeated(q, k, v)
        bias = None if not window else _bias(q, q.shape[2], window)
        y, lse = flash.forward_on_cpu(q, keys, values, 0.0, not window, attn_mask=bias, scale=scale)
        return y.transpose(1, 2), lse, []
    if not window and flash.cudnn_is_known() and _chosen(q, k, v, scale) == _CUDNN:
        y, lse, *more, _ = flash.cudnn_forward(q, k, v, None, True, 0.0, True, False, scale=scale)
        return y.transpose(1, 2), lse, more
    read, length = [t.transpose(1, 2) for t in (q, k, v)], q.shape[2]
    y, lse, *random, _ = flash.forward(
        *read, None, None, length, length, 0.0, True, False, scale=scale, **flash.window_of(window)
    )
    return y, lse, random


def _rows_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, more: list[Any], window: int, scale: float
) -> list[Tensor]:
    """Gradients of q, k and v, as these are."""
    if not q.is_cuda:
        keys, values = _repeated(q, k, v)
        bias = None if not window else _bias(q, q.shape[2], window)
        given = dy.transpose(1, 2), q, keys, values, y.transpose(1, 2), lse, 0.0, not window
        dq, *both = flash.backward_on_cpu(*given, attn_mask=bias, scale=scale)
        return [dq, *[_summed(t, k.shape[1]) for t in both]]
    if len(more) > 2:
        *cuts, most_q, most_k, seed, offset = more
        given = dy.transpose(1, 2), q, k, v, y.transpose(1, 2), lse, seed, offset, None
        return list(flash.cudnn_backward(*given, *cuts, most_q, most_k, 0.0, True, scale=scale))
    read, length = [t.transpose(1, 2) for t in (q, k, v)], q.shape[2]
    grads = flash.backward(
        dy, *read, y, lse, None, None, length, length, 0.0, True, *more, scale=scale, **flash.window_of(window)
    )
    return [g.transpose(1, 2) for g in grads]


def _chosen(q: Tensor, k: Tensor, v: Tensor, scale: float) -> int:
    grouped = q.shape[1] != k.shape[1]
    return torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=scale, enable_gqa=grouped)


def _segments_forward(
    q: Tensor, k: Tensor, v: Tensor, cuts: Tensor, causal: bool, longest: int, window: int, scale: float
) -> tuple[Tensor, Tensor, list[Any]]:
    """Of tokens, [T, heads, D]: y likewise, lse [heads, T], and what else the backward pass takes. Queries without keys
    have zeros."""
    if q.is_cuda:
        y, lse, *random, _ = flash.forward(
            q, k, v, *cuts, longest, longest, 0.0, causal, False, scale=scale, **flash.window_of(window)
        )
        return y, lse, random
    y, lse = torch.zeros_like(q), q.new_full(q.shape[1::-1], math.inf, dtype=torch.float32)
    for at, own, _ in _pieces(q, k, v, cuts):
        bias = None if not window else _bias(q, own[0].shape[2], window)
        found = flash.forward_on_cpu(*own, 0.0, causal and not window, attn_mask=bias, scale=scale)
        y[at], lse[:, at] = found[0][0].transpose(0, 1), found[1][0].to(lse.dtype)
    return y, lse, []


def _segments_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    cuts: Tensor,
    causal: bool,
    random: list[Any],
    longest: int,
    window: int,
    scale: float,
) -> list[Tensor]:
    if q.is_cuda:
        given = dy, q, k, v, y, lse, *cuts, longest, longest, 0.0, causal, *random
        return list(flash.backward(*given, scale=scale, **flash.window_of(window)))
    grads = [torch.zeros_like(t) for t in (q, k, v)]
    for at, own, read in _pieces(q, k, v, cuts):
        bias = None if not window else _bias(q, own[0].shape[2], window)
        up, out = [t[at].transpose(0, 1)[None] for t in (dy, y)]
        sums = lse[:, at][None].to(torch.float32)
        found = flash.backward_on_cpu(up, *own, out, sums, 0.0, causal and not window, attn_mask=bias, scale=scale)
        grads[0][at] = found[0][0].transpose(0, 1)
        for grad, each in zip(grads[1:], found[1:], strict=True):
            grad[read] = _summed(each, k.shape[1])[0].transpose(0, 1)
    return grads


def _pieces(q: Tensor, k: Tensor, v: Tensor, cuts: Tensor) -> Any:
    """On a CPU, of each segment that has queries and keys: where these are, and they, [1, heads, tokens, D] each."""
    queries, keys = cuts.tolist()
    for i in range(len(queries) - 1):
        at, read = slice(*queries[i : i + 2]), slice(*keys[i : i + 2])
        if at.start < at.stop and read.start < read.stop:
            own, *both = [t.transpose(0, 1)[None] for t in (q[at], k[read], v[read])]
            yield at, (own, *_repeated(own, *both)), read


def _repeated(q: Tensor, *both: Tensor) -> list[Tensor]:
    """For a CPU's flash attention, whose keys and values are of each head."""
    return [t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in both]


def _summed(grad: Tensor, groups: int) -> Tensor:
    return grad.unflatten(1, (groups, -1)).sum(2)


def _bias(q: Tensor, length: int, window: int) -> Tensor:
    """What is added to scores for a window, which a CPU's flash attention does not know."""
    at = torch.arange(length, device=q.device)
    before = at[:, None] - at[None, :]
    return torch.zeros_like(before, dtype=q.dtype).masked_fill_((before < 0) | (before >= window), -math.inf)


# ---- the operator ----------------------------------------------------------------------------------------------------


def _tokens(t: Tensor) -> Tensor:
    """[B, heads, S, D] as [B S, heads, D]."""
    return t.transpose(1, 2).flatten(0, 1)


class _MaskedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, cuts, longest, window, behind, scale):
        segments, (rows, _, length, _) = Segments(cuts, longest, window, behind), q.shape
        shape = rows, length, *q.shape[1:4:2]
        is_whole = behind or not len(cuts)
        if is_whole:
            y, lse, more = _rows_forward(q, k, v, window, scale)
        else:
            tokens = [_tokens(t) for t in (q, k, v)]
            y, lse, more = _segments_forward(*tokens, cuts[:2], True, longest, window, scale)
            y = y.view(shape)
        other, random = None, []
        if behind or len(cuts) > 2:
            tokens = [_tokens(t) for t in (q, k, v)]
            padding, other, random = _segments_forward(*tokens, cuts[-2:], False, longest, 0, scale)
            right = _is_behind(segments, rows, length)[..., None, None]
            y = torch.where(right, padding.view(shape), y)
        ctx.segments, ctx.scale, ctx.is_whole = segments, scale, is_whole
        y = y.contiguous()
        ctx.counts = [each for each in more if isinstance(each, int)]
        more = [each for each in more if not isinstance(each, int)]
        ctx.more = len(more)
        ctx.save_for_backward(q, k, v, cuts, y, lse, other, *more, *random)
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, cuts, y, lse, other, *rest = ctx.saved_tensors
        segments = ctx.segments._replace(cuts=cuts)
        if is_batched(dy):
            mask = seen(segments, q.shape[0], q.shape[2])
            scores = q.float() @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).float().mT * ctx.scale
            total = scores.masked_fill(~mask, -math.inf).logsumexp(-1)
            delta = (dy.float() * y.float()).sum(-1).transpose(-1, -2)
            grads = flash.by_formula(dy, q, k, v, total.nan_to_num(neginf=math.inf), delta, mask, ctx.scale)
        else:
            with torch.no_grad():
                grads = _gradients(ctx, segments, dy.contiguous(), q, k, v, y, lse, other, rest)
        if torch.is_grad_enabled():
            grads = [first_order_only("masked_attention", g, dy, y) for g in grads]
        return *grads, None, None, None, None, None


def _gradients(
    ctx: Any,
    segments: Segments,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    other: Tensor | None,
    rest: list[Any],
) -> list[Tensor]:
    cuts, longest, window, _ = segments
    rows, _, length, _ = q.shape
    more, random = rest[: ctx.more], rest[ctx.more :]
    tokens = [] if ctx.is_whole and other is None else [_tokens(t) for t in (q, k, v)]
    flat_y, flat_dy = y.flatten(0, 1), dy.flatten(0, 1)
    if ctx.is_whole:
        if len(more) > 2:  # cuDNN's: its counts stand between the others
            more = [*more[:2], *ctx.counts, *more[2:]]
        # What stands behind sequences has seen other keys here: no gradient comes from it.
        own = dy if other is None else dy.masked_fill(_is_behind(segments, rows, length)[..., None, None], 0.0)
        grads = _rows_backward(own, q, k, v, y, lse, more, window, ctx.scale)
    else:
        first = _segments_backward(
            flat_dy, *tokens, flat_y, lse, cuts[:2], True, more, longest, window, ctx.scale
        )
        grads = [g.unflatten(0, (rows, length)).transpose(1, 2) for g in first]
    if other is not None:
        behind = _segments_backward(flat_dy, *tokens, flat_y, other, cuts[-2:], False, random, longest, 0, ctx.scale)
        for grad, more_of_it in zip(grads, behind, strict=True):
            grad += more_of_it.unflatten(0, (rows, length)).transpose(1, 2)
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
        segments = Segments(torch.empty(0, 1, dtype=torch.int32, device=q.device), q.shape[2] if q.dim() == 4 else 0)
    cuts = segments.cuts
    if why is None and (
        cuts.dtype is not torch.int32 or cuts.dim() != 2 or len(cuts) not in (0, 2, 4) or cuts.device != q.device
    ):
        why = f"cuts are {cuts.dtype} of shape {list(cuts.shape)} on {cuts.device}; int32 [0, 2 or 4, N] there is needed"
    if why is not None:
        raise ValueError(f"masked_attention: {why}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not q.numel():
        return q.transpose(1, 2).clone() + 0 * (k.sum() + v.sum())
    return _MaskedAttention.apply(q, k, v, cuts, segments.longest, segments.window, segments.behind, scale)
