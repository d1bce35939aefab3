"""What stands for a GPU's copies where there is none: copies that come late, as late as they may, and memory that is
another's as soon as nobody holds it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import bastile
from bastile.offload import mover, passes
from bastile.offload.mover import seen_as


class LateMover:
    """Copies wait in line, and are made when one that is not before them is waited for. A tensor that is gone by then
    was memory that another would have had: a copy of it is NaN, a copy into it an error. What has not been waited for
    is NaN."""

    def __init__(self) -> None:
        self.line: list[tuple[int, Callable[[], None]]] = []
        self.events: list[str] = []  # what happened, in order
        self.outs = self.backs = self.copies = 0
        self.left: list[torch.Tensor] = []
        self.most_back = 0  # of what was copied back, how much was there at one time
        self._there: list[StorageWeakRef] = []
        self.room = 1 << 40

    def allocate(self, size: int) -> torch.Tensor:
        if size > self.room:
            raise RuntimeError("no page-locked memory is left")
        self.room -= size
        return torch.empty(size, dtype=torch.uint8)

    def _queue(self, copy: Callable[[], None]) -> int:
        self.copies += 1
        self.line.append((self.copies, copy))
        return self.copies

    def out(self, tensor: torch.Tensor, buffer: torch.Tensor) -> int:
        there, place = weakref.ref(tensor), seen_as(buffer, tensor.shape, tensor.dtype)
        del tensor, buffer
        self.outs += 1
        number = self.outs
        self.events.append(f"out {number}")

        def copy() -> None:
            found = there()
            if found is None:
                place.fill_(float("nan"))
            else:
                place.copy_(found)

        return self._queue(copy)

    def back(self, buffer: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        tensor = torch.full(shape, float("nan"), dtype=dtype)
        there, place = weakref.ref(tensor), seen_as(buffer, shape, dtype)
        self.backs += 1
        self._there.append(StorageWeakRef(tensor.untyped_storage()))
        self.most_back = max(self.most_back, sum(not each.expired() for each in self._there))
        self.events.append(f"back {self.backs}")

        def copy() -> None:
            found = there()
            assert found is not None, "a copy into memory that is another's"
            found.copy_(place)

        return tensor, self._queue(copy)

    def wait(self, copy: int) -> None:
        self.events.append(f"wait {copy}")
        while self.line and self.line[0][0] <= copy:
            self.line.pop(0)[1]()

    def leave(self, tensor: torch.Tensor) -> None:
        self.left.append(tensor)


def offloaded(monkeypatch: pytest.MonkeyPatch) -> LateMover:
    """From now on tensors of CPUs are moved, however small."""
    late = LateMover()
    monkeypatch.setattr(mover, "mover_for", lambda device: late)
    monkeypatch.setattr(passes, "MIN_BYTES", 1)
    return late


def counted() -> tuple[int, dict[str, int]]:
    """Forward passes whose layers' inputs were moved since the last call, and the reasons of what was not."""
    lines = [line for line in bastile.report(reset=True) if line.operator == "offload_checkpoints"]
    return sum(line.ran for line in lines), {reason: n for line in lines for reason, n in line.aside.items()}


def apply(is_on: bool, **more: Any) -> None:
    bastile.apply(offload_checkpoints=is_on, **more)
    counted()
