"""The forward of a model's backbone, whose layers are captured as CUDA graphs: see bastile.graphs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bastile.graphs import caches
from bastile.graphs.lengths import is_causal, lengthened, shortened
from bastile.graphs.stack import Stack, stack_of
from bastile.graphs.step import Mode, Step, begin
from bastile.models import generation
from bastile.models.backbone import backbones
from bastile.models.masks import with_positions
from bastile.models.rebind import as_keywords, parameter_names
from bastile.models.sites import ModelFile, Site
from bastile.report import Tally

#: What bastile.apply was told, and bastile.apply_to_model for single models, by their backbones.
everywhere: Mode = "auto"
of_models: weakref.WeakKeyDictionary[nn.Module, Mode] = weakref.WeakKeyDictionary()

_TELLING = (bool, type(None), str)


def sites(file: ModelFile) -> Iterator[Site]:
    for cls in backbones(file):
        yield file.forward_site("cuda_graphs", cls, backbone_forward)
    yield from generation.sites(file)


def set_everywhere(mode: Mode) -> None:
    global everywhere
    everywhere = mode


def backbone_forward(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    names = parameter_names(original)
    original = with_positions(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self.training:
            return original(self, *args, **kwargs)
        layers = self._modules.get("layers")
        if not isinstance(layers, nn.ModuleList) or caches.given_in(kwargs) is not None:
            return original(self, *args, **kwargs)
        stack = stack_of(self, tally)
        step = begin(stack, list(layers), of_models.get(self, everywhere), _asked(self, kwargs))
        if step is None:
            return original(self, *args, **kwargs)
        given = as_keywords(names, args, kwargs)
        longer = _lengthened(stack, self, original, given) if len(args) <= len(names) else None
        if longer is None:
            return _run(step, original, self, *args, **kwargs)
        given, length = longer
        result = _run(step, original, self, **given)
        if shortened(result, length):
            return result
        stack.lengths.never = True
        return original(self, *args, **kwargs)

    return forward


def _run(step: Step, original: Callable[..., Any], backbone: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with step.calls(), step.stack.tables.calls(backbone):
        result = original(backbone, *args, **kwargs)
    step.end(result)
    return result


def _lengthened(stack: Stack, backbone: Any, original: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The arguments of a padded batch and its length, where that pays and nobody notices."""
    if stack.lengths.never is None:
        stack.lengths.never = not is_causal(original, stack.layers)
    if stack.lengths.never:
        return None
    varied = stack.lengths.vary
    longer = lengthened(given, backbone.config, stack.lengths)
    if stack.lengths.vary and not varied:
        stack.start_over()
    return longer


def _asked(backbone: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What the model is asked for that its layers may not be told."""
    config = backbone.config
    return (
        config._attn_implementation,
        getattr(config, "output_hidden_states", None),
        getattr(config, "output_attentions", None),
        *((name, value) for name, value in sorted(kwargs.items()) if isinstance(value, _TELLING)),
    )
