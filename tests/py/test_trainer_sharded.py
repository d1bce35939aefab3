"""A Trainer whose model FSDP2 spreads over two processes, as Accelerate does it: its AdamW becomes ours by
bastile.apply(), with stock's losses, weights and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

import bastile
from bastile.models import small
from bastile.optim import AdamW
from graphing import allow_graphs
from processes import on_processes

PROCESSES, STEPS, SAVED = 2, 4, 2
SHARDED = {
    "version": 2,
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "state_dict_type": "SHARDED_STATE_DICT",
}


class Looks(TrainerCallback):
    """Notes what gradients of this process's stand between clipping and the step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.seen.append(model.model.norm.weight.grad.to_local().clone())


def fsdp_on_a_cpu(patch: pytest.MonkeyPatch) -> None:
    """Accelerate takes FSDP for GPUs alone: processes on CPUs are to it as if they had one each."""
    begin = PartialState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    patch.setattr(PartialState, "__init__", init)


def run(folder: Path, *callbacks: Any, resume: Path | None = None) -> tuple[Trainer, list[Any]]:
    """The losses and gradients' norms that are logged."""
    model = small.small_model("llama")
    drawn = torch.Generator().manual_seed(0)
    rows = torch.randint(3, model.config.vocab_size, (4 * STEPS, 13), generator=drawn)
    trainer = Trainer(
        model,
        TrainingArguments(
            str(folder), per_device_train_batch_size=2, max_steps=STEPS, save_steps=SAVED, logging_steps=1,
            learning_rate=1e-2, max_grad_norm=0.1, report_to="none", disable_tqdm=True, use_cpu=True, fsdp=True,
            fsdp_config=SHARDED,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    logged = [(line["loss"], float(line["grad_norm"])) for line in trainer.state.log_history if "loss" in line]
    return trainer, logged


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = dict(trainer.model.named_parameters())
    assert all(isinstance(p, DTensor) for p in found.values())
    return {name: p.full_tensor().detach() for name, p in found.items()}


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


def optimizer_of(trainer: Trainer) -> Any:
    return trainer.optimizer.optimizer


def process(rank: int, folder: Path, graphs: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fsdp_on_a_cpu(patch)
        if graphs:
            allow_graphs(patch, "cpu")
        stocks_looks, looks = Looks(), Looks()
        stocks, stock_logged = run(folder / "stock", stocks_looks)
        assert type(optimizer_of(stocks)) is torch.optim.AdamW
        wanted = weights(stocks)

        bastile.apply(cuda_graphs=graphs)
        ours, logged = run(folder / "ours")
        assert type(optimizer_of(ours)) is AdamW
        told = bastile.report(reset=True)
        assert told.ran("adamw") == 1
        assert told.ran("cuda_graphs") == (STEPS - 1 if graphs else 0)
        same(logged, stock_logged)
        same(weights(ours), wanted)
        assert all(isinstance(s["exp_avg"], DTensor) for s in optimizer_of(ours).state.values())

        # Stock's checkpoint, resumed by ours, and ours by stock.
        resumed, _ = run(folder / "ours again", resume=folder / "stock" / f"checkpoint-{SAVED}")
        assert type(optimizer_of(resumed)) is AdamW
        same(weights(resumed), wanted)

        # One process alone has somebody who looks at gradients: they are clipped there, and no process waits for ever.
        looked, logged = run(folder / "looks", *[looks] * (rank == 0))
        assert type(optimizer_of(looked)) is AdamW
        assert len(looks.seen) == (STEPS if rank == 0 else 0)
        same(looks.seen, stocks_looks.seen[: len(looks.seen)])
        same(logged, stock_logged)
        same(weights(looked), wanted)

        bastile.reset()
        resumed, _ = run(folder / "stock again", resume=folder / "ours" / f"checkpoint-{SAVED}")
        assert type(optimizer_of(resumed)) is torch.optim.AdamW
        same(weights(resumed), wanted)


@pytest.mark.parametrize("graphs", [False, True])
def test_two_processes(graphs: bool, tmp_path: Path) -> None:
    on_processes(PROCESSES, tmp_path, process, tmp_path, graphs)
