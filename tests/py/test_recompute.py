"""What autograd keeps of our operators' outputs: nothing, where it can be made again; and the gradients to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bastile
from bastile.ops.moe import moe_experts
from bastile.ops.qk_norm_rope import qk_norm_rope
from bastile.ops.rms_norm import add_rms_norm, rms_norm
from bastile.ops.swiglu import swiglu
from bastile.recompute import offer, recomputing
from memory import Memory, kept_by
from oracle import DTYPES, EMULATED, assert_same_bits, devices, random_tensor


@pytest.fixture(autouse=True)
def at_every_size() -> Iterator[None]:
    bastile.set_recompute(0)
    yield
    bastile.set_recompute(None)


# ---- each operator, with what consumes its output -------------------------------------------------------------------


def projected(y: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Each projection keeps y for its weight."""
    return sum(nn.functional.linear(y, weight).float().square().sum() for weight in weights)


def _rms_norm(new: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor], int]:
    def run(x: torch.Tensor, weight: torch.Tensor, *projections: torch.Tensor) -> torch.Tensor:
        return projected(rms_norm(x, weight), *projections)

    return [new(2, 9, 48), new(48), new(8, 48), new(8, 48), new(8, 48)], run, 2 * 9 * 48


def _add_rms_norm(new: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor], int]:
    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *projections: torch.Tensor) -> torch.Tensor:
        y, total = add_rms_norm(x, residual, weight)
        return projected(y, *projections) + total.float().sum()

    return [new(2, 9, 48), new(2, 9, 48), new(48), new(8, 48), new(8, 48)], run, 2 * 9 * 48


def _add_rms_norm_without_residual(
    new: Callable[..., torch.Tensor],
) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor], int]:
    def run(x: torch.Tensor, weight: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
        y, total = add_rms_norm(x, None, weight)
        return projected(y, projection) + total.float().sum()

    return [new(2, 9, 48), new(48), new(8, 48)], run, 2 * 9 * 48


def _swiglu(new: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor], int]:
    return [new(2, 9, 48), new(2, 9, 48), new(8, 48)], lambda a, b, weight: projected(swiglu(a, b), weight), 2 * 9 * 48


def _qk_norm_rope(new: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor], int]:
    cos, sin = new(1, 9, 16).detach(), new(1, 9, 16).detach()

    def run(q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> torch.Tensor:
        q, k = qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), q_weight, k_weight, cos, sin)
        # A product keeps its factors, as attention does, in the memory order of [B, S, heads, D].
        return (q * q).float().sum() + (k * k).float().sum()

    return [new(2, 9, 4, 16), new(2, 9, 2, 16), new(16), new(16)], run, 2 * 9 * 6 * 16


def _moe_experts(new: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor], int]:
    """The gathered rows."""
    leaves = [new(9, 24), new(9, 2), new(4, 24, 32), new(4, 16, 24)]

    def run(hidden: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        indices = torch.arange(18, device=hidden.device).view(9, 2) % 4
        return moe_experts(hidden, indices, weights, gate_up, None, down, None).float().square().sum()

    return leaves, run, 9 * 2 * 24


OPERATORS = [_rms_norm, _add_rms_norm, _add_rms_norm_without_residual, _swiglu, _qk_norm_rope, _moe_experts]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__.strip("_"))
def test_an_operator_s_output_is_dropped_and_made_again(
    operator: Callable[..., Any], dtype: torch.dtype, device: str
) -> None:
    leaves, run, dropped = operator(lambda *shape: random_tensor(shape, dtype, device).requires_grad_())
    plain = torch.autograd.grad(run(*leaves), leaves)
    with recomputing():
        loss = run(*leaves)
    for want, got in zip(plain, torch.autograd.grad(loss, leaves), strict=True):
        assert_same_bits(want, got)
    before = kept_by(lambda: run(*leaves))
    with recomputing():
        after = kept_by(lambda: run(*leaves))
    assert before - after == dropped * leaves[0].element_size()


@pytest.mark.parametrize("which", ["x", "residual"])
@pytest.mark.parametrize("device", devices())
def test_the_norm_of_a_sum_of_unaligned_tensors_is_kept(device: str, which: str) -> None:
    """Kernels read these in smaller pieces than the sum, and add in another order."""
    flat = random_tensor((3 * 512 + 1,), torch.bfloat16, device).requires_grad_()
    aligned, weight, projection = (
        random_tensor(shape, torch.bfloat16, device).requires_grad_() for shape in ((3, 512), (512,), (8, 512))
    )

    def run() -> torch.Tensor:
        x, residual = flat[1:].view(3, 512), aligned
        return projected(add_rms_norm(*((x, residual) if which == "x" else (residual, x)), weight)[0], projection)

    plain = kept_by(run)
    with recomputing():
        assert kept_by(run) == plain


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("width", [128, 1000, 4096, 12288, 65536])
@pytest.mark.parametrize("device", devices())
def test_a_norm_of_a_sum_is_the_norm_of_the_kept_sum(device: str, width: int, rows: int) -> None:
    """add_rms_norm's output is made again by the norm alone: the two must agree to the bit at every width."""
    if EMULATED and rows * width > 10**5:
        pytest.skip("slow when emulated")
    for dtype in (torch.float32, torch.bfloat16):
        x, residual, weight = (random_tensor(shape, dtype, device) for shape in ((rows, width), (rows, width), width))
        y, total = add_rms_norm(x, residual, weight)
        assert_same_bits(y, rms_norm(total, weight))


