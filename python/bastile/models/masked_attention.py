"""The masks of causal language models, in a few numbers, for an attention that computes what is seen alone
(models/sdpa.py). Two functions of Transformers make them, which each model calls by names of its file: there they are
replaced, if all that becomes of a mask is that layers hand it on to the function that attends."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from bastile.guards import mark_as_ours, stock_of
from bastile.host_copies import on_host, remember
from bastile.models import padding, sdpa
from bastile.models.forms import Code, code_of, codes
from bastile.models.rebind import with_global
from bastile.models.sites import ModelFile, Site, calls, exchanged
from bastile.ops._common import cast_as_linear, has_values

OPERATOR = "masked_attention"
_MASK, _INTERFACE, _REGISTRY = "attention_mask", "attention_interface", "ALL_ATTENTION_FUNCTIONS"
MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask")
_POSITIONS = "position_ids"
_EAGER, _SINKS = "eager_attention_forward", "sinks"  # whose masks are models.sinks'
_RECURRENT, _LEAVES_OUT = "create_recurrent_attention_mask", "apply_mask_to_padding_states"
#: What else a maker may be told. Anything more says that a mask is of more than sequences.
_TOLD = frozenset({"config", "inputs_embeds", "input_embeds", _MASK, _POSITIONS, "cache_position", "layer_idx"})
_CACHES = ("cache", "past_key_values")


def sites(file: ModelFile) -> Iterator[Site]:
    makers = [name for name in MAKERS if _is_maker(file.scope.get(name))]
    own = list(file.own_classes()) if makers else []
    backbones = tuple(cls for cls in own if _makes_masks(_forward(cls)))
    if not backbones or not any(_attends(cls) for cls in own) or calls(stock_of(file.scope.get(_EAGER)), _SINKS):
        return
    why = _elsewhere(file, own, backbones)
    if why is not None:
        file.unknown[f"{_MASK}s of {file.title}"] = f"stay: {why}"
        return
    for maker in makers:
        replacement = _make(stock_of(file.scope[maker]))
        one_model = partial(exchanged, partial(with_global, name=maker, value=replacement))
        yield Site(OPERATOR, maker, file.module, maker, _make, backbones, one_model)


def _forward(cls: type) -> Any:
    return stock_of(vars(cls)["forward"])


def _is_maker(function: Any) -> bool:
    return getattr(inspect.unwrap(stock_of(function)), "__module__", None) == "transformers.masking_utils"


def _makes_masks(function: Any) -> bool:
    return any(calls(function, maker) for maker in MAKERS)


def _attends(cls: type) -> bool:
    return calls(_forward(cls), _REGISTRY)


# ---- what becomes of a mask ------------------------------------------------------------------------------------------


def _elsewhere(file: ModelFile, own: list[type], backbones: tuple[type, ...]) -> str | None:
    """Why something else than an attention may see a mask; None where nothing may."""
    for cls in backbones:
        if not file.read(cls, hands_masks_out):
            return f"{cls.__name__}.forward is not known to hand them to its layers alone"
        layers = _layers(cls)
        if not layers:
            return f"it is not known what layers {cls.__name__} has"
        of_others = calls(_forward(cls), _RECURRENT)
        for part in _parts(file, layers):
            owner = next((each for each in part.__mro__ if "forward" in vars(each)), nn.Module)
            if _MASK not in inspect.signature(_forward(owner)).parameters:
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
    for name, item in [*file.scope.items(), *(each for cls in own for each in vars(cls).items() if each[0] != "forward")]:
        function = stock_of(getattr(item, "__func__", item))
        if isinstance(function, FunctionType) and function.__module__ == file.name:
            yield name, function


def _layers(cls: type) -> list[type]:
    """What a backbone's lists of modules are made of."""
    init = cls.__init__
    code = code_of(inspect.unwrap(init))
    lists = [] if code is None else [node for node in ast.walk(code.node) if _is_list(node)]
    names = {name.id for each in lists for name in _names(each)}
    return [item for name in names for item in _classes(init.__globals__.get(name))]


