"""Attention within segments of a batch's tokens by Bastile's kernels (docs/segment_attention.md), where the chip has
them: in the place of PyTorch's flash attention, which is told of segments likewise."""

from __future__ import annotations

import torch
from torch import Tensor

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import HALVES, is_hopper

_forward = torch.ops.bastile.segment_attention_forward.default
_backward = torch.ops.bastile.segment_attention_backward.default

WIDTHS = (64, 128, 256)  # of heads
MOST_SEGMENTS = 1023


def serves(q: Tensor, segments: int, window: int, dropout: float) -> bool:
    """Whether these kernels compute an attention of q and k and v like it, [..., D]."""
    return (
        q.is_cuda
        and not window
        and not dropout
        and q.shape[-1] in WIDTHS
        and q.dtype in HALVES
        and 0 < segments <= MOST_SEGMENTS
        and is_hopper(q.device)
    )


def of_rows(rows: int, length: int, device: torch.device) -> Tensor:
    """Cuts where each row is a segment."""
    return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device).expand(2, -1).contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, cuts: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [T, heads, D], k and v [S, groups, D], cuts [2, N + 1]: y like q, lse [heads, T] in float32."""
    y, lse = _forward(*[_aligned(t) for t in (q, k, v)], cuts.contiguous(), scale, causal)
    return y, lse


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, cuts: Tensor, y: Tensor, lse: Tensor, causal: bool, scale: float
) -> list[Tensor]:
    """Gradients of q, k and v."""
    dy, q, k, v, y = [_aligned(t) for t in (dy, q, k, v, y)]
    return list(_backward(dy, q, k, v, cuts.contiguous(), y, lse, scale, causal))


def _aligned(t: Tensor) -> Tensor:
    """With tokens and heads multiples of 16 bytes apart, as boxes of them are copied."""
    *outer, last = t.stride()
    if last == 1 and all(s > 0 and s % 8 == 0 for s in outer) and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)
