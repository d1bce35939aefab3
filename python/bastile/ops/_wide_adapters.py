"""Adapters of float32 beside an input of bfloat16, outside of autocast: PEFT's beside a model that is loaded in
bfloat16 and trained as it is. PEFT computes them in float32, so a result or gradient that is kept in float32, as A's
and B's are, must not be off by bfloat16's rounding.

Each product here has one large factor, which is of bfloat16, and a thin one of float32. On a GPU the thin one is cut
into three pieces of bfloat16, which together are its 24 bits, and the products of the pieces, side by side in one
product of tensor cores, are summed in float32: as exact as float32's own product, and of three times the rank, where
that takes thirty times as long. What is added to a result or to dx within a large product is rounded with that, so
there the other thin factor is rounded to one piece, which is there three times.

The pieces of a layer's adapter stand together: first pieces, second and third, and then those of the next layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bastile.ops import low_rank
from bastile.ops._adapted import MOST_RANK, B, Found, Group, Layer, has_float32_sums, is_one_product, product
from bastile.ops._common import is_batched
from bastile.ops.dropout import drop
from bastile.ops.low_rank import PIECES


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
    #: While results are filled: the thin ones, and these rounded, once a product asks for them.
    _filled_from: torch.Tensor | None = None
    _repeated: torch.Tensor | None = None

    @property
    def _has_pieces(self) -> bool:
        return any([b is not None and has_float32_sums(b) for b in self.b])

    @property
    def _runs(self) -> list[_Run]:
        """The columns of thin results: all at once where every adapter has as many."""
        ranks = [self.b[i].shape[1] for i in self.adapted]  # type: ignore[union-attr]
        if len(set(ranks)) == 1:
            return [_Run(slice(0, self.rank), ranks[0])]
        return [_Run(self.columns[i], rank) for i, rank in zip(self.adapted, ranks, strict=True)]

    def _run(self, i: int) -> _Run:
        """An adapter's columns."""
        return _Run(self.columns[i], self.b[i].shape[1])  # type: ignore[union-attr]

    def _rounded(self) -> list[torch.Tensor]:
        if not self.adapted:
            return []
        of_a, of_b = ([t.float() for t in each if t is not None] for each in (self.a, self.b))
        if not self._has_pieces:
            return [of_a[0] if len(of_a) == 1 else torch.cat(of_a), *of_b]
        width = of_a[0].shape[1]
        all_a = of_a[0].new_empty(PIECES * self.rank, width, dtype=torch.bfloat16)
        for i, a in zip(self.adapted, of_a, strict=True):
            whole = a.shape[0] * width  # one row, whose pieces are A's, one below the other
            split(a.reshape(1, -1), [_Run(slice(0, whole), whole)], pieces=all_a[self._run(i).wide].view(1, -1))
        return [all_a, *[in_pieces(b, [_alone(b.shape[1])]) for b in of_b]]

    def new_thin(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.new_empty(rows.shape[0], self.rank, dtype=torch.float32)

    def thin(self, rows: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor | None:
        if not self.adapted:
            return None
        thin = self.new_thin(rows) if into is None else into
        if not self.drops:
            return self._by_wide(rows, self.rounded[0].t(), self._runs, thin)
        for i in self.adapted:
            of_a = self.rounded[0][self._run(i).wide if self._has_pieces else self.columns[i]]
            mine = thin[:, self.columns[i]]
            self._by_wide(self.dropped(i, rows), of_a.t(), [_alone(mine.shape[1])], mine, self._divisor(i))
        return thin

    def dropped(self, i: int, rows: torch.Tensor) -> torch.Tensor:
        """Its elements as they are, where they stay: what they are divided by, their product is."""
        seed = self.seeds[i]
        if seed is None:
            return rows
        found = drop(rows, seed, self.layers[i].dropout)
        return torch.where(found == 0, found, rows)

    def _divisor(self, i: int) -> float:
        return 1.0 if self.seeds[i] is None else 1 / (1 - self.layers[i].dropout)

    def _by_wide(
        self, x: torch.Tensor, across: torch.Tensor, runs: list[_Run], into: torch.Tensor, scale: float = 1.0
    ) -> torch.Tensor:
        """scale times x [M, K], of bfloat16, by what `rounded` has of a matrix [K, n], to float32's accuracy."""
        if self._has_pieces:
            split(product(torch.float32, x, across), runs, sum=into, scale=scale)
        else:
            into.copy_(torch.mm(x.float(), across) * scale)
        return into

    def fill(self, rows: torch.Tensor, thin: torch.Tensor | None, *results: torch.Tensor) -> None:
        self._filled_from, self._repeated = thin, None
        super().fill(rows, thin, *results)
        self._filled_from = self._repeated = None

    def _fill_with(
        self, y: torch.Tensor, i: int, rows: torch.Tensor, mine: torch.Tensor, b: torch.Tensor, weight: Any
    ) -> None:
        of_b: Any = self.b[i]
        run, scale = self._run(i), self.layers[i].scale
        pieces = min(PIECES, MOST_RANK // run.rank) if run.rank else 0
        if self._has_pieces and pieces and is_one_product(rows, weight, of_b) and low_rank.fills(y):
            if self._repeated is None:
                assert self._filled_from is not None
                self._repeated = self._rounded_thin(self._filled_from)
            halves, within = self._repeated[:, run.wide], b
            if pieces < PIECES:
                halves, within = halves[:, : pieces * run.rank], b[:, : pieces * run.rank].contiguous()
            low_rank.linear_into(rows, weight, halves, within, self.biases[i], y, scale)
            return
        self._fill_alone(y, i, rows, weight)
        y.copy_(torch.add(y, mine @ of_b.t().float(), alpha=scale))

    def _rounded_thin(self, thin: torch.Tensor) -> torch.Tensor:
        """Thin results, or their gradients, as products with pieces of another factor take them, [rows, 3 rank]."""
        made = thin.new_empty(thin.shape[0], PIECES * self.rank, dtype=torch.bfloat16)
        split(thin, self._runs, repeated=made)
        return made

    def _through(
        self, found: Found, i: int, dy: torch.Tensor, b: torch.Tensor, g: torch.Tensor, thin: torch.Tensor | None
    ) -> None:
        self._by_wide(dy, b, [_alone(g.shape[1])], g, self.layers[i].scale)
        self.add_gradient_of_b(found, i, dy, thin)

    def add_gradient_of_b(self, found: Found, i: int, dy: torch.Tensor, thin: torch.Tensor | None) -> None:
        if found.wants(i, B) and thin is not None:
            mine = self._mine(thin, i)
            runs = [_alone(mine.shape[1])]
            across = in_pieces(mine, runs) if self._has_pieces else mine
            made = dy.new_empty(dy.shape[1], mine.shape[1], dtype=torch.float32)
            self.add(found, i, B, self._by_wide(dy.t(), across, runs, made, self.layers[i].scale))

    def _gradient_of_a(
        self, dtype: torch.dtype, g: torch.Tensor, rows: torch.Tensor, i: int | None = None
    ) -> torch.Tensor:
        runs, divisor = self._runs, 1.0
        if i is not None:
            runs, divisor, rows = [_alone(g.shape[1])], self._divisor(i), self.dropped(i, rows)
        if not self._has_pieces:
            return (g.t() @ rows.float() * divisor).to(dtype)
        wide = product(torch.float32, in_pieces(g, runs).t(), rows)
        made = wide.new_empty(g.shape[1], wide.shape[1])
        for run in runs:  # one row for each adapter, whose parts are A's rows, one below the other
            whole = run.rank * wide.shape[1]
            every = _Run(slice(0, made[run.columns].numel()), whole)
            split(wide[run.wide].view(1, -1), [every], sum=made[run.columns].view(1, -1), scale=divisor)
        return made.to(dtype)

    def _within_dx(self, g: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if g is None or not self._has_pieces:
            return super()._within_dx(g)
        return self._rounded_thin(g), self.rounded[0]

    def _adapters_dx(self, g: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        of_g, all_a = self._within_dx(g)
        made: Any = torch.mm(of_g, all_a).to(self.dtype)  # type: ignore[arg-type]
        return made if into is None else into.copy_(made)

    def _adapter_dx(self, i: int, g: torch.Tensor) -> torch.Tensor:
        of_a: Any = self.a[i]
        dtype = self.dtype if self._has_pieces else torch.float32
        return (g.to(dtype) @ of_a.to(dtype)).to(self.dtype)


class _Run(NamedTuple):
    """Columns of a thin matrix, in groups of `rank`, whose pieces stand together."""

    columns: slice
    rank: int

    @property
    def wide(self) -> slice:
        """Those of their pieces."""
        return slice(PIECES * self.columns.start, PIECES * self.columns.stop)


def _alone(rank: int) -> _Run:
    return _Run(slice(0, rank), rank)


def in_pieces(matrix: torch.Tensor, runs: list[_Run]) -> torch.Tensor:
    """A matrix [M, n] of float32 as three of bfloat16, whose sum it is: [M, 3 n]."""
    made = matrix.new_empty(matrix.shape[0], PIECES * matrix.shape[1], dtype=torch.bfloat16)
    split(matrix, runs, pieces=made)
    return made


def split(
    x: torch.Tensor,
    runs: list[_Run],
    *,
    sum: torch.Tensor | None = None,
    pieces: torch.Tensor | None = None,
    repeated: torch.Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """bst_low_rank_split, run by run: x [M, n], or [M, 3 n] where parts are to be summed up; sum [M, n], pieces and
    repeated [M, 3 n] are written."""
    width = runs[-1].columns.stop
    parts = PIECES if x.shape[1] != width else 1
    for run in runs:
        by = _split_batched if is_batched(x) else low_rank.split_into
        place = None if sum is None else _grouped(sum, run, 1).squeeze(2)
        of_pieces, of_repeated = (_grouped(matrix, run, PIECES) for matrix in (pieces, repeated))
        by(_grouped(x, run, parts), place, of_pieces, of_repeated, scale)


def _grouped(matrix: Any, run: _Run, parts: int) -> Any:
    """A run's columns, or their pieces, as [M, groups, parts, rank]."""
    if matrix is None:
        return None
    columns = run.columns if parts == 1 else run.wide
    mine = matrix if matrix.shape[1] == columns.stop - columns.start else matrix[:, columns]
    groups = mine.shape[1] // (parts * run.rank) if run.rank else 1
    return mine.view(mine.shape[0], groups, parts, run.rank)  # unflatten is Python's, and takes five times as long


def _split_batched(x: torch.Tensor, sum: Any, pieces: Any, repeated: Any, scale: float) -> None:
    """The same for several gradients at once, of which nobody knows the memory, with pieces that are rounded: vmap cuts
    no number in two."""
    rest = x.sum(2) * scale
    if sum is not None:
        sum.copy_(rest)
    for i in range(PIECES):
        if repeated is not None:
            repeated[:, :, i].copy_(rest)
        if pieces is not None:
            piece = rest.bfloat16()
            pieces[:, :, i].copy_(piece)
            rest = rest - piece
