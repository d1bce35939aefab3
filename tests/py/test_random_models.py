"""What tools/random_models.py finds: nothing in a few cases, and what is wrong on purpose."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bastile.models import outer_masks, padding
from conftest import older_than

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import random_models
from random_cases import look
from random_models import Case, Way

pytestmark = pytest.mark.skipif(older_than("5.24"), reason="its cases are of one release's models")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "bastile")


def found(seeds: range, draw: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    with random_models.all_ways(CPU):
        return look(seeds, draw, lambda seed, case, weights: random_models.judged(seed, case, CPU, weights))


def test_a_few_cases() -> None:
    failed, counts = found(range(1, 25), lambda seed: random_models.drawn(seed, None, None, None, ["float32"]))
    assert failed == []
    assert counts["the same"] >= 10
    assert counts["with graphs"] >= 4


def test_what_they_have_found_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was wrong once put in again: packed positions that a text model with a cache of its own does not ask,
    and a row of padding that the first token's label is of."""

    def draw(seed: int) -> Case:
        way = Way("float32", graphs=False)
        return [
            Case("sequences", "gemma3", {"use_cache": True}, way),
            Case("causal", "bert", {"initializer_range": 0.2}, way),
        ][seed % 2]

    assert found(range(100, 116), draw)[0] == []
    monkeypatch.setattr(outer_masks, "_is_packed_for_it_alone", lambda model, given: False)
    read = padding.is_unread
    monkeypatch.setattr(padding, "is_unread", lambda mask, before=False: read(mask))
    assert {each["model_type"] for each in found(range(100, 116), draw)[0]} == {"gemma3", "bert"}


def test_errors() -> None:
    one = random_models.Trained(torch.tensor([2.0]).double(), {"w": torch.ones(4).double()})
    other = random_models.Trained(torch.tensor([1.0]).double(), {"w": torch.zeros(4).double()})
    assert other.error(one) == (0.5, 1.0)
    assert not random_models.is_as_exact((float("nan"), 0.0), (0.0, 0.0), "float32")
    assert random_models.Trained(one.losses, {}).error(one)[1] == float("inf")
