"""Memory of PyTorch's allocator that grows at its end.

For a size that fits nothing it has, the allocator takes another segment of the driver; so the pool of recordings of
ever longer batches would be full of segments that are too small for the next. An expandable segment is a range of
addresses behind which the driver puts as much memory as is wanted. PyTorch has that as a setting of the process: here
it holds for as long as such memory is asked for, and not at all where the user has said what it is to be."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_OPTION = "expandable_segments"
_TRIALS = 3  # streams
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@contextmanager
def growing() -> Iterator[None]:
    """What is taken of the driver within can grow. Only where `can_grow` says so."""
    settings = _settings()
    if _OPTION in settings:  # by the user, or by who is around this
        yield
        return
    # What is not named goes back to its default, but for this one.
    named = [settings] if settings else []
    _set([*named, f"{_OPTION}:True"])
    try:
        yield
    finally:
        _set([*named, f"{_OPTION}:False"])
        _set(named)


def _settings() -> str:
    """Those in force; of releases that do not tell them, what the process was started with."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return str(ask()) if ask else next(filter(None, map(os.environ.get, _VARIABLES)), "")


def _set(settings: list[str]) -> None:
    torch._C._accelerator_setAllocatorSettings(",".join(settings))


def can_grow(device: torch.device) -> bool:
    """Whether this device's memory can: its driver and PyTorch's allocator have to, and the user not to be against."""
    return device.type == "cuda" and _can_grow(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _can_grow(index: int) -> bool:
    try:
        if torch.cuda.get_allocator_backend() != "native":
            return False
        # PyTorch has a few streams for all who want one, so others may have left something that is free on one.
        addresses = [_address_on(torch.cuda.Stream(index)) for _ in range(_TRIALS)]
        segments = torch.cuda.memory_snapshot()
        return any(each["is_expandable"] and each["address"] in addresses for each in segments)
    except (AttributeError, RuntimeError, ValueError):  # an allocator in the place of PyTorch's, a driver that cannot
        return False


def _address_on(stream: torch.cuda.Stream) -> int:
    with growing(), torch.cuda.stream(stream):
        return torch.empty(1, device=stream.device).data_ptr()
