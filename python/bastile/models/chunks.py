"""Sequences that stand one behind another in one tensor, their boundaries in another ("cu_seqlens"), as in vision and
audio towers: how long they are, and how few calls of an attention compute them all.

The host has to know the lengths, for they are sizes of what is launched. It asks a tensor for them once, which waits
for the device, and remembers the answer for as long as that very tensor lives and nobody changes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from bastile.host_copies import on_host
from bastile.ops._common import Function, is_batched
from bastile.ops._valid_rows import version

#: By the tensor of boundaries: its version then, and the chunks. What asks twice at once makes the same twice.
_known: Any = WeakTensorKeyDictionary()
#: By boundaries that are read on the device alone: how long the longest sequence may be; 0: as all of them.
_open: Any = WeakTensorKeyDictionary()
#: What one call of an attention costs beyond its work, both ways, in elements that could be copied meanwhile. On an
#: H100 some 10 us, in which 16 MiB are read and written; on a CPU as many us, and 256 KiB.
_WORTH = {"cuda": 1 << 23, "cpu": 1 << 16}
#: Tensors that gathering copies more than calls on views do: q, k, v, and the output once more.
_COPIES = 4
#: CUDA counts a grid's second and third dimension with 16 bits.
_MOST = 1 << 15

#: Chunks of one length: how many there are, and how long.
Group = tuple[int, int]


@dataclass(frozen=True)
class Chunks:
    """How long each is."""

    lengths: tuple[int, ...]
    _rows: dict[Any, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, compare=False, repr=False)
    #: How they are computed, by heads and types: what all layers have in common.
    ways: dict[Any, bool] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def runs(self) -> list[Group]:
        """As they stand: each run of equal lengths."""
        return [part for length, run in groupby(self.lengths) for part in _parts(sum(1 for _ in run), length)]

    @cached_property
    def kinds(self) -> list[Group]:
        """All of one length together, by their first."""
        return [part for length, count in Counter(self.lengths).items() for part in _parts(count, length)]

    def is_gathered(self, like: torch.Tensor) -> bool:
        """Whether chunks of one length are to be put side by side first: where that saves more calls than copying the
        tensors costs. Not while a graph is captured, which would go on to read rows that are forgotten by then."""
        saved = len(self.runs) - len(self.kinds)
        pays = saved * _WORTH[like.device.type] >= _COPIES * like.numel()
        return saved > 0 and pays and not (like.is_cuda and torch.cuda.is_current_stream_capturing())

    def rows(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Which row comes where, when chunks of one length are put side by side, and which way it goes back. On a GPU
        they are another stream's to make again: one does not wait for the other's copies."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        found = self._rows.get((device, stream))
        if found is None:
            with torch.inference_mode(False):  # a later training step reads them too
                found = tuple(sent(each, device) for each in self._orders())  # type: ignore[assignment]
            self._rows[device, stream] = found  # type: ignore[assignment]
        return found  # type: ignore[return-value]

    def _orders(self) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.tensor(self.lengths)
        starts = lengths.cumsum(0) - lengths
        own = [starts[lengths == n, None] + torch.arange(n) for n in dict.fromkeys(self.lengths)]
        order = torch.cat([each.flatten() for each in own])
        return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def _parts(count: int, length: int) -> list[Group]:
    return [(min(_MOST, count - first), length) for first in range(0, count, _MOST)]


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def chunks_of(boundaries: torch.Tensor) -> Chunks:
    """The chunks between these boundaries. Asks them, which waits for their device, if it is not known."""
    found = asked(boundaries)
    if found is None:
        host = on_host(boundaries)
        ends = (boundaries if host is None else host).tolist()
        found = Chunks(tuple([end - start for start, end in pairwise(ends)]))
        if not boundaries.is_inference():  # of which nobody can tell whether they have been changed
            _known[boundaries] = version(boundaries), found
    return found


def lengths_of(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """How long each sequence is. Asks the tensor, which waits for its device, if that is not known: while a CUDA graph
    is captured it is an error of torch's then."""
    return chunks_of(cu_seqlens).lengths


def asked(boundaries: torch.Tensor) -> Chunks | None:
    """The chunks, where the tensor has been asked for them and is what it was."""
    version_then, found = _known.get(boundaries, (None, None))
    is_same = found is not None and not boundaries.is_inference() and version_then == version(boundaries)
    return found if is_same else None


def say(boundaries: torch.Tensor, chunks: Chunks) -> None:
    """That these are what a tensor is going to hold, to whoever asks it before it is written to again."""
    _known[boundaries] = version(boundaries), chunks


def open_up(boundaries: torch.Tensor, longest: int) -> None:
    """That whoever can is to read these on the device, not to ask them. They begin with 0 and end with all rows;
    sequences may be empty, and the longest has at most so many rows, 0: all."""
    _open[boundaries] = longest


def opened(boundaries: torch.Tensor) -> int | None:
    """How long the longest may be, where they are to be read on the device."""
    found: int | None = _open.get(boundaries)
    return found


def lengths_to_read(boundaries: torch.Tensor) -> tuple[int, ...]:
    """For who cannot read such boundaries on a GPU, which waits. It is known from then on that they were asked."""
    return tuple(boundaries.diff().tolist()) if boundaries.device.type == "cpu" else chunks_of(boundaries).lengths


def are_known(cu_seqlens: torch.Tensor) -> bool:
    """Whether `lengths_of` answers without asking the tensor."""
    return asked(cu_seqlens) is not None or on_host(cu_seqlens) is not None


class _Rows(Function):
    """Rows in another order, each of them once: what comes back goes the way back, and nothing is summed up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order, back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        order, back = ctx.saved_tensors
        dx = dy.index_select(0, back) if is_batched(dy) else reordered(dy, back, order)
        return dx, None, None


def reordered(x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """x's rows in this order, from which `back` leads back."""
    return _Rows.apply(x, order, back)
