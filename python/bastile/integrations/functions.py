"""Functions of trainers, exchanged where they are known by their parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bastile.guards import stock_of
from bastile.models.sites import ModelFile, Site
from bastile.ops._common import served
from bastile.report import Tally

Parameters = tuple[str, ...]
Defaults = dict[str, Any]
#: From a tally, the original, its parameters and their defaults to what takes its place.
Build = Callable[[Tally, Any, Parameters, Defaults], Callable[..., Any]]

_OPERATOR = "fused_linear_cross_entropy"  # by whose name bastile.apply puts all losses from hidden states in
LOG_PROBS, DIVERGENCE = "linear_logprobs", "linear_divergence"  # what runs


def function_site(file: ModelFile, name: str, holder: Any, known: tuple[Parameters, ...], build: Build) -> Site:
    """The place of a function that `holder` has by its name."""
    return _site(file, name, holder, name, stock_of(getattr(holder, name)), known, build)


def apply_site(file: ModelFile, cls: Any, known: tuple[Parameters, ...], build: Build, runs: str = LOG_PROBS) -> Site:
    """The place of an autograd function's `apply`; known: the parameters of its forward, but for ctx; runs: the
    operator that takes its place."""
    return _site(file, cls.__name__, _apply_of(cls), "apply", vars(cls)["forward"].__func__, known, build, runs)


def static_site(
    file: ModelFile, cls: Any, name: str, known: tuple[Parameters, ...], build: Build, runs: str = LOG_PROBS
) -> Site:
    """The place of a static method."""
    return _site(
        file, f"{cls.__name__}.{name}", _static_of(cls, name), "function", getattr(cls, name), known, build, runs
    )


def _site(
    file: ModelFile,
    name: str,
    owner: Any,
    attribute: str,
    stock: Any,
    known: tuple[Parameters, ...],
    build: Build,
    runs: str = LOG_PROBS,
) -> Site:
    parameters = dict(inspect.signature(stock_of(stock)).parameters)
    parameters.pop("ctx", None)
    names = tuple(parameters)
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    tally = Tally.of(runs, f"{file.name}.{name}")

    def made(original: Any) -> Callable[..., Any]:
        return build(tally, original, names, defaults) if names in known else _moved(tally, original, names, file.name)

    return Site(_OPERATOR, name, owner, attribute, made, (), made)


def _moved(tally: Tally, original: Any, parameters: Parameters, module: str) -> Callable[..., Any]:
    package = module.partition(".")[0]
    reason = (
        f"{package} {release_of(package)} has it with the parameters {', '.join(parameters)}, which this bastile does "
        "not know"
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        tally.step_aside(reason)
        return original(*args, **kwargs)

    return call


def given(parameters: Parameters, defaults: Defaults, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by their names."""
    return {**defaults, **dict(zip(parameters, args, strict=False)), **kwargs}


def release_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of an unknown release"


def why_not(hidden: Any, weight: Any, bias: Any = None) -> str | None:
    """Why the operator does not run on these; None: it does."""
    if served(hidden, weight, bias):
        return None
    return f"{hidden.dtype} on {hidden.device.type} is not served, nor is a weight of a class of its own"


class _Apply:
    """The `apply` of an autograd function, which it inherits, as something that can be exchanged and given back."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls

    @property
    def apply(self) -> Any:
        own = vars(self.cls).get("apply")
        return self.cls.apply if own is None else own.__func__

    @apply.setter
    def apply(self, function: Any) -> None:
        if inspect.ismethod(function) or inspect.isbuiltin(function):  # the inherited one; from PyTorch 2.15 on in C
            del self.cls.apply
        else:
            self.cls.apply = staticmethod(function)


@functools.cache
def _apply_of(cls: Any) -> _Apply:
    return _Apply(cls)


class _Static:
    """A static method of a class, as something that can be exchanged and given back."""

    def __init__(self, cls: Any, name: str) -> None:
        self.cls, self.name, self.stock = cls, name, vars(cls)[name]

    @property
    def function(self) -> Any:
        return getattr(self.cls, self.name)

    @function.setter
    def function(self, function: Any) -> None:
        setattr(self.cls, self.name, self.stock if function is self.stock.__func__ else staticmethod(function))


@functools.cache
def _static_of(cls: Any, name: str) -> _Static:
    return _Static(cls, name)
