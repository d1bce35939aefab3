"""Adapters as products read them: rounded to their input's type, the A's of one input in one piece of memory.

Rounding the few numbers of a node takes a launch as long as rounding those of a whole decoder layer. So while a layer
runs that is known by `together`, the first of its nodes has the others' adapters rounded with its own: those that asked
when the layer ran last. What is made so is for that run alone, and what was changed meanwhile is rounded again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


class _Asked(NamedTuple):
    """Adapters of one input, and the type that a node asks for them in."""

    a: Sequence[torch.Tensor]
    b: Sequence[torch.Tensor]
    dtype: torch.dtype

    def versions(self) -> list[int]:
        return [t._version for t in (*self.a, *self.b)]


class _Remembered:
    """What was asked, of adapters that may be gone by now."""

    __slots__ = ("_a", "_b", "_dtype")

    def __init__(self, asked: _Asked) -> None:
        self._a, self._b = [weakref.ref(t) for t in asked.a], [weakref.ref(t) for t in asked.b]
        self._dtype = asked.dtype

    def is_of(self, asked: _Asked) -> bool:
        refs, tensors = (*self._a, *self._b), (*asked.a, *asked.b)
        return (
            self._dtype is asked.dtype
            and len(self._a) == len(asked.a)
            and len(refs) == len(tensors)
            and all([_is_same(ref(), t) for ref, t in zip(refs, tensors, strict=True)])
        )

    def asked(self) -> _Asked | None:
        """None where a tensor is gone, or its memory is: of one that is sharded, until it is gathered."""
        a: Any = [ref() for ref in self._a]
        b: Any = [ref() for ref in self._b]
        are_there = all([t is not None and t.untyped_storage().size() > 0 for t in (*a, *b)])
        return _Asked(a, b, self._dtype) if are_there else None


def _is_same(one: Any, other: torch.Tensor) -> bool:
    """The same tensor, or one that stands in for it: layers that are captured as graphs have such parameters."""
    if one is other or one is None or isinstance(other, FakeTensor):
        return one is other
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype is other.dtype


class _Run:
    """A layer's, under way: what its nodes have asked, and what is ready for those to come."""

    __slots__ = ("_known", "asked", "layer", "ready")

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.asked: list[_Asked] = []
        self.ready: list[tuple[_Remembered, list[int], list[torch.Tensor]]] = []
        self._known: list[_Remembered] = []

    def rounded(self, asked: _Asked) -> list[torch.Tensor]:
        others = []
        if not self.asked:
            self._known = _remembered.get(self.layer, [])
            others = [(each, each.asked()) for each in self._known if not each.is_of(asked)]
        self.asked.append(asked)
        for i, (found, versions, results) in enumerate(self.ready):
            if found.is_of(asked):
                del self.ready[i]
                if versions == asked.versions():
                    return results
                break
        there = [(each, its) for each, its in others if its is not None]
        mine, *made = _made([asked, *[its for _, its in there]])
        self.ready += [(each, its.versions(), results) for (each, its), results in zip(there, made, strict=True)]
        return mine

    def end(self) -> None:
        known, asked = self._known, self.asked
        if len(known) != len(asked) or not all([one.is_of(it) for one, it in zip(known, asked, strict=True)]):
            _remembered[self.layer] = [_Remembered(each) for each in asked]


class _Thread(threading.local):
    run: _Run | None = None


_thread = _Thread()
#: Whether there have been adapters to round in this process: else nobody need say which layer runs.
in_use = False
_remembered: weakref.WeakKeyDictionary[nn.Module, list[_Remembered]] = weakref.WeakKeyDictionary()


class together:
    """A context in which this layer runs."""

    __slots__ = ("_before", "_layer")

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __enter__(self) -> None:
        self._before, _thread.run = _thread.run, _Run(self._layer)

    def __exit__(self, kind: Any, *_: Any) -> None:
        run, _thread.run = _thread.run, self._before
        if run is not None and run.asked and kind is None:  # a checkpoint may have cut it off
            run.end()


def rounded(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """All A's of one input, [ranks, K], and each B, in this type."""
    global in_use
    in_use = True
    asked = _Asked(a, b, dtype)
    return _made([asked])[0] if _thread.run is None else _thread.run.rounded(asked)


def _made(every: Sequence[_Asked]) -> list[list[torch.Tensor]]:
    """All of them in one launch."""
    places, sources, results = [], [], []
    for a, b, dtype in every:
        ranks = [t.shape[0] for t in a]
        all_a = a[0].new_empty(sum(ranks), a[0].shape[1], dtype=dtype)
        each_b = [t.new_empty(t.shape, dtype=dtype) for t in b]
        places += [*all_a.split(ranks), *each_b]
        sources += [*a, *b]
        results.append([all_a, *each_b])
    with torch.no_grad():
        torch._foreach_copy_(places, sources)
    return results
