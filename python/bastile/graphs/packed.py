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
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from bastile.graphs.between import Between
from bastile.graphs.lengths import Lengths
from bastile.graphs.returned import hidden_of
from bastile.models.chunks import asked, chunks_of, open_up, sent

_BOUNDARIES = "cu_seqlens"
#: Sequences, and rows of the longest, become powers of two from here on.
_LEAST = 8
#: So many rows there may be, if each sequence were as long as all of them: blocks that find nothing to do cost some
#: tens of microseconds then.
_MOST_EMPTY = 1 << 17
#: Modules without others in them, by where they are defined: each row of theirs is of one row.
_OF_ROWS = (
    "torch.nn.modules.linear.",
    "torch.nn.modules.activation.",
    "torch.nn.modules.dropout.",
    "torch.nn.modules.container.",
    "transformers.activations.",
    "peft.",
    "bitsandbytes.",
    "torchao.",
)


class Packs:
    """Of one stack's steps."""

    def __init__(self) -> None:
        self.lengths = Lengths()

    def of(self, layers: Sequence[Any], args: Any, kwargs: Any) -> Packed | None:
        """How a step is padded whose first layer is called with these; None where it is left as it is."""
        boundaries = kwargs.get(_BOUNDARIES)
        if boundaries is None or self.lengths.never or not args or type(args[0]) is not torch.Tensor:
            return None
        if self.lengths.never is None:
            self.lengths.never = not all(map(_is_of_rows, layers))
        rows = _rows_of(args[0])
        if self.lengths.never or not rows or not _are_boundaries(boundaries, rows):
            return None
        to = self.lengths.of(1, rows)
        return Packed(rows, to) if to > rows else None

    def give_up(self) -> None:
        self.lengths.never = True


class Packed:
    """One step's."""

    def __init__(self, rows: int, to: int) -> None:
        self.rows, self.to = rows, to
        self.longest: list[int] = []  # how long the sequences of the first layer's boundaries may be
        self._bounds: list[torch.Tensor] = []
        self._longer: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}  # by number: what, its version, and padded
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._given_out: Any = None
        self._inner: Any = None  # what that stands for

    def takes(self, args: Any, kwargs: Any) -> bool:
        """Whether a layer is given nothing else than this knows to pad."""
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
        """The arguments of a layer."""
        hidden = self._inner if args[0] is self._given_out else self._of_rows(args[0])
        named = {name: self._of_value(value) for name, value in kwargs.items() if name != _BOUNDARIES}
        named[_BOUNDARIES] = self._of_sequences(kwargs[_BOUNDARIES], is_first)
        return (hidden, *map(self._of_value, args[1:])), named

    def cut(self, output: Any, is_last: bool) -> Any:
        """What a layer returns, without the padding. The next layer gets what it was before."""
        self._inner = inner = hidden_of(output)
        if is_last:
            found = inner.narrow(
                _rows_at(inner), 0, self.rows
            ).clone()  # whoever keeps it is not to keep a graph's memory
        elif type(inner) is Between:
            found = Between.of(lambda: _seen(inner).narrow(_rows_at(_seen(inner)), 0, self.rows))
        else:
            found = inner.narrow(_rows_at(inner), 0, self.rows)
        self._given_out = found
        return found if inner is output else type(output)((found, *output[1:]))

    def was_asked(self) -> bool:
        """Whether the host has asked for boundaries: some attention cannot do without."""
        return any(asked(padded) is not None for padded in self._bounds)

    def _of_value(self, value: Any) -> Any:
        """The same object for the same: so it is seen to have come before."""
        if type(value) not in (tuple, list, dict):
            return self._of_rows(value)
        was, found = self._containers.get(id(value), (None, None))
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if was is not value or any(self._of_rows(leaf) is not one for leaf, one in zip(leaves, found[0], strict=True)):
            made = tree_map(self._of_rows, value)
            found = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)], made
            self._containers[id(value)] = value, found
        return found[1]

    def _of_rows(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            return tensor
        found = self._known(tensor)
        if found is None:
            dim = _dim_of(tensor, self.rows)
            assert dim is not None
            behind = [0, 0] * (tensor.dim() - 1 - dim) + [0, self.to - self.rows]
            found = self._keep(tensor, nn.functional.pad(tensor, behind))
        return found

    def _of_sequences(self, boundaries: torch.Tensor, is_first: bool) -> torch.Tensor:
        found = self._known(boundaries)
        if found is None:
            lengths = chunks_of(boundaries).lengths
            # A kernel starts blocks for as many sequences of the greatest length. What a later layer is given is not
            # known when a kind of step is looked up, so that is made for any.
            is_any = not is_first or _power(len(lengths) + 1) * self.to <= _MOST_EMPTY
            longest = self.to if is_any else _power(max(lengths))
            ends = [0, *accumulate(lengths), *range(self.rows + longest, self.to, longest), self.to]
            ends += [self.to] * (_power(len(ends) - 1) + 1 - len(ends))
            found = self._keep(boundaries, sent(torch.tensor(ends, dtype=boundaries.dtype), boundaries.device))
            open_up(found, 0 if is_any else longest)
            self._bounds.append(found)
            if is_first:
                self.longest.append(0 if is_any else longest)
        return found

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        was, version, found = self._longer.get(id(tensor), (None, 0, None))
        return found if was is tensor and version == tensor._version else None

    def _keep(self, tensor: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        self._longer[id(tensor)] = tensor, tensor._version, padded
        return padded


def _is_of_rows(layer: Any) -> bool:
    """Whether nothing in a layer but its attention, which is told the boundaries, has to do with more than one row at a
    time, as far as its modules say."""
    modules = list(layer.modules())
    leaves = [type(module) for module in modules if not any(True for _ in module.children())]
    known = [cls.__name__.endswith("Norm") or f"{cls.__module__}.".startswith(_OF_ROWS) for cls in leaves]
    return all(known) and not any(isinstance(module, nn.MultiheadAttention) for module in modules)


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


def _rows_at(hidden: torch.Tensor) -> int:
    return hidden.dim() - 2


def _dim_of(tensor: torch.Tensor, rows: int) -> int | None:
    """Which of its dimensions the rows are."""
    if tensor.shape[0] == rows:
        return 0
    return 1 if tensor.dim() > 1 and tuple(tensor.shape[:2]) == (1, rows) else None


def _power(count: int) -> int:
    return max(_LEAST, 1 << (count - 1).bit_length())


def _seen(between: Between) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return between.seen()
