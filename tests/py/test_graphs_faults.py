"""Errors in the midst of a step or of a capture, copies of a model with graphs, and what is held without them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import bastile
from bastile.graphs import captured, recorder
from bastile.graphs import stack as stacks
from conftest import tiny_model
from graphing import (
    DEVICE,
    KEPT,
    ON_CUDA,
    allow_graphs,
    assert_alike,
    batch_of,
    counted,
    host_is_apart,
    loss_of,
    model_with_graphs,
    pretend_cuda,
    stock_gradients,
    the_host_draws,
)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch)


# ---- a capture that fails --------------------------------------------------------------------------------------------


def test_a_capture_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(captured.Captured, "_record", fail)
    got = assert_alike(tiny_model(), 0, steps=4)
    assert got.aside == {"capturing failed (RuntimeError: operation not permitted when stream is capturing)": 3}


class _Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * (1 if x.sum().item() else 2)


def test_what_the_host_draws_is_drawn_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    the_host_draws(monkeypatch, model)
    got = assert_alike(model, 0)
    assert list(got.aside) == ["layers within which the host draws random numbers"]


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_adapters_that_the_host_may_leave_out(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's LoHa draws for those that never are, too: they keep their graphs."""
    peft = pytest.importorskip("peft")
    host_is_apart(monkeypatch)
    config = peft.LoHaConfig(r=4, target_modules="all-linear", module_dropout=rate, init_weights=False)
    got = assert_alike(peft.get_peft_model(tiny_model(), config), None)
    assert (got.replayed > 0) is (rate == 0)
    assert ("layers within which the host draws random numbers" in got.aside) is (rate > 0)


@pytest.mark.skipif(not ON_CUDA, reason="waits for a GPU")
def test_a_wait_for_the_device_ends_a_capture() -> None:
    """And leaves no generator in it, whose next dropout would raise an error."""
    model = tiny_model(attention_dropout=0.1)
    model.model.layers[0].mlp.act_fn = _Asks()
    got = assert_alike(model, 0, steps=4)
    [reason] = got.aside
    assert reason.startswith("capturing failed")


class _Breaks(nn.Module):
    """An activation that raises while it is captured, once, in the forward or in the backward pass: in the second
    step, which is the first one with stand-ins in place of the parameters."""

    def __init__(self, error: type[BaseException], backward: bool, projection: nn.Linear) -> None:
        super().__init__()
        self.broken = [error]
        self.backward, self.own = backward, [projection.weight]
        self.of = [projection]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.of[0].weight is self.own[0] or not self.broken:
            return torch.nn.functional.silu(x)
        if self.backward:
            return _BreaksBackward.apply(x, self.broken)
        raise self.broken.pop()("in the midst")


class _BreaksBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, broken: list[Any]) -> torch.Tensor:
        ctx.broken = broken
        return torch.nn.functional.silu(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ctx.broken.pop()("in the midst")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_an_error_in_the_midst_of_a_capture(error: type[Exception], backward: bool) -> None:
    """The step and all that follow run without graphs, draw the random numbers that they would have drawn, and the
    modules hold their own parameters."""

    def breaks(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        mlp.act_fn = _Breaks(error, backward, mlp.down_proj)

    got = assert_alike(tiny_model(attention_dropout=0.2), 0, steps=4, before=[breaks])
    assert got.aside == {f"capturing failed ({error.__name__}: in the midst)": 3}


def test_an_interrupt_in_the_midst_of_a_capture() -> None:
    """Is the user's, and goes through; the model is as before, and can be trained on."""
    bastile.apply(cuda_graphs=True)
    model = tiny_model().to(DEVICE)
    mlp = model.model.layers[1].mlp
    mlp.act_fn = _Breaks(KeyboardInterrupt, False, mlp.down_proj)
    parameters = dict(model.named_parameters())
    model(**batch_of(model, 0)).loss.backward()
    with pytest.raises(KeyboardInterrupt):
        model(**batch_of(model, 0))
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert "_compiled_call_impl" not in vars(model.model.layers[0])
    counted()
    for _ in range(2):
        model(**batch_of(model, 0)).loss.backward()
    assert counted() == (2, {})


def test_an_error_in_the_midst_of_a_replayed_step() -> None:
    """As a batch that is too large raises one, which trainers catch and go on: the next step has the graphs again."""
    model = model_with_graphs()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("behind the layers")

    handle = model.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match="behind the layers"):
        model(**batch_of(model, 2))
    handle.remove()
    gc.collect()
    model.zero_grad()
    model(**batch_of(model, 3)).loss.backward()
    assert counted() == (1, {})
    got = [p.grad.clone() for p in model.parameters()]
    bastile.apply(cuda_graphs=False)
    model.zero_grad()
    model(**batch_of(model, 3)).loss.backward()
    assert all(torch.equal(p.grad, one) for p, one in zip(model.parameters(), got, strict=True))


# ---- backward passes -------------------------------------------------------------------------------------------------


def test_a_second_backward_pass_raises() -> None:
    model = model_with_graphs()
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward through captured layers a second time"):
        loss.backward()


def test_a_backward_pass_after_the_next_step_raises() -> None:
    """Before that step the graph of the first one, which is kept, keeps what the last layer returned."""
    model = model_with_graphs()
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss_of(model, 1).backward()
    assert counted() == (1, {KEPT: 1})
    with pytest.raises(RuntimeError, match="after another step has begun"):
        loss.backward()


def test_gradients_are_not_differentiated_again() -> None:
    model = model_with_graphs()
    loss = loss_of(model)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, model.model.layers[0].mlp.up_proj.weight, create_graph=True)


