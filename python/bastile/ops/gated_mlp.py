"""The gated MLP, y = act(x Wg^T) * (x Wu^T), out = y Wd^T (Shazeer, 2020), with its gradients in one function."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from bastile.ops import low_rank
from bastile.ops._common import Function, cast_type, first_order_only, need_floats, release_on_last_pass, served
from bastile.ops._glu import Unit, unit_of
from bastile.ops._held_casts import cast_once
from bastile.ops._late import Late, finished, late
from bastile.ops._products import product

__all__ = ["gated_mlp", "gated_mlp_of_halves"]

_USUAL = unit_of("gated_mlp", "silu")


def unit_gradients(
    unit: Unit,
    dy: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    wanted: tuple[bool, bool, bool],
    in_place: bool,
) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """da, db and y; in place: over a, b and dy. Without b there is no db to want."""
    want_da, want_db, want_y = wanted
    if in_place:
        unit.backward_inplace(dy, a, b, *wanted)
        for kept, is_changed in ((a, want_da), (b, want_db)):
            if is_changed and kept is not None:
                torch.autograd.graph.increment_version(kept)
        return a, b, dy
    if want_y:
        return unit.backward_with_y(dy, a, b, want_da, want_db)
    return *unit.backward(dy, a, b, want_da, want_db), dy


class _GatedMLP(Function):
    """Keeps x, a = x Wg^T and b = x Wu^T. y comes out of the kernel that makes da and db, and the second half of dx is
    added to the first by the product that makes it. Weights of another type than x's, under autocast, are cast here."""

    @staticmethod
    def forward(ctx, x, gate, up, down, unit, rest=None):
        rows = x.reshape(-1, x.shape[-1])
        are_kept, (gate, up, down) = _cast(ctx, x, gate, up, down)
        a, b = rows.mm(gate.t()), rows.mm(up.t())
        want_x, want_gate, want_up, *_ = ctx.needs_input_grad
        weights = (gate, up) if want_x else (None, None)
        keeps_x = want_gate or want_up
        # For first_order_only, where an input that the gradients depend on is not kept: an output without elements.
        way_back = None if (keeps_x and want_x and are_kept) or torch.compiler.is_compiling() else x.new_empty(0)
        ctx.save_for_backward(x if keeps_x else None, *weights, down, a, b, way_back)
        ctx.shape, ctx.unit = x.shape, unit
        out = _last_layer(rest, unit, a, b, down, x)
        return out if way_back is None else (out, way_back)

    @staticmethod
    def backward(ctx, dout, *_):
        device = dout.device.type
        if torch.is_autocast_enabled(device):  # nothing here is to be cast: what the products read has one type
            with torch.autocast(device, enabled=False):
                return _gradients(ctx, dout)
        return _gradients(ctx, dout)


def _cast(ctx, x, *weights):
    """Whether these are of x's type, and they in that."""
    ctx.of_weights = tuple([weight.dtype for weight in weights])
    return all([dtype is x.dtype for dtype in ctx.of_weights]), [weight.to(x.dtype) for weight in weights]


