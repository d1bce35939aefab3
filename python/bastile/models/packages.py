"""Functions of Transformers' that a package, or a kernel of the hub, may compute in place of the torch code: where none
does, operators take the code's place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from bastile.guards import stock_of
from bastile.models.mixers import CUTS, IDS
from bastile.models.rebind import with_global
from bastile.models.sites import ModelFile, Replace, Site, calls, exchanged, function_in
from bastile.report import Tally

#: What says where packed sequences begin; the torch code cannot keep them apart: it ignores it, or refuses the call.
_TOLD = ("cu_seqlens", CUTS)


def function_sites(file: ModelFile, operator: str, kind: str, build: Callable[[Tally], Replace]) -> Iterator[Site]:
    """The functions of this kind that a module of the file calls by a global name; `build` makes of a tally what makes
    a replacement of the original."""
    for found in file.functions(kind):
        name = found.name
        callers = tuple(cls for cls in file.own_classes() if calls(stock_of(vars(cls)["forward"]), name))
        if not callers:
            file.unknown[name] = "no module's forward calls it"
        elif (other := _runs_instead(function_in(found.function))) is not None:
            file.unknown[name] = other
        else:
            replace = build(Tally.of(operator, f"{file.name}.{name}"))
            one_model = partial(exchanged, partial(_calling, name, replace(found.function)))
            yield Site(operator, name, file.module, name, replace, callers, one_model)


def _calling(name: str, replacement: Any, forward: Any) -> Any:
    return with_global(forward, name, replacement)


def _runs_instead(wrapper: Any) -> str | None:
    """What Transformers' wrapper of the function, if it has one, calls in its place; None where it calls the function.
    The wrapper is written for both, and has decided when the file was imported."""
    if not hasattr(wrapper, "__wrapped__"):
        return None
    function, held = inspect.unwrap(wrapper), inspect.getclosurevars(wrapper).nonlocals
    if "implementation" not in held:
        return "what its wrapper calls cannot be found"
    if held["implementation"] is not function:
        return f"the package {held['implementation'].__module__.partition('.')[0]} runs in its place"
    return None


def runs_another(function: Any) -> str | None:
    """Why a call of such a function is not one of its torch code; None where it is. The package `kernels` makes a
    module of a function, and gives it another forward where it has a kernel."""
    if isinstance(function, nn.Module) and "forward" in vars(function):
        return "a kernel of the hub has taken its place"
    return None


def cuts_of(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Where the sequences of a packed row begin and end, [S + 1]; None where each row is one sequence."""
    ids = kwargs.get(IDS)
    for name in _TOLD if ids is not None else _TOLD[:1]:
        if kwargs.get(name) is not None:
            return kwargs[name]
    if ids is None:
        return None
    begins = (ids.flatten().diff() != 0).nonzero().flatten() + 1  # which waits for the device
    return torch.nn.functional.pad(torch.nn.functional.pad(begins, (1, 0)), (0, 1), value=ids.numel())