def _is_list(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "ModuleList"


def _parts(file: ModelFile, layers: list[type]) -> list[type]:
    """Layers and all classes of modules that they, and what they are made of, name when they are made."""
    found, todo = [], list(layers)
    while todo:
        cls = todo.pop()
        if cls in found:
            continue
        found.append(cls)
        init = inspect.unwrap(cls.__init__)
        for code in codes(init.__code__) if isinstance(init, FunctionType) else ():
            todo += [item for name in code.co_names for item in _classes(init.__globals__.get(name))]
    return found


def _classes(item: Any) -> list[type]:
    """The classes of modules that a name stands for, one or a table of them."""
    items = item.values() if isinstance(item, dict) else [item]
    return [each for each in items if isinstance(each, type) and issubclass(each, nn.Module)]


def hands_mask_on(code: Code, of_others: bool = False) -> bool | None:
    """Whether a function does nothing with its mask but give it to one that it calls, under the same name, or to the
    one that attends. of_others: where a backbone makes other masks too, for layers with a state, what leaves out
    padding may be given one; False says that this function does that, and None that it does more."""
    uses = [node for node in ast.walk(code.node) if _is_name(node, _MASK)]
    handed = [
        value
        for call in ast.walk(code.node)
        if isinstance(call, ast.Call)
        for value in (
            *(k.value for k in call.keywords if k.arg == _MASK),
            *(call.args if isinstance(call.func, ast.Name) and call.func.id == _INTERFACE else ()),
        )
        if _is_name(value, _MASK)
    ]
    if len(handed) == len(uses):
        return True
    left_out = [
        value
        for call in ast.walk(code.node)
        if isinstance(call, ast.Call) and _is_name(call.func, _LEAVES_OUT)
        for value in call.args
        if _is_name(value, _MASK)
    ]
    return False if of_others and len(left_out) == len(uses) else None


def hands_masks_out(code: Code, may_return: bool = False) -> bool | None:
    """Whether a backbone gives the masks that it makes to its layers, as `attention_mask`, and does nothing else with
    them. may_return: or returns them."""
    return _Flow(code.node, may_return).is_only_to_layers() or None


class _Flow:
    """Where masks go in a function: which names stand for one ("mask"), for several by kinds of layers ("masks"), for
    what makes one ("maker") and for several of these ("makers")."""

    def __init__(self, node: ast.AST, may_return: bool) -> None:
        self.may_return = may_return
        self.nodes = list(ast.walk(node))
        self.above = {child: each for each in self.nodes for child in ast.iter_child_nodes(each)}
        self.layers = {name.id for each in self.nodes if isinstance(each, ast.For) for name in _names(each.target)}
        self.names: dict[str, str] = {}
        known = -1
        while known != len(self.names):
            known = len(self.names)
            for each in self.nodes:
                match each:
                    case ast.Assign(targets=[ast.Name(id=name)], value=value) if (kind := self.kind(value)) is not None:
                        self.names[name] = kind
                    case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name))], value=value) if self.is_mask(value):
                        self.names[name] = "masks"

    def kind(self, node: ast.AST) -> str | None:
        match node:
            case ast.Name(id=name):
                return "maker" if _makes(name) else self.names.get(name)
            case ast.Call(func=function):
                return "mask" if self.kind(function) == "maker" else None
            case ast.Lambda(body=body):
                return "maker" if self.is_mask(body) else None
            case ast.IfExp(body=one, orelse=other):
                return self.kind(one) or self.kind(other)
            case ast.Subscript(value=value):
                return {"masks": "mask", "makers": "maker"}.get(self.kind(value) or "")
            case ast.Dict(values=values):
                kinds = {self.kind(value) for value in values} - {None}
                return f"{kinds.pop()}s" if len(kinds) == 1 else None
            case ast.DictComp(value=value):
                return "masks" if self.is_mask(value) else None
        return None

    def is_mask(self, node: ast.AST) -> bool:
        return self.kind(node) == "mask"

    def is_only_to_layers(self) -> bool:
        found = [(each, kind) for each in self.nodes if (kind := self.kind(each)) is not None and self._is_read(each)]
        return any(kind == "mask" for _, kind in found) and all(self._goes_on(*each) for each in found)

    def _is_read(self, node: ast.AST) -> bool:
        return not isinstance(getattr(node, "ctx", None), ast.Store)

    def _goes_on(self, node: ast.AST, kind: str) -> bool:
        above = self.above.get(node)
        match above:
            case ast.Assign(targets=[ast.Name()]):
                return True
            case ast.Assign(targets=[ast.Subscript(value=into)]):
                return kind == "mask" and self.kind(into) == "masks"
            case ast.Dict() | ast.IfExp() | ast.DictComp() | ast.Lambda():
                return self.kind(above) is not None
            case ast.Subscript(value=value):
                return kind in ("masks", "makers") and value is node
            case ast.Call(func=function):
                return kind == "maker" and function is node
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                return True
            case ast.keyword(arg=name):
                function = getattr(self.above[above], "func", None)
                to_layer = isinstance(function, ast.Name) and function.id in self.layers
                to_maker = function is not None and self.kind(function) == "maker"  # a user's, under the same name
                return kind == "mask" and name == _MASK and (to_layer or to_maker)
            case ast.Return():
                return self.may_return
        return False


