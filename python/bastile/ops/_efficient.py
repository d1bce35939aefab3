"""PyTorch's memory-efficient attention (Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021), called
below `scaled_dot_product_attention`, for heads that are too wide for its flash attention. It is what PyTorch takes for
them itself, beneath a mask or not."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bastile.ops._flash import are_called_so

_forward = torch.ops.aten._efficient_attention_forward.default
_backward = torch.ops.aten._efficient_attention_backward.default
_CUTS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
#: Arguments by position and by name, and how many results.
_EFFICIENT = (
    (_forward, f"query key value bias {_CUTS} dropout_p custom_mask_type compute_log_sumexp", "scale", 6),
    (
        _backward,
        f"grad_out_ query key value bias out {_CUTS} logsumexp dropout_p philox_seed philox_offset custom_mask_type "
        "bias_requires_grad",
        "scale",
        4,
    ),
)


@functools.cache
def is_known() -> bool:
    """Whether this PyTorch's takes and gives what those of 2.11 and 2.13 do."""
    return are_called_so(_EFFICIENT)


@dataclass(frozen=True)
class Wide:
    """Attention of rows, or of segments of one row, causal or not. q, y and dy are [B, S, heads, D], k and v likewise,
    of groups of heads."""

    cuts: Tensor | None  # of segments, [2, N]: between those of queries and those of keys; B is 1
    longest: int
    causal: bool
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
        """y, lse, and what else the backward pass takes. Queries without keys have zeros."""
        given = q, *_repeated(q, k, v), None, *self._cuts, 0.0, int(self.causal), True
        y, lse, *random, _, _ = _forward(*given, scale=self.scale)
        return _without(y, self.cuts), lse, random

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, random: list[Any]
    ) -> list[Tensor]:
        """Gradients of q, k and v, as these are."""
        given = dy, q, *_repeated(q, k, v), None, y, *self._cuts, lse, 0.0, *random, int(self.causal), False
        dq, *both, _ = _backward(*given, scale=self.scale)
        others = None if self.cuts is None else self.cuts.flip(0)
        summed = [_without(each, others).unflatten(2, (k.shape[2], -1)).sum(3) for each in both]
        return [_without(dq, self.cuts), *summed]

    @property
    def _cuts(self) -> list[Any]:
        return [*((None, None) if self.cuts is None else self.cuts), self.longest, self.longest]


def _repeated(q: Tensor, *both: Tensor) -> list[Tensor]:
    return [t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in both]


def _without(t: Tensor, cuts: Tensor | None) -> Tensor:
    """With zeros in tokens whose segment has none of the others, for which PyTorch's writes nothing. cuts: theirs
    first."""
    if cuts is None:
        return t
    token = torch.arange(t.shape[1], device=t.device, dtype=cuts.dtype)
    segment = torch.searchsorted(cuts[0], token, right=True).clamp_(1, cuts.shape[1] - 1)
    return t.masked_fill_((cuts[1].diff()[segment - 1] == 0)[:, None, None], 0.0)
