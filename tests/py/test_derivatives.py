"""What derivatives can be had beside autograd's first, one by one: forward mode, batched gradients, gradients of
gradients. docs/design.md has the table."""

import pytest
import torch
from torch.autograd import forward_ad

from bastile.ops.adapted_experts import ExpertAdapters, adapted_experts
from bastile.ops.cross_entropy import cross_entropy
from bastile.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from bastile.ops.gated_delta_rule import gated_delta_rule
from bastile.ops.gated_mlp import gated_mlp
from bastile.ops.gated_rms_norm import gated_rms_norm
from bastile.ops.moe import moe_experts
from bastile.ops.norm import layer_norm
from bastile.ops.projections import projections
from bastile.ops.qk_norm_rope import qk_norm_rope
from bastile.ops.rms_norm import add_rms_norm, rms_norm
from bastile.ops.swiglu import swiglu
from every_operator import CALLS, H, T, random, tables


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """What holds of products in float32, whoever computes them: an error that is small beside the largest element."""
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


operators = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@operators
def test_forward_mode_runs_the_original_code(call):
    x, direction = random(T, H), random(T, H).flip(0)
    _, want = torch.func.jvp(call, (x,), (direction,))
    for primal in (x, x.clone().requires_grad_()):
        with forward_ad.dual_level():
            got = forward_ad.unpack_dual(call(forward_ad.make_dual(primal, direction))).tangent
        assert_close(got, want)


def test_forward_mode_with_frozen_weights_around():
    """Where autograd wants nothing of an operator, forward mode may still."""
    x, down = random(T, H), random(H, 16).requires_grad_()
    with forward_ad.dual_level():
        out = gated_mlp(forward_ad.make_dual(x, x), random(16, H), random(16, H), down)
        assert forward_ad.unpack_dual(out).tangent is not None


@pytest.mark.parametrize("retain", [True, False])
@operators
def test_batched_gradients_are_those_one_by_one(call, retain):
    """The last pass over a graph, too, which else writes over what was kept for it."""
    x = random(T, H).requires_grad_()
    out = call(x)
    upstream = torch.stack([random(*out.shape), random(*out.shape).square()])
    want = torch.stack([torch.autograd.grad(out, x, each, retain_graph=True)[0] for each in upstream])
    (got,) = torch.autograd.grad(out, x, upstream, is_grads_batched=True, retain_graph=retain)
    assert_close(got, want)


def test_batched_gradients_of_weights_and_where_rows_are_left_out():
    def experts(gate_up, down, bias):
        indices = torch.tensor([[0, 1]] * T)
        return moe_experts(random(T, H), indices, random(T, 2), gate_up, None, down, bias)

    def adapted(gate_up_a, gate_up_b, down_a, down_b):
        indices, matrices = torch.tensor([[0, 1]] * T), (random(2, H, 16), random(2, 8, H))
        adapters = ExpertAdapters(gate_up_a, gate_up_b), ExpertAdapters(down_a, down_b)
        return adapted_experts(random(T, H), indices, random(T, 2), matrices[0], None, matrices[1], None, *adapters)

    labels = torch.arange(300) % 11
    labels[100:] = -100

    def loss(hidden, weight):
        return fused_linear_cross_entropy(hidden, weight, labels)

    for function, shapes in (
        (experts, [(2, H, 16), (2, 8, H), (2, H)]),
        (adapted, [(2, H, 2), (2, 2, 16), (2, 8, 2), (2, 2, H)]),
        (gated_mlp, [(T, H), (16, H), (16, H), (H, 16)]),
        (projections, [(2, T, H), (3, H), (5, H)]),
        (loss, [(300, H), (11, H)]),
        (lambda logits: cross_entropy(logits * 1, labels[:T], inplace=True), [(T, 11)]),
    ):
        leaves = [random(*shape).requires_grad_() for shape in shapes]
        given = function(*leaves)
        out = torch.cat(given, -1) if isinstance(given, tuple) else given
        upstream = torch.stack([random(*out.shape), random(*out.shape).square()])
        want = [torch.autograd.grad(out, leaves, each, retain_graph=True) for each in upstream]
        got = torch.autograd.grad(out, leaves, upstream, is_grads_batched=True)
        for one, other in zip(got, zip(*want, strict=True), strict=True):
            assert_close(one, torch.stack(other))


def differentiated(out: torch.Tensor, *leaves: torch.Tensor, by: str) -> None:
    """The gradients of gradients, each of which a graph for all leaves leads to beside: what misses the way from a
    gradient back to a leaf is then no error of autograd's, but a wrong number."""
    gradients = torch.autograd.grad(out, leaves, create_graph=True)
    total = out + sum(g.square().sum() for g in gradients)
    torch.autograd.grad(total, leaves) if by == "grad" else total.backward()


@pytest.mark.parametrize("by", ["grad", "backward"])
@pytest.mark.parametrize("op", [op for op in CALLS if op != "projections"])
def test_differentiating_a_gradient_is_an_error(op, by):
    x = random(T, H).requires_grad_()
    with pytest.raises(RuntimeError, match=f"bastile: {op} cannot be differentiated twice; call bastile.reset"):
        differentiated(CALLS[op](x).square().sum(), x, by=by)


