"""The forward of a model's backbone, whose layers are captured as CUDA graphs: see bastile.graphs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bastile.graphs.stack import stack_of
from bastile.graphs.step import Mode, begin
from bastile.models.backbone import backbones
from bastile.models.sites import ModelFile, Site
from bastile.report import Tally

#: What bastile.apply was told, and bastile.apply_to_model for single models, by their backbones.
everywhere: Mode = "auto"
of_models: weakref.WeakKeyDictionary[nn.Module, Mode] = weakref.WeakKeyDictionary()

_TELLING = (bool, type(None), str)


def sites(file: ModelFile) -> Iterator[Site]:
    for cls in backbones(file):
        yield file.forward_site("cuda_graphs", cls, backbone_forward)


def set_everywhere(mode: Mode) -> None:
    global everywhere
    everywhere = mode


def backbone_forward(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self.training:
            return original(self, *args, **kwargs)
        layers = self._modules.get("layers")
        if not isinstance(layers, nn.ModuleList) or kwargs.get("past_key_values") is not None:
            return original(self, *args, **kwargs)
        step = begin(stack_of(self, tally), list(layers), of_models.get(self, everywhere), _asked(self, kwargs))
        if step is None:
            return original(self, *args, **kwargs)
        with step.calls():
            result = original(self, *args, **kwargs)
        step.end(result)
        return result

    return forward


def _asked(backbone: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What the model is asked for that its layers may not be told."""
    config = backbone.config
    return (
        config._attn_implementation,
        getattr(config, "output_hidden_states", None),
        getattr(config, "output_attentions", None),
        *((name, value) for name, value in sorted(kwargs.items()) if isinstance(value, _TELLING)),
    )
