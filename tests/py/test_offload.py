"""The inputs of checkpointed layers in the host's memory: the bits of training without, by copies that come as late as
they may; what is moved when, and what is not."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import bastile
from bastile.graphs import conditions
from bastile.graphs.recorder import RepeatingRecorder
from bastile.offload import mover, passes
from conftest import gradients, tiny_batch, tiny_model
from graphing import ON_CUDA
from offloading import LateMover, apply, counted, offloaded
from processes import alone

LAYERS = 4
OFF = {"cuda_graphs": False}
CPU = torch.device("cpu")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateMover]:
    yield offloaded(monkeypatch)
    bastile.set_recompute(None)


def checkpointed(reentrant: bool = False, lora: float | None = None, **changes: Any) -> Any:
    """lora: the adapters' dropout."""
    model: Any = tiny_model(**{"num_hidden_layers": LAYERS, **changes})
    if lora is not None:
        config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=lora, init_lora_weights=False)
        model = get_peft_model(model, config)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant or lora is not None:
        model.enable_input_require_grads()
    return model.train()


def train(
    model: nn.Module, is_on: bool, steps: int = 3, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> list[torch.Tensor]:
    """Losses, and what the parameters have become, two batches a step, of lengths that grow and shrink."""
    apply(is_on, **OFF)
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(7)
    losses = []
    for step in range(2 * steps):
        with around():
            loss = model(**tiny_batch(model, columns=(9, 12, 7)[step % 3], seed=step)).loss
        loss.backward()
        losses.append(loss.detach())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *(p.detach() for p in model.parameters())]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.isfinite(other).all()
        assert torch.equal(one, other)


def free_buffers() -> int:
    buffers = mover.buffers_of(CPU)
    assert buffers is not None
    return len(buffers._free)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("reentrant", [False, True], ids=["usual", "reentrant"])
@pytest.mark.parametrize(
    ("lora", "around"), [(None, nullcontext), (0.0, nullcontext), (0.1, autocast)], ids=["full", "lora", "dropout"]
)
def test_training_has_the_same_bits(
    late: LateMover, reentrant: bool, lora: float | None, around: Callable[[], AbstractContextManager[Any]]
) -> None:
    model = checkpointed(reentrant, lora)
    want = train(model, False, around=around)
    assert late.outs == 0
    assert_same(train(model, True, around=around), want)
    assert late.outs == late.backs == 6 * (LAYERS - 1)
    assert counted() == (6, {})
    assert late.line == []
    # All is there for the next step, and no more of it than one step has in use.
    assert free_buffers() == LAYERS - 1


