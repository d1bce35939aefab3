"""What Transformers collects for a model that is asked for hidden states: hooks on its layers hand their results to a
collector, if one is active. Models of images have it collect in each step, for they take one layer's before the last;
elsewhere the hooks stay where hidden states were once asked for, and do nothing.

Whatever is collected leaves the layers. A graph calls no hooks: they are called in its place, behind the layer's own
replayed call, and not where it runs a second time."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_MODULE = "transformers.utils.output_capturing"
_HIDDEN, _SELECTED = "hidden_states", "_hidden_states_layers"


def _active() -> Any:
    """Where the collector is, for this thread; None in releases that have none."""
    return getattr(sys.modules.get(_MODULE), "_active_collector", None)


def collector() -> dict[str, Any]:
    """By name: what is collected now."""
    active = _active()
    return (active.get() if active is not None else None) or {}


def asked() -> Any:
    """What is to be collected, for the key of a kind of steps."""
    found = collector()
    return (*sorted(found.keys() - {_SELECTED}), *sorted(found.get(_SELECTED, ()))) if found else ()


def collects(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _MODULE and hook.__name__ == "output_capturing_hook"


def _name_of(hook: Any) -> Any:
    """By which it hands over what it collects; None where that does not show."""
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return cells["key"].cell_contents if "key" in cells else None


def suits(of_layers: Iterable[Mapping[int, Any]], within: Iterable[Mapping[int, Any]]) -> bool:
    """Whether these hooks collect nothing now but hidden states. of_layers: those behind the layers' calls; within: all
    others of theirs and of the modules in them."""
    wanted = collector().keys() - {_SELECTED}
    if not wanted:
        return True
    behind, inner = [{_name_of(hook) for h in hooks if h for hook in h.values()} for hooks in (of_layers, within)]
    return None not in behind | inner and not (behind - {_HIDDEN} | inner) & wanted


def has(hidden: Any) -> bool:
    """Whether these are the hidden states that were collected last."""
    found = collector().get(_HIDDEN)
    return found[-1] is hidden if found else False


def collect(layer: Any, args: Any, output: Any) -> None:
    """What the layer's own call would have done behind it."""
    if layer._forward_hooks and collector():
        for hook in layer._forward_hooks.values():
            hook(layer, args, output)


@contextmanager
def nothing() -> Iterator[None]:
    """Within, nothing is collected."""
    active = _active()
    if active is None or not active.get():
        yield
        return
    before = active.set(None)
    try:
        yield
    finally:
        active.reset(before)
