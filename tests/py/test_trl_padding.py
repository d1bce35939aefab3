"""TRL's trainers on batches that their collators have padded: stock's numbers, without the padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bastile
from bastile.models import graphs as models_graphs
from bastile.models import sdpa, side_by_side

pytest.importorskip("trl")

import test_trl as runs
import trl_runs
from graphing import allow_graphs
from processes import on_processes, zero_config

quiet, saved = runs.quiet, runs.saved  # fixtures


@runs.newest
@pytest.mark.parametrize("kind", ["sft", "sft completion", "dpo", "kto", "grpo"])
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("model", ["qwen3", "qwen3_5", "gemma4"])
def test_padding_goes_through_no_layer(
    kind: str, model: str, attach: bool, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second pass of a model on, references' too, where TRL's collators have padded."""
    monkeypatch.setattr(sdpa, "TYPES", (*sdpa.TYPES, torch.float32))
    monkeypatch.setattr(side_by_side, "_LEAST_STEP", 1)
    words = trl_runs.words
    monkeypatch.setattr(trl_runs, "words", lambda seed, count: words(seed, count + 3 * (seed % 3)))
    more = {"peft_config": runs.adapters} if attach else {}
    if attach and kind == "dpo":  # policy and reference agree: the same kernels are to say so, before and after
        more["max_steps"] = 3
    runs.both(kind, saved(model), tmp_path, monkeypatch, per_device_train_batch_size=4, num_train_epochs=4, **more)
    assert bastile.report().ran("padding_free") >= 1


@runs.newest
@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_mixtures_of_experts(
    kind: str, attach: bool, graphs: bool, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their trainers add a loss of routers' logits, which leaves out padding's, by TRL's own code. attach: adapters on
    experts, too; graphs: whose results these logits are."""
    monkeypatch.setattr(sdpa, "TYPES", (*sdpa.TYPES, torch.float32))
    monkeypatch.setattr(side_by_side, "_LEAST_STEP", 1)
    words = trl_runs.words
    monkeypatch.setattr(trl_runs, "words", lambda seed, count: words(seed, count + 3 * (seed % 3)))
    more: dict[str, Any] = {"per_device_train_batch_size": 4, "num_train_epochs": 4}
    if attach:
        more["peft_config"] = runs.adapters
        more["max_steps"] = 3  # policy and reference agree at first: the same kernels are to say so, before and after
    if graphs:
        allow_graphs(monkeypatch, "cpu")
        usual = models_graphs.set_everywhere
        monkeypatch.setattr(models_graphs, "set_everywhere", lambda mode: usual(True))
        more["max_steps"] = 5
    ours = runs.both(kind, saved("qwen3_moe"), tmp_path, monkeypatch, **more)
    told = bastile.report()
    assert told.ran("padding_free") >= 1
    assert any("aux_loss" in logged for logged in ours.logged)
    assert bool(sum(line.ran for line in told if line.where.endswith("ParamWrapper"))) is attach
    assert bool(told.ran("cuda_graphs")) is graphs


# ---- several processes -----------------------------------------------------------------------------------------------


def padded(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Of each process another number of tokens; of the second none is padding at first."""
    ids = torch.randint(5, trl_runs.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(2 * step + rank))
    mask = torch.ones_like(ids)
    mask[1, 3 + 6 * (rank and not step) :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def fsdp2(rank: int, path: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = trl_runs.load(path).train(), init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, lambda: [p.full_tensor().detach().clone() for p in model.parameters()]


def zero3(rank: int, path: str) -> Any:
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config = zero_config(3)
    asked = HfDeepSpeedConfig(config)  # by which Transformers knows of it
    model = trl_runs.load(path).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = engine(**batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def weights(_: Any = asked) -> list[torch.Tensor]:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return [p.detach().clone() for p in model.parameters()]

    return step, weights


def sharded(rank: int, path: str, kind: str) -> None:
    sdpa.TYPES, side_by_side._LEAST_STEP = (*sdpa.TYPES, torch.float32), 1  # type: ignore[assignment]
    left = []
    for patched in (False, True):
        step, weights = {"fsdp2": fsdp2, "zero3": zero3}[kind](rank, path)
        bastile.apply(padding_free=patched)
        bastile.report(reset=True)
        before = weights()
        losses = [step(padded(rank, number)) for number in range(4)]
        assert bastile.report().ran("padding_free") == 3 * patched
        left.append((losses, [now - then for now, then in zip(weights(), before, strict=True)]))
    torch.testing.assert_close(left[1][0], left[0][0], rtol=1e-5, atol=1e-5)
    for got, want in zip(left[1][1], left[0][1], strict=True):
        # Weights of norms are about 1, and each of four steps rounds them to 1e-7.
        assert (got - want).abs().max() <= 1e-4 * want.abs().max() + 1e-6


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_weights_in_parts_on_two_processes(kind: str, saved: Any, tmp_path: Path) -> None:
    if kind == "zero3":
        pytest.importorskip("deepspeed")
    on_processes(2, tmp_path, sharded, saved("qwen3"), kind)
