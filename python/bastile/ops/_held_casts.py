"""Weights of float32 that autocast casts, cast once while a text is generated.

Autocast forgets its casts with the outermost context that is open, and a model that a trainer trains opens one in each
of its calls: all weights would be read and cast for each token, which takes three times as long as to read what was
made of them. While a text is generated they do not change."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.compiler import is_compiling

from bastile.ops._common import FLOATS, HALVES, cast_type


class _Held(threading.local):
    """In this thread, by a weight's id: the weight, and what it was cast to. None: nothing is held."""

    made: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None


_held = _Held()


@contextmanager
def held_casts() -> Iterator[None]:
    """Within, in this thread, casts of weights stay: autocast's own, and those of `cast_once`."""
    before, _held.made = _held.made, {}
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        _held.made = before
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def are_there() -> bool:
    """Whether some are held by `cast_once` now."""
    return bool(_held.made)


def cast_once(x: torch.Tensor, weights: Sequence[Any]) -> tuple[torch.Tensor, list[Any]]:
    """x, and weights that it is multiplied by, or None, as autocast casts them for a linear layer, where casts are held
    and all are floats; else as they are. Not to be differentiated."""
    made = None if is_compiling() else _held.made
    dtype = None if made is None else cast_type(x)
    if made is None or dtype not in HALVES or not all([t.dtype in FLOATS for t in (x, *weights) if t is not None]):
        return x, list(weights)
    return x.to(dtype), [None if weight is None else _cast(made, weight, dtype) for weight in weights]


def _cast(made: dict[int, tuple[torch.Tensor, torch.Tensor]], weight: torch.Tensor, dtype: torch.dtype) -> Any:
    if weight.dtype is dtype:
        return weight
    _, found = made.get(id(weight), (None, None))
    if found is None or found.dtype is not dtype:
        found = weight.detach().to(dtype)
        made[id(weight)] = weight, found
    return found
