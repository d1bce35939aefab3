"""Layers in which nothing but attention, and what is told where rows begin, sees more than one token: theirs may stand
side by side."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bastile.graphs import caches, collected
from bastile.graphs.collected import ROUTER_LOGITS
from bastile.graphs.lengths import attentions_of, states_alone
from bastile.graphs.longer import are_of_rows
from bastile.graphs.watch import HOOKS
from bastile.models import padding, sdpa
from bastile.models.changes import Hooks
from bastile.models.graphs import may_have_graphs, wrapped_layers_of
from bastile.models.mixers import mixers_of
from bastile.models.rebind import as_keywords, parameter_names
from bastile.models.side_by_side import STEPS, STEPS_OF_GRAPHS, Numbers, SideBySide, few, pays
from bastile.report import Tally

#: Hooks of these packages take activations of any shape, and so do these two, by which embeddings require gradients.
#: (PEFT's others choose adapters by the batch's rows, and NEFTune's noise is by their length.)
_OF_ANY_SHAPE = ("torch.", "accelerate.", "deepspeed.", "bastile.")
_REQUIRES_GRADIENTS = ("make_inputs_require_grads", "make_inputs_require_grad")
#: Modules without others in them that work on each token by itself, by the ends of their names, beside those that
#: graphs know (`are_of_rows`).
_OF_A_TOKEN = ("RotaryEmbedding", "Experts", "Router", "Gate", "NormGated")
#: In how many tokens at a time an MLP is computed, of which the batch has to be a multiple.
_CHUNKS = "chunk_size_feed_forward"


class Known:
    """Of one backbone, or of what has layers within one."""

    def __init__(self, module: nn.Module, causal: bool, is_backbone: bool) -> None:
        found = wrapped_layers_of(module)
        modules = list(module.modules())[1:]
        attentions = attentions_of(found)
        #: Of the first attention, which knows what attends.
        self.config = getattr(attentions[0], "config", None) if attentions else None
        self.mixers = mixers_of(found)
        self.serves = (
            bool(attentions)
            and all(bool(each.is_causal) is causal for each in attentions)
            and self.mixers.hand_on
            # What has layers within a backbone is told no positions, so nothing in it may ask for them.
            and are_of_rows(found if is_backbone else [module], _OF_A_TOKEN[not is_backbone :], self.mixers.parts)
            and not any(map(_is_run_by_another, modules))
            and not any(getattr(each, _CHUNKS, 0) for each in modules)
        )
        self._hooks = Hooks([vars(module)[name] for module in modules for name in HOOKS])

    def has_hooks(self) -> bool:
        return not all(_takes_any_shape(hook) for hooks in self._hooks.filled() for hook in hooks.values())


def _takes_any_shape(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # of a partial
    where, name = (getattr(hook, each, None) or "" for each in ("__module__", "__name__"))
    return f"{where}.".startswith(_OF_ANY_SHAPE) or name in _REQUIRES_GRADIENTS or collected.collects(hook)


def _is_run_by_another(module: nn.Module) -> bool:
    """Whether an object that is none of the modules does what the module's class would, as X-LoRA's, which weighs
    adapters for each place of the batch."""
    return getattr(vars(module).get("forward"), "__self__", module) is not module


_known: weakref.WeakKeyDictionary[nn.Module, Known] = weakref.WeakKeyDictionary()


def known_of(module: nn.Module, causal: bool, is_backbone: bool = True) -> Known:
    """What is known of its layers, looked at once. causal: as which they are to attend. is_backbone: it is called with
    a batch's tokens, and not with hidden states."""
    found = _known.get(module)
    if found is None:
        found = _known[module] = Known(module, causal, is_backbone)
    return found


#: Backbones that a differentiated pass has gone through, with their attention known. Until then those in training keep
#: their padding in other passes too: a policy and its reference without adapters agree to the last bit at first.
_begun: weakref.WeakSet[nn.Module] = weakref.WeakSet()
#: Backbones that turned out to return, or to make of masks, what is not known here.
never: weakref.WeakSet[nn.Module] = weakref.WeakSet()


