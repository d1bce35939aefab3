"""The gated MLP of layers with adapters, as one node. See bastile.ops.lora.adapted_gated_mlp.

In a layer that is checkpointed the node keeps its input, and gate's and up's results are made where they are read: in
the backward pass, some rows at a time. Then no more of them exists at once than of a part, which is what most of such a
layer's memory is taken by, and no product is made more often. A node that is told to makes them again so anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from bastile.ops import low_rank
from bastile.ops._adapted import TENSORS, Group, Layer, is_one_pass, of_layers, reads_input
from bastile.ops._common import (
    Function,
    first_order_only,
    has_values,
    is_batched,
    release_on_last_pass,
    without_autocast,
)
from bastile.ops._late import Place, in_backward, in_checkpoint, taken
from bastile.ops.gated_mlp import unit_gradients

#: Rows are worked off in so many parts; in one more where weights are kept in another form: those of gate and up are
#: made once, and lie there from part to part. On an H200, Qwen3-8B, 8192 rows: 2 parts take no longer than one, 4 take
#: 1 % more, and save little beside what else a layer has there.
_PARTS = 2
#: Multiplications and additions of a part's large product, 0.15 ms of an H200: what its launches cost is little then.
_LEAST_WORK = 100e9
_ROWS = 128  # a part is a multiple of: products have tiles of as many


class GatedMLP(Function):
    """Keeps x where it is read, gate's and up's results, the thin ones and the seeds of dropouts. The activation comes
    again out of the kernel that makes its gradients. In parts, which is where there is a rest: x, and gate's and up's
    results only where a checkpoint's second run went on to what is behind this node."""

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
            kept: Any = Place(x), Place(x)
            a, b = kept[0].token, kept[1].token
        else:
            kept = a, b = first.results(x, rows, thin)
        if rest is None:
            y = unit.forward(a, b)
            thin_y = second.thin(y.view(-1, y.shape[-1]))
        keeps_x = ctx.parts is not None or reads_input(wanted[: 2 * TENSORS])
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
            found = _gradients(ctx, dout, saved)
        if torch.is_grad_enabled() and not is_compiling():
            x, way_back, tensors = saved[0], saved[5], saved[7 : 7 + 3 * TENSORS]
            found = [first_order_only("adapted_gated_mlp", d, dout, x, way_back, *tensors) for d in found]
        return found[0], None, None, None, None, *found[1:]


