"""Copies of a function in which one thing that it refers to is another. The original stays as it is."""

import functools
import inspect
import types
from typing import Any


def parameter_names(function: Any) -> tuple[str, ...]:
    """The names of a method's parameters that can be given by position, without self."""
    inner = inspect.unwrap(function)
    if isinstance(inner, types.FunctionType):  # a signature takes twenty times as long
        return inner.__code__.co_varnames[1 : inner.__code__.co_argcount]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)[1:]


def as_keywords(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments, those that were given by position by their names."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def with_global(function: types.FunctionType, name: str, value: Any) -> types.FunctionType:
    """The same code, in which the global `name` is `value` and every other global is what it is now.

    This is how one model's attention gets another rotary function while all others keep theirs. The copy of the globals
    has no __name__: by it torch.compile would take them for those of the module, and mix the two functions up."""
    scope = {key: item for key, item in function.__globals__.items() if key != "__name__"}
    scope[name] = value
    return _copy(function, scope, function.__closure__)


def with_globals_of(other: types.FunctionType, function: Any) -> types.FunctionType:
    """The same code, which uses no global, with the globals of another function."""
    return _copy(function, other.__globals__, function.__closure__)


def wrapped_cell(function: types.FunctionType) -> types.CellType | None:
    """Where the innermost of a function's wrappers keeps what it calls; None where that is not to be found. Within the
    first wrapper, whosever it is, Transformers' are known."""
    cell = _cell(function)
    inner = _wrapper_in(cell)
    return cell if inner is None else wrapped_cell(inner)


def with_wrapped(function: types.FunctionType, inner: Any) -> types.FunctionType:
    """The same wrappers around another function."""
    cell = _cell(function)
    within = _wrapper_in(cell)
    kept = types.CellType(inner if within is None else with_wrapped(within, inner))
    closure = tuple(kept if other is cell else other for other in function.__closure__ or ())
    return _copy(function, function.__globals__, closure)


def _cell(wrapper: types.FunctionType) -> types.CellType | None:
    innermost = inspect.unwrap(wrapper)
    cells = [cell for cell in wrapper.__closure__ or () if _leads_to(_contents(cell), innermost, wrapper)]
    return cells[0] if len(cells) == 1 else None


def _wrapper_in(cell: types.CellType | None) -> types.FunctionType | None:
    """A wrapper of Transformers' that a wrapper calls."""
    inner = None if cell is None else _contents(cell)
    if not isinstance(inner, types.FunctionType) or not hasattr(inner, "__wrapped__"):
        return None
    is_theirs = (inner.__globals__.get("__name__") or "").startswith("transformers.")
    return inner if is_theirs and _cell(inner) is not None else None


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing in it yet
        return None


def _leads_to(value: Any, innermost: Any, wrapper: Any) -> bool:
    """Whether this is the wrapped function or a replacement of it, rather than the wrapper's name for itself."""
    return callable(value) and value is not wrapper and inspect.unwrap(value) is innermost


def _copy(function: types.FunctionType, scope: dict[str, Any], closure: Any) -> types.FunctionType:
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    return copy
