"""Several forward passes before one backward pass, as where embeddings of questions and answers are compared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import bastile
from bastile.graphs import stack as stacks
from conftest import tiny_model
from graphing import DEVICE, allow_graphs, counted

WAITS = "a step before has not had its backward pass yet"


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch)


def trained(model: nn.Module, graphs: bool, passes: int, steps: int = 6, accumulate: int = 1) -> tuple[nn.Module, Any]:
    """Losses of embeddings of so many texts that are to be alike, and the gradients."""
    bastile.apply(cuda_graphs=graphs)
    counted()
    model = copy.deepcopy(model).to(DEVICE).train()
    found = []
    for step in range(steps):
        drawn = torch.Generator().manual_seed(step)
        texts = [torch.randint(3, 90, (2, 9 + many), generator=drawn).to(DEVICE) for many in range(passes)]
        made = [model.model(input_ids=text, use_cache=False).last_hidden_state.mean(1) for text in texts]
        loss = sum((one - made[0]).square().mean() for one in made[1:]) + made[0].square().mean()
        loss.backward()
        found.append(loss.detach())
        if (step + 1) % accumulate == 0:
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
    return model, found


def assert_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("passes", [2, 3])
def test_each_pass_has_memory_of_its_own(passes: int, accumulate: int) -> None:
    model = tiny_model()
    _, want = trained(model, False, passes, accumulate=accumulate)
    kept, got = trained(model, True, passes, accumulate=accumulate)
    replayed, aside = counted()
    assert_bits(got, want)
    # The first step is noted; in the second, passes wait for the first one's backward pass for the last time.
    assert aside == {WAITS: passes - 1}
    assert replayed == 1 + 4 * passes
    first, *others = stacks._stacks[kept.model].and_beside()  # type: ignore[index]
    assert len(others) == passes - 1
    assert all(captured.lends_gradients for captured in first.captured.values())
    assert not any(captured.lends_gradients for other in others for captured in other.captured.values())


def test_a_pass_that_has_no_backward_pass_gets_none_beside() -> None:
    """Whoever keeps losses of passes that are never to be differentiated would get more and more memory."""
    bastile.apply(cuda_graphs=True)
    model, kept = tiny_model().to(DEVICE).train(), []
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    counted()
    for _ in range(5):
        kept.append(model(input_ids=ids, labels=ids).loss)
    assert counted() == (1, {WAITS: 4})
    assert len(list(stacks._stacks[model.model].and_beside())) == 1


def test_no_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MOST_BESIDE", 2)
    model = tiny_model()
    _, want = trained(model, False, 3)
    kept, got = trained(model, True, 3)
    assert_bits(got, want)
    assert len(list(stacks._stacks[kept.model].and_beside())) == 2  # type: ignore[index]
    assert counted()[0] == 1 + 4 * 2
