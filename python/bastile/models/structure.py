"""The modules of a model, walked over once and looked at again in every call.

What a Trainer asks a model for in each step (its parameters, their number, whether it trains) PyTorch finds by a walk
in Python, while a GPU waits: 2 us a module, and a model with adapters has thousands. Here the walk is remembered. It is
good as long as each of its modules has the very children that it had: where changes are counted (models.changes), as
long as there was none, and else that is seen without a loop in Python. What is found among the modules, such as their
parameters, is remembered likewise, where changes are counted. Nothing is kept alive."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from bastile.identity import identity
from bastile.models import changes

_children, _own = attrgetter("_modules"), attrgetter("_parameters")
_values = dict.values
_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
class_of: Callable[[Any], Any] = type  # as a key of tables, which mypy takes classes of modules not to be


class _Structure:
    """Modules of a model, and by what they are known to be all of them."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._references = _references(modules)
        self._picked: dict[Callable[..., Any], list[weakref.ref[Any]]] = {}
        self.state = object()  # another one when there were changes
        self._changes = 0
        if changes.can_watch:
            changes.watch_tables(chain(map(_children, modules), map(_own, modules)))
            changes.watch_scopes(modules[1:])  # the first is often a wrapper that is told its mode in each step
            self._root, self._tables = self._references[0], _tables(modules[0])
            self._changes = changes.of_tables()
        self._children = _identities(modules)

    def is_unchanged(self) -> bool:
        return (
            changes.can_watch
            and changes.of_tables() == self._changes
            and (root := self._root()) is not None
            and _tables(root) == self._tables
        )

    def modules(self) -> list[Any] | None:
        """None where something has come or gone."""
        modules = _alive(self._references)
        if modules is None or self.is_unchanged():
            return modules
        count = changes.of_tables()
        if _identities(modules) != self._children or not _are_plain(modules):
            return None
        if changes.can_watch:
            self._changes, self.state = count, object()
            self._picked.clear()
        return modules

    def picked(self, pick: Callable[..., Any]) -> list[Any] | None:
        """None where it is not known."""
        found = self._picked.get(pick) if self.is_unchanged() else None
        return None if found is None else _alive(found)

    def keep(self, pick: Callable[..., Any], found: list[Any]) -> None:
        if self.is_unchanged():
            self._picked[pick] = _references(found)


def _tables(module: Any) -> tuple[int, int]:
    return identity(_children(module)), identity(_own(module))


def _references(objects: list[Any]) -> list[weakref.ref[Any]]:
    return list(map(weakref.ref, objects))


def _alive(references: list[weakref.ref[Any]]) -> list[Any] | None:
    """None where one is gone."""
    found = [there for reference in references if (there := reference()) is not None]
    return found if len(found) == len(references) else None


def _identities(modules: list[Any]) -> list[list[int]]:
    """Of the children of each. Where they are the same, so are the modules, from the model down. And of the tables that
    are watched, if they are. A plain module's hash is its identity, and found in half of the time."""
    children = list(map(_children, modules))
    found = [list(map(len, children)), list(map(hash, chain.from_iterable(map(_values, filter(None, children)))))]
    if changes.can_watch:
        found += list(map(identity, children)), list(map(identity, tables_of(modules)))
    return found


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


def picked(model: nn.Module, pick: Callable[[list[Any]], list[Any]]) -> list[Any] | None:
    """What a function finds among all modules, by their classes, children and parameters alone; None as of modules_of.
    It is remembered by the function."""
    found = recalled(model, pick)
    if found is None:
        modules = modules_of(model)
        if modules is None:
            return None
        found = pick(modules)
        _structures[model].keep(pick, found)
    return found


def recalled(model: nn.Module, pick: Callable[[list[Any]], list[Any]]) -> list[Any] | None:
    """The same, if it is remembered."""
    structure = _structures.get(model)
    return None if structure is None else structure.picked(pick)


def state_of(model: nn.Module) -> object:
    """The same object as long as no module has got other children or parameters; None where that is not known."""
    structure = _structures.get(model)
    return structure.state if structure is not None and structure.is_unchanged() else None


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


def torchs_wrapper(name: str) -> Any:
    """The class of PyTorch's that wraps modules to checkpoint or offload them; None where nobody has imported it."""
    return getattr(sys.modules.get(_WRAPPERS), name, None)


def _walked(model: nn.Module) -> list[Any] | None:
    found = list(walk(model))
    return None if found[-1] is None else found


def _are_plain(modules: list[Any]) -> bool:
    return all(map(_is_plain, set(map(type, modules))))


@functools.lru_cache(maxsize=1024)
def _is_plain(kind: Any) -> bool:
    names = ["modules", "named_modules", "named_parameters", "_named_members", "children", "named_children"]
    if kind.named_parameters is getattr(torchs_wrapper("ActivationWrapper"), "named_parameters", None):
        names.remove("named_parameters")  # its names alone are others
    has_identity = kind.__hash__ is object.__hash__
    return has_identity and not issubclass(kind, torch.jit.ScriptModule) and names_as_torch(kind, *names)


def tables_of(modules: list[Any]) -> list[dict[str, Any]]:
    """Each module's own parameters by name."""
    return list(map(_own, modules))


def parameters_of(modules: list[Any]) -> list[nn.Parameter]:
    """Each parameter once, in the order of `parameters()`."""
    tables = filter(None, tables_of(modules))
    every = [p for p in chain.from_iterable(map(_values, tables)) if p is not None]
    return list(dict(zip(map(identity, every), every, strict=True)).values())
