"""Batches of a Trainer that go to the GPU while the host goes on.

Accelerate copies each batch and waits until the copy is done, behind all that has been launched before: the host, some
100 ms ahead, begins the next step when the GPU has run out of work. A copy from pinned memory need not be waited for,
where nobody else holds that memory: what is launched on the stream comes behind the copy, and the allocator of pinned
memory hands a block out again when the copies from it are done. So it is while a Trainer asks its loader for batches,
and nowhere else; what is not pinned, or held by others too, is copied as ever. (Pinned memory that somebody shares by
way of NumPy, and writes to again for the next batch, is not seen to be.)

What such a batch held is remembered for as long as its tensors live and are not changed: whoever asks whether a mask is
all ones need not wait for the GPU's answer (bastile.models.masks)."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from bastile.graphs.recorder import uses_of_storage
from bastile.guards import stand_in_for, stock_of
from bastile.host_copies import remember

_is_pinned = torch.Tensor.is_pinned
_LOADERS, _SENDS = "accelerate.data_loader", "send_to_device"
_PARAMETERS = ("tensor", "device", "non_blocking", "skip_keys")
#: Masks, positions and tokens of a batch; pictures are asked for nothing.
_MOST_REMEMBERED = 1 << 22


class _Here(threading.local):
    depth = 0


_here = _Here()


def put_in() -> None:
    """In the place of what Accelerate's loaders call, if it has the parameters that it is known to have."""
    loaders = sys.modules.get(_LOADERS)
    there = getattr(loaders, _SENDS, None)
    if there is None or stock_of(there) is not there or not callable(there):
        return
    if tuple(inspect.signature(there).parameters) == _PARAMETERS:
        setattr(loaders, _SENDS, _sends(there))


def take_out() -> None:
    loaders = sys.modules.get(_LOADERS)
    there = getattr(loaders, _SENDS, None)
    if there is not None and stock_of(there) is not there:
        setattr(loaders, _SENDS, stock_of(there))


@contextmanager
def not_waited_for() -> Iterator[None]:
    """Within, in this thread, batches are copied so: what uses them next is launched behind the copies."""
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1


def _sends(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
        if _here.depth and not non_blocking and not skip_keys and _is_gpu(device):
            tensors = _pinned(tensor)
            if tensors is not None:
                sent = original(tensor, device, non_blocking=True)
                for name, host in tensors.items():
                    if not host.is_floating_point() and host.numel() <= _MOST_REMEMBERED:
                        remember(sent[name], host)
                return sent
        return original(tensor, device, non_blocking=non_blocking, skip_keys=skip_keys)

    stand_in_for(original, send_to_device)
    return send_to_device


def _is_gpu(device: Any) -> bool:
    return torch.cuda.is_available() and torch.device(device).type == "cuda"


def _pinned(batch: Any) -> dict[str, torch.Tensor] | None:
    """A batch's tensors by name, where all of them are in pinned memory that nobody else holds."""
    if type(batch) is dict:
        values: Mapping[str, Any] = batch
    elif isinstance(batch, UserDict) and type(batch).__module__.startswith("transformers."):
        values = batch.data
    else:
        return None
    found = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    others = (value for name, value in values.items() if name not in found)
    if any(hasattr(value, "to") or isinstance(value, (Mapping, list, tuple)) for value in others):
        return None
    return found if found and all(map(_is_ours_alone, found.values())) and not _are_held(found) else None


def _is_ours_alone(tensor: torch.Tensor) -> bool:
    """Whether it is in pinned memory that no other tensor has a part of."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and _is_pinned(tensor)
        and _uses(tensor) <= _uses_of_one()
    )


def _uses(tensor: torch.Tensor) -> int:
    """Grows by one with each further tensor, or other object, that has its memory."""
    return uses_of_storage(tensor.untyped_storage()._cdata)


@functools.cache
def _uses_of_one() -> int:
    return _uses(torch.empty(0))


def _are_held(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether anything but two dictionaries, the batch and this one, has any of these."""
    return max(map(sys.getrefcount, tensors.values())) > _references_of_two()


@functools.cache
def _references_of_two() -> int:
    """What is counted then, which differs between releases of Python."""
    first = {"": torch.empty(0)}
    second = dict(first)
    return max(map(sys.getrefcount, second.values()))
