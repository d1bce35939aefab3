"""Causal attention with a sink: a number that each head has learned, which its softmax counts as one more key.

The attention itself is PyTorch's flash attention, or Bastile's (docs/segment_attention.md), which know no sinks. They
need not: with the logarithm lse of a row's sum of exponentials, which they give beside their result o,

    total = log(exp(lse) + exp(sink)),    y = o exp(lse - total)

and what their backward pass reads of the forward pass is lse, for the probabilities exp(s - lse), and o, for the sum of
dy o that it takes from each row of the probabilities' gradients. Given total in place of lse, and y in place of o, it
makes the gradients of the attention with its sink, in the same time:

    p = exp(s - total),    ds = p (dy v^T - sum(dy y)),    dsink = - sum over rows of exp(sink - total) sum(dy y)

A CPU's flash attention takes a bias, in which the sink is that of one more key: so y is rounded once there."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bastile.ops import _flash as flash
from bastile.ops import _varlen as varlen
from bastile.ops._common import Function, first_order_only, is_batched

__all__ = ["sink_attention"]


def allowed(q: Tensor, window: int, boundaries: Tensor) -> Tensor:
    """[B or 1, 1, S, S]: which keys each query sees."""
    batch, length = q.shape[0], q.shape[2]
    at = torch.arange(length, device=q.device)
    before = at[:, None] - at[None, :]
    seen = (before >= 0) if not window else (before >= 0) & (before < window)
    if not boundaries.numel():
        return seen[None, None]
    token = torch.arange(batch * length, device=q.device, dtype=boundaries.dtype)
    sequence = torch.searchsorted(boundaries, token, right=True).view(batch, 1, length)
    return seen[None, None] & (sequence[..., :, None] == sequence[..., None, :])


def _tokens(t: Tensor, varies: bool) -> Tensor:
    """Heads behind positions; of sequences of different lengths all tokens in a row."""
    t = t.transpose(1, 2)
    return t.reshape(-1, *t.shape[2:]) if varies else t


def _with_sink(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int, boundaries: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """For a CPU's flash attention, which takes what is added to the scores: keys and values for each head, behind which
    stands one more of zeros, and a bias that is the sink for that one."""
    times = q.shape[1] // k.shape[1]
    keys, values = [nn.functional.pad(t.repeat_interleave(times, 1), (0, 0, 0, 1)) for t in (k, v)]
    seen = allowed(q, window, boundaries)
    bias = q.new_full((seen.shape[0], q.shape[1], q.shape[2], q.shape[2] + 1), -math.inf)
    bias[..., :-1].masked_fill_(seen, 0.0)
    bias[..., -1] = sinks[:, None]
    return keys, values, bias


def _is_varlen_s(q: Tensor, boundaries: Tensor) -> bool:
    """Whether Bastile's own attention computes this one."""
    return varlen.serves(q, boundaries.numel() - 1 if boundaries.numel() else q.shape[0], 0.0)


def _cuts(boundaries: Tensor) -> Tensor | None:
    """For Bastile's own attention, which the chip may have; without boundaries each row is a segment."""
    return boundaries.expand(2, -1).contiguous() if boundaries.numel() else None


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, boundaries: Tensor, longest: int
) -> tuple[Any, ...]:
    """On CUDA, or by Bastile's own: o [B, S, heads, D], lse [B, heads, S] in float32 and what else its backward pass
    takes."""
    batch, heads, length, dim = q.shape
    varies, most = bool(boundaries.numel()), longest or length
    if _is_varlen_s(q, boundaries):
        own, keys, values = [_tokens(t, True) for t in (q, k, v)]
        o, lse = varlen.forward(own, keys, values, _cuts(boundaries), True, scale, window, 0 if varies else batch)
        return o.view(batch, length, heads, dim), lse.view(heads, batch, length).transpose(0, 1)
    cut = boundaries if varies else None
    given = [*[_tokens(t, varies) for t in (q, k, v)], cut, cut, most, most, 0.0, True, False]
    o, lse, *random, _ = flash.forward(*given, scale=scale, **flash.window_of(window))
    if varies:
        o, lse = o.view(batch, length, heads, dim), lse.view(heads, batch, length).transpose(0, 1)
    return o, lse, *random


def _flash_backward(
    ctx: Any, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, y: Tensor, total: Tensor, *more: Any
) -> Any:
    boundaries, *random = more
    is_own = _is_varlen_s(q, boundaries)
    if not q.is_cuda and not is_own:
        keys, values, bias = _with_sink(q, k, v, sinks, ctx.window, boundaries)
        dq, *both = flash.backward_on_cpu(
            dy.transpose(1, 2), q, keys, values, y.transpose(1, 2), total, 0.0, False, attn_mask=bias, scale=ctx.scale
        )
        return dq, *[t[..., :-1, :].unflatten(1, (k.shape[1], -1)).sum(2) for t in both]
    varies, length = bool(boundaries.numel()) or is_own, q.shape[2]
    cut, most = boundaries if varies else None, ctx.longest or length
    if varies:
        dy, y = dy.flatten(0, 1), y.flatten(0, 1)
        total = total.transpose(0, 1).flatten(1)
    read = [dy, *[_tokens(t, varies) for t in (q, k, v)], y, total.contiguous()]
    if is_own:
        upstream, own, keys, values, out, lse = read
        how = True, ctx.scale, ctx.window, 0 if boundaries.numel() else q.shape[0]
        grads = varlen.backward(upstream, own, keys, values, _cuts(boundaries), out, lse, *how)
        return [g.unflatten(0, (-1, length)).transpose(1, 2) for g in grads]
    given = [*read, cut, cut, most, most, 0.0, True, *random]
    grads = flash.backward(*given, scale=ctx.scale, **flash.window_of(ctx.window))
    return [(g.unflatten(0, (-1, length)) if varies else g).transpose(1, 2) for g in grads]


