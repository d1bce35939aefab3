"""The experts of a mixture of experts: two grouped products around a gated unit."""

from __future__ import annotations

import torch

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import Function, first_order_only, need_floats, release_on_last_pass, served
from bastile.ops._glu import ALPHA, OAI, unit_of
from bastile.ops._grouped import grouped_matrices, grouped_rows
from bastile.ops._late import finished, late
from bastile.recompute import offer

__all__ = ["moe_experts"]

sort = torch.ops.bastile.moe_sort.default
gather = torch.ops.bastile.moe_gather.default
glu_forward = torch.ops.bastile.moe_glu_forward.default
_glu_backward = torch.ops.bastile.moe_glu_backward.default
_glu_backward_inplace = torch.ops.bastile.moe_glu_backward_inplace.default
combine_forward = torch.ops.bastile.moe_combine_forward.default
combine_backward = torch.ops.bastile.moe_combine_backward.default

#: The sort gives each expert a thread of one block.
MOST_EXPERTS = 1023


def as_the_matrices(left, right, ends, like):
    """The gradient of weights [E, A, B]: left [N, A] transposed times right [N, B], in memory as the weights are, so
    that autograd hands it on without a copy."""
    if like.stride(1) == 1 and like.stride(2) != 1:
        return grouped_matrices(right, left, ends).transpose(1, 2)
    return grouped_matrices(left, right, ends)


def gate_gradients(in_place, dy, h, given, want):
    """dh, w y, and the gradients of the routing weights and of the bias; in place: the first two over h and dy."""
    if not in_place:
        return _glu_backward(dy, h, *given, *want)
    want_dh, want_wy, _, _ = want
    dweights, dbias = _glu_backward_inplace(dy, h, *given, *want)
    torch.autograd.graph.increment_version(h)
    return h if want_dh else None, dy if want_wy else None, dweights, dbias


class _Experts(Function):
    """Keeps its inputs, the sort, the gathered rows, which recomputation makes again, and the first product's result.
    The gate is computed again in the backward pass, and the routing weights' gradient comes from the gate's side of the
    second product: with dy the gradient of that product's input, dweight = dy · y + dout · bias. So its result need not
    be kept.

    What is as large as the rows is let go of as soon as it has been read. In a checkpoint's second run, where nobody
    reads the result, the unit and the second product are not computed."""

    @staticmethod
    def forward(ctx, hidden, indices, weights, gate_up, gate_up_bias, down, down_bias, gate, with_grad, rest):
        order, position, ends = sort(indices, gate_up.shape[0])
        places = position.view(-1)
        rows = gather(hidden, places)
        h = grouped_rows(rows, gate_up, ends)
        if with_grad and ctx.needs_input_grad[3]:
            offer(gather, (hidden, places), rows, is_inner=True)
        else:
            rows = None
        behind = down, ends, position, weights, down_bias, indices
        if rest is None:
            y = glu_forward(h, gate_up_bias, ends, *gate)
            if not (with_grad and any(ctx.needs_input_grad)):
                h = None  # no backward pass will read it
            out = _second_layer(y, *behind)
        else:
            rest.leave(_finish, h, gate_up_bias, gate, behind)
            out = hidden.new_empty(hidden.shape)
        ctx.save_for_backward(hidden, rows, weights, gate_up, gate_up_bias, down, down_bias, h, order, position, ends)
        ctx.gate = gate
        return out

    @staticmethod
    def backward(ctx, dout):
        hidden, x, weights, gate_up, gate_up_bias, down, down_bias, h, order, position, ends = ctx.saved_tensors
        last = release_on_last_pass(ctx, dout)  # h above all
        want_hidden, _, want_weights, want_gate_up, want_gate_up_bias, want_down, want_down_bias, *_ = (
            ctx.needs_input_grad
        )
        dhidden = dweights = dgate_up = dgate_up_bias = ddown = ddown_bias = dots = None
        if down_bias is not None and (want_weights or want_down_bias):
            rows, dots, ddown_bias = combine_backward(
                dout, order, ends, weights, down_bias, want_weights, want_down_bias
            )
        else:
            rows = gather(dout, position.view(-1))
        want_dh = want_hidden or want_gate_up or want_gate_up_bias
        if want_dh or want_weights or want_down:
            dy = grouped_rows(rows, down.transpose(1, 2), ends)
            if not want_down:
                del rows
            given = (gate_up_bias, ends, order, weights, dots if want_weights else None, *ctx.gate)
            want = (want_dh, want_down, want_weights, want_gate_up_bias)
            dh, wy, dweights, dgate_up_bias = gate_gradients(last, dy, h, given, want)
            del dy, h
            if want_gate_up:
                dgate_up = as_the_matrices(x, dh, ends, gate_up)
            del x
            if want_hidden:
                dx = grouped_rows(dh, gate_up.transpose(1, 2), ends)
                dhidden = combine_forward(dx, position, None, None, None)
                del dx
            del dh
            if want_down:  # last, when all gradients are there: wy and rows take less memory than dh and its rows
                ddown = as_the_matrices(wy, rows, ends, down)
        gradients = (dhidden, None, dweights, dgate_up, dgate_up_bias, ddown, ddown_bias)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            sources = dout, hidden, weights, gate_up, gate_up_bias, down, down_bias
            gradients = tuple(first_order_only("moe_experts", g, *sources) for g in gradients)
        wanted = zip(gradients, ctx.needs_input_grad, strict=False)
        return *(g if want else None for g, want in wanted), None, None, None


