"""What Transformers collects for a model that is asked for more than its result: hooks on its layers and on modules in
them hand what these return to a collector, if one is active. Models of images have it collect hidden states in each
step, for they take one layer's before the last; mixtures of experts their routers' logits, where their loss is to
balance them. Elsewhere the hooks stay where something was once asked for, and do nothing.

Whatever is collected leaves the layers. A graph calls no hooks: those of layers are called in its place, behind the
layer's own replayed call, and not where it runs a second time. Routers' logits are results of the graph, and handed to
the collector in place of the hooks within."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_MODULE = "transformers.utils.output_capturing"
_HIDDEN, _SELECTED = "hidden_states", "_hidden_states_layers"
#: What a model calls the logits of all its routers.
ROUTER_LOGITS = "router_logits"


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
    """Whether these hooks collect nothing now but hidden states, and within routers' logits. of_layers: those behind
    the layers' calls; within: all others of theirs and of the modules in them."""
    wanted = collector().keys() - {_SELECTED}
    if not wanted:
        return True
    behind, inner = [{_name_of(hook) for h in hooks if h for hook in h.values()} for hooks in (of_layers, within)]
    return None not in behind | inner and not (behind - {_HIDDEN} | inner - {ROUTER_LOGITS}) & wanted


def has(hidden: Any) -> bool:
    """Whether these are the hidden states that were collected last."""
    found = collector().get(_HIDDEN)
    return found[-1] is hidden if found else False


def of_routers() -> list[Any]:
    """The logits that have been collected so far; none where they are not asked for."""
    return collector().get(ROUTER_LOGITS, [])


def add_of_routers(logits: Iterable[Any]) -> None:
    """As the routers' own calls would have."""
    collector()[ROUTER_LOGITS].extend(logits)


def collect(layer: Any, args: Any, output: Any) -> None:
    """What the layer's own call would have done behind it."""
    if layer._forward_hooks and collector():
        for hook in layer._forward_hooks.values():
            hook(layer, args, output)


@contextmanager
def routers_alone(are_wanted: bool = True) -> Iterator[list[Any]]:
    """Within, nothing is collected but routers' logits, if they are wanted, and these are put into this list."""
    found: list[Any] = []
    active = _active()
    if active is None or not (are_wanted or active.get()):
        yield found
        return
    before = active.set({ROUTER_LOGITS: found} if are_wanted else None)
    try:
        yield found
    finally:
        active.reset(before)


def nothing() -> AbstractContextManager[list[Any]]:
    """Within, nothing is collected."""
    return routers_alone(are_wanted=False)
