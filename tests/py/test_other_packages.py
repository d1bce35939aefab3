"""Patches beside other packages: Accelerate's mixed precision and hooks, DeepSpeed's engine, patchers, pickles."""

import functools
import io
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import extract_model_from_parallel
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.models.bart import modeling_bart

import bastile
from bastile.models.table import OPERATORS, USUAL
from conftest import DENSE, calls_of_a_step, modeling, on_demand, tiny_batch, tiny_model
from families import FAMILIES, everywhere
from test_patching import EVERY, all_of, pieces

LOSS = "fused_linear_cross_entropy"


# ---- Accelerate ------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def has_logits(model: PreTrainedModel) -> bool:
    """At once, not on demand."""
    return not on_demand(model(**tiny_batch(model)).logits)


@pytest.mark.parametrize("whole_process", [True, False])
def test_reset_after_the_trainer_has_prepared_the_model(whole_process: bool, tmp_path: Path) -> None:
    model = tiny_model()
    bastile.apply() if whole_process else bastile.apply_to_model(model)
    batch = {name: value[0] for name, value in tiny_batch(model).items()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, bf16=True, use_cpu=True, report_to=[], save_strategy="no"
    )
    Trainer(model=model, args=arguments, train_dataset=[batch] * 8).train()
    assert "_original_forward" in vars(model)
    assert not has_logits(model)
    assert f"{LOSS}_qwen3" in bastile.get_patched_ops(model)
    names = bastile.reset() if whole_process else bastile.reset(model=model)
    assert (LOSS if whole_process else f"{LOSS}_qwen3") in names
    assert has_logits(model)
    assert bastile.get_patched_ops(model) == []


def test_apply_and_reset_after_a_model_was_prepared(accelerator: Accelerator, calls: dict[str, int]) -> None:
    model = accelerator.prepare(tiny_model())
    for _ in range(2):
        assert bastile.apply(model_types=list(FAMILIES)) == EVERY
        assert bastile.get_patched_ops(model) == all_of("qwen3")
        calls.clear()
        assert not has_logits(model)
        assert calls == calls_of_a_step("qwen3")
        bastile.reset()
        calls.clear()
        assert has_logits(model)
        assert calls == {}


def test_apply_to_a_model_that_was_prepared(accelerator: Accelerator, calls: dict[str, int]) -> None:
    model, other = accelerator.prepare(tiny_model(), tiny_model())
    stock = vars(model)["_original_forward"].__func__
    assert bastile.apply_to_model(model) == all_of("qwen3") == bastile.get_patched_ops(model)
    assert not has_logits(model)
    assert calls == calls_of_a_step("qwen3")
    output = model(**tiny_batch(model))
    assert output.loss.dtype == torch.float32  # by the wrapper, which is still there
    assert has_logits(other)
    assert bastile.reset(f"{LOSS}_qwen3", model=model) == [f"{LOSS}_qwen3"]
    assert has_logits(model)
    assert bastile.apply_to_model(model) == all_of("qwen3")
    assert not has_logits(model)
    assert bastile.reset(model=model) == all_of("qwen3")
    assert has_logits(model)
    assert vars(model)["_original_forward"].__func__ is stock
    assert not any("_replicate_for_data_parallel" in vars(module) for module in model.modules())


@pytest.mark.parametrize("order", ["apply_to_model, prepare", "prepare, apply_to_model"])
def test_a_model_that_was_prepared_and_unwrapped(order: str, accelerator: Accelerator) -> None:
    """Accelerate leaves the innermost function of the model's forward as the model's own."""
    model = tiny_model()
    for act in order.split(", "):
        bastile.apply_to_model(model) if act == "apply_to_model" else accelerator.prepare(model)
    extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert has_logits(model)
    assert f"{LOSS}_qwen3" not in bastile.get_patched_ops(model)
    assert bastile.apply_to_model(model) == all_of("qwen3")
    assert not has_logits(model)
    assert bastile.reset(model=model) == all_of("qwen3")
    assert has_logits(model)


def test_what_a_hook_has_kept_is_out_of_force_after_reset(calls: dict[str, int]) -> None:
    model = tiny_model()
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    bastile.apply()
    add_hook_to_module(norm, ModelHook())
    bastile.reset()
    add_hook_to_module(mlp, ModelHook())
    model(**tiny_batch(model))
    assert calls == {}
    # And what it kept of the original is not served by apply, which is said of the model.
    names = all_of("qwen3")
    bastile.apply()
    assert bastile.get_patched_ops(mlp) == ["autocast_linear_qwen3"]  # its layers'
    assert bastile.get_patched_ops(model) == everywhere(names, "qwen3")  # the other layer's
    add_hook_to_module(model.model.layers[1].mlp, ModelHook())
    model(**tiny_batch(model))
    assert calls["swiglu"] == 1
    assert bastile.apply_to_model(model) == names
    calls.clear()
    model(**tiny_batch(model))
    assert calls == calls_of_a_step("qwen3")


