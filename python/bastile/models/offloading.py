"""The forward of a model's backbone, whose checkpointed layers leave their inputs in the host's memory: see
bastile.offload."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bastile.models.backbone import backbones
from bastile.models.sites import ModelFile, Site
from bastile.offload.mover import bytes_held
from bastile.offload.passes import Pass
from bastile.report import Tally, noting

#: What Transformers' layers call in place of their forward where they are checkpointed.
_CHECKPOINT = "_gradient_checkpointing_func"


def sites(file: ModelFile) -> Iterator[Site]:
    for cls in backbones(file):
        yield file.forward_site("offload_checkpoints", cls, backbone_forward)


def backbone_forward(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self.training:
            return original(self, *args, **kwargs)
        held = self._modules.get("layers")
        layers = list(held) if isinstance(held, nn.ModuleList) else []
        moving = Pass(len(layers))
        try:
            with _checkpoints_within(moving, layers):
                result = original(self, *args, **kwargs)
        finally:
            moving.end()
        if moving.moved:
            tally.count()
        elif not moving.aside:
            are_called = any(vars(layer).get("_compiled_call_impl") is None for layer in layers)
            reason = "layers that are not checkpointed" if are_called else "layers that run as CUDA graphs, or compiled"
            tally.step_aside(reason, is_usual=not are_called)
        for reason, is_usual in moving.aside.items():
            tally.step_aside(reason, is_usual)
        return result

    return forward


@contextmanager
def _checkpoints_within(moving: Pass, layers: list[Any]) -> Iterator[None]:
    """Within, each layer's checkpoint is called within the pass. Graphs, which run layers by themselves, and wrappers
    and hooks of layers are outside of that call, in whatever release of Transformers."""
    changed = []
    try:
        for index, layer in enumerate(layers):
            scope = vars(layer)
            function = scope.get(_CHECKPOINT)
            if function is not None:
                if type(function) is _Within:  # of another thread, which trains the same model
                    function = function.checkpoint
                changed.append((scope, function))
                scope[_CHECKPOINT] = _Within(moving, index, function)
        yield
    finally:
        for scope, function in changed:
            scope[_CHECKPOINT] = function


class _Within:
    """The checkpoint function of one layer; for all but the call it is that function."""

    def __init__(self, moving: Pass, index: int, checkpoint: Any) -> None:
        self.moving, self.index, self.checkpoint = moving, index, checkpoint

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        with self.moving.layer(self.index, args[0] if args else None):
            return self.checkpoint(function, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint, name)


@noting
def note() -> str | None:
    """What the report says of it."""
    held = bytes_held()
    return f"inputs of checkpointed layers have {held / (1 << 30):.1f} GiB of the host's memory" if held else None