_numbers: weakref.WeakKeyDictionary[nn.Module, Numbers] = weakref.WeakKeyDictionary()


#: Of a module and its arguments: its batch without padding; None where that stays, and why where a user might expect
#: otherwise.
BatchOf = Callable[[Any, dict[str, Any]], "SideBySide | str | None"]
#: What it is called with in their place, for such a batch. Who brings its masks says so (`Packed.are_made`).
ArgumentsOf = Callable[[dict[str, Any], SideBySide, sdpa.Packed], dict[str, Any]]


def without_padding(
    tally: Tally, original: Callable[..., Any], batch_of: BatchOf, arguments_of: ArgumentsOf
) -> Callable[..., Any]:
    """A forward that leaves a batch's padding out, and begins again with it where the module makes no masks of ours of
    such a batch or returns what this knows nothing of."""
    names = parameter_names(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(args) > len(names) or not padding.may_be_left_out(self.training):
            return original(self, *args, **kwargs)
        given = as_keywords(names, args, kwargs)
        batch = batch_of(self, given)
        if not isinstance(batch, SideBySide):
            if batch is not None:
                tally.step_aside(batch, is_usual=True)
            return original(self, *args, **kwargs)
        try:
            with sdpa.packed(batch.sequences, batch.rows * batch.length, batch.longest) as packed:
                result = original(self, **arguments_of(given, batch, packed))
        except sdpa.CannotBeTold:
            result = None
        if result is None or not packed.are_made or not put_back(result, batch):
            never.add(self)
            return original(self, *args, **kwargs)
        tally.count()
        return result

    return forward


def has_begun(module: nn.Module) -> bool:
    """Whether a differentiated pass has gone through it, or this is one, if it is in training."""
    if module.training and torch.is_grad_enabled():
        _begun.add(module)
    return not module.training or module in _begun


def has_holes(mask: torch.Tensor) -> bool:
    """Whether a row's tokens, [B, S] of bools, are not in one piece. A window would be of other tokens side by side."""
    begins = mask[:, 1:] & ~mask[:, :-1]
    return bool((begins.sum(1) + mask[:, 0] > 1).any())


def side_by_side(
    module: nn.Module, mask: torch.Tensor, device: torch.device, tells: bool, causal: bool
) -> SideBySide | None:
    """A batch of this mask, which the host has, without its padding; None where that is read, or leaving it out does
    not pay."""
    if bool(mask.all()) or not bool(mask.any()) or not padding.is_unread(mask, before=True) or has_holes(mask):
        return None
    (rows, length), count = mask.shape, int(mask.sum())
    has_graphs = may_have_graphs(module, count)
    to, longest = few(count + 1, STEPS_OF_GRAPHS if has_graphs else STEPS), 0
    if not pays(to, rows, length, causal):
        return None
    if has_graphs:
        numbers = _numbers.setdefault(module, Numbers())
        to, longest = numbers.of(to, rows * length), numbers.longest(length)
    return SideBySide(mask, device, to, tells, causal, longest)


def _of_router(logits: Any, batch: SideBySide) -> Any:
    """[T, E] as [B S, E], or [1, T, E] as [B, S, E]; None for what is neither."""
    if not isinstance(logits, torch.Tensor) or logits.dim() not in (2, 3):
        return None
    rows = logits[None] if logits.dim() == 2 else logits
    if rows.shape[:2] != (1, batch.to):
        return None
    spread = batch.back(rows)
    return spread.flatten(0, 1) if logits.dim() == 2 else spread


def put_back(result: Any, batch: SideBySide) -> bool:
    """False, where the backbone returns what this knows nothing of."""
    found = states_alone(result, ROUTER_LOGITS)
    if found is None:
        return False
    if ROUTER_LOGITS in found:
        of_routers = [_of_router(logits, batch) for logits in found[ROUTER_LOGITS]]
        if any(logits is None for logits in of_routers):
            return False
        result[ROUTER_LOGITS] = tuple(of_routers)
    cache = caches.given_in(found)
    if cache is not None:
        caches.leave_unfilled(cache)
    result["last_hidden_state"] = batch.back(found["last_hidden_state"])
    return True
