"""The forward of what calls layers one after the other, a model's backbone, an encoder or a tower of images, in which
they are captured as CUDA graphs: see bastile.graphs."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bastile.graphs import caches, collected, host_time
from bastile.graphs.lengths import asks_for_more, is_causal, lengthened, shortened
from bastile.graphs.stack import Stack, may_pay, stack_of
from bastile.graphs.step import Mode, Step, begin
from bastile.graphs.unread import are_named, without
from bastile.guards import stock_of
from bastile.models import generation, sdpa
from bastile.models.backbone import backbones
from bastile.models.checkpoints import is_layer, unwrapped
from bastile.models.masks import with_positions
from bastile.models.rebind import as_keywords, parameter_names
from bastile.models.sites import ModelFile, Site, calls
from bastile.report import Tally

#: What bastile.apply was told, and bastile.apply_to_model for single models, by their backbones.
everywhere: Mode = "auto"
of_models: weakref.WeakKeyDictionary[nn.Module, Mode] = weakref.WeakKeyDictionary()

_TELLING = (bool, type(None), str)
#: What Transformers calls the list of layers.
_LISTS = ("layers", "layer", "blocks", "block", "h")
_within = threading.local()


def sites(file: ModelFile) -> Iterator[Site]:
    found = list(stacks(file))
    for cls in found:
        yield file.forward_site("cuda_graphs", cls, stack_forward)
    for cls in file.own_classes():
        has_layers = calls(stock_of(cls.__init__), "ModuleList")  # type: ignore[misc]
        if found and not has_layers and calls(stock_of(vars(cls)["forward"]), "DynamicCache"):
            yield file.forward_site("cuda_graphs", cls, makes_cache)
    yield from generation.sites(file)


def stacks(file: ModelFile) -> Iterator[type]:
    """The classes whose forward may call a list of layers: whether it is one shows when it runs."""
    found = dict.fromkeys(backbones(file))
    for cls in file.own_classes():
        makes = calls(stock_of(cls.__init__), "ModuleList")  # type: ignore[misc]
        forward = stock_of(vars(cls)["forward"])
        if makes and inspect.isfunction(inspect.unwrap(forward)) and any(calls(forward, name) for name in _LISTS):
            found[cls] = None
    yield from found


def layers_of(module: nn.Module) -> nn.ModuleList | None:
    """A list of Transformers' layers that it has, within wrappers that checkpoint them or not; None: there is none, or
    more than one."""
    found = [each for each in _lists_of(module) if is_layer(unwrapped(each[0]))]
    return found[0] if len(found) == 1 else None


def wrapped_layers_of(module: nn.Module) -> list[nn.Module]:
    """The same, and where FSDP's plugin has put each within a wrapper that checkpoints it, what is in there. Empty:
    there are none."""
    lists = [[unwrapped(layer) for layer in each] for each in _lists_of(module)]
    found = [layers for layers in lists if is_layer(layers[0])]
    return found[0] if len(found) == 1 else []


def _lists_of(module: nn.Module) -> list[nn.ModuleList]:
    lists = [module._modules.get(name) for name in _LISTS]
    return [each for each in lists if isinstance(each, nn.ModuleList) and len(each)]


def set_everywhere(mode: Mode) -> None:
    global everywhere
    everywhere = mode
    host_time.state.asked, host_time.state.calls = mode is not False, 0


def stack_forward(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    names = parameter_names(original)
    original = with_positions(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        if are_named(kwargs):
            kwargs = without(kwargs, getattr(self, "config", None), layers_of(self) or ())
        if torch.is_inference_mode_enabled():
            return original(self, *args, **kwargs)
        if not self.training if torch.is_grad_enabled() else _leaves_keys(self, as_keywords(names, args, kwargs)):
            return original(self, *args, **kwargs)
        layers = layers_of(self)
        if layers is None or _is_given_cache(kwargs) or getattr(_within, "step", False):
            return original(self, *args, **kwargs)
        stack = stack_of(self, tally)
        step = begin(stack, list(layers), of_models.get(self, everywhere), _asked(self, kwargs))
        with host_time.of_stack():
            if step is None:
                return original(self, *args, **kwargs)
            given = as_keywords(names, args, kwargs) if len(args) <= len(names) else None
            return _stepped(step, original, self, given, *args, **kwargs)

    return forward


def may_have_graphs(backbone: nn.Module, tokens: int) -> bool:
    """Whether steps of so many tokens have graphs, or may get some, as far as is known."""
    mode = of_models.get(backbone, everywhere)
    return mode is True or (mode is not False and may_pay(backbone, tokens))


def _stepped(
    step: Step, original: Callable[..., Any], backbone: Any, given: dict[str, Any] | None, *args: Any, **kwargs: Any
) -> Any:
    """given: the arguments by name; None where they are more than have one."""
    step.may_pad, longer = False, None
    if given is not None and not collected.collector() and sdpa.making.packed is None:  # whose lengths are few
        step.may_pad = not asks_for_more(given, getattr(backbone, "config", None))
        longer = _lengthened(step.stack, backbone, original, given)
    if longer is None:
        return _run(step, original, backbone, *args, **kwargs)
    given, length = longer
    result = _run(step, original, backbone, **given)
    if shortened(result, length):
        return result
    step.stack.lengths.never = True
    return original(backbone, *args, **kwargs)


def makes_cache(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    """Of what makes the cache that its text model then fills, as Idefics and SmolVLM: nobody else has it yet."""
    names = parameter_names(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or caches.given_in(as_keywords(names, args, kwargs)) is not None:
            return original(self, *args, **kwargs)
        before, _within.makes_cache = getattr(_within, "makes_cache", False), True
        try:
            return original(self, *args, **kwargs)
        finally:
            _within.makes_cache = before

    return forward


def _is_given_cache(kwargs: dict[str, Any]) -> bool:
    """By somebody who may read it."""
    return caches.given_in(kwargs) is not None and not getattr(_within, "makes_cache", False)


def _leaves_keys(backbone: Any, given: dict[str, Any]) -> bool:
    """Whether a pass without gradients is to return keys and values, as where text is generated."""
    asked = given.get("use_cache")
    return bool(getattr(getattr(backbone, "config", None), "use_cache", False) if asked is None else asked)


def _run(step: Step, original: Callable[..., Any], backbone: nn.Module, *args: Any, **kwargs: Any) -> Any:
    _within.step = True  # layers of layers are the outer ones' own
    before, sdpa.making.made = sdpa.making.made, step.beside
    try:
        with step.calls(), step.stack.tables.calls(backbone):
            result = original(backbone, *args, **kwargs)
    finally:
        _within.step, sdpa.making.made = False, before
    return step.end(result)


def _lengthened(stack: Stack, backbone: Any, original: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The arguments of a padded batch and its length, where that pays and nobody notices."""
    if stack.lengths.never is None:
        stack.lengths.never = not is_causal(original, stack.inner)
    if stack.lengths.never:
        return None
    varied = stack.lengths.vary
    longer = lengthened(given, getattr(backbone, "config", None), stack.lengths)
    if stack.lengths.vary and not varied:
        stack.start_over()
    return longer


def _asked(backbone: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What the model is asked for that its layers may not be told."""
    config = getattr(backbone, "config", None)
    return (
        getattr(config, "_attn_implementation", None),
        getattr(config, "output_hidden_states", None),
        getattr(config, "output_attentions", None),
        *((name, value) for name, value in sorted(kwargs.items()) if isinstance(value, _TELLING)),
    )
