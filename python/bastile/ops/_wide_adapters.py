"""Adapters of float32 beside an input of bfloat16, outside of autocast: PEFT's beside a model that is loaded in
bfloat16 and trained as it is. PEFT computes them in float32, so a result or gradient that is kept in float32, as A's
and B's are, must not be off by bfloat16's rounding.

Each product here has one large factor, which is of bfloat16, and a thin one of float32. On a GPU the thin one is cut
into three pieces of bfloat16, which together are its 24 bits, and the products of the pieces, side by side in one
product of tensor cores, are summed in float32: as exact as float32's own product, and of three times the rank, where
that takes thirty times as long. What is added to a result or to dx within a large product is rounded with that, so
there the other thin factor is rounded to one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bastile.ops import low_rank
from bastile.ops._adapted import MOST_RANK, B, Found, Group, Layer, has_float32_sums, is_one_product, product
from bastile.ops._common import is_batched
from bastile.ops.dropout import drop

_PIECES = 3


def group_of(
    layers: Sequence[Layer],
    tensors: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
    seeds: Sequence[torch.Tensor | None],
    rounded: Sequence[torch.Tensor] | None = None,
) -> Group:
    """The layers of one input, as their adapters are to be computed."""
    kind = WideGroup if any([layer.is_wide for layer in layers]) else Group
    return kind(layers, tensors, dtype, seeds, rounded)


def are_wide(x: torch.Tensor, *adapters: torch.Tensor | None) -> bool:
    """Whether adapters beside this input are computed so, outside of autocast. Not beside float16, whose pieces would
    be too small for its exponent."""
    return (
        x.dtype is torch.bfloat16
        and any([t is not None and t.dtype is torch.float32 for t in adapters])
        and not torch.is_autocast_enabled(x.device.type)
    )


class WideGroup(Group):
    """As Group; thin results and their gradients are [rows, rank] in float32. `rounded` are A's and B's pieces: of all
    A's [3 rank, K], and of each B [N, 3 r]; where there is no such product, A's and B's in float32."""

    is_wide = True

    @property
    def _has_pieces(self) -> bool:
        return any([b is not None and has_float32_sums(b) for b in self.b])

    def _rounded(self) -> list[torch.Tensor]:
        if not self.adapted:
            return []
        of_a, of_b = ([t.float() for t in each if t is not None] for each in (self.a, self.b))
        all_a = of_a[0] if len(of_a) == 1 else torch.cat(of_a)
        return [_pieces(all_a, 0), *[_pieces(b, 1) for b in of_b]] if self._has_pieces else [all_a, *of_b]

    def new_thin(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.new_empty(rows.shape[0], self.rank, dtype=torch.float32)

    def thin(self, rows: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor | None:
        if not self.adapted:
            return None
        if not self.drops:
            return self._by_wide(rows, self.rounded[0].t(), into)
        thin = self.new_thin(rows) if into is None else into
        for i in self.adapted:
            mine = thin[:, self.columns[i]]
            self._by_wide(self.dropped(i, rows), self._of_a(i).t(), mine)
            self._divide(i, mine)
        return thin

    def dropped(self, i: int, rows: torch.Tensor) -> torch.Tensor:
        """Its elements as they are, where they stay: what they are divided by, their product is."""
        seed = self.seeds[i]
        if seed is None:
            return rows
        found = drop(rows, seed, self.layers[i].dropout)
        return torch.where(found == 0, found, rows)

    def _divide(self, i: int, made: torch.Tensor) -> None:
        if self.seeds[i] is not None:
            made.div_(1 - self.layers[i].dropout)

    def _of_a(self, i: int) -> torch.Tensor:
        """What `rounded` has of a layer's A."""
        if not self._has_pieces:
            return self.rounded[0][self.columns[i]]
        return self.rounded[0].view(_PIECES, self.rank, -1)[:, self.columns[i]].flatten(0, 1)

    def _by_wide(self, x: torch.Tensor, across: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, K], of bfloat16, by what `rounded` has of a matrix [K, n], to float32's accuracy."""
        if not self._has_pieces:
            return torch.mm(x.float(), across) if into is None else into.copy_(torch.mm(x.float(), across))
        return _summed(product(torch.float32, x, across), 1, into)

    def _fill_with(
        self, y: torch.Tensor, i: int, rows: torch.Tensor, mine: torch.Tensor, b: torch.Tensor, weight: Any
    ) -> None:
        of_b: Any = self.b[i]
        scale, rank = self.layers[i].scale, of_b.shape[1]
        pieces = min(_PIECES, MOST_RANK // rank)
        if self._has_pieces and pieces > 0 and is_one_product(rows, weight, of_b) and low_rank.fills(y):
            within = b[:, : pieces * rank].contiguous() if pieces > 1 else of_b.to(self.dtype)
            low_rank.linear_into(rows, weight, mine.to(self.dtype).repeat(1, pieces), within, self.biases[i], y, scale)
            return
        self._fill_alone(y, i, rows, weight)
        y.copy_(torch.add(y, mine @ of_b.t().float(), alpha=scale))

    def _through(
        self, found: Found, i: int, dy: torch.Tensor, b: torch.Tensor, g: torch.Tensor, thin: torch.Tensor | None
    ) -> None:
        self._by_wide(dy, b, g)
        if self.layers[i].scale != 1:
            g.mul_(self.layers[i].scale)
        self.add_gradient_of_b(found, i, dy, thin)

    def add_gradient_of_b(self, found: Found, i: int, dy: torch.Tensor, thin: torch.Tensor | None) -> None:
        if found.wants(i, B) and thin is not None:
            mine = self._mine(thin, i)
            made = self._by_wide(dy.t(), _pieces(mine, 1) if self._has_pieces else mine)
            self.add(found, i, B, made.mul_(self.layers[i].scale))

    def _gradient_of_a(
        self, dtype: torch.dtype, g: torch.Tensor, rows: torch.Tensor, i: int | None = None
    ) -> torch.Tensor:
        if i is not None:
            rows = self.dropped(i, rows)
        has = self._has_pieces
        made = _summed(product(torch.float32, _pieces(g, 1).t(), rows), 0) if has else g.t() @ rows.float()
        if i is not None:
            self._divide(i, made)
        return made.to(dtype)

    def _within_dx(self, g: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if g is None or not self._has_pieces:
            return super()._within_dx(g)
        return g.to(self.dtype).repeat(1, _PIECES), self.rounded[0]

    def _adapters_dx(self, g: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        of_g, all_a = self._within_dx(g)
        made: Any = torch.mm(of_g, all_a).to(self.dtype)  # type: ignore[arg-type]
        return made if into is None else into.copy_(made)

    def _adapter_dx(self, i: int, g: torch.Tensor) -> torch.Tensor:
        of_a: Any = self.a[i]
        dtype = self.dtype if self._has_pieces else torch.float32
        return (g.to(dtype) @ of_a.to(dtype)).to(self.dtype)


def _pieces(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    """A matrix of float32 as three of bfloat16, whose sum it is, along this dimension. Each is the upper half of what
    the ones before have left, as it lies in memory."""
    rest, found = matrix.contiguous(), []
    for i in range(_PIECES):
        found.append(rest.view(torch.bfloat16)[:, 1::2])
        if i + 1 < _PIECES:
            rest = rest - found[-1]
    return torch.cat(found, dim)


def _summed(pieces: torch.Tensor, dim: int, into: torch.Tensor | None = None) -> torch.Tensor:
    """What the products with three pieces, along this dimension, are the parts of."""
    apart = pieces.unflatten(dim, (_PIECES, -1))
    if into is None or is_batched(pieces):
        return apart.sum(dim) if into is None else into.copy_(apart.sum(dim))
    return torch.sum(apart, dim, out=into)
