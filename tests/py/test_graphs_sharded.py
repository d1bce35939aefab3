"""Layers that FSDP2 shards, as graphs: the bits of training without, in one process and in two."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import bastile
from bastile.graphs import conditions
from bastile.graphs.recorder import RepeatingRecorder
from bastile.graphs.runs import Run
from conftest import tiny_model
from graphing import DEVICE, ON_CUDA, allow_graphs, batch_of, counted
from processes import alone, on_processes
from test_trainer_sharded import fsdp_on_a_cpu

#: Where the last graph that ran has made gradients; as long as that graph is there.
_made: list[torch.Tensor] = []
_AWAITED = "weights of sharded layers that a backward pass is still to read"
BACKEND = "nccl" if ON_CUDA else "gloo"


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_sharded(monkeypatch)


def allow_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, what a graph has made as gradients is gone when the next layer's runs, as in a pool."""
    allow_graphs(monkeypatch)
    _made.clear()
    if ON_CUDA:
        return

    def gone(hand_out: Callable[[Run], Any]) -> Callable[[Run], Any]:
        def handed_out(self: Run) -> Any:
            for gradient in _made:
                gradient.fill_(float("nan"))
            _made[:] = [each.tensor for each in self.gradients if each is not None]
            return hand_out(self)

        return handed_out

    for name in ("lent", "copied"):
        monkeypatch.setattr(Run, name, gone(getattr(Run, name)))


def layers_of(model: Any) -> nn.ModuleList:
    found: nn.ModuleList = getattr(model, "base_model", model).get_decoder().layers
    return found


def shard(model: Any, of_layers: Any = None, outside: bool = False, **options: Any) -> Any:
    """outside: what is checkpointed is a unit, as TorchTitan has it, and not the layer within first, as Accelerate."""
    for layer in layers_of(model):
        for each in dict.fromkeys((layer if outside else getattr(layer, "_checkpoint_wrapped_module", layer), layer)):
            fully_shard(each, **{**options, **(of_layers or {})})
    return fully_shard(model, **options)


def wrapped(model: Any) -> Any:
    """As FSDP's plugin of Accelerate checkpoints."""
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)
    return model


def checkpointed(model: Any) -> Any:
    """As Transformers does."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def adapters(model: Any) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    return get_peft_model(model, config).train()


def train(
    model: Any,
    graphs: bool,
    steps: int = 5,
    accumulate: int = 1,
    between: Callable[[Any, int], Any] = lambda model, step: None,
    rank: int = 0,
    **options: Any,
) -> tuple[list[torch.Tensor], tuple[int, dict[str, int]]]:
    """Losses, gradients and weights; and how many steps were replayed."""
    _made.clear()
    bastile.apply(cuda_graphs=graphs)
    counted()
    model = shard(copy.deepcopy(model).to(DEVICE), **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for step in range(steps):
        between(model, step)
        for micro in range(accumulate):
            if accumulate > 1:
                model.set_requires_gradient_sync(micro + 1 == accumulate)
            loss = model(**batch_of(model, 2 * (accumulate * step + micro) + rank), use_cache=False).loss
            loss.backward()
            found.append(loss.detach().clone())
        found += [p.grad.full_tensor().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *[p.full_tensor().detach().clone() for p in model.parameters()]], counted()


def assert_alike(model: Any, replayed: int | None, **how: Any) -> dict[str, int]:
    want, (none, _) = train(model, False, **how)
    got, (times, aside) = train(model, True, **how)
    assert none == 0
    assert times == replayed or replayed is None, aside
    for one, other in zip(got, want, strict=True):
        assert torch.isfinite(other).all()
        assert torch.equal(one, other)
    return aside


WAYS = [
    lambda model: model,
    wrapped,
    checkpointed,
    adapters,
    lambda m: wrapped(adapters(m)),
    lambda m: adapters(checkpointed(m)),
]
NAMES = ["plain", "wrapped", "checkpointed", "adapters", "adapters wrapped", "adapters checkpointed"]


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_one_process(way: Any) -> None:
    with alone(BACKEND):
        assert assert_alike(way(tiny_model(num_hidden_layers=3)), 4) == {}


@pytest.mark.parametrize("way", [wrapped, lambda m: wrapped(adapters(m))], ids=["weights", "adapters"])
def test_units_around_what_is_checkpointed(way: Any) -> None:
    with alone(BACKEND):
        assert assert_alike(way(tiny_model(num_hidden_layers=3)), 4, outside=True) == {}


def two(rank: int, way: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        allow_sharded(patch)
        model = WAYS[NAMES.index(way)](tiny_model(num_hidden_layers=3))
        assert assert_alike(model, 4, rank=rank) == {}
        assert assert_alike(model, 9, accumulate=2, rank=rank) == {}


@pytest.mark.parametrize("way", NAMES)
def test_two_processes(way: str, tmp_path: Path) -> None:
    """Each with batches of its own."""
    on_processes(2, tmp_path, two, way)


def one_without(rank: int) -> None:
    """What is sent does not depend on who replays."""
    conditions.recorder_for = lambda device: RepeatingRecorder() if rank else None
    want, _ = train(tiny_model(num_hidden_layers=3), False, rank=rank)
    got, (times, _) = train(tiny_model(num_hidden_layers=3), True, rank=rank)
    assert times == (4 if rank else 0)
    assert all(map(torch.equal, got, want))


def test_one_process_of_two(tmp_path: Path) -> None:
    on_processes(2, tmp_path, one_without)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_gradients_of_several_steps(accumulate: int) -> None:
    with alone(BACKEND):
        assert assert_alike(tiny_model(num_hidden_layers=3), 5 * accumulate - 1, accumulate=accumulate) == {}


def test_evaluation_between_steps() -> None:
    def evaluate(model: Any, step: int) -> None:
        model.eval()
        with torch.no_grad():
            model(**batch_of(model, 3), use_cache=False)
        model.train()

    with alone(BACKEND):
        assert assert_alike(wrapped(tiny_model(num_hidden_layers=3)), 8, between=evaluate) == {}


def test_mixed_precision() -> None:
    """Weights of float32 gathered in bfloat16: the layers', too, or these alone, whose arguments are cast then."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with alone(BACKEND):
        assert assert_alike(tiny_model(num_hidden_layers=3), 4, mp_policy=policy) == {}
        aside = assert_alike(tiny_model(num_hidden_layers=3), 0, of_layers={"mp_policy": policy})
        assert aside == {"arguments or results of layers that FSDP casts": 5}


