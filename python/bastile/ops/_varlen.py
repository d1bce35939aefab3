"""Attention within segments of a batch's tokens by Bastile's kernels (docs/segment_attention.md), where the chip has
them: in the place of PyTorch's flash attention, which is told of segments likewise, and of whole rows in cuDNN's."""

from __future__ import annotations

import torch
from torch import Tensor

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import HALVES, is_hopper

_forward = torch.ops.bastile.segment_attention_forward.default
_backward = torch.ops.bastile.segment_attention_backward.default

MOST_SEGMENTS = 1023
#: Of a head, in multiples of 8. The kernels compute 64 columns at least, for half of which others are faster.
LEAST_WIDTH, MOST_WIDTH = 40, 256


def serves_heads(width: int, dtype: torch.dtype) -> bool:
    return LEAST_WIDTH <= width <= MOST_WIDTH and width % 8 == 0 and dtype in HALVES


def serves(q: Tensor, segments: int, dropout: float) -> bool:
    """Whether these kernels compute an attention of q and k and v like it, [..., D]."""
    return (
        q.is_cuda
        and not dropout
        and serves_heads(q.shape[-1], q.dtype)
        and 0 < segments <= MOST_SEGMENTS
        and is_hopper(q.device)
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, cuts: Tensor | None, causal: bool, scale: float, window: int = 0, rows: int = 0
) -> tuple[Tensor, Tensor]:
    """q [T, heads, D], k and v [S, groups, D], cuts [2, N + 1] or None, where all of `rows` segments are as long: y
    like q, lse [heads, T] in float32. window: how many keys a query sees at most; 0: all of its segment."""
    y, lse = _forward(*[_aligned(t) for t in (q, k, v)], _contiguous(cuts), scale, causal, rows, window)
    return y, lse


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cuts: Tensor | None,
    y: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    window: int = 0,
    rows: int = 0,
) -> list[Tensor]:
    """Gradients of q, k and v."""
    dy, q, k, v, y = [_aligned(t) for t in (dy, q, k, v, y)]
    return list(_backward(dy, q, k, v, _contiguous(cuts), y, lse, scale, causal, rows, window))


def _contiguous(cuts: Tensor | None) -> Tensor | None:
    return None if cuts is None else cuts.contiguous()


def _aligned(t: Tensor) -> Tensor:
    """With tokens and heads multiples of 16 bytes apart, as boxes of them are copied."""
    *outer, last = t.stride()
    if last == 1 and all(s > 0 and s % 8 == 0 for s in outer) and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)
