"""The MLP of layers with adapters, with a gate or without one, as one node. See adapted_gated_mlp and adapted_mlp of
bastile.ops.lora. Its first layers are gate and up, or up alone.

In a layer that is checkpointed the node keeps its input, and the first layers' results are made where they are read: in
the backward pass, some rows at a time. Then no more of them exists at once than of a part, which is what most of such a
layer's memory is taken by, and no product is made more often. A node that is told to makes them again so anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from bastile.ops import low_rank
from bastile.ops._adapted import TENSORS, WEIGHT, A, B, Found, Group, Layer, is_one_pass, of_layers, reads_input
from bastile.ops._common import (
    Function,
    first_order_only,
    has_values,
    is_batched,
    release_on_last_pass,
    without_autocast,
)
from bastile.ops._late import Place, in_backward, in_checkpoint, taken
from bastile.ops._wide_adapters import group_of
from bastile.ops.gated_mlp import unit_gradients

#: Rows are worked off in so many parts; in one more where weights are kept in another form: the first layers' are
#: made once, and lie there from part to part. On an H200, Qwen3-8B, 8192 rows: 2 parts take no longer than one, 4 take
#: 1 % more, and save little beside what else a layer has there.
_PARTS = 2
#: Multiplications and additions of a part's large product, 0.15 ms of an H200: what its launches cost is little then.
_LEAST_WORK = 100e9
_ROWS = 128  # a part is a multiple of: products have tiles of as many


class AdaptedMLP(Function):
    """Keeps x where it is read, the first layers' results, the thin ones and the seeds of dropouts. The activation
    comes again out of the kernel that makes its gradients. In parts, which is where there is a rest: x, and the first
    layers' results only where a checkpoint's second run went on to what is behind this node."""

    @staticmethod
    def forward(ctx, x, layers, unit, rest, seeds, *tensors):
        first, second = groups(layers, tensors, x.dtype, seeds)
        rows = x.reshape(-1, x.shape[-1])
        thin = first.thin(rows)
        wanted = ctx.needs_input_grad[5:]
        # In a checkpoint y and its thin results are left for later too, which the backward pass then makes from the y
        # that it makes anyway. Elsewhere keeping them costs less.
        ctx.parts = None if rest is None else _parts(rows, first, second, wanted)
        if rest is not None and ctx.parts is None and not in_checkpoint():
            rest = None
        y = thin_y = None
        if ctx.parts is not None:
            kept: Any = [Place(x) for _ in first.layers]
            a, b = of_unit([place.token for place in kept])
        else:
            kept = first.results(x, rows, thin)
            a, b = of_unit(kept)
        if rest is None:
            y = unit.forward(a, b)
            thin_y = second.thin(y.view(-1, y.shape[-1]))
        keeps_x = ctx.parts is not None or reads_input(wanted[:-TENSORS])
        way_back = None if keeps_x or is_compiling() else x.new_empty(0)
        ctx.save_for_backward(
            x if keeps_x else None, thin, a, b, thin_y, way_back, seeds, *tensors, *first.rounded, *second.rounded
        )
        ctx.shape, ctx.layers, ctx.dtype, ctx.unit = x.shape, layers, x.dtype, unit
        if rest is None:
            (out,) = second.results(y, y.view(-1, y.shape[-1]), thin_y)
        else:
            if ctx.parts is not None:
                rest.leave(_finish, first, second, unit, rows, thin, kept)
            else:
                rest.leave(_finish_unit, second, unit, a, b)
            (out,) = second.places(x)
        return out if way_back is None else (out, way_back)

    @staticmethod
    def backward(ctx, dout, *_):
        saved = ctx.saved_tensors
        with torch.no_grad(), without_autocast(dout.device.type):
            found = _Backward(ctx, dout, saved).gradients()
        if torch.is_grad_enabled() and not is_compiling():
            x, way_back, tensors = saved[0], saved[5], saved[7 : 7 + len(ctx.layers) * TENSORS]
            found = [first_order_only(ctx.unit.op, d, dout, x, way_back, *tensors) for d in found]
        return found[0], None, None, None, None, *found[1:]


def of_unit(results: Sequence[Any]) -> tuple[Any, Any]:
    """The first layers' results as the unit takes them: without a gate up's is activated."""
    return (results[0], None) if len(results) == 1 else (results[0], results[1])


def _finish_unit(group: Group, unit: Any, a: torch.Tensor, b: torch.Tensor | None, out: torch.Tensor) -> None:
    rows = unit.forward(a, b).view(-1, a.shape[-1])
    group.fill(rows, group.thin(rows), out)


def _finish(
    first: Group,
    second: Group,
    unit: Any,
    rows: torch.Tensor,
    thin: torch.Tensor | None,
    kept: Sequence[Place],
    out: torch.Tensor,
) -> None:
    if in_backward():  # a checkpoint's second run that goes on: what was made stays for the node
        shapes = [(rows.shape[0], outputs) for outputs in first.outputs()]
        results = [place.take(*shape) for place, shape in zip(kept, shapes, strict=True)]
        first.fill(rows, thin, *results)
    else:
        results = first.results(rows, rows, thin)
    y = unit.forward(*of_unit(results))
    del results
    second.fill(y, second.thin(y), out.view(-1, out.shape[-1]))


def groups(
    layers: Sequence[Layer], tensors: Sequence[Any], dtype: torch.dtype, seeds: torch.Tensor | None
) -> tuple[Group, Group]:
    """The first layers, and down. Behind the layers' tensors may stand what was rounded, that of the first at first."""
    end = len(layers) * TENSORS
    first, second, rounded = tensors[: end - TENSORS], tensors[end - TENSORS : end], tensors[end:]
    of_each = of_layers(layers, seeds)
    of_first: Any = None
    of_second: Any = None
    if rounded:
        adapted = sum([a is not None for a in first[2::TENSORS]])
        count = adapted + 1 if adapted else 0
        of_first, of_second = rounded[:count], rounded[count:]
    return (
        group_of(layers[:-1], first, dtype, of_each[:-1], of_first),
        group_of(layers[-1:], second, dtype, of_each[-1:], of_second),
    )