def _second_layer(y, down, ends, position, weights, down_bias, indices):
    return combine_forward(grouped_rows(y, down, ends), position, weights, down_bias, indices)


def _finish(h, gate_up_bias, gate, behind, out):
    _, ends, *_ = behind
    out.copy_(_second_layer(glu_forward(h, gate_up_bias, ends, *gate), *behind))


def _reference(hidden, indices, weights, gate_up, gate_up_bias, down, down_bias, unit):
    """The definition in plain torch, for devices and types without kernels."""
    out = torch.zeros_like(hidden)
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(indices == expert)
        h = hidden[token] @ gate_up[expert]
        if gate_up_bias is not None:
            h = h + gate_up_bias[expert]
        y = unit.original_joined(h) @ down[expert]
        if down_bias is not None:
            y = y + down_bias[expert]
        out = out.index_add(0, token, (y * weights[token, choice, None]).to(out.dtype))
    return out


def check_experts(function, hidden, indices, weights, gate_up, gate_up_bias, down, down_bias):
    """function: as which errors name it."""

    def need(name: str, t: torch.Tensor | None, what: str, *sizes: int):
        if t is not None and t.shape != sizes:
            raise RuntimeError(f"{function}: {name} has shape {list(t.shape)}; {what} is needed, here {list(sizes)}")

    if not isinstance(indices, torch.Tensor):
        raise TypeError(f"{function}: router_indices is a {type(indices).__name__}; a tensor is needed")
    for name, t, dims, what in (
        ("hidden", hidden, 2, "[T, H]"),
        ("router_indices", indices, 2, "[T, K]"),
        ("gate_up_proj", gate_up, 3, "[E, H, 2I]"),
        ("down_proj", down, 3, "[E, I, H]"),
    ):
        if t.dim() != dims:
            raise RuntimeError(f"{function}: {name} has shape {list(t.shape)}; {what} is needed")
    if indices.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"{function}: router_indices is {indices.dtype}; int64 or int32 is needed")
    (tokens, width), choices, (experts, inner, _) = hidden.shape, indices.shape[1], down.shape
    need("router_indices", indices, "[T, K]", tokens, choices)
    need("routing_weights", weights, "[T, K]", tokens, choices)
    need("gate_up_proj", gate_up, "[E, H, 2I]", experts, width, 2 * inner)
    need("gate_up_bias", gate_up_bias, "[E, 2I]", experts, 2 * inner)
    need("down_proj", down, "[E, I, H]", experts, inner, width)
    need("down_bias", down_bias, "[E, H]", experts, width)