def test_some_gradients_alone() -> None:
    """The backward pass stops at the layer that is asked for; the next step begins as usual."""
    model = model_with_graphs(num_hidden_layers=3)
    [got] = torch.autograd.grad(loss_of(model), [model.model.layers[2].mlp.up_proj.weight])
    want = stock_gradients(model, 0)["model.layers.2.mlp.up_proj.weight"]
    assert torch.equal(got, want)
    del got
    bastile.apply(cuda_graphs=True)
    for _ in range(3):
        loss_of(model).backward()
    assert counted() == (3, {})


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_layers_are_left_as_they_were() -> None:
    model = model_with_graphs()
    scopes = [set(vars(module)) for module in model.modules()]
    again = pickle.loads(pickle.dumps(model))
    assert [set(vars(module)) for module in tiny_model().modules()] == scopes
    assert [set(vars(module)) for module in again.modules()] == scopes
    with pytest.raises(ValueError, match=r"labels|shape|size"):
        model(input_ids=torch.ones(2, 5, dtype=torch.long, device=DEVICE), labels=torch.ones(3, device=DEVICE).long())
    assert [set(vars(module)) for module in model.modules()] == scopes


def test_a_copy_of_a_model_with_graphs() -> None:
    """As averages of weights make one in the midst of training: both are trained on, each by graphs of its own."""

    def both(graphs: bool) -> list[torch.Tensor]:
        bastile.apply(cuda_graphs=graphs)
        models = [tiny_model().to(DEVICE)]
        for step in range(8):
            if step == 3:
                models.append(copy.deepcopy(models[0]))
            for number, model in enumerate(models):
                model(**batch_of(model, step + 10 * number)).loss.backward()
                torch.optim.SGD(model.parameters(), 0.1).step()
                model.zero_grad()
        return [p.detach() for model in models for p in model.parameters()]

    want = both(False)
    counted()
    got = both(True)
    assert counted() == (7 + 4, {})
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


# ---- what is held ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [lambda model: bastile.reset(), lambda model: bastile.apply(cuda_graphs=False)])
def test_nothing_is_held_without_graphs(end: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model lives on, and so do losses; graphs and their memory do not."""
    made: list[weakref.ref[Any]] = []
    stock = captured.Captured.__init__

    def initialise(self: Any, *args: Any) -> None:
        stock(self, *args)
        made.extend(map(weakref.ref, (self, self._recorder, *self.runs)))

    monkeypatch.setattr(captured.Captured, "__init__", initialise)
    bastile.apply(cuda_graphs=True)
    model = tiny_model(num_hidden_layers=3).to(DEVICE)
    losses = []
    for step in range(6):
        losses.append(model(**batch_of(model, step, columns=5 + step % 2)).loss)
        losses[-1].backward()
        model.zero_grad()
    assert len(made) == 2 * 3
    end(model)
    gc.collect()
    assert [one() for one in made] == [None] * len(made)
    assert not stacks._stacks


def test_memory_is_tidied_behind_the_first_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, when all gradients are there, and no state of an optimiser."""
    seen: list[bool] = []
    kind = recorder.CudaRecorder if ON_CUDA else recorder.RepeatingRecorder
    monkeypatch.setattr(kind, "tidy", lambda self: seen.append(all(p.grad is not None for p in model.parameters())))
    bastile.apply(cuda_graphs=True)
    model = tiny_model().to(DEVICE)
    for columns in (11, 7):
        model(**batch_of(model, 0, columns=columns)).loss.backward()
        assert seen == [True]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)


def test_streams_go_to_the_next_recorder(cuda: None) -> None:
    """With the memory that cuBLAS has for them; two that live have one each."""
    made = [recorder.CudaRecorder(torch.device(DEVICE, 0)) for _ in range(2)]
    streams = [each.stream for each in made]
    assert streams[0] is not streams[1]
    made.pop(0)
    again = recorder.CudaRecorder(torch.device(DEVICE, 0))
    assert again.stream is streams[0]
    assert recorder.CudaRecorder(torch.device(DEVICE, 0)).stream not in streams


@pytest.mark.skipif(not ON_CUDA, reason="needs memory of a GPU")
def test_models_that_are_gone_leave_nothing() -> None:
    left = []
    for _ in range(4):
        model = model_with_graphs()
        loss_of(model).backward()
        assert counted()[0] == 1
        bastile.reset()
        del model
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    assert left[1:] == left[1:2] * 3


@pytest.mark.parametrize("fails", [False, True])
def test_a_recorder_holds_no_graphs(fails: bool, cuda: None) -> None:
    """They are their users' alone: what is evicted, or was half captured when memory ran out, is free."""
    made = recorder.CudaRecorder(torch.device(DEVICE))
    first = made.pool
    with pytest.raises(RuntimeError) if fails else nullcontext(), made.recording():
        graph = made.record(lambda: [torch.ones(2, device=DEVICE) * 2])[0]
        weak = weakref.ref(graph)
        if fails:
            made.record(_no_memory)
    del graph
    gc.collect()
    assert weak() is None
    with made.recording():  # the pool went with its last graph
        assert made.pool is not first


def _no_memory() -> Any:
    raise torch.OutOfMemoryError("none left")
