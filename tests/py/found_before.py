"""What bastile.apply() has found in Transformers' model files. A process of the tests imports more than a hundred of
them, and each test would look through all again, for most of its time: a file in which everything is what it was has
the same places."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from operator import is_
from types import FunctionType
from typing import Any

import pytest
from torch import nn

from bastile import in_force, patching
from bastile.models import forms, loading
from bastile.models.sites import ModelFile, Site, sites

_State = tuple[Any, ...]


@dataclass
class _Found:
    """In one file, for some operators."""

    state: _State
    file: ModelFile
    places: list[Site]
    look: int  # at all files, in which everything was as it is for this


_found: dict[tuple[str, tuple[str, ...]], _Found] = {}
_serve = patching._serve_loaded
_looks, _is_looking, _last = 0, False, ()  # at all files: how many found anything changed, whether one is under way
_files_read = 0


def put_in() -> None:
    """For this process. What a file's text says is kept, too, as long as that is the same."""
    patching._serve_loaded = _serve_loaded
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


def _serve_loaded(chosen: list[str]) -> None:
    global _looks, _is_looking, _last
    state = _state([name for name in loading.model_files() if not loading.is_of_any_type(name)])
    if not _is_same(state, _last):
        _looks, _last = _looks + 1, state
    _is_looking = True
    try:
        _serve(chosen)
    finally:
        _is_looking = False


def _sites(file: ModelFile, operators: Iterable[str]) -> list[Site]:
    entry = in_force.FILES.get(file.name)
    is_stock = entry is None or not any(entry.applied.values())
    is_models = loading.is_model_file(file.name) and not loading.is_of_any_type(file.name)
    if file.module is None or file.more or not is_stock or not is_models:
        return sites(file, operators)
    key = file.name, tuple(operators)
    found = _found.get(key)
    if found is None or not _is_looking or found.look != _looks:
        state = _state([file.name])
        if found is None or not _is_same(state, found.state):
            found = _found[key] = _Found(state, file, sites(file, key[1]), 0)
        found.look = _looks if _is_looking else 0
    for told in ("unknown", "replaced", "reads"):
        setattr(file, told, dict(getattr(found.file, told)))
    return found.places


def _is_same(one: _State, other: _State) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _state(names: list[str]) -> _State:
    """All that these files' globals, their classes of modules and these classes' bases are; of functions also their
    code and what they keep."""
    scopes = [vars(sys.modules[name]) for name in names]
    items = (item for scope in scopes for item in scope.values())
    modules = dict.fromkeys(item for item in items if isinstance(item, type) and issubclass(item, nn.Module))
    classes = dict.fromkeys(base for item in modules for base in item.__mro__)
    state: list[Any] = []
    for each in (*scopes, *map(vars, classes)):
        state += each
        state += each.values()
        functions = [item for item in each.values() if type(item) is FunctionType]
        state += [function.__code__ for function in functions]
        for cell in [cell for function in functions for cell in function.__closure__ or ()]:
            with suppress(ValueError):  # nothing in it
                state.append(cell.cell_contents)
    return tuple(state)