def test_weights_that_stay_whole() -> None:
    with alone(BACKEND):
        aside = assert_alike(tiny_model(num_hidden_layers=3), 0, reshard_after_forward=False)
        assert aside == {"weights that FSDP does not let go of behind each layer": 5}


def test_weights_that_are_whole_before_a_step() -> None:
    """Of one layer, and of all: they need memory of their own in that step."""

    def one(model: Any, step: int) -> None:
        if step == 3:
            layers_of(model)[1].unshard()

    def every(model: Any, step: int) -> None:
        if step == 3:
            for layer in layers_of(model):
                layer.unshard()

    with alone(BACKEND):
        whole = "weights of sharded layers that are whole when a step begins"
        assert assert_alike(tiny_model(num_hidden_layers=3), 3, between=one) == {whole: 1}
        assert assert_alike(tiny_model(num_hidden_layers=3), 3, between=every) == {whole: 1}


def test_a_graph_never_reads_another_layers_weights() -> None:
    """Those of two layers whole between the passes: an error that says what to do, and not gradients of the wrong
    weights."""
    with alone(BACKEND):
        bastile.apply(cuda_graphs=True)
        model = shard(tiny_model(num_hidden_layers=3).to(DEVICE))
        for step in range(2):
            model(**batch_of(model, step), use_cache=False).loss.backward()
        loss = model(**batch_of(model, 2), use_cache=False).loss
        layers_of(model)[0].unshard()
        with pytest.raises(RuntimeError, match="cuda_graphs=False"):
            loss.backward()


def memory_of(model: Any) -> list[tuple[int, int]]:
    """Where gathered weights of each layer lie, and how many bytes they have."""
    groups = [state._fsdp_param_groups[0] if hasattr(state, "_fsdp_param_groups") else state._fsdp_param_group
              for state in (layer._get_fsdp_state() for layer in layers_of(model))]  # fmt: skip
    storages = [p.all_gather_outputs[0].untyped_storage() for group in groups for p in group.fsdp_params]
    return [(storage.data_ptr(), storage.nbytes()) for storage in storages]


def test_what_is_taken_is_given_back() -> None:
    with alone(BACKEND):
        bastile.apply(cuda_graphs=True)
        model = shard(tiny_model(num_hidden_layers=3).to(DEVICE))
        model(**batch_of(model, 0), use_cache=False).loss.backward()
        before = memory_of(model)
        model(**batch_of(model, 1), use_cache=False).loss.backward()
        shared = memory_of(model)
        assert not any(size for _, size in before)
        assert all(size for _, size in shared)
        assert 3 * len(set(shared)) == len(shared), "one layer's for all"
        bastile.reset()
        assert not any(size for _, size in memory_of(model))
        model(**batch_of(model, 2), use_cache=False).loss.backward()
        assert not any(size for _, size in memory_of(model))


def frozen_below(model: Any) -> Any:
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    return model


