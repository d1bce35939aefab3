"""`bastile sweep --trainer`: steps of TRL's SFT, beside other implementations."""

from __future__ import annotations

from pathlib import Path

import pytest

from bastile.cli import main
from test_sweep import TINY, records, workers  # noqa: F401  (a fixture)


@pytest.mark.usefixtures("workers")
def test_steps_of_a_trainer(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """TRL's own, with adapters: the same tokens and weights for both. Unsloth is not here, or needs a GPU."""
    arguments = ["--lora", "4", "--trainer", "trl", "--checkpointing", "--lengths", "32", "--batch", "2"]
    arguments += ["--against", "hf,unsloth", "--dtype", "bfloat16", "--out", str(tmp_path)]
    assert main([*TINY, *arguments]) == 0
    assert "steps of TRL's SFT, gradient checkpointing, LoRA of rank 4" in " ".join(capfd.readouterr().out.split())
    found = records(tmp_path, "tiny-lora4-trl-checkpointing")
    assert found["unsloth", 32]["status"] == "cannot run"
    ours, stock = found["bastile", 32], found["hf", 32]
    assert len(ours["samples"]) == 2
    assert len(ours["losses"]) == 3
    assert ours["losses"] == pytest.approx(stock["losses"], rel=2**-7)
    assert any(name.startswith("lora_linear") for name in ours["patched"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--checkpointing"], "--checkpointing goes with --trainer"),
        (["--trainer", "trl", "--step"], "--whole-step does not go with --trainer"),
        (["--trainer", "trl", "--against", "liger-cute"], "leave liger-cute out"),
    ],
)
def test_what_does_not_go_with_a_trainer(
    given: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert main([*TINY, *given, "--out", str(tmp_path)]) == 2
    assert said in capfd.readouterr().err
