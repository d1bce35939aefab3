"""The number of parameters that a Trainer asks for in every step: what Transformers counts, counted when it changes."""

import gc
import itertools
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_utils import ModuleUtilsMixin

import bastile
from conftest import tiny_batch, tiny_model

STOCK: Any = ModuleUtilsMixin.num_parameters
LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
STEPS = 5


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that Transformers' own code has gone through a model's parameters."""
    seen: list[int] = []
    named_parameters = nn.Module.named_parameters

    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code is STOCK.__code__:
            seen.append(1)
        return named_parameters(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_parameters", noted)
    return seen


def adapted(**changes: Any) -> Any:
    return get_peft_model(tiny_model(), LoraConfig(**LORA, **changes))


# ---- in a Trainer ----------------------------------------------------------------------------------------------------


class AddsAnAdapter(TrainerCallback):
    """After the third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 3:
            model.add_adapter("second", LoraConfig(**{**LORA, "r": 4}))


def flops_of_a_run(model: Any, folder: Path, kind: type[Trainer] = Trainer, callbacks: Any = ()) -> float:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    row = {name: value[0] for name, value in tiny_batch(tiny_model()).items()}
    trainer = kind(model=model, args=arguments, train_dataset=[row] * 4 * STEPS, callbacks=list(callbacks))
    trainer.train()
    return trainer.state.total_flos


@pytest.mark.parametrize(
    ("build", "callbacks", "counted"),
    [(tiny_model, (), 1), (adapted, (), 1), (adapted, (AddsAnAdapter(),), 2)],
    ids=["model", "adapter", "adapter added"],
)
def test_a_trainers_total_is_what_it_was(
    build: Callable[[], Any], callbacks: Any, counted: int, walks: list[int], tmp_path: Path
) -> None:
    stock = flops_of_a_run(build(), tmp_path, callbacks=callbacks)
    assert len(walks) == 2 * STEPS
    walks.clear()
    bastile.apply()
    assert flops_of_a_run(build(), tmp_path, callbacks=callbacks) == stock
    assert len(walks) == counted


def test_who_counts_otherwise_still_does(walks: list[int], tmp_path: Path) -> None:
    class OwnTrainer(Trainer):
        def floating_point_ops(self, inputs: Any) -> int:
            return 7

    class OwnModel(Qwen3ForCausalLM):
        def num_parameters(self, *args: Any, **kwargs: Any) -> int:
            return 11

    class OwnNames(Qwen3ForCausalLM):
        hidden = 0

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return list(super().named_parameters(*args, **kwargs))[self.hidden :]

    bastile.apply()
    assert flops_of_a_run(tiny_model(), tmp_path, OwnTrainer) == 7 * 2 * STEPS
    assert walks == []
    assert OwnModel(tiny_model().config).num_parameters(exclude_embeddings=True) == 11
    model = OwnNames(tiny_model().config)
    every = model.num_parameters()
    model.hidden = 3
    assert model.num_parameters() == STOCK(model) < every


# ---- what changes it -------------------------------------------------------------------------------------------------


def swap(owner: Any, name: str, value: Any) -> None:
    """Past everything that a module notices."""
    owner[name] = value


def exchange(owner: Any, name: str, value: Any) -> None:
    """While what was there lives on."""
    value.__dict__["before"] = getattr(owner, name)
    setattr(owner, name, value)


def rename(owner: Any, name: str, other: str) -> None:
    """An embedding's matrix of another name counts as no embedding."""
    owner[other] = owner.pop(name)


CHANGES: list[Callable[[Any], Any]] = [
    lambda m: m.add_adapter("second", LoraConfig(**{**LORA, "r": 4})),
    lambda m: m.delete_adapter("second"),
    lambda m: m.get_base_model().resize_token_embeddings(120),
    lambda m: delattr(m.get_base_model().model.layers[0].mlp, "gate_proj"),
    lambda m: m.get_base_model().model.layers[1].mlp._modules.pop("up_proj"),
    lambda m: m.get_base_model().register_parameter("more", nn.Parameter(torch.zeros(3))),
    lambda m: setattr(m.get_base_model().more, "data", torch.zeros(5)),
    lambda m: swap(m.get_base_model()._parameters, "more", nn.Parameter(torch.zeros(7))),
    lambda m: swap(m.get_base_model()._parameters, "more", None),
    lambda m: exchange(m.get_base_model(), "lm_head", nn.Linear(32, 99, bias=False)),
    lambda m: setattr(m.get_base_model().lm_head, "weight", nn.Parameter(torch.zeros(120, 32))),
    lambda m: setattr(m.get_base_model().lm_head, "weight", m.get_base_model().model.embed_tokens.weight),
    lambda m: setattr(m.get_base_model(), "bare", nn.Module()),
    lambda m: setattr(m.get_base_model(), "table", nn.Embedding(5, 4)),
    lambda m: swap(m.get_base_model().bare._parameters, "weight", m.get_base_model().table._parameters.pop("weight")),
    lambda m: m.get_base_model().table.register_parameter("weight", nn.Parameter(torch.zeros(5, 4))),
    lambda m: setattr(m.get_base_model().table, "__class__", nn.Module),
    lambda m: rename(m.get_base_model().model.embed_tokens._parameters, "weight", "other"),
    lambda m: m.merge_and_unload(),
]