def test_a_method_that_others_have_kept_is_out_of_force_after_reset(calls: dict[str, int]) -> None:
    model = tiny_model()
    mlp = model.model.layers[0].mlp
    bastile.apply_to_model(model)
    kept = mlp.forward
    bastile.reset(model=model)
    kept(torch.randn(1, 2, 32))
    assert calls == {}


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------


class Engine(nn.Module):
    """What of DeepSpeed's engine is seen from outside: its own config is a dictionary, and what it has not is looked
    for in the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
        self.__dict__["_modules"]["module"] = model
        self.__dict__["module"] = model

    def __getattr__(self, name: str) -> Any:
        if name in dir(self):
            return getattr(self, name)
        if name in dir(self.__dict__["module"]):
            return getattr(self.__dict__["module"], name)
        raise AttributeError(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_deepspeeds_engine_is_looked_through(adapted: bool, calls: dict[str, int]) -> None:
    model = tiny_model()
    engine = Engine(get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2)) if adapted else model)
    names = [f"{op}_qwen3" for op in OPERATORS if f"{op}_qwen3" in all_of("qwen3") or (adapted and op == "lora_linear")]
    assert bastile.apply_to_model(engine) == names == bastile.get_patched_ops(engine)
    assert on_demand(engine(**tiny_batch(model)).logits)
    assert calls[LOSS] == 1
    assert bastile.reset(model=engine) == names
    assert not on_demand(engine(**tiny_batch(model)).logits)


# ---- other patchers --------------------------------------------------------------------------------------------------

PATCHER = """
import torch

class LionRMSNorm(torch.nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden_states):
        return torch.nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

class LionMLP(torch.nn.Module):
    def forward(self, x):
        return x

def rotary(q, k, cos, sin, unsqueeze_dim=1):
    return q, k

def loss_forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):
    return "the other's"
"""


@pytest.fixture
def patcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A package of kernels that puts its own classes and functions into Transformers' modules, for good, as
    Liger-Kernel does."""
    package = types.ModuleType("lion_kernel.patches")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    exec(PATCHER, vars(package))
    module = modeling("qwen3")
    saved = dict(vars(module))
    saved_forward = module.Qwen3ForCausalLM.forward

    def patch() -> None:
        module.Qwen3RMSNorm, module.Qwen3MLP = package.LionRMSNorm, package.LionMLP
        module.apply_rotary_pos_emb = package.rotary
        module.Qwen3ForCausalLM.forward = package.loss_forward

    package.patch = patch
    yield package
    vars(module).update(saved)
    module.Qwen3ForCausalLM.forward = saved_forward


def test_apply_after_another_patcher_names_it(patcher: Any) -> None:
    before = pieces("llama")
    model = tiny_model()
    patcher.patch()
    for operator, what in (
        ("rms_norm", r"Qwen3RMSNorm of qwen3 by lion_kernel\.patches\.LionRMSNorm"),
        ("swiglu", r"Qwen3MLP of qwen3 by lion_kernel\.patches\.LionMLP"),
        ("rope", r"apply_rotary_pos_emb of qwen3 by lion_kernel\.patches\.rotary"),
        (LOSS, r"Qwen3ForCausalLM\.forward of qwen3 by lion_kernel\.patches\.loss_forward"),
    ):
        alone = {other: other == operator for other, row in OPERATORS.items() if row.of_a_model}
        match = f"other code has replaced {what}.*nothing was patched.*{operator}=False"
        with pytest.raises(RuntimeError, match=match):
            bastile.apply(model_types=["qwen3"], **alone)
        with pytest.raises(RuntimeError, match=match):
            bastile.apply_to_model(model, **alone)
    with pytest.warns(
        RuntimeWarning, match=r"by lion_kernel\.patches\.LionRMSNorm.*stays as it is, the rest is served"
    ):
        names = bastile.apply()
    left = ["masked_attention_qwen3", "recompute_qwen3", "cuda_graphs_qwen3", "padding_free_qwen3"]
    assert names == bastile.get_patched_ops() == list(USUAL)
    assert bastile.get_patched_ops(model) == everywhere(left, "qwen3")
    assert pieces("llama")["rms_norm"] is not before["rms_norm"]
    # What the other has left alone can be had.
    rest = dict.fromkeys(("rms_norm", "swiglu", "rope", LOSS), False)
    assert bastile.apply(model_types=["qwen3"], **rest) == left


