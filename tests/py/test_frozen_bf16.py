"""Frozen weights of float32 kept in bfloat16 while a Trainer trains: real TRL, PEFT and Transformers. Nothing but the
memory that they take is to show: losses, gradients, weights have the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments

import bastile
import trl_runs
from bastile.models import frozen_bf16
from bastile.ops._narrow import is_narrowed, narrow
from looks import Looks
from oracle import assert_same_bits
from processes import on_processes

STOCK = vars(Trainer)["train"]
LAYERS = 2 * 7  # of a small model's, with adapters
ALL = LAYERS + 2  # and its ends: an embedding and a head


@pytest.fixture(autouse=True)
def in_force() -> Iterator[None]:
    bastile.report(reset=True)
    yield
    bastile.reset()
    assert vars(Trainer)["train"] is STOCK


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trl_runs.saved_as_loaded("qwen3", tmp_path_factory.mktemp("models"))


def adapters(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options})


def narrowed_in(model: nn.Module) -> int:
    found = [module for module in model.modules() if is_narrowed(module)]
    for layer in found:
        assert layer.weight.dtype is torch.bfloat16
    return len(found)


def trained(
    kind: str, path: str, folder: Path, look: Callable[[Any], None] = lambda model: None, **options: Any
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], int, Any]:
    """What was logged, the weights behind training, and how many were narrow in it."""
    given = {"bf16": True, "max_steps": 3, "peft_config": adapters(), **options}
    torch.manual_seed(1)
    looks = Looks(narrowed_in, look)
    trainer = trl_runs.trainer(kind, path, folder, **given)
    trainer.add_callback(looks)
    types = {name: p.dtype for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert {name: p.dtype for name, p in trainer.model.named_parameters()} == types
    assert narrowed_in(trainer.model) == 0
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return trl_runs.numbers_of(trainer), weights, looks.seen[0], trainer


def both(*args: Any, **options: Any) -> tuple[Any, Any]:
    """A run with narrow weights and one without."""
    bastile.apply()
    narrow = trained(*args, **options)
    assert bastile.report(reset=True).ran("frozen_bf16") == (1 if narrow[2] else 0)
    bastile.apply(frozen_bf16=False)
    wide = trained(*args, **options)
    assert bastile.report(reset=True).ran("frozen_bf16") == wide[2] == 0
    return narrow, wide


def assert_alike(narrow: Any, wide: Any) -> None:
    assert narrow[0] == wide[0]
    assert narrow[1].keys() == wide[1].keys()
    for name, weight in narrow[1].items():
        assert_same_bits(weight, wide[1][name])


@pytest.mark.parametrize("kind", ["sft", "sft packed", "dpo", "kto", "grpo"])
def test_no_bit_changes(kind: str, checkpoint: str, tmp_path: Path) -> None:
    narrow, wide = both(kind, checkpoint, tmp_path)
    assert narrow[2] == ALL
    assert_alike(narrow, wide)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_head_that_is_the_embedding(kind: str, tmp_path: Path) -> None:
    """Gemma's, which multiplies what it reads by a number that bfloat16 does not hold, and caps its logits."""
    narrow, wide = both(kind, trl_runs.saved_as_loaded("gemma2", tmp_path), tmp_path)
    assert narrow[2] == ALL
    ends = [model.get_input_embeddings() for model in (narrow[3].model, wide[3].model)]
    assert type(ends[0]) is type(ends[1]) is not nn.Embedding
    assert ends[0].weight is narrow[3].model.get_output_embeddings().weight
    assert_alike(narrow, wide)


def test_stock_has_the_same_numbers(checkpoint: str, tmp_path: Path) -> None:
    """Without any other operator of Bastile's but what it needs."""
    stock = trained("sft", checkpoint, tmp_path)
    names = {name: False for name in bastile.apply()} | {"autocast_linear": True, "frozen_bf16": True}
    bastile.apply(**names)
    narrow = trained("sft", checkpoint, tmp_path)
    assert narrow[2] == ALL
    assert_alike(narrow, stock)


