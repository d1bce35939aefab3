"""bastile.optim in training: Transformers' Trainer, data parallel, sharded, and what rounding does to losses."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

import bastile
from bastile.cli.train import _OPTIMIZERS
from bastile.optim import AdamW, clip_grad_norm_, clip_in_step
from conftest import tiny_batch, tiny_model
from processes import on_processes

STEPS = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Watch(TrainerCallback):
    """Losses and norms that were logged, and the largest gradient between clipping and the step."""

    def __init__(self) -> None:
        self.logged: list[tuple[float, float]] = []
        self.largest: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "grad_norm" in logs:
            self.logged.append((logs["loss"], logs["grad_norm"]))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.largest.append(max(p.grad.abs().max().item() for p in model.parameters()))


def trained(folder: Path, in_step: bool = False, **options: Any) -> tuple[Any, Watch]:
    model = tiny_model()
    ids = tiny_batch(model)["input_ids"]
    rows = [{"input_ids": row, "labels": row} for row in ids.repeat(4, 1)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        weight_decay=0.1,
        max_grad_norm=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    watch = Watch()
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[watch], **options)
    if in_step:
        clip_in_step(trainer)
    trainer.train()
    return trainer, watch


def test_trainer(tmp_path: Path) -> None:
    """By name, with its groups, schedule, accumulation and clipping; the same losses, norms and weights as torch's; and
    clipped within the step, where gradients stay as they are, the same again."""
    stock, want = trained(tmp_path)
    for in_step in (False, True):
        chosen = (AdamW, {"lr": 1e-3})
        trainer, watch = trained(tmp_path, in_step, optimizer_cls_and_kwargs=chosen)
        assert type(trainer.optimizer.optimizer) is AdamW
        assert len(watch.logged) == STEPS
        assert len(trainer.optimizer.param_groups) == 2
        for got, wanted in zip(watch.logged, want.logged, strict=True):
            assert got == pytest.approx(wanted, rel=1e-4)
        for p, q in zip(trainer.model.parameters(), stock.model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=2e-5)
        # Unclipped, they are larger by what the clip divides by.
        ratio = [mine / theirs for mine, theirs in zip(watch.largest, want.largest, strict=True)]
        norms = [norm / 0.1 for _, norm in want.logged]
        assert min(norms) > 2
        assert ratio == pytest.approx(norms if in_step else [1.0] * STEPS, rel=1e-3)


def test_another_optimiser_is_clipped_as_before(tmp_path: Path) -> None:
    _, want = trained(tmp_path)
    _, watch = trained(tmp_path, in_step=True)
    assert watch.logged == want.logged
    assert watch.largest == want.largest


def test_gradients_that_come_in_another_way_in_each_step() -> None:
    """All at once, as autograd leaves them; then one that is turned, one that is not there, and state that was moved
    away and back."""
    torch.manual_seed(0)
    start = [torch.randn(5, 3), torch.randn(4), torch.randn(2, 6)]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    one, other = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    for step in range(8):
        for p, q in zip(ours, theirs, strict=True):
            q.grad = torch.randn(q.shape)
            p.grad = q.grad.clone()
        if step in (3, 4):
            ours[0].grad = ours[0].grad.t().contiguous().t()  # type: ignore[union-attr]
        if step == 4:
            ours[1].grad = theirs[1].grad = None
        if step == 6:
            for state in one.state.values():
                for name, value in list(state.items()):
                    state[name] = value.clone()
        one.step()
        other.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_what_finetune_names(kind: str) -> None:
    model = tiny_model().to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-2, **_OPTIMIZERS[kind])
    first = last = None
    for _ in range(12):
        loss = model(**tiny_batch(model)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        first, last = first or loss.item(), loss.item()
    assert last < 0.7 * first


# ---- several processes -----------------------------------------------------------------------------------------------


def single(steps: int, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def sharded(rank: int) -> None:
    """A process of two: FSDP2's shards, and data parallel, with each way to clip, against one process with torch's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    batch = tiny_batch(tiny_model())
    want = single(2, batch)
    for how in ("shards", "shards, given", "shards, 8 bits", "replicas"):
        model = tiny_model()
        run: torch.nn.Module = model
        if how == "replicas":
            run = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            for layer in model.model.layers:
                fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        given = how == "shards, given"
        optimizer = AdamW(
            model.parameters(),
            lr=1e-3,
            max_grad_norm=None if given else 0.1,
            moments="8bit" if "8 bits" in how else None,
        )
        for _ in range(2):
            run(**batch).loss.backward()
            if given:
                norm = clip_grad_norm_(model.parameters(), 0.1, optimizer=optimizer)
                assert norm.shape == ()
                assert math.isfinite(norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=how != "replicas")
        full = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
        for got, wanted in zip(full, want, strict=True):
            near = 2e-3 if "8 bits" in how else 2e-5
            torch.testing.assert_close(got, wanted, rtol=0, atol=near)
        state = optimizer.state[next(iter(model.parameters()))]
        assert type(state["step"]) is torch.Tensor
        assert float(state["step"]) == 2


