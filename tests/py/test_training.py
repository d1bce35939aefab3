"""Whole training runs: stock Transformers and Bastile from the same weights, on the same data."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import distributed
from transformers import EvalPrediction, Qwen3ForCausalLM, Trainer, TrainingArguments

import bastile
from conftest import on_demand, tiny_batch, tiny_model
from memory import Memory
from processes import alone, on_processes

STEPS = 200


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second thread, and wait for it where others use the machine too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def data(steps: int = STEPS) -> list[torch.Tensor]:
    """Text with something to learn: each token follows from the one before it, but for one in eight."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(steps):
        ids = torch.randint(0, 101, (4, 1), generator=generator)
        columns = [ids[:, 0]]
        for _ in range(31):
            random = torch.randint(0, 101, (4,), generator=generator)
            columns.append(torch.where(random % 8 == 0, random, (columns[-1] * 7 + 3) % 101))
        batches.append(torch.stack(columns, 1))
    return batches


def losses(model: Qwen3ForCausalLM, steps: int = STEPS) -> torch.Tensor:
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for ids in data(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found).double()


def reordered(model: Qwen3ForCausalLM, seed: int) -> Qwen3ForCausalLM:
    """The same function with its hidden and its intermediate units in another order, so that every sum over them is
    taken in another order."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randperm(model.config.hidden_size, generator=generator)
    inner = torch.randperm(model.config.intermediate_size, generator=generator)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Which of a weight's two dimensions are hidden units, which intermediate units.
            if any(part in name for part in ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj")):
                weight.copy_(weight[:, hidden])
            elif "o_proj" in name or "layernorm" in name or name == "model.norm.weight":
                weight.copy_(weight[hidden])
            elif "gate_proj" in name or "up_proj" in name:
                weight.copy_(weight[inner][:, hidden])
            elif "down_proj" in name:
                weight.copy_(weight[hidden][:, inner])
            else:
                assert "q_norm" in name or "k_norm" in name, name
    return model


def test_200_steps_in_float32_follow_stock() -> None:
    model = tiny_model(initializer_range=0.05)
    stock = losses(model)
    bastile.apply()
    patched = losses(model)
    assert stock[-20:].mean() < 0.6 * stock[:20].mean()  # it learnt something
    assert (patched - stock).abs().max() <= 1e-4


def test_200_steps_in_bfloat16_follow_stock_as_another_order_of_sums_does() -> None:
    """The yardstick: how far stock itself moves when its sums are taken in another order. Each order is one draw of the
    same chance, Bastile's another, hence the factor of 2 on the largest of four."""
    model = tiny_model(initializer_range=0.05, dtype=torch.bfloat16)
    stock = losses(model)
    by_order = [(losses(reordered(model, seed)) - stock).abs().mean() for seed in range(4)]
    assert min(by_order) > 0
    bastile.apply()
    by_bastile = (losses(model) - stock).abs().mean()
    assert by_bastile <= 2 * max(by_order), (by_bastile, by_order)


def test_reordering_does_not_change_the_function() -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    torch.testing.assert_close(reordered(model, 3)(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-4)


class Rows(torch.utils.data.Dataset):
    """Each row with a different number of labels, so that a mean of means is not the mean."""

    def __init__(self, count: int) -> None:
        self.rows = [ids for batch in data(count // 4) for ids in batch]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.rows[index].clone()
        labels[: index % 24] = -100
        return {"input_ids": self.rows[index], "labels": labels}


def trainer_run(model: torch.nn.Module, out: Path, **arguments: Any) -> tuple[list[float], dict[str, float]]:
    """The logged losses and the evaluation's figures."""

    def accuracy(predicted: EvalPrediction) -> dict[str, float]:
        assert predicted.predictions.shape == (8, 32, 101)
        hits = predicted.predictions.argmax(-1)[:, :-1] == predicted.label_ids[:, 1:]
        return {"accuracy": float(np.mean(hits[predicted.label_ids[:, 1:] != -100]))}

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(out),
            max_steps=5,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=3,
            logging_steps=1,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=1,
            use_cpu=True,
            **arguments,
        ),
        train_dataset=Rows(64),
        eval_dataset=Rows(8),
        compute_metrics=accuracy,
    )
    trainer.train()
    figures = trainer.evaluate()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 5
    return logged, figures


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_the_trainer_accumulates_logs_and_evaluates_alike(adapted: bool, tmp_path: Path, calls: dict[str, int]) -> None:
    def run() -> tuple[list[float], dict[str, float]]:
        model = tiny_model(initializer_range=0.05)
        if adapted:
            torch.manual_seed(2)
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], r=4))
        return trainer_run(model, tmp_path)

    logged, figures = run()
    bastile.apply()
    patched_logged, patched_figures = run()
    assert calls["fused_linear_cross_entropy"] == 5 * 3 + 2  # training steps, and batches of the evaluation
    assert patched_logged == pytest.approx(logged, abs=1e-4)
    for name in ("eval_loss", "eval_accuracy"):
        assert patched_figures[name] == pytest.approx(figures[name], abs=1e-4)


