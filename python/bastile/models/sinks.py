"""The attention of models whose softmax has sinks. PyTorch has no function for it, Transformers computes it in pieces.

Two things change together. The function that attends ("eager", by its name there) is ours where its code is known, and
the masks that a backbone makes for it say which tokens may see each other in a few numbers, in place of a number for
each pair of tokens: where sequences begin among the batch's tokens, and how far back a token sees. Where the original
is to run after all, it gets the mask that Transformers would have made.

A mask of ours is a tensor of int32 like any other argument of a layer, so that checkpoints, CUDA graphs and hooks treat
it as one: [1, 1, 1, 1, N, 1 + window], expanded from N boundaries (bastile.ops.sink_attention), none where each row is
one sequence; of sequences side by side, of at most 2^e tokens, [2 + e, ...]. Transformers has none of six dimensions,
and none of its masks can be broadcast to one unnoticed."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch

from bastile.guards import mark_as_ours, stock_of
from bastile.host_copies import fetched, on_host
from bastile.models.forms import Code
from bastile.models.mask_flow import MASK, hands_mask_on, makes
from bastile.models.rebind import with_global
from bastile.models.sdpa import is_of_whole_rows, making
from bastile.models.sites import ModelFile, Site, calls, exchanged
from bastile.ops._common import HALVES, cast_as_linear, has_values
from bastile.ops._flash import refusal
from bastile.ops.sink_attention import allowed, sink_attention
from bastile.own_methods import given_to
from bastile.report import Tally

KIND = "attention with sinks"
_EAGER, _ATTENDS, _SINKS = "eager", "eager_attention_forward", "sinks"
_TABLES, _POSITIONS = "position_embeddings", "position_ids"
_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
#: Under this name our masks are made by Transformers' own functions, which know what they are of.
_OURS = "bastile_boundaries"
_DIMS = 6
#: In which the original rounds weights, and PyTorch's flash attention sums: of float32 the original is the closer one.
TYPES = HALVES
_WIDE = "its tensors are of float32, in which the original code is the more exact"


def sites(file: ModelFile) -> Iterator[Site]:
    for name, attentions, masks, backbones in _served(file):
        attend = partial(_attend, Tally.of("sink_attention", f"{file.name}.{name}"))
        yield _of_a_function(file, name, attend, attentions)
        for mask in masks:
            yield _of_a_function(file, mask, _make, backbones)


def backbones_of(file: ModelFile) -> tuple[type, ...]:
    """The classes that make masks for such an attention alone."""
    return tuple(cls for _, _, _, backbones in _served(file) for cls in backbones)


def _served(file: ModelFile) -> Iterator[tuple[str, tuple[type, ...], list[str], tuple[type, ...]]]:
    """Functions that attend, who calls them, what makes their masks, and who calls that."""
    known = list(file.functions(KIND)) if file.module is not None else []
    function = file.scope.get(_ATTENDS)
    if isinstance(function, FunctionType):  # of whatever code: where it has sinks, it is told that it stays stock
        file.reads[_ATTENDS] = (_SINKS,) if calls(stock_of(function), _SINKS) else ()
    for found in known:
        name, own = found.name, list(file.own_classes())
        attentions = tuple(cls for cls in own if calls(stock_of(vars(cls)["forward"]), name))
        masks = [mask for mask in _MASKS if isinstance(file.scope.get(mask), FunctionType)]
        backbones = tuple(cls for cls in own if any(calls(stock_of(vars(cls)["forward"]), mask) for mask in masks))
        layers = [cls for cls in own if cls not in backbones and _takes(cls)]
        if not attentions or not backbones:
            file.unknown[name] = "no module's forward calls it, or none makes its masks"
        elif not all(file.read(cls, _hands_masks_out) for cls in backbones):
            file.unknown[name] = "a mask is not only handed to the layers"
        elif not all(file.read(cls, hands_mask_on) for cls in layers):
            file.unknown[name] = "a mask is not only handed on to the function that attends"
        else:
            yield name, attentions, masks, backbones


def _of_a_function(file: ModelFile, name: str, build: Callable[[Any], Any], callers: tuple[type, ...]) -> Site:
    replacement = build(stock_of(file.scope[name]))
    one_model = partial(exchanged, lambda inner: with_global(inner, name, replacement))
    return Site("sink_attention", name, file.module, name, build, callers, one_model)


# ---- what becomes of a mask ------------------------------------------------------------------------------------------


def _takes(cls: type) -> bool:
    """A layer or an attention, rather than a model, which is given the user's mask."""
    parameters = inspect.signature(stock_of(vars(cls)["forward"])).parameters
    return MASK in parameters and _TABLES in parameters


