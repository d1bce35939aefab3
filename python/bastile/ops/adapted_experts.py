"""The experts of a mixture of experts with a low-rank adapter on each expert's matrices."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from bastile.ops._common import FLOATS, Function, first_order_only, need_floats, release_on_last_pass, served
from bastile.ops._glu import ALPHA, OAI, unit_of
from bastile.ops._grouped import grouped_rows
from bastile.ops._late import finished, late
from bastile.ops.moe import (
    MOST_EXPERTS,
    as_the_matrices,
    as_they_lie,
    check_experts,
    combine_backward,
    combine_forward,
    gate_gradients,
    gather,
    glu_forward,
    moe_experts,
    sort,
)
from bastile.recompute import offer

__all__ = ["ExpertAdapters", "adapted_experts"]

_transpose = torch.ops.bastile.moe_transpose.default

#: Of which numbers of columns grouped products' operands on a GPU have a multiple.
_RANKS = 8


class ExpertAdapters(NamedTuple):
    """What is added to the matrices [E, A, B] of all experts: scale · a[e] @ b[e].

    a: [E, A, r] and b: [E, r, B], of any strides and the matrices' type. r of any size; multiples of 8 cost no copy.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


class _Spread(Function):
    """[E, r, B] of another type out of weight [B, r E], whose column k E + e is expert e's number k. As PyTorch
    permutes it, neighbours in the result are rows apart in what is read, and take 36 us where its bytes take 2 (64
    experts of rank 16 and 2048 columns, an H200)."""

    @staticmethod
    def forward(ctx, weight, experts, dtype):
        ctx.dtype = weight.dtype
        across = _transpose(weight.unsqueeze(0), FLOATS.index(dtype))  # [r E, 1, B]
        return across.view(-1, experts, weight.shape[0]).transpose(0, 1)

    @staticmethod
    def backward(ctx, g):
        back = _transpose(g.transpose(0, 1), FLOATS.index(ctx.dtype)).flatten(1)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            back = first_order_only("adapted_experts", back, g)
        return back, None, None


