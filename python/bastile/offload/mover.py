"""What moves tensors between a device and the host's memory beside the device's work.

Copies run in the order in which they are asked for, on a stream of their own. A copy out begins when what is queued on
the current stream is done, for that makes the tensor; a copy back too, for its memory may until then be another's. The
host waits for none of them: the current stream does, where `wait` says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Mover(Protocol):
    """Of one device."""

    def allocate(self, size: int) -> torch.Tensor:
        """So many bytes of the host's memory. RuntimeError: there are not so many."""

    def out(self, tensor: torch.Tensor, buffer: torch.Tensor) -> Any:
        """Copies a contiguous tensor into the buffer; returns what `wait` takes. The tensor's memory must not become
        another's before that wait, or `leave`."""

    def back(self, buffer: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """A new tensor with what the buffer holds, and what `wait` takes: before that wait it is not read, and its
        memory must not become another's."""

    def wait(self, copy: Any) -> None:
        """Work that is queued from now on begins when the copy has ended."""

    def leave(self, tensor: torch.Tensor) -> None:
        """Nobody waits for the copies of this tensor: its memory becomes another's when they have ended."""


class CudaMover:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def out(self, tensor: torch.Tensor, buffer: torch.Tensor) -> torch.cuda.Event:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            seen_as(buffer, tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
            return self.stream.record_event()

    def back(
        self, buffer: torch.Tensor, shape: torch.Size, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.cuda.Event]:
        # Of the current stream's memory, where it is used: who frees it there need not tell the allocator of ours.
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            tensor.copy_(seen_as(buffer, shape, dtype), non_blocking=True)
            return tensor, self.stream.record_event()

    def wait(self, copy: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(copy)

    def leave(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.stream)


def seen_as(buffer: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The beginning of the buffer as a contiguous tensor."""
    return buffer[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


class Buffers:
    """The host's memory of one mover, which goes from use to use: no more of it than was in use at one time."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self.bytes = 0  # of all, in use or free
        self._is_full = False  # there was no more to be had: asking takes time
        self._free: list[torch.Tensor] = []
        # A buffer is given back where the last reference goes, which may be within `take`.
        self._lock = threading.RLock()

    def take(self, size: int) -> torch.Tensor:
        with self._lock:
            fitting = [buffer for buffer in self._free if buffer.numel() >= size]
            if fitting:
                return self._out(min(fitting, key=torch.Tensor.numel))
            if self._free:  # longer batches have come: one of theirs takes the place of a shorter one's
                self.bytes -= self._out(max(self._free, key=torch.Tensor.numel)).numel()
            if self._is_full:
                raise RuntimeError("there is no more")
            try:
                # What PyTorch takes for that many: so the next batch, a little longer, fits as well.
                buffer = self.mover.allocate(1 << (size - 1).bit_length())
            except RuntimeError:
                self._is_full = True
                raise
            self.bytes += buffer.numel()
            return buffer

    def _out(self, buffer: torch.Tensor) -> torch.Tensor:
        self._free = [each for each in self._free if each is not buffer]
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._free.append(buffer)


def _mover_for(device: torch.device) -> Mover | None:
    return CudaMover(device) if device.type == "cuda" else None


#: What moves tensors of a device; None where there is nothing to be won. Tests put another one here.
mover_for: Callable[[torch.device], Mover | None] = _mover_for

_buffers: dict[torch.device, Buffers | None] = {}


def buffers_of(device: torch.device) -> Buffers | None:
    if device not in _buffers:
        mover = mover_for(device)
        _buffers[device] = None if mover is None else Buffers(mover)
    return _buffers[device]


def bytes_held() -> int:
    """Of the host's memory, by all movers."""
    return sum(buffers.bytes for buffers in _buffers.values() if buffers is not None)


def forget() -> None:
    """Lets the host's memory go; what steps still have in use, when they are done."""
    had = bytes_held()
    _buffers.clear()
    if had:
        getattr(torch._C, "_host_emptyCache", lambda: None)()
