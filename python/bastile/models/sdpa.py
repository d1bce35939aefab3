"""Transformers' attention by PyTorch's, "sdpa", that takes masks of Bastile's: segments of sequences in a few numbers
(bastile.ops.masked_attention), where Transformers' have a number for each pair of tokens.

A mask of ours is a tensor of int32 like any other argument of a layer, so that checkpoints, CUDA graphs and hooks treat
it as one: the cuts, [M, N], expanded to [1 + e, which, 1, M, N, 1 + window], where no segment is longer than 2^e, less
one, and which is 1, or 2 if it is not causal, or 3 with padding behind. No mask of Transformers has six dimensions, and
none can be broadcast to it unnoticed. Where Transformers takes the last queries of one, by the third dimension of its
own (Gemma 4, for the logits that are kept), it stays what it is."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from bastile.guards import stand_in_for, stock_of
from bastile.models.forms import codes
from bastile.models.padding import is_unread
from bastile.models.varlen import is_sdpa
from bastile.ops._attentions import are_faster_here, is_much
from bastile.ops._common import HALVES, cast_as_linear, cast_type
from bastile.ops._segments import Segments, of_padding, of_sequences, of_whole_rows, seen, with_more_behind
from bastile.ops._token_attention import serves_token, token_attention
from bastile.ops.masked_attention import masked_attention, refusal
from bastile.report import Tally

NAME = "sdpa"
#: Under this name our masks are made by Transformers' own functions, which know what they are of.
MASKS = "bastile_segments"
_DIMS = 6
_NOT_CAUSAL, _WITH_BEHIND = 2, 3
#: The other types are PyTorch's: in float32 on CUDA it has no attention that knows segments.
TYPES = HALVES

_TALLY = Tally.of("masked_attention", "transformers.integrations.sdpa_attention.sdpa_attention_forward")
_LEFT_OUT = Tally.of("masked_attention", "transformers.masking_utils.sdpa_mask")


class CannotBeTold(Exception):
    """Of a batch that has been put side by side (models/padding_free.py): its attention takes no mask of ours, or what
    else sees more than one token of it cannot keep rows apart."""


def need_told(is_told: bool) -> None:
    """Of what sees more than one token and is no attention: raises CannotBeTold where rows stand side by side and it
    has not been told so."""
    packed = making.packed
    if packed is not None and packed.sequences is not None and not is_told:
        raise CannotBeTold


class Packed:
    """Which sequence each token of such a batch is of, [1, T] on the host, None where all are of one; how many tokens
    it had with its padding; how many its sequences are said to have; and whether masks have been made of it."""

    def __init__(self, sequences: torch.Tensor | None, tokens: int, longest: int) -> None:
        self.sequences, self.tokens, self.longest, self.are_made = sequences, tokens, longest, False

    def segments(self, window: int, causal: bool) -> Segments:
        assert self.sequences is not None
        found = of_sequences(self.sequences, window, causal=causal)
        return found._replace(longest=max(found.longest, min(self.longest, self.sequences.shape[1])))


class _Making(threading.local):
    """Of the mask that is being made in this thread: on the host, which tokens are no padding, or which sequence each
    is of; and where it is to be. Of the batch that is going through a backbone: packed, if it is, and its masks, which
    layers are given that may not be the first ones."""

    packed: Packed | None = None
    made: list[torch.Tensor] | None = None

    padding: torch.Tensor | None = None
    sequences: torch.Tensor | None = None
    device: torch.device | None = None


making = _Making()


@contextmanager
def packed(sequences: torch.Tensor | None, tokens: int, longest: int = 0) -> Iterator[Packed]:
    """Within, in this thread, masks are of these sequences, or CannotBeTold is raised."""
    before, making.packed = making.packed, Packed(sequences, tokens, longest)
    try:
        yield making.packed
    finally:
        making.packed = before


#: Configurations of models whose attention has refused a mask of ours, by id: theirs are made as ever from then on.
_refused: dict[int, Any] = {}
#: Likewise, whether theirs would take one, as far as its first call says.
_looked_at: dict[int, tuple[Any, bool]] = {}
#: By a mask of ours, what Transformers would have made; and of one that is not causal, what it was made of.
_originals: Any = WeakTensorKeyDictionary()
_paddings: Any = WeakTensorKeyDictionary()


def put_into(_: Any) -> None:
    """Nothing: the first mask of ours that is to be made puts in the attention that takes it (`register`)."""


def register() -> bool:
    """The attention, and what makes its masks; whether it is there, and not one of a user's under the same name."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    table = _table()
    there = table[NAME]
    if getattr(there, "__code__", None) is not _OURS and is_sdpa(there):
        ALL_MASK_ATTENTION_FUNCTIONS.register(MASKS, _mask)
        table[NAME] = there = _attends(there)
    return getattr(there, "__code__", None) is _OURS