def _last_layer(
    rest: Late | None, unit: Unit, a: torch.Tensor, b: torch.Tensor, down: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """The last layer of the unit of rows a and b, or where its result will be. Of its shape from the start: autograd
    lets nobody change a view in place that a node made."""
    if rest is None:
        return linear(unit.forward(a, b).view(*x.shape[:-1], down.shape[1]), down)
    rest.leave(_finish, unit, a, b, down)
    return x.new_empty(*x.shape[:-1], down.shape[0])


def _finish(unit: Unit, a: torch.Tensor, b: torch.Tensor, down: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(unit.forward(a, b), down.t(), out=out.view(-1, out.shape[-1]))


def _gradients(ctx, dout):
    x, gate, up, down, a, b, way_back = ctx.saved_tensors
    last = release_on_last_pass(ctx, dout)  # a and b above all
    want_x, want_gate, want_up, want_down, *_ = ctx.needs_input_grad
    dx = dgate = dup = ddown = None
    drows = dout.reshape(-1, dout.shape[-1])
    wanted = want_x or want_gate, want_x or want_up, want_down
    a, b, y = unit_gradients(ctx.unit, drows.mm(down), a, b, wanted, last)
    of_gate, of_up, of_down = ctx.of_weights
    if want_down:
        ddown = product(drows.t(), y, of_down)
    del y
    if want_gate or want_up:
        rows = x.reshape(-1, x.shape[-1])
    if want_gate:
        dgate = product(a.t(), rows, of_gate)
    if want_x and not torch.is_grad_enabled():
        dx = low_rank.input_gradient((a, b), (gate, up))
    in_parts = want_x and dx is None
    if in_parts:
        dx = a.mm(gate)
    del a
    if want_up:
        dup = product(b.t(), rows, of_up)
    if in_parts:
        dx.addmm_(b, up)
    if want_x:
        dx = dx.view(ctx.shape)
    gradients = dx, dgate, dup, ddown
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        gradients = tuple([first_order_only("gated_mlp", g, dout, x, gate, up, down, way_back) for g in gradients])
    return *gradients, None, None


class _GatedMLPOfHalves(Function):
    """As _GatedMLP, where one product makes a and b as halves of h. The kernel writes their gradients over them, so dx
    and the weight's gradient are one product each."""

    @staticmethod
    def forward(ctx, x, weight, down, unit, up_first, rest):
        are_kept, (weight, down) = _cast(ctx, x, weight, down)
        h = x.reshape(-1, x.shape[-1]).mm(weight.t())
        want_x, want_weight, *_ = ctx.needs_input_grad
        # For first_order_only: see _GatedMLP.
        way_back = None if (want_x and want_weight and are_kept) or torch.compiler.is_compiling() else x.new_empty(0)
        ctx.save_for_backward(x if want_weight else None, weight if want_x else None, down, h, way_back)
        ctx.shape, ctx.unit, ctx.up_first = x.shape, unit, up_first
        out = _last_layer(rest, unit, *_halves(h, up_first), down, x)
        return out if way_back is None else (out, way_back)

    @staticmethod
    def backward(ctx, dout, *_):
        with torch.autocast(dout.device.type, enabled=False):  # what the products read has one type
            return _gradients_of_halves(ctx, dout)


def _gradients_of_halves(ctx, dout):
    x, weight, down, h, way_back = ctx.saved_tensors
    last = release_on_last_pass(ctx, dout)
    want_x, want_weight, want_down, *_ = ctx.needs_input_grad
    dx = dweight = ddown = None
    drows = dout.reshape(-1, dout.shape[-1])
    a, b = _halves(h, ctx.up_first)
    da, db, y = unit_gradients(ctx.unit, drows.mm(down), a, b, (True, True, want_down), last)
    # Written over, they are h's halves still.
    dh = h if last else torch.cat((db, da) if ctx.up_first else (da, db), 1)
    del a, b, da, db, h
    of_weight, of_down = ctx.of_weights
    if want_down:
        ddown = product(drows.t(), y, of_down)
    if want_weight:
        dweight = product(dh.t(), x.reshape(-1, x.shape[-1]), of_weight)
    if want_x:
        dx = dh.mm(weight).view(ctx.shape)
    gradients = dx, dweight, ddown
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        gradients = tuple(
            [first_order_only("gated_mlp_of_halves", g, dout, x, weight, down, way_back) for g in gradients]
        )
    return *gradients, None, None, None


def _halves(h: torch.Tensor, up_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What is activated, and what it multiplies."""
    first, second = h.chunk(2, -1)
    return (second, first) if up_first else (first, second)


def _check(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
    def fault(name: str, t: torch.Tensor, needed: str) -> RuntimeError:
        return RuntimeError(f"gated_mlp: {name} has shape {list(t.shape)}; {needed} is needed")

    if x.dim() == 0:
        raise fault("x", x, "[..., H]")
    if gate.dim() != 2 or gate.shape[1] != x.shape[-1]:
        raise fault("gate_weight", gate, f"[I, {x.shape[-1]}]")
    if up.shape != gate.shape:
        raise fault("up_weight", up, f"{list(gate.shape)}")
    if down.dim() != 2 or down.shape[1] != gate.shape[0]:
        raise fault("down_weight", down, f"[H, {gate.shape[0]}]")


def gated_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:
    """The three linear layers of a gated MLP, without biases, and a gated unit between them.

    Args:
        x: [..., H]; float32, bfloat16 or float16.
        gate_weight: [I, H], of x's type (under autocast all four are cast as a linear layer casts them).
        up_weight: as gate_weight.
        down_weight: [H, I].
        activation: as in `bastile.ops.glu.glu`.

    Returns:
        [..., H]. Gradients flow to all four, each computed only where it is wanted; kept for them are the inputs and
        [..., 2I] numbers, which the last backward pass over a graph writes over. Other types or devices and mixed types
        run the original torch code.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    given = x, gate_weight, up_weight, down_weight
    gated = _USUAL if activation == "silu" else unit_of("gated_mlp", activation)
    if not served(*given):
        need_floats("gated_mlp", x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
        _check(*given)
        return _original(*given, gated)
    _check(*given)
    x, gate, up, down = given
    cast = _cast_input(*given)
    if cast is None:
        return _original(*given, gated)
    x = cast
    if torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad or up.requires_grad):
        rest = late()
        left = () if rest is None else (rest,)
        return finished(rest, _GatedMLP.apply(x, gate, up, down, gated, *left))
    x, (gate, up, down) = cast_once(x, (gate, up, down))
    both = low_rank.one_token_layers(x, (gate, up), (None, None))
    # y is all that the gradient of the last weight needs.
    y = gated.forward(*(both or (linear(x, gate), linear(x, up))))
    last = low_rank.one_token_layers(y, (down,), (None,))
    return linear(y, down) if last is None else last[0]


def _cast_input(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor | None:
    """x as a linear layer casts it; None where the weights are of another type, and not cast."""
    dtype = cast_type(x)
    if dtype is not None:
        return x.to(dtype)
    return x if all([weight.dtype is x.dtype for weight in weights]) else None


def _original(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gated: Unit) -> torch.Tensor:
    return linear(gated.original(linear(x, gate), linear(x, up)), down)


def gated_mlp_of_halves(
    x: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    activation: str = "silu",
    *,
    up_first: bool = False,
) -> torch.Tensor:
    """As `gated_mlp`, with the first two layers' weights one below the other in one tensor (Phi-3, GLM): one product in
    place of two, and no copy puts the two gradients together.

    Args:
        x: [..., H]; float32, bfloat16 or float16.
        gate_up_weight: [2I, H], the gate's rows and then up's, of x's type (under autocast all three are cast as a
            linear layer casts them).
        down_weight: [H, I].
        activation: as in `bastile.ops.glu.glu`.
        up_first: up's rows are the first ones.

    Returns:
        [..., H]. The rest is as for `gated_mlp`.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    op = "gated_mlp_of_halves"
    given = x, gate_up_weight, down_weight
    gated = unit_of(op, activation)
    need_floats(op, x=x, gate_up_weight=gate_up_weight, down_weight=down_weight)
    for name, t, fits, needed in (
        ("x", x, x.dim() > 0, "[..., H]"),
        (
            "gate_up_weight",
            gate_up_weight,
            gate_up_weight.dim() == 2 and gate_up_weight.shape[0] % 2 == 0 and gate_up_weight.shape[1:] == x.shape[-1:],
            f"[2I, {x.shape[-1] if x.dim() else 'H'}]",
        ),
        (
            "down_weight",
            down_weight,
            down_weight.dim() == 2 and down_weight.shape[1] * 2 == gate_up_weight.shape[0],
            f"[H, {gate_up_weight.shape[0] // 2 if gate_up_weight.dim() else 'I'}]",
        ),
    ):
        if not fits:
            raise RuntimeError(f"{op}: {name} has shape {list(t.shape)}; {needed} is needed")
    x, weight, down = given
    cast = _cast_input(*given) if served(*given) else None
    if cast is None:
        return linear(gated.original(*_halves(linear(x, weight), up_first)), down)
    x = cast
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        rest = late()
        return finished(rest, _GatedMLPOfHalves.apply(x, weight, down, gated, up_first, rest))
    # y is all that the gradient of the last weight needs.
    return linear(gated.forward(*_halves(linear(x, weight), up_first)), down)
