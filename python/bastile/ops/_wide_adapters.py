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
from torch.compiler import is_compiling

from bastile.ops import low_rank
from bastile.ops._adapted import _HAS_OUT_DTYPE, MOST_RANK, A, B, Found, Group, Layer, is_one_product
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
    return x.dtype is torch.bfloat16 and any([t is not None and t.dtype is torch.float32 for t in adapters])


def has_product(matrix: torch.Tensor) -> bool:
    """Whether PyTorch has a product of bfloat16 here whose result is in float32, and the compiler is not to choose."""
    return matrix.is_cuda and _HAS_OUT_DTYPE and not is_compiling()


def product_of_pieces(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


class WideGroup(Group):
    """As Group; thin results and their gradients are [rows, rank] in float32. `rounded` are A's and B's pieces: of all
    A's [3 rank, K], and of each B [N, 3 r]; where there is no such product, A's and B's in float32."""

    is_wide = True

    @property
    def _has_pieces(self) -> bool:
        return any([b is not None and has_product(b) for b in self.b])

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
            if self._has_pieces:
                self._by_wide(self.dropped(i, rows), self._of_a(i).t(), mine)
            else:
                mine.copy_(self.dropped(i, rows).float() @ self.rounded[0][self.columns[i]].t())
            if self.seeds[i] is not None:
                mine.div_(1 - self.layers[i].dropout)
        return thin

    def dropped(self, i: int, rows: torch.Tensor) -> torch.Tensor:
        """Its elements as they are, where they stay: what they are divided by, their product is."""
        seed = self.seeds[i]
        if seed is None:
            return rows
        found = drop(rows, seed, self.layers[i].dropout)
        return torch.where(found == 0, found, rows)

    def _of_a(self, i: int) -> torch.Tensor:
        """A layer's pieces of all A's."""
        return self.rounded[0].view(_PIECES, self.rank, -1)[:, self.columns[i]].flatten(0, 1)

    def _by_wide(self, x: torch.Tensor, across: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, K], of bfloat16, by what `rounded` has of a matrix [K, n], to float32's accuracy."""
        if not self._has_pieces:
            return torch.mm(x.float(), across) if into is None else into.copy_(torch.mm(x.float(), across))
        side_by_side = product_of_pieces(x, across)
        return _summed(side_by_side, 1, into)

    def _fill(
        self,
        y: torch.Tensor,
        i: int,
        rows: torch.Tensor,
        thin: torch.Tensor | None,
        b: torch.Tensor | None,
        weight: Any,
    ) -> None:
        if thin is None or b is None:
            super()._fill(y, i, rows, None, None, weight)
            return
        of_b: Any = self.b[i]
        mine, scale, rank = self._mine(thin, i), self.layers[i].scale, of_b.shape[1]
        pieces = min(_PIECES, MOST_RANK // rank)
        if self._has_pieces and pieces > 0 and is_one_product(rows, weight, of_b) and low_rank.fills(y):
            within = b[:, : pieces * rank].contiguous() if pieces > 1 else of_b.to(self.dtype)
            low_rank.linear_into(rows, weight, mine.to(self.dtype).repeat(1, pieces), within, self.biases[i], y, scale)
            return
        super()._fill(y, i, rows, None, None, weight)
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

    def add_gradients_of_a(
        self, found: Found, gradients: Sequence[torch.Tensor | None], g: torch.Tensor | None, rows: Any
    ) -> None:
        which = [i for i in self.adapted if found.wants(i, A) and gradients[i] is not None]
        if not which or g is None:
            return
        if self.drops:
            for i in which:
                made = self._gradient_of_a(self._mine(g, i), self.dropped(i, rows))
                if self.seeds[i] is not None:
                    made = made.div_(1 - self.layers[i].dropout)
                self.add(found, i, A, made)
            return
        together = self._gradient_of_a(g, rows)
        for i in which:
            self.add(found, i, A, together[self.columns[i]])

    def _gradient_of_a(self, g: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if not self._has_pieces:
            return g.t() @ rows.float()
        return _summed(product_of_pieces(_pieces(g, 1).t(), rows), 0)

    def _within_dx(self, g: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if g is None or not self._has_pieces:
            return g, None if g is None else self.rounded[0]
        return g.to(self.dtype).repeat(1, _PIECES), self.rounded[0]

    def _adapters_input_gradient(
        self, gradients: Sequence[torch.Tensor | None], g: torch.Tensor, into: torch.Tensor | None
    ) -> torch.Tensor | None:
        if not self.drops:
            of_g, all_a = self._within_dx(g)
            made: Any = torch.mm(of_g, all_a).to(self.dtype)  # type: ignore[arg-type]
            return made if into is None else into.copy_(made)
        dx = None
        for i in self.adapted:
            if gradients[i] is not None:
                of_a: Any = self.a[i]
                mine = self._mine(g, i)
                part = (
                    mine.to(self.dtype) @ of_a.to(self.dtype)
                    if self._has_pieces
                    else (mine @ of_a.float()).to(self.dtype)
                )
                dx = self._add_dropped(i, dx, part)
        return dx


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