def test_label_smoothing_by_the_trainer_gets_its_logits(tmp_path: Path) -> None:
    want, _ = trainer_run(tiny_model(), tmp_path, label_smoothing_factor=0.1)
    bastile.apply()
    got, _ = trainer_run(tiny_model(), tmp_path, label_smoothing_factor=0.1)
    assert got == pytest.approx(want, abs=1e-4)


@pytest.fixture
def one_process_group() -> Any:
    with alone():
        yield


def test_data_parallel_reduces_every_gradient(one_process_group: Any) -> None:
    """The loss must be computed inside the wrapped module's forward, or nothing is ever reduced."""
    bastile.apply()
    model = tiny_model()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    reduced = []

    def hook(state: None, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced.append(bucket.buffer().numel())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, hook)
    output = wrapped(**tiny_batch(model))
    assert on_demand(output.logits)
    output.loss.backward()
    assert sum(reduced) == sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture
def recomputation_at_every_size() -> Iterator[None]:
    bastile.set_recompute(0)
    yield
    bastile.set_recompute(None)


@pytest.mark.usefixtures("recomputation_at_every_size")
@pytest.mark.parametrize("head_apart", [False, True])
def test_fully_sharded_training_gives_the_same_gradients(head_apart: bool, one_process_group: Any) -> None:
    """Parameters are DTensors outside of forward, and the head's too where it is a unit of its own. Recomputation takes
    a norm's weight in the backward pass, where the shards have been gathered again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))  # also where there is a GPU
    model = tiny_model()
    batch = tiny_batch(model)
    want = model(**batch)
    want.loss.backward()
    bastile.apply()
    sharded = tiny_model()
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    if head_apart:
        fully_shard(sharded.lm_head, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    got = sharded(**batch)
    assert on_demand(got.logits)
    with Memory() as memory:
        got.loss.backward()
    # In each layer, of queries, keys and values, and of gate and up.
    assert memory.calls.count("aten.addmm_.default") == 2 * (2 + 1)
    torch.testing.assert_close(got.loss, want.loss)
    for (name, parameter), other in zip(model.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), parameter.grad, msg=name, rtol=1e-4, atol=1e-5)


def first_fsdp(rank: int) -> None:
    """A process of two: what each sharding leaves of the weights after a step, patched and stock."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    for head_apart in (False, True):
        for original_parameters in (False, True):
            weights = []
            for patched in (False, True):
                options = {"device_id": torch.device("cpu"), "use_orig_params": original_parameters}
                model = tiny_model()
                for index, layer in enumerate(model.model.layers):
                    model.model.layers[index] = Fsdp(layer, **options)
                if head_apart:
                    model.lm_head = Fsdp(model.lm_head, **options)
                sharded = Fsdp(model, **options)
                if patched:
                    assert len(bastile.apply_to_model(sharded)) > 5
                batch = {name: value[rank::2] for name, value in tiny_batch(model).items()}
                output = sharded(**batch)
                assert on_demand(output.logits) == (patched and not head_apart)
                output.loss.backward()
                torch.optim.SGD(sharded.parameters(), lr=1.0).step()
                with Fsdp.summon_full_params(sharded):
                    weights.append([output.loss.detach(), *(p.detach().clone() for p in sharded.parameters())])
            torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


