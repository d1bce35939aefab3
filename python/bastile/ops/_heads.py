"""What the operators on attention heads share: q and k are [B, heads, S, D], usually transposed views of
[B, S, heads, D]."""

from __future__ import annotations

import torch

#: The widest head the kernels serve.
MOST_DIM = 2048


def new_heads(like: torch.Tensor, tokens_first: bool, dtype: torch.dtype) -> torch.Tensor:
    """What the operators return, for their fakes."""
    batch, heads, positions, dim = like.shape
    if tokens_first:
        return torch.empty((batch, positions, heads, dim), dtype=dtype, device=like.device).transpose(1, 2)
    return torch.empty((batch, heads, positions, dim), dtype=dtype, device=like.device)


def tokens_first(t: torch.Tensor) -> bool:
    """Whether the heads of a position lie together in memory, as in a transposed [B, S, heads, D]. The results then do
    too, so that what attention does with them (and autograd with the gradients) stays free of copies."""
    return t.stride(1) < t.stride(2)


def dense(t: torch.Tensor) -> torch.Tensor:
    """With a contiguous last dimension."""
    return t if t.stride(-1) == 1 else t.contiguous()


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The rotation in plain torch, for devices and types without kernels."""
    rotary = cos.shape[-1]
    turning, rest = x[..., :rotary], x[..., rotary:]
    turned = turning * cos.unsqueeze(1) + _partners(turning, interleaved) * sin.unsqueeze(1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _partners(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(-x2, x1) in the places of (x1, x2)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)
