"""Linear layers of one input, with or without low-rank adapters, as one node: y = x W^T + bias + s (d(x) A^T) B^T, d
being the adapter's dropout (Hu et al., "LoRA", 2021); and the gated MLP of such layers.

A layer and its adapter as modules of their own make a pass over memory for each cast, each scale, each sum of results
and each sum of gradients. Here products do all that: the thin product comes first, and the large one adds its result to
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling
from torch.nn.functional import dropout, linear

from bastile.ops._common import (
    Function,
    cast_as_linear,
    first_order_only,
    is_batched,
    release_on_last_pass,
    served,
    without_autocast,
)
from bastile.ops._glu import unit_of
from bastile.ops._late import Late, in_checkpoint, late
from bastile.ops._random import seeds
from bastile.ops.dropout import drop, drop_and_add, drop_in_place, drop_into
from bastile.ops.gated_mlp import unit_gradients

__all__ = ["Adapted", "adapted_gated_mlp", "adapted_linears"]


class Adapted(NamedTuple):
    """A linear layer and its adapter.

    weight [N, K], bias [N] or None, a [r, K] and b [N, r] or both None, of float32, bfloat16 or float16. dequantise:
    what makes the weight, of x's type, where it is kept in another form; weight is None then. Its function `together`,
    if any, is given those of several layers in a list, and the type, and returns their weights, or None. dropout: the
    probability with which the adapter's input loses each element (0: it has none). outputs: N, where nothing else tells
    it; without it the weight is made once more to see."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0
    dropout: float = 0.0
    dequantise: Callable[[torch.dtype], torch.Tensor] | None = None
    outputs: int | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.weight, self.bias, self.a, self.b


_TENSORS = 4  # of a layer, in the order of Adapted: weight, bias, a, b


class _Layer(NamedTuple):
    """What is no tensor in a layer, so that autograd need not know of it."""

    scale: float
    dropout: float
    dequantise: Callable[[torch.dtype], torch.Tensor] | None
    outputs: int | None