def test_evaluation_and_accumulation(checkpoint: str, tmp_path: Path) -> None:
    results = []
    for on in (True, False):
        bastile.apply(frozen_bf16=on)
        torch.manual_seed(1)
        options = {"bf16": True, "gradient_accumulation_steps": 2, "peft_config": adapters()}
        trainer = trl_runs.trainer("sft", checkpoint, tmp_path, **options)
        looks = Looks(narrowed_in, lambda model, trainer=trainer: trainer.evaluate(trainer.train_dataset))
        trainer.add_callback(looks)
        trainer.train()
        trainer.evaluate(trainer.train_dataset)  # in float32 again, beneath autocast
        assert looks.seen[0] == (ALL if on else 0)
        results.append(trl_runs.numbers_of(trainer))
    assert sum("eval_loss" in entry for entry in results[0]) == 2
    assert results[0] == results[1]


def test_layers_as_graphs_and_a_second_training(checkpoint: str, tmp_path: Path) -> None:
    """Graphs hold where weights lie: in bfloat16, then elsewhere."""
    results = []
    for on in (True, False):
        bastile.apply(frozen_bf16=on, cuda_graphs=True)
        torch.manual_seed(1)
        trainer = trl_runs.trainer("sft packed", checkpoint, tmp_path, bf16=True, max_steps=6, peft_config=adapters())
        trainer.train()
        trainer.train()
        results.append(([entry.get("loss") for entry in trainer.state.log_history], trainer))
    assert results[0][0] == results[1][0]
    for p, q in zip(results[0][1].model.parameters(), results[1][1].model.parameters(), strict=True):
        assert_same_bits(p, q)


def test_what_bfloat16_would_round_stays(checkpoint: str, tmp_path: Path) -> None:
    model = trl_runs.load(checkpoint)
    mlps = [layer.mlp for layer in model.model.layers]
    with torch.no_grad():
        mlps[0].up_proj.weight[3, 5] = 1 + 2**-8  # bfloat16 has seven digits behind the point, float32 has 23
        mlps[1].gate_proj.weight[2, 0] = 1 + 2**-23
    seen: list[torch.dtype] = []

    def look(model: Any) -> None:
        layers = model.base_model.model.model.layers
        seen.extend(p.base_layer.weight.dtype for p in (layers[0].mlp.up_proj, layers[1].mlp.gate_proj))

    bastile.apply()
    assert trained("sft", checkpoint, tmp_path, look, model=model)[2] == ALL - 2
    assert seen == [torch.float32] * 2


