"""Lengths of batches that vary, made few.

Where each batch is as long as its longest sequence, hardly a length comes twice, and graphs of none pay; and for each
new one libraries choose and build kernels anew, some 100 ms on an H200. So what goes through the layers is padded at
its end, to one of four lengths between powers of two. In a causal model no token sees what comes behind it: the results
of its own tokens are the same but for the order of sums, and the others' are cut off before anyone sees them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bastile.graphs import caches
from bastile.graphs.collected import ROUTER_LOGITS
from bastile.host_copies import on_host, remember
from bastile.models.forms import codes
from bastile.models.mixers import CUTS, IDS

#: So many different lengths must have come before any is padded. Fewer have a graph each, and the very bits of steps
#: without.
VARIES = 9
_LEAST_STEP = 16
_TOKENS = ("input_ids", "inputs_embeds")
_MASK = "attention_mask"
#: What is a token's own, and its dimensions. Labels go through to the layers, where nobody reads them.
OF_EACH_TOKEN = {
    "input_ids": 2,
    "inputs_embeds": 3,
    _MASK: 2,
    "position_ids": 2,
    "visual_pos_masks": 2,
    "per_layer_inputs": 4,
    "labels": 2,
    IDS: 2,
}
#: What they are behind the batch's own, where it is not zero.
_BEHIND = {"labels": -100}
#: What a batch's images bring, whatever its length: Qwen3-VL adds it up where visual_pos_masks says.
_OF_IMAGES = "deepstack_visual_embeds"
#: Makers of masks that let no token see what comes behind it; the last is of layers with a state that goes from one
#: token to the next.
_MASKS = frozenset(
    {
        "create_causal_mask",
        "create_sliding_window_causal_mask",
        "create_chunked_causal_mask",
        "create_recurrent_attention_mask",
    }
)
ROUTER = f"output_{ROUTER_LOGITS}"
_ASKS = ("output_hidden_states", "output_attentions", ROUTER)


def padded(length: int) -> int:
    """At most a quarter more, on average a tenth."""
    step = max(_LEAST_STEP, 1 << (length - 1).bit_length() >> 3)
    return -(-length // step) * step


def power_of_two(count: int, least: int) -> int:
    """The next one, where padding to one of four between two of them would still make too many kinds."""
    return max(least, 1 << (count - 1).bit_length())


class Lengths:
    """Of one backbone's batches."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._too_many: float = torch.inf  # so many tokens keep the device busy without graphs
        #: Whether none may be padded, for tokens see what comes behind them, or the model returns what cannot be cut
        #: off. None: that has not been looked at.
        self.never: bool | None = None

    @property
    def vary(self) -> bool:
        return len(self._seen) == VARIES

    def do_not_pay(self, tokens: int) -> None:
        """Graphs of so many tokens, nor of more."""
        self._too_many = min(self._too_many, tokens)

    def may_pay(self, tokens: int) -> bool:
        return tokens < self._too_many

    def of(self, rows: int, length: int) -> int:
        """To which such a batch is padded; its own length where it is not."""
        if not self.vary:
            self._seen.add(length)
        to = padded(length)
        return to if self.vary and not self.never and self.may_pay(rows * to) else length


def is_causal(forward: Callable[..., Any], layers: Sequence[nn.Module]) -> bool:
    """Whether a backbone lets no token see what comes behind it, as far as its code and its layers say."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    # Of functions within, too: some models make a mask when a layer first wants it.
    names = set() if code is None else {name for each in codes(code) for name in each.co_names}
    masks = {name for name in names if name.startswith("create_") and name.endswith("_mask")}
    attentions = attentions_of(layers)
    return bool(masks) and masks <= _MASKS and bool(attentions) and all(module.is_causal for module in attentions)


def attentions_of(layers: Sequence[nn.Module]) -> list[Any]:
    """What in layers says whether it is causal."""
    return [module for layer in layers for module in layer.modules() if hasattr(module, "is_causal")]


def lengthened(given: dict[str, Any], config: Any, lengths: Lengths) -> tuple[dict[str, Any], int] | None:
    """A backbone's arguments for a padded batch, and the length that it had; None where it is left as it is."""
    tokens = [given[name] for name in _TOKENS if given.get(name) is not None]
    if len(tokens) != 1 or not isinstance(tokens[0], torch.Tensor) or tokens[0].dim() < 2:
        return None
    rows, length = tokens[0].shape[:2]
    if not length or asks_for_more(given, config):
        return None
    if not are_of_tokens(given, rows, length):
        return None
    to = lengths.of(rows, length)
    if to == length or to > most_positions(config):
        return None
    longer = {n: _longer(n, given[n], to - length) for n in OF_EACH_TOKEN if given.get(n) is not None}
    for name, tensor in longer.items():
        host = on_host(given[name])
        if host is not None:
            remember(tensor, _longer(name, host, to - length))
    if given.get(CUTS) is not None:  # what is behind is of the last one
        longer[CUTS] = given[CUTS].masked_fill(given[CUTS] == length, to)
    return {**given, **longer}, length