# ---- what else may happen to a graph --------------------------------------------------------------------------------


def parameters(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [random_tensor(shape, torch.float32, "cpu").requires_grad_() for shape in shapes]


def norm_and_projections(count: int = 3) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A norm and so many projections, recorded with recomputation."""
    leaves = [
        random_tensor(shape, torch.float32, "cpu").requires_grad_() for shape in ((7, 32), (32,), *[(8, 32)] * count)
    ]
    with recomputing():
        loss = projected(rms_norm(leaves[0], leaves[1]), *leaves[2:])
    return leaves, loss


def test_one_output_is_made_once_for_all_that_kept_it() -> None:
    leaves, loss = norm_and_projections(count=3)
    with Memory() as memory:
        loss.backward()
    assert sum("rms_norm_forward" in call for call in memory.calls) == 1
    assert bastile.recompute._thread.last.outputs == ()
    # A part of the graph asks less often than tensors were dropped; nothing is left behind either.
    leaves, loss = norm_and_projections(count=3)
    torch.autograd.grad(loss, leaves[2])
    assert bastile.recompute._thread.last.outputs == ()


class _Spoil(torch.autograd.Function):
    """The identity, whose backward pass writes over what it has kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ctx.saved_tensors[0].zero_()
        return gradient


def test_an_output_that_its_first_reader_wrote_to_is_made_again() -> None:
    x, weight, projection = parameters((7, 32), (32,), (8, 32))

    def run() -> torch.Tensor:
        y = rms_norm(x, weight)
        loss = projected(y, projection)
        return loss + _Spoil.apply(y).sum()  # begun last, so its backward pass is the first

    (want,) = torch.autograd.grad(projected(rms_norm(x, weight), projection), projection)
    with recomputing():
        loss = run()
    (got,) = torch.autograd.grad(loss, projection)
    assert want.any()
    assert_same_bits(got, want)
    with recomputing():
        loss = run()
    with Memory() as memory:
        loss.backward()
    assert sum("rms_norm_forward" in call for call in memory.calls) == 2


def test_what_a_failed_backward_pass_has_made_is_not_another_s() -> None:
    """It ended between two readers. Since then the norm's weight has changed, which must not pass unseen."""
    x, weight, first, second = parameters((7, 32), (32,), (8, 32), (8, 32))
    fails = True

    def fail(gradient: torch.Tensor) -> None:
        if fails:
            raise ValueError("no further")

    with recomputing():
        y = rms_norm(x, weight)
        before = nn.functional.linear(y, first)
        before.register_hook(fail)
        loss = before.square().sum() + nn.functional.linear(y, second).square().sum()
    with pytest.raises(ValueError, match="no further"):
        loss.backward(retain_graph=True)
    assert second.grad is not None, "the second projection was read first"
    fails = False
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, second)  # one reader, who would find what is left of the other pass


def streams(monkeypatch: pytest.MonkeyPatch, current: list[int]) -> None:
    """As if work on any tensor were queued on this stream."""
    monkeypatch.setattr(bastile.recompute, "_stream", lambda tensor: current[0])


@pytest.mark.parametrize("at_reading", [[5, 5, 5], [5, 6, 6], [6, 5, 6]])
def test_what_was_made_on_another_stream_is_made_again(monkeypatch: pytest.MonkeyPatch, at_reading: list[int]) -> None:
    """Nothing there would wait for it. Three readers, each with its stream."""
    current = [5]
    streams(monkeypatch, current)
    x, weight, *projections = parameters((7, 32), (32,), (8, 32), (8, 32), (8, 32))
    left = list(at_reading)

    def switch(gradient: torch.Tensor) -> None:
        current[0] = left.pop(0)

    with recomputing():
        y = rms_norm(x, weight)
        terms = [nn.functional.linear(y, projection) for projection in projections]
        for term in terms:
            term.register_hook(switch)
        loss = sum(term.square().sum() for term in terms)
    with Memory() as memory:
        loss.backward()
    assert left == []
    made = 1 + sum(one != other for one, other in pairwise(at_reading))
    assert sum("rms_norm_forward" in call for call in memory.calls) == made