def _hands_masks_out(code: Code) -> bool | None:
    """Whether a backbone puts the masks that it makes into one dictionary, from which each layer gets its own."""
    holders, made = set(), 0
    for node in ast.walk(code.node):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(values=[*values])):
                makes = [value for value in values if isinstance(value, ast.Call) and _is_maker(value.func)]
                if makes and len(makes) == len(values):
                    holders.add(name)
                    made += len(makes)
    nodes = list(ast.walk(code.node))
    taken = [
        keyword.value.value
        for call in nodes
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == MASK and isinstance(keyword.value, ast.Subscript)
    ]
    loads = [n for n in nodes if isinstance(n, ast.Name) and n.id in holders and isinstance(n.ctx, ast.Load)]
    is_only_taken = all(any(load is each for each in taken) for load in loads)
    return (len(holders) == 1 and made == len([n for n in nodes if _is_maker(n)]) and is_only_taken) or None


def _is_maker(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and makes(node.id)


# ---- making masks ----------------------------------------------------------------------------------------------------


def _make(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of the functions that make masks: ours for an eager attention over whole sequences, the original's otherwise."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        config: Any = kwargs.get("config")
        embedded: Any = kwargs.get("inputs_embeds", kwargs.get("input_embeds"))  # as earlier releases call them
        if (
            args
            or torch.compiler.is_compiling()
            or getattr(config, "_attn_implementation", None) != _EAGER
            or not isinstance(embedded, torch.Tensor)
            or not has_values(embedded)
            or embedded.device.type not in ("cpu", "cuda")
            or cast_as_linear(embedded)[0].dtype not in TYPES
        ):
            return original(*args, **kwargs)
        _register()
        if making.packed is not None:
            making.packed.are_made = True
        given = kwargs.get(MASK)
        # Of as many tokens as there are: one of a cache's, too, says nothing here.
        if isinstance(given, torch.Tensor) and given.shape == embedded.shape[:2]:
            fetched(given)  # waits, once for all masks of a step, as for a mask of PyTorch's attention
        own = copy.copy(config)
        own._attn_implementation_internal = _OURS
        told = {_POSITIONS: None} if making.packed is not None and _POSITIONS in kwargs else {}
        return original(**{**kwargs, **told, "config": own})

    return mark_as_ours(make)


@functools.cache
def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    ALL_MASK_ATTENTION_FUNCTIONS.register(_OURS, _boundaries)


def _boundaries(**given: Any) -> Any:
    """A mask of ours, or, for what it cannot say, Transformers' own of the eager attention. Called as functions for
    masks are; `allow_is_causal_skip` says that nothing but causality and a window is asked for."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    batch, keys, padding, packed = given["batch_size"], given["kv_length"], given.get(MASK), making.packed
    position = given.get("cache_position")  # in earlier releases
    device = given.get("device") or getattr(padding, "device", None) or getattr(position, "device", None)
    if packed is not None and packed.sequences is not None:
        window = given.get("local_size") or 0
        cuts, longest, _, _, _ = packed.segments(0, causal=True)
        return _mask_of(cuts[0].to(device, non_blocking=True), window, (longest - 1).bit_length() + 1)
    starts = _starts(padding, batch, keys) if is_of_whole_rows(given) and given.get("allow_is_causal_skip") else None
    if starts is None or device is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[_EAGER](**given)
    made = torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True)
    return _mask_of(made, given.get("local_size") or 0)


def _mask_of(boundaries: torch.Tensor, window: int, times: int = 0) -> torch.Tensor:
    return boundaries.view(1, 1, 1, 1, -1, 1).expand(1 + times, 1, 1, 1, -1, 1 + window)


def _starts(padding: torch.Tensor | None, batch: int, length: int) -> list[int] | None:
    """Where what is seen of each row, and what is not, begins and ends; none where all is seen. None where what is
    seen is not in one piece, or nothing."""
    if padding is None:
        return []
    if padding.dim() != 2 or padding.shape != (batch, length):
        return None
    host = padding if padding.is_cpu else on_host(padding)
    host = (padding.cpu() if host is None else host).bool()
    if bool(host.all()):
        return []
    first, count = host.int().argmax(1), host.sum(1)
    at = torch.arange(length)
    in_one_piece = (at >= first[:, None]) & (at < (first + count)[:, None])
    if not bool((in_one_piece == host).all()) or not bool(count.all()):
        return None
    rows = torch.arange(batch) * length
    return [*torch.stack((rows, rows + first, rows + first + count), 1).flatten().tolist(), batch * length]


def _is_ours(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dim() == _DIMS and mask.dtype is torch.int32


def _said(mask: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """The boundaries and the window of a mask of ours, and how many tokens sequences have at most; 0: of rows."""
    return mask[0, 0, 0, 0, :, 0], mask.shape[-1] - 1, 1 << len(mask) >> 2


def _original_mask(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What Transformers would have made: what is not seen, nobody sees."""
    (starts, window, longest), (batch, _, length, _) = _said(mask), q.shape
    seen = allowed(q, window, starts if longest else starts[:0])
    if starts.numel() and not longest:
        rows = torch.arange(batch, device=q.device)[:, None] * length
        at = torch.arange(length, device=q.device) + rows
        first, end = starts[1::3, None], starts[2::3, None]
        seen = seen & ((at >= first) & (at < end))[:, None, None, :]
    mask = torch.where(seen, torch.zeros((), dtype=q.dtype, device=q.device), torch.finfo(q.dtype).min)
    return mask.expand(batch, -1, -1, -1)


# ---- attending -------------------------------------------------------------------------------------------------------


def _attend(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    names = tuple(inspect.signature(original).parameters)

    @functools.wraps(original)
    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names[5:], args, strict=False)), **kwargs}
        q, k, v = cast_as_linear(query, key, value)  # as autocast casts what PyTorch's attention is given
        ours, is_usual = _is_ours(attention_mask), q.shape[2] != k.shape[2]
        why: str | None
        if q.dtype not in TYPES:
            why, is_usual = _WIDE, True
        elif is_usual:
            why = "its keys are a cache's"
        elif not ours:
            why = "its mask is packed sequences', one with holes or a user's own"
        elif given.get("dropout"):
            why = "it drops weights"
        else:
            why = _wants_weights(module) or refusal(q, k, v, module.sinks)
        if why is not None:
            tally.step_aside(why, is_usual)
            mask = _original_mask(attention_mask, query) if ours else attention_mask
            return original(module, query, key, value, mask, *args, **kwargs)
        tally.count()
        _note(module)
        starts, window, longest = _said(attention_mask)
        y = sink_attention(
            q, k, v, module.sinks, scale=given["scaling"], window=window, boundaries=starts, longest=longest
        )
        return y, None

    return mark_as_ours(attend)


#: Configurations of models whose attention has taken a mask of ours, by id.
_takes_ours: dict[int, Any] = {}


def _note(module: Any) -> None:
    config = getattr(module, "config", None)
    if config is not None and id(config) not in _takes_ours:
        key = id(config)
        _takes_ours[key] = weakref.ref(config, lambda _: _takes_ours.pop(key, None))


def is_known_to_take_ours(config: Any) -> bool:
    """Whether a model's attention has been seen to be one that takes masks of ours."""
    found = _takes_ours.get(id(config))
    return found is not None and found() is config and getattr(config, "_attn_implementation", None) == _EAGER


def _wants_weights(module: Any) -> str | None:
    """Why the weights of the attention are to be there. Transformers collects them by hooks, which run in each call,
    and in earlier releases by a forward that a module has for the time of a call."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        is_wanted = "forward" in vars(module) and not given_to(module)
    else:
        is_wanted = "attentions" in (_active_collector.get() or ())
    return "its weights are wanted" if is_wanted else None
