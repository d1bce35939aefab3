"""The forward of a model's backbone, in which a batch's padding is no part of it.

Collators pad each batch to its longest row, and layers compute all of it: of rows of all lengths a third to a half is
padding. Where nobody reads what comes of that (models/padding.py), the tokens of all rows go through the layers side by
side in one row, as packed sequences do, each with the position that it had, and each row sees itself alone
(models/masked_attention.py); so do convolutions and recurrences (models/mixers.py). Behind the layers they are put back
where they were, among zeros. Encoders that count positions where they have their layers do so too; of others, as BERT,
that embed tokens first, models/unpadded_stack.py has the layers' part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from bastile.graphs import caches, collected
from bastile.graphs.lengths import (
    OF_EACH_TOKEN,
    ROUTER,
    are_of_tokens,
    asks_for_more,
    most_positions,
)
from bastile.guards import stock_of
from bastile.models import encoder_heads, encoders, padding, sdpa, sentence_pooling, sinks, unpadded_stack
from bastile.models.backbone import backbones
from bastile.models.loading import is_of_sentences
from bastile.models.mask_flow import MASK, goes_to_makers_alone
from bastile.models.masked_attention import MAKERS, encoders_of, hand_masks_to_attention
from bastile.models.mixers import CUTS, IDS, hand_on
from bastile.models.rebind import parameter_names
from bastile.models.side_by_side import SideBySide
from bastile.models.sites import ModelFile, Site, calls
from bastile.models.token_layers import has_begun, known_of, never, side_by_side, without_padding
from bastile.ops._common import in_transform
from bastile.report import Tally

OPERATOR = "padding_free"
_TOKENS, _POSITIONS = ("input_ids", "inputs_embeds"), "position_ids"
#: What makes the masks of a backbone, which leave it without padding.
_MAKERS = (*MAKERS, "create_recurrent_attention_mask")


def sites(file: ModelFile) -> Iterator[Site]:
    if is_of_sentences(file.name):
        yield from sentence_pooling.sites(file)
        return
    causal, both_ways, with_sinks = hand_masks_to_attention(file), encoders_of(file), sinks.backbones_of(file)
    stacks = {cls: list(encoders.stacks(file, cls)) for cls in both_ways}
    yield from _of_backbones(file, causal, stacks, with_sinks)
    for stack in dict.fromkeys(chain.from_iterable(stacks.values())):
        yield file.forward_site(OPERATOR, stack, unpadded_stack.stack_forward)
    if causal or both_ways or with_sinks:
        yield from encoder_heads.sites(file)


def _of_backbones(
    file: ModelFile, causal: tuple[type, ...], stacks: dict[type, list[type]], with_sinks: tuple[type, ...]
) -> Iterator[Site]:
    """stacks: of each encoder what takes hidden states through its layers, if it does not do so itself. with_sinks: of
    causal ones, whose attention is models/sinks.py's."""
    tells = hand_on(file.own_classes())
    for cls in backbones(file):
        forward, where = stock_of(vars(cls)["forward"]), f"{cls.__name__}.forward"
        counts = _POSITIONS in parameter_names(forward) and calls(forward, "arange")
        is_causal = cls in causal or cls in with_sinks
        makers = _MAKERS if is_causal else encoders.MAKERS
        is_served = is_causal or cls in stacks
        if is_served and counts and file.read(cls, goes_to_makers_alone, makers) and tells:
            takes_ours = sinks.is_known_to_take_ours if cls in with_sinks else sdpa.is_known_to_take_ours
            build = partial(unpadded_forward, causal=is_causal, takes_ours=takes_ours)
            yield file.forward_site(OPERATOR, cls, build)
        elif stacks.get(cls):
            continue  # what has its layers leaves out padding
        elif not tells:
            file.unknown.setdefault(where, "has layers that cannot be told where rows begin")
        else:
            file.unknown.setdefault(
                where, "is not known to count positions and to hand its mask to what makes masks alone"
            )


def unpadded_forward(
    tally: Tally,
    original: Callable[..., Any],
    causal: bool = True,
    takes_ours: Callable[[Any], bool] = sdpa.is_known_to_take_ours,
) -> Callable[..., Any]:
    return without_padding(tally, original, partial(_batch, causal=causal, takes_ours=takes_ours), _arguments)


def _batch(
    backbone: nn.Module, given: dict[str, Any], causal: bool, takes_ours: Callable[[Any], bool]
) -> SideBySide | str | None:
    """A batch without its padding; None where it keeps what it has, and why where a user might expect otherwise.
    takes_ours: whether the attention of a config's model is known to be one that can be told of sequences."""
    config, mask = getattr(backbone, "config", None), given.get(MASK)
    tokens = [given[name] for name in _TOKENS if given.get(name) is not None]
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or len(tokens) != 1 or mask.shape != tokens[0].shape[:2]:
        return None
    rows, length = mask.shape
    if backbone in never or not takes_ours(config) or caches.given_in(given) is not None:
        return None
    if in_transform(tokens[0], mask) or (tokens[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    if asks_for_more(given, config, but=ROUTER) or collected.collector() or not _returns_names(given, config):
        return "more is asked of it than its last hidden states"
    if not are_of_tokens(given, rows, length) or any(given.get(name) is not None for name in (IDS, CUTS)):
        return "it is given what is not known to be of single tokens"
    if 0 < most_positions(config) < length:
        return "rows are longer than its positions"
    known = known_of(backbone, causal)
    if not known.serves or not known.mixers.can_be_told():
        return "its layers are not known to see more than one token in what can be told of rows alone"
    if known.has_hooks():
        return "hooks on its modules"
    if not has_begun(backbone):
        return None
    host = padding.on_host_with_labels(mask)
    return side_by_side(backbone, host, tokens[0].device, bool(known.mixers), causal)


def _returns_names(given: dict[str, Any], config: Any) -> bool:
    asked = given.get("return_dict")
    return bool(getattr(config, "return_dict", True) if asked is None else asked)


def _arguments(given: dict[str, Any], batch: SideBySide, _: sdpa.Packed) -> dict[str, Any]:
    of_tokens = [name for name in OF_EACH_TOKEN if given.get(name) is not None and name != MASK]
    found = {name: batch.of(given[name]) for name in of_tokens if name != _POSITIONS}
    positions = given.get(_POSITIONS)
    if positions is None:
        found[_POSITIONS] = batch.positions
    elif positions.dim() == 3:
        found[_POSITIONS] = torch.stack([batch.of(axis) for axis in positions])
    else:
        found[_POSITIONS] = batch.of(positions)
    # A cache has no place for the states of several sequences.
    alone = {**batch.told, "use_cache": False} if batch.told else {}
    return {**given, **found, **alone, MASK: None}
