"""What a trainer switches off for a pass of its reference and on again: the state that PEFT and Transformers leave."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

import bastile
from conftest import tiny_model


def adapted(**options: Any) -> PeftModel:
    torch.manual_seed(0)
    return get_peft_model(tiny_model(), LoraConfig(**{"r": 2, "target_modules": "all-linear", **options})).train()


def two() -> PeftModel:
    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    return model


def of_two_at_once() -> PeftModel:
    model = two()
    model.base_model.set_adapter(["default", "other"])
    return model


def partly_off() -> PeftModel:
    model = adapted()
    next(module for module in model.modules() if isinstance(module, BaseTunerLayer)).enable_adapters(False)
    return model


def off() -> PeftModel:
    model = adapted()
    model.base_model.disable_adapter_layers()
    return model


def frozen() -> PeftModel:
    """PEFT has them trained when they are on again."""
    model = adapted()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def named_by_a_word() -> PeftModel:
    model = adapted()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module._active_adapter = "default"
    return model


MODELS: dict[str, Callable[[], PeftModel]] = {
    "all linear layers": adapted,
    "some": lambda: adapted(target_modules=["q_proj"], layers_to_transform=[1]),
    "embeddings": lambda: adapted(target_modules=["embed_tokens", "q_proj"]),
    "DoRA": lambda: adapted(use_dora=True),
    "whole modules beside": lambda: adapted(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "single tokens": lambda: adapted(target_modules=["q_proj"], trainable_token_indices=[1, 5]),
    "experts' weights": lambda: adapted(target_modules=["q_proj"], target_parameters=["mlp.up_proj.weight"]),
    "two": two,
    "two at once": of_two_at_once,
    "biases": lambda: adapted(bias="all"),
    "partly off": partly_off,
    "off": off,
    "frozen": frozen,
    "named by a word": named_by_a_word,
    "IA3": lambda: get_peft_model(tiny_model(), IA3Config(target_modules=["v_proj"], feedforward_modules=[])),
    "prompts": lambda: get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
}


def state(model: Any) -> list[Any]:
    """All that switching could change."""
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "_disable_adapters")]
    return [
        model._adapters_disabled,
        [(name, layer._disable_adapters, getattr(layer, "_active_adapter", None)) for name, layer in layers],
        [(name, parameter.requires_grad) for name, parameter in model.named_parameters()],
    ]


def switched(model: PeftModel) -> list[Any]:
    """Before, within and behind, twice, with what was warned of; the second time an error ends it."""
    model, found = copy.deepcopy(model), []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found.append(state(model))
        with model.disable_adapter() as nothing:
            found += [nothing, state(model)]
        found.append(state(model))
        with pytest.raises(KeyError), model.disable_adapter():
            raise KeyError
        found.append(state(model))
    return [*found, [str(each.message) for each in warned]]


@pytest.mark.parametrize("name", MODELS)
def test_adapters_are_left_as_peft_leaves_them(name: str) -> None:
    model = MODELS[name]()
    want = switched(model)
    bastile.apply()
    assert switched(model) == want


def test_layers_that_change_between_switches_are_left_as_peft_leaves_them() -> None:
    """One with weights that stay frozen, for which PEFT's code runs, and again one like the others; another adapter."""

    def states(model: Any) -> list[Any]:
        found = []
        layer = next(module for module in model.modules() if isinstance(module, BaseTunerLayer))
        for frozen in ({"default": ("lora_A",)}, {}):
            layer.frozen_peft_weight_names = frozen
            for _ in range(2):
                with model.disable_adapter():
                    found.append(state(model))
                found.append(state(model))
        model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
        model.set_adapter("other")
        with model.disable_adapter():
            found.append(state(model))
        return [*found, state(model)]

    want = states(adapted())
    bastile.apply()
    assert states(adapted()) == want


def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each report that PEFT makes of a model's layers."""
    found: list[int] = []
    original = PeftModel.get_model_status
    monkeypatch.setattr(PeftModel, "get_model_status", lambda self: found.append(1) or original(self))
    return found