def test_layers_without_gradients() -> None:
    with alone(BACKEND):
        assert assert_alike(frozen_below(tiny_model(num_hidden_layers=3)), 4) == {}
        assert assert_alike(wrapped(frozen_below(tiny_model(num_hidden_layers=3))), 4) == {}


def test_a_reference_between_the_passes() -> None:
    """The same layers without their adapters, as preferences are trained."""

    def train(graphs: bool) -> list[torch.Tensor]:
        _made.clear()
        bastile.apply(cuda_graphs=graphs)
        model = shard(wrapped(adapters(tiny_model(num_hidden_layers=3))).to(DEVICE))
        found = []
        for step in range(5):
            loss = model(**batch_of(model, step), use_cache=False).loss
            with torch.no_grad(), model.disable_adapter():
                found.append(model(**batch_of(model, step), use_cache=False).loss.clone())
            loss.backward()
            found += [
                loss.detach().clone(),
                *[p.grad.full_tensor().clone() for p in model.parameters() if p.grad is not None],
            ]
            model.zero_grad()
        return found

    with alone(BACKEND):
        want = train(False)
        counted()
        got = train(True)
        assert counted() == (8, {})
        assert all(map(torch.equal, got, want))


def passes(graphs: bool, way: Any, before_backward: Callable[[Any, int], Any], steps: int = 5) -> list[torch.Tensor]:
    """Losses and gradients where two forward passes come before their backward pass."""
    _made.clear()
    bastile.apply(cuda_graphs=graphs)
    model = shard(way(tiny_model(num_hidden_layers=3)).to(DEVICE))
    found = []
    for step in range(steps):
        first, second = [model(**batch_of(model, 2 * step + n), use_cache=False).loss for n in range(2)]
        before_backward(model, step)
        (first + second).backward()
        found += [first.detach().clone(), second.detach().clone()]
        found += [p.grad.full_tensor().clone() for p in model.parameters() if p.grad is not None]
        for layer in layers_of(model):
            layer.reshard()
        model.zero_grad()
    return found


def nothing(model: Any, step: int) -> None:
    pass


def stay(model: Any, step: int) -> None:
    """Layers' weights stay behind their backward pass; those of the next step's passes do not."""
    model.set_reshard_after_backward(step % 2 == 1)


@pytest.mark.parametrize("before_backward", [nothing, stay])
@pytest.mark.parametrize("way", [lambda model: model, wrapped], ids=["plain", "wrapped"])
def test_weights_that_a_backward_pass_is_to_read_do_not_move(way: Any, before_backward: Any) -> None:
    """Of a pass that was not replayed, beside one that is the first to be."""
    with alone(BACKEND):
        want = passes(False, way, before_backward)
        try:
            got = passes(True, way, before_backward)
        except RuntimeError as error:
            assert before_backward is stay and "cuda_graphs=False" in str(error)  # noqa: PT017, PT018
            return
        assert all(map(torch.equal, got, want))
        replayed, aside = counted()
        assert replayed or before_backward is stay
        assert _AWAITED in aside or way is wrapped


def hooked(model: Any, step: int) -> None:
    if step == 2:
        layers_of(model)[1].register_forward_hook(lambda *_: None)


def test_hooks_of_others() -> None:
    with alone(BACKEND):
        aside = assert_alike(tiny_model(num_hidden_layers=3), 1, between=hooked)
        assert aside == {"hooks in the layers, which a graph would not call": 3}


def sft(rank: int, folder: Path) -> None:
    """As the README of TRL has it, by Accelerate, with adapters and activation checkpointing."""
    from transformers import Trainer, TrainingArguments

    with pytest.MonkeyPatch.context() as patch:
        fsdp_on_a_cpu(patch)
        allow_graphs(patch, "cpu")
        logged = []
        for graphs in (False, True):
            bastile.apply(cuda_graphs=graphs)
            config = {
                "version": 2,
                "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
                "activation_checkpointing": True,
            }
            drawn = torch.Generator().manual_seed(0)
            rows = torch.randint(3, 99, (32, 13), generator=drawn)
            trainer = Trainer(
                adapters(tiny_model(num_hidden_layers=3)),
                TrainingArguments(
                    str(folder), per_device_train_batch_size=2, max_steps=6, logging_steps=1, report_to="none",
                    disable_tqdm=True, use_cpu=True, learning_rate=1e-2, fsdp=True, fsdp_config=config,
                ),
                train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            )  # fmt: skip
            counted()
            trainer.train()
            assert counted() == (5 if graphs else 0, {})
            logged.append([(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line])
        assert len(logged[0]) == 6
        assert logged[0] == logged[1]


def test_a_trainer_with_adapters(tmp_path: Path) -> None:
    on_processes(2, tmp_path, sft, tmp_path)