def test_another_patcher_after_apply(patcher: Any, calls: dict[str, int]) -> None:
    before = pieces("qwen3")
    model = tiny_model()
    bastile.apply(model_types=list(FAMILIES))
    module = modeling("qwen3")
    norm, mlp = module.Qwen3RMSNorm, module.Qwen3MLP
    patcher.patch()
    assert bastile.get_patched_ops() == [name for name in EVERY if name not in ("rope_qwen3", f"{LOSS}_qwen3")]
    assert set(bastile.get_patched_ops(model)) == set(all_of("qwen3", "rope", LOSS))
    with pytest.raises(RuntimeError, match=r"apply_rotary_pos_emb of qwen3 by lion_kernel\.patches\.rotary"):
        bastile.apply(model_types=["qwen3"], rope=True)
    with pytest.warns(RuntimeWarning) as said:
        assert bastile.reset() == EVERY
    assert [str(each.message) for each in said] == [
        f"bastile.reset: other code has replaced {place} since bastile.apply(): lion_kernel.patches.{other} stays "
        f"there. {name} is no longer in force all the same"
        for place, other, name in (
            ("apply_rotary_pos_emb", "rotary", "rope_qwen3"),
            ("Qwen3ForCausalLM.forward", "loss_forward", f"{LOSS}_qwen3"),
        )
    ]
    assert bastile.get_patched_ops() == []
    assert module.apply_rotary_pos_emb is patcher.rotary
    assert norm.forward is before["rms_norm"]
    assert mlp.forward is before["swiglu"]
    assert model(**tiny_batch(model)) == "the other's"


def test_operators_on_a_wrapper_and_within_it_are_no_others(recwarn: pytest.WarningsRecorder) -> None:
    """Bart's encoder takes tokens through layers, and has a norm of a sum of its own within Transformers' wrapper."""
    encoder = modeling_bart.BartEncoder
    stock = encoder.forward
    assert {"add_rms_norm_bart", "recompute_bart"} <= set(bastile.apply(model_types="bart"))
    bastile.reset()
    assert encoder.forward is stock
    assert [str(each.message) for each in recwarn if "has replaced" in str(each.message)] == []


def test_others_that_wrap_a_patch_keep_their_wrapper(monkeypatch: pytest.MonkeyPatch, calls: dict[str, int]) -> None:
    """And what it calls of Bastile's runs the original after reset, also once the wrapper is gone."""
    mlp = modeling("qwen3").Qwen3MLP
    stock = mlp.forward
    model = tiny_model()
    bastile.apply(model_types=list(FAMILIES))
    ours = mlp.forward

    @functools.wraps(ours)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(mlp, "forward", wrapper)
        assert bastile.get_patched_ops() == EVERY
        assert bastile.apply(model_types=list(FAMILIES)) == EVERY
        assert mlp.forward is wrapper
        with pytest.warns(RuntimeWarning, match=r"replaced Qwen3MLP\.forward"):
            assert bastile.reset(["swiglu_qwen3"]) == ["swiglu_qwen3"]
        assert mlp.forward is wrapper
        model(**tiny_batch(model))
        assert "swiglu" not in calls
    assert mlp.forward is ours
    model(**tiny_batch(model))
    assert "swiglu" not in calls
    assert bastile.apply(model_types=list(FAMILIES)) == EVERY
    assert bastile.reset() == EVERY
    assert mlp.forward is stock


# ---- pickles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(DENSE))
def test_a_pickle_is_of_the_model_without_patches(family: str, calls: dict[str, int]) -> None:
    """It can be loaded where Bastile is not installed, and patched again where it is."""
    model = tiny_model(family)
    bastile.apply_to_model(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    for pickled in (pickle.dumps(model), buffer.getvalue()):
        assert b"bastile" not in pickled
    buffer.seek(0)
    for loaded in (pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert bastile.get_patched_ops(loaded) == []
        assert has_logits(loaded)
        assert calls == {}
        assert bastile.apply_to_model(loaded) == all_of(family)
        assert not has_logits(loaded)
        assert calls == calls_of_a_step(family)
        assert bastile.reset(model=loaded) == all_of(family)
        assert has_logits(loaded)
        calls.clear()
    assert bastile.get_patched_ops(model) == all_of(family)
    assert FAMILIES[family].patches() == all_of(family)
