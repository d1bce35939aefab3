"""A forward pass whose layers' inputs go to the host's memory, and the backward pass that has them back.

Around the call of a layer's checkpoint saved-tensor hooks take what it keeps of the hidden states, and nothing else.
The copy out runs beside the layer, or, where the checkpoint is of the reentrant kind, which keeps its input when its
function has run, beside the next one. Before the layer after the next begins, the current stream waits for it, and the
tensor is let go: memory that the allocator hands out from then on is written by work behind that wait. So it need not
be told of our stream, and the memory is free as soon as the host is there, however far the device has fallen behind.

In the backward pass the layers come in reverse. When one asks for its input, the input of the layer before is sent for;
so the last layer's, which would be asked for at once, stays."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch

from bastile.offload.mover import Buffers, Mover, buffers_of
from bastile.ops._common import PLAIN, has_values, in_transform
from bastile.recompute import hooks_below

#: Of a layer's input: below, what is saved is little, and the host's time for two copies and their events is not.
MIN_BYTES = 4 << 20

_NO_ROOM = "the host has no page-locked memory left"


class _Fetched(NamedTuple):
    tensor: torch.Tensor
    copy: Any


class _Moved:
    """A saved tensor whose contents are in the host's memory."""

    def __init__(self, tensor: torch.Tensor, buffers: Buffers, before: Callable[[], _Moved | None]) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.buffers, self.before = buffers, before
        self.is_spoiled = False  # it was changed while it was copied
        self.fetched: _Fetched | None = None
        self.buffer = buffers.take(tensor.nbytes)

    def fetch(self) -> _Fetched:
        """Begins the copy back."""
        if self.fetched is None:
            self.fetched = _Fetched(*self.buffers.mover.back(self.buffer, self.shape, self.dtype))
        return self.fetched

    def unpacked(self) -> torch.Tensor:
        if self.is_spoiled:
            raise RuntimeError(
                f"bastile: a {self.dtype} tensor of shape {list(self.shape)}, the input of a checkpointed layer, has "
                "been modified by an inplace operation while that layer ran, and the backward pass needs what it was"
            )
        tensor, copy = self.fetch()
        self.fetched = None
        self.buffers.mover.wait(copy)
        _send_for(self.before)
        return tensor

    def __del__(self) -> None:
        with suppress(Exception):  # when Python ends
            if self.fetched is not None:
                self.buffers.mover.leave(self.fetched.tensor)
            self.buffers.give_back(self.buffer)


class _Stayed:
    """A saved tensor that stays, kept as below."""

    def __init__(self, kept: Any, before: Callable[[], _Moved | None]) -> None:
        self.kept, self.before = kept, before


def _send_for(which: Callable[[], _Moved | None]) -> None:
    moved = which()
    if moved is not None:
        moved.fetch()


class _Leaving(NamedTuple):
    """A tensor whose copy out may not have ended."""

    tensor: torch.Tensor
    version: int
    mover: Mover
    copy: Any
    moved: weakref.ref[_Moved]


class Pass:
    """One forward pass through so many layers."""

    def __init__(self, layers: int) -> None:
        self.last = layers - 1
        self.moved = 0
        self.aside: dict[str, bool] = {}  # why inputs have stayed -> whether that is by the purpose
        self._leaving: list[_Leaving] = []
        self._before: Callable[[], _Moved | None] = lambda: None

    def layer(self, index: int, hidden: Any) -> Any:
        """Around the call of this layer's checkpoint."""
        self._let_go(but=1)
        why = self._why_it_stays(hidden)
        if why is None and (below := hooks_below()) is not None:
            return self._taking(index, hidden, *below)
        reason, is_usual = why or ("other hooks on saved tensors, or none are allowed", False)
        self.aside[reason] = is_usual
        return nullcontext()

    @contextmanager
    def _taking(self, index: int, hidden: torch.Tensor, keep: Any, unpack_kept: Any) -> Iterator[None]:
        buffers = buffers_of(hidden.device)
        seen = hidden.data_ptr(), hidden.shape, hidden.dtype
        assert buffers is not None

        def pack(tensor: torch.Tensor) -> Any:
            is_it = type(tensor) in PLAIN and tensor.is_contiguous()
            if not is_it or (tensor.data_ptr(), tensor.shape, tensor.dtype) != seen:
                return keep(tensor)
            moved = None if index == self.last else self._moved(tensor, buffers)
            return _Stayed(keep(tensor), self._before) if moved is None else moved

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, _Moved):
                return packed.unpacked()
            if isinstance(packed, _Stayed):
                _send_for(packed.before)
                packed = packed.kept
            found: torch.Tensor = unpack_kept(packed)
            return found

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _moved(self, tensor: torch.Tensor, buffers: Buffers) -> _Moved | None:
        try:
            moved = _Moved(tensor, buffers, self._before)
        except RuntimeError:
            self.aside[_NO_ROOM] = False
            return None
        tensor = tensor.detach()
        copy = buffers.mover.out(tensor, moved.buffer)
        self._before = weakref.ref(moved)
        self._leaving.append(_Leaving(tensor, tensor._version, buffers.mover, copy, self._before))
        self.moved += 1
        return moved

    def _let_go(self, but: int = 0) -> None:
        """Of what is being copied, but for the newest; the current stream waits for it."""
        going = max(len(self._leaving) - but, 0)
        for each in self._leaving[:going]:
            moved = each.moved()
            if moved is not None and each.tensor._version != each.version:
                moved.is_spoiled = True
            each.mover.wait(each.copy)
        del self._leaving[:going]

    def _why_it_stays(self, hidden: Any) -> tuple[str, bool] | None:
        """And whether that is by the purpose."""
        if type(hidden) not in PLAIN or not has_values(hidden) or in_transform():
            return "hidden states that are no plain tensor, or not a layer's first argument", False
        if hidden.nbytes < MIN_BYTES:
            return f"hidden states of less than {MIN_BYTES >> 20} MiB", True
        if not hidden.is_contiguous():
            return "hidden states that are not contiguous", False
        if buffers_of(hidden.device) is None:
            return f"hidden states on {hidden.device.type}, which is no GPU", True
        if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured", True
        return None

    def end(self) -> None:
        """The forward pass is over, by whatever."""
        self._let_go()
