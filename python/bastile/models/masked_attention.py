"""The masks of causal language models and of encoders, in a few numbers, for an attention that computes what is seen
alone (models/sdpa.py). Two functions of Transformers make them of each, which a model calls by names of its file: there
they are replaced, if all that becomes of a mask is that layers hand it on to the function that attends."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from bastile.graphs import caches
from bastile.guards import mark_as_ours, stock_of
from bastile.models import encoders, masks, outer_masks, padding, sdpa
from bastile.models.forms import code_of
from bastile.models.mask_flow import MASK, hands_mask_on, hands_masks_out, names_in
from bastile.models.rebind import with_global
from bastile.models.sites import (
    ModelFile,
    Site,
    calls,
    classes_in,
    exchanged,
    own_forward,
    owner_of_forward,
    parts_of,
)
from bastile.models.structure import class_of
from bastile.ops._common import cast_type, has_values

OPERATOR = "masked_attention"
_REGISTRY, _RECURRENT = "ALL_ATTENTION_FUNCTIONS", "create_recurrent_attention_mask"
MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask")
_POSITIONS = "position_ids"
_EAGER, _SINKS = "eager_attention_forward", "sinks"  # whose masks are models.sinks'
#: What else a maker may be told. Anything more says that a mask is of more than sequences.
_TOLD = frozenset({"config", "inputs_embeds", "input_embeds", MASK, _POSITIONS, "cache_position", "layer_idx"})


def sites(file: ModelFile) -> Iterator[Site]:
    backbones = hand_masks_to_attention(file)
    for maker in _makers(file) if backbones else ():
        replacement = _make(stock_of(file.scope[maker]))
        one_model = partial(exchanged, partial(with_global, name=maker, value=replacement))
        yield Site(OPERATOR, maker, file.module, maker, _make, backbones, one_model)
    if backbones:
        yield from outer_masks.sites(file, OPERATOR, backbones)
    of_encoders = encoders_of(file)
    both_ways = {name: _make_both_ways(stock_of(file.scope[name])) for name in _both_ways(file) if of_encoders}
    for maker in both_ways:
        one_model = partial(_with_makers, both_ways)
        yield Site(OPERATOR, maker, file.module, maker, _make_both_ways, of_encoders, one_model)


def encoders_of(file: ModelFile) -> tuple[type, ...]:
    """The classes that make masks of tokens that see all others, likewise."""
    return encoders.of_file(file) if _both_ways(file) else ()


def _both_ways(file: ModelFile) -> list[str]:
    return [name for name in encoders.MAKERS if _is_maker(file.scope.get(name))]


def hand_masks_to_attention(file: ModelFile) -> tuple[type, ...]:
    """The classes that make masks, if all that becomes of these is that layers hand them to the function that
    attends."""
    own = list(file.own_classes()) if _makers(file) else []
    backbones = tuple(cls for cls in own if _makes_masks(own_forward(cls)))
    if not backbones or not any(_attends(cls) for cls in own) or calls(stock_of(file.scope.get(_EAGER)), _SINKS):
        return ()
    why = _elsewhere(file, own, backbones)
    if why is not None:
        file.unknown[f"masks of {backbones[0].__name__}"] = f"stay: {why}"
        return ()
    return backbones


def _makers(file: ModelFile) -> list[str]:
    return [name for name in MAKERS if _is_maker(file.scope.get(name))]


def _is_maker(function: Any) -> bool:
    return getattr(inspect.unwrap(stock_of(function)), "__module__", None) == "transformers.masking_utils"


def _makes_masks(function: Any) -> bool:
    return any(calls(function, maker) for maker in MAKERS)


def _attends(cls: type) -> bool:
    return calls(own_forward(cls), _REGISTRY)


# ---- what becomes of a mask ------------------------------------------------------------------------------------------


def _elsewhere(file: ModelFile, own: list[type], backbones: tuple[type, ...]) -> str | None:
    """Why something else than an attention may see a mask; None where nothing may."""
    for cls in backbones:
        if not file.read(cls, hands_masks_out, False, cls):
            return f"{cls.__name__}.forward is not known to hand them to its layers alone"
        layers = _layers(cls)
        if not layers:
            return f"it is not known what layers {cls.__name__} has"
        of_others = calls(own_forward(cls), _RECURRENT)
        for part in parts_of(layers):
            owner = owner_of_forward(part)
            if MASK not in inspect.signature(own_forward(owner)).parameters:
                continue
            is_known = owner.__module__ == file.name and file.read(owner, hands_mask_on, of_others)
            if not is_known or (of_others and not is_known[1] and _attends(owner)):
                return f"{owner.__name__}.forward is not known to hand them on to the function that attends alone"
    for name, function in _other_functions(file, own):
        if _makes_masks(function):
            code = code_of(inspect.unwrap(function))
            if code is None or not hands_masks_out(code, may_return=True):
                return f"{name} makes them too"
    return None


def _other_functions(file: ModelFile, own: list[type]) -> Iterator[tuple[str, Any]]:
    """Of a file, with its classes' methods, but not their forwards."""
    for name, item in [
        *file.scope.items(),
        *(each for cls in own for each in vars(cls).items() if each[0] != "forward"),
    ]:
        function = stock_of(getattr(item, "__func__", item))
        if isinstance(function, FunctionType) and function.__module__ == file.name:
            yield name, function


