"""Models with PEFT's adapters in two processes, by DistributedDataParallel and by FSDP2: what bastile.apply() makes of
them is what stock makes, and the nodes run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import bastile
from processes import on_processes
from test_peft import LAYERS, SIZES, base, batch, with_lora

PROCESSES = 2


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    """Each layer, then what is left; a weight is whole only while its layer runs."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(**batch(rank + 1)).loss
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            found[name] = whole.clone()
    return found


def experts() -> nn.Module:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2))


def process_of_experts(rank: int, checkpointing: bool) -> None:
    """With adapters on each expert's matrices, which are multiplied by."""
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    for wrap in (replicated, sharded):
        found: list[Any] = []
        for ours in (False, True):
            if ours:
                bastile.apply()
            bastile.report(reset=True)
            model = experts()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model = with_lora(model, target_modules=["q_proj"], target_parameters=targets)
            found.append(step(wrap(model), rank))
            if ours:
                lines = [line for line in bastile.report() if line.where.endswith("ParamWrapper")]
                assert [line.aside for line in lines] == [{}]
                assert lines[0].ran == 2 * LAYERS * (2 if checkpointing else 1)
            bastile.reset()
        stock, patched = found
        assert stock.keys() == patched.keys()
        for name, want in stock.items():
            error = (patched[name] - want).norm()
            assert error <= (1e-5 if name == "loss" else 1e-4) * want.norm() + 1e-9, f"{wrap.__name__}, {name}: {error}"


def process(rank: int, checkpointing: bool) -> None:
    for wrap in (replicated, sharded):
        found: list[Any] = []
        for ours in (False, True):
            if ours:
                bastile.apply()
            before = bastile.report().ran("lora_linear")
            model = base()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            found.append(step(wrap(with_lora(model)), rank))
            if ours:
                ran = bastile.report().ran("lora_linear") - before
                assert ran == 7 * LAYERS * (2 if checkpointing else 1), f"{wrap.__name__}: {ran} layers ran as nodes"
            bastile.reset()
        stock, patched = found
        assert stock.keys() == patched.keys()
        assert len(stock) == 1 + 14 * LAYERS
        for name, want in stock.items():
            error = (patched[name] - want).norm()
            assert error <= (1e-5 if name == "loss" else 1e-4) * want.norm(), f"{wrap.__name__}, {name}: {error}"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("run", [process, process_of_experts])
def test_two_processes(run, checkpointing, tmp_path):
    on_processes(PROCESSES, tmp_path, run, checkpointing)
