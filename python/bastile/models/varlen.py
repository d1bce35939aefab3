"""Chunks whose sizes have not been seen before, by PyTorch's flash attention, which is told their boundaries.

Where each batch has images of other sizes, PyTorch's attention gets another shape each time, for which cuDNN, its
fastest on Hopper, first builds a plan, both ways: some 0.3 ms of the host's a call, in which the device waits. Flash
attention needs none, and is one call for chunks of any lengths. From the second time on sizes are worth a plan."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from bastile.guards import stock_of
from bastile.models.chunks import Chunks, Group
from bastile.ops import _flash as flash
from bastile.ops._common import HALVES

#: By what a plan is of: whether it has been met once, or has been computed with a plan.
_met: OrderedDict[Any, bool] = OrderedDict()
_MOST = 4096


def is_new(attend: Any, qkv: Sequence[torch.Tensor], chunks: Chunks, groups: Sequence[Group], given: Any) -> bool:
    """Whether these chunks are to be computed so. The same for all layers that ask of these chunks, and again when they
    are checkpointed; while a graph is captured, for which no plan can be built, unless there is one."""
    if not is_served(attend, qkv, given):
        return False
    q = qkv[0]
    of = q.shape[1], q.shape[3], _dtype(q), q.device
    found = chunks.ways.get(of)
    if found is None:
        kinds = [(of, group) for group in groups]
        states = [_met.get(kind) for kind in kinds]
        if torch.cuda.is_current_stream_capturing():
            found = not all(states)
        else:
            found = None in states
            for kind, state in zip(kinds, states, strict=True):
                _met[kind] = (state is not None and not found) or bool(state)
                _met.move_to_end(kind)
            while len(_met) > _MOST:
                _met.popitem(last=False)
        chunks.ways[of] = found
    return found


def _dtype(x: torch.Tensor) -> torch.dtype:
    """In which attention computes."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


@functools.lru_cache(maxsize=64)
def is_sdpa(attend: Any) -> bool:
    """Whether an attention is Transformers' own by PyTorch's, by its code too."""
    from transformers.integrations import sdpa_attention

    stock = stock_of(attend)
    file = getattr(getattr(stock, "__code__", None), "co_filename", None)  # which functools.wraps does not copy
    return stock is sdpa_attention.sdpa_attention_forward and file == sdpa_attention.__file__


def is_served(attend: Any, qkv: Sequence[torch.Tensor], given: Any) -> bool:
    """Whether flash attention computes what this attention does."""
    q, k, v = qkv
    return (
        q.is_cuda
        and is_sdpa(attend)
        and q.shape == k.shape == v.shape
        and _dtype(q) in HALVES
        and q.shape[3] % 8 == 0
        and 0 < q.shape[3] <= flash.MOST_DIM
        and given.get("is_causal") is False
        and given.get("attention_mask") is None
        and torch.backends.cuda.flash_sdp_enabled()
        and _is_there(q.device)
    )


@functools.lru_cache(maxsize=64)
def _is_there(device: torch.device) -> bool:
    return flash.is_known() and torch.cuda.get_device_capability(device) >= flash.OLDEST


def attention(qkv: Sequence[torch.Tensor], boundaries: torch.Tensor, longest: int, given: Any) -> torch.Tensor:
    """q, k and v: [1, heads, rows, width]. longest: at least as many rows as any sequence has. The output: [1, rows,
    heads, width]."""
    dtype, cut = _dtype(qkv[0]), boundaries.to(torch.int32)
    rows = [t[0].transpose(0, 1).to(dtype) for t in qkv]
    found = flash.forward(*rows, cut, cut, longest, longest, 0.0, False, False, scale=given.get("scaling"))
    return found[0][None]