class _SinkAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, boundaries, scale, window, longest):
        if not q.is_cuda and not _is_varlen_s(q, boundaries):
            keys, values, bias = _with_sink(q, k, v, sinks, window, boundaries)
            y, total = flash.forward_on_cpu(q, keys, values, 0.0, False, attn_mask=bias, scale=scale)
            y, random = y.transpose(1, 2), []
        else:
            y, lse, *random = _flash(q, k, v, scale, window, boundaries, longest)
            total = torch.logaddexp(lse, sinks.float()[:, None])
            torch.mul(y, torch.exp(lse - total).transpose(1, 2)[..., None], out=y)  # in float32
        if (
            boundaries.numel() and not longest
        ):  # what sees nothing: a result of 0, and probabilities of 0 in the backward pass
            at = torch.arange(q.shape[0] * q.shape[2], device=q.device).view(q.shape[0], 1, -1)
            nothing = at < boundaries[1::3, None, None]
            total.masked_fill_(nothing, math.inf)
            y.masked_fill_(nothing.transpose(1, 2)[..., None], 0.0)
        ctx.save_for_backward(q, k, v, sinks, boundaries, y, total, *random)
        ctx.scale, ctx.window, ctx.longest = scale, window, longest
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, sinks, boundaries, y, total, *random = ctx.saved_tensors
        batched, dsinks = is_batched(dy), None
        delta = None
        if batched or ctx.needs_input_grad[3]:
            delta = (dy.float() * y.float()).sum(-1).transpose(-1, -2)
        if ctx.needs_input_grad[3]:
            dsinks = -(torch.exp(sinks.float()[:, None] - total) * delta).sum((-3, -1)).to(sinks.dtype)
        if batched:
            mask = allowed(q, ctx.window, boundaries)
            grads = flash.by_formula(dy, q, k, v, total, delta, mask, ctx.scale)
        else:
            with torch.no_grad():
                grads = _flash_backward(ctx, dy, q, k, v, sinks, y, total, boundaries, *random)
        if torch.is_grad_enabled():
            grads = [first_order_only("sink_attention", g, dy, y) for g in grads]
            dsinks = first_order_only("sink_attention", dsinks, dy, y)
        return *grads, dsinks, None, None, None, None


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    boundaries: Tensor | None = None,
    longest: int = 0,
) -> Tensor:
    """Causal attention whose softmax counts one more key for each head, its sink, as GPT-OSS's does: of a query i

        p_j = exp(s_j) / (exp(sink) + sum over k of exp(s_k)),  s_j = scale q_i . k_j,  y_i = sum over j of p_j v_j

    over the j that it sees: those of its sequence that are not behind it and, with a window, fewer than that before it.

    Args:
        q: [B, heads, S, D], on CUDA bfloat16 or float16 with D a multiple of 8 and at most 256; on CPU float32 too.
        k: [B, groups, S, D], of q's type; heads is a multiple of groups.
        v: as k.
        sinks: [heads], of any floating-point type.
        scale: None: 1 / sqrt(D).
        window: how many keys a query sees at most, itself among them; 0: all.
        boundaries: int32 [3 B + 1] on q's device, not decreasing: for each row of the batch where it begins among the
            B S tokens, where its sequence begins and where that ends, and at last B S. What is before a sequence
            (padding on the left) sees nothing, and its result is 0, as in Transformers' code; what is behind it sees
            itself alone. None, or empty: each row is one sequence.
        longest: not 0: boundaries are int32 [N + 1] of N sequences that stand one behind another, from 0 to B S; some
            may be empty, and none has more tokens than this.

    Returns:
        [B, S, heads, D], of q's type. Gradients flow to q, k, v and sinks; kept for them are these, the result and a
        float32 a query and head. A second differentiation is an error. On Hopper sums have a fixed order; on
        other GPUs those of the gradients of queries have none, as in PyTorch's flash attention.

    Raises:
        ValueError: for tensors that are not served, with the reason.
    """
    why = flash.refusal(q, k, v, sinks)
    if why is None and (sinks.shape != q.shape[1:2] or not sinks.is_floating_point()):
        why = f"sinks are {sinks.dtype} of shape {list(sinks.shape)}; a number for each of {q.shape[1]} heads is needed"
    if why is None and window < 0:
        why = f"window is {window}; 0 or more is needed"
    if why is None and longest < 0:
        why = f"longest is {longest}; 0 or more is needed"
    if why is None and longest and (boundaries is None or boundaries.dim() != 1 or len(boundaries) < 2):
        why = "longest is given without the boundaries of sequences, int32 [N + 1]"
    if why is None and boundaries is not None:
        shapes = ([0], [3 * q.shape[0] + 1])
        if boundaries.dtype is not torch.int32 or not (longest or list(boundaries.shape) in shapes):
            why = f"boundaries are {boundaries.dtype} of shape {list(boundaries.shape)}; int32 of {shapes[1]} is needed"
    if why is not None:
        raise ValueError(f"sink_attention: {why}")
    if boundaries is None:
        boundaries = torch.empty(0, dtype=torch.int32, device=q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not q.numel():
        return q.transpose(1, 2).clone() + 0 * (k.sum() + v.sum() + sinks.sum())
    return _SinkAttention.apply(q, k, v, sinks, boundaries, scale, window, longest)
