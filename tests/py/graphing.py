"""Training with and without graphs. Where there is no GPU, a recorder that calls the function again stands for CUDA's:
all but the graphs themselves is as it is there, and what a step leaves in the pool is NaN when the next one begins."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import bastile
from bastile.graphs import conditions, recorder
from bastile.graphs.recorder import RepeatingRecorder
from conftest import gradients, tiny_batch, tiny_model
from oracle import EMULATED

ON_CUDA = torch.cuda.is_available() and not EMULATED
DEVICE = "cuda" if ON_CUDA else "cpu"
KEPT = "someone still holds hidden states of a step before"


def allow_graphs(monkeypatch: Any, device: str = DEVICE) -> None:
    """device: of the models."""
    if device == "cpu":
        monkeypatch.setattr(conditions, "recorder_for", lambda device: RepeatingRecorder())


def pretend_cuda(monkeypatch: Any) -> None:
    """Where there is none, what a recorder calls, without effect."""
    if ON_CUDA:
        return
    stream = lambda *_: SimpleNamespace(wait_stream=lambda other: None)  # noqa: E731
    others = {"Stream": stream, "current_stream": stream, "synchronize": stream, "empty_cache": stream}
    for name, fake in {**others, "stream": lambda of: nullcontext(), "graph_pool_handle": object}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
    monkeypatch.setattr(recorder, "_streams", {})


class NoGraph:
    def capture_begin(self, **_: Any) -> None:
        pass

    def capture_end(self) -> None:
        pass


def batch_of(model: Any, step: int, rows: int = 2, columns: int = 11, mask: bool = True) -> dict[str, torch.Tensor]:
    batch = tiny_batch(getattr(model, "module", model), rows, columns, seed=step)
    if not mask:
        del batch["attention_mask"]
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}


@dataclass
class Run:
    losses: list[torch.Tensor]
    parameters: list[torch.Tensor]
    replayed: int
    aside: dict[str, int]


def counted() -> tuple[int, dict[str, int]]:
    """Steps replayed since the last call, and the reasons of those that were not."""
    lines = [line for line in bastile.report(reset=True) if line.operator == "cuda_graphs"]
    return sum(line.ran for line in lines), {reason: n for line in lines for reason, n in line.aside.items()}


def counted_tokens() -> tuple[int, dict[str, int]]:
    """Tokens of replayed calls since the last time, and reasons why there were none."""
    lines = [line for line in bastile.report(reset=True) if line.where.endswith("GenerationMixin")]
    return sum(line.ran for line in lines), {reason: n for line in lines for reason, n in line.aside.items()}


def train(
    model: nn.Module,
    graphs: bool,
    steps: int = 4,
    accumulate: int = 1,
    batches: Callable[[Any, int], dict[str, torch.Tensor]] = batch_of,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    before: Sequence[Callable[[nn.Module], Any]] = (),
    set_to_none: bool = True,
    **apply: Any,
) -> Run:
    """before: what is done to the model before each step."""
    bastile.apply(cuda_graphs=graphs, **apply)
    counted()
    model = copy.deepcopy(model).to(DEVICE)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(7)
    losses = []
    for step in range(steps):
        if step < len(before):
            before[step](model)
        for micro in range(accumulate):
            with around():
                loss = model(**batches(model, step * accumulate + micro)).loss
            with around_backward():
                loss.backward()
            losses.append(loss.detach().clone())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return Run(losses, [p.detach().clone() for p in model.parameters()], *counted())


def assert_alike(model: nn.Module, replayed: int | None, **how: Any) -> Run:
    """The bits of training without graphs, with so many steps replayed (None: any number)."""
    want, got = train(model, False, **how), train(model, True, **how)
    for one, other in zip(got.losses + got.parameters, want.losses + want.parameters, strict=True):
        assert torch.isfinite(other).all()
        assert torch.equal(one, other)
    assert want.replayed == 0
    assert got.replayed == replayed or replayed is None, got.aside
    return got


def model_with_graphs(steps: int = 2, **changes: Any) -> Any:
    bastile.apply(cuda_graphs=True)
    model = tiny_model(**changes).to(DEVICE)
    for step in range(steps):
        model(**batch_of(model, step)).loss.backward()
        model.zero_grad()
    counted()
    return model


def loss_of(model: Any, step: int = 0) -> torch.Tensor:
    return model(**batch_of(model, step)).loss


def stock_gradients(model: Any, *steps: int) -> dict[str, torch.Tensor]:
    bastile.apply(cuda_graphs=False)
    model.zero_grad()
    for step in steps:
        loss_of(model, step).backward()
    return gradients(model)


def assert_stock_gradients(model: Any, *steps: int) -> None:
    """That the model has the gradients of these steps without graphs, to the bit, whose sums are in this order."""
    got = gradients(model)
    want = stock_gradients(model, *steps)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())
    bastile.apply(cuda_graphs=True)


class MayBeLeftOut(nn.Module):
    """An activation that is one of two as the host draws it: so PEFT's LoHa and LoKr decide, with module_dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) * (1 if torch.rand(1) > 0.5 else 2)


def the_host_draws(monkeypatch: Any, model: Any) -> None:
    """In each layer of this model."""
    host_is_apart(monkeypatch)
    for layer in model.model.layers:
        layer.mlp.act_fn = MayBeLeftOut()


def host_is_apart(monkeypatch: Any) -> None:
    """From the device, which on a CPU draws what the host draws."""
    if not ON_CUDA:
        of_host = lambda device: conditions.random_state(torch.device("cpu"))  # noqa: E731
        monkeypatch.setattr(conditions, "host_random_state", of_host)