def _table() -> dict[str, Any]:
    """Where models find an attention by its name: who has assigned one has it before all others."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    return FUNCTIONS._local_mapping if NAME in FUNCTIONS._local_mapping else FUNCTIONS._global_mapping


def take_out_of(_: Any) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    table = _table()
    if getattr(table[NAME], "__code__", None) is _OURS:
        table[NAME] = stock_of(table[NAME])
    ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(MASKS, None)
    _refused.clear()
    _looked_at.clear()


# ---- masks -----------------------------------------------------------------------------------------------------------


def _mask(**given: Any) -> Any:
    """A mask of ours, or, for what it cannot say, Transformers' own. Called as functions for masks are. None: each row
    may be one sequence."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    segments = _segments(given)
    if segments is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[NAME](**given)
    if not len(segments.cuts) and not segments.window:
        if making.padding is not None and not bool(making.padding.all()):
            _LEFT_OUT.count()
        return None
    mask = mask_of(segments, given["kv_length"], making.device)
    if not segments.causal and making.padding is not None:
        _paddings[mask] = making.padding
    if making.made is not None:
        making.made.append(mask)
    return mask


def mask_of(segments: Segments, length: int, device: torch.device | None) -> torch.Tensor:
    """A mask of ours, for rows of so many tokens: cuts, the rest said by how often these are seen."""
    cuts, longest, window, behind, causal = segments
    cuts = cuts.to(device, non_blocking=True)
    exponent = 0 if longest == length else longest.bit_length()
    which = _WITH_BEHIND if behind else 1 if causal else _NOT_CAUSAL
    return cuts.view(1, 1, 1, *cuts.shape, 1).expand(1 + exponent, which, -1, -1, -1, 1 + window)


def padding_of(mask: torch.Tensor) -> torch.Tensor | None:
    """Of a mask of ours that is not causal and has been made here: of which tokens it is, [B, S] on the host."""
    return _paddings.get(mask)


def can_be_longer(mask: torch.Tensor) -> bool:
    """Whether a mask of ours is one of rows that may have more padding behind them: one that is not causal, and not of
    sequences side by side."""
    is_of_rows, is_causal, has_cuts, has_window = (
        mask.shape[0] == 1,
        mask.shape[1] != _NOT_CAUSAL,
        mask.shape[3],
        mask.shape[5] > 1,
    )
    return is_of_rows and not is_causal and not (has_cuts and has_window)


def longer(mask: torch.Tensor, rows: int, length: int, more: int) -> torch.Tensor:
    """Such a mask, for rows of so many tokens, where they have more padding behind them: made on the host, which knows
    what it was made of."""
    padding = _paddings.get(mask)
    said = None if padding is None else of_padding(padding, mask.shape[5] - 1, causal=False)
    if said is None:
        said = _said(mask, length)
    return mask_of(with_more_behind(said, rows, more), length + more, mask.device)


def is_of_whole_rows(given: dict[str, Any]) -> bool:
    """Whether a mask that is to be made is of all that queries may see: no keys came before, as a cache's have. given:
    what Transformers tells a function for masks."""
    position = given.get("cache_position")  # in earlier releases
    queries = given["q_length"] if position is None else len(position)
    offset = 0 if position is not None else given.get("q_offset", 0)  # where keys are as many, none came before
    return queries == given["kv_length"] and isinstance(offset, int) and not offset and not given.get("kv_offset", 0)


