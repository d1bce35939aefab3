"""Functions of Transformers' that a package, or a kernel of the hub, may compute in place of the torch code."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

#: What tells packed sequences apart, which the torch code cannot: it ignores it, or refuses the call.
_PACKED = ("cu_seqlens", "seq_idx")


def runs_instead(wrapper: Any) -> str | None:
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


def asks_for_another(function: Any, kwargs: dict[str, Any]) -> str | None:
    """Why a call of such a function is not one of its torch code, or not one that this can compute. The package
    `kernels` makes a module of a function, and gives it another forward where it has a kernel."""
    if isinstance(function, nn.Module) and "forward" in vars(function):
        return "a kernel of the hub has taken its place"
    if any(kwargs.get(name) is not None for name in _PACKED):
        return "sequences are packed"
    return None
