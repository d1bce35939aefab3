"""Switching gradient checkpointing off and on again, as TRL does in every step for the pass of its reference.

Transformers asks each module whether it has a flag for that, which most have not, and PyTorch's answer to such a
question is slow: twice 5 ms for a model of 28 layers with adapters on all linear layers, while a GPU waits. Here
modules whose class could not have one are passed over; the others are told what they were told, in a third of the
time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from bastile.models.changes import unseen
from bastile.models.known_methods import KnownMethod
from bastile.models.structure import class_of, modules_of

_FLAG, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"


def _made(original: Callable[..., None], method: KnownMethod) -> Callable[..., None]:
    @functools.wraps(original)
    def set_gradient_checkpointing(
        self: nn.Module, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, **others: Any
    ) -> None:
        is_usual = method.is_in_force and (not others or others == {"every_n_layers": 1})
        modules = modules_of(self) if is_usual else None
        having = _having_flag(modules or [])
        if not having:  # which it says
            return original(self, enable, gradient_checkpointing_func, **others)
        with unseen:  # who goes by what layers are asks each whether it checkpoints
            for module in having:
                setattr(module, _FUNCTION, gradient_checkpointing_func)
                setattr(module, _FLAG, enable)
        return None

    return set_gradient_checkpointing


def _having_flag(modules: list[Any]) -> list[Any]:
    """Those that hasattr says it of. Few classes are asked, and no module that has what its class and itself have."""
    kinds: dict[Any, tuple[bool, bool]] = {kind: _of_class(kind) for kind in set(map(class_of, modules))}
    asked = {kind for kind, (by_class, is_plain) in kinds.items() if by_class or not is_plain}
    return [
        module
        for module, scope in zip(modules, map(vars, modules), strict=True)
        if _FLAG in scope or (type(module) in asked and hasattr(module, _FLAG))
    ]


@functools.lru_cache(maxsize=1024)
def _of_class(kind: Any) -> tuple[bool, bool]:
    """Whether all modules of the class have it, and whether they have no more than the class and they themselves."""
    return hasattr(kind, _FLAG), kind.__getattr__ is nn.Module.__getattr__


def _hooks_once(original: Callable[..., None], method: KnownMethod) -> Callable[..., None]:
    """Each time that checkpointing is switched on, embeddings get a hook that has their results require gradients, and
    the one before is forgotten, but stays: ten thousand steps later as many are called in each pass. Here it goes."""

    @functools.wraps(original)
    def enable_input_require_grads(self: Any) -> None:
        before = getattr(self, _HOOKS, None) if method.is_in_force else None
        original(self)
        for hook in before or ():
            hook.remove()

    return enable_input_require_grads


_HOOKS = "_require_grads_hooks"


#: Of Transformers 5.0, 5.10 and 5.17 on; and of 5.0 on.
_METHODS = (
    KnownMethod("_set_gradient_checkpointing", frozenset({"41f875bb8ce4", "bd5e23b1a6b2", "5cd6a78b093b"}), _made),
    KnownMethod("enable_input_require_grads", frozenset({"fa2f754a0f3e"}), _hooks_once),
)


def put_into(cls: Any) -> None:
    for method in _METHODS:
        method.put_into(cls)


def take_out_of(cls: Any) -> None:
    for method in _METHODS:
        method.take_out_of(cls)
