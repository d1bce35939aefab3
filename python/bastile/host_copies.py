"""What tensors on a device hold, where the host knows it: it has sent or made them, and nobody has changed them since.
Who asks one of these for a number need not wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from bastile.ops._valid_rows import version

#: By the tensor on the device: its version then, and what the host has.
_held: Any = WeakTensorKeyDictionary()


def remember(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """That a tensor on a device holds what this one does, which nobody changes."""
    _held[tensor] = version(tensor), host


def on_host(tensor: Any) -> torch.Tensor | None:
    """What a tensor on a device holds; None where the host does not know."""
    if not isinstance(tensor, torch.Tensor) or not len(_held):
        return None
    found = _held.get(tensor)
    if found is None and (whole := tensor._base) is not None and _is_all_of(tensor, whole):
        found = _held.get(whole)
    return found[1] if found is not None and found[0] == version(tensor) else None


def _is_all_of(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """As of positions that have been expanded to several axes, one of them."""
    places = [(each.shape, each.stride(), each.storage_offset(), each.dtype) for each in (view, whole)]
    return places[0] == places[1]


def fetched(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, on the host; of one that it does not know, it waits for the device, once."""
    host = tensor if tensor.is_cpu else on_host(tensor)
    if host is None:
        host = tensor.cpu()
        remember(tensor, host)
    return host
