"""The AdamW that a Trainer makes by itself, exchanged by apply(): same losses, norms, weights and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import bastile
from bastile.optim import AdamW
from conftest import tiny_batch, tiny_model

STOCK = vars(Trainer)["create_optimizer"]


@pytest.fixture(autouse=True)
def in_force() -> Iterator[None]:
    bastile.report(reset=True)
    yield
    bastile.reset()
    assert vars(Trainer)["create_optimizer"] is STOCK


class Sees(TrainerCallback):
    """Norms of the gradients that a step begins with, and of those that it leaves."""

    def __init__(self, *names: str) -> None:
        self.norms: list[float] = []
        for name in names:
            setattr(type(self), name, self._look)

    def _look(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.norms.append(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item())


def arguments(folder: Path, steps: int = 4, **changes: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(**given | changes)


def trainer_of(
    folder: Path, kind: type[Trainer] = Trainer, callbacks: Any = (), more: Any = None, **changes: Any
) -> Any:
    model = tiny_model()
    rows = [{"input_ids": row, "labels": row} for row in tiny_batch(model)["input_ids"].repeat(8, 1)]
    options = more(model) if more else {}
    return kind(model, arguments(folder, **changes), train_dataset=rows, callbacks=list(callbacks), **options)


def trained(folder: Path, resume: Any = None, **how: Any) -> tuple[list[Any], list[torch.Tensor], Any]:
    trainer = trainer_of(folder, **how)
    trainer.train(resume_from_checkpoint=resume)
    logs = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    return logs, [p.detach().clone() for p in trainer.model.parameters()], trainer


def optimizer_in(trainer: Any) -> Any:
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def assert_alike(got: Any, want: Any) -> None:
    assert len(got[0]) == len(want[0]) > 1
    for mine, theirs in zip(got[0], want[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    for p, q in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-5)


def test_a_trainers_own(tmp_path: Path) -> None:
    want = trained(tmp_path)
    assert type(optimizer_in(want[2])) is torch.optim.AdamW
    bastile.apply()
    got = trained(tmp_path)
    ours, torchs = optimizer_in(got[2]), optimizer_in(want[2])
    assert type(ours) is AdamW
    assert [{**group, "params": len(group["params"])} for group in ours.param_groups] == [
        {**group, "params": len(group["params"])} for group in torchs.param_groups
    ]
    assert ours.defaults.keys() == torchs.defaults.keys()
    assert_alike(got, want)
    assert bastile.report().ran("adamw") == 1
    bastile.reset()
    assert_alike(trained(tmp_path), want)


@pytest.fixture
def clipped_in_step(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each step that is to multiply gradients as it reads them."""
    seen: list[None] = []
    clip_next_step = AdamW.clip_next_step
    monkeypatch.setattr(AdamW, "clip_next_step", lambda self, by: (seen.append(None), clip_next_step(self, by)))
    return seen


@pytest.mark.parametrize("name", ["on_pre_optimizer_step", "on_optimizer_step"])
def test_who_looks_at_gradients_sees_them_clipped(name: str, clipped_in_step: list[None], tmp_path: Path) -> None:
    bastile.apply()
    callback = type("Own", (Sees,), {})(name)
    watched = trained(tmp_path, callbacks=[callback])
    assert callback.norms == pytest.approx([0.1] * 4, rel=1e-4)
    assert clipped_in_step == []
    assert_alike(trained(tmp_path), watched)
    assert len(clipped_in_step) == 4


def test_a_hook_of_the_optimiser_sees_them_clipped(tmp_path: Path) -> None:
    class Hooked(Trainer):
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            found = super().create_optimizer(*args, **kwargs)
            self.norms: list[float] = []
            self.optimizer.register_step_pre_hook(self.look)
            return found

        def look(self, optimizer: Any, *_: Any) -> None:
            norms = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]
            self.norms.append(torch.stack(norms).norm().item())

    bastile.apply()
    trainer = trained(tmp_path, kind=Hooked)[2]
    assert type(optimizer_in(trainer)) is AdamW
    assert trainer.norms == pytest.approx([0.1] * 4, rel=1e-4)


