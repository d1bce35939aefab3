"""What a batch of sequences side by side brings for FlashAttention and for layers with a state, where nobody reads it:
where sequences begin, how long the longest is, which one each token is of. It differs from one batch to the next, and a
step's kind with it; `position_ids` say the same to whoever makes masks. What convolutions and recurrences are told
(models/mixers.py) becomes one of few kinds."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bastile.graphs import caches
from bastile.graphs.lengths import power_of_two
from bastile.models.forms import codes
from bastile.models.mixers import CUTS, IDS, mixers_of
from bastile.models.varlen import is_sdpa

_NAMES = frozenset({CUTS, "cu_seq_lens_k", "max_length_q", "max_length_k", IDS})


def are_named(given: dict[str, Any]) -> bool:
    """Whether a batch brings any of these."""
    return not _NAMES.isdisjoint(given)


def without(given: dict[str, Any], config: Any, layers: Iterable[nn.Module]) -> dict[str, Any]:
    """A backbone's arguments without these, where its attention is PyTorch's, which is told by a mask, and no layer's
    code has any of their names; or with those by which layers keep sequences apart, and without a cache, which has no
    place for the states of several."""
    layers = list(layers)
    if not layers or not are_named(given) or given.get("position_ids") is None or not _is_by_mask(config):
        return given
    found = {name: value for name, value in given.items() if name not in _NAMES}
    told = {name: given[name] for name in (IDS, CUTS) if isinstance(given.get(name), torch.Tensor)}
    if len(told) == 2 and (mixers := mixers_of(layers)) and mixers.can_be_told():
        alone = {} if caches.given_in(given) is not None else {"use_cache": False}
        return {**found, IDS: told[IDS], CUTS: _few(told[CUTS]), **alone}
    classes = {type(module) for layer in layers for module in layer.modules()}
    return given if any(map(_names_them, classes)) else found


def _few(cuts: torch.Tensor) -> torch.Tensor:
    """With empty sequences behind the others: their number is a power of two."""
    behind = power_of_two(len(cuts) - 1, 1) + 1 - len(cuts)
    return torch.cat([cuts, cuts[-1:].expand(behind)]) if behind else cuts


def _is_by_mask(config: Any) -> bool:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return getattr(config, "_attn_implementation", None) == "sdpa" and is_sdpa(ALL_ATTENTION_FUNCTIONS["sdpa"])


_known: dict[type, bool] = {}


def _names_them(cls: type) -> bool:
    """Whether the code of a class, Transformers' or a user's, has one of the names, as a variable or in quotes."""
    found = _known.get(cls)
    if found is None:
        owners = [each for each in cls.__mro__ if not each.__module__.startswith(("torch.", "builtins"))]
        functions = [item for owner in owners for item in vars(owner).values()]
        bodies = [function.__code__ for item in functions if hasattr(function := _function(item), "__code__")]
        found = _known[cls] = any(
            not _NAMES.isdisjoint([*code.co_varnames, *code.co_names, *filter(_is_text, code.co_consts)])
            for body in bodies
            for code in codes(body)
        )
    return found


def _function(item: Any) -> Any:
    return inspect.unwrap(getattr(item, "__func__", item)) if callable(item) or hasattr(item, "__func__") else None


def _is_text(item: Any) -> bool:
    return isinstance(item, str)
