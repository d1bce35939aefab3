"""When a layer's own call may be skipped, because its weight alone says what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from torch import nn
from torch._C import _is_any_autocast_enabled
from torch.nn.modules.module import _has_any_global_hook

from bastile.ops._common import PLAIN
from bastile.ops._narrow import NARROWED

_ORIGINAL = "_bastile_original"


def stand_in_for(original: Any, replacement: Callable[..., Any]) -> None:
    """Marks a function with the one whose place it takes."""
    setattr(replacement, _ORIGINAL, (replacement, original))


def stock_of(function: Any) -> Any:
    """What Bastile has replaced by this, now or once; anything else is itself."""
    while (mark := getattr(function, _ORIGINAL, None)) is not None and mark[0] is function:
        function = mark[1]
    return function


_LINEAR = stock_of(nn.Linear.forward)


def has_hooks(module: nn.Module) -> bool:
    """Its own, or hooks on all modules."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _has_any_global_hook()
    )


def plain_linear(module: nn.Module, with_bias: bool = False) -> TypeGuard[nn.Linear]:
    """Whether calling this module multiplies by its weight and does nothing else, so that the weight may stand for it;
    with_bias: but add its bias, if it has one.

    It does more where it has a bias or an adapter, is quantised, parametrised or offloaded, is narrowed and there is no
    autocast, or where a hook would run, its own or one on all modules. A weight of another tensor class, such as a
    shard's, may do anything."""
    own = module.__dict__  # Module's own lookup is slow
    weights = own["_parameters"]  # without those that sharding has put elsewhere
    bias = weights.get("bias", module)
    return (
        type(module) is nn.Linear
        and type(weights.get("weight")) in PLAIN
        and (bias is None or (with_bias and type(bias) in PLAIN))
        and stock_of(nn.Linear.forward) is _LINEAR
        and "forward" not in own
        and (NARROWED not in own or _is_any_autocast_enabled())
        and not has_hooks(module)
    )
