"""Being called in a layer's place, for the time of one forward pass.

A module's `_compiled_call_impl`, where it is set, is what is called when the module is: so `Module.compile` does it,
and so do we, outside of all that the call does otherwise. Checkpointing is outside of it in some releases of
Transformers, so it is off while we are called, and done by us or by the layer's own call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from bastile.models.changes import unseen

_CALL, _CHECKPOINTS = "_compiled_call_impl", "gradient_checkpointing"


def is_called_instead(layer: nn.Module) -> bool:
    """Whether something else than the layer is called when it is."""
    return _CALL in vars(layer)


@contextmanager
def called_instead(layers: Sequence[nn.Module], calls: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Within, these are called in the place of the layers."""
    scopes = [vars(layer) for layer in layers]
    before = [scope.get(_CHECKPOINTS) for scope in scopes]
    try:
        with unseen:
            for scope, call, checkpointing in zip(scopes, calls, before, strict=True):
                scope[_CALL] = call
                if checkpointing:
                    scope[_CHECKPOINTS] = False
        yield
    finally:
        with unseen:
            for scope, checkpointing in zip(scopes, before, strict=True):
                scope.pop(_CALL, None)
                if checkpointing:
                    scope[_CHECKPOINTS] = checkpointing


@contextmanager
def itself(layer: nn.Module, checkpointing: Any) -> Iterator[None]:
    """Within, the layer is called itself, and checkpointed where it was before."""
    scope = vars(layer)
    with unseen:
        call, now = scope.pop(_CALL, None), scope.get(_CHECKPOINTS)
        if checkpointing != bool(now):
            scope[_CHECKPOINTS] = checkpointing
    try:
        yield
    finally:
        with unseen:
            if call is not None:
                scope[_CALL] = call
            if checkpointing != bool(now):
                scope[_CHECKPOINTS] = now


def bare(layer: nn.Module) -> Any:
    """Within, the layer is called itself, and not checkpointed."""
    return itself(layer, False)