@pytest.mark.parametrize("saved_on", [5, 6])
def test_an_output_saved_on_another_stream_is_kept(monkeypatch: pytest.MonkeyPatch, saved_on: int) -> None:
    current = [5]
    streams(monkeypatch, current)
    x, weight, projection = parameters((7, 32), (32,), (8, 32))

    def run() -> torch.Tensor:
        current[0] = 5
        y = rms_norm(x, weight)
        current[0] = saved_on
        return projected(y, projection)

    plain = kept_by(run)
    with recomputing():
        dropped = plain - kept_by(run)
    assert dropped == (7 * 32 * 4 if saved_on == 5 else 0)


def test_the_stream_of_a_tensor_is_its_device_s_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    assert bastile.recompute._stream(SimpleNamespace(is_cuda=True, get_device=lambda: 3)) == 103
    assert bastile.recompute._stream(torch.ones(1)) is None


def test_a_retained_graph_gives_the_same_gradients_again() -> None:
    leaves, loss = norm_and_projections()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for want, got in zip(first, torch.autograd.grad(loss, leaves), strict=True):
        assert_same_bits(want, got)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_second_derivatives_flow_through_what_is_made_again() -> None:
    """A projection's own second derivative, with respect to the norm's weight, goes through the output it kept."""
    x, weight, projection = parameters((7, 32), (32,), (8, 32))

    def second() -> tuple[torch.Tensor, ...]:
        z = nn.functional.linear(rms_norm(x, weight), projection)
        (first,) = torch.autograd.grad(z.square().sum(), projection, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, weight, projection))

    plain = second()
    with recomputing():
        recomputed = second()
    for want, got in zip(plain, recomputed, strict=True):
        assert want.any()
        assert_same_bits(want, got)


def test_hooks_on_an_output_see_its_gradient() -> None:
    x, weight, projection = parameters((7, 32), (32,), (8, 32))
    seen = []
    with recomputing():
        y = rms_norm(x, weight)
        y.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
        y.retain_grad()
        loss = projected(y, projection)
    loss.backward()
    assert_same_bits(y.grad, 2 * seen[0])


@pytest.mark.parametrize("which", [0, 1])
def test_an_input_changed_in_place_is_an_error_as_autograd_s_is(which: int) -> None:
    leaves, loss = norm_and_projections()
    with torch.no_grad():
        leaves[which].add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* version 0 and is at version 1"):
        torch.autograd.grad(loss, leaves[2:])


def test_any_kept_tensor_changed_in_place_is_an_error() -> None:
    """Autograd itself does not compare versions where hooks are in force."""
    x = torch.ones(4, requires_grad=True)
    with recomputing():
        y = x * 1
        loss = (y * y).sum()
        y.detach().zero_()
    with pytest.raises(RuntimeError, match=r"torch\.float32 tensor of shape \[4\].* modified by an inplace operation"):
        loss.backward()


def test_an_output_changed_in_place_is_kept_as_it_is() -> None:
    x, weight, projection = parameters((7, 32), (32,), (8, 32))

    def run() -> tuple[torch.Tensor, ...]:
        y = rms_norm(x, weight)
        y.mul_(2)
        return torch.autograd.grad(projected(y, projection), (x, weight, projection))

    plain = run()
    with recomputing():
        recomputed = run()
    for want, got in zip(plain, recomputed, strict=True):
        assert_same_bits(want, got)


def test_an_address_used_again_is_not_mistaken_for_the_output() -> None:
    memory = np.ones((7, 32), dtype=np.float32)
    factor = torch.ones(7, 32, requires_grad=True)
    with recomputing():
        output = torch.from_numpy(memory).requires_grad_()
        offer(torch.zeros_like, (factor,), output)
        del output
        memory.fill(3)
        product = torch.from_numpy(memory) * factor
    product.sum().backward()
    assert (factor.grad == 3).all()


@pytest.mark.parametrize(
    ("view", "dropped"),
    [
        (lambda y: y.mT, True),
        (lambda y: y.view(-1), True),
        (lambda y: y.view(7, 4, 8).transpose(0, 1), True),
        (lambda y: y[:3], False),  # a part
        (lambda y: y[:, ::2], False),
        (lambda y: y.expand(2, 7, 32)[0], True),
    ],
)
def test_views_of_an_output(view: Callable[[torch.Tensor], torch.Tensor], dropped: bool) -> None:
    x, weight = parameters((7, 32), (32,))
    factor = torch.ones(view(x.detach()).shape, requires_grad=True)

    def run() -> torch.Tensor:
        return (view(rms_norm(x, weight)) * factor).sum()

    (want,) = torch.autograd.grad(run(), factor)
    with recomputing():
        loss = run()
        after = kept_by(run)
    assert_same_bits(torch.autograd.grad(loss, factor)[0], want)
    assert (kept_by(run) - after == 7 * 32 * 4) == dropped