def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    want = trained(tmp_path / "stock", save_strategy="steps", save_steps=2)
    bastile.apply()
    got = trained(tmp_path / "ours", save_strategy="steps", save_steps=2)
    assert_alike(got, want)
    resumed = trained(tmp_path / "stock", resume=str(tmp_path / "stock" / "checkpoint-2"))
    assert type(optimizer_in(resumed[2])) is AdamW
    bastile.reset()
    back = trained(tmp_path / "ours", resume=str(tmp_path / "ours" / "checkpoint-2"))
    assert type(optimizer_in(back[2])) is torch.optim.AdamW
    for run in (resumed, back):
        for p, q in zip(run[1], want[1], strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=2e-5)


def _given(model: nn.Module) -> dict[str, Any]:
    return {"optimizers": (torch.optim.AdamW(model.parameters(), lr=1e-3), None)}


def _named(model: nn.Module) -> dict[str, Any]:
    return {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1e-3})}


class Amsgrad(Trainer):
    @staticmethod
    def get_optimizer_cls_and_kwargs(*args: Any, **kwargs: Any) -> Any:
        cls, given = Trainer.get_optimizer_cls_and_kwargs(*args, **kwargs)
        return cls, {**given, "amsgrad": True}


class Double(Trainer):
    """With a parameter that no kernel serves."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self.model.extra = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        return super().create_optimizer(*args, **kwargs)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"more": _given}, None),
        ({"more": _named}, None),
        ({"optim": "sgd"}, None),
        ({"optim": "adafactor"}, None),
        ({"kind": Amsgrad}, "amsgrad"),
        ({"kind": Double}, "torch.float64"),
    ],
    ids=["given", "named", "sgd", "adafactor", "amsgrad", "float64"],
)
def test_others_stay(how: dict[str, Any], reason: str | None, tmp_path: Path) -> None:
    bastile.apply()
    trainer = trainer_of(tmp_path, **how)
    trainer.create_optimizer()
    assert type(trainer.optimizer) is not AdamW
    lines = [line for line in bastile.report() if line.operator == "adamw"]
    told = [why for line in lines for why in line.aside]
    assert len(told) == (reason is not None)
    assert all(reason in why for why in told if reason)
    assert not any(line.ran for line in lines)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "XLA"])
def test_who_shards_keeps_torchs(kind: str, tmp_path: Path) -> None:
    bastile.apply()
    trainer = trainer_of(tmp_path)
    trainer.accelerator = SimpleNamespace(distributed_type=DistributedType[kind])
    trainer.create_optimizer()
    assert type(trainer.optimizer) is torch.optim.AdamW
    assert [kind in why for line in bastile.report() for why in line.aside] == [True]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fsdp2_does_not(device: str, tmp_path: Path) -> None:
    """Not even in a process that gets its weights from another one later: all must choose alike."""
    bastile.apply()
    trainer = trainer_of(tmp_path)
    trainer.model = trainer.model.to(device)
    trainer.accelerator = SimpleNamespace(
        distributed_type=DistributedType.FSDP, is_fsdp2=True, clip_grad_norm_=None, state=SimpleNamespace()
    )
    trainer.create_optimizer()
    assert type(trainer.optimizer) is AdamW


def test_it_can_be_left_out(tmp_path: Path) -> None:
    names = bastile.apply(adamw=False)
    assert "adamw" not in names
    assert vars(Trainer)["create_optimizer"] is STOCK
    assert "adamw" in bastile.apply(adamw=True)
    trainer = trainer_of(tmp_path)
    trainer.create_optimizer()
    assert type(trainer.optimizer) is AdamW
    assert bastile.reset(["adamw"]) == ["adamw"]
    assert vars(Trainer)["create_optimizer"] is STOCK


def test_a_trainer_that_is_asked_twice_keeps_its_optimiser(tmp_path: Path) -> None:
    bastile.apply()
    trainer = trainer_of(tmp_path)
    first = trainer.create_optimizer()
    assert trainer.create_optimizer() is first
    assert bastile.report().ran("adamw") == 1