def _parts(rows: torch.Tensor, first: Group, second: Group, wanted: Sequence[bool]) -> list[slice] | None:
    """The rows that the backward pass takes at a time; None: all of them, whose first results are kept."""
    if (
        first.drops  # a mask is a function of an element's number among all
        or second.drops
        or any([trained for i, trained in enumerate(wanted) if i % TENSORS < 2])  # weights, of one product each
        or not has_values(rows)
    ):
        return None
    count, width = rows.shape
    inner = first.outputs()[0]
    held, made = (width * inner * sum([each.dequantise is not None for each in g.layers]) for g in (first, second))
    parts = min(_PARTS + (held > 0), int(2 * count * width * inner // _LEAST_WORK))
    if parts < 2:
        return None
    # What is there at once: the first results and dy of all rows; or of a part, dx, and the weights that are held.
    result = count * inner
    all_results = (len(first.layers) + 1) * result
    if held + count * width + max(all_results, result + parts * made) // parts >= all_results + made:
        return None
    size = -(-count // (parts * _ROWS)) * _ROWS
    return [slice(at, min(at + size, count)) for at in range(0, count, size)]


class _Together(NamedTuple):
    """What the pass over a gated unit's gradients makes beside them and what gate's and up's adapters read of them."""

    da_down: bool
    thin_down: bool
    y: bool


class _Backward:
    """A backward pass of the node, over all rows or over a part of them at a time."""

    def __init__(self, ctx: Any, dout: torch.Tensor, saved: Sequence[Any]) -> None:
        x, self.thin, a, b, self.thin_y, _, seeds, *tensors = saved
        self.last = release_on_last_pass(ctx, dout)
        self.want_x, _, _, _, _, *wanted = ctx.needs_input_grad
        self.shape, self.unit, self.tensors = ctx.shape, ctx.unit, tensors
        self.first, self.second = groups(ctx.layers, tensors, ctx.dtype, seeds)
        self.rows: Any = None if x is None else x.reshape(-1, x.shape[-1])
        self.drows = dout.reshape(-1, dout.shape[-1])
        self.parts: Any = None
        if ctx.parts is None:
            kept: Any = [t.view(-1, t.shape[-1]) for t in (a, b) if t is not None]
        else:
            count = self.drows.shape[0]
            kept = [taken(t, count, outputs) for t, outputs in zip((a, b), self.first.outputs(), strict=False)]
        self.kept = None if kept[0] is None else kept  # the first layers' results; None: they are made here
        if self.kept is None:
            self.last = not is_batched(dout)  # nobody else has what is made here
            self.parts = ctx.parts if self.last else None
            self.first.hold()
        sums = None if self.parts is None else torch.float32  # of the parts' gradients of adapters, rounded once
        self.of_first, self.of_second = Found(wanted[:-TENSORS], sums), Found(wanted[-TENSORS:], sums)
        *of_first, of_down = (wanted[i : i + TENSORS] for i in range(0, len(wanted), TENSORS))
        reads_y = reads_input(of_down) or (self.thin_y is None and any(of_down))
        wants_first = [self.want_x or any(of_layer) for of_layer in of_first]
        self.wants = wants_first[0], len(wants_first) > 1 and wants_first[1], reads_y
        self.g_first: torch.Tensor | None = None
        self.g_second: torch.Tensor | None = None
        self.dx: torch.Tensor | None = None

    def gradients(self) -> list[torch.Tensor | None]:
        """x's and the layers' tensors'."""
        first, second, rows, drows = self.first, self.second, self.rows, self.drows
        made_late = self.thin_y is None
        self.g_second = second.through_b(self.of_second, [drows], self.thin_y)
        if self.parts is None:
            self.g_first, self.thin_y, self.dx = self._take(None)
        else:
            self.g_first = first.new_thin(rows)
            self.thin_y = second.new_thin(rows)
            self.dx = rows.new_empty(rows.shape) if self.want_x else None
            for part in self.parts:
                self._take(part)
            for found, given in (
                (self.of_first, self.tensors[: len(first.layers) * TENSORS]),
                (self.of_second, self.tensors[len(first.layers) * TENSORS :][:TENSORS]),
            ):
                pairs = zip(found.gradients, given, strict=True)
                found.gradients = [None if t is None else t.to(its.dtype) for t, its in pairs]
                found.adapters = None
        if made_late and second.adapted:
            second.add_gradient_of_b(self.of_second, 0, drows, self.thin_y)
        first.add_gradients_of_a(self.of_first, [drows] * len(first.layers), self.g_first, rows)
        dx = None if self.dx is None else self.dx.view(self.shape)
        return [dx, *self.of_first.gradients, *self.of_second.gradients]

    def _take(self, part: slice | None) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """What is made of these rows' first results and dy; of all rows: their g, thin y and dx."""

        def of(t: Any) -> Any:
            return t if t is None or part is None else t[part]

        def place(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else of(t)

        first, second, wants, drows, thin = self.first, self.second, self.wants, of(self.drows), of(self.thin)
        dy: Any = second.input_gradient([drows], of(self.g_second))
        kept = first.results(of(self.rows), of(self.rows), thin) if self.kept is None else self.kept
        gate, up = of_unit(kept)
        makes_thin = wants[2] and (self.thin_y is None or part is not None)
        together = self._together(dy, makes_thin) if self.last else None
        g: torch.Tensor | None = None
        mine: torch.Tensor | None = None
        if together is None:
            da, db, y = unit_gradients(self.unit, dy, gate, up, wants, self.last)
        else:
            da, db, y = gate, up, dy
            into = place(self.g_first)
            g = first.new_thin(dy) if into is None else into
            mine = self._in_one_pass(together, dy, gate, up, thin, of(self.g_second), g)
        del dy, kept, gate, up
        if mine is None:
            mine = second.thin(y, place(self.thin_y)) if makes_thin else of(self.thin_y)
        elif part is not None:
            of(self.thin_y).copy_(mine)
        second.base_gradients(self.of_second, [drows], y)
        if together is None or not together.da_down:
            second.add_gradients_of_a(self.of_second, [drows], of(self.g_second), y)
        del y
        gradients = [da if wants[0] else None, db if wants[1] else None][: len(first.layers)]
        if g is None:
            g = first.through_b(self.of_first, gradients, thin, place(self.g_first))
        first.base_gradients(self.of_first, gradients, of(self.rows))
        return g, mine, first.input_gradient(gradients, g, place(self.dx)) if self.want_x else None

    def _together(self, dy: torch.Tensor, makes_thin: bool) -> _Together | None:
        """None: there is no such pass for these layers, or these results are not all wanted."""
        first, second = self.first, self.second
        if self.thin is None or first.is_wide or first.adapted != [0, 1] or not all(self.wants[:2]):
            return None
        of_gate, of_up = first.rounded[1:]
        trains = self.of_first.wants(0, B) and self.of_first.wants(1, B)
        if not trains or of_gate.shape != of_up.shape or not is_one_pass(dy, of_gate):
            return None
        trains_a = self.of_second.wants(0, A)
        goes_along = bool(second.adapted) and not second.drops and second.rank == of_gate.shape[1]
        da_down, thin_down = goes_along and trains_a, goes_along and makes_thin
        reads_y = self.of_second.wants(0, WEIGHT) or trains_a > da_down or makes_thin > thin_down
        return _Together(da_down, thin_down, reads_y)

    def _in_one_pass(
        self,
        together: _Together,
        dy: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        thin: torch.Tensor | None,
        g_down: torch.Tensor | None,
        g: torch.Tensor,
    ) -> torch.Tensor | None:
        """The unit's gradients over gate and up, y over dy, what gate's and up's thin results have for a gradient into
        g; and, where these are among what is made, y's thin results."""
        first, second = self.first, self.second
        b_gate, b_up = first.rounded[1:]
        db_gate, db_up, da_down, thin_down = low_rank.glu_backward(
            *self.unit.apart,
            first.layers[0].scale,
            first.layers[1].scale,
            dy,
            gate,
            up,
            thin,
            b_gate,
            b_up,
            g_down if together.da_down else None,
            second.rounded[0] if together.thin_down else None,
            g,
            together.y,
            together.da_down,
            together.thin_down,
        )
        for kept in (gate, up):
            torch.autograd.graph.increment_version(kept)
        first.add(self.of_first, 0, B, db_gate)
        first.add(self.of_first, 1, B, db_up)
        if together.da_down:
            second.add(self.of_second, 0, A, da_down)
        return thin_down if together.thin_down else None
