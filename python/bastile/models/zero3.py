"""Layers that DeepSpeed's ZeRO-3 gathers whole.

ZeRO-3 gathers each module's weights before the module's call and lets go of them behind it, by hooks whose Python takes
the host some 0.2 ms a module and pass: half a second a step of Qwen3-0.6B, three seconds of an 8B model with adapters,
while the GPU waits. And what computes more than one module in a call finds the weights of one alone. DeepSpeed has a
flag for modules whose weights are to come and go together, and here the layers of a language model get it before the
hooks are made: a tenth of the hooks, and norms, projections and adapters run as they do elsewhere.

Gradients are reduced one by one as ever. DeepSpeed would hold back those of such a module until autograd has been
through it, which it cannot see of a layer whose input needs no gradient, as the first one's with adapters. So
parameters forget whose they are, and their hooks are the usual ones.

Of the weights of a layer while it runs, and of the next one's while they come, all is there at once; a layer that is
more than a quarter of `stage3_max_live_parameters` is left as it is, and so are layers with other parameters than those
of linear layers and norms, which a gradient may reach when the layer's weights are gone, and models of which some
modules have the flag by their user's configuration."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from bastile.models.checkpoints import is_checkpointed
from bastile.models.known_methods import KnownMethod
from bastile.models.rebind import parameter_names
from bastile.report import Tally

_NEEDED = ("module", "prefetch_bucket_size", "max_live_parameters", "zero_module_granularity_threshold")
#: Of the parameters that DeepSpeed is to have gathered at a time: so many of these shares is one layer at most.
_SHARE = 4
#: The layers that have the flag by this module.
_gathered: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _is_known(original: Callable[..., None]) -> bool:
    return set(_NEEDED) <= inspect.signature(original).parameters.keys()


def _made(original: Callable[..., None], method: KnownMethod) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        layers = _marked(given.arguments, method.is_in_force)
        if layers and given.arguments["prefetch_bucket_size"] > 1:
            # What is asked for in advance would be a part of the next layer, for the rest of which it would wait.
            most = max(map(_size, layers))
            given.arguments["prefetch_bucket_size"] = max(most, given.arguments["prefetch_bucket_size"])
        original(*given.args, **given.kwargs)
        for parameter in (p for layer in layers for p in layer.parameters()):
            if hasattr(parameter, "ds_z3_leaf_module"):
                del parameter.ds_z3_leaf_module

    return init


#: Of DeepSpeedZeRoOffload, which makes the hooks when it is made. Models that have been prepared stay as they are.
_METHOD = KnownMethod("__init__", _is_known, _made)
put_into, take_out_of = _METHOD.put_into, _METHOD.take_out_of


def _marked(given: dict[str, Any], is_in_force: bool) -> list[nn.Module]:
    """The layers that are to be gathered whole, which now have DeepSpeed's flag."""
    utils = sys.modules.get("deepspeed.utils")
    if given["zero_module_granularity_threshold"] or not hasattr(utils, "set_z3_leaf_module"):
        return []
    flag: Any = utils.set_z3_leaf_module  # type: ignore[union-attr]
    model = given["module"]
    for module in _gathered.intersection(model.modules()):  # from when it was prepared before
        flag(module, False)
    if not is_in_force or any(map(utils.z3_leaf_module, model.modules())):  # type: ignore[union-attr]
        return []
    found = []
    for layer in _layers_in(model):
        against = _against(layer, given["max_live_parameters"] // _SHARE)
        tally = Tally.of("zero3", f"{type(layer).__module__}.{type(layer).__qualname__}")
        if against is not None:
            tally.step_aside(against, is_usual=True)
            continue
        tally.count()
        flag(layer, True)
        _gathered.add(layer)
        found.append(layer)
    return found


def _layers_in(model: nn.Module) -> Iterator[nn.Module]:
    """Of what takes tokens through them: it gives each its hidden states first, by which DeepSpeed knows when a layer's
    gradients are done."""
    for module in model.modules():
        layers = module._modules.get("layers")
        if isinstance(layers, nn.ModuleList) and {"input_ids", "inputs_embeds"}.issubset(
            parameter_names(type(module).forward)
        ):
            yield from (layer for layer in layers if is_checkpointed(layer))


def _against(layer: nn.Module, most: int) -> str | None:
    for module in layer.modules():
        if module._parameters and (module._modules or not _computes_with_its_input(module)):
            return f"a layer has parameters of a {type(module).__name__}"
    if _size(layer) > most:
        return "a layer is more than a quarter of stage3_max_live_parameters"
    return None


def _computes_with_its_input(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__.endswith("Norm")


def _size(layer: nn.Module) -> int:
    """Elements, of parameters that may lie in parts elsewhere."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in layer.parameters())
