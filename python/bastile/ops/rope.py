"""Rotary position embedding of queries and keys (Su et al., 2021)."""

from __future__ import annotations

import torch

from bastile import _library  # noqa: F401  (registers the operators)
from bastile.ops._common import FLOATS, first_order_only, served

_forward = torch.ops.bastile.rope_forward.default
_backward = torch.ops.bastile.rope_backward.default

#: The widest head the kernels serve.
_MOST_DIM = 2048


def _new_heads(like: torch.Tensor, tokens_first: bool, dtype: torch.dtype) -> torch.Tensor:
    batch, heads, positions, dim = like.shape
    if tokens_first:
        return torch.empty((batch, positions, heads, dim), dtype=dtype, device=like.device).transpose(1, 2)
    return torch.empty((batch, heads, positions, dim), dtype=dtype, device=like.device)


@torch.library.register_fake("bastile::rope_forward")
def _(q, k, cos, sin, interleaved, q_tokens_first, k_tokens_first):
    dtype = torch.promote_types(q.dtype, cos.dtype)
    return _new_heads(q, q_tokens_first, dtype), _new_heads(k, k_tokens_first, dtype)


@torch.library.register_fake("bastile::rope_backward")
def _(dq_out, dk_out, cos, sin, interleaved, q_tokens_first, k_tokens_first, dtype):
    dq = _new_heads(dq_out, q_tokens_first, FLOATS[dtype])
    if dk_out is None:
        return dq, torch.empty((0,), dtype=torch.float32, device=dq_out.device)
    return dq, _new_heads(dk_out, k_tokens_first, FLOATS[dtype])


def _tokens_first(t: torch.Tensor) -> bool:
    """Whether the heads of a position lie together in memory, as in a transposed [B, S, heads, D]. The results then do
    too, so that what attention does with them (and autograd with the gradients) stays free of copies."""
    return t.stride(1) < t.stride(2)


def _dense_rows(t: torch.Tensor) -> torch.Tensor:
    return t if t.stride(3) == 1 else t.contiguous()


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        ctx.dtype = FLOATS.index(q.dtype)
        ctx.tokens_first = _tokens_first(q), _tokens_first(k)
        turned = _forward(_dense_rows(q), _dense_rows(k), cos, sin, interleaved, *ctx.tokens_first)
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
            dq, dk = _backward(
                _dense_rows(dq_out), _dense_rows(dk_out), cos, sin, ctx.interleaved, q_first, k_first, ctx.dtype
            )
        elif want_dq:
            dq, _ = _backward(_dense_rows(dq_out), None, cos, sin, ctx.interleaved, q_first, False, ctx.dtype)
        elif want_dk:
            dk, _ = _backward(_dense_rows(dk_out), None, cos, sin, ctx.interleaved, k_first, False, ctx.dtype)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            dq = first_order_only("rope", dq, dq_out)
            dk = first_order_only("rope", dk, dk_out)
        return dq, dk, None, None, None


def _partners(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(-x2, x1) in the places of (x1, x2)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The definition in plain torch, for devices and types without kernels."""
    rotary = cos.shape[-1]
    turning, rest = x[..., :rotary], x[..., rotary:]
    turned = turning * cos.unsqueeze(1) + _partners(turning, interleaved) * sin.unsqueeze(1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _kernels_serve(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return (
        served(q, k, cos, sin)
        and q.dtype == k.dtype
        and cos.dtype == sin.dtype
        and not (cos.requires_grad or sin.requires_grad)
        and q.dim() == k.dim() == 4
        and q.shape[-1] <= _MOST_DIM
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
        RuntimeError: naming the argument, what was given and what is needed.
    """
    if not _kernels_serve(q, k, cos, sin):
        return _reference(q, cos, sin, interleaved), _reference(k, cos, sin, interleaved)
    return _Rope.apply(q, k, _dense_columns(cos), _dense_columns(sin), interleaved)


def _dense_columns(table: torch.Tensor) -> torch.Tensor:
    return table if table.stride(-1) == 1 else table.contiguous()
