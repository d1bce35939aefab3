"""TRL's trainers on batches that their collators have padded: stock's numbers, without the padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bastile
from bastile.models import padding_free, sdpa

pytest.importorskip("trl")
import test_trl as runs
import trl_runs

quiet, saved = runs.quiet, runs.saved  # fixtures


@runs.newest
@pytest.mark.parametrize("kind", ["sft", "sft completion", "dpo", "kto", "grpo"])
@pytest.mark.parametrize("attach", [False, True])
def test_padding_goes_through_no_layer(
    kind: str, attach: bool, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second pass of a model on, references' too, where TRL's collators have padded."""
    monkeypatch.setattr(sdpa, "TYPES", (*sdpa.TYPES, torch.float32))
    monkeypatch.setattr(padding_free, "_LEAST_STEP", 1)
    words = trl_runs.words
    monkeypatch.setattr(trl_runs, "words", lambda seed, count: words(seed, count + 3 * (seed % 3)))
    more = {"peft_config": runs.adapters} if attach else {}
    if attach and kind == "dpo":  # policy and reference agree: the same kernels are to say so, before and after
        more["max_steps"] = 3
    runs.both(kind, saved("qwen3"), tmp_path, monkeypatch, per_device_train_batch_size=4, num_train_epochs=4, **more)
    assert bastile.report().ran("padding_free") >= 1
