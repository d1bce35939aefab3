"""What bastile.apply() has found in Transformers' model files. A process of the tests imports more than a hundred of
them, and each test would look through all again, for most of its time: a file in which everything is what it was has
the same places."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import is_
from types import FunctionType
from typing import Any

import pytest
from torch import nn

from bastile import in_force
from bastile.models import forms
from bastile.models.loading import is_model_file, is_of_any_type
from bastile.models.sites import ModelFile, Site, sites

_State = tuple[Any, ...]
_found: dict[tuple[str, tuple[str, ...]], tuple[_State, ModelFile, list[Site]]] = {}
_files_read = 0


def put_in() -> None:
    """For this process. What a file's text says is kept, too, as long as that is the same."""
    in_force.sites = _sites
    forms.forget_sources = lambda: None


@pytest.fixture(autouse=True)
def no_garbage_in_sources() -> None:
    """What is kept of files is not looked through for garbage each time, and what the test makes is."""
    global _files_read
    if len(forms._sources) != _files_read:
        _files_read = len(forms._sources)
        gc.collect()
        gc.freeze()


def _sites(file: ModelFile, operators: Iterable[str]) -> list[Site]:
    entry = in_force.FILES.get(file.name)
    is_stock = entry is None or not any(entry.applied.values())
    if file.more or not is_stock or not is_model_file(file.name) or is_of_any_type(file.name):
        return sites(file, operators)
    key, state = (file.name, tuple(operators)), _state(file.name)
    then, looked_at, found = _found.get(key, ((), file, []))
    if len(then) != len(state) or not all(map(is_, then, state)):
        looked_at, found = file, sites(file, key[1])
        _found[key] = state, file, found
    for told in ("unknown", "replaced", "reads"):
        setattr(file, told, dict(getattr(looked_at, told)))
    return found


def _state(name: str) -> _State:
    """All that a file's globals, its classes of modules and these classes' bases are."""
    scope = vars(sys.modules[name])
    modules = (item for item in scope.values() if isinstance(item, type) and issubclass(item, nn.Module))
    classes = dict.fromkeys(base for item in modules for base in item.__mro__)
    return tuple(each for items in (scope, *map(vars, classes)) for pair in items.items() for each in _within(*pair))


def _within(name: str, item: Any) -> Iterator[Any]:
    """A thing; of a function also its code and what it keeps."""
    yield name
    yield item
    if isinstance(item, FunctionType):
        yield item.__code__
        for cell in item.__closure__ or ():
            with suppress(ValueError):  # nothing in it
                yield cell.cell_contents
