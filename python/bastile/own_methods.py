"""Methods that apply_to_model gives to single modules, and what of the process's patches a module runs."""

import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from bastile.guards import function_of, is_ours, mark_as_ours, stand_in_for, stock_of
from bastile.models.sites import Site

_MARK = "_bastile_given"
_REPLICATE = "_replicate_for_data_parallel"  # what DataParallel calls on each module; here only while a method is given
_PREPARED = "_original_forward"  # where Accelerate keeps what its wrappers for mixed precision call


@dataclass(frozen=True)
class _Given:
    """What marks a method that apply_to_model gave to a module."""

    function: Any  # the method's own, since functools.wraps copies the mark to whatever someone wraps around it
    sites: tuple[Site, ...]


class _Place:
    """Where a module keeps the method that does its work: in `forward`, in `_old_forward` under a hook of Accelerate's,
    or in a wrapper of `forward`, where Accelerate has prepared the model for mixed precision."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.name = "_old_forward" if "_old_forward" in vars(module) else "forward"
        found: tuple[Any, Any] = _wrapper_of(module) or (None, None)
        self.wrapper, self.cell = found

    def method(self) -> Any:
        """What is there, a method as a rule; None where the module has none of its own."""
        if self.cell is not None:
            return types.MethodType(self.cell.cell_contents, self.module)
        return vars(self.module).get(self.name)

    def put(self, function: Any) -> None:
        if self.cell is not None and self.wrapper is not None:
            self.cell.cell_contents = self.wrapper.__wrapped__ = function
            setattr(self.module, _PREPARED, types.MethodType(function, self.module))
        else:
            setattr(self.module, self.name, types.MethodType(function, self.module))

    def put_back(self) -> None:
        """The class's own."""
        if self.cell is None and self.name == "forward":
            delattr(self.module, self.name)
        else:
            self.put(type(self.module).forward)


def _wrapper_of(module: nn.Module) -> tuple[Any, types.CellType] | None:
    """The innermost of Accelerate's wrappers around a prepared module's method, and its cell with that method."""
    kept = function_of(vars(module).get(_PREPARED))
    wrapper = function_of(vars(module).get("forward"))
    while kept is not None and wrapper is not None:
        inner = getattr(wrapper, "__wrapped__", None)
        if inner is kept:
            return next(((wrapper, cell) for cell in _cells(wrapper) if cell.cell_contents is kept), None)
        wrapper = inner
    return None


def _cells(function: Any) -> Iterator[types.CellType]:
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # nothing in it yet
            cell.cell_contents  # noqa: B018
            yield cell


def runs_stock(module: nn.Module, site: Site) -> bool:
    """Whether this module runs the class's own forward: no subclass and no one else has given it another."""
    stocks: Any = site.instances
    if not any(isinstance(module, stock) and _is_same(type(module).forward, stock.forward) for stock in stocks):
        return False
    own, forward = _Place(module).method(), type(module).forward
    if own is None or given_to(module):
        return True
    # What Accelerate keeps may be the method that the class had before apply, or what it unwrapped that one to.
    function = function_of(own)
    return stock_of(forward) is stock_of(function) or function is inspect.unwrap(forward)


def reaches(module: nn.Module, site: Site) -> bool:
    """Whether what `apply` has put there is called when this module is."""
    if not isinstance(module, site.instances):
        return False
    own = _Place(module).method()
    runs = type(module).forward if own is None else function_of(own)
    if isinstance(site.owner, types.ModuleType):  # a function that every such module calls by its name
        return True
    return _is_same(runs, site.wrapper or getattr(site.owner, site.attribute))


def _is_same(forward: Any, stock: Any) -> bool:
    """Whether a class runs another's forward. It does too where both are the same wrapper of Transformers' and one
    wraps the other: a layer's forward, in the class that FSDP makes of the layer's class."""
    while forward is not stock:
        if getattr(forward, "__code__", None) is not getattr(stock, "__code__", 0) or not hasattr(
            forward, "__wrapped__"
        ):
            return False
        forward = forward.__wrapped__
    return True


def given_to(module: nn.Module) -> tuple[Site, ...]:
    """The sites whose method apply_to_model gave to this module. Read from the module itself, so that copies of a
    patched model can be reset too."""
    if _REPLICATE not in vars(module):
        return ()
    function = function_of(_Place(module).method())
    mark = getattr(function, _MARK, None)
    return mark.sites if mark is not None and mark.function is function else ()


def give(module: nn.Module, given: tuple[Site, ...], methods: dict[Any, Any]) -> None:
    """Makes the module's own method out of its class's, replaced at one site after the other; without sites the module
    goes back to its class's. methods: those made already, which modules share."""
    place = _Place(module)
    if not given:
        place.put_back()
        vars(module).pop(_REPLICATE, None)
        return
    key = type(module), tuple((site.operator, site.where) for site in given)
    if key not in methods:
        methods[key] = _made_of(stock_of(type(module).forward), given)
    place.put(methods[key])
    setattr(module, _REPLICATE, types.MethodType(_replicate_for_data_parallel, module))


def _made_of(stock: Any, given: tuple[Site, ...]) -> Any:
    method = stock
    for site in given:
        method = site.build_method(method)

    @functools.wraps(stock)
    def own(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _REPLICATE in self.__dict__:
            return method(self, *args, **kwargs)
        return stock(self, *args, **kwargs)  # someone has kept what was taken out since

    setattr(own, _MARK, _Given(own, given))
    stand_in_for(stock, own)
    return mark_as_ours(own) if is_ours(method) else own


def _replicate_for_data_parallel(self: nn.Module) -> Any:
    """A replica gets all that the module has, and would run the module's own method, on the weights of another device.
    It has the name of Module's method, by which a pickled one is found again."""
    replica: Any = getattr(type(self), _REPLICATE)(self)
    function = function_of(_Place(self).method())
    if function is not None:  # else someone has put something else there since
        _Place(replica).put(function)
    return replica
