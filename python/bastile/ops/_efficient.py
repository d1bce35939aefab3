"""PyTorch's memory-efficient attention (Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021), called
below `scaled_dot_product_attention`, for heads that are too wide for its flash attention. It is what PyTorch takes for
them itself, beneath a mask or not."""

from __future__ import annotations

import functools
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


def forward(
    q: Tensor, k: Tensor, v: Tensor, cuts: Tensor | None, longest: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, list[Any]]:
    """y, lse, and what else the backward pass takes. q: [B, S, heads, D], k and v likewise, of groups of heads; with
    cuts [2, N] between segments of queries and of keys, B is 1, and queries without keys have zeros."""
    y, lse, *random, _, _ = _forward(
        q, *_repeated(q, k, v), None, *_given(cuts, longest), 0.0, int(causal), True, scale=scale
    )
    return _without(y, cuts), lse, random


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    random: list[Any],
    cuts: Tensor | None,
    longest: int,
    causal: bool,
    scale: float,
) -> list[Tensor]:
    """Gradients of q, k and v, as these are."""
    of_inputs = (dy, q, *_repeated(q, k, v), None, y, *_given(cuts, longest), lse)
    dq, *both, _ = _backward(*of_inputs, 0.0, *random, int(causal), False, scale=scale)
    dk, dv = [_without(each, None if cuts is None else cuts.flip(0)) for each in both]
    return [_without(dq, cuts), *[each.unflatten(2, (k.shape[2], -1)).sum(3) for each in (dk, dv)]]


def _repeated(q: Tensor, *both: Tensor) -> list[Tensor]:
    return [t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in both]


def _given(cuts: Tensor | None, longest: int) -> list[Any]:
    return [*((None, None) if cuts is None else cuts), longest, longest]


def _without(t: Tensor, cuts: Tensor | None) -> Tensor:
    """With zeros in tokens whose segment has none of the others, for which PyTorch's writes nothing. cuts: theirs
    first."""
    if cuts is None:
        return t
    token = torch.arange(t.shape[1], device=t.device, dtype=cuts.dtype)
    segment = torch.searchsorted(cuts[0], token, right=True).clamp_(1, cuts.shape[1] - 1)
    return t.masked_fill_((cuts[1].diff()[segment - 1] == 0)[:, None, None], 0.0)