def as_they_lie(indices, weights, gate_up, gate_up_bias, down, down_bias):
    """What the operators read row by row is made contiguous; matrices may have any strides."""
    biases = [bias if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias)]
    return indices.long().contiguous(), weights.contiguous(), gate_up, biases[0], down, biases[1]


def moe_experts(
    hidden: torch.Tensor,
    router_indices: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_proj: torch.Tensor,
    down_bias: torch.Tensor | None,
    *,
    activation: str = "swiglu_oai",
    interleaved: bool | None = None,
    alpha: float = ALPHA,
    limit: float | None = None,
) -> torch.Tensor:
    """The weighted sum of what each token's experts make of it.

    For expert e, with h = hidden @ gate_up_proj[e] + gate_up_bias[e], of whose columns one half are the gate g, at most
    `limit`, and the others u, between -limit and limit: (act(g) * u) @ down_proj[e] + down_bias[e]. "swiglu_oai", which
    is GPT-OSS's unit and the default, is (u + 1) * g * sigmoid(alpha * g).

    Args:
        hidden: [T, H], float32, bfloat16 or float16.
        router_indices: [T, K], int64 or int32: each token's experts. One outside [0, E) is an error on CPU; on CUDA,
            where checking would wait for the device, it makes the token's output NaN and its gradients zero.
        routing_weights: [T, K], of any of the three types.
        gate_up_proj: [E, H, 2I], of hidden's type, as are the next three. Of any strides: weights that are stored as
            [E, 2I, H] are given as gate_up_proj.transpose(1, 2), which copies nothing, nor does their gradient.
        gate_up_bias: [E, 2I] or None.
        down_proj: [E, I, H], likewise.
        down_bias: [E, H] or None.
        activation: "silu", "gelu_tanh", "gelu", "relu", "relu2" or "swiglu_oai".
        interleaved: whether g and u are the even and the odd columns of h, not its first and its second half. None:
            for "swiglu_oai".
        alpha: of the sigmoid, for "swiglu_oai".
        limit: of the clamps; float("inf") for none. None: 7 for "swiglu_oai", none for others.

    Returns:
        [T, H], hidden's type. Gradients flow to everything but the indices; kept for them are the inputs, [T K, 2I]
        numbers and the sort. Other types or devices, mixed types, and calls under autocast run plain torch code.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    if interleaved is None:
        interleaved = activation == OAI
    unit = unit_of("moe_experts", activation, interleaved, alpha, limit)
    given = (hidden, router_indices, routing_weights, gate_up_proj, gate_up_bias, down_proj, down_bias)
    floats = [t for t in given if t is not None and t is not router_indices]
    is_served = served(*floats)
    if not is_served:
        names = ("hidden", "", "routing_weights", "gate_up_proj", "gate_up_bias", "down_proj", "down_bias")
        need_floats("moe_experts", **{name: t for name, t in zip(names, given, strict=True) if name})
    check_experts("moe_experts", *given)
    same = all(t.dtype == hidden.dtype for t in floats if t is not routing_weights)
    if not (
        is_served
        and same
        and gate_up_proj.shape[0] <= MOST_EXPERTS
        and not torch.is_autocast_enabled(hidden.device.type)
    ):
        return _reference(*given, unit)
    with_grad = torch.is_grad_enabled()
    rest = late() if with_grad and any([t.requires_grad for t in floats]) else None
    out = _Experts.apply(
        hidden,
        *as_they_lie(router_indices, routing_weights, gate_up_proj, gate_up_bias, down_proj, down_bias),
        unit.joined,
        with_grad,
        rest,
    )
    return finished(rest, out)
