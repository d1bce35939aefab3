"""Batches of decoders that see the states of an encoder, of ever new lengths: made few.

A decoder's own tokens see none that come behind them, so what stands behind a batch's own needs no mask. What the
encoder has read may be of ever new lengths, too: then it is padded beneath a mask. Two lengths that vary make many
pairs, so both become powers of two there. Sound, of which Whisper always hears 30 seconds, stays as it is, and
transcripts become one of four lengths between powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from bastile.graphs import caches
from bastile.graphs.lengths import Lengths, attentions_of, power_of_two
from bastile.graphs.masked import Masked, Masks

_STATES, _STATES_MASK = "encoder_hidden_states", "encoder_attention_mask"
_LEAST = 16


class Decoders(Masks):
    """Of one stack's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.sources = Lengths()  # of what the encoder has read

    @property
    def all_lengths(self) -> tuple[Lengths, ...]:
        return self.lengths, self.sources

    def _are_masked(self, layers: Sequence[Any], attentions: Sequence[Any]) -> bool:
        """One attention of a layer is causal, another one sees the encoder's states."""
        each = [[module.is_causal for module in attentions_of([layer])] for layer in layers]
        return {_STATES, _STATES_MASK} <= set(self._names) and all(sorted(kinds) == [False, True] for kinds in each)

    def _padded(self, hidden: torch.Tensor, args: Any, kwargs: Any) -> Masked | None:
        rows, length = hidden.shape[:2]
        found = Decoded(rows, length, hidden.device, self._names)
        if not found.takes(args, kwargs):
            return None
        found.to, found.to_states = self.lengths.of(rows, length), self.sources.of(rows, found.states)
        if self.sources.vary and not self.lengths.never:
            found.to_states = power_of_two(found.states, _LEAST)
            if found.to > length:
                found.to = power_of_two(length, _LEAST)
        return found if found.to > length or found.to_states > found.states else None


class Decoded(Masked):
    def __init__(self, batch: int, length: int, device: torch.device, names: Sequence[str]) -> None:
        super().__init__(batch, length, device, names)
        self.states = self.to_states = 0  # of the encoder, how many, and what they become
        self._cache: Any = None  # that nobody reads
        self._unmasked: torch.Tensor | None = None  # in the place of no mask of the encoder's states

    def kind(self, asked: tuple[Any, ...]) -> tuple[Any, ...]:
        none = (_STATES_MASK, None) if self.to_states > self.states else None
        return tuple([each for each in asked if each != none])

    def takes(self, args: Any, kwargs: Any) -> bool:
        states = self._named(args, kwargs).get(_STATES)
        if type(states) is not torch.Tensor or states.dim() != 3 or len(states) != self._batch:
            return False
        if not self.states:
            self.states = self.to_states = states.shape[1]
        return states.shape[1] == self.states and super().takes(args, kwargs)

    def _is_known(self, name: str, value: Any) -> bool:
        if name == _STATES:
            return True
        if name == _STATES_MASK and value is not None:
            shapes = [(self._batch, 1, rows, self.states) for rows in (1, self.rows)]
            return type(value) is torch.Tensor and value.dtype is torch.bool and tuple(value.shape) in shapes
        if name in caches.NAMES and value is not None:
            if self._cache is None and caches.is_new(value):
                self._cache = value
            return value is self._cache
        return super()._is_known(name, value)

    def _needed(self) -> tuple[str, ...]:
        return (_STATES_MASK,)

    def _of(self, name: str, value: Any) -> Any:
        if name == _STATES:
            return self._more_states(value)
        if name == _STATES_MASK:
            return self._states_mask(value)
        return value if name in caches.NAMES else super()._of(name, value)

    def _mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        return None if mask is None else super()._mask(mask)

    def _more_states(self, states: torch.Tensor) -> torch.Tensor:
        if self.to_states == self.states:
            return states
        found = self.known(states)
        return self.keep(states, pad(states, [0, 0, 0, self.to_states - self.states])) if found is None else found

    def _states_mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Nobody sees the states behind but the tokens behind, which see all."""
        behind = self.to_states - self.states
        if mask is None and not behind:
            return None
        found = self._unmasked if mask is None else self.known(mask)
        if found is not None:
            return found
        if mask is None:
            seen = torch.arange(self.to_states, device=self._device) < self.states
            self._unmasked = seen.expand(self._batch, 1, self.to, self.to_states).contiguous()
            return self._unmasked
        more = pad(mask, [0, behind], value=False)
        return self.keep(mask, pad(more, [0, 0, 0, self.to - self.rows], value=True) if mask.shape[2] > 1 else more)
