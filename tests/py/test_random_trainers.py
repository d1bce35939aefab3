"""What tools/random_trainers.py finds: nothing in a few runs, and what is wrong on purpose."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bastile.models import padding
from conftest import older_than

pytest.importorskip("trl", minversion="1.16")
pytest.importorskip("peft")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import random_models
import random_trainers
from random_cases import look
from random_runs import Run, drawn
from random_trainers import Ran

pytestmark = pytest.mark.skipif(older_than("5.24"), reason="its runs are of one release's models")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPE = "float32" if DEVICE.type == "cpu" else "bfloat16"  # what all ways are open to


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    import datasets

    caplog.set_level(logging.ERROR, "bastile")
    datasets.disable_progress_bars()


def found(seeds: range, draw: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    with random_models.all_ways(DEVICE):
        return look(seeds, draw, random_trainers.quietly_judged)


def test_a_few_runs() -> None:
    failed, counts = found(range(1, 17), lambda seed: drawn(seed, None, None, [TYPE]))
    assert failed == []
    assert counts["the same"] >= 6
    assert counts["with graphs"] >= 2


def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was wrong once put in again: a row of padding that the first token's label is of."""

    def draw(seed: int) -> Run:
        options = {"optim": "sgd", "gradient_checkpointing": False}
        return Run("causal", "bert", {}, "rows", options, TYPE, None, False, None, False, False)

    assert found(range(4), draw)[0] == []
    read = padding.is_unread
    monkeypatch.setattr(padding, "is_unread", lambda mask, before=False: read(mask))
    failed = found(range(4), draw)[0]
    assert failed
    assert all(each["verdict"] == "differs" for each in failed)


def test_how_far_off() -> None:
    weights = {"w": torch.zeros(4).double()}
    one = Ran([{"loss": 2.0}], {"w": torch.ones(4).double()}, weights)
    other = Ran([{"loss": 1.0, "entropy": float("nan")}], {"w": torch.full((4,), 2.0).double()}, weights)
    assert one.error(other)[0] == float("inf")  # one of them does not log its entropy
    assert Ran([{"loss": 1.0, "entropy": float("nan")}], one.weights, weights).error(other) == (0.0, 0.5)
    assert one.worst(other)["loss"] == (2.0, 1.0)
    assert Ran([], one.weights, weights).error(other)[0] == float("inf")
