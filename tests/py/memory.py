"""How much memory a graph holds: by the tensors themselves, on every device alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storages_of(values: Any) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


class Memory(TorchDispatchMode):
    """Counts the bytes that tensors made within still hold."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.calls: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(function))
        given = {storage._cdata for storage in storages_of((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in storages_of(result):
            if storage._cdata not in given:  # a view, or an argument itself: made earlier
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def kept(self) -> int:
        return sum(size for storage, size in self.storages.values() if not storage.expired())


class Peak(Memory):
    """Notes the most bytes that they held after any call."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.most = max(self.most, self.kept())
        return result


def kept_by(run: Callable[[], torch.Tensor]) -> int:
    """Bytes that the graph behind a result holds."""
    with Memory() as memory:
        result = run()
    held = memory.kept()
    del result
    return held