def test_every_change_is_noticed(walks: list[int]) -> None:
    model = adapted()
    base = model.get_base_model()
    bastile.apply()
    numbers = []
    for change in (lambda m: None, *CHANGES):
        change(model)
        for without in (False, True):
            assert base.num_parameters(exclude_embeddings=without) == STOCK(base, exclude_embeddings=without)
        numbers.append((STOCK(base), STOCK(base, exclude_embeddings=True)))
        walks.clear()
        assert model.num_parameters(exclude_embeddings=True) == model.num_parameters(False, True) == numbers[-1][1]
        assert walks == []
    # A module without parameters is none; all others change the number.
    assert [i for i, (one, other) in enumerate(itertools.pairwise(numbers)) if one == other] == [12]


def test_trainable_ones_are_counted_each_time() -> None:
    bastile.apply()
    model = tiny_model()
    for parameter in model.parameters():
        assert model.num_parameters(only_trainable=True) == STOCK(model, only_trainable=True)
        parameter.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == 0


def test_weights_in_4_bits() -> None:
    """Before they are quantised, and after, when half of their elements, or a quarter, stand for all."""
    bnb = pytest.importorskip("bitsandbytes")
    bastile.apply()
    model = tiny_model()
    for storage in (torch.uint8, torch.bfloat16):
        model.lm_head = bnb.nn.Linear4bit(32, 64, bias=False, quant_storage=storage)
        for is_loaded_in_4bit in (False, True):
            model.is_loaded_in_4bit = is_loaded_in_4bit
            assert model.num_parameters() == STOCK(model)
        model.lm_head.to("cpu")
        assert model.lm_head.weight.numel() < 32 * 64
        quantised = model.num_parameters()
        assert quantised == STOCK(model)
        model.lm_head.weight.data = model.lm_head.weight.data.float()
        assert quantised != model.num_parameters() == STOCK(model)


def test_nothing_is_kept_alive() -> None:
    bastile.apply()
    model = adapted()
    model.num_parameters(exclude_embeddings=True)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    adapter = weakref.ref(layer.lora_A["default"].weight)
    del layer
    base = model.merge_and_unload()
    gone = weakref.ref(base)
    del model
    gc.collect()
    assert adapter() is None
    base.num_parameters()
    del base
    gc.collect()
    assert gone() is None


# ---- put in and taken out --------------------------------------------------------------------------------------------


def test_in_force_while_anything_is() -> None:
    bastile.apply(model_types="qwen3")
    assert ModuleUtilsMixin.num_parameters is not STOCK
    ours = ModuleUtilsMixin.num_parameters
    bastile.apply()
    assert ModuleUtilsMixin.num_parameters is ours
    bastile.reset()
    assert ModuleUtilsMixin.num_parameters is STOCK
    bastile.apply_to_model(tiny_model())
    assert ModuleUtilsMixin.num_parameters is STOCK


def test_beside_other_packages(monkeypatch: pytest.MonkeyPatch, walks: list[int]) -> None:
    """What they put there before or since stays, and comes to the original when ours is out."""
    monkeypatch.setattr(ModuleUtilsMixin, "num_parameters", STOCK)  # for afterwards
    model, inner = tiny_model(), STOCK

    def theirs(self: Any, *args: Any, **kwargs: Any) -> int:
        return 1 + inner(self, *args, **kwargs)

    ModuleUtilsMixin.num_parameters = theirs
    bastile.apply()
    assert ModuleUtilsMixin.num_parameters is theirs
    bastile.reset()
    ModuleUtilsMixin.num_parameters = STOCK
    bastile.apply()
    inner = ModuleUtilsMixin.num_parameters
    assert inner is not STOCK
    ModuleUtilsMixin.num_parameters = theirs
    for act, walked in ((bastile.apply, 1), (bastile.reset, 2), (bastile.apply, 0)):
        act()
        assert ModuleUtilsMixin.num_parameters is theirs
        walks.clear()
        assert [model.num_parameters() for _ in range(2)] == [STOCK(model) + 1] * 2
        assert len(walks) == walked + 1  # and once here


def test_before_models_are_imported() -> None:
    program = """
import sys, bastile
bastile.apply(add_rms_norm=False)
assert "transformers.modeling_utils" not in sys.modules
from transformers import PreTrainedModel
assert PreTrainedModel.num_parameters.__code__.co_filename.endswith("parameter_count.py")
bastile.reset()
assert PreTrainedModel.num_parameters.__code__.co_filename.endswith("modeling_utils.py")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