def _finish_unit(group: Group, unit: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
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
    y = unit.forward(*results)
    del results
    second.fill(y, second.thin(y), out.view(-1, out.shape[-1]))


def groups(
    layers: Sequence[Layer], tensors: Sequence[Any], dtype: torch.dtype, seeds: torch.Tensor | None
) -> tuple[Group, Group]:
    """Gate and up, and down. Behind the layers' tensors may stand what was rounded, first that of gate and up."""
    first, second, rounded = tensors[: 2 * TENSORS], tensors[2 * TENSORS : 3 * TENSORS], tensors[3 * TENSORS :]
    of_each = of_layers(layers, seeds)
    of_first: Any = None
    of_second: Any = None
    if rounded:
        adapted = sum([a is not None for a in first[2::TENSORS]])
        count = adapted + 1 if adapted else 0
        of_first, of_second = rounded[:count], rounded[count:]
    return (
        Group(layers[:2], first, dtype, of_each[:2], of_first),
        Group(layers[2:], second, dtype, of_each[2:], of_second),
    )


def _parts(rows: torch.Tensor, first: Group, second: Group, wanted: Sequence[bool]) -> list[slice] | None:
    """The rows that the backward pass takes at a time; None: all of them, whose gate's and up's results are kept."""
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
    # What is there at once: gate, up and dy of all rows; or of a part, dx, and the weights that are held.
    result = count * inner
    if held + count * width + max(3 * result, result + parts * made) // parts >= 3 * result + made:
        return None
    size = -(-count // (parts * _ROWS)) * _ROWS
    return [slice(at, min(at + size, count)) for at in range(0, count, size)]


def _gradients(ctx: Any, dout: torch.Tensor, saved: Sequence[Any]) -> list[torch.Tensor | None]:
    x, thin, a, b, thin_y, _, seeds, *tensors = saved
    last = release_on_last_pass(ctx, dout)
    want_x, _, _, _, _, *wanted = ctx.needs_input_grad
    first, second = groups(ctx.layers, tensors, ctx.dtype, seeds)
    rows: Any = None if x is None else x.reshape(-1, x.shape[-1])
    drows = dout.reshape(-1, dout.shape[-1])
    count, parts = drows.shape[0], None
    if ctx.parts is None:
        a, b = a.view(-1, a.shape[-1]), b.view(-1, b.shape[-1])
    else:
        a, b = (taken(t, count, outputs) for t, outputs in zip((a, b), first.outputs(), strict=True))
    is_made_here = a is None
    if is_made_here:
        last = not is_batched(dout)  # nobody else has what is made here
        parts = ctx.parts if last else None
        first.hold()

    wanted_first, wanted_second = wanted[: 2 * TENSORS], wanted[2 * TENSORS :]
    wants_y = reads_input(wanted_second) or (thin_y is None and any(wanted_second))
    wants = want_x or any(wanted_first[:TENSORS]), want_x or any(wanted_first[TENSORS:]), wants_y
    of_first: list[torch.Tensor | None] = [None] * len(wanted_first)
    of_second: list[torch.Tensor | None] = [None] * len(wanted_second)
    made_late = thin_y is None  # in a checkpoint
    g_second = second.through_b(of_second, [drows], thin_y, wanted_second)
    g_first = dx = sums = None
    if parts is not None:
        sums = torch.float32  # of the parts' gradients of adapters, which are rounded once
        g_first, dx = rows.new_empty(count, first.rank), rows.new_empty(rows.shape) if want_x else None
        thin_y = rows.new_empty(count, second.rank)

    def take(part: slice | None) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """What is made of these rows' gate, up and dy; of all rows: their g, thin y and dx."""

        def of(t: Any) -> Any:
            return t if t is None or part is None else t[part]

        def place(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else of(t)

        dy: Any = second.input_gradient([of(drows)], of(g_second))
        gate, up = first.results(of(rows), of(rows), of(thin)) if is_made_here else (a, b)
        makes_thin = wants[2] and (thin_y is None or part is not None)
        together = _together(first, second, dy, thin, wants, makes_thin, wanted) if last else None
        g: torch.Tensor | None = None
        mine: torch.Tensor | None = None
        if together is None:
            da, db, y = unit_gradients(ctx.unit, dy, gate, up, wants, last)
        else:
            da, db, y = gate, up, dy
            into = place(g_first)
            g = dy.new_empty(dy.shape[0], first.rank) if into is None else into
            passed = of(thin), of(g_second), g
            mine = _in_one_pass(ctx.unit, together, first, second, dy, gate, up, passed, of_first, of_second, sums)
        del dy, gate, up
        if mine is None:
            mine = second.thin(y, place(thin_y)) if makes_thin else of(thin_y)
        elif part is not None:
            of(thin_y).copy_(mine)
        second.base_gradients(of_second, [of(drows)], y, wanted_second)
        if together is None or not together.da_down:
            second.add_gradients_of_a(of_second, [of(drows)], of(g_second), y, wanted_second, sums)
        del y
        gradients = [da if wants[0] else None, db if wants[1] else None]
        if g is None:
            g = first.through_b(of_first, gradients, of(thin), wanted_first, place(g_first), sums)
        first.base_gradients(of_first, gradients, rows, wanted_first)
        return g, mine, first.input_gradient(gradients, g, place(dx)) if want_x else None

    if parts is None:
        g_first, thin_y, dx = take(None)
    else:
        for part in parts:
            take(part)
        for found, given in ((of_first, tensors[: 2 * TENSORS]), (of_second, tensors[2 * TENSORS :])):
            found[:] = [None if t is None else t.to(its.dtype) for t, its in zip(found, given, strict=False)]
    if made_late and second.adapted:
        second.add_gradient_of_b(of_second, 0, drows, thin_y, wanted_second)
    first.add_gradients_of_a(of_first, [drows] * 2, g_first, rows, wanted_first)
    return [None if dx is None else dx.view(ctx.shape), *of_first, *of_second]


class _Together(NamedTuple):
    """What the pass over the unit's gradients makes beside them and what gate's and up's adapters read of them."""

    da_down: bool
    thin_down: bool
    y: bool


def _together(
    first: Group,
    second: Group,
    dy: torch.Tensor,
    thin: torch.Tensor | None,
    wants: Sequence[bool],
    makes_thin: bool,
    wanted: Sequence[bool],
) -> _Together | None:
    """None: there is no such pass for these layers, or these results are not all wanted."""
    trains = wanted[3::TENSORS]
    if thin is None or first.adapted != [0, 1] or not (all(wants[:2]) and trains[0] and trains[1]):
        return None
    of_gate, of_up = first.rounded[1:]
    if of_gate.shape != of_up.shape or not is_one_pass(dy, of_gate):
        return None
    trains_weight, _, trains_a, _ = wanted[2 * TENSORS :]
    goes_along = bool(second.adapted) and not second.drops and second.rank == of_gate.shape[1]
    da_down, thin_down = goes_along and trains_a, goes_along and makes_thin
    return _Together(da_down, thin_down, trains_weight or trains_a > da_down or makes_thin > thin_down)


def _in_one_pass(
    unit: Any,
    together: _Together,
    first: Group,
    second: Group,
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    passed: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    of_first: list[torch.Tensor | None],
    of_second: list[torch.Tensor | None],
    dtype: torch.dtype | None,
) -> torch.Tensor | None:
    """The unit's gradients over gate and up, y over dy, the adapters' gradients to what is found of them, and the thin
    results of y, where these are among what is made. passed: gate's and up's thin results, the gradient of down's, and
    where that of the former is to be."""
    thin, g_down, into = passed
    b_gate, b_up = first.rounded[1:]
    db_gate, db_up, da_down, thin_down = low_rank.glu_backward(
        *unit.apart,
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
        into,
        together.y,
        together.da_down,
        together.thin_down,
    )
    for kept in (gate, up):
        torch.autograd.graph.increment_version(kept)
    first.add_to_b(of_first, 0, db_gate, dtype)
    first.add_to_b(of_first, 1, db_up, dtype)
    if together.da_down:
        second.add_to_a(of_second, 0, da_down, dtype)
    return thin_down if together.thin_down else None
