"""What of a stack of layers a graph has taken for granted, looked at in each step.

A graph reads parameters and buffers at the addresses at which they were, and does what the modules' code did then. So
the same modules, of the same classes, must hold the same tensors, which must see the same memory as before, with the
same settings, and have no hooks, which would not be called.

Of 28 layers that is some two thousand tables and tensors, few of which the host has in its caches: 0.8 ms of a step
that begins on an idle GPU. So they are looked at in parts, each before the first graph that takes it for granted, while
the GPU works on the graph before. Where changes are counted (models.changes), tables and settings are looked at when
there were some: two thousand modules of adapters are 2 ms in each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn

from bastile.graphs import collected
from bastile.graphs.calls import is_called_instead
from bastile.models import changes
from bastile.models.adapter_switch import SWITCHED

#: Layers in a part.
PART = 7
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules")
#: Attributes that are no settings of a module's: what torch keeps there, but for the mode, and marks of others.
_OWN = {*vars(nn.Module()), "_compiled_call_impl", "gradient_checkpointing", "_is_hf_initialized"} - {"training"}
SETTINGS = (bool, int, float, str, type(None), torch.dtype)
_pointer, _size, _stride = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
_requires_grad = attrgetter("requires_grad")


def _is_setting(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_setting, value))
    if isinstance(value, dict):
        return all(map(_is_setting, value.values()))
    return isinstance(value, SETTINGS)


def _is_counted(value: Any) -> bool:
    """Whether it cannot change but by a change that is counted, of the module's attributes or of a table itself."""
    return isinstance(value, SETTINGS) or (isinstance(value, dict) and all(map(_is_scalar, value.values())))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, SETTINGS)


class Watch:
    """Over these layers, as they are now."""

    def __init__(self, layers: Sequence[nn.Module], is_called: Callable[[Any], bool] = collected.collects) -> None:
        """is_called: whether a hook is called for a graph, too."""
        self._layers, self._is_called = layers, is_called
        self._parts = [_Part(layers[first : first + PART]) for first in range(0, len(layers), PART)]
        self._hooks = changes.Hooks([hooks for part in self._parts for hooks in part.hooks])
        self._behind = [vars(layer)[HOOKS[0]] for layer in layers]
        self._looked_at = 0  # of the parts, in this step

    def has_hooks(self) -> bool:
        """But those by which Transformers collects what layers return, or that graphs are replayed within."""
        found = [*filter(None, self._behind), *self._hooks.filled()]
        return not all(self._is_called(hook) for hooks in found for hook in hooks.values())

    def is_asked_for_more(self) -> bool:
        """Whether those collect something now that graphs do not hand out."""
        return not collected.suits(self._behind, self._hooks.filled())

    def begin(self, everything: bool) -> bool:
        """A step begins. Whether the first layers, or all, are as they were."""
        self._looked_at = 0
        if any(map(is_called_instead, self._layers)):  # by torch.compile: we are not there before a step
            return False
        return self.reach(len(self._layers) if everything else 1)

    def reach(self, end: int) -> bool:
        """Whether the layers before this one are as they were. No part is looked at twice in a step."""
        while self._looked_at * PART < end:
            if not self._parts[self._looked_at].is_as_it_was():
                return False
            self._looked_at += 1
        return True


class _Part:
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        modules = [module for layer in layers for module in layer.modules()]
        scopes = [vars(module) for module in modules]
        self._modules = modules  # held, so that no other has one's number
        self._classes: list[Any] = list(dict.fromkeys(map(type, modules)))
        of_layers = set(map(id, map(vars, layers)))
        self.hooks = [scope[n] for scope in scopes for n in HOOKS if n != HOOKS[0] or id(scope) not in of_layers]
        tables = [scope[name] for scope in scopes for name in _TABLES]
        self._own = [(vars(layer), layer) for layer in layers]
        self._sized = [*[vars(module) for module in modules if module not in layers], *tables]
        self._tables = [table for table in tables if table]
        self._tensors = [t for layer in layers for t in (*layer.parameters(), *layer.buffers())]
        self._settings: list[tuple[dict[str, Any], Any]] = []
        self._uncounted: list[tuple[dict[str, Any], Any]] = []
        for scope in scopes:
            names = [name for name, value in scope.items() if name not in _OWN and _is_setting(value)]
            apart = [name for name in names if name in SWITCHED or not _is_counted(scope[name])]
            for there, found in ((names, self._settings), (apart, self._uncounted)):
                if there:
                    found.append((scope, itemgetter(*there)))
            if changes.can_watch:
                own = [scope[name] for name in names if name not in apart]
                changes.watch_tables([value for value in own if isinstance(value, dict)])
        if changes.can_watch:
            changes.watch_scopes(modules)
            changes.watch_tables(tables)
        self._changes = changes.of_scopes()
        self._held = self._holds()
        self._seen = copy.deepcopy(self._looks())
        self._glimpsed = copy.deepcopy(self._glimpses())

    def _holds(self) -> list[Any]:
        return list(chain(map(type, self._modules), chain.from_iterable(map(dict.values, self._tables))))

    def _looks(self) -> list[Any]:
        return [
            [len(scope) - is_called_instead(layer) for scope, layer in self._own],
            list(map(len, self._sized)),
            [get(scope) for scope, get in self._settings],
            *self._looks_at_tensors(),
        ]

    def _glimpses(self) -> list[Any]:
        """What of all that is not counted when it changes."""
        return [
            list(map(type, self._modules)),
            [get(scope) for scope, get in self._uncounted],
            *self._looks_at_tensors(),
        ]

    def _looks_at_tensors(self) -> list[Any]:
        return [
            list(map(_pointer, self._tensors)),
            list(map(_size, self._tensors)),
            list(map(_stride, self._tensors)),
            list(map(_requires_grad, self._tensors)),
            [cls.forward for cls in self._classes],
        ]

    def is_as_it_was(self) -> bool:
        count = changes.of_scopes()
        try:
            if changes.can_watch and count == self._changes:
                return self._glimpses() == self._glimpsed
            held = self._holds()
            if len(held) != len(self._held) or not all(map(is_, held, self._held)) or self._looks() != self._seen:
                return False
        except KeyError:  # a setting that is gone
            return False
        self._changes = count
        return True