def test_shards_and_replicas(tmp_path: Path) -> None:
    on_processes(2, tmp_path, sharded)


def sharded_unevenly(rank: int) -> None:
    """Parameters of which this process has more or less than the other one, or nothing."""
    from torch.distributed.fsdp import fully_shard

    def made() -> torch.nn.ParameterDict:
        drawn = torch.Generator().manual_seed(1)
        sizes = {"one_row": (1, 5), "three_rows": (3, 7), "one": (1,), "even": (4, 2)}
        return torch.nn.ParameterDict({name: torch.randn(size, generator=drawn) for name, size in sizes.items()})

    found = []
    for optimizer_of, model in ((torch.optim.AdamW, made()), (AdamW, fully_shard(made()))):
        optimizer = optimizer_of(model.parameters(), lr=1e-2)
        for step in range(3):
            for p in model.parameters():
                mine = (p.to_local() if isinstance(p, DTensor) else p).detach()
                gradient = (mine + step).sin()
                p.grad = (
                    DTensor.from_local(gradient, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
                    if isinstance(p, DTensor)
                    else gradient
                )
            if optimizer_of is AdamW:
                clip_grad_norm_(model.parameters(), 0.5, optimizer=optimizer)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        found.append([getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)


def test_shards_of_different_sizes(tmp_path: Path) -> None:
    on_processes(2, tmp_path, sharded_unevenly)


# ---- rounding --------------------------------------------------------------------------------------------------------


def curve(dtype: torch.dtype, steps: int, **options: Any) -> torch.Tensor:
    """Losses of a tiny model that learns a rule, at a learning rate whose steps bfloat16's neighbours are too far
    apart for."""
    model = tiny_model().to(dtype)
    optimizer = AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.99), weight_decay=0.0, **options)
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        first = torch.randint(0, 97, (8, 1), generator=generator)
        ids = (first + 5 * torch.arange(16)) % 97
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().double())
    return torch.stack(found)


def test_stochastic_rounding_follows_float32() -> None:
    """Where rounding to nearest loses what each step adds: over the last third of a run, nearer to float32 than that,
    several times over. tools/optimizer_curves.py shows it on the demo's model."""
    bastile.apply()
    steps = 150
    exact = curve(torch.float32, steps)[-steps // 3 :]
    off = {
        rounding: (curve(torch.bfloat16, steps, rounding=rounding)[-steps // 3 :] - exact).abs().mean().item()
        for rounding in ("nearest", "stochastic")
    }
    assert off["stochastic"] < off["nearest"] / 2, off


def test_copies_of_an_optimiser_are_their_own() -> None:
    model = tiny_model()
    optimizer = AdamW(model.parameters(), lr=1e-3, in_backward=False)
    model(**tiny_batch(model)).loss.backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(optimizer)
    other.step()
    for mine, kept in zip(optimizer.state_dict()["state"].values(), before["state"].values(), strict=True):
        assert all(torch.equal(mine[name], kept[name]) for name in mine)
