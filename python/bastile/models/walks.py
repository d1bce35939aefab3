"""Walks over a model's modules that a Trainer makes in every step, in a fraction of the time.

`train()` sets a flag that is set already, and `zero_grad()` and the clipping of gradients ask for `parameters()`, whose
names nobody reads; of a model with adapters, of thousands of modules, PyTorch's and Transformers' own code takes some
30 ms for it, while a GPU waits. Here `train()` sees whether anything would change, `parameters()` makes no names, and
`zero_grad()` has no generator beneath it. A model of which a class has such methods of its own runs PyTorch's code.
What Transformers, PEFT, Accelerate and TRL look for by `modules()` and `named_modules()` of their own they find in a
third and in half of the time: the same modules in the same order, but not by a generator for each level."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bastile.models import changes
from bastile.models.known_methods import KnownMethod
from bastile.models.structure import (
    each,
    each_named,
    modules_of,
    parameters_of,
    picked,
    recalled,
    state_of,
    walk,
)

#: Of PreTrainedModel.train's code, from Transformers 5.0 on: it is PyTorch's, and what is done where kernels of the Hub
#: are in use.
_FINGERPRINTS = frozenset({"c0510b9f5794", "c5ad9c3f6e9c"})

_is_in_force = False


def put_into(cls: Any) -> None:
    """Into PreTrainedModel, or PEFT's model around one, where its methods are PyTorch's or known."""
    global _is_in_force
    _is_in_force = True
    for name, replacement in _REPLACED.items():
        if getattr(cls, name) is getattr(nn.Module, name):
            setattr(cls, name, replacement)
    _TRAIN.put_into(cls)


def take_out_of(cls: Any) -> None:
    """What others have put around it since stays, and comes to the original."""
    global _is_in_force
    _is_in_force = False
    for name, replacement in _REPLACED.items():
        if vars(cls).get(name) is replacement:
            delattr(cls, name)
    _TRAIN.take_out_of(cls)


@functools.wraps(nn.Module.parameters)
def _parameters(self: Any, recurse: bool = True) -> Iterator[nn.Parameter]:
    if not recurse or not _is_in_force or torch.compiler.is_compiling():
        return nn.Module.parameters(self, recurse)
    return _each(self)


@functools.wraps(nn.Module.zero_grad)
def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    is_usual = set_to_none and _is_in_force and type(self).parameters is _parameters and "parameters" not in vars(self)
    parameters = picked(self, parameters_of) if is_usual and not torch.compiler.is_compiling() else None
    if parameters is None or getattr(self, "_is_replica", False):  # of which torch warns
        return nn.Module.zero_grad(self, set_to_none)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = None
    return None


def _each(model: nn.Module) -> Iterator[nn.Parameter]:
    """Who asks for the first one alone, for its type or device, waits for no others."""
    known = recalled(model, parameters_of)
    if known is not None:
        yield from known
        return
    for module in walk(model):
        if module is None:
            break
        first = next((p for p in module._parameters.values() if p is not None), None)
        if first is not None:
            yield first
            break
    else:
        return
    found = picked(model, parameters_of)
    every = nn.Module.parameters(model) if found is None else iter(found)
    if module is not None:
        next(every)
    yield from every


@functools.wraps(nn.Module.train)
def _plain_train(self: Any, mode: bool = True) -> Any:
    is_known = _is_in_force and not torch.compiler.is_compiling() and _changes_nothing(self, mode)
    return self if is_known else nn.Module.train(self, mode)


def _train(original: Callable[..., Any], method: KnownMethod) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self: Any, mode: bool = True) -> Any:
        return self if method.is_in_force and _changes_nothing(self, mode) else original(self, mode)

    _ours.add(train)
    return train


_ours: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet((_plain_train,))
_TRAIN = KnownMethod("train", _FINGERPRINTS, _train)
_REPLACED: dict[str, Any] = {
    "modules": each,
    "named_modules": each_named,
    "parameters": _parameters,
    "zero_grad": _zero_grad,
    "train": _plain_train,
}


@dataclass(frozen=True)
class _Mode:
    """One that all modules of a model were found to be in."""

    mode: bool
    state: object  # of the model's structure
    changes: int  # of modes, before
    methods: dict[Any, Any]  # by class of the modules, how it is told
    own: list[weakref.ref[Any]]  # modules of classes with a method of their own

    def holds(self, model: Any) -> bool:
        return (
            model.training is self.mode
            and "train" not in vars(model)
            and self.state is state_of(model)
            and self.changes == changes.of_modes()
            and all([kind.train is method for kind, method in self.methods.items()])
            and not any([getattr(reference(), "use_kernels", True) for reference in self.own])
        )


_modes: weakref.WeakKeyDictionary[nn.Module, _Mode] = weakref.WeakKeyDictionary()


def _changes_nothing(model: Any, mode: object) -> bool:
    if not isinstance(mode, bool):
        return False
    known = _modes.get(model)
    if known is not None and known.mode is mode and known.holds(model):
        return True
    count, modules = changes.of_modes(), modules_of(model)
    if modules is None:
        return False
    scopes = list(map(vars, modules))
    if not all([scope.get("training") is mode for scope in scopes]) or any(["train" in scope for scope in scopes]):
        return False
    kinds: set[Any] = set(map(type, modules))
    methods = {kind: kind.train for kind in kinds}
    others = {kind for kind, method in methods.items() if method is not nn.Module.train}
    own = [module for module in (modules if others else ()) if type(module) in others]
    if any(methods[type(module)] not in _ours or getattr(module, "use_kernels", True) for module in own):
        return False
    state = state_of(model)
    if state is not None:
        _modes[model] = _Mode(mode, state, count, methods, list(map(weakref.ref, own)))
    return True
