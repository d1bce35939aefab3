"""Layers with adapters of few rows that nobody differentiates, as of a text that is generated on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from bastile.ops import _adapted
from memory import Memory
from oracle import LUCK, Case
from test_lora import MIXES, Layer, group_case, mlp_case

ADDED = "bastile.low_rank_add.default"


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, _adapted._FEW_ROWS])
def test_one_operator_for_all_layers_of_an_input(mix, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds what adapters add, of A and B as they are."""
    monkeypatch.setattr(_adapted, "on_gpu", lambda t: True)
    sizes = [Layer(48, 96, 8, bias=False), Layer(48, 32, 0, bias=True), Layer(48, 40, 5, bias=True)]

    def group(rows: int, tokens: int = 1) -> Case:
        return group_case(sizes, (rows, tokens, 48), mix, "cpu")

    def mlp(rows: int, tokens: int = 1) -> Case:
        return mlp_case((48, 64), (8, 0, 4), (rows, tokens, 48), mix, "cpu")

    for made, times in ((group, 1), (mlp, 2)):
        squares, draws = torch.zeros(2, dtype=torch.float64), 1024 // rows
        for _ in range(draws):
            case = made(rows)
            with torch.no_grad(), Memory() as memory:
                ours = results_of(case.ours, case, None)
            assert memory.calls.count(ADDED) == times
            exact = results_of(case.exact, case, torch.float64)
            for i, found in enumerate((ours, results_of(case.stock, case, None))):
                squares[i] += sum([(y.double() - right).square().sum() for y, right in zip(found, exact, strict=True)])
        assert squares[0] <= squares[1] * math.exp(2 * LUCK / (draws * rows) ** 0.5), made
        for others in (made(_adapted._FEW_ROWS + 1), made(2, 3)):
            with torch.no_grad(), Memory() as memory:
                results_of(others.ours, others, None)
            assert memory.calls.count(ADDED) == 0


def results_of(function: Callable, case: Case, dtype: torch.dtype | None) -> list[torch.Tensor]:
    found = function(*[t if dtype is None else t.to(dtype) for t in case.inputs.values()])
    return [found] if isinstance(found, torch.Tensor) else list(found)
