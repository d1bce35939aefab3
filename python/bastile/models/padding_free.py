"""The forward of a causal model's backbone, in which a batch's padding is no part of it.

Collators pad each batch to its longest row, and layers compute all of it: of rows of all lengths a third to a half is
padding. Where nobody reads what comes of that (models/padding.py), the tokens of all rows go through the layers side by
side in one row, as packed sequences do, each with the position that it had, and each row sees itself alone
(models/masked_attention.py); so do convolutions and recurrences (models/mixers.py). Behind the layers they are put back
where they were, among zeros."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bastile.graphs import caches, collected
from bastile.graphs.lengths import (
    OF_EACH_TOKEN,
    are_of_tokens,
    asks_for_more,
    attentions_of,
    most_positions,
    states_alone,
)
from bastile.graphs.longer import are_of_rows
from bastile.graphs.watch import HOOKS
from bastile.guards import stock_of
from bastile.models import padding, sdpa
from bastile.models.backbone import backbones
from bastile.models.chunks import sent
from bastile.models.graphs import may_have_graphs
from bastile.models.mask_flow import MASK, goes_to_makers_alone
from bastile.models.masked_attention import MAKERS, hand_masks_to_attention
from bastile.models.mixers import CUTS, IDS, hand_on, mixers_of
from bastile.models.rebind import as_keywords, parameter_names
from bastile.models.sites import ModelFile, Site, calls
from bastile.ops._common import in_transform
from bastile.ops._segments import of_sequences
from bastile.ops._valid_rows import gather, scatter
from bastile.report import Tally

OPERATOR = "padding_free"
_TOKENS, _POSITIONS = ("input_ids", "inputs_embeds"), "position_ids"
#: Of a batch, what may be left: side by side longer rows attend at two thirds of the rate that they have by themselves
#: (docs/masked_attention.md); shorter ones hardly notice, and of each new length they would need graphs.
_LARGEST_PART, _LONG_PART, _LONG = 1.0, 0.9, 1024
#: Numbers of tokens are made few: eight between two powers of two, and four where each has graphs of its own.
_STEPS, _STEPS_OF_GRAPHS, _LEAST_STEP = 16, 8, 64
#: Hooks of these packages take activations of any shape, and so do these two, by which embeddings require gradients.
#: (PEFT's others choose adapters by the batch's rows, and NEFTune's noise is by their length.)
_OF_ANY_SHAPE = ("torch.", "accelerate.", "deepspeed.", "bastile.")
_REQUIRES_GRADIENTS = ("make_inputs_require_grads", "make_inputs_require_grad")
#: Modules without others in them that work on each token by itself, by the ends of their names, beside those that
#: graphs know (`are_of_rows`).
_OF_A_TOKEN = ("Experts", "Router", "Gate", "RotaryEmbedding", "NormGated")
#: What makes the masks of a backbone, which leave it without padding.
_MAKERS = (*MAKERS, "create_recurrent_attention_mask")


def sites(file: ModelFile) -> Iterator[Site]:
    served = hand_masks_to_attention(file)
    tells = hand_on(file.own_classes())
    for cls in backbones(file):
        forward, where = stock_of(vars(cls)["forward"]), f"{cls.__name__}.forward"
        counts = _POSITIONS in parameter_names(forward) and calls(forward, "arange")
        if cls in served and counts and file.read(cls, goes_to_makers_alone, _MAKERS) and tells:
            yield file.forward_site(OPERATOR, cls, unpadded_forward)
        elif not tells:
            file.unknown.setdefault(where, "has layers that cannot be told where rows begin")
        else:
            file.unknown.setdefault(
                where, "is not known to count positions and to hand its mask to what makes masks alone"
            )


class _Known:
    """Of one backbone."""

    def __init__(self, backbone: nn.Module) -> None:
        layers = backbone._modules.get("layers")
        found = list(layers) if isinstance(layers, nn.ModuleList) else []
        modules = list(backbone.modules())[1:]
        attentions = attentions_of(found)
        self.mixers = mixers_of(found)
        self.serves = (
            bool(attentions)
            and all(each.is_causal for each in attentions)
            and self.mixers.hand_on
            and are_of_rows(found, _OF_A_TOKEN, self.mixers.parts)
            and not any(map(_is_run_by_another, modules))
        )
        self._hooks = [vars(module)[name] for module in modules for name in HOOKS]

    def has_hooks(self) -> bool:
        return not all(_takes_any_shape(hook) for hooks in self._hooks if hooks for hook in hooks.values())


def _takes_any_shape(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # of a partial
    where, name = (getattr(hook, each, None) or "" for each in ("__module__", "__name__"))
    return f"{where}.".startswith(_OF_ANY_SHAPE) or name in _REQUIRES_GRADIENTS or collected.collects(hook)


def _is_run_by_another(module: nn.Module) -> bool:
    """Whether an object that is none of the modules does what the module's class would, as X-LoRA's, which weighs
    adapters for each place of the batch."""
    return getattr(vars(module).get("forward"), "__self__", module) is not module


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
#: Backbones that a differentiated pass has gone through, with their attention known. Until then those in training keep
#: their padding in other passes too: a policy and its reference without adapters agree to the last bit at first.
_begun: weakref.WeakSet[nn.Module] = weakref.WeakSet()
#: Backbones that turned out to return, or to make of masks, what is not known here.
_never: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Unpadded:
    """The tokens of a batch that are no padding, side by side, and behind them some again, which make their number one
    of few: a sequence of its own, or several, none longer than the batch was."""

    def __init__(
        self,
        mask: torch.Tensor,
        device: torch.device,
        steps: Callable[[int], int] = lambda _: _STEPS,
        tells: bool = False,
    ) -> None:
        """mask: [B, S] of bools, on the host, some of them true. steps: as of `few`, for so many tokens. tells: whether
        others than attentions are to be told where sequences are."""
        self.rows, self.length = mask.shape
        tokens = mask.flatten().nonzero().flatten()
        self.count = len(tokens)
        self.to = few(self.count + 1, steps(self.count))
        behind = torch.arange(self.to - self.count)
        sequences = torch.cat([tokens // self.length, self.rows + behind // self.length])
        is_one = bool((sequences[: self.count] == sequences[0]).all())
        #: Which sequence each token is of, [1, T]. Of an only one, what is behind it is a part that nobody sees: None.
        self.sequences = None if is_one else sequences[None]
        positions = torch.cat([tokens % self.length, behind % self.length])
        again = tokens[behind % self.count]
        cuts = of_sequences(sequences[None]).cuts[0] if tells and not is_one else positions[:0]
        parts = [positions, tokens, again, cuts, sequences if len(cuts) else cuts]
        positions, self._tokens, self._again, cuts, ids = sent(torch.cat(parts), device).split([*map(len, parts)])
        self.positions = positions.unsqueeze(0)
        #: What is to tell others than attentions where sequences are.
        self.told = {IDS: ids[None].int(), CUTS: cuts.int()} if len(cuts) else {}

    def pays(self) -> bool:
        part = _LONG_PART if self.length > _LONG else _LARGEST_PART
        return self.to <= part * self.rows * self.length

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B or 1, S, ...] as [1, T, ...]. Behind come the first tokens again, for whose sake no layer meets anything
        new, as zeros might be; what says of which tokens images are says of none there."""
        whole = tensor.expand(self.rows, *tensor.shape[1:]).flatten(0, 1)
        behind = whole.detach().index_select(0, self._again)
        if tensor.dtype is torch.bool:
            behind.zero_()
        return torch.cat([gather(whole, self._tokens), behind])[None]

    def back(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, T, H] as [B, S, H]."""
        tokens = self._tokens.to(hidden.device)  # another, where a model lies on several
        spread = scatter(hidden[0, : self.count], tokens, self.rows * self.length)
        return spread.unflatten(0, (self.rows, self.length))


def few(count: int, steps: int = _STEPS) -> int:
    """At least so many tokens; more by at most the next power of two over `steps`, or what is missing to 64."""
    step = max(_LEAST_STEP, (1 << (count - 1).bit_length()) // steps)
    return -(-count // step) * step


def unpadded_forward(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    names = parameter_names(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(args) > len(names) or not padding.may_be_left_out(self.training):
            return original(self, *args, **kwargs)
        given = as_keywords(names, args, kwargs)
        batch = _batch(self, given)
        if batch is None:
            return original(self, *args, **kwargs)
        if isinstance(batch, str):
            tally.step_aside(batch, is_usual=True)
            return original(self, *args, **kwargs)
        try:
            with sdpa.packed(batch.sequences, batch.rows * batch.length) as masks:
                result = original(self, **_arguments(given, batch))
        except sdpa.CannotBeTold:
            result = None
        if result is None or not masks.are_made or not _put_back(result, batch):
            _never.add(self)
            return original(self, *args, **kwargs)
        tally.count()
        return result

    return forward


def _batch(backbone: nn.Module, given: dict[str, Any]) -> _Unpadded | str | None:
    """A batch without its padding; None where it keeps what it has, and why where a user might expect otherwise."""
    config, mask = getattr(backbone, "config", None), given.get(MASK)
    tokens = [given[name] for name in _TOKENS if given.get(name) is not None]
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or len(tokens) != 1 or mask.shape != tokens[0].shape[:2]:
        return None
    rows, length = mask.shape
    if backbone in _never or not sdpa.is_known_to_take_ours(config) or caches.given_in(given) is not None:
        return None
    if in_transform(tokens[0], mask) or (tokens[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    if asks_for_more(given, config) or collected.collector() or not _returns_names(given, config):
        return "more is asked of it than its last hidden states"
    if not are_of_tokens(given, rows, length) or any(given.get(name) is not None for name in (IDS, CUTS)):
        return "it is given what is not known to be of single tokens"
    if 0 < most_positions(config) < length:
        return "rows are longer than its positions"
    known = _known.get(backbone)
    if known is None:
        known = _known[backbone] = _Known(backbone)
    if not known.serves or not known.mixers.can_be_told():
        return "its layers are not known to see more than one token in what can be told of rows alone"
    if known.has_hooks():
        return "hooks on its modules"
    if backbone.training and torch.is_grad_enabled():
        _begun.add(backbone)
    elif backbone.training and backbone not in _begun:
        return None
    host = padding.on_host_with_labels(mask)
    if bool(host.all()) or not bool(host.any()) or not padding.is_unread(host, before=True):
        return None
    steps = lambda count: _STEPS_OF_GRAPHS if may_have_graphs(backbone, count) else _STEPS  # noqa: E731
    found = _Unpadded(host, tokens[0].device, steps, bool(known.mixers))
    return found if found.pays() else None


def _returns_names(given: dict[str, Any], config: Any) -> bool:
    asked = given.get("return_dict")
    return bool(getattr(config, "return_dict", True) if asked is None else asked)


def _arguments(given: dict[str, Any], batch: _Unpadded) -> dict[str, Any]:
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


def _put_back(result: Any, batch: _Unpadded) -> bool:
    """False, where the backbone returns what this knows nothing of."""
    found = states_alone(result)
    if found is None:
        return False
    cache = caches.given_in(found)
    if cache is not None:
        caches.leave_unfilled(cache)
    result["last_hidden_state"] = batch.back(found["last_hidden_state"])
    return True
