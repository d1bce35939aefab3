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
    found = _held.get(tensor) if isinstance(tensor, torch.Tensor) and len(_held) else None
    return found[1] if found is not None and found[0] == version(tensor) else None


def fetched(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, on the host; of one that it does not know, it waits for the device, once."""
    host = tensor if tensor.is_cpu else on_host(tensor)
    if host is None:
        host = tensor.cpu()
        remember(tensor, host)
    return host