@pytest.mark.parametrize("targets", ["all-linear", ["o_proj"]])
def test_outside_autocast(checkpoint: str, tmp_path: Path, targets: Any) -> None:
    """A callback may call the model as it likes: in float32 it computes in float32, forward and backward."""
    found: list[list[torch.Tensor]] = []

    def look(model: Any) -> None:
        inner = model.get_base_model()
        ids = torch.arange(18).view(2, 9)
        embedded = inner.get_input_embeddings()(ids).detach().requires_grad_()
        with torch.autocast("cpu", enabled=False):
            logits = type(inner).forward(inner, inputs_embeds=embedded).logits
            gate = inner.model.layers[0].mlp.gate_proj
            for result in (logits, getattr(gate, "base_layer", gate)(embedded)):
                assert result.dtype is torch.float32
                (gradient,) = torch.autograd.grad(result.square().sum(), embedded)
                found.append([result.detach(), gradient])

    narrow, _ = both("sft", checkpoint, tmp_path, look, peft_config=adapters(target_modules=targets))
    assert narrow[2] == ALL
    for mine, theirs in zip(found[:2], found[2:], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            if targets == "all-linear":  # by the same functions
                assert_same_bits(one, other)
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("safely", [False, True])
def test_merged_in_between(checkpoint: str, tmp_path: Path, safely: bool) -> None:
    """As TRL does to send weights to vLLM: they are float32 before something is added to them."""

    def look(model: Any) -> None:
        model.merge_adapter(safe_merge=safely)
        assert narrowed_in(model.get_base_model().model.layers) == 0
        model.unmerge_adapter()

    narrow, wide = both("sft", checkpoint, tmp_path, look)
    assert narrow[2] == ALL
    assert_alike(narrow, wide)


def test_merged_for_good(checkpoint: str, tmp_path: Path) -> None:
    merged = []

    def look(model: Any) -> None:
        merged.append(copy.deepcopy(model).merge_and_unload().state_dict())

    both("sft", checkpoint, tmp_path, look)
    for name, weight in merged[0].items():
        assert weight.dtype is torch.float32
        assert_same_bits(weight, merged[1][name])


def test_a_training_that_fails(checkpoint: str, tmp_path: Path) -> None:
    def look(model: Any) -> None:
        raise KeyboardInterrupt

    bastile.apply()
    trainer = trl_runs.trainer("sft", checkpoint, tmp_path, bf16=True, peft_config=adapters())
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    looks = Looks(narrowed_in, look)
    trainer.add_callback(looks)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert looks.seen[0] == ALL
    for name, p in trainer.model.named_parameters():
        if name in before:
            assert_same_bits(p, before[name])
    assert "on_train_begin" not in vars(trainer.callback_handler)


def test_too_little_memory_behind_training(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is left narrow goes on as it is."""
    widen, done = frozen_bf16.widen, []

    def widens_three(layer: nn.Linear) -> None:
        if len(done) == 3:
            raise torch.OutOfMemoryError
        widen(layer)
        done.append(layer)

    monkeypatch.setattr(frozen_bf16, "widen", widens_three)
    bastile.apply()
    trainer = trl_runs.trainer("sft", checkpoint, tmp_path, bf16=True, peft_config=adapters())
    trainer.train()
    assert narrowed_in(trainer.model) == ALL - 3
    assert f"{ALL - 3} weights" in caplog.text
    model, ids = trainer.model.get_base_model(), torch.arange(9)[None]
    got = type(model).forward(model, input_ids=ids).logits
    monkeypatch.setattr(frozen_bf16, "widen", widen)
    merged = trainer.model.merge_and_unload()  # which makes what it adds to float32
    assert narrowed_in(merged) == 0
    torch.testing.assert_close(type(model).forward(merged, input_ids=ids).logits, got, rtol=1e-5, atol=1e-5)


def test_memory_goes_back_while_weights_become_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU, or weights of both widths would be there at once."""
    wide: list[int] = []
    layers = [nn.Linear(4, 4) for _ in range(6)]
    for layer in layers:
        narrow(layer)
    monkeypatch.setattr(frozen_bf16, "_AT_ONCE", 2 * 16)
    monkeypatch.setattr(frozen_bf16, "give_back", lambda: wide.append(6 - sum(map(is_narrowed, layers))))
    frozen_bf16._end(list(layers))
    assert wide == [0, 2, 4]
    assert not any(map(is_narrowed, layers))


# ---- reference models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [("dpo", "ref_model"), ("gkd", "teacher_model")])
def test_models_beside(kind: str, name: str, checkpoint: str, tmp_path: Path) -> None:
    """Those that are not trained; the one that is, without adapters, stays as it is."""
    seen: list[int] = []
    results = []
    for on in (True, False):
        bastile.apply(frozen_bf16=on)
        torch.manual_seed(1)
        trainer = trl_runs.trainer(kind, checkpoint, tmp_path, bf16=True)
        beside = getattr(trainer, name)
        looks = Looks(narrowed_in, lambda model, beside=beside: seen.append(narrowed_in(beside)))
        trainer.add_callback(looks)
        trainer.train()
        assert looks.seen[0] == 0
        assert narrowed_in(beside) == 0
        results.append([entry.get("loss") for entry in trainer.state.log_history])
    assert seen == [ALL, 0]
    assert results[0] == results[1]


def test_a_reference_that_shares_what_is_trained() -> None:
    bastile.apply()
    ref = Odd()
    alone, other = (ref.get_submodule(name)._parameters["weight"] for name in ("alone", "other"))
    for p in (alone, other):
        p.data = p.data.bfloat16().float()
    args = SimpleNamespace()
    handler = SimpleNamespace(callbacks=[])
    given = {"args": args, "callback_handler": handler}
    trainer = SimpleNamespace(model=Odd(), ref_model=ref, optimizer=torch.optim.SGD([alone]), **given)
    assert [id(layer) for layer in frozen_bf16._narrowed(trainer)] == [id(ref.other)]
    frozen_bf16.widen(ref.other)
    other.grad = torch.zeros(8, 8)
    assert list(frozen_bf16._narrowed(trainer)) == []


def test_a_reference_that_follows_the_policy(checkpoint: str, tmp_path: Path) -> None:
    """Parts of the policy's weights are added to it, which bfloat16 would round."""
    options = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    bastile.apply()
    trainer = trl_runs.trainer("dpo", checkpoint, tmp_path, bf16=True, **options)
    seen: list[int] = []
    trainer.add_callback(Looks(lambda model: seen.append(narrowed_in(trainer.ref_model))))
    trainer.train()
    assert seen == [0]


# ---- several processes -----------------------------------------------------------------------------------------------


def process(rank: int, path: str, folder: Path) -> None:
    """DDP sends all weights to all processes when it wraps a model."""
    results = []
    for on in (True, False):
        bastile.apply(frozen_bf16=on)
        torch.manual_seed(1)
        trainer = trl_runs.trainer("sft", path, folder / str(on), bf16=True, peft_config=adapters())
        assert trainer.accelerator.distributed_type.name == "MULTI_CPU"
        looks = Looks(narrowed_in)
        trainer.add_callback(looks)
        trainer.train()
        trainer.train()
        assert looks.seen[0] == (ALL if on else 0)
        results.append((trl_runs.numbers_of(trainer), [p.detach().clone() for p in trainer.model.parameters()]))
    assert results[0][0] == results[1][0]
    for mine, theirs in zip(results[0][1], results[1][1], strict=True):
        assert_same_bits(mine, theirs)


def test_two_processes(checkpoint: str, tmp_path: Path) -> None:
    on_processes(2, tmp_path, process, checkpoint, tmp_path)


# ---- what stays ------------------------------------------------------------------------------------------------------


def test_weights_that_others_read(checkpoint: str, tmp_path: Path) -> None:
    """DoRA's, whose norms are; a layer that two modules have; one with a hook."""
    model = trl_runs.load(checkpoint)
    layers = model.model.layers
    layers[1].mlp.up_proj = layers[0].mlp.up_proj
    layers[1].mlp.gate_proj.weight = layers[0].mlp.gate_proj.weight
    layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    names = [".".join(("layers.0.self_attn", name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    bastile.apply()
    config = adapters(target_modules=r".*layers\.[01]\.self_attn\.[qkvo]_proj")
    found = trained("sft", checkpoint, tmp_path, model=model, peft_config=config, save_strategy="no")
    assert names
    assert found[2] == 2 * 4 - 1 + 2 + 2  # attentions, both layers' down_proj, which have no adapters, the ends

    found = trained("sft", checkpoint, tmp_path, peft_config=adapters(use_dora=True))
    assert found[2] == ALL - LAYERS

    config = adapters(target_modules=["q_proj"], modules_to_save=["lm_head", "up_proj"])
    found = trained("sft", checkpoint, tmp_path, peft_config=config)
    assert found[2] == ALL - 3  # without what is beneath the trained copies of up_proj and lm_head

    config = adapters(target_modules=["q_proj", "embed_tokens"])
    found = trained("sft", checkpoint, tmp_path, peft_config=config)
    assert found[2] == ALL - 1  # without the embedding beneath an adapter


def test_a_layer_whose_owner_reads_its_weight() -> None:
    """T5 asks of what type `wo.weight` is."""
    bastile.apply()
    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
    model = get_peft_model(T5ForConditionalGeneration(config), LoraConfig(r=2, target_modules=["q", "wi", "wo"]))
    found = list(frozen_bf16._layers(model, lambda p: not p.requires_grad))
    names = {name for name, module in model.named_modules() if any(module is layer for layer in found)}
    assert any(".q." in name for name in names)
    assert any(".wi." in name for name in names)
    assert not any("wo" in name.split(".") for name in names)
    assert not any("lm_head" in name for name in names)


def part_of_more() -> nn.Linear:
    made = nn.Linear(8, 8)
    made.weight.data = torch.zeros(128)[:64].view(8, 8)
    return made


class Odd(nn.Module):
    _keys = ("keyed.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.keyed = nn.Linear(8, 8)
        self.read, self.alone, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.several = nn.ModuleList([nn.Linear(8, 8)])
        self.part = part_of_more()
        self.half = nn.Linear(8, 8).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.alone(x)) + x @ self.read.weight

    def get_output_embeddings(self) -> nn.Module:
        raise NotImplementedError


def frozen_layers(*models: nn.Module) -> list[nn.Linear]:
    return list(frozen_bf16._layers(nn.Sequential(*models), lambda p: not p.requires_grad))


def test_layers_of_others_code() -> None:
    model = Odd().requires_grad_(False)
    assert list(map(id, frozen_layers(model))) == [id(model.alone), id(model.other)]
    model.alone.requires_grad_(True)
    assert list(map(id, frozen_layers(model))) == [id(model.other)]


def test_layers_with_adapters() -> None:
    """One that two modules have may be read by either; what is merged is taken out of the weight; and what merges is
    PEFT's method."""
    bastile.apply()
    config = LoraConfig(r=2, target_modules=["alone", "other"])
    one, two = (inject_adapter_in_model(config, Odd()) for _ in range(2))
    of_one, of_two = ([model.alone.base_layer, model.other.base_layer] for model in (one, two))
    assert list(map(id, frozen_layers(one, two))) == list(map(id, of_one + of_two))
    two.alone = one.alone
    assert list(map(id, frozen_layers(one, two))) == [id(of_one[1]), id(of_two[1])]
    two.other.base_layer = one.other.base_layer
    assert frozen_layers(one, two) == []
    assert list(map(id, frozen_layers(one))) == list(map(id, of_one))
    one.alone.merge()
    assert list(map(id, frozen_layers(one))) == [id(of_one[1])]
    one.alone.unmerge()
    bastile.reset(["frozen_bf16"])
    assert frozen_layers(one) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mixed_precision": "no"}, "autocast"),
        ({"mixed_precision": "fp16"}, "autocast"),
        ({"is_fsdp_enabled": True}, "FSDP"),
        ({"is_deepspeed_enabled": True}, "DeepSpeed"),
        ({"bf16_full_eval": True}, "evaluation"),
        ({"torch_compile": True}, "torch.compile"),
        ({}, None),
    ],
)
def test_ways_of_running(change: dict[str, Any], reason: str | None) -> None:
    names = ("mixed_precision", "is_fsdp_enabled", "is_deepspeed_enabled", "bf16_full_eval", "torch_compile")
    given: dict[str, Any] = {**dict.fromkeys(names, False), "mixed_precision": "bf16", **change}
    args = SimpleNamespace(fp16_full_eval=False, **given)
    trainer = SimpleNamespace(args=args, accelerator=SimpleNamespace(**given), **given)
    bastile.apply()
    found = frozen_bf16._why_not(trainer)
    assert found is None if reason is None else reason in str(found)
    bastile.apply(autocast_linear=False)
    assert frozen_bf16._why_not(trainer) is not None


def test_without_adapters(tmp_path: Path, checkpoint: str) -> None:
    """A model part of which is frozen is saved as it is."""
    model = trl_runs.load(checkpoint)
    model.model.layers[0].requires_grad_(False)
    rows = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}] * 4
    looks = Looks(narrowed_in)
    bastile.apply()
    args = TrainingArguments(str(tmp_path), bf16=True, use_cpu=True, max_steps=2, report_to="none", save_strategy="no")
    Trainer(model, args, train_dataset=rows, callbacks=[looks]).train()
    assert looks.seen == [0]
    assert bastile.report().ran("frozen_bf16") == 0


def test_adapters_that_transformers_added(checkpoint: str, tmp_path: Path) -> None:
    """Without PEFT's model around it. What `model.add_adapter` does, which wants one release of PEFT and no other."""
    model = inject_adapter_in_model(adapters(target_modules=["q_proj", "up_proj"]), trl_runs.load(checkpoint))
    model._hf_peft_config_loaded = True
    rows = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}] * 4
    looks = Looks(narrowed_in)
    bastile.apply()
    args = TrainingArguments(str(tmp_path), bf16=True, use_cpu=True, max_steps=2, report_to="none", save_strategy="no")
    Trainer(model, args, train_dataset=rows, callbacks=[looks]).train()
    assert looks.seen[0] == ALL
    assert narrowed_in(model) == 0


def test_taken_out(checkpoint: str, tmp_path: Path) -> None:
    assert "frozen_bf16" in bastile.apply()
    assert bastile.reset(["frozen_bf16"]) == ["frozen_bf16"]
    assert vars(Trainer)["train"] is STOCK
    assert "frozen_bf16" not in bastile.apply(autocast_linear=False)
    assert trained("sft", checkpoint, tmp_path)[2] == 0
