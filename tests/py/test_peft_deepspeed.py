"""Models with PEFT's adapters in two processes of DeepSpeed, after bastile.apply(): part of make test-trl."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bastile
from processes import on_processes, zero_config
from test_peft import LAYERS, base, batch, with_lora

pytest.importorskip("deepspeed")


FEW, MANY = 1, 10**9


def process(rank: int, stage: int, at_a_time: int) -> None:
    """Two steps, stock and patched. ZeRO-2 shards gradients and what the optimiser keeps; ZeRO-3 weights too. Where
    these are gathered module by module each is whole only while its own module runs, so that modules run one by one.
    at_a_time: how many parameters may be whole at a time, by which layers may be too large to be gathered whole."""
    import deepspeed

    config = zero_config(stage, stage3_max_live_parameters=at_a_time)
    found = []
    for patched in (False, True):
        if patched:
            bastile.apply()
        model = with_lora(base())
        trained = [p for p in model.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(trained, lr=0.1))
        for _ in range(2):
            loss = engine(**batch(rank + 1)).loss
            engine.backward(loss)
            engine.step()
        with deepspeed.zero.GatheredParameters(trained) if stage == 3 else torch.no_grad():
            found.append([loss.detach(), *(p.detach().clone() for p in trained)])
    ran = bastile.report().ran("lora_linear")
    one_by_one = at_a_time == FEW
    assert ran == (0 if one_by_one else 2 * 7 * LAYERS), f"{ran} layers ran as nodes"
    if one_by_one:
        assert "hooks" in str(bastile.report())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("stage", "at_a_time"), [(2, MANY), (3, MANY), (3, FEW)])
def test_zero(stage: int, at_a_time: int, tmp_path: Path) -> None:
    on_processes(2, tmp_path, process, stage, at_a_time)
