"""Layers that DeepSpeed's ZeRO-3 gathers whole after bastile.apply(): which, and by real DeepSpeed (make test-trl) that
gradients are those that it has without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, T5Config, T5ForConditionalGeneration

import bastile
from processes import on_processes, zero_config
from test_peft import LAYERS, SIZES, base, batch, with_lora

HOOKS = "deepspeed.runtime.zero.parameter_offload"
MANY = 10**9


class Hooks:
    """What of DeepSpeedZeRoOffload is seen from outside: its arguments, and whose the parameters of flagged modules
    are."""

    def __init__(
        self,
        module: nn.Module,
        timers: Any,
        prefetch_bucket_size: int = 50,
        max_live_parameters: int = MANY,
        zero_module_granularity_threshold: int = 0,
    ) -> None:
        self.prefetch_bucket_size = prefetch_bucket_size
        self.flagged = [m for m in module.modules() if getattr(m, "_z3_leaf", False)]
        for flagged in self.flagged:
            for parameter in flagged.parameters():
                parameter.ds_z3_leaf_module = flagged  # type: ignore[attr-defined]


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """The class, in modules of DeepSpeed's names, whether that is there or not."""

    def flag(module: nn.Module, flag: bool) -> None:
        module._z3_leaf = flag  # type: ignore[assignment]

    made = type("DeepSpeedZeRoOffload", (Hooks,), {"__init__": Hooks.__init__})
    packages = {HOOKS: ModuleType(HOOKS), "deepspeed.utils": ModuleType("deepspeed.utils")}
    packages[HOOKS].DeepSpeedZeRoOffload = made  # type: ignore[attr-defined]
    packages["deepspeed.utils"].set_z3_leaf_module = flag  # type: ignore[attr-defined]
    packages["deepspeed.utils"].z3_leaf_module = lambda m: getattr(m, "_z3_leaf", False)  # type: ignore[attr-defined]
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)
    bastile.apply()
    yield made
    bastile.reset()


def reasons() -> list[str]:
    return [reason for line in bastile.report(reset=True) if line.operator == "zero3" for reason in line.aside]


@pytest.mark.parametrize("adapters", [False, True])
def test_layers_are_gathered_whole(hooks: Any, adapters: bool) -> None:
    model: Any = with_lora(base()) if adapters else base()
    layers = list(model.get_decoder().layers)
    made = hooks(model, None)
    assert made.flagged == layers
    assert made.prefetch_bucket_size == sum(p.numel() for p in layers[0].parameters())
    assert not any(hasattr(p, "ds_z3_leaf_module") for p in model.parameters())
    assert bastile.report(reset=True).ran("zero3") == len(layers)
    assert hooks(model, timers=None).flagged == layers  # once more, as by another trainer


def test_a_longer_reach_stays(hooks: Any) -> None:
    assert hooks(base(), None, prefetch_bucket_size=MANY).prefetch_bucket_size == MANY
    assert hooks(base(), None, prefetch_bucket_size=1).prefetch_bucket_size == 1  # one by one, as is asked for


def test_size_is_of_whole_parameters(hooks: Any) -> None:
    """A model that was made in parts has empty parameters."""
    model = base()
    for parameter in model.parameters():
        parameter.ds_numel, parameter.data = parameter.numel(), torch.empty(0)  # type: ignore[attr-defined]
    size = sum(p.ds_numel for p in model.model.layers[0].parameters())
    assert hooks(model, None, max_live_parameters=4 * size).flagged == list(model.model.layers)
    model = base()
    assert hooks(model, None, max_live_parameters=4 * size - 1).flagged == []
    assert reasons() == ["a layer is more than a quarter of stage3_max_live_parameters"]


def test_flags_of_a_configuration_are_left_alone(hooks: Any) -> None:
    model = base()
    model.model.layers[0].mlp._z3_leaf = True
    made = hooks(model, None)
    assert made.flagged == [model.model.layers[0].mlp]
    assert made.prefetch_bucket_size == 50
    assert all(hasattr(p, "ds_z3_leaf_module") for p in model.model.layers[0].mlp.parameters())
    assert hooks(base(), None, zero_module_granularity_threshold=3).flagged == []


def test_layers_with_other_parameters(hooks: Any) -> None:
    experts = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=2)
    )
    assert hooks(experts, None).flagged == [experts.model.layers[0]]  # the other has experts
    (reason,) = reasons()
    assert reason.startswith("a layer has parameters of a Qwen3Moe")
    model = base()
    model.model.layers[1].bias = nn.Parameter(torch.zeros(()))
    assert hooks(model, None).flagged == [model.model.layers[0]]
    assert reasons() == ["a layer has parameters of a Qwen3DecoderLayer"]


def test_other_stacks_are_left_alone(hooks: Any) -> None:
    """T5's list has another name, and its first layer a table of biases."""
    model = T5ForConditionalGeneration(T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4))
    assert hooks(model, None).flagged == []


def test_reset_takes_it_out(hooks: Any) -> None:
    there = hooks.__init__
    bastile.reset()
    assert hooks.__init__ is Hooks.__init__
    assert hooks(base(), None).flagged == []
    bastile.apply()
    assert hooks.__init__ is not Hooks.__init__
    hooks.__init__ = there  # as whoever has put something around it
    model = base()
    assert hooks(model, None).flagged
    bastile.reset()
    there(made := object.__new__(hooks), model, None)
    assert made.flagged == []


def test_another_signature_stays(hooks: Any) -> None:
    bastile.reset()

    def init(self: Any, module: nn.Module) -> None:
        pass

    hooks.__init__ = init
    bastile.apply()
    assert hooks.__init__ is init


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------


def gradients(rank: int, adapters: bool, checkpointing: bool | None) -> dict[str, torch.Tensor]:
    """Of two steps' last one. checkpointing: reentrant or not; None: without."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    config = zero_config(3, stage3_max_reuse_distance=0)  # and weights go as soon as they can
    model: Any = with_lora(base()) if adapters else base().train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        if adapters:
            model.enable_input_require_grads()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(trained.values(), lr=0.1))
    for _ in range(2):  # the second in the order that DeepSpeed has noted down
        engine.backward(engine(**batch(rank + 1)).loss)
        found = {name: safe_get_full_grad(p).clone() for name, p in trained.items()}
        engine.step()
    here = [
        p for layer in model.get_decoder().layers for p in layer.parameters() if p.ds_status.name != "NOT_AVAILABLE"
    ]
    assert not here, "weights that have not gone"
    return found


def process(rank: int, *how: Any) -> None:
    want = gradients(rank, *how)
    bastile.apply()
    got = gradients(rank, *how)
    told = bastile.report(reset=True)
    assert told.ran("zero3") == LAYERS
    assert told.ran("add_rms_norm") > 0, told
    for name, gradient in want.items():
        assert gradient.norm() > 0, name
        error = (got[name] - gradient).norm() / gradient.norm()
        assert error < 1e-4, f"{name}: {error}"


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("adapters", [False, True])
def test_gradients(adapters: bool, checkpointing: bool | None, tmp_path: Path) -> None:
    """Adapters without checkpointing too, where the first layer's input has no gradient."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is needed: make test-trl")
    on_processes(2, tmp_path, process, adapters, checkpointing)