def test_graphs_that_are_never_walked_are_freed() -> None:
    """A node that held its own output would keep it for ever."""
    x = torch.randn(100, requires_grad=True)
    with Memory() as memory, recomputing():
        y = torch.softmax(x, 0).exp().sum()
    del y
    assert memory.kept() == 0


def test_sparse_tensors_pass() -> None:
    dense = torch.eye(4).requires_grad_()
    with recomputing():
        loss = torch.sparse.mm(torch.eye(4).to_sparse(), dense).square().sum()
    loss.backward()
    assert torch.equal(dense.grad, 2 * torch.eye(4))


def test_a_weight_freed_meanwhile_is_named() -> None:
    leaves, loss = norm_and_projections()
    leaves[1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"shape \[32\].*has been freed.*recompute=False"):
        loss.backward()


def test_an_output_is_kept_where_the_weight_is_freed_at_once() -> None:
    """As sharding does with a norm that is a unit of its own."""
    x, weight, projection = parameters((7, 32), (32,), (8, 32))
    (want,) = torch.autograd.grad(projected(rms_norm(x, weight), projection), projection)
    with recomputing():
        y = rms_norm(x, weight)
        weight.untyped_storage().resize_(0)
        loss = projected(y, projection)
    assert_same_bits(torch.autograd.grad(loss, projection)[0], want)


# ---- stepping aside -------------------------------------------------------------------------------------------------


def test_other_hooks_have_the_tensors_for_themselves() -> None:
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel())
        return tensor.detach()

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    for outer, inner in ((hooks, recomputing()), (recomputing(), hooks)):
        seen.clear()
        leaves = parameters((7, 32), (32,), (8, 32))
        with outer, inner:
            loss = projected(rms_norm(leaves[0], leaves[1]), leaves[2])
            assert not bastile.recompute._thread.offers
        assert seen.count(7 * 32) == 2  # the norm's input and its output
        loss.backward()
    assert bastile.recompute._thread.offers is None


def test_nothing_happens_without_gradients_or_under_transforms() -> None:
    x, weight = torch.randn(3, 32), torch.ones(32)
    with torch.no_grad(), recomputing():
        assert bastile.recompute._thread.offers is None
    with recomputing():
        rms_norm(x, weight)  # requires no gradient, so the operator keeps nothing either
        assert bastile.recompute._thread.offers == {}

    def function(x: torch.Tensor) -> torch.Tensor:
        with recomputing():
            return rms_norm(x, weight).square().sum()

    assert torch.func.grad(function)(x).shape == x.shape


def test_threads_do_not_see_each_other_s_outputs() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(30):
                leaves = [torch.randn(shape, requires_grad=True) for shape in ((7, 32), (32,), (8, 32))]
                want = torch.autograd.grad(projected(rms_norm(leaves[0], leaves[1]), leaves[2]), leaves)
                with recomputing():
                    loss = projected(rms_norm(leaves[0], leaves[1]), leaves[2])
                for one, other in zip(want, torch.autograd.grad(loss, leaves), strict=True):
                    assert_same_bits(one, other)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


# ---- on a GPU -------------------------------------------------------------------------------------------------------

on_a_gpu = pytest.mark.skipif(EMULATED or not torch.cuda.is_available(), reason="needs a GPU")


def norm_gated(x: torch.Tensor, weight: torch.Tensor, *projections: torch.Tensor) -> torch.Tensor:
    y = rms_norm(x, weight)
    return swiglu(*[nn.functional.linear(y, projection) for projection in projections]).square().sum()


@on_a_gpu
@pytest.mark.parametrize("capture", [False, True], ids=["side stream", "graph"])
def test_streams_and_graphs(capture: bool) -> None:
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in parameters((7, 32), (32,), (64, 32), (64, 32))]
    want = torch.autograd.grad(norm_gated(*leaves), leaves)

    def run() -> tuple[torch.Tensor, ...]:
        with recomputing():
            loss = norm_gated(*leaves)
        return torch.autograd.grad(loss, leaves)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run()
    torch.cuda.synchronize()
    if capture:
        with torch.cuda.graph(graph):
            got = run()
        graph.replay()
        torch.cuda.synchronize()
    for one, other in zip(want, got, strict=True):
        assert_same_bits(one, other)


@on_a_gpu
def test_nothing_waits_for_the_device() -> None:
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in parameters((7, 32), (32,), (64, 32), (64, 32))]
    norm_gated(*leaves).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with recomputing():
            loss = norm_gated(*leaves)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
