"""A Trainer gets its batches (bastile.models.batches) without the host waiting for the GPU.

Accelerate's optimiser asks twice a step whether a package is installed, 0.1 ms a time: the answer is remembered."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bastile.guards import stand_in_for, stock_of
from bastile.models import batches

_OPTIMIZER, _ASKS = "accelerate.optimizer", "is_lomo_available"

_is_in_force = False
_running = 0  # trainings, one within another or beside it


def put_into(trainer: type) -> None:
    """Into the method of Trainer that gets the batches of a step."""
    global _is_in_force
    _is_in_force = True
    for name, replacement in _REPLACED.items():
        there = vars(trainer).get(name)
        if there is not None and stock_of(there) is there:
            setattr(trainer, name, replacement(there))


def take_out_of(trainer: type) -> None:
    """What others have put around it since stays, and comes to the original."""
    global _is_in_force
    _is_in_force = False
    _end()
    for name in _REPLACED:
        there = vars(trainer).get(name)
        if there is not None and stock_of(there) is not there:
            setattr(trainer, name, stock_of(there))


@contextmanager
def training() -> Iterator[None]:
    """Within, a Trainer trains. By whoever has the method with its loop (running_loss): no operator of ours is put into
    that, as some are into `train`."""
    global _running
    if not _is_in_force:
        yield
        return
    _running += 1
    batches.put_in()
    _ask_once()
    try:
        yield
    finally:
        _running -= 1
        if not _running:
            _end()


def _gets_batches(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _running or not _is_in_force:
            return original(self, *args, **kwargs)
        with batches.not_waited_for():
            return original(self, *args, **kwargs)

    stand_in_for(original, get_batch_samples)
    return get_batch_samples


def _ask_once() -> None:
    module = sys.modules.get(_OPTIMIZER)
    there = getattr(module, _ASKS, None)
    if callable(there) and stock_of(there) is there and not hasattr(there, "cache_info"):
        answer = there()

        def remembered() -> Any:
            return answer

        stand_in_for(there, remembered)
        setattr(module, _ASKS, remembered)


def _end() -> None:
    module = sys.modules.get(_OPTIMIZER)
    there = getattr(module, _ASKS, None)
    if there is not None and stock_of(there) is not there:
        setattr(module, _ASKS, stock_of(there))
    batches.take_out()


_REPLACED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {"get_batch_samples": _gets_batches}
