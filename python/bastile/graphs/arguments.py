"""What a layer is called with beside the hidden states: tensors, whose values are copied to where the graph reads them,
and all else, which is part of what was captured."""

from __future__ import annotations

from collections.abc import MutableMapping
from operator import attrgetter
from typing import Any

import torch

from bastile.graphs import caches
from bastile.ops._common import has_values

#: Goes through all of a model's calls, down to the loss, and is read there alone.
_UNREAD = frozenset({"num_items_in_batch"})
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype)

_version = attrgetter("_version")

#: Of a tensor: shape, stride, type, device.
Signature = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


class CannotCapture(Exception):
    """The message is why."""


def signature(tensor: torch.Tensor) -> Signature:
    if not has_values(tensor) or tensor.layout is not torch.strided:
        raise CannotCapture(f"an argument of the layers is a {type(tensor).__name__} of layout {tensor.layout}")
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class Given:
    """The tensors that the layers of one step have been given, each once, in the order of their appearance."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._counted: list[torch.Tensor] = []  # those that know how often they have been written to
        self._versions: list[int] = []  # how often then
        self._places: dict[int, int] = {}
        self.cache: Any = None
        self._empty: caches.Empty | None = None

    def has(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._places

    def place(self, tensor: torch.Tensor) -> int:
        found = self._places.get(id(tensor))
        if found is None:
            found = self._places[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            if not tensor.is_inference():
                self._counted.append(tensor)
                self._versions.append(tensor._version)
        return found

    def keep_cache(self, device: torch.device) -> None:
        """As it is now, before the layers, on this device, fill it: others are to be made like it."""
        if self._empty is not None:
            self._empty.keep(self.cache, device)

    def have_changed(self) -> bool:
        """Whether one of them has been written to."""
        return list(map(_version, self._counted)) != self._versions

    def structure(self, value: Any) -> Any:
        """Of an argument, with places in place of tensors: what two calls must have in common."""
        if isinstance(value, torch.Tensor):
            return torch.Tensor, self.place(value), signature(value), value.requires_grad
        if isinstance(value, _CONSTANTS):
            return type(value), value
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return type(value), tuple([self.structure(each) for each in value])
        if isinstance(value, dict) and type(value) is dict:
            return dict, tuple([(name, self.structure(each)) for name, each in value.items() if name not in _UNREAD])
        if caches.is_shared(value):
            return type(value), tuple([(name, self.structure(each)) for name, each in value.items()])
        if self._empty is None and caches.is_new(value):
            self.cache, self._empty = value, caches.Empty(value)
        if self._empty is not None and value is self.cache:
            return caches.Empty, self._empty
        raise CannotCapture(f"an argument of the layers is a {type(value).__qualname__}")


def rebuilt(structure: Any, tensors: list[torch.Tensor]) -> Any:
    """The argument of this structure."""
    kind, content = structure[:2]
    if kind is torch.Tensor:
        return tensors[content]
    if kind is caches.Empty:
        return content.made()
    if kind in (tuple, list):
        return kind([rebuilt(each, tensors) for each in content])
    if _is_of_dictionaries(kind):
        return kind({name: rebuilt(each, tensors) for name, each in content})
    return content


def _is_of_dictionaries(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, MutableMapping)


def differentiated(structure: Any) -> list[int]:
    """The places of an argument's tensors that require a gradient."""
    if not isinstance(structure, tuple) or not structure:
        return []
    if structure[0] is torch.Tensor:
        return [structure[1]] if structure[3] else []
    return list(dict.fromkeys(place for each in structure for place in differentiated(each)))


class Place:
    """Memory of our own for a tensor of this signature. What is expanded there is expanded here."""

    def __init__(self, of: Signature) -> None:
        shape, self.stride, dtype, device = of
        self.once = [1 if step == 0 else size for size, step in zip(shape, self.stride, strict=True)]
        dense = 1 + sum((size - 1) * step for size, step in zip(self.once, self.stride, strict=True))
        elements = 1
        for size in self.once:
            elements *= size
        if dense < elements:
            raise CannotCapture("elements of an argument of the layers lie on top of each other")
        self.memory = torch.zeros(dense if elements else 0, dtype=dtype, device=device)
        self.tensor = self.memory.as_strided(shape, self.stride)
        self._target = self.memory.as_strided(self.once, self.stride)
        self._filled_with: torch.Tensor | None = None  # what is there, if it is steady

    def fill(self, tensor: torch.Tensor, is_steady: bool = False) -> None:
        """is_steady: if it is here already, it is what it was."""
        if is_steady and self._filled_with is tensor:
            return
        self._filled_with = tensor if is_steady else None
        self._target.copy_(tensor.detach().as_strided(self.once, self.stride), non_blocking=True)
