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
    arguments += ["--offload-checkpoints", "--against", "hf,unsloth", "--dtype", "bfloat16", "--out", str(tmp_path)]
    assert main([*TINY, *arguments]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "steps of TRL's SFT, gradient checkpointing (inputs in the host's memory), LoRA of rank 4" in printed
    found = records(tmp_path, "tiny-lora4-trl-checkpointing-offloaded")
    assert found["unsloth", 32]["status"] == "cannot run"
    ours, stock = found["bastile", 32], found["hf", 32]
    assert len(ours["samples"]) == 2
    assert len(ours["losses"]) == 3
    assert ours["losses"] == pytest.approx(stock["losses"], rel=2**-7)
    assert any(name.startswith("lora_linear") for name in ours["patched"])
    assert "offload_checkpoints" in ours["patched"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--checkpointing"], "--checkpointing goes with --trainer"),
        (["--trainer", "trl", "--offload-checkpoints"], "--offload-checkpoints goes with --checkpointing"),
        (["--trainer", "trl", "--step"], "--whole-step does not go with --trainer"),
        (["--trainer", "trl", "--against", "liger-cute"], "leave liger-cute out"),
    ],
)
def test_what_does_not_go_with_a_trainer(
    given: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert main([*TINY, *given, "--out", str(tmp_path)]) == 2
    assert said in capfd.readouterr().err
