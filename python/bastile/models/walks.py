"""Walks over a model's modules that a Trainer makes in every step, in a tenth of the time.

`train()` sets a flag that is set already, and `zero_grad()` and the clipping of gradients ask for `parameters()`, whose
names nobody reads; of a model with adapters, of thousands of modules, PyTorch's and Transformers' own code takes some
30 ms for it, while a GPU waits. Here `train()` sees whether anything would change, and `parameters()` makes no names. A
model of which a class has such methods of its own runs PyTorch's code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bastile.guards import stand_in_for, stock_of
from bastile.models.forms import is_known

#: Of PreTrainedModel.train's code, from Transformers 5.0 on: it is PyTorch's, and what is done where kernels of the Hub
#: are in use.
_FINGERPRINTS = frozenset({"c0510b9f5794", "c5ad9c3f6e9c"})

_is_in_force = False


def put_into(cls: Any) -> None:
    """Into PreTrainedModel, or PEFT's model around one, where its methods are PyTorch's or known."""
    global _is_in_force
    _is_in_force = True
    if cls.parameters is nn.Module.parameters:
        cls.parameters = _parameters
    train = vars(cls).get("train")
    if train is not None and stock_of(train) is train and is_known(train, _FINGERPRINTS):
        cls.train = _train(train)


def take_out_of(cls: Any) -> None:
    """What others have put around it since stays, and comes to the original."""
    global _is_in_force
    _is_in_force = False
    if vars(cls).get("parameters") is _parameters:
        del cls.parameters
    train = vars(cls).get("train")
    if stock_of(train) is not train:
        cls.train = stock_of(train)


def _modules(model: nn.Module) -> list[dict[str, Any]] | None:
    """The attributes of all modules, in the order of `modules()`; None where a class may see to that by itself."""
    found: list[dict[str, Any]] = []
    seen, rest = set(), [model]
    while rest:
        module = rest.pop()
        if module in seen:
            continue
        seen.add(module)
        kind: Any = type(module)
        if not _is_plain(kind):
            return None
        own = vars(module)
        found.append(own)
        inner = own["_modules"]
        if inner:
            rest.extend([each for each in reversed(inner.values()) if each is not None])
    return found


@functools.lru_cache(maxsize=1024)
def _is_plain(kind: Any) -> bool:
    return not issubclass(kind, torch.jit.ScriptModule) and all(
        getattr(kind, name) is getattr(nn.Module, name)
        for name in ("modules", "named_modules", "named_parameters", "_named_members", "children", "named_children")
    )


@functools.wraps(nn.Module.parameters)
def _parameters(self: Any, recurse: bool = True) -> Iterator[nn.Parameter]:
    if not recurse or not _is_in_force or torch.compiler.is_compiling():
        return nn.Module.parameters(self, recurse)
    modules = _modules(self)
    return nn.Module.parameters(self) if modules is None else _each(modules)


def _each(modules: list[dict[str, Any]]) -> Iterator[nn.Parameter]:
    """Each parameter once."""
    seen = set()
    for own in modules:
        for parameter in own["_parameters"].values():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                yield parameter


def _train(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self: Any, mode: bool = True) -> Any:
        if _is_in_force and not torch.compiler.is_compiling() and _changes_nothing(self, mode, train):
            return self
        return original(self, mode)

    stand_in_for(original, train)
    return train


def _changes_nothing(model: Any, mode: object, train: Any) -> bool:
    """train: what stands for PreTrainedModel's; a model may be a part of another."""
    if not isinstance(mode, bool):
        return False
    rest = [model]
    while rest:
        module = rest.pop()
        own, method = vars(module), type(module).train
        if own.get("training") is not mode or "train" in own:
            return False
        if method is not nn.Module.train and (method is not train or getattr(module, "use_kernels", True)):
            return False
        inner = own["_modules"]
        if inner:
            rest.extend([each for each in inner.values() if each is not None])
    return True