def test_no_report_is_made_where_all_layers_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(monkeypatch)
    bastile.apply()
    for name in ("all linear layers", "some", "whole modules beside", "two"):
        with MODELS[name]().disable_adapter():
            pass
    assert found == []
    with partly_off().disable_adapter():
        pass
    assert found == [1]
    bastile.reset()
    with adapted().disable_adapter():
        pass
    assert found == [1, 1]


def test_who_has_kept_the_method_has_peft_s_after_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(monkeypatch)
    bastile.apply()
    kept = PeftModel.disable_adapter
    bastile.reset()
    with kept(adapted()):
        pass
    assert found == [1]


def test_what_others_have_wrapped_around_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    original = PeftModel.disable_adapter

    @functools.wraps(original)
    def theirs(self: PeftModel) -> Any:
        called.append(1)
        return original(self)

    monkeypatch.setattr(PeftModel, "disable_adapter", theirs)
    bastile.apply()
    with adapted().disable_adapter():
        pass
    assert called == [1]
    bastile.reset()


class Flagged(nn.Module):
    gradient_checkpointing = False


class Forwards(nn.Module):
    """Has what its inner module has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Flagged()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def with_all_kinds() -> Any:
    model = tiny_model()
    model.model.layers[0].mlp.one = Flagged()
    model.model.layers[0].mlp.two = Forwards()
    model.model.layers[1].mlp.three = nn.Identity()
    model.model.layers[1].mlp.three.gradient_checkpointing = False
    return model


def flags(model: Any) -> list[Any]:
    return [
        (name, vars(module).get("gradient_checkpointing"), repr(vars(module).get("_gradient_checkpointing_func"))[:60])
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("made", [tiny_model, with_all_kinds, lambda: adapted(target_modules=["q_proj"])])
def test_checkpointing_is_left_as_transformers_leaves_it(made: Callable[[], Any]) -> None:
    def run() -> list[Any]:
        model = made()
        found = [flags(model)]
        for _ in range(2):
            model.gradient_checkpointing_enable({"use_reentrant": False})
            found.append(flags(model))
            model.gradient_checkpointing_disable()
            found.append(flags(model))
        return found

    want = run()
    bastile.apply()
    assert run() == want
    assert want[1] != want[0]


def test_embeddings_have_one_hook_however_often_it_is_switched() -> None:
    """Of Transformers' own, each time one more is there, and called in every pass."""
    bastile.apply()
    model = adapted()
    embeddings = model.get_input_embeddings()
    model.gradient_checkpointing_enable()
    hooks = len(embeddings._forward_hooks)
    for _ in range(3):
        model.gradient_checkpointing_disable()
        model.gradient_checkpointing_enable()
    assert len(embeddings._forward_hooks) == hooks
    assert embeddings(torch.ones(1, 1, dtype=torch.int64)).requires_grad
    model.base_model.model.disable_input_require_grads()
    assert len(embeddings._forward_hooks) == hooks - 1


def test_a_model_without_it_says_so() -> None:
    model = tiny_model()
    bastile.apply()
    for name in ("model",):
        setattr(model, name, nn.Identity())
    vars(model).pop("gradient_checkpointing", None)
    with pytest.raises(ValueError, match="not compatible with gradient checkpointing"):
        model._set_gradient_checkpointing()


# ---- parts that are compiled -----------------------------------------------------------------------------------------


def test_whether_parts_are_compiled_is_what_accelerate_says() -> None:
    from accelerate.utils import other

    stock = other.has_compiled_regions
    walked: list[int] = []

    class Counted(nn.ModuleList):
        def modules(self) -> Any:
            walked.append(1)
            return super().modules()

    model, plain = tiny_model(), nn.Linear(2, 2)
    answers = [stock(model), stock(plain)]
    bastile.apply()
    ours = other.has_compiled_regions
    assert ours is not stock
    assert [ours(model), ours(plain)] == answers == [False, False]
    model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp, backend="eager")
    assert ours(model) is stock(model) is True
    model.model.layers[1].mlp = model.model.layers[1].mlp._orig_mod
    assert ours(model) is stock(model) is False
    assert ours(Counted([plain])) is False  # has a walk of its own, which is taken
    assert walked == [1]
    bastile.reset()
    assert other.has_compiled_regions is stock