def _names(target: ast.AST) -> list[ast.Name]:
    return [each for each in ast.walk(target) if isinstance(each, ast.Name)]


def _makes(name: str) -> bool:
    return name.startswith("create_") and name.endswith("_mask")


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


# ---- making masks ----------------------------------------------------------------------------------------------------


def _make(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of the functions that make masks: ours for PyTorch's attention over whole sequences, the original's otherwise."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if sdpa.is_ours(kwargs.get(_MASK)):
            return kwargs[_MASK]  # made before: as for any of more than two dimensions
        if args or torch.compiler.is_compiling() or not _is_served(kwargs):
            return original(*args, **kwargs)
        sdpa.register()
        own = copy.copy(kwargs["config"])
        own._attn_implementation_internal = sdpa.MASKS
        making = sdpa.making
        making.padding, making.sequences = _padding(kwargs), _sequences(kwargs)
        making.device = _embedded(kwargs).device
        return original(**{**kwargs, "config": own})

    return mark_as_ours(make)


def _embedded(given: dict[str, Any]) -> Any:
    return given.get("inputs_embeds", given.get("input_embeds"))  # as earlier releases call them


def _is_served(given: dict[str, Any]) -> bool:
    config, embedded, mask = given.get("config"), _embedded(given), given.get(_MASK)
    if (
        getattr(config, "_attn_implementation", None) != sdpa.NAME
        or not getattr(config, "is_causal", True)
        or sdpa.has_refused(config)
        or not isinstance(embedded, torch.Tensor)
        or not has_values(embedded)
        or embedded.device.type not in ("cpu", "cuda")
        or cast_as_linear(embedded)[0].dtype not in sdpa.TYPES
        or any(value is not None for name, value in given.items() if name not in _TOLD and name not in _CACHES)
    ):
        return False
    return mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2 and has_values(mask))


def _padding(given: dict[str, Any]) -> torch.Tensor | None:
    """On the host, which tokens are none."""
    mask = given.get(_MASK)
    if mask is None or mask.is_cpu:
        return None if mask is None else mask.bool()
    host = on_host(mask)
    if host is None:
        host = mask.cpu()  # waits, once for all masks of a step, where Transformers would
        remember(mask, host)
        padding.wait_for_labels()
    return host.bool()


def _sequences(given: dict[str, Any]) -> torch.Tensor | None:
    """On the host, which sequence of its row each token is of, where Transformers asks for that and there are several."""
    from transformers.masking_utils import find_packed_sequence_indices

    positions = given.get(_POSITIONS)
    has_cache = any(given.get(name) is not None for name in _CACHES)
    if positions is None or given.get(_MASK) is not None or has_cache or not has_values(positions):
        return None
    host = positions if positions.is_cpu else on_host(positions)
    if host is None:
        host = positions.cpu()
        remember(positions, host)
    return stock_of(find_packed_sequence_indices)(host)
