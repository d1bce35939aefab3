"""Layers as graphs in two processes of DeepSpeed's ZeRO-1 and -2, whose weights stay whole: part of make test-trl. Its
hooks take each gradient as it comes, reduce it and let go of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bastile
from graphing import allow_graphs, batch_of, counted
from processes import on_processes, zero_config
from test_peft import base, with_lora

pytest.importorskip("deepspeed")

STEPS = 5


def trained(rank: int, graphs: bool, stage: int, adapters: bool, accumulate: int, more: dict[str, Any]) -> list[Any]:
    """Losses, and parameters behind the last step."""
    import deepspeed

    config = {**zero_config(stage, **more), "gradient_accumulation_steps": accumulate, "gradient_clipping": 1.0}
    bastile.apply(cuda_graphs=graphs)
    model = with_lora(base()) if adapters else base()
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW(parameters, lr=1e-2))
    counted()
    found = []
    for step in range(STEPS * accumulate):
        loss = engine(**batch_of(model, 2 * step + rank, mask=False)).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.detach().clone())
    return found + [p.detach().clone() for p in parameters]


def process(rank: int, *how: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        allow_graphs(patch, "cpu")
        want = trained(rank, False, *how)
        assert counted()[0] == 0
        got = trained(rank, True, *how)
        replayed, aside = counted()
    assert want[0] != want[STEPS - 1]
    for one, other in zip(got, want, strict=True):
        assert torch.isfinite(other).all()
        assert torch.equal(one, other)
    assert replayed >= STEPS - 2, aside


@pytest.mark.parametrize(
    ("stage", "adapters", "accumulate", "more"),
    [
        (1, False, 1, {}),
        (2, False, 1, {}),
        (2, False, 2, {}),
        (2, True, 1, {}),
        (2, False, 1, {"reduce_bucket_size": 200}),  # smaller than weights: these are reduced where they lie
        (2, False, 1, {"contiguous_gradients": False, "overlap_comm": False}),
    ],
    ids=["zero-1", "zero-2", "accumulated", "adapters", "small buckets", "not contiguous"],
)
def test_zero(stage: int, adapters: bool, accumulate: int, more: dict[str, Any], tmp_path: Path) -> None:
    on_processes(2, tmp_path, process, stage, adapters, accumulate, more)
