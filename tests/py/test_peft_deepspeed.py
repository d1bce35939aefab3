"""Models with PEFT's adapters in two processes of DeepSpeed, after bastile.apply(): part of make test-trl."""

from __future__ import annotations

import pytest
import torch

import bastile
from processes import on_processes
from test_peft import LAYERS, base, batch, with_lora

pytest.importorskip("deepspeed")


def process(rank: int, stage: int) -> None:
    """Two steps, stock and patched. ZeRO-2 shards gradients and what the optimiser keeps; ZeRO-3 weights too, each of
    which is whole only while its own layer runs, so that layers run one by one."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
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
    assert ran == (2 * 7 * LAYERS if stage == 2 else 0), f"{ran} layers ran as nodes"
    if stage == 3:
        assert "hooks" in str(bastile.report())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero(stage, tmp_path):
    on_processes(2, tmp_path, process, stage)
