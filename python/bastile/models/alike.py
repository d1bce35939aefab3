"""Layers of a model that compute the same of other weights."""

from __future__ import annotations

from typing import Any

from torch import nn


def kind_of(layer: nn.Module, place: int) -> tuple[Any, ...]:
    """All that its modules are, but for the layer's place: those of one kind call the same operators for the same
    shapes, if they are called with the same."""
    return tuple(
        (
            name,
            type(module),
            *(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, (bool, int, float, str)) and (key, value) != ("layer_idx", place)
            ),
            *((key, t.shape, t.dtype, t.requires_grad) for key, t in module._parameters.items() if t is not None),
        )
        for name, module in layer.named_modules()
    )
