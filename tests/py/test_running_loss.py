"""The sum of losses that a Trainer keeps: the same numbers, and nobody waits for a step's loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback, TrainingArguments

import bastile
from bastile.models import running_loss
from bastile.models.table import USUAL
from conftest import tiny_batch, tiny_model

LOOP = next(name for name in ("_run_epoch", "_inner_training_loop") if name in vars(Trainer))
STOCK = vars(Trainer)[LOOP]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    bastile.reset()
    assert vars(Trainer)[LOOP] is STOCK


class Sometimes(Trainer):
    """Some steps' losses are no numbers."""

    LOSSES = (None, math.nan, None, math.inf, -math.inf, None)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.steps = getattr(self, "steps", 0) + 1
        loss = super().training_step(*args, **kwargs)
        assert type(loss) is torch.Tensor
        instead = self.LOSSES[self.steps % len(self.LOSSES)]
        return loss if instead is None else torch.full_like(loss, instead)


class Reads(TorchDispatchMode):
    """Counts how often the host reads a number of a tensor's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class AtEachStep(TrainerCallback):
    def __init__(self, look: Any) -> None:
        self.look, self.seen = look, []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(self.look())


def trainer_of(folder: Path, kind: type[Trainer] = Trainer, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 3,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "max_grad_norm": 0.0,
        "optim": "sgd",
    }
    model = tiny_model()
    rows = [{"input_ids": row, "labels": row} for row in tiny_batch(model)["input_ids"].repeat(24, 1)]
    return kind(model, TrainingArguments(**given | changes), train_dataset=rows)


def losses(trainer: Any) -> list[float]:
    trainer.train()
    assert running_loss._STEP not in vars(trainer)
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "train_loss") if name in entry]


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("kind", [Trainer, Sometimes])
def test_the_losses_in_the_log_are_the_same(kind, filtered, tmp_path):
    stock = losses(trainer_of(tmp_path, kind, logging_nan_inf_filter=filtered))
    assert all(map(math.isfinite, stock)) is (filtered or kind is Trainer)
    # Only what this is about: with other code in the layers losses differ in their last digits.
    bastile.apply(**dict.fromkeys(USUAL, False) | {"layer_norm": True})
    ours = losses(trainer_of(tmp_path, kind, logging_nan_inf_filter=filtered))
    assert list(map(repr, ours)) == list(map(repr, stock))
    assert len(ours) == 5


def test_nobody_reads_a_step_s_loss(tmp_path):
    counts = {}
    for is_ours in (False, True):
        if is_ours:
            bastile.apply()
        trainer = trainer_of(tmp_path, logging_steps=100)
        with Reads() as reads:
            each = AtEachStep(lambda reads=reads: reads.count)
            trainer.add_callback(each)
            trainer.train()
        counts[is_ours] = {after - before for before, after in zip(each.seen[2:], each.seen[3:], strict=False)}
    (stock,), (ours,) = counts[False], counts[True]
    assert stock - ours == 4  # of two passes, whether it is no number and whether it is infinite
    assert ours == 2  # Transformers' own, of each pass: whether positions are those of packed sequences


def test_others_see_a_loss_as_ever(tmp_path):
    bastile.apply()
    trainer = trainer_of(tmp_path, Sometimes, max_steps=2)
    totals = AtEachStep(lambda: type(trainer._tr_loss) if hasattr(trainer, "_tr_loss") else torch.Tensor)
    trainer.add_callback(totals)
    trainer.train()
    assert totals.seen == [torch.Tensor] * 2
    trainer.create_optimizer_and_scheduler(2)
    assert type(trainer.training_step(trainer.model, tiny_batch(trainer.model))) is torch.Tensor


def test_after_an_error_nothing_is_left(tmp_path):
    class Fails(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise ZeroDivisionError

    bastile.apply()
    trainer = trainer_of(tmp_path, Fails)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert running_loss._STEP not in vars(trainer)


def test_a_step_of_a_trainer_s_own_is_called(tmp_path):
    """One that somebody has put on the trainer itself, before the run or in it."""
    bastile.apply()
    trainer, calls = trainer_of(tmp_path, max_steps=3), []

    def step(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(len(calls))
        return torch.tensor(math.nan)

    swap = AtEachStep(lambda: setattr(trainer, "training_step", step))
    trainer.add_callback(swap)
    trainer.train()
    assert calls == [0, 1, 2, 3]
    assert trainer.training_step is step
    calls.clear()
    trainer.train()
    assert calls == [0, 1, 2, 3, 4, 5]


def knows(self: Any) -> Any:
    tr_loss = torch.zeros(())
    tr_loss_step = self.training_step()
    if torch.isnan(tr_loss_step) or torch.isinf(tr_loss_step):
        return tr_loss
    assert tr_loss.device == tr_loss_step.device
    return tr_loss + tr_loss_step


def prints(self: Any) -> Any:
    tr_loss_step = self.training_step()
    if torch.isnan(tr_loss_step) or torch.isinf(tr_loss_step):
        return tr_loss_step.device
    print(tr_loss_step)
    return torch.zeros(()) + tr_loss_step


def multiplies(self: Any) -> Any:
    tr_loss_step = self.training_step() * 2
    if torch.isnan(tr_loss_step) or torch.isinf(tr_loss_step):
        return tr_loss_step.device
    return torch.zeros(()) + tr_loss_step


def test_a_loop_that_does_more_is_left_alone():
    assert running_loss._only_adds(knows)
    assert running_loss._only_adds(STOCK)
    assert not running_loss._only_adds(prints)
    assert not running_loss._only_adds(multiplies)
    assert not running_loss._only_adds(len)


def test_taken_out_in_the_middle(tmp_path):
    stock = losses(trainer_of(tmp_path, Sometimes))
    bastile.apply()
    trainer = trainer_of(tmp_path, Sometimes)
    trainer.add_callback(AtEachStep(bastile.reset))
    assert losses(trainer) == pytest.approx(stock, rel=1e-4)
