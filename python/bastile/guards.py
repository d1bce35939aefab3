"""When a module's own call may be skipped, because its weights alone say what it computes."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from bastile.ops._modules import has_hooks
from bastile.ops._modules import stand_in_for as stand_in_for
from bastile.ops._modules import stock_of as stock_of

#: Packages whose hooks make weights whole for the time of a call, and change no number.
_GATHERS = ("torch.distributed.fsdp.", "deepspeed.")

_OURS = "_bastile_replacement"
_NOW = "_bastile_now"


def mark_as_ours(replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function that computes what the function it replaces computes."""
    # The function itself is the mark: functools.wraps copies attributes to whatever someone wraps around it.
    setattr(replacement, _OURS, replacement)
    return replacement


def is_ours(function: Any) -> bool:
    return function is not None and getattr(function, _OURS, None) is function


def say_what_runs(function: Any, now: Callable[[], Any]) -> None:
    """Marks a function that runs a replacement while that is in force, else the original, with which of them it is."""
    setattr(function, _NOW, (function, now))


def in_force(function: Any) -> Any:
    """What a call of this runs now; anything that is not marked is itself."""
    while (mark := getattr(function, _NOW, None)) is not None and mark[0] is function:
        function = mark[1]()
    return function


def untouched(module: nn.Module) -> bool:
    """Whether calling this module does what its class's forward does and nothing else."""
    own = module.__dict__.get("forward")  # Hugging Face's `kernels` puts the class's own there
    return (own is None or function_of(own) is type(module).forward) and not has_hooks(module)


def gathers(hook: Any) -> bool:
    """Whether this hook is a sharding's, which makes a module's weights whole for the time of its call."""
    hook = getattr(hook, "func", hook)  # of a partial
    return (getattr(hook, "__module__", None) or "").startswith(_GATHERS)


def does_as_its_class(module: nn.Module) -> bool:
    """As `untouched`, of a module without weights: for it a sharding's hooks have nothing to do."""
    own = module.__dict__.get("forward")
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return untouched(module) or (
        own is None
        and not module._parameters
        and not _has_any_global_hook()
        and all(gathers(hook) for kind in hooks for hook in kind.values())
    )


def runs(module: nn.Module, stock: Callable[..., Any]) -> bool:
    """Whether calling this module runs this forward, or what Bastile has put in its place, and nothing else."""
    forward = forward_of(module)
    return (forward is stock or is_ours(forward)) and not has_hooks(module)


def forward_of(module: nn.Module) -> Any:
    """The function that calling this module runs: its class's, or its own."""
    own = module.__dict__.get("forward")
    return type(module).forward if own is None else function_of(own)


def function_of(method: Any) -> Any:
    """What a method is made of; None for anything else."""
    # torch.compile of PyTorch 2.10 does not see __func__ through a getattr with a default.
    return method.__func__ if isinstance(method, MethodType) else None
