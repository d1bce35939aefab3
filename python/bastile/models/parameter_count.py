"""The number of a model's parameters, counted again only when it can have changed.

Trainer.floating_point_ops asks for it in every step, and Transformers' num_parameters then names every module and every
parameter anew, while a GPU waits. The count that is kept is good as long as all that num_parameters reads is what it
was. That is looked at in every call, without making names, in a quarter of the time: no adapter that comes or goes, no
weight that is resized, quantised, gathered or sharded is missed. Where changes of modules are counted (models.changes),
it is looked at no closer than that."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn

from bastile.guards import stand_in_for, stock_of
from bastile.identity import identity
from bastile.models.forms import is_known
from bastile.models.structure import (
    modules_of,
    names_as_torch,
    parameters_of,
    picked,
    state_of,
    tables_of,
)

_NAME = "num_parameters"
_FINGERPRINTS = frozenset({"a690284ceb48"})  # of its code, from Transformers 5.0 on
_size = torch.Tensor.numel


_is_in_force = False


def put_into(base: type) -> None:
    """Into the class that PreTrainedModel has num_parameters from, unless other code than the known is there."""
    global _is_in_force
    _is_in_force = True
    owner, there = _place(base)
    if stock_of(there) is there and is_known(there, _FINGERPRINTS):
        setattr(owner, _NAME, _kept(there))


def take_out_of(base: type) -> None:
    """What others have put around it since stays, and comes to the original."""
    global _is_in_force
    _is_in_force = False
    owner, there = _place(base)
    if stock_of(there) is not there:
        setattr(owner, _NAME, stock_of(there))


def _place(base: type) -> tuple[Any, Any]:
    """The class that has the method, and the method."""
    return next(((cls, vars(cls)[_NAME]) for cls in base.__mro__ if _NAME in vars(cls)), (None, None))


def _kept(original: Callable[..., int]) -> Callable[..., int]:
    counts: weakref.WeakKeyDictionary[nn.Module, _Counts] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        is_stock = only_trainable or not _is_in_force or torch.compiler.is_compiling()
        is_known = not is_stock and _names_as_torch(self)
        found, glance = counts.get(self), _glance(self) if is_known else None
        if found is None or glance is None or found.glance != glance:
            modules = modules_of(self) if is_known else None
            if modules is None:
                return original(self, only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
            read = _read(self, modules)
            if found is None or found.read != read:
                found = counts[self] = _Counts(read)
            found.glance = _glance(self)
        key = bool(exclude_embeddings)
        if key not in found.numbers:
            found.numbers[key] = original(self, exclude_embeddings=exclude_embeddings)
        return found.numbers[key]

    stand_in_for(original, num_parameters)
    return num_parameters


def _names_as_torch(model: nn.Module) -> bool:
    """Whether the model names its modules and parameters as torch does, and not by a method of its own."""
    names = "named_modules", "named_parameters", "_named_members"
    return names_as_torch(type(model), *names) and not vars(model).keys() & set(names)


class _Counts:
    """Of one model."""

    def __init__(self, read: list[Any]) -> None:
        self.numbers: dict[bool, int] = {}  # by whether they are without embeddings
        self.read = read  # what they were made from
        self.glance: list[Any] | None = None  # at that


def _glance(model: Any) -> list[Any] | None:
    """What stays the same as long as `_read` does; None where changes are not counted, which those of classes
    are not."""
    state = state_of(model)
    modules = None if state is None else modules_of(model)
    there = None if modules is None else picked(model, parameters_of)
    return None if modules is None or there is None else [state, list(map(type, modules)), *_sizes(model, there)]


def _sizes(model: Any, parameters: list[Any]) -> tuple[list[int], list[int]]:
    in_4bit = getattr(model, "is_loaded_in_4bit", False)
    return list(map(_size, parameters)), [parameter.element_size() for parameter in parameters] if in_4bit else []


def _read(model: Any, modules: list[Any]) -> list[Any]:
    """All that num_parameters looks at, objects by identity: modules and their classes, parameters with
    their names within a module, sizes. Names of modules do not matter."""
    own = tables_of(modules)
    some = list(filter(None, own))
    every = list(chain.from_iterable(map(dict.values, some)))
    there = [parameter for parameter in every if parameter is not None]
    return [
        list(map(type, modules)),
        list(map(len, own)),
        list(chain.from_iterable(some)),
        list(map(identity, every)),
        *_sizes(model, there),
    ]