class _Group:
    """Layers of one input, within a node: the forward and the backward pass of all of them.

    weights, biases: of the input's type. a, b: in types of their own; a call rounds them to the input's once, and the
    backward pass is given what was rounded. The thin results of all adapters, and the gradients of these, lie side by
    side: [rows, rank]. seeds: of each layer's dropout, None where it has none."""

    def __init__(
        self,
        layers: Sequence[_Layer],
        tensors: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        seeds: Sequence[torch.Tensor | None],
        rounded: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.layers, self.dtype, self.seeds = layers, dtype, seeds
        self.weights, self.biases, self.a, self.b = (tensors[i::_TENSORS] for i in range(_TENSORS))
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
        self.rounded = self._rounded() if rounded is None else rounded

    def _rounded(self) -> list[torch.Tensor]:
        """All A's, [rank, K], and each B, of the input's type."""
        if not self.adapted:
            return []
        a: Any = [self.a[i] for i in self.adapted]
        b: Any = [self.b[i] for i in self.adapted]
        dtype = self.dtype
        if is_compiling() or all([each.dtype is dtype for each in b]):
            return [(a[0] if len(a) == 1 else torch.cat(a)).to(dtype), *[each.to(dtype) for each in b]]
        # All of them in one launch.
        all_a = a[0].new_empty(self.rank, a[0].shape[1], dtype=dtype)
        rounded = [each.new_empty(each.shape, dtype=dtype) for each in b]
        torch._foreach_copy_([*[all_a[self.columns[i]] for i in self.adapted], *rounded], [*a, *b])
        return [all_a, *rounded]

    def weight(self, i: int) -> Any:
        make = self.layers[i].dequantise
        return self.weights[i] if make is None else make(self.dtype)

    def weights_of(self, which: Sequence[int]) -> Iterator[Any]:
        """These layers' weights, made at once where that is possible, else each when it is asked for."""
        places = sorted(which)
        makes = [self.layers[i].dequantise for i in places]
        together = getattr(makes[0], "together", None) if len(makes) > 1 else None
        found = None if together is None else together(makes, self.dtype)
        return map(self.weight if found is None else dict(zip(places, found, strict=True)).__getitem__, which)

    def dropped(self, i: int, rows: torch.Tensor) -> torch.Tensor:
        """The input as adapter i sees it."""
        seed = self.seeds[i]
        return rows if seed is None else drop(rows, seed, self.layers[i].dropout)

    def thin(self, rows: torch.Tensor) -> torch.Tensor | None:
        """x A^T of all adapters."""
        if not self.adapted:
            return None
        all_a = self.rounded[0]
        if not self.drops:
            return rows.mm(all_a.t())
        if is_compiling():  # it takes no part of a tensor for a result
            return torch.cat([self.dropped(i, rows).mm(all_a[self.columns[i]].t()) for i in self.adapted], 1)
        thin = rows.new_empty(rows.shape[0], self.rank)
        for i in self.adapted:
            mine = self.columns[i]
            torch.mm(self.dropped(i, rows), all_a[mine].t(), out=thin[:, mine])
        return thin

    def results(self, x: torch.Tensor, rows: torch.Tensor, thin: torch.Tensor | None) -> list[torch.Tensor]:
        """Each [..., N]."""
        results = self.places(x)
        self.fill(rows, thin, *results)
        return results

    def places(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Memory for the results. Of their shape from the start: autograd lets nobody change a view in place that a
        node made."""
        return [x.new_empty(*x.shape[:-1], self._outputs(i)) for i in range(len(self.layers))]

    def _outputs(self, i: int) -> int:
        for each in (self.weights[i], self.b[i], self.biases[i]):
            if each is not None:
                return each.shape[0]
        return self.layers[i].outputs or self.weight(i).shape[0]

    def fill(self, rows: torch.Tensor, thin: torch.Tensor | None, *results: torch.Tensor) -> None:
        """The large products, into the places of the results."""
        b, weights = iter(self.rounded[1:]), self.weights_of(range(len(self.a)))
        for i, a in enumerate(self.a):
            y, b_i = results[i], None if thin is None or a is None else next(b)
            self._fill(y.view(-1, y.shape[-1]), i, rows, thin, b_i, next(weights).t())

    def _fill(
        self,
        y: torch.Tensor,
        i: int,
        rows: torch.Tensor,
        thin: torch.Tensor | None,
        b: torch.Tensor | None,
        weight: Any,
    ) -> None:
        bias = self.biases[i]
        if thin is None or b is None:
            if bias is None:
                torch.mm(rows, weight, out=y)
            else:
                torch.addmm(bias, rows, weight, out=y)
            return
        mine, scale = self._mine(thin, i), self.layers[i].scale
        if bias is None:
            y.addmm_(mine, b.t(), beta=0, alpha=scale)
        else:
            torch.addmm(bias, mine, b.t(), alpha=scale, out=y)
        y.addmm_(rows, weight)

    def _mine(self, thin: torch.Tensor, i: int) -> torch.Tensor:
        """A layer's columns of all thin numbers."""
        return thin if len(self.adapted) == 1 else thin[:, self.columns[i]]

    def thin_gradients(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """s dy B of all adapters; 0 for those whose result nobody differentiated."""
        known = [dy for i, dy in enumerate(gradients) if dy is not None and self.a[i] is not None]
        if not known:
            return None
        g = known[0].new_empty(known[0].shape[0], self.rank)
        for i, b in zip(self.adapted, self.rounded[1:], strict=True):
            dy = gradients[i]
            if dy is None:
                g[:, self.columns[i]] = 0
            else:
                self._mine(g, i).addmm_(dy, b, beta=0, alpha=self.layers[i].scale)
        return g

    def input_gradient(self, gradients: Sequence[torch.Tensor | None], g: torch.Tensor | None) -> torch.Tensor | None:
        """The sum of s dy B A and dy W: it begins with the adapters' and goes from the last layer to the first."""
        dx = None if g is None else self._adapters_input_gradient(gradients, g)
        which = [i for i in range(len(self.layers) - 1, -1, -1) if gradients[i] is not None]
        weights = self.weights_of(which)
        for i in which:
            dy: Any = gradients[i]
            dx = dy.mm(next(weights)) if dx is None else dx.addmm_(dy, next(weights))
        return dx

    def _adapters_input_gradient(
        self, gradients: Sequence[torch.Tensor | None], g: torch.Tensor
    ) -> torch.Tensor | None:
        all_a = self.rounded[0]
        if not self.drops:
            return g.mm(all_a)
        dx = None
        for i in self.adapted:
            if gradients[i] is not None:
                dx = self._add_dropped(i, dx, self._mine(g, i).mm(all_a[self.columns[i]]))
        return dx

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

    def gradients(
        self,
        gradients: Sequence[torch.Tensor | None],
        g: torch.Tensor | None,
        rows: Any,
        thin: torch.Tensor | None,
        wanted: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """Those of the tensors' gradients that are wanted, in the tensors' order: dW = dy^T x, dbias = the sum of dy,
        dA = g^T x, dB = s dy^T (x A^T)."""
        found: list[torch.Tensor | None] = [None] * len(wanted)
        for i, dy in enumerate(gradients):
            if dy is None:
                continue
            want_weight, want_bias, _, want_b = wanted[i * _TENSORS : (i + 1) * _TENSORS]
            if want_weight:
                found[i * _TENSORS] = dy.t().mm(rows)
            if want_bias:
                found[i * _TENSORS + 1] = dy.sum(0)
            b = self.b[i]
            if want_b and b is not None and thin is not None:
                found[i * _TENSORS + 3] = _product(b.dtype, dy.t(), self._mine(thin, i), self.layers[i].scale)
        if g is not None:
            self._gradients_of_a(gradients, g, rows, wanted, found)
        return found

    def _gradients_of_a(
        self,
        gradients: Sequence[torch.Tensor | None],
        g: torch.Tensor,
        rows: Any,
        wanted: Sequence[bool],
        found: list[torch.Tensor | None],
    ) -> None:
        places = {i: i * _TENSORS + 2 for i in self.adapted if wanted[i * _TENSORS + 2] and gradients[i] is not None}
        if not places:
            return
        types: Any = {i: self.a[i].dtype for i in places}  # type: ignore[union-attr]
        if self.drops:
            for i, place in places.items():
                found[place] = _product(types[i], self._mine(g, i).t(), self.dropped(i, rows))
            return
        shared = set(types.values())
        together = _product(shared.pop() if len(shared) == 1 else torch.float32, g.t(), rows)
        for i, place in places.items():
            found[place] = together[self.columns[i]].to(types[i])


def _product(dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """scale a b in this type, with no rounding to the factors' type between, where PyTorch can leave that out."""
    if a.dtype is dtype:
        product = a.mm(b)
    elif dtype is torch.float32 and a.is_cuda and not is_compiling() and _HAS_OUT_DTYPE:
        product = torch.mm(a, b, out_dtype=dtype)
    else:
        product = a.mm(b).to(dtype)
    return product if scale == 1 else product.mul_(scale)


_HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype")


def _results(
    rest: Late | None, group: _Group, x: torch.Tensor, rows: torch.Tensor, thin: torch.Tensor | None
) -> list[torch.Tensor]:
    """A node's results, or where they will be."""
    if rest is None:
        return group.results(x, rows, thin)
    rest.leave(group.fill, rows, thin)
    return group.places(x)


class _Linears(Function):
    """Keeps x where a weight or an A is trained, the thin results where a B is, and the seeds of dropouts."""

    @staticmethod
    def forward(ctx, x, layers, rest, seeds, *tensors):
        ctx.set_materialize_grads(False)
        group, rows = _Group(layers, tensors, x.dtype, _of_layers(layers, seeds)), x.reshape(-1, x.shape[-1])
        thin = group.thin(rows)
        keeps_x = _reads_input(ctx.needs_input_grad[4:])
        # For first_order_only, where x is not kept: an output without elements.
        way_back = None if keeps_x or is_compiling() else x.new_empty(0)
        ctx.save_for_backward(x if keeps_x else None, thin, way_back, seeds, *tensors, *group.rounded)
        ctx.shape, ctx.layers, ctx.dtype = x.shape, layers, x.dtype
        results = _results(rest, group, x, rows, thin)
        return tuple(results) if way_back is None else (*results, way_back)

    @staticmethod
    def backward(ctx, *gradients):
        x, thin, way_back, seeds, *tensors = ctx.saved_tensors
        count = _TENSORS * len(ctx.layers)
        tensors, rounded = tensors[:count], tensors[count:]
        gradients = gradients[: len(ctx.layers)]
        want_x, _, _, _, *wanted = ctx.needs_input_grad
        with without_autocast(next(t.device.type for t in tensors if t is not None)):
            group = _Group(ctx.layers, tensors, ctx.dtype, _of_layers(ctx.layers, seeds), rounded)
            rows = None if x is None else x.reshape(-1, x.shape[-1])
            of_rows = [None if dy is None else dy.reshape(-1, dy.shape[-1]) for dy in gradients]
            g = group.thin_gradients(of_rows)
            found = group.gradients(of_rows, g, rows, thin, wanted)
            dx = group.input_gradient(of_rows, g) if want_x else None
        found = [None if dx is None else dx.view(ctx.shape), *found]
        if torch.is_grad_enabled() and not is_compiling():
            found = [first_order_only("adapted_linears", d, x, way_back, *gradients, *tensors) for d in found]
        return found[0], None, None, None, *found[1:]


def _reads_input(wanted: Sequence[bool]) -> bool:
    """Whether one of a group's gradients that are wanted is made of the group's input: a weight's or an A's."""
    return any(wanted[0::_TENSORS]) or any(wanted[2::_TENSORS])


class _GatedMLP(Function):
    """Keeps x where it is read, gate's and up's results, the thin ones and the seeds of dropouts. The activation comes
    again out of the kernel that makes its gradients."""

    @staticmethod
    def forward(ctx, x, layers, unit, rest, seeds, *tensors):
        first, second = _mlp_groups(layers, tensors, x.dtype, seeds)
        rows = x.reshape(-1, x.shape[-1])
        thin = first.thin(rows)
        a, b = first.results(x, rows, thin)
        # In a checkpoint y and its thin results are left for later too, which the backward pass then makes from the y
        # that it makes anyway. Elsewhere keeping them costs less.
        leaves_y = rest is not None and in_checkpoint()
        y = thin_y = None
        if not leaves_y:
            y = unit.forward(a, b)
            thin_y = second.thin(y.view(-1, y.shape[-1]))
        keeps_x = _reads_input(ctx.needs_input_grad[5 : 5 + 2 * _TENSORS])
        way_back = None if keeps_x or is_compiling() else x.new_empty(0)
        ctx.save_for_backward(
            x if keeps_x else None, thin, a, b, thin_y, way_back, seeds, *tensors, *first.rounded, *second.rounded
        )
        ctx.shape, ctx.layers, ctx.dtype, ctx.unit = x.shape, layers, x.dtype, unit
        if leaves_y:
            rest.leave(_finish, second, unit, a, b)
            (out,) = second.places(x)
        else:
            (out,) = _results(rest, second, y, y.view(-1, y.shape[-1]), thin_y)
        return out if way_back is None else (out, way_back)

    @staticmethod
    def backward(ctx, dout, *_):
        with without_autocast(dout.device.type):
            found = _mlp_gradients(ctx, dout)
        return found[0], None, None, None, None, *found[1:]


def _finish(group: _Group, unit: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    rows = unit.forward(a, b).view(-1, a.shape[-1])
    group.fill(rows, group.thin(rows), out)


def _mlp_groups(
    layers: Sequence[_Layer], tensors: Sequence[Any], dtype: torch.dtype, seeds: torch.Tensor | None
) -> tuple[_Group, _Group]:
    """Gate and up, and down. Behind the layers' tensors may stand what was rounded, first that of gate and up."""
    first, second, rounded = tensors[: 2 * _TENSORS], tensors[2 * _TENSORS : 3 * _TENSORS], tensors[3 * _TENSORS :]
    of_layers = _of_layers(layers, seeds)
    of_first: Any = None
    of_second: Any = None
    if rounded:
        adapted = sum([a is not None for a in first[2::_TENSORS]])
        count = adapted + 1 if adapted else 0
        of_first, of_second = rounded[:count], rounded[count:]
    return (
        _Group(layers[:2], first, dtype, of_layers[:2], of_first),
        _Group(layers[2:], second, dtype, of_layers[2:], of_second),
    )


def _mlp_gradients(ctx: Any, dout: torch.Tensor) -> list[torch.Tensor | None]:
    x, thin, a, b, thin_y, way_back, seeds, *tensors = ctx.saved_tensors
    last = release_on_last_pass(ctx, dout)
    want_x, _, _, _, _, *wanted = ctx.needs_input_grad
    first, second = _mlp_groups(ctx.layers, tensors, ctx.dtype, seeds)
    tensors = tensors[: 3 * _TENSORS]
    wanted_first, wanted_second = wanted[: 2 * _TENSORS], wanted[2 * _TENSORS :]
    drows = [dout.reshape(-1, dout.shape[-1])]
    g = second.thin_gradients(drows)
    a, b = a.view(-1, a.shape[-1]), b.view(-1, b.shape[-1])
    wants_y = _reads_input(wanted_second) or (thin_y is None and any(wanted_second))
    wants = want_x or any(wanted_first[:_TENSORS]), want_x or any(wanted_first[_TENSORS:]), wants_y
    dy: Any = second.input_gradient(drows, g)
    da, db, y = unit_gradients(ctx.unit, dy, a, b, wants, last)
    del dy
    if thin_y is None and wants[2]:
        thin_y = second.thin(y)
    found_second = second.gradients(drows, g, y, thin_y, wanted_second)
    del y, g
    gradients = [da if wants[0] else None, db if wants[1] else None]
    g = first.thin_gradients(gradients)
    rows = None if x is None else x.reshape(-1, x.shape[-1])
    found = first.gradients(gradients, g, rows, thin, wanted_first)
    dx = first.input_gradient(gradients, g) if want_x else None
    found = [None if dx is None else dx.view(ctx.shape), *found, *found_second]
    if torch.is_grad_enabled() and not is_compiling():
        found = [first_order_only("adapted_gated_mlp", d, dout, x, way_back, *tensors) for d in found]
    return found


def _drawn(x: torch.Tensor, layers: Sequence[_Layer]) -> torch.Tensor | None:
    """The seeds of all dropouts of a call, in the layers' order, in one launch."""
    count = sum([layer.dropout > 0 for layer in layers])
    return seeds(x.device, count) if count else None


def _of_layers(layers: Sequence[_Layer], seeds: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """Each layer's seed of these."""
    if seeds is None:
        return [None] * len(layers)
    left = iter(seeds.unbind(0))
    return [next(left) if layer.dropout > 0 else None for layer in layers]


def _prepared(
    x: torch.Tensor, layers: Sequence[Adapted]
) -> tuple[torch.Tensor, tuple[_Layer, ...], list[torch.Tensor | None]] | None:
    """What a node takes: x, weights and biases as linear layers cast them under autocast, adapters as they are. None
    where no node serves them: other devices, subclasses of tensors, types that do not go together, functorch."""
    plain = [t for layer in layers for t in layer.tensors]
    if not served(x, *plain):
        return None
    x, *cast = cast_as_linear(x, *[t for layer in layers for t in layer.tensors[:2]])
    if any([t is not None and t.dtype is not x.dtype for t in cast]):
        return None
    tensors: list[torch.Tensor | None] = []
    for i, layer in enumerate(layers):
        tensors += cast[2 * i], cast[2 * i + 1], layer.a, layer.b
    plain_layers = [_Layer(each.scale, 0.0 if each.a is None else each.dropout, *each[-2:]) for each in layers]
    return x, tuple(plain_layers), tensors


def _is_differentiated(x: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or any([t is not None and t.requires_grad for t in tensors]))


def _check(op: str, x: torch.Tensor, layer: Adapted, name: str) -> None:
    def fault(what: str, t: torch.Tensor | None, needed: str) -> RuntimeError:
        given = "missing" if t is None else f"of shape {list(t.shape)}"
        return RuntimeError(f"{op}: {name}.{what} is {given}; {needed} is needed")

    weight, bias, a, b = layer.tensors
    if (weight is None) == (layer.dequantise is None):
        raise RuntimeError(f"{op}: {name} needs either a weight or dequantise, which makes one")
    if weight is not None and (weight.dim() != 2 or weight.shape[1] != x.shape[-1]):
        raise fault("weight", weight, f"[N, {x.shape[-1]}]")
    if (a is None) != (b is None):
        raise fault("b" if b is None else "a", None, "with one of a and b the other")
    if a is not None and (a.dim() != 2 or a.shape[1] != x.shape[-1]):
        raise fault("a", a, f"[r, {x.shape[-1]}]")
    n = weight.shape[0] if weight is not None else b.shape[0] if b is not None else None
    if a is not None and b is not None and list(b.shape) != [n, a.shape[0]]:
        raise fault("b", b, f"[{n}, {a.shape[0]}]")
    if bias is not None and n is not None and list(bias.shape) != [n]:
        raise fault("bias", bias, f"[{n}]")
    if not 0 <= layer.dropout < 1:
        raise ValueError(f"{op}: {name}.dropout is {layer.dropout}; a probability from 0 to below 1 is needed")


def adapted_linears(x: torch.Tensor, layers: Sequence[Adapted]) -> tuple[torch.Tensor, ...]:
    """Each layer's x W^T + bias + scale (d(x) A^T) B^T, d being its adapter's dropout.

    Args:
        x: [..., K]; float32, bfloat16 or float16.
        layers: see Adapted. Weights and biases of x's type (under autocast all three are cast as a linear layer casts
            them). A and B may be of any type: a call rounds them to x's, and makes their gradients in their own.

    Returns:
        One [..., N] for each layer, of x's type. Gradients flow to x and all weights, biases, A and B, each computed
        only where it is wanted; x's is summed within the products. Kept for them are the inputs and [..., r] numbers of
        each adapter, and of its dropout 16 bytes, a seed drawn from torch's generator, of which the mask is made in
        each pass (see `bastile.ops.dropout`). Other types or devices, mixed types and subclasses of tensors run the
        original torch code.

    Raises:
        RuntimeError, ValueError: naming the layer and tensor, what was given and what is needed.
    """
    for i, layer in enumerate(layers):
        _check("adapted_linears", x, layer, f"layers[{i}]")
    prepared = _prepared(x, layers)
    if prepared is None:
        return tuple([_original(x, layer) for layer in layers])
    x, plain, tensors = prepared
    drawn = _drawn(x, plain)
    if _is_differentiated(x, tensors):
        rest = late()
        results = _Linears.apply(x, plain, rest, drawn, *tensors)[: len(layers)]
        if rest is not None:
            rest.do(*results)
        return results
    group, rows = _Group(plain, tensors, x.dtype, _of_layers(plain, drawn)), x.reshape(-1, x.shape[-1])
    return tuple(group.results(x, rows, group.thin(rows)))


def adapted_gated_mlp(
    x: torch.Tensor, gate: Adapted, up: Adapted, down: Adapted, activation: str = "silu"
) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) of three layers as adapted_linears computes them (Shazeer, "GLU Variants Improve
    Transformer", 2020).

    Args:
        x: [..., H]; float32, bfloat16 or float16.
        gate, up: of H inputs and I outputs. down: of I inputs and H outputs.
        activation: as in `bastile.ops.glu.glu`.

    Returns:
        [..., H]. As adapted_linears; kept are x, [..., 2I] numbers, which the last backward pass over a graph writes
        over, and the adapters' thin results.

    Raises:
        RuntimeError, ValueError: naming the layer and tensor, what was given and what is needed.
    """
    unit = unit_of("adapted_gated_mlp", activation)
    _check("adapted_gated_mlp", x, gate, "gate")
    _check("adapted_gated_mlp", x, up, "up")
    prepared = _prepared(x, (gate, up, down))
    if prepared is None:
        return _original(unit.original(_original(x, gate), _original(x, up)), down)
    x, plain, tensors = prepared
    drawn = _drawn(x, plain)
    if _is_differentiated(x, tensors):
        rest = late()
        out = _GatedMLP.apply(x, plain, unit, rest, drawn, *tensors)
        out = out[0] if type(out) is tuple else out
        if rest is not None:
            rest.do(out)
        return out
    first, second = _mlp_groups(plain, tensors, x.dtype, drawn)
    rows = x.reshape(-1, x.shape[-1])
    y = unit.forward(*first.results(x, rows, first.thin(rows)))
    rows = y.view(-1, y.shape[-1])
    return second.results(y, rows, second.thin(rows))[0]


def _original(x: torch.Tensor, layer: Adapted) -> torch.Tensor:
    weight: Any = layer.weight if layer.dequantise is None else layer.dequantise(x.dtype)
    y = linear(x, weight, layer.bias)
    if layer.a is None or layer.b is None:
        return y
    adapter_input = x if torch.is_autocast_enabled(x.device.type) else x.to(layer.a.dtype)
    thin = linear(dropout(adapter_input, layer.dropout), layer.a)
    return (y + linear(thin, layer.b) * layer.scale).to(y.dtype)
