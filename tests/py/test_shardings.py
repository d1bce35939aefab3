"""Weights that are spread over two processes, by the packages' own code: FSDP2 by hand and as Accelerate does it,
DeepSpeed's ZeRO-2 and -3. The fused loss runs, norms, rotary and MLP too, with one process's losses and gradients."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bastile
from bastile.models import sdpa, side_by_side, small
from processes import on_processes, zero_config
from test_tensor_parallel import PROCESSES, near, step

#: What runs in a step of two layers: at least so often.
RAN = {"fused_linear_cross_entropy": 1, "rms_norm": 1, "swiglu": 2, "add_rms_norm": 4}
TYPES = {
    "llama": {**RAN, "rope": 2},
    "gemma3_text": {**RAN, "qk_norm_rope": 2},  # its head is its embedding
}
#: Where ZeRO-3 gathers module by module, layers that are too large to be gathered whole, each norm's weight is whole
#: only in its own call: what takes in more than a norm steps aside.
ONE_BY_ONE = {"fused_linear_cross_entropy": 1, "rms_norm": 5, "swiglu": 2, "rope": 2}
FEW, MANY = 1, 10**9


def assert_ran(expected: dict[str, int]) -> None:
    told = bastile.report(reset=True)
    for operator, times in expected.items():
        assert told.ran(operator) >= times, f"{operator}\n{told}"


def fully_sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def sharded_by_accelerate(model: Any, **options: bool) -> Any:
    """Its FSDP2, which makes units of its own: the embedding; the last norm and the head. On CPUs Accelerate does not
    choose it by itself."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(model.model.layers[0]).__name__],
        cpu_ram_efficient_loading=False,
        **options,
    )
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", is_main_process=True)
    model = fsdp2_apply_ac(accelerator, model) if plugin.activation_checkpointing else model
    return fsdp2_prepare_model(accelerator, model)


def with_fsdp2(rank: int, way: Any, wants: dict[str, Any]) -> None:
    bastile.apply()
    for model_type, want in wants.items():
        model = way(small.small_model(model_type))
        bastile.report(reset=True)
        loss, gradients, _ = step(model)
        assert_ran(TYPES[model_type])
        near(loss, want["loss"])
        assert gradients.keys() == want["gradients"].keys()
        for name, gradient in gradients.items():
            near(gradient.full_tensor(), want["gradients"][name])


def with_zero(rank: int, way: tuple[int, int], wants: dict[str, Any]) -> None:
    """Each process has half of a step's weights (3), or of its gradients and moments (2). way: the stage, and how many
    parameters may be whole at a time."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    stage, at_a_time = way
    config = zero_config(stage, stage3_max_live_parameters=at_a_time)
    bastile.apply()
    for model_type, want in wants.items():
        model: Any = small.small_model(model_type)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
        bastile.report(reset=True)
        for _ in range(2):  # the second with what DeepSpeed has noted down of the first
            loss, _, _ = step(engine, backward=engine.backward)
            near(loss, want["loss"])
            for name, parameter in model.named_parameters():
                near(safe_get_full_grad(parameter), want["gradients"][name])
            engine.step()
        ran = ONE_BY_ONE if at_a_time == FEW else TYPES[model_type]
        assert_ran({name: 2 * times for name, times in ran.items()})


def on_two_processes(folder: Path, function: Any, way: Any, types: list[str]) -> None:
    wants = {}
    for model_type in types:
        loss, gradients, _ = step(small.small_model(model_type))
        wants[model_type] = {"loss": loss, "gradients": gradients}
    on_processes(PROCESSES, folder, function, way, wants)


@pytest.mark.parametrize("way", [fully_sharded, sharded_by_accelerate])
def test_fsdp2(way: Any, tmp_path: Path) -> None:
    on_two_processes(tmp_path, with_fsdp2, way, list(TYPES))


def padded_step(model: Any, padding: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.arange(3 * 17).view(3, 17) * 7 % 90 + 3
    mask = torch.ones_like(ids)
    mask[:2, 17 - padding :] = 0
    model.zero_grad()
    loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    loss.backward()
    named = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    return loss.detach(), {name: p.grad for name, p in named.items() if p.grad is not None}


def padded(rank: int, options: dict[str, bool], want: Any) -> None:
    """Of float32 and few tokens, too. What its attention takes shows in a first step."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(sdpa, "TYPES", (*sdpa.TYPES, torch.float32))
    monkeypatch.setattr(side_by_side, "_LEAST_STEP", 2)
    bastile.apply()
    model = sharded_by_accelerate(small.small_model("llama"), **options)
    padded_step(model, 0)
    loss, gradients = padded_step(model, 7)
    assert_ran({"padding_free": 1})
    near(loss, want[0])
    assert gradients.keys() == want[1].keys()
    for name, gradient in gradients.items():
        near(gradient.full_tensor(), want[1][name])


@pytest.mark.parametrize("also", [[], ["activation_checkpointing_offload"]], ids=str)
def test_padding_of_layers_that_accelerate_checkpoints(also: list[str], tmp_path: Path) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    options = dict.fromkeys(["activation_checkpointing", *also], True)
    if not options.keys() <= inspect.signature(FullyShardedDataParallelPlugin).parameters.keys():
        pytest.skip("of newer releases of Accelerate")
    on_processes(PROCESSES, tmp_path, padded, options, padded_step(small.small_model("llama"), 7))


@pytest.mark.parametrize(("stage", "at_a_time"), [(2, MANY), (3, MANY), (3, FEW)])
def test_zero(stage: int, at_a_time: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is needed: make test-trl")
    on_two_processes(tmp_path, with_zero, (stage, at_a_time), ["llama"])
