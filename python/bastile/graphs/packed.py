"""Sequences that stand one behind another, as a batch's images in a tower, of ever new sizes: made few.

Hardly two batches of photographs have as many patches, so a tower would hardly have a graph that comes again. From the
ninth number of rows on, what goes through the layers is padded at its end, to the few numbers that batches of text are
padded to (bastile.graphs.lengths). The padding is sequences of its own, of which the others see nothing; there are as
many sequences as make their number one of few, the last ones empty. Where they begin and end, attention reads on the
device (bastile.models.varlen), so that one graph serves all batches that are padded alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bastile.graphs.lengths import Lengths, power_of_two
from bastile.graphs.longer import Longer, are_of_rows
from bastile.models.chunks import asked, chunks_of, open_up, sent

_BOUNDARIES = "cu_seqlens"
#: Sequences, and rows of the longest, become powers of two from here on.
_LEAST = 8
#: So many rows there may be, if each sequence were as long as all of them: blocks that find nothing to do cost some
#: tens of microseconds then.
_MOST_EMPTY = 1 << 17


class Packs:
    """Of one stack's steps."""

    def __init__(self) -> None:
        self.lengths = Lengths()

    @property
    def all_lengths(self) -> tuple[Lengths, ...]:
        return (self.lengths,)

    def of(self, layers: Sequence[Any], args: Any, kwargs: Any) -> Packed | None:
        """How a step is padded whose first layer is called with these; None where it is left as it is."""
        boundaries = kwargs.get(_BOUNDARIES)
        if boundaries is None or self.lengths.never or not args or type(args[0]) is not torch.Tensor:
            return None
        if self.lengths.never is None:
            self.lengths.never = not are_of_rows(layers)
        rows = _rows_of(args[0])
        if self.lengths.never or not rows or not _are_boundaries(boundaries, rows):
            return None
        to = self.lengths.of(1, rows)
        return Packed(rows, to, args[0].dim() - 2) if to > rows else None


class Packed(Longer):
    def __init__(self, rows: int, to: int, dim: int) -> None:
        super().__init__(rows, to, dim)
        self.longest: list[int] = []  # how long the sequences of the first layer's boundaries may be
        self._ends: list[torch.Tensor] = []

    def kind(self, asked: tuple[Any, ...]) -> tuple[Any, ...]:
        return *asked, tuple(self.longest)

    def takes(self, args: Any, kwargs: Any) -> bool:
        if not args or kwargs.get(_BOUNDARIES) is None:
            return False
        leaves = [(name, leaf) for name, value in kwargs.items() for leaf in tree_leaves(value)]
        leaves += [("", leaf) for leaf in tree_leaves(args[1:])]
        return all(self._is_known(name, leaf) for name, leaf in leaves)

    def _is_known(self, name: str, leaf: Any) -> bool:
        if type(leaf) is int:  # how long the longest sequence is, perhaps
            return False
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return True
        if name == _BOUNDARIES:
            return _are_boundaries(leaf, self.rows)
        return type(leaf) is torch.Tensor and _dim_of(leaf, self.rows) is not None

    def longer(self, args: Any, kwargs: Any, is_first: bool) -> tuple[Any, Any]:
        hidden = self.hidden(args[0])
        named = {name: self.of_value(value) for name, value in kwargs.items() if name != _BOUNDARIES}
        named[_BOUNDARIES] = self._of_sequences(kwargs[_BOUNDARIES], is_first)
        return (hidden, *map(self.of_value, args[1:])), named

    def was_asked(self) -> bool:
        """For boundaries: some attention cannot do without."""
        return any(asked(padded) is not None for padded in self._ends)

    def padded(self, tensor: torch.Tensor) -> torch.Tensor:
        dim = _dim_of(tensor, self.rows)
        assert dim is not None
        return self.of_rows(tensor, dim)

    def _of_sequences(self, boundaries: torch.Tensor, is_first: bool) -> torch.Tensor:
        found = self.known(boundaries)
        if found is None:
            lengths = chunks_of(boundaries).lengths
            # A kernel starts blocks for as many sequences of the greatest length. What a later layer is given is not
            # known when a kind of step is looked up, so that is made for any.
            is_any = not is_first or power_of_two(len(lengths) + 1, _LEAST) * self.to <= _MOST_EMPTY
            longest = self.to if is_any else power_of_two(max(lengths), _LEAST)
            ends = [0, *accumulate(lengths), *range(self.rows + longest, self.to, longest), self.to]
            ends += [self.to] * (power_of_two(len(ends) - 1, _LEAST) + 1 - len(ends))
            found = self.keep(boundaries, sent(torch.tensor(ends, dtype=boundaries.dtype), boundaries.device))
            open_up(found, 0 if is_any else longest)
            self._ends.append(found)
            if is_first:
                self.longest.append(0 if is_any else longest)
        return found


def _are_boundaries(value: Any, rows: int) -> bool:
    """Asks the device, if it has not been asked before."""
    if type(value) is not torch.Tensor or value.dim() != 1 or len(value) < 2 or value.is_floating_point():
        return False
    lengths = chunks_of(value).lengths
    return min(lengths) > 0 and sum(lengths) == rows


def _rows_of(hidden: torch.Tensor) -> int:
    """0: not one behind another."""
    if hidden.dim() == 3 and hidden.shape[0] == 1:
        return hidden.shape[1]
    return hidden.shape[0] if hidden.dim() == 2 else 0


def _dim_of(tensor: torch.Tensor, rows: int) -> int | None:
    """Which of its dimensions the rows are."""
    if tensor.shape[0] == rows:
        return 0
    return 1 if tensor.dim() > 1 and tuple(tensor.shape[:2]) == (1, rows) else None
