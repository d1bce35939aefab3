"""Layers of one input with their adapters, within a node: the products of the forward and of the backward pass. See
bastile.ops.lora."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from bastile.ops import low_rank
from bastile.ops._common import PLAIN, is_batched, on_gpu
from bastile.ops._rounding import rounded
from bastile.ops.dropout import drop, drop_and_add, drop_in_place, drop_into

#: Rows up to which launches are what a call takes, and not its numbers: of a text that is generated token by token.
_FEW_ROWS = 64
TENSORS = 4  # of a layer, in the order of Adapted
WEIGHT, BIAS, A, B = range(TENSORS)


class Layer(NamedTuple):
    """What is no tensor in a layer, so that autograd need not know of it."""

    scale: float
    dropout: float
    dequantise: Callable[[torch.dtype], torch.Tensor] | None
    outputs: int | None
    is_wide: bool = False  # its adapter is of a wider type than the input, and is computed in that


class Found:
    """What a backward pass finds of a group's tensors: the gradients that are wanted, each summed up over the rows that
    are worked off. adapters: the type of A's and B's until then; None: their own."""

    __slots__ = ("adapters", "gradients", "wanted")

    def __init__(self, wanted: Sequence[bool], adapters: torch.dtype | None = None) -> None:
        self.wanted, self.adapters = wanted, adapters
        self.gradients: list[torch.Tensor | None] = [None] * len(wanted)

    def wants(self, i: int, which: int) -> bool:
        return self.wanted[i * TENSORS + which]

    def add(self, i: int, which: int, made: torch.Tensor) -> None:
        known = self.gradients[i * TENSORS + which]
        self.gradients[i * TENSORS + which] = made if known is None else known.add_(made)


class Group:
    """Layers of one input, within a node: the forward and the backward pass of all of them.

    weights, biases: of the input's type. a, b: in types of their own; a call rounds them to the input's once, and the
    backward pass is given what was rounded. The thin results of all adapters, and the gradients of these, lie side by
    side: [rows, rank]. seeds: of each layer's dropout, None where it has none."""

    is_wide = False

    def __init__(
        self,
        layers: Sequence[Layer],
        tensors: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        seeds: Sequence[torch.Tensor | None],
        rounded: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.layers, self.dtype, self.seeds = layers, dtype, seeds
        self.weights, self.biases, self.a, self.b = (tensors[i::TENSORS] for i in range(TENSORS))
        self.columns: list[slice] = []  # each adapter's of the thin results
        self.adapted: list[int] = []
        self.drops = any([seed is not None for seed in seeds])
        at = 0
        for i, a in enumerate(self.a):
            begin = at
            if a is not None:
                at += a.shape[0]
                self.adapted.append(i)
            self.columns.append(slice(begin, at))
        self.rank = at
        self._held: Sequence[Any] | None = None
        self._read = rounded

    @property
    def rounded(self) -> Sequence[torch.Tensor]:
        """Adapters as products read them; made when they are asked for."""
        if self._read is None:
            self._read = self._rounded()
        return self._read

    def _rounded(self) -> list[torch.Tensor]:
        """All A's, [rank, K], and each B, of the input's type."""
        if not self.adapted:
            return []
        a: Any = [self.a[i] for i in self.adapted]
        b: Any = [self.b[i] for i in self.adapted]
        dtype = self.dtype
        if is_compiling() or all([each.dtype is dtype for each in b]):
            return [(a[0] if len(a) == 1 else torch.cat(a)).to(dtype), *[each.to(dtype) for each in b]]
        return rounded(a, b, dtype)

    def weight(self, i: int) -> Any:
        make = self.layers[i].dequantise
        return self.weights[i] if make is None else make(self.dtype)

    def hold(self) -> None:
        """Makes the weights that are kept in another form for all products to come."""
        self._held = list(self.weights_of(range(len(self.layers))))

    def weights_of(self, which: Sequence[int]) -> Iterable[Any]:
        """These layers' weights: a list where all of them are there or made at once, else each made when it is asked
        for."""
        if self._held is not None:
            return [self._held[i] for i in which]
        places = sorted(which)
        makes = [self.layers[i].dequantise for i in places]
        if not any(makes):
            return [self.weights[i] for i in which]
        together = getattr(makes[0], "together", None) if len(makes) > 1 else None
        found = None if together is None else together(makes, self.dtype)
        if found is None:
            return map(self.weight, which)
        made = dict(zip(places, found, strict=True))
        return [made[i] for i in which]

    def new_thin(self, rows: torch.Tensor) -> torch.Tensor:
        """Memory for the thin results of these rows, or for their gradients."""
        return rows.new_empty(rows.shape[0], self.rank)

    def dropped(self, i: int, rows: torch.Tensor) -> torch.Tensor:
        """The input as adapter i sees it."""
        seed = self.seeds[i]
        return rows if seed is None else drop(rows, seed, self.layers[i].dropout)

    def thin(self, rows: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor | None:
        """x A^T of all adapters. into: its memory, where there is no dropout."""
        if not self.adapted:
            return None
        all_a = self.rounded[0]
        if not self.drops:
            return _mm(rows, all_a.t(), into)
        if is_compiling():  # it takes no part of a tensor for a result
            return torch.cat([self.dropped(i, rows).mm(all_a[self.columns[i]].t()) for i in self.adapted], 1)
        thin = self.new_thin(rows)
        for i in self.adapted:
            mine = self.columns[i]
            torch.mm(self.dropped(i, rows), all_a[mine].t(), out=thin[:, mine])
        return thin

    def results(self, x: torch.Tensor, rows: torch.Tensor, thin: torch.Tensor | None) -> list[torch.Tensor]:
        """Each [..., N]."""
        results = self.places(x)
        self.fill(rows, thin, *results)
        return results

    def results_alone(self, x: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        """Each [..., N], where no gradient is made of them. In a call for one token of each row, as of a text that is
        generated, what the adapters add is made of A and B as they are, with the layers' own launch or behind it; in no
        other call, for a checkpoint's first run may be one without gradients, and its second is to have the same
        bits."""
        if x.dim() < 3 or x.shape[-2] != 1 or not self._are_few(rows):
            return self.results(x, rows, self.thin(rows))
        weights = list(self.weights_of(range(len(self.layers))))
        adapters: Any = [
            None if a is None else (a, b, layer.scale) for a, b, layer in zip(self.a, self.b, self.layers, strict=True)
        ]
        results = low_rank.one_token_layers(x, weights, self.biases, adapters)
        if results is not None:
            return results
        results = self.places(x)
        for i, (y, weight) in enumerate(zip(results, weights, strict=True)):
            self._fill_alone(y.view(-1, y.shape[-1]), i, rows, weight)
        given: Any = [(results[i].view(-1, results[i].shape[-1]), self.a[i], self.b[i]) for i in self.adapted]
        scales = [self.layers[i].scale for i in self.adapted]
        low_rank.add_to(rows, given, scales)
        return results

    def _are_few(self, rows: torch.Tensor) -> bool:
        adapters: Any = [t for i in self.adapted for t in (self.a[i], self.b[i])]
        return (
            on_gpu(rows)
            and 0 < rows.shape[0] <= _FEW_ROWS
            and 0 < len(self.adapted) <= low_rank.MOST_ADDED
            and not self.drops
            and not is_compiling()
            and not is_batched(rows)
            and low_rank.in_rows(rows)
            and adapters[0].dtype in (torch.float32, rows.dtype)
            and all([t.dtype is adapters[0].dtype and t.is_contiguous() for t in adapters])
        )

    def places(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Memory for the results. Of their shape from the start: autograd lets nobody change a view in place that a
        node made."""
        return [x.new_empty(*x.shape[:-1], outputs) for outputs in self.outputs()]

    def outputs(self) -> list[int]:
        return [self._outputs(i) for i in range(len(self.layers))]

    def _outputs(self, i: int) -> int:
        for each in (self.weights[i], self.b[i], self.biases[i]):
            if each is not None:
                return each.shape[0]
        return self.layers[i].outputs or self.weight(i).shape[0]

    def fill(self, rows: torch.Tensor, thin: torch.Tensor | None, *results: torch.Tensor) -> None:
        """The large products, into the places of the results."""
        b, weights = iter(self.rounded[1:]), iter(self.weights_of(range(len(self.a))))
        for i, a in enumerate(self.a):
            y, b_i = results[i], None if thin is None or a is None else next(b)
            self._fill(y.view(-1, y.shape[-1]), i, rows, thin, b_i, next(weights))

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
            self._fill_alone(y, i, rows, weight)
        else:
            self._fill_with(y, i, rows, self._mine(thin, i), b, weight)

    def _fill_alone(self, y: torch.Tensor, i: int, rows: torch.Tensor, weight: Any) -> None:
        """A layer's result without its adapter."""
        bias = self.biases[i]
        if bias is None:
            torch.mm(rows, weight.t(), out=y)
        else:
            torch.addmm(bias, rows, weight.t(), out=y)

    def _fill_with(
        self, y: torch.Tensor, i: int, rows: torch.Tensor, mine: torch.Tensor, b: torch.Tensor, weight: Any
    ) -> None:
        """The same with it, of its thin results and what products read of its b."""
        bias, across, scale = self.biases[i], weight.t(), self.layers[i].scale
        if is_one_product(rows, weight, b):
            low_rank.linear_into(rows, weight, mine, b, bias, y, scale)
            return
        if bias is None:
            y.addmm_(mine, b.t(), beta=0, alpha=scale)
        else:
            torch.addmm(bias, mine, b.t(), alpha=scale, out=y)
        y.addmm_(rows, across)

    def _mine(self, thin: torch.Tensor, i: int) -> torch.Tensor:
        """A layer's columns of all thin numbers."""
        return thin if len(self.adapted) == 1 else thin[:, self.columns[i]]

    def through_b(
        self,
        found: Found,
        gradients: Sequence[torch.Tensor | None],
        thin: torch.Tensor | None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """g = s dy B of all adapters; 0 for those whose result nobody differentiated. B's gradients, s dy^T of the thin
        results, are not made where there are none of these yet. into: g's memory."""
        known = [dy for i, dy in enumerate(gradients) if dy is not None and self.a[i] is not None]
        if not known:
            return None
        g = self.new_thin(known[0]) if into is None else into
        for i, b in zip(self.adapted, self.rounded[1:], strict=True):
            dy, mine = gradients[i], self._mine(g, i)
            if dy is None:
                mine.zero_()
            else:
                self._through(found, i, dy, b, mine, thin)
        return g

    def _through(
        self, found: Found, i: int, dy: torch.Tensor, b: torch.Tensor, g: torch.Tensor, thin: torch.Tensor | None
    ) -> None:
        """One adapter's, into its part of g."""
        scale = self.layers[i].scale
        if thin is not None and found.wants(i, B) and is_one_pass(dy, b):
            self.add(found, i, B, low_rank.backward_into(dy, self._mine(thin, i), b, g, scale))
        else:
            g.addmm_(dy, b, beta=0, alpha=scale)
            self.add_gradient_of_b(found, i, dy, thin)

    def add_gradient_of_b(self, found: Found, i: int, dy: torch.Tensor, thin: torch.Tensor | None) -> None:
        if found.wants(i, B) and thin is not None:
            dtype = self._dtype(found, i, B)
            self.add(found, i, B, product(dtype, dy.t(), self._mine(thin, i), self.layers[i].scale))

    def add(self, found: Found, i: int, which: int, made: torch.Tensor) -> None:
        """A or B's gradient of some rows."""
        found.add(i, which, made.to(self._dtype(found, i, which)))

    def _dtype(self, found: Found, i: int, which: int) -> torch.dtype:
        of: Any = (self.a if which == A else self.b)[i]
        return found.adapters or of.dtype

    def input_gradient(
        self, gradients: Sequence[torch.Tensor | None], g: torch.Tensor | None, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The sum of s dy B A and dy W: it begins with the adapters' and goes from the last layer to the first, as one
        product where there is such an operator. into: its memory."""
        which = [i for i in range(len(self.layers) - 1, -1, -1) if gradients[i] is not None]
        weights = self.weights_of(which)
        if len(which) == 1:
            weights = list(weights)
        if type(weights) is list and not self.drops:
            of_layers: Any = [gradients[i] for i in which]
            dx = low_rank.input_gradient(of_layers, weights, *self._within_dx(g), into)
            if dx is not None:
                return dx
        dx = None if g is None else self._adapters_input_gradient(gradients, g, into)
        for i, weight in zip(which, weights, strict=True):
            dy: Any = gradients[i]
            dx = _mm(dy, weight, into) if dx is None else dx.addmm_(dy, weight)
        return dx

    def _within_dx(self, g: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What an operator sums up beside the large products: g, and all A's."""
        return g, None if g is None else self.rounded[0]

    def _adapters_input_gradient(
        self, gradients: Sequence[torch.Tensor | None], g: torch.Tensor, into: torch.Tensor | None
    ) -> torch.Tensor | None:
        if not self.drops:
            return self._adapters_dx(g, into)
        dx = None
        for i in self.adapted:
            if gradients[i] is not None:
                dx = self._add_dropped(i, dx, self._adapter_dx(i, self._mine(g, i)))
        return dx

    def _adapters_dx(self, g: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return _mm(g, self.rounded[0], into)

    def _adapter_dx(self, i: int, g: torch.Tensor) -> torch.Tensor:
        return g.mm(self.rounded[0][self.columns[i]])

    def _add_dropped(self, i: int, dx: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
        """dx, if there is one, and what adapter i's dropout leaves of this part, which is written over."""
        seed, p = self.seeds[i], self.layers[i].dropout
        if seed is None:
            return part if dx is None else dx.add_(part)
        if is_compiling() or is_batched(part):
            return drop(part, seed, p) if dx is None else drop_and_add(part, seed, dx, p)
        if dx is None:
            drop_in_place(part, seed, p)
            return part
        drop_into(part, seed, dx, p)
        return dx

    def base_gradients(self, found: Found, gradients: Sequence[torch.Tensor | None], rows: Any) -> None:
        """Weights' and biases'."""
        for i, dy in enumerate(gradients):
            if dy is not None and found.wants(i, WEIGHT):
                found.add(i, WEIGHT, rows.t().mm(dy).t() if _lies_across(self.weights[i]) else dy.t().mm(rows))
            if dy is not None and found.wants(i, BIAS):
                found.add(i, BIAS, dy.sum(0))

    def add_gradients_of_a(
        self, found: Found, gradients: Sequence[torch.Tensor | None], g: torch.Tensor | None, rows: Any
    ) -> None:
        which = [i for i in self.adapted if found.wants(i, A) and gradients[i] is not None]
        if not which or g is None:
            return
        types = [self._dtype(found, i, A) for i in which]
        if self.drops:
            for i, dtype in zip(which, types, strict=True):
                found.add(i, A, self._gradient_of_a(dtype, self._mine(g, i), rows, i))
            return
        together = self._gradient_of_a(types[0] if len(set(types)) == 1 else torch.float32, g, rows)
        for i, dtype in zip(which, types, strict=True):
            found.add(i, A, together[self.columns[i]].to(dtype))

    def _gradient_of_a(
        self, dtype: torch.dtype, g: torch.Tensor, rows: torch.Tensor, i: int | None = None
    ) -> torch.Tensor:
        """i: whose, where it has a dropout of its own; None: of all adapters."""
        return product(dtype, g.t(), rows if i is None else self.dropped(i, rows))


def _lies_across(weight: Any) -> bool:
    """Whether a weight's gradient is to have columns of neighbouring elements, as the weight has. The compiler decides
    for itself."""
    return not is_compiling() and weight.stride(0) == 1 and weight.stride(1) > 1


def _mm(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    return a.mm(b) if into is None else torch.mm(a, b, out=into)


def is_one_pass(dy: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an operator of ours takes less time than two products do."""
    return (
        on_gpu(dy)
        and dy.dtype is not torch.float32
        and b.shape[1] in _RANKS
        and dy.shape[1] % 8 == 0
        and low_rank.in_rows(dy)
        and dy.stride(0) % 8 == 0
        and not is_compiling()
        and not is_batched(dy)
    )


_RANKS = (8, 16, 24, 32)


def is_one_product(rows: torch.Tensor, weight: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an operator of ours adds the adapter's part within the large product, on the chips and in the sizes that
    it knows of; elsewhere it makes two products, too."""
    return (
        low_rank.may_be_one_product(rows)
        and b.shape[1] <= MOST_RANK
        and not (b.shape[1] % 8 or weight.shape[0] % 8 or weight.shape[1] % 8)
        and low_rank.in_rows(rows)
        and low_rank.in_rows(weight)
        and type(weight) in PLAIN
    )


MOST_RANK = 64


def product(dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """scale a b in this type, with no rounding to the factors' type between, where PyTorch can leave that out."""
    if a.dtype is dtype:
        product = a.mm(b)
    elif dtype is torch.float32 and has_float32_sums(a):
        product = torch.mm(a, b, out_dtype=dtype)
    else:
        product = a.mm(b).to(dtype)
    return product if scale == 1 else product.mul_(scale)


def has_float32_sums(factor: torch.Tensor) -> bool:
    """Whether PyTorch has a product of 16 bits here whose result is in float32, and the compiler is not to choose."""
    return factor.is_cuda and not is_compiling() and _HAS_OUT_DTYPE


_HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype")


def reads_input(wanted: Sequence[bool]) -> bool:
    """Whether one of a group's gradients that are wanted is made of the group's input: a weight's or an A's."""
    return any(wanted[0::TENSORS]) or any(wanted[2::TENSORS])


def of_layers(layers: Sequence[Layer], seeds: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """Each layer's seed of these."""
    if seeds is None:
        return [None] * len(layers)
    left = iter(seeds.unbind(0))
    return [next(left) if layer.dropout > 0 else None for layer in layers]
