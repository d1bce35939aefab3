"""Whether any of a model's dictionaries has changed, without a look into them.

CPython, from 3.12 on, tells of each change of a dictionary that it is told to watch; the library counts them
(bastile/torch.h). What was found in thousands of dictionaries is good as long as the count is what it was: one number,
in place of two thousand modules none of which the host has in its caches. On older Pythons, and where others have taken
all of its eight watchers, `can_watch` is false, and who asks looks by itself."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from bastile._library import library

_NONE, _TABLES, _HOOKS, _MODES, _ATTRIBUTES = range(-1, 4)
_NAMES = {
    **{"_modules": _TABLES, "_parameters": _TABLES, "training": _MODES, "train": _MODES},
    # What PEFT and Transformers note for themselves in each step of a trainer with a reference.
    **dict.fromkeys(("_adapters_disabled", "_require_grads_hook", "_require_grads_hooks"), _NONE),
}


def _watchers() -> list[int] | None:
    """Of tables, hooks, and modules' own dictionaries."""
    if not hasattr(ctypes.pythonapi, "PyDict_AddWatcher"):
        return None
    events = library.bst_python_table_event, library.bst_python_hook_event, library.bst_python_scope_event
    try:
        found = [ctypes.pythonapi.PyDict_AddWatcher(ctypes.cast(event, ctypes.c_void_p)) for event in events]
    except RuntimeError:  # no more of them
        return None
    for name, count in _NAMES.items():
        if library.bst_python_count_name(ctypes.py_object(sys.intern(name)), count):
            return None
    return found


_counts = (ctypes.c_uint64 * 4).in_dll(library, "bst_python_changes")
_unseen = ctypes.c_int.in_dll(library, "bst_python_unseen")
_there = _watchers()
can_watch = _there is not None


def of_tables() -> int:
    """So many changes there have been of tables that are watched, and of which tables a module has."""
    return _counts[_TABLES]


def of_modes() -> int:
    """Likewise of whether modules train, and by which method they are told."""
    return _counts[_MODES]


def of_scopes() -> tuple[int, int, int]:
    """Likewise of tables, modes, and all other attributes of modules."""
    return _counts[_TABLES], _counts[_MODES], _counts[_ATTRIBUTES]


class _Unseen:
    def __enter__(self) -> None:
        _unseen.value += 1

    def __exit__(self, *_: object) -> None:
        _unseen.value -= 1


#: Within, changes do not count: of what is put back at once, or looked at all the same.
unseen = _Unseen()


def watch_tables(tables: Iterable[Mapping[Any, Any]]) -> None:
    _watch(0, tables)


def watch_scopes(modules: Iterable[Any]) -> None:
    """Their own dictionaries."""
    _watch(2, map(vars, modules))


def _watch(which: int, dictionaries: Iterable[Any]) -> None:
    assert _there is not None
    for each in dictionaries:
        ctypes.pythonapi.PyDict_Watch(_there[which], ctypes.py_object(each))


class Hooks:
    """Tables of hooks, nearly all of them empty."""

    def __init__(self, tables: Iterable[Mapping[int, Any]]) -> None:
        self._tables = list(tables)
        self._filled: list[Mapping[int, Any]] = []
        self._changes = -1  # before they were looked at
        if can_watch:
            _watch(1, self._tables)

    def filled(self) -> list[Mapping[int, Any]]:
        count = _counts[_HOOKS]
        if not can_watch or count != self._changes:
            self._filled, self._changes = [hooks for hooks in self._tables if hooks], count
        return self._filled