def most_positions(config: Any) -> float:
    """Behind these a table of positions ends, or rotary embeddings look at how long the batch is."""
    scaling = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    own = [getattr(config, name, None) for name in ("max_position_embeddings", "original_max_position_embeddings")]
    own += [one.get("original_max_position_embeddings") for one in scaling if isinstance(one, dict)]
    for one in scaling:  # of a model with several kinds of layers, a dictionary of each
        values = one.values() if isinstance(one, dict) else ()
        own += [each.get("original_max_position_embeddings") for each in values if isinstance(each, dict)]
    return min((most for most in own if isinstance(most, int)), default=0)


def asks_for_more(given: dict[str, Any], config: Any, but: str | None = None) -> bool:
    """Whether a backbone is to return what single layers have made; but: other than this."""
    return any(asks_for(name, given, config) for name in _ASKS if name != but)


def asks_for(name: str, given: dict[str, Any], config: Any) -> bool:
    """Whether a call with these arguments asks for what is called so, or else the configuration does."""
    here = given.get(name)
    return bool(getattr(config, name, False) if here is None else here)


def are_of_tokens(given: dict[str, Any], rows: int, length: int) -> bool:
    """Whether a backbone is given nothing but what is known to be of each token of such a batch, or of none."""
    for name, value in given.items():
        if name in OF_EACH_TOKEN:
            if value is not None and not _is_of_each_token(name, value, rows, length):
                return False
        elif name == CUTS and value is not None:
            if rows != 1 or given.get(IDS) is None:
                return False
        elif name != _OF_IMAGES and not _is_of_the_batch(value):
            return False
    return True


def _is_of_each_token(name: str, value: Any, rows: int, length: int) -> bool:
    """Positions: of each axis, too, as models of images have them. Masks: also those that were made before, for each
    kind of layers."""
    if name == _MASK and isinstance(value, dict):
        return all(mask is None or _is_made(mask, length) for mask in value.values())
    if type(value) is not torch.Tensor:
        return False
    shape = tuple(value.shape[1:] if name == "position_ids" and value.dim() == 3 else value.shape)
    return len(shape) == OF_EACH_TOKEN[name] and shape[0] in (1, rows) and shape[1] == length


def _is_made(mask: Any, length: int) -> bool:
    return type(mask) is torch.Tensor and mask.dim() == 4 and tuple(mask.shape[2:]) == (length, length)


def _is_of_the_batch(value: Any) -> bool:
    """Whether an argument has nothing of single tokens. Zero is all of them, where it says how many to keep."""
    if isinstance(value, torch.Tensor):
        return not value.dim()
    return value is None or isinstance(value, (bool, str)) or (type(value) is int and value == 0)


def _longer(name: str, tensor: Any, by: int) -> Any:
    """Tokens that are seen by nobody but by each other. A mask of ones stays one, for which kernels need no mask, and
    behind padding is more of it."""
    if isinstance(tensor, dict):
        return {kind: None if mask is None else longer_mask(mask, by) for kind, mask in tensor.items()}
    if name == "position_ids":
        behind = torch.arange(1, by + 1, device=tensor.device, dtype=tensor.dtype)
        return torch.cat((tensor, tensor[..., -1:] + behind), -1)
    if name == _MASK:
        return torch.cat((tensor, tensor.all().to(tensor.dtype).expand(len(tensor), by)), -1)
    if name == IDS:
        return torch.cat((tensor, tensor[..., -1:].expand(-1, by)), -1)
    last = [0] * (2 * (tensor.dim() - 2))
    return nn.functional.pad(tensor, [*last, 0, by], value=_BEHIND.get(name, 0))


def longer_mask(mask: torch.Tensor, by: int) -> torch.Tensor:
    """One that was made before: of bools, or of what is added to scores."""
    seen, unseen = (True, False) if mask.dtype is torch.bool else (0.0, torch.finfo(mask.dtype).min)
    return nn.functional.pad(nn.functional.pad(mask, [0, by], value=unseen), [0, 0, 0, by], value=seen)


def states_alone(result: Any, *more: str) -> dict[str, Any] | None:
    """What a backbone returns, where that is its last hidden states, and a cache perhaps, or these; else None."""
    found = {name: value for name, value in result.items() if value is not None} if hasattr(result, "items") else {}
    is_known = "last_hidden_state" in found and not set(found) - {"last_hidden_state", *caches.NAMES, *more}
    return found if is_known else None


def shortened(result: Any, length: int) -> bool:
    """Cuts off what a backbone returns of the padding. False, where it returns what this knows nothing of."""
    found = states_alone(result)
    if found is None:
        return False
    cache = caches.given_in(found)
    states = found["last_hidden_state"]
    if cache is not None and not _is_cut(cache, states.shape[1] - length):
        return False
    result["last_hidden_state"] = states[:, :length]
    return True


def _is_cut(cache: Any, by: int) -> bool:
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if type(cache) is not DynamicCache:
        return False
    if caches.is_unfilled(cache):
        return True
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        cache.crop(-by)
    else:  # a window's keys that the padding has pushed out are gone
        caches.leave_unfilled(cache)
    return True