def _layers(cls: type) -> list[type]:
    """What a backbone's lists of modules are made of; where that is in no one expression, all classes that it names."""
    init = cls.__init__  # type: ignore[misc]
    code = code_of(inspect.unwrap(init))
    if code is None:
        return []
    lists = [node for node in ast.walk(code.node) if _is_list(node)]
    for nodes in (lists, [code.node] if lists else []):
        names = {name.id for each in nodes for name in names_in(each)}
        found = [item for name in names for item in classes_in(init.__globals__.get(name))]
        if found:
            return found
    return []


def _is_list(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "ModuleList"


# ---- making masks ----------------------------------------------------------------------------------------------------


def _with_makers(makers: dict[str, Callable[..., Any]], forward: Any) -> Any:
    """A forward of one model alone, that makes masks by these, by itself or by methods of its class."""
    made = exchanged(partial(_with_globals, makers), forward)

    @functools.wraps(made)
    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        methods = _methods_with(class_of(self), tuple(makers.items()))
        vars(self).update({name: MethodType(method, self) for name, method in methods.items()})
        try:
            return made(self, *args, **kwargs)
        finally:
            for name in methods:
                vars(self).pop(name, None)

    return own if callable(made) else made


def _with_globals(values: dict[str, Any], function: Any) -> Any:
    for name, value in values.items():
        function = with_global(function, name, value)
    return function


@functools.cache
def _methods_with(cls: type, makers: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The methods of a class, but its forward, that call makers, with these in their places."""
    names = [name for name, _ in makers]
    found = {name: stock_of(getattr(cls, name)) for name in dir(cls) if name != "forward"}
    return {
        name: _with_globals(dict(makers), method)
        for name, method in found.items()
        if isinstance(method, FunctionType) and any(calls(method, maker) for maker in names)
    }


def _make_both_ways(original: Callable[..., Any]) -> Callable[..., Any]:
    return _make(original, causal=False)


def _make(original: Callable[..., Any], causal: bool = True) -> Callable[..., Any]:
    """Of the functions that make masks: ours for PyTorch's attention over whole sequences, the original's otherwise."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if sdpa.is_ours(kwargs.get(MASK)):
            return kwargs[MASK]  # made before: as for any of more than two dimensions
        making = sdpa.making
        if args or torch.compiler.is_compiling() or not _is_served(kwargs, causal) or not sdpa.register():
            if making.packed is not None:
                raise sdpa.CannotBeTold
            return original(*args, **kwargs)
        own = copy.copy(kwargs["config"])
        own._attn_implementation_internal = sdpa.MASKS
        given = {**kwargs, "config": own}
        if making.packed is None:
            making.padding, making.sequences = _padding(kwargs), masks.sequences_of(kwargs)
        else:
            making.padding, making.sequences, making.packed.are_made = None, making.packed.sequences, True
            given = {**given, _POSITIONS: None}  # of which Transformers would ask where sequences begin
        making.device = _embedded(kwargs).device
        return original(**given)

    return mark_as_ours(make)


def _embedded(given: dict[str, Any]) -> Any:
    return given.get("inputs_embeds", given.get("input_embeds"))  # as earlier releases call them


def _is_served(given: dict[str, Any], causal: bool) -> bool:
    config, embedded, mask = given.get("config"), _embedded(given), given.get(MASK)
    if (
        getattr(config, "_attn_implementation", None) != sdpa.NAME
        or (causal and not getattr(config, "is_causal", True))
        or sdpa.has_refused(config)
        or not isinstance(embedded, torch.Tensor)
        or not has_values(embedded)
        or embedded.device.type not in ("cpu", "cuda")
        or (cast_type(embedded) or embedded.dtype) not in sdpa.TYPES
        or any(value is not None for name, value in given.items() if name not in _TOLD and name not in caches.NAMES)
    ):
        return False
    if embedded.is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # a graph is replayed with other batches, and nothing can be asked of the device
    # A mask of more tokens than these is of a cache's, too: one for each token of a text that is generated.
    return mask is None or (isinstance(mask, torch.Tensor) and mask.shape == embedded.shape[:2] and has_values(mask))


def _padding(given: dict[str, Any]) -> torch.Tensor | None:
    """On the host, which tokens are none."""
    mask = given.get(MASK)
    if mask is None:
        return None
    return padding.on_host_with_labels(mask)
