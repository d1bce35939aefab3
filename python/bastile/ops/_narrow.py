"""Layers whose float32 weight is kept in bfloat16, which holds it exactly: see bastile.models.frozen_bf16."""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeAlias

import torch
from torch import nn

#: Among a module's attributes while its weight is kept so.
NARROWED = "_bastile_narrowed"

Weighted: TypeAlias = nn.Linear | nn.Embedding

#: What the forward of an embedding names that multiplies what it has read by one number.
_OF_SCALED = frozenset({"super", "forward", "embed_scale", "to", "weight", "dtype"})


def narrow(layer: Weighted) -> None:
    """Keeps its weight in bfloat16, where autocast reads it in that. Elsewhere a linear layer's weight does not stand
    for the layer, whose own call makes float32 of it; an embedding makes float32 of what it reads."""
    layer.weight.data = layer.weight.data.to(torch.bfloat16)
    kind: Any = type(layer)
    vars(layer)[NARROWED] = kind
    if isinstance(layer, nn.Embedding):
        layer.__class__ = _reading_float32(kind)


def widen(layer: Weighted) -> None:
    """Its weight is float32 again."""
    if is_narrowed(layer):
        layer.weight.data = layer.weight.data.float()
        layer.__class__ = vars(layer).pop(NARROWED)


def is_narrowed(layer: nn.Module) -> bool:
    return NARROWED in layer.__dict__


def is_lookup(module: Any) -> bool:
    """Whether a call of this module reads rows of its weight, and multiplies them by a number at most."""
    if not isinstance(module, nn.Embedding) or "forward" in vars(module) or module.max_norm is not None:
        return False
    forward = type(module).forward
    if forward is nn.Embedding.forward:
        return True
    code = getattr(inspect.unwrap(forward), "__code__", None)
    names = frozenset() if code is None else frozenset(code.co_names)
    return {"super", "embed_scale"} <= names <= _OF_SCALED


@functools.cache
def _reading_float32(kind: Any) -> Any:
    """A class of embeddings that are of this one, too."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        rows = nn.Embedding.forward(self, input).float()
        if kind.forward is nn.Embedding.forward:
            return rows
        scale = self.embed_scale
        return rows * (scale.float() if isinstance(scale, torch.Tensor) else scale)

    def reduced(self: Any, protocol: Any) -> Any:
        return _one_of, (kind,), *kind.__reduce_ex__(self, protocol)[2:]

    own = {"forward": forward, "__reduce_ex__": reduced, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), own)


def _one_of(kind: Any) -> Any:
    """What pickle fills, for which such a class has no name."""
    cls = _reading_float32(kind)
    return cls.__new__(cls)
