"""Captured calls for one token, kept from one text of a model to the next.

To capture one takes the host as long as to make the call, some twenty of a text's tokens. What its graph reads stays
where it is: the memory of keys and values, and what the call was given. Parameters and settings are looked at before
the next text (watch.py); casts of weights, which live as long as a text, are not there to be read."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bastile.graphs.arguments import Place
from bastile.graphs.kept_memory import Memory
from bastile.graphs.recorder import Recorder, Replayed
from bastile.graphs.watch import SETTINGS, Watch
from bastile.guards import function_of
from bastile.ops._held_casts import are_there

#: Calls that a model keeps: of other rooms, rows or arguments.
_MOST = 8
#: Texts before which what was kept had to be thrown away, before nothing is kept any more.
_MOST_LOST = 2


@dataclass
class Call:
    """A captured one.

    Attributes:
        places: where it reads what it is given.
        outputs: of the model, without the cache, which had this name there.
    """

    graph: Replayed
    places: list[Place]
    outputs: Any
    name_of_cache: str | None

    def outputs_with(self, cache: Any) -> Any:
        outputs = copy.copy(self.outputs)
        if self.name_of_cache is not None:
            outputs[self.name_of_cache] = cache
        return outputs


class Calls:
    """Those of a model.

    Attributes:
        memory: of the text that is generated, and of those to come as long as calls are kept.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.memory = recorder, Memory()
        self._kept: dict[Any, Call] = {}
        self._state: _State | None = None  # of the model, for which they are kept
        self._lost = 0
        self._looked = False  # in this text

    def find(self, key: Any, model: nn.Module) -> Call | None:
        if not self._looked and self._state is not None and not self._state.is_that_of(model):
            self._lost += 1
            self._forget()
        self._looked = True
        return self._kept.get((self.memory.version, key))

    @contextmanager
    def captures(self, key: Any, model: nn.Module, cache: Any) -> Iterator[list[Call]]:
        """Within, a call is captured, and given to what is yielded, and then kept, if it reads nothing of this text."""
        made: list[Call] = []
        if self._lost >= _MOST_LOST or not cache.stays or are_there() or not self._is_little():
            yield made
            return
        casts = _Casts()
        if cache.under_autocast:
            torch.clear_autocast_cache()  # so what it casts is cast within the graph
            try:
                with casts:
                    yield made
            finally:
                torch.clear_autocast_cache()
        else:
            yield made
        if casts.of_weights:  # with each token: once a text is better
            self._lost = _MOST_LOST
            made.clear()
        self._looked = True
        for call in made:
            if self._state is None:
                self._state = _State(model)
            version = self.memory.version
            self._kept = {at: kept for at, kept in self._kept.items() if at[0] == version}
            while len(self._kept) >= _MOST:
                del self._kept[next(iter(self._kept))]
            self._kept[version, key] = call

    def end(self) -> None:
        """Of a text."""
        self._looked = False
        if not self._kept or not self._is_little():
            self._forget()
            self.memory = Memory()

    def _is_little(self) -> bool:
        return self.memory.nbytes() <= self.recorder.spare()

    def _forget(self) -> None:
        self._kept.clear()
        self._state = None


class _Casts(TorchDispatchMode):
    """Whether weights are cast within."""

    def __init__(self) -> None:
        super().__init__()
        self.of_weights = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.of_weights |= func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter)
        return func(*args, **(kwargs or {}))


class _State:
    """What a captured call takes for granted of a model. It does not hold the model, whose shelf would hold it then."""

    def __init__(self, model: nn.Module) -> None:
        self._watch = Watch(list(model.children()))
        scopes = [vars(module) for module in model.modules()]
        configs = {id(config): config for scope in scopes if (config := scope.get("config")) is not None}
        self._configs = list(configs.values())
        self._scopes = scopes[1:]  # the model's may hold a method of it
        self._tensors = [each for scope in self._scopes for each in _tensors_in(scope)]
        self._seen = self._looks(model)

    def is_that_of(self, model: nn.Module) -> bool:
        return self._seen == self._looks(model) and self._watch.begin(everything=True)

    def _looks(self, model: nn.Module) -> list[Any]:
        scope = vars(model)
        own = scope.get("forward")
        return [
            type(model).forward,
            None if own is None else (_weakly(function_of(own) or own), id(getattr(own, "__self__", None))),
            model.training and [each.get("gradient_checkpointing") for each in self._scopes],
            list(map(id, model.children())),
            [t.data_ptr() for t in (*model.parameters(recurse=False), *model.buffers(recurse=False))],
            # Neither parameters nor buffers.
            [(name, id(tensor), tensor.data_ptr()) for _, name, tensor in _tensors_in(scope)],
            [(name, id(where.get(name)), tensor.data_ptr()) for where, name, tensor in self._tensors],
            id(scope.get("config")),
            [{n: value for n, value in vars(c).items() if isinstance(value, SETTINGS)} for c in self._configs],
        ]


def _weakly(function: Any) -> Any:
    try:
        return weakref.ref(function)
    except TypeError:
        return object()  # the same as no other


def _tensors_in(scope: dict[str, Any]) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    return [(scope, name, value) for name, value in scope.items() if isinstance(value, torch.Tensor)]