def spread(weight: torch.Tensor, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """The second matrices of all experts' adapters, as `ExpertAdapters` has b, out of PEFT's one.

    Args:
        weight: [B, r E], whose column k E + e is of expert e. Differentiable.

    Returns:
        [E, r, B] of type dtype; its rows are contiguous.
    """
    if served(weight):
        return _Spread.apply(weight, experts, dtype)
    b = weight.reshape(weight.shape[0], -1, experts).permute(2, 1, 0)
    return b.to(dtype, memory_format=torch.contiguous_format).contiguous()


class _AdaptedExperts(Function):
    """Of experts whose own matrices want no gradient. Keeps what `moe_experts` keeps, the gathered rows if adapters on
    gate_up want them, and both thin products [T K, r]. In a checkpoint's second run the second product is not computed.
    The backward pass is that of `moe_experts`, with a thin product beside each of its own: with d the gradient of the
    result's rows and w the routing weights,

        u2 = d b2^T       db2 = s2 (w t2)^T d       da2 = s2 (w y)^T u2       dy = d down^T + s2 u2 a2^T
        u1 = dh b1^T      db1 = s1 t1^T dh          da1 = s1 x^T u1           dx = dh gate_up^T + s1 u1 a1^T"""

    @staticmethod
    def forward(
        ctx, hidden, indices, weights, a1, b1, a2, b2, gate_up, gate_up_bias, down, down_bias, scales, gate, with_grad,
        rest,
    ):  # fmt: skip
        order, position, ends = sort(indices, gate_up.shape[0])
        places = position.view(-1)
        rows = gather(hidden, places)
        t1 = None if a1 is None else grouped_rows(rows, a1, ends)
        h = grouped_rows(rows, gate_up, ends, t1, b1, scales[0])
        if with_grad and ctx.needs_input_grad[3]:
            offer(gather, (hidden, places), rows, is_inner=True)
        else:
            rows = None
        y = glu_forward(h, gate_up_bias, ends, *gate)
        if not (with_grad and any(ctx.needs_input_grad)):
            h = None  # no backward pass will read it
        t2 = None if a2 is None else grouped_rows(y, a2, ends)
        behind = down, t2, b2, scales[1], ends, position, weights, down_bias, indices
        if rest is None:
            out = _second_layer(y, *behind)
        else:
            rest.leave(_finish, y, behind)
            out = hidden.new_empty(hidden.shape)
        ctx.save_for_backward(
            hidden, rows, weights, a1, b1, a2, b2, gate_up, gate_up_bias, down, down_bias, h, t1, t2,
            order, position, ends,
        )  # fmt: skip
        ctx.scales, ctx.gate = scales, gate
        return out

    @staticmethod
    def backward(ctx, dout):
        hidden, x, weights, a1, b1, a2, b2, gate_up, gate_up_bias, down, down_bias, h, t1, t2, order, position, ends = (
            ctx.saved_tensors
        )
        last = release_on_last_pass(ctx, dout)  # h above all
        want_hidden, _, want_weights, want_a1, want_b1, want_a2, want_b2, *_ = ctx.needs_input_grad
        dhidden = dweights = da1 = db1 = da2 = db2 = dots = u2 = None
        if down_bias is not None and want_weights:
            rows, dots, _ = combine_backward(dout, order, ends, weights, down_bias, True, False)
        else:
            rows = gather(dout, position.view(-1))
        if a2 is not None:
            u2 = grouped_rows(rows, b2.transpose(1, 2), ends)
        dy = grouped_rows(rows, down.transpose(1, 2), ends, u2, _across(a2), ctx.scales[1])
        if want_b2:
            weighted = (t2 * weights.view(-1)[order.long(), None]).to(t2.dtype)
            db2 = as_the_matrices(weighted, rows, ends, b2).mul_(ctx.scales[1])
        del rows
        want_dh, dh, wy = want_hidden or want_a1 or want_b1, None, None
        if want_dh or want_a2 or want_weights:
            given = (gate_up_bias, ends, order, weights, dots, *ctx.gate)
            dh, wy, dweights, _ = gate_gradients(last, dy, h, given, (want_dh, want_a2, want_weights, False))
        del dy, h
        if want_a2:
            da2 = as_the_matrices(wy, u2, ends, a2).mul_(ctx.scales[1])
        del wy
        if want_dh:
            u1 = None if a1 is None else grouped_rows(dh, b1.transpose(1, 2), ends)
            if want_b1:
                db1 = as_the_matrices(t1, dh, ends, b1).mul_(ctx.scales[0])
            if want_a1:
                da1 = as_the_matrices(x, u1, ends, a1).mul_(ctx.scales[0])
            del x
            if want_hidden:
                dx = grouped_rows(dh, gate_up.transpose(1, 2), ends, u1, _across(a1), ctx.scales[0])
                del dh
                dhidden = combine_forward(dx, position, None, None, None)
        gradients = (dhidden, None, dweights, da1, db1, da2, db2)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            sources = dout, hidden, weights, a1, b1, a2, b2
            gradients = tuple(first_order_only("adapted_experts", g, *sources) for g in gradients)
        wanted = zip(gradients, ctx.needs_input_grad, strict=False)
        return *(g if want else None for g, want in wanted), *[None] * 8


def _across(matrices: torch.Tensor | None) -> torch.Tensor | None:
    return None if matrices is None else matrices.transpose(1, 2)


def _second_layer(y, down, thin, b, scale, ends, position, weights, down_bias, indices):
    y = grouped_rows(y, down, ends, thin, b, scale)
    return combine_forward(y, position, weights, down_bias, indices)


def _finish(y, behind, out):
    out.copy_(_second_layer(y, *behind))


def _check_adapters(name: str, adapters: ExpertAdapters | None, of: torch.Tensor) -> None:
    if adapters is None:
        return
    (experts, outer, inner), a, b = of.shape, adapters.a, adapters.b
    rank = a.shape[-1] if a.dim() else 0
    for letter, t, shape, what in (
        ("a", a, (experts, outer, rank), "[E, A, r]"),
        ("b", b, (experts, rank, inner), "[E, r, B]"),
    ):
        if t.shape != shape:
            raise RuntimeError(
                f"adapted_experts: {name}.{letter} has shape {list(t.shape)}; {what} is needed, here {list(shape)}"
            )
        if t.dtype is not of.dtype:
            raise RuntimeError(f"adapted_experts: {name}.{letter} is {t.dtype}; its matrices are {of.dtype}")


def _whole(matrices: torch.Tensor, adapters: ExpertAdapters | None) -> torch.Tensor:
    if adapters is None:
        return matrices
    return torch.baddbmm(matrices, adapters.a, adapters.b, alpha=adapters.scale)


def _of(adapters: ExpertAdapters | None) -> tuple[torch.Tensor, ...]:
    return () if adapters is None else adapters[:2]


def _padded(adapters: ExpertAdapters | None) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
    """With columns and rows of zeros, so that grouped products on a GPU take them."""
    if adapters is None:
        return None, None, 0.0
    a, b, scale = adapters
    more = -a.shape[-1] % _RANKS if a.is_cuda else 0
    return (pad(a, [0, more]), pad(b, [0, 0, 0, more]), scale) if more else (a, b, scale)


def adapted_experts(
    hidden: torch.Tensor,
    router_indices: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_proj: torch.Tensor,
    down_bias: torch.Tensor | None,
    gate_up_adapters: ExpertAdapters | None = None,
    down_adapters: ExpertAdapters | None = None,
    *,
    activation: str = "swiglu_oai",
    interleaved: bool | None = None,
    alpha: float = ALPHA,
    limit: float | None = None,
) -> torch.Tensor:
    """`moe_experts` of gate_up_proj[e] + scale a[e] @ b[e], and of down_proj[e] likewise, without making these: each of
    its grouped products has a thin one beside it.

    Args:
        gate_up_adapters, down_adapters: what is added to gate_up_proj [E, H, 2I] and to down_proj [E, I, H]: see
            `ExpertAdapters`.
        The others: as those of `moe_experts`.

    Returns:
        [T, H], hidden's type. Gradients flow to hidden, the routing weights and the adapters. Kept for them are the
        inputs, [T K, 2I] numbers, [T K, r] ones for each adapter, the sort, and with gate_up_adapters the gathered rows
        [T K, H]. Where matrices or biases want a gradient too, and where `moe_experts` runs plain torch code, this is
        `moe_experts` of the sums.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    frozen = (gate_up_proj, gate_up_bias, down_proj, down_bias)
    need_floats(
        "adapted_experts",
        hidden=hidden,
        routing_weights=routing_weights,
        gate_up_proj=gate_up_proj,
        gate_up_bias=gate_up_bias,
        down_proj=down_proj,
        down_bias=down_bias,
    )
    _check_adapters("gate_up_adapters", gate_up_adapters, gate_up_proj)
    _check_adapters("down_adapters", down_adapters, down_proj)
    if interleaved is None:
        interleaved = activation == OAI
    unit = unit_of("adapted_experts", activation, interleaved, alpha, limit)
    floats = [t for t in (hidden, *frozen, *_of(gate_up_adapters), *_of(down_adapters)) if t is not None]
    with_grad = torch.is_grad_enabled()
    if (
        not served(routing_weights, *floats)
        or any([t.dtype is not hidden.dtype for t in floats])
        or (with_grad and any([t is not None and t.requires_grad for t in frozen]))
        or gate_up_proj.shape[0] > MOST_EXPERTS
        or torch.is_autocast_enabled(hidden.device.type)
    ):
        return moe_experts(
            hidden,
            router_indices,
            routing_weights,
            _whole(gate_up_proj, gate_up_adapters),
            gate_up_bias,
            _whole(down_proj, down_adapters),
            down_bias,
            activation=activation,
            interleaved=interleaved,
            alpha=alpha,
            limit=limit,
        )
    check_experts("adapted_experts", hidden, router_indices, routing_weights, *frozen)
    (a1, b1, s1), (a2, b2, s2) = _padded(gate_up_adapters), _padded(down_adapters)
    leaves = (hidden, routing_weights, a1, b1, a2, b2)
    rest = late() if with_grad and any([t is not None and t.requires_grad for t in leaves]) else None
    indices, weights, *frozen = as_they_lie(
        router_indices, routing_weights, gate_up_proj, gate_up_bias, down_proj, down_bias
    )
    out = _AdaptedExperts.apply(
        hidden,
        indices,
        weights,
        *(a1, b1, a2, b2),
        *frozen,
        (s1, s2),
        unit.joined,
        with_grad,
        rest,
    )
    return finished(rest, out)
