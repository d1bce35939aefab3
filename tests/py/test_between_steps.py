"""What is put into trainers, models and other packages beside the operators: all of it, whatever else is in force."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import bastile
from bastile.models import adapter_switch, between_steps, parameter_count, scored, sdpa

#: Put into tables or base classes, or beneath a wrapper that does not show it: their own tests see to them.
UNSEEN = (adapter_switch, parameter_count, scored, sdpa)
PLACES = [
    (module, piece) for module, (_, pieces) in between_steps._PIECES.items() for piece in pieces if piece not in UNSEEN
]
#: Where there are functions, the package beneath is one that the tests do not need.
OPTIONAL = ("deepspeed.",)


def place_of(module: str) -> Any:
    name, _ = between_steps._PIECES[module]
    if module.startswith(OPTIONAL):
        pytest.importorskip(module.partition(".")[0])
    there = importlib.import_module(module)
    return there if name is None else getattr(there, name)


def files_of(function: Any) -> Iterator[str]:
    """Of the code that is run, from the outermost wrapper inwards."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None:
            yield code.co_filename
        function = getattr(function, "__wrapped__", None)


def put_by(piece: Any, place: Any) -> set[str]:
    """Names in the place that lead to code of this piece."""
    file = inspect.getsourcefile(piece)
    items = {name: item for name, item in vars(place).items() if callable(item)}
    return {name for name, item in items.items() if file in files_of(item)}


@pytest.mark.parametrize(("module", "piece"), PLACES, ids=[f"{m}-{p.__name__.rpartition('.')[2]}" for m, p in PLACES])
def test_operators_leave_it_in_place(module: str, piece: Any) -> None:
    place = place_of(module)
    assert not put_by(piece, place)
    piece.put_into(place)
    alone = put_by(piece, place)
    assert alone
    piece.take_out_of(place)
    assert not put_by(piece, place)
    bastile.apply()
    assert put_by(piece, place) == alone
    bastile.apply()
    assert put_by(piece, place) == alone
    bastile.reset()
    assert not put_by(piece, place)