def test_the_first_fsdp_shards_what_the_loss_reads(tmp_path: Path) -> None:
    """On two processes, for on one it does not shard. The head's weight is whole within the model's own forward; where
    it is a unit of its own, only within the head's."""
    on_processes(2, tmp_path, first_fsdp)


def test_tensor_parallel_training_gives_the_same_gradients(one_process_group: Any) -> None:
    """Norms get DTensors, and projections are called with their weights' parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = tiny_model()
    batch = tiny_batch(model)
    want = model(**batch)
    want.loss.backward()
    parallel = tiny_model()
    plan = {"model.norm": SequenceParallel(use_local_output=True)}
    for layer in range(2):
        plan[f"model.layers.{layer}.input_layernorm"] = SequenceParallel(use_local_output=True)
        for name, style in (("gate", ColwiseParallel()), ("up", ColwiseParallel()), ("down", RowwiseParallel())):
            plan[f"model.layers.{layer}.mlp.{name}_proj"] = style
    parallelize_module(parallel, init_device_mesh("cpu", (1,)), plan)
    bastile.apply()
    got = parallel(**batch)
    got.loss.backward()
    torch.testing.assert_close(got.loss, want.loss)
    for (name, parameter), other in zip(model.named_parameters(), parallel.parameters(), strict=True):
        gradient = other.grad.full_tensor() if hasattr(other.grad, "full_tensor") else other.grad
        torch.testing.assert_close(gradient, parameter.grad, msg=name, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["apply, shard", "shard, apply", "shard, apply_to_model"])
def test_sharded_layers_run_the_operators_and_are_checkpointed(
    order: str, one_process_group: Any, calls: dict[str, int]
) -> None:
    """FSDP gives a layer a class of its own, with Transformers' wrapper for checkpointing around its forward anew."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = tiny_model()
    batch = tiny_batch(model)
    want = model(**batch).loss
    mesh = init_device_mesh("cpu", (1,))
    for act in order.split(", "):
        if act == "shard":
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            bastile.apply() if act == "apply" else bastile.apply_to_model(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = model(**batch, use_cache=False).loss
    torch.testing.assert_close(got, want)
    got.backward()
    twice_each_layer = ("qk_norm_rope", "projections", "swiglu")
    assert (calls["add_rms_norm"], *(calls[name] for name in twice_each_layer)) == (8, 4, 4, 4)
    bastile.reset()
    calls.clear()
    model(**batch, use_cache=False).loss.backward()
    assert calls == {}


@pytest.mark.parametrize("alone", [False, True], ids=["layers", "projections too"])
def test_sharded_mlps_are_one_call_where_their_weights_are_whole(
    alone: bool, one_process_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A projection that is a unit of its own gathers its weight when it is called, so it must be called."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from bastile import warmup
    from bastile.ops import glu

    shapes: list[tuple[int, ...]] = []

    def call(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return gated_mlp(x, *weights)

    gated_mlp = glu.gated_mlp
    monkeypatch.setattr(glu, "gated_mlp", call)
    mesh = init_device_mesh("cpu", (1,))  # also where there is a GPU
    model = tiny_model()
    batch = tiny_batch(model)
    want = model(**batch)
    want.loss.backward()
    sharded = tiny_model()
    for layer in sharded.model.layers:
        if alone:
            fully_shard(layer.mlp.up_proj, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    bastile.apply()
    operators = {call.operator for call in warmup._work(sharded, None, torch.device("cpu"))[1]}
    assert ("swiglu_backward_inplace" in operators) == (not alone)
    shapes.clear()
    for _ in range(2):
        got = sharded(**batch)
        got.loss.backward()
        torch.testing.assert_close(got.loss, want.loss)
        for (name, parameter), other in zip(model.named_parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(other.grad.full_tensor(), parameter.grad, msg=name, rtol=1e-4, atol=1e-5)
        sharded.zero_grad()
    assert shapes == ([] if alone else [(2, 11, 32)] * 4)
