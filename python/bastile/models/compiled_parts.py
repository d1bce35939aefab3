"""Whether a model has parts that torch.compile has compiled, which accelerate asks each time that a model is unwrapped.

TRL's DPO has models unwrapped twice in each step, and accelerate looks at each of their modules in turn: 3 ms for a
model with adapters, while a GPU waits. Here it is remembered with the modules (models.structure)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bastile.models.known_methods import KnownMethod
from bastile.models.structure import picked


def _made(original: Callable[..., bool], function: KnownMethod) -> Callable[..., bool]:
    @functools.wraps(original)
    def has_compiled_regions(module: nn.Module) -> bool:
        is_usual = function.is_in_force and isinstance(module, nn.Module) and bool(module._modules)
        found = picked(module, _compiled) if is_usual else None
        return original(module) if found is None else bool(found)

    return has_compiled_regions


def _compiled(modules: list[Any]) -> list[Any]:
    return [module for module in modules if isinstance(module, torch._dynamo.eval_frame.OptimizedModule)]


#: Of accelerate's module of helpers, from 1.7 on.
_FUNCTION = KnownMethod("has_compiled_regions", frozenset({"3f414718e2b0"}), _made)
put_into, take_out_of = _FUNCTION.put_into, _FUNCTION.take_out_of
