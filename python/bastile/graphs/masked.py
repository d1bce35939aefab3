"""Batches of encoders, in which each token sees all others but those that are masked, of ever new lengths: made few.

As those of causal models (bastile.graphs.lengths), but what is behind a batch's own tokens would be seen by them, so it
is masked; and not where the model is called, but where its layers are, for encoders seldom call those themselves."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from bastile.graphs.lengths import Lengths, attentions_of, longer_mask
from bastile.graphs.longer import Longer, are_of_rows
from bastile.graphs.runs import Note
from bastile.models import sdpa
from bastile.ops._common import cast_type
from bastile.ops._segments import of_whole_rows, with_more_behind

MASK, _CAUSAL = "attention_mask", "is_causal"
#: Tensors of each token, and which dimension tokens are.
_OF_TOKENS = {"position_embeddings": 1, "position_ids": 1, "cache_position": 0}
#: What T5's layers make of the first one's table and hand on: of two tokens each, as many as the layers see.
_HANDED_ON = ("position_bias", "encoder_decoder_position_bias")
#: A config's whose tables of these have an entry for every distance.
_BUCKETS = "relative_attention_num_buckets"


class Masks:
    """Of one stack's steps."""

    def __init__(self) -> None:
        self.lengths = Lengths()
        self._names: list[str] = []  # of a layer's parameters
        self._config: Any = None  # of its attention

    @property
    def all_lengths(self) -> tuple[Lengths, ...]:
        return (self.lengths,)

    def of(self, layers: Sequence[Any], args: Any, kwargs: Any) -> Masked | None:
        """How a step is padded whose first layer is called with these; None where it is left as it is."""
        if self.lengths.never or not args or type(args[0]) is not torch.Tensor:
            return None
        if self.lengths.never is None:
            self._names = list(inspect.signature(type(layers[0]).forward).parameters)[1:]
            attentions = attentions_of(layers)
            self._config = getattr(attentions[0], "config", None) if attentions else None
            has_buckets = isinstance(getattr(self._config, _BUCKETS, None), int)
            self.lengths.never = not (
                bool(attentions)
                and MASK in self._names
                and self._are_masked(layers, attentions)
                and are_of_rows(layers, ("Embedding",) if has_buckets else ())
            )
        hidden = args[0]
        is_sdpa = getattr(self._config, "_attn_implementation", None) == "sdpa"
        if self.lengths.never or not is_sdpa or hidden.dim() != 3 or not hidden.numel():
            return None
        return self._padded(hidden, args, kwargs)

    def _are_masked(self, layers: Sequence[Any], attentions: Sequence[Any]) -> bool:
        """Whether what tokens see is what layers' masks say."""
        return not any(module.is_causal for module in attentions)

    def _padded(self, hidden: torch.Tensor, args: Any, kwargs: Any) -> Masked | None:
        rows, length = hidden.shape[:2]
        takes_ours = sdpa.is_known_to_take_ours(self._config) and (cast_type(hidden) or hidden.dtype) in sdpa.TYPES
        found = Masked(rows, length, hidden.device, self._names, takes_ours)
        if not found.takes(args, kwargs):
            return None
        found.to = self.lengths.of(rows, length)
        return found if found.to > length else None


class Masked(Longer):
    def __init__(
        self, batch: int, length: int, device: torch.device, names: Sequence[str], takes_ours: bool = False
    ) -> None:
        """names: of a layer's parameters. takes_ours: whether its attention takes masks of ours (models/sdpa.py)."""
        super().__init__(length, length, 1)
        self._batch, self._device, self._names, self._takes_ours = batch, device, names, takes_ours
        self._none: torch.Tensor | None = None  # in the place of no mask

    def kind(self, asked: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([each for each in asked if each != (MASK, None)])  # no mask becomes one

    def suits(self, note: Note) -> bool:
        return super().suits(note) or _HANDED_ON[0] in self._names

    def takes(self, args: Any, kwargs: Any) -> bool:
        if not args or len(args) > len(self._names):
            return False
        return all(self._is_known(name, value) for name, value in self._named(args, kwargs).items())

    def _named(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """But the hidden states."""
        return {**dict(zip(self._names[1:], args[1:], strict=False)), **kwargs}

    def _is_known(self, name: str, value: Any) -> bool:
        if value is None or type(value) is str:
            return True
        if type(value) is bool:
            return name != _CAUSAL or not value
        if name == MASK and isinstance(value, torch.Tensor) and sdpa.is_ours(value):
            return sdpa.can_be_longer(value)
        if name == MASK:
            shape = (self._batch, 1, self.rows, self.rows)
            return type(value) is torch.Tensor and value.dtype is torch.bool and tuple(value.shape) == shape
        if name in _HANDED_ON:
            return isinstance(value, torch.Tensor) and self.known(value) is value
        if name not in _OF_TOKENS:
            return isinstance(value, torch.Tensor) and not value.dim()
        leaves, dim = value if type(value) in (tuple, list) else [value], _OF_TOKENS[name]
        return all(type(t) is torch.Tensor and t.dim() > dim and t.shape[dim] == self.rows for t in leaves)

    def longer(self, args: Any, kwargs: Any, is_first: bool) -> tuple[Any, Any]:
        hidden = self.hidden(args[0])
        rest = [self._of(name, value) for name, value in zip(self._names[1:], args[1:], strict=False)]
        named = {name: self._of(name, value) for name, value in kwargs.items()}
        for name in self._needed():
            if name not in named and self._names.index(name) >= len(args):
                named[name] = self._of(name, None)
        return (hidden, *rest), named

    def _needed(self) -> tuple[str, ...]:
        """What layers are given though they were called without."""
        return (MASK,)

    def _of(self, name: str, value: Any) -> Any:
        return self._mask(value) if name == MASK else self.of_value(value)

    def _mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Behind are tokens that see all others."""
        found = self._none if mask is None else self.known(mask)
        if found is None:
            found = self._longer_mask(mask)
            if mask is None:
                self._none = found
            else:
                self.keep(mask, found)
        return found

    def _longer_mask(self, mask: torch.Tensor | None) -> torch.Tensor:
        more = self.to - self.rows
        if mask is None and self._takes_ours:
            said = with_more_behind(of_whole_rows(self.rows, causal=False), self._batch, more)
            return sdpa.mask_of(said, self.to, self._device)
        if mask is not None and sdpa.is_ours(mask):
            return sdpa.longer(mask, self._batch, self.rows, more)
        if mask is None:
            mask = torch.ones(self._batch, 1, self.rows, self.rows, dtype=torch.bool, device=self._device)
        return longer_mask(mask, more)

    def padded(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.of_rows(tensor, min(tensor.dim() - 1, 1))