def _segments(given: dict[str, Any]) -> Segments | None:
    batch, length, padding = given["batch_size"], given["kv_length"], making.padding
    if not is_of_whole_rows(given):
        return None
    window, causal = given.get("local_size") or 0, not given.get("allow_is_bidirectional_skip")
    if window and not causal:
        window += 1  # of which that says how far away the last one is
    if making.sequences is not None:
        ids = making.sequences.expand(batch, -1)
        if ids.shape != (batch, length) or padding is not None:
            return None
        packed = making.packed
        return of_sequences(ids, window, causal=causal) if packed is None else packed.segments(window, causal)
    if causal and not given.get("allow_is_causal_skip"):  # more than causality and a window is asked for
        return None
    if padding is None:
        return of_whole_rows(length, window, causal=causal)
    if padding.shape != (batch, length):
        return None
    if not causal:
        return of_padding(padding, window, causal=False)
    behind = padding.flip(1).cumsum(1).flip(1) == 0
    if bool(behind.any()) and bool(padding.any(1).all()) and is_unread(padding):
        padding = padding | behind
    return of_padding(padding, window)


def is_ours(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dim() == _DIMS and mask.dtype is torch.int32


def _said(mask: torch.Tensor, length: int) -> Segments:
    exponent, which, window = mask.shape[0] - 1, mask.shape[1], mask.shape[5] - 1
    longest = 1 << exponent >> 1 if exponent else length
    return Segments(mask[0, 0, 0, :, :, 0], longest, window, which == _WITH_BEHIND, which != _NOT_CAUSAL)


# ---- attending -------------------------------------------------------------------------------------------------------


def has_refused(config: Any) -> bool:
    found = _refused.get(id(config))
    return found is not None and found() is config


def _attends(original: Any) -> Any:
    packs = not hasattr(sys.modules.get(original.__module__), "pack_gqa")  # newer releases do it themselves

    @functools.wraps(original)
    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(attention_mask):
            _look_at(module, query, key, value, args, kwargs)
            if _biases.made is not None:
                attention_mask = _bias_of(attention_mask, query, kwargs)
            rows = _whole_rows(module, query, key, value, args, kwargs) if attention_mask is None else None
            if rows is not None:
                _TALLY.count()
                return masked_attention(*rows, scale=kwargs.get("scaling")), None
            if _is_of_one_token(module, query, key, attention_mask, args, kwargs):
                q, k, v = cast_as_linear(query, key, value)
                if serves_token(q, k, v, attention_mask):
                    return token_attention(q, k, v, attention_mask, kwargs.get("scaling")), None
                if packs and q.shape[1] > k.shape[1]:
                    return _packed(query, key, value, attention_mask, kwargs.get("scaling")), None
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        q, k, v = cast_as_linear(query, key, value)  # as autocast casts what PyTorch's attention is given
        said, dropout = _said(attention_mask, key.shape[2]), kwargs.get("dropout") or 0.0
        if q.shape[2] < k.shape[2]:  # Gemma 4's last layers, of the tokens whose logits are kept
            _TALLY.step_aside(_OF_LAST)
            mask = _original_mask(attention_mask, key)[:, :, -q.shape[2] :]
            return original(module, query, key, value, mask, *args, **kwargs)
        why = (
            _refusal(args, kwargs)
            or (_WIDE if q.dtype not in TYPES else None)
            or refusal(q, k, v, said.window, dropout)
        )
        if why is not None:
            _TALLY.step_aside(why)
            config = getattr(module, "config", None)
            if config is not None:
                _refused[id(config)] = weakref.ref(config)
            mask = _original_mask(attention_mask, query)
            return original(module, query, key, value, mask, *args, **kwargs)
        _TALLY.count()
        _note(module, True)
        return masked_attention(q, k, v, said, scale=kwargs.get("scaling"), dropout=dropout), None

    stand_in_for(original, attend)
    return attend


class _Biases(threading.local):
    """What was made of masks in this thread's call of a model: by a mask's id and a type, the mask and the bias."""

    made: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] | None = None


_biases = _Biases()


@contextmanager
def masks_as_biases() -> Iterator[None]:
    """Around one call of a model, whose layers are given the same masks: PyTorch's attention makes a bias of a mask of
    booleans in each layer, in three launches, and here it is made once."""
    before, _biases.made = _biases.made, {}
    try:
        yield
    finally:
        _biases.made = before


