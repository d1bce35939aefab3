"""What TRL's SFT logs is the same, and no step waits for it."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bastile
from bastile import host_copies
from bastile.models import logged
from bastile.models.table import USUAL

trl = pytest.importorskip("trl")
import trl_runs  # noqa: E402
from test_running_loss import AtEachStep, Reads  # noqa: E402
from test_waits import copies  # noqa: E402, F401


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(logged, "_DEVICES", frozenset({"cpu"}))
    yield
    bastile.reset()


def sft(folder: Path, **changes: Any) -> Any:
    torch.manual_seed(0)
    path = trl_runs.saved_model(next(iter(trl_runs.MODELS)), folder)
    return trl_runs.trainer("sft", path, folder, max_steps=6, logging_steps=3, **changes)


def test_the_log_is_the_same_and_no_step_waits(copies, tmp_path):  # noqa: F811
    logs, counts = {}, {}
    for is_ours in (False, True):
        if is_ours:
            # Only what this is about: with other code in the layers losses differ in their last digits.
            bastile.apply(**dict.fromkeys(USUAL, False) | {"layer_norm": True})
        trainer = sft(tmp_path)
        with Reads() as reads:
            each = AtEachStep(lambda reads=reads: reads.count)
            trainer.add_callback(each)
            trainer.train()
        logs[is_ours] = trl_runs.numbers_of(trainer)
        counts[is_ours] = [after - before for before, after in zip(each.seen, each.seen[1:], strict=False)]
    assert logs[True] == logs[False]
    assert len(logs[True]) == 3
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= logs[True][0].keys()
    assert all(type(value) in (int, float) for entry in trainer.state.log_history for value in entry.values())
    # In a step that is not logged stock reads two numbers for the sum of losses and five for its log (four in earlier
    # releases); ours one, the sum of the mask that the host has sent.
    assert counts[False][3] - counts[True][3] in (5, 6)
    assert vars(trl.SFTTrainer)["compute_loss"] is COMPUTE_LOSS


COMPUTE_LOSS = vars(trl.SFTTrainer)["compute_loss"]


def test_a_class_of_its_own_gets_it_by_way_of_its_base(tmp_path):
    class Own(trl.SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            mine.append(vars(trl.SFTTrainer)["compute_loss"])
            return super().compute_loss(*args, **kwargs)

    mine: list[Any] = []
    own = vars(Own)["compute_loss"]
    assert logged.put_into(Own) == [trl.SFTTrainer]
    assert vars(trl.SFTTrainer)["compute_loss"] is not COMPUTE_LOSS
    assert vars(Own)["compute_loss"] is own
    assert logged.put_into(Own) == []
    logged.take_out_of([trl.SFTTrainer])
    assert vars(trl.SFTTrainer)["compute_loss"] is COMPUTE_LOSS


def test_a_ratio_of_nothing_is_zero():
    for above, below in ((3.0, 4), (0.0, 0), (5.0, 0), (0.1, 3)):
        quotient, divisor = torch.tensor(above) / torch.tensor(below), torch.tensor(below)
        stock = quotient.item() if divisor > 0 else 0.0
        assert repr(logged.ratio(quotient, divisor)) == repr(stock)


@pytest.mark.parametrize("number", [0.1, -2.5, 0.0, 7, math.inf])
def test_a_number_that_is_read_later_is_that_number(number):
    tensor = torch.tensor(number)
    stock = tensor.item()
    made = logged.later(tensor)
    assert type(made) is logged._Later
    for function in (
        lambda x: sum([x, x]) / 2,
        lambda x: 2 * x - x / 4 + 1.5 - -x,
        lambda x: (x == stock, x < 1, x >= 1, x > 1, x != 3),
        lambda x: (float(x), bool(x), abs(x), +x, -x, hash(x), repr(x), f"{x:.3f}", str(x)),
        lambda x: (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), min(x, 3), max([x, 3])),
        lambda x: round(x, 1) if math.isfinite(x) else 0,
        lambda x: 1 // x if x not in (0, math.inf) else x % 2 if math.isfinite(x) else 0,
    ):
        assert repr(function(made)) == repr(function(stock))
    assert [1.0, made] == [1.0, stock]


def test_a_number_is_what_it_was_when_it_was_handed_over():
    """A tensor that is written to later is somebody else's: of those TRL has sums, which nobody writes to."""
    tensor = torch.tensor(2.0) * 3
    made = logged.later(tensor)
    assert made == 6.0
    tensor.zero_()
    assert made == 6.0
    assert type(logged.later(torch.tensor(1.0, requires_grad=True))) is float


def test_a_mask_s_tokens_are_those_of_all_processes():
    class Accelerator:
        def __init__(self, count: int) -> None:
            self.num_processes = count

        def gather_for_metrics(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.repeat(self.num_processes)

    mask, unknown = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)
    host_copies.remember(mask, mask.clone())
    for each in (mask, unknown):
        assert [logged.count(Accelerator(count), each) for count in (1, 2)] == [6, 12]
