"""Switching adapters off and on again, as TRL's DPO, KTO, GRPO and RLOO do in every step: without them the model is its
own reference.

PEFT makes a report of all layers' state first, of which it reads one word, and then asks each layer's tables of
adapters one after the other: 30 ms for 196 layers, while a GPU waits. Here layers of PEFT's usual kind, all of them
switched on, are switched off and on by what that comes to, in a fifth of the time; all others by PEFT's own code."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bastile.models.changes import unseen
from bastile.models.forms import is_known
from bastile.models.known_methods import KnownMethod
from bastile.models.structure import class_of, picked, state_of

#: Attributes of a layer that are written here without being counted as changes (models.changes): who goes by these
#: looks at them.
SWITCHED = ("_disable_adapters", "_active_adapter")
#: What tells all layers of a model, of PEFT 0.18 on.
_OF_MODEL = {
    "disable_adapter_layers": frozenset({"ca3bf472f2fd"}),
    "enable_adapter_layers": frozenset({"2d4802889e5a"}),
}
#: What a layer then does, of PEFT 0.18, 0.19, and 0.20 on.
_OF_LAYER = {
    "enable_adapters": frozenset({"163baf7f825e", "044e4116486f", "64e49d8bfd7c"}),
    "set_adapter": frozenset({"c5b1929d9f8c", "f445de890b6a", "2f4f6b97838f"}),
}


def _made(original: Callable[..., Any], method: KnownMethod) -> Callable[..., Any]:
    @functools.wraps(original)
    @contextmanager
    def disable_adapter(self: Any) -> Iterator[None]:
        # Prompts and prefixes stand before the model itself, which may have its layers under any name.
        inner = getattr(self.base_model, "model", None) if method.is_in_force else None
        layers = [] if inner is None else _layers_of(inner)
        if not _can_be_switched(self, layers):
            with original(self):
                yield
            return
        try:
            _switch(inner, layers, False)
            self._adapters_disabled = True
            yield
        finally:
            _switch(inner, layers, True)  # what has been put in meanwhile is on
            self._adapters_disabled = False

    return disable_adapter


def _can_be_switched(model: Any, layers: list[Any]) -> bool:
    """Whether PEFT would do no more than switch each layer off, and on again."""
    if not layers or any(layer.disable_adapters for layer in layers):
        return False
    tuner = model.base_model
    active = model.peft_config[model.active_adapter]
    if active.is_prompt_learning or active.is_adaption_prompt or model._adapters_disabled:
        return False
    if not all(_is_peft_s(class_of(tuner), "BaseTuner", name, known) for name, known in _OF_MODEL.items()):
        return False
    # Of a bias that adapters train PEFT warns.
    return all(getattr(model.peft_config[name], "bias", "none") == "none" for name in tuner.active_adapters)


@functools.lru_cache(maxsize=64)
def _is_peft_s(kind: Any, base: str, name: str, known: frozenset[str]) -> bool:
    """Whether a class's method is that of PEFT's base class, and its code is known."""
    there = getattr(getattr(sys.modules["peft.tuners.tuners_utils"], base), name)
    return getattr(kind, name, None) is there and is_known(there, known)


def _layers_of(inner: Any) -> list[Any]:
    """What PEFT switches: its layers, and what it wraps around modules that are trained whole."""
    found = picked(inner, _switched)
    return _switched(inner.modules()) if found is None else found


def _switched(modules: Iterable[Any]) -> list[Any]:
    return [module for module in modules if _is_switched(class_of(module))]


@functools.lru_cache(maxsize=1024)
def _is_switched(kind: Any) -> bool:
    kinds = sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer, sys.modules["peft.utils"].AuxiliaryTrainingWrapper
    return issubclass(kind, kinds)


def _switch(inner: Any, layers: list[Any], on: bool) -> None:
    """Each layer's enable_adapters: its active adapters want gradients while they are on, and none otherwise."""
    usual = list(map(_is_usual, layers))
    for layer, is_usual, adapters in zip(layers, usual, _adapters_of(inner, layers, usual), strict=True):
        if not is_usual:
            layer.enable_adapters(on)
            continue
        active = layer.active_adapters if on else ()
        for name, reference in adapters:
            parameter = reference()
            if parameter is not None and parameter.is_leaf:
                parameter.requires_grad_(name in active)
        scope = vars(layer)  # where a module keeps what is neither a parameter nor a module
        with unseen:
            if on:
                scope["_active_adapter"] = active
            scope["_disable_adapters"] = not on


#: Of the parameters of a layer's adapters: the adapter's name, and the parameter.
_Adapters = list[tuple[str, "weakref.ref[torch.Tensor]"]]
_adapters: weakref.WeakKeyDictionary[Any, tuple[object, list[bool], list[_Adapters]]] = weakref.WeakKeyDictionary()


def _adapters_of(inner: Any, layers: list[Any], usual: list[bool]) -> list[_Adapters]:
    """Of each layer that is usual, remembered as long as no module of the model has got other children or parameters,
    and the same layers are usual."""
    state = state_of(inner)
    known, before, found = _adapters.get(inner, (None, [], []))
    if state is None or known is not state or before != usual:
        found = [list(_parameters_in(layer)) if each else [] for layer, each in zip(layers, usual, strict=True)]
        _adapters[inner] = state, usual, found
    return found


def _is_usual(layer: Any) -> bool:
    is_known_layer = all(
        _is_peft_s(class_of(layer), "BaseTunerLayer", name, known) for name, known in _OF_LAYER.items()
    )
    plain = not any(isinstance(getattr(class_of(layer), name, None), property) for name in SWITCHED)
    return is_known_layer and plain and not getattr(layer, "frozen_peft_weight_names", None)


def _parameters_in(layer: Any) -> Iterator[tuple[str, weakref.ref[torch.Tensor]]]:
    """Of its tables of adapters, each of which is a module or a parameter: with their adapter's name."""
    for table in map(functools.partial(getattr, layer), layer.adapter_layer_names):
        for name, adapter in table.items() if len(table) else ():
            if isinstance(adapter, torch.Tensor):
                yield name, weakref.ref(adapter)
            elif adapter._modules:
                yield from [(name, weakref.ref(parameter)) for parameter in adapter.parameters()]
            else:
                own = adapter._parameters.values()
                yield from [(name, weakref.ref(parameter)) for parameter in own if parameter is not None]


#: Of PEFT 0.18, 0.20 and 0.21.
_METHOD = KnownMethod("disable_adapter", frozenset({"04914b5d37a1", "9cb8ac5105ed", "0cbb87fe8e7a"}), _made)
put_into, take_out_of = _METHOD.put_into, _METHOD.take_out_of