@pytest.mark.parametrize("reentrant", [False, True], ids=["usual", "reentrant"])
def test_when_what_is_copied_and_let_go(late: LateMover, reentrant: bool) -> None:
    model = checkpointed(reentrant, num_hidden_layers=5)
    inputs: list[StorageWeakRef] = []
    most: list[int] = []

    def alive() -> int:
        return sum(not each.expired() for each in inputs)

    def look(layer: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # the forward pass
            inputs.append(StorageWeakRef(args[0].untyped_storage()))
            most.append(alive())

    for layer in model.model.layers[1:]:  # the model itself holds the first one's for as long as it runs
        layer.register_forward_pre_hook(look)
    apply(True, **OFF)
    loss = model(**tiny_batch(model)).loss
    # Each waits for its copy before the layer after the next begins, and is gone then: three are there at a time.
    assert late.events == ["out 1", "out 2", "wait 1", "out 3", "wait 2", "out 4", "wait 3", "wait 4"]
    assert max(most) <= 3
    assert alive() == 1
    late.events.clear()
    loss.backward()
    # The last one has stayed. Each layer's input has been sent for before the layer behind it is run again.
    assert late.events == ["back 1", "wait 5", "back 2", "wait 6", "back 3", "wait 7", "back 4", "wait 8"]
    assert late.most_back == 2
    del loss
    assert alive() == 0


@pytest.mark.skipif(not ON_CUDA, reason="needs a GPU")
@pytest.mark.parametrize(("lora", "reentrant"), [(None, False), (0.0, False), (0.0, True)])
def test_on_cuda_by_its_own_copies(lora: float | None, reentrant: bool) -> None:
    """Inputs of 4 MiB, above which they are moved. What is freed and not yet written is NaN, and what attention adds up
    has an order."""
    layers, input_bytes = 8, 2 * 1024 * 1024 * 2
    large = {"hidden_size": 1024, "intermediate_size": 1536, "initializer_range": 0.02, "attn_implementation": "eager"}
    model = checkpointed(reentrant, lora, num_hidden_layers=layers, max_position_embeddings=1024, **large).to(
        "cuda", torch.bfloat16
    )
    ids = [torch.randint(1, 101, (2, 1024), device="cuda") for _ in range(3)]

    def work(is_on: bool) -> tuple[list[torch.Tensor], int]:
        apply(is_on, **OFF)
        found: list[torch.Tensor] = []
        for step in range(3):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = model(input_ids=ids[step], labels=ids[step]).loss
            if step == 0:  # two forward passes before their backward passes
                loss = loss + model(input_ids=ids[2], labels=ids[2]).loss
            if step == 1 and not reentrant:
                loss.backward(retain_graph=True)
            loss.backward()
            peak = torch.cuda.max_memory_allocated() - before
            found += [loss.detach(), *gradients(model).values()]
        return found, peak

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        (want, without), (got, with_it) = work(False), work(True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(got, want)
    assert counted() == (4, {})
    if lora is not None:  # else the peak is where all gradients are there, and one input
        assert without - with_it >= (layers - 5) * input_bytes


def test_many_passes_at_a_time(late: LateMover) -> None:
    """Two forward passes before their backward passes, in either order; one that has none; a retained graph."""
    model = checkpointed()

    def work() -> list[torch.Tensor]:
        one, other = (model(**tiny_batch(model, seed=seed)).loss for seed in (1, 2))
        one.backward()
        other.backward()
        found = list(gradients(model).values())
        model(**tiny_batch(model, seed=3))
        gc.collect()
        one, other = (model(**tiny_batch(model, columns=8 + seed, seed=seed)).loss for seed in (4, 5))
        other.backward(retain_graph=True)
        with torch.no_grad():
            model(**tiny_batch(model, seed=6))
        one.backward(retain_graph=True)
        other.backward()
        # A part of the graph alone: the layer before the first one that is wanted has been sent for in vain.
        wanted = list(model.model.layers[-1].parameters())
        found += torch.autograd.grad(one, wanted, retain_graph=True)
        one.backward()
        model(**tiny_batch(model, seed=7)).loss.backward()
        return [*found, *gradients(model).values()]

    apply(False, **OFF)
    want = work()
    apply(True, **OFF)
    assert_same(work(), want)
    assert counted() == (6, {})
    gc.collect()
    assert free_buffers() == 2 * (LAYERS - 1)


@pytest.mark.parametrize("reentrant", [False, True], ids=["usual", "reentrant"])
def test_errors_in_the_middle(late: LateMover, reentrant: bool) -> None:
    model = checkpointed(reentrant)
    apply(False, **OFF)
    model(**tiny_batch(model)).loss.backward()
    want = list(gradients(model).values())
    apply(True, **OFF)
    is_down = [False]

    def fail(*_: Any) -> None:
        if is_down[0]:
            raise ArithmeticError("down")

    functions = [vars(layer)["_gradient_checkpointing_func"] for layer in model.model.layers]
    hook = model.model.layers[2].mlp.register_forward_pre_hook(fail)
    is_down[0] = True
    with pytest.raises(ArithmeticError):
        model(**tiny_batch(model))
    is_down[0] = False
    loss = model(**tiny_batch(model)).loss
    is_down[0] = True
    with pytest.raises(ArithmeticError):
        loss.backward()
    is_down[0] = False
    hook.remove()
    assert [vars(layer)["_gradient_checkpointing_func"] for layer in model.model.layers] == functions
    del loss
    gc.collect()
    # What had been sent for and was not fetched: the allocator is told, as nobody waits for that copy.
    assert len(late.left) == 1
    assert free_buffers() == LAYERS - 1
    model.zero_grad()
    model(**tiny_batch(model)).loss.backward()
    assert_same(list(gradients(model).values()), want)


@pytest.mark.parametrize("is_on", [False, True])
def test_an_input_that_its_layer_changes_is_an_error_as_without(late: LateMover, is_on: bool) -> None:
    model = checkpointed()
    apply(is_on, **OFF)
    inputs: list[torch.Tensor] = []
    layer = model.model.layers[1]
    layer.input_layernorm.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    layer.mlp.register_forward_hook(lambda *_: inputs[0].add_(1) if len(inputs) == 1 else None)
    loss = model(**tiny_batch(model)).loss
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_layers_that_are_not_checkpointed_recompute_as_ever(late: LateMover) -> None:
    """What is not a checkpoint's is the hooks' that are around the model."""
    model = checkpointed(lora=0.0)
    for layer in model.base_model.model.model.layers[1:3]:
        layer.gradient_checkpointing = False
    bastile.set_recompute(min_tokens=0)
    want = train(model, False)
    assert_same(train(model, True), want)
    assert bastile.report().ran("recompute") > 0
    assert late.outs == late.backs == 6


def test_graphs_go_first(late: LateMover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "recorder_for", lambda device: RepeatingRecorder())
    model = checkpointed()

    def work() -> list[torch.Tensor]:
        found = []
        for step in range(4):
            loss = model(**tiny_batch(model, seed=step)).loss
            loss.backward()
            found += [loss.detach().clone(), *gradients(model).values()]
        return found

    apply(False, cuda_graphs=False)
    want = work()
    apply(True, cuda_graphs=True)
    assert_same(work(), want)
    assert bastile.report().ran("cuda_graphs") == 3
    assert counted() == (1, {"layers that run as CUDA graphs, or compiled": 3})
    assert late.outs == LAYERS - 1


def whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def test_wrappers_of_several_processes(late: LateMover) -> None:
    with alone():
        mesh = init_device_mesh("cpu", (1,))

        def sharded(model: nn.Module) -> nn.Module:
            for layer in model.model.layers:  # type: ignore[union-attr]
                fully_shard(layer, mesh=mesh)
            return fully_shard(model, mesh=mesh)

        for wrap in (nn.parallel.DistributedDataParallel, sharded):
            found = []
            for is_on in (False, True):
                apply(is_on, **OFF)
                wrapped = wrap(checkpointed())
                batch = tiny_batch(getattr(wrapped, "module", wrapped))
                for _ in range(2):
                    loss = wrapped(**batch).loss
                    loss.backward()
                found.append([loss.detach(), *(whole(p.grad) for p in wrapped.parameters())])
            assert_same(found[1], found[0])
            assert counted() == (2, {})


def test_one_model_alone_and_reset(late: LateMover) -> None:
    model, other = checkpointed(), checkpointed()
    assert "offload_checkpoints_qwen3" not in bastile.apply_to_model(model)
    assert "offload_checkpoints_qwen3" in bastile.apply_to_model(model, offload_checkpoints=True, **OFF)
    for each in (model, other):
        each(**tiny_batch(each)).loss.backward()
    assert late.outs == LAYERS - 1
    assert mover.bytes_held() > 0
    assert any("of the host's memory" in note for note in bastile.report().notes)
    want = gradients(model)
    loss = model(**tiny_batch(model)).loss
    bastile.reset(["rope"])  # of the process, where it is not; the model stays as it is, the host's memory goes
    assert mover.bytes_held() == 0
    loss.backward()  # which still has what it needs
    got = gradients(model)
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())
    assert "offload_checkpoints_qwen3" in bastile.reset(model=model)
    model(**tiny_batch(model)).loss.backward()
    assert late.outs == 2 * (LAYERS - 1)


def reasons(model: Any, around: AbstractContextManager[Any] | None = None) -> dict[str, int]:
    apply(True, **OFF)
    with around or nullcontext():
        model(**tiny_batch(model)).loss.backward()
    ran, aside = counted()
    assert ran == 0
    return aside


def test_what_is_not_moved_is_said(late: LateMover, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reasons(tiny_model()) == {"layers that are not checkpointed": 1}
    assert reasons(checkpointed(), torch.autograd.graph.save_on_cpu()) == {
        "other hooks on saved tensors, or none are allowed": 1
    }
    with monkeypatch.context() as patch:
        patch.setattr(late, "room", 0)
        assert reasons(checkpointed()) == {"the host has no page-locked memory left": 1}
    with monkeypatch.context() as patch:
        patch.setattr(passes, "MIN_BYTES", 4 << 20)
        assert reasons(checkpointed()) == {"hidden states of less than 4 MiB": 1}
    with monkeypatch.context() as patch:
        patch.setattr(mover, "mover_for", lambda device: None)
        assert reasons(checkpointed()) == {"hidden states on cpu, which is no GPU": 1}
    model = checkpointed()
    model.eval()
    apply(True, **OFF)
    model(**tiny_batch(model)).loss.backward()
    assert counted() == (0, {})
    assert late.outs == 0


def test_room_for_some(late: LateMover) -> None:
    model = checkpointed()
    apply(False, **OFF)
    model(**tiny_batch(model)).loss.backward()
    want = list(gradients(model).values())
    apply(True, **OFF)
    late.room = 4096  # one input: 2 x 11 x 32 floats
    model(**tiny_batch(model)).loss.backward()
    assert_same(list(gradients(model).values()), want)
    assert (late.outs, late.backs) == (1, 1)
    assert counted() == (1, {"the host has no page-locked memory left": 1})


def test_buffers_are_no_more_and_no_larger_than_what_was_in_use(late: LateMover) -> None:
    buffers = mover.Buffers(late)
    small = [buffers.take(100) for _ in range(3)]
    assert buffers.bytes == 3 * 128
    for buffer in small:
        buffers.give_back(buffer)
    large = [buffers.take(200) for _ in range(3)]
    assert buffers.bytes == 3 * 256
    for buffer in large:
        buffers.give_back(buffer)
    assert any(buffers.take(5) is buffer for buffer in large)
    assert buffers.bytes == 3 * 256