@pytest.mark.parametrize("by", ["grad", "backward"])
def test_differentiating_a_gradient_of_cast_projections_is_an_error(by):
    x, weights = random(2, T, H).requires_grad_(), [random(3, H).requires_grad_(), random(5, H).requires_grad_()]
    out = torch.cat(cast(x, weights), -1).float().square().sum()
    with pytest.raises(RuntimeError, match="bastile: projections cannot be differentiated twice"):
        differentiated(out, x, *weights, by=by)
    weight_gradient = torch.autograd.grad(torch.cat(cast(x, weights), -1).float().sum(), weights[0], create_graph=True)
    with pytest.raises(RuntimeError, match="bastile: projections cannot be differentiated twice"):
        torch.autograd.grad(weight_gradient[0].sum(), x)


def cast(x: torch.Tensor, weights: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.autocast("cpu", torch.bfloat16):
        return projections(x, *weights)


@pytest.mark.parametrize("op", [op for op in CALLS if op != "projections"])
def test_batched_gradients_to_be_differentiated_are_an_error_at_once(op):
    """The batch would take away what says so later."""
    with pytest.raises(RuntimeError, match=f"bastile: {op} cannot be differentiated twice"):
        torch.autograd.functional.jacobian(CALLS[op], random(T, H), create_graph=True, vectorize=True)


#: Functions of leaves of these shapes.
FUNCTIONS = {
    "rms_norm": (rms_norm, [(T, H), (H,)]),
    "layer_norm": (lambda x, w: layer_norm(x, w, random(H).to(w.dtype)), [(T, H), (H,)]),  # linear in its bias
    "add_rms_norm": (lambda *given: add_rms_norm(*given)[0], [(T, H), (T, H), (H,)]),
    "gated_rms_norm": (gated_rms_norm, [(T, H), (T, H), (H,)]),
    "gated_delta_rule": (
        lambda q, k, v, g, beta, state: gated_delta_rule(
            q, k, v, -g.square(), beta, initial_state=state, normalize=True
        )[0],
        [(1, T, 1, H), (1, T, 1, H), (1, T, 2, H), (1, T, 2), (1, T, 2), (1, 2, H, H)],
    ),
    "swiglu": (swiglu, [(T, H), (T, H)]),
    "gated_mlp": (gated_mlp, [(T, H), (16, H), (16, H), (H, 16)]),
    "qk_norm_rope": (
        lambda *given: torch.cat(qk_norm_rope(*given, *tables())),
        [(1, 2, T, H), (1, 2, T, H), (H,), (H,)],
    ),
    "cross_entropy": (lambda logits: cross_entropy(logits, torch.arange(T)), [(T, H)]),
    "fused_linear_cross_entropy": (
        lambda hidden, weight, bias: fused_linear_cross_entropy(hidden, weight, torch.arange(T), bias=bias),
        [(T, H), (11, H), (11,)],
    ),
    "moe_experts": (
        lambda hidden, weights, *given: moe_experts(hidden, torch.tensor([[0, 1]] * T), weights, *given),
        [(T, H), (T, 2), (2, H, 16), (2, 16), (2, 8, H), (2, H)],
    ),
    "adapted_experts": (
        lambda hidden, weights, a1, b1, a2, b2: adapted_experts(
            hidden,
            torch.tensor([[0, 1]] * T),
            weights,
            *(random(2, H, 16).to(hidden.dtype), None, random(2, 8, H).to(hidden.dtype), None),
            ExpertAdapters(a1, b1),
            ExpertAdapters(a2, b2),
        ),
        [(T, H), (T, 2), (2, H, 2), (2, 2, 16), (2, 8, 2), (2, 2, H)],
    ),
}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_no_way_from_a_gradient_back_is_missing(op):
    """With each input alone, the others frozen; and in float16, for which the loss makes its gradients later."""
    function, shapes = FUNCTIONS[op]
    for dtype in (torch.float32, torch.float16):
        for wanted in range(len(shapes)):
            if (op, wanted) == ("gated_mlp", 3):  # of the last weight alone, a linear layer is differentiated
                continue
            given = [random(*shape).to(dtype) for shape in shapes]
            given[wanted].requires_grad_()
            out = function(*given)
            with pytest.raises(RuntimeError, match=f"{op} cannot be differentiated twice"):
                differentiated(out.square().sum(), given[wanted], by="grad")
            (gradient,) = torch.autograd.grad(function(*given).sum(), given[wanted], create_graph=True)
            with pytest.raises(RuntimeError, match=f"{op} cannot be differentiated twice"):
                torch.autograd.grad(gradient.sum(), given[wanted])


def test_a_gradient_of_rows_that_lie_apart_leads_back_too():
    q, k = (random(1, 2, T, 2 * H)[..., ::2].requires_grad_() for _ in range(2))
    with pytest.raises(RuntimeError, match="qk_norm_rope cannot be differentiated twice"):
        differentiated(torch.cat(qk_norm_rope(q, k, random(H), random(H), *tables())).sum(), q, k, by="grad")


def test_products_alone_may_be_differentiated_again():
    leaves = [random(*shape).double().requires_grad_() for shape in ((T, H), (3, H), (5, H))]

    def second(function):
        out = torch.cat(function(*leaves), -1).square().sum()
        first = torch.autograd.grad(out, leaves, create_graph=True)
        return torch.autograd.grad(out + sum(g.square().sum() for g in first), leaves)

    want = second(lambda x, *weights: [torch.nn.functional.linear(x, weight) for weight in weights])
    for got, expected in zip(second(projections), want, strict=True):
        assert_close(got, expected)
