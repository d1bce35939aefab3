"""Finds a family's pieces in the installed Transformers, and says which release lacks which."""

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from bastile.models.table import FAMILIES, Family


class Unfit(RuntimeError):
    """A model type in which an operator cannot go where it belongs."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}; nothing was patched. {advice}")
        self.reason, self.advice = reason, advice


def families(model_types: Iterable[str] | None) -> list[Family]:
    """The rows asked for; None: all that the installed Transformers is new enough for."""
    if model_types is None:
        version = _transformers_version()
        from packaging.version import Version  # comes with Transformers

        installed = Version(version)
        rows = [family for family in FAMILIES.values() if Version(family.since) <= installed]
        if not rows:
            oldest = min((family.since for family in FAMILIES.values()), key=Version)
            raise RuntimeError(f"bastile needs transformers >= {oldest}; installed is {installed}")
        return rows
    if isinstance(model_types, str):
        model_types = [model_types]
    rows = []
    for model_type in model_types:
        if model_type not in FAMILIES:
            raise ValueError(
                f"model type {model_type!r} is not supported; supported are: {', '.join(sorted(FAMILIES))}"
            )
        rows.append(FAMILIES[model_type])
    return rows


class Lookup:
    """What one operator relies on in one family. Each method raises Unfit naming the piece that is not there."""

    def __init__(self, family: Family, operator: str, stock: Callable[[Any], Any]) -> None:
        """stock: from a function that Bastile has put somewhere to the one it replaced; any other to itself."""
        self.family = family
        self.operator = operator
        self.stock = stock
        try:
            self.module = importlib.import_module(family.module)
        except ModuleNotFoundError as error:
            raise self.missing(f"module {family.module}") from error

    def get(self, name: str) -> Any:
        if not hasattr(self.module, name):
            raise self.missing(f"{self.family.module}.{name}")
        return self._own(name, self.stock(getattr(self.module, name)))

    def forward(self, class_name: str) -> Any:
        """The class's own forward, as Transformers has it."""
        owner = self.get(class_name)
        if "forward" not in vars(owner):
            raise self.missing(f"{class_name}.forward")
        return self._own(f"{class_name}.forward", self.stock(owner.forward))

    def _own(self, what: str, found: Any) -> Any:
        """This, where it is Transformers' own: other packages put theirs into the same places."""
        if inspect.isclass(found) or inspect.isfunction(found):
            inner = inspect.unwrap(found)
            if inner.__module__.partition(".")[0] != self.family.module.partition(".")[0]:
                raise Unfit(
                    f"other code has replaced {what} of {self.family.model_type} by {described(inner)}, and bastile's "
                    f"{self.operator} replaces only what Transformers computes",
                    f"Undoing that first, or leaving this operator out with {self.operator}=False, helps",
                )
        return found

    def need_parameters(self, what: str, function: Any, names: Iterable[str]) -> None:
        # With Hugging Face's package `kernels`, Transformers' rotary function is a module that calls the function.
        parameters = inspect.signature(getattr(function, "forward", function)).parameters
        for name in names:
            if name not in parameters:
                raise self.missing(f"argument {name!r} of {what}")

    def need_names(self, what: str, function: Any, names: Iterable[str], unwrap: bool = True) -> None:
        """That the original's own code mentions these attributes or globals, which the replacement uses too."""
        code = inspect.unwrap(function).__code__ if unwrap else function.__code__
        for name in names:
            if name not in code.co_names:
                raise self.missing(f"the use of {name!r} in {what}")

    def know_all(self, what: str, function: Any, names: Iterable[str], parameters: Iterable[str]) -> None:
        """That the original's code mentions no other attribute or global, and names no other parameter: for a
        replacement that does all the original does, and would leave out what it does not know."""
        new = set(inspect.unwrap(function).__code__.co_names) - set(names)
        if new:
            raise self.unknown(f"{min(new)!r} in {what}")
        for name, parameter in inspect.signature(function).parameters.items():
            variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            if name != "self" and not variadic and name not in parameters:
                raise self.unknown(f"argument {name!r} of {what}")

    def missing(self, piece: str) -> Unfit:
        return self._unfit(f"lacks {piece}, which bastile's {self.operator} needs")

    def unknown(self, piece: str) -> Unfit:
        return self._unfit(f"has {piece}, which bastile's {self.operator} does not know")

    def _unfit(self, fault: str) -> Unfit:
        return Unfit(
            f"transformers {_transformers_version()} {fault} for {self.family.model_type} (tested from transformers "
            f"{self.family.since} on)",
            f"Another release of bastile or of transformers, or leaving this operator out with {self.operator}=False, "
            f"helps",
        )


def described(found: Any) -> str:
    """A function or class with the module that it is from."""
    return f"{found.__module__}.{getattr(found, '__qualname__', type(found).__qualname__)}"


def _transformers_version() -> str:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("patching models needs Hugging Face Transformers: pip install transformers") from error
    return transformers.__version__
