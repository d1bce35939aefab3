"""How much memory a graph holds: by the tensors themselves, on every device alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Counts the bytes that tensors made within still hold."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.calls: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(function))
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def kept(self) -> int:
        return sum(size for storage, size in self.storages.values() if not storage.expired())


def kept_by(run: Callable[[], torch.Tensor]) -> int:
    """Bytes that the graph behind a result holds."""
    with Memory() as memory:
        result = run()
    held = memory.kept()
    del result
    return held
