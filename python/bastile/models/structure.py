"""The modules of a model, walked over once and looked at again in every call.

What a Trainer asks a model for in each step (its parameters, their number, whether it trains) PyTorch finds by a walk
in Python, while a GPU waits: 2 us a module, and a model with adapters has thousands. Here the walk is remembered. It is
good as long as each of its modules has the very children that it had, which is seen without a loop in Python. Nothing
is kept alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

_children, _own = attrgetter("_modules"), attrgetter("_parameters")
_values = dict.values
class_of: Callable[[Any], Any] = type  # as a key of tables, which mypy takes classes of modules not to be


class _Structure:
    """Modules of a model, and by what they are known to be all of them."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._references = [weakref.ref(module) for module in modules]
        self._children = _identities(modules)

    def modules(self) -> list[Any] | None:
        """None where something has come or gone."""
        modules = [module for reference in self._references if (module := reference()) is not None]
        is_all = len(modules) == len(self._references) and _identities(modules) == self._children
        return modules if is_all and _are_plain(modules) else None


def _identities(modules: list[Any]) -> tuple[list[int], list[int]]:
    """Of the children of each. Where they are the same, so are the modules, from the model down."""
    children = list(map(_children, modules))
    return list(map(len, children)), list(map(id, chain.from_iterable(map(_values, filter(None, children)))))


_structures: weakref.WeakKeyDictionary[nn.Module, _Structure] = weakref.WeakKeyDictionary()


def modules_of(model: nn.Module) -> list[Any] | None:
    """All modules, each once, in the order of `modules()`; None where a class may see to that by itself."""
    found = _structures.get(model)
    modules = None if found is None else found.modules()
    if modules is None:
        modules = _walked(model)
        if modules is not None:
            _structures[model] = _Structure(modules)
    return modules


def walk(model: nn.Module) -> Iterator[Any]:
    """All modules, likewise, one after the other; None, and no more, at one whose class may see to that by itself."""
    found: set[nn.Module] = set()
    rest = [model]
    while rest:
        module = rest.pop()
        if module not in found:
            if not _are_plain([module]):
                yield None
                return
            found.add(module)
            yield module
            rest.extend([each for each in reversed(_children(module).values()) if each is not None])


def each(self: nn.Module) -> Iterator[nn.Module]:
    """What `modules()` yields, in its order, each when it is asked for; what is within a part whose class has another
    `named_modules` is its own. PyTorch's is a generator within a generator for each level."""
    if not _walks_plainly(class_of(self)):
        yield from (module for _, module in self.named_modules())
        return
    seen: set[nn.Module] = {self}
    yield self
    levels = [iter(self._modules.values())]
    while levels:
        for module in levels[-1]:
            if module is None or module in seen:
                continue
            if not _walks_plainly(class_of(module)):
                yield from (part for _, part in module.named_modules(seen))
                continue
            seen.add(module)
            yield module
            if module._modules:
                levels.append(iter(module._modules.values()))
                break
        else:
            levels.pop()


def each_named(
    self: nn.Module, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Likewise, what `named_modules()` yields."""
    seen = set() if memo is None else memo
    if self in seen:
        return
    if remove_duplicate:
        seen.add(self)
    yield prefix, self
    levels = [(prefix and f"{prefix}.", iter(self._modules.items()))]
    while levels:
        before, parts = levels[-1]
        for name, module in parts:
            if module is None or module in seen:
                continue
            title = before + name
            if not _walks_plainly(class_of(module)):
                yield from module.named_modules(seen, title, remove_duplicate)
                continue
            if remove_duplicate:
                seen.add(module)
            yield title, module
            if module._modules:
                levels.append((f"{title}.", iter(module._modules.items())))
                break
        else:
            levels.pop()


@functools.lru_cache(maxsize=1024)
def _walks_plainly(kind: Any) -> bool:
    return names_as_torch(kind, "named_modules")


def names_as_torch(kind: Any, *methods: str) -> bool:
    """Whether these methods of a class of modules are torch's, or those that do the same here."""
    return all(getattr(kind, name) in (getattr(nn.Module, name), _SAME.get(name)) for name in methods)


_SAME = {"modules": each, "named_modules": each_named}


def _walked(model: nn.Module) -> list[Any] | None:
    found = list(walk(model))
    return None if found[-1] is None else found


def _are_plain(modules: list[Any]) -> bool:
    return all(map(_is_plain, set(map(type, modules))))


@functools.lru_cache(maxsize=1024)
def _is_plain(kind: Any) -> bool:
    names = ("modules", "named_modules", "named_parameters", "_named_members", "children", "named_children")
    return not issubclass(kind, torch.jit.ScriptModule) and names_as_torch(kind, *names)


def tables_of(modules: list[Any]) -> list[dict[str, Any]]:
    """Each module's own parameters by name."""
    return list(map(_own, modules))


def parameters_of(modules: list[Any]) -> list[nn.Parameter]:
    """Each parameter once, in the order of `parameters()`."""
    tables = filter(None, tables_of(modules))
    every = [p for p in chain.from_iterable(map(_values, tables)) if p is not None]
    return list(dict(zip(map(id, every), every, strict=True)).values())