def _bias_of(mask: Any, query: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool or _refusal((), kwargs) is not None:
        return mask
    made: Any = _biases.made
    dtype = cast_type(query) or query.dtype
    if (id(mask), dtype) not in made:
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        made[id(mask), dtype] = mask, bias
    return made[id(mask), dtype][1]


def is_known_to_take_ours(config: Any) -> bool:
    """Whether a model's attention is PyTorch's, and has been seen to be one that takes masks of ours."""
    found, takes = _looked_at.get(id(config), (None, False))
    is_same = found is not None and found() is config
    return is_same and takes and not has_refused(config) and getattr(config, "_attn_implementation", None) == NAME


def _look_at(module: Any, query: Any, key: Any, value: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """At a call without a mask of ours: what would become of one. Once for a model, in a type that is served."""
    if id(getattr(module, "config", None)) in _looked_at or torch.compiler.is_compiling():
        return
    if (cast_type(query) or query.dtype) in TYPES:
        q, k, v = cast_as_linear(query, key, value)
        given = getattr(module, "sliding_window", None) or 0, kwargs.get("dropout") or 0.0
        _note(module, _refusal(args, kwargs) is None and refusal(q, k, v, *given) is None)


def _note(module: Any, takes: bool) -> None:
    config = getattr(module, "config", None)
    if config is not None and id(config) not in _looked_at:
        key = id(config)
        _looked_at[key] = weakref.ref(config, lambda _: _looked_at.pop(key, None)), takes


_DEVICES = ("cuda",)


def _whole_rows(
    module: Any, query: Any, key: Any, value: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Of a call without a mask q, k and v, if they are of whole rows, causal, that Bastile's kernels attend to
    faster."""
    if torch.compiler.is_compiling() or query.device.type not in _DEVICES or not is_much(query):
        return None
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal) or kwargs.get("dropout"):
        return None
    if query.shape[2] != key.shape[2] or _refusal(args, kwargs) is not None:
        return None
    q, k, v = cast_as_linear(query, key, value)
    is_served = refusal(q, k, v) is None and q.shape[3] == v.shape[3]
    return (q, k, v) if is_served and are_faster_here(q, k, v) else None


def _is_of_one_token(module: Any, query: Any, key: Any, mask: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether these are queries of one token each, as of a text that is generated, with a mask that all heads have in
    common."""
    return (
        isinstance(mask, torch.Tensor)
        and query.shape[2] == 1
        and query.shape[0] == key.shape[0]
        and query.shape[1] == key.shape[1] * getattr(module, "num_key_value_groups", 1)
        and mask.dim() == 4
        and mask.shape[1] == mask.shape[2] == 1
        and mask.shape[3] == key.shape[2]
        and mask.shape[0] in (1, key.shape[0])
        and not kwargs.get("dropout")
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and _refusal(args, kwargs) is None
    )


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float | None) -> torch.Tensor:
    """[B, 1, heads, D]. Such heads as rows of one: keys and values need not be written once for each of them."""
    batch, heads, _, width = q.shape
    rows = q.reshape(batch, k.shape[1], -1, width)
    packed = torch.nn.functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    return packed.reshape(batch, 1, heads, -1)


_WIDE = "its tensors are of float32"
_OF_LAST = "its queries are of the last tokens alone"
#: By which what is registered is known: functools.wraps copies all else.
_OURS = next(each for each in codes(_attends.__code__) if each.co_name == "attend")


def _refusal(args: Any, kwargs: dict[str, Any]) -> str | None:
    if args:
        return "its arguments are given by position"
    if not 0 <= (kwargs.get("dropout") or 0.0) < 1:
        return "it drops all weights"
    if any(kwargs.get(name) is not None for name in ("position_bias", "softcap")):
        return "it adds to scores"
    return None


def _original_mask(mask: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """heads: queries or keys, [B, heads, S, D]."""
    is_captured = heads.is_cuda and torch.cuda.is_current_stream_capturing()
    found = None if is_captured else _originals.get(mask)
    if found is None:
        batch, _, length, _ = heads.shape
        found = seen(_said(mask, length), batch, length)
        if not is_captured:
            _originals[mask] = found
    return found
