"""What Transformers' own tests ask of every model, with Bastile in force in the process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations import flex_attention as transformers_flex_attention
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import bastile
from bastile.models import small
from bastile.models.support import Check
from bastile.report import Report
from conftest import gradients, inductor, tiny_batch
from oracle import EMULATED

TYPES = ("llama", "qwen3", "gpt_oss", "gemma")
types = pytest.mark.parametrize("model_type", TYPES)
on_a_gpu = pytest.mark.skipif(EMULATED or not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def in_force() -> None:
    bastile.report(reset=True)
    bastile.apply()


def evaluated(model_type: str, **more: Any) -> Any:
    return small.small_model(model_type, **more).eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(3))


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Two orders of float32 sums, through two layers: what bastile support --check allows."""
    assert float((got - want).abs().max()) <= Check.ALLOWED_GRADIENT * float(want.abs().max())


@types
@torch.no_grad()
def test_a_batch_is_its_sequences(model_type: str) -> None:
    model, ids = evaluated(model_type), tokens(3, 9)
    whole = model(input_ids=ids).logits
    for row, one in zip(whole, ids, strict=True):
        near(model(input_ids=one[None]).logits[0], row)
    assert bastile.report().ran("add_rms_norm") > 0


@types
@torch.no_grad()
def test_padding_on_the_left_changes_nothing(model_type: str) -> None:
    model, ids = evaluated(model_type), tokens(2, 7)
    padded = torch.cat((torch.zeros(2, 4, dtype=ids.dtype), ids), 1)
    mask = (torch.arange(11) >= 4).long().expand(2, 11)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    near(
        model(input_ids=padded, attention_mask=mask, position_ids=positions).logits[:, 4:], model(input_ids=ids).logits
    )
    want = model.generate(input_ids=ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)[:, 7:]
    got = model.generate(input_ids=padded, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(got[:, 11:], want)


@types
@torch.no_grad()
def test_a_cache_changes_nothing(model_type: str) -> None:
    model, ids = evaluated(model_type), tokens(2, 6)
    how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    for others in ({}, {"num_beams": 3}):
        with_cache = model.generate(input_ids=ids, use_cache=True, **how, **others)
        assert torch.equal(with_cache, model.generate(input_ids=ids, use_cache=False, **how, **others))
    first = model(input_ids=ids[:, :4], use_cache=True)
    rest = model(input_ids=ids[:, 4:], past_key_values=first.past_key_values, use_cache=True)
    near(torch.cat((first.logits, rest.logits), 1), model(input_ids=ids).logits)


@types
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_can_be_resized(model_type: str, tied: bool) -> None:
    model = small.small_model(model_type, tie_word_embeddings=tied)
    reference = copy.deepcopy(model)
    model.resize_token_embeddings(131)
    reference.resize_token_embeddings(131)
    with torch.no_grad():
        for ours, theirs in zip(reference.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)  # new rows are random
    loss, gradients = small.step(model)
    assert bastile.report().ran("fused_linear_cross_entropy") == 1
    bastile.reset()
    want_loss, want = small.step(reference)
    near(loss, want_loss)
    assert gradients.keys() == want.keys()
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert gradients[head].shape == (131, 32)
    for name, gradient in want.items():
        near(gradients[name], gradient)


@types
def test_checkpointing_changes_nothing(model_type: str) -> None:
    model = small.small_model(model_type)
    want_loss, want = small.step(model)
    model.gradient_checkpointing_enable()
    loss, gradients = small.step(model)
    near(loss, want_loss)
    for name, gradient in want.items():
        near(gradients[name], gradient)


@types
def test_what_is_saved_is_loaded(model_type: str, tmp_path: Path) -> None:
    model = small.small_model(model_type)
    want_loss, _ = small.step(model)
    model.save_pretrained(tmp_path)
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path), copy.deepcopy(model)):
        assert loaded.state_dict().keys() == model.state_dict().keys()
        assert torch.equal(small.step(loaded.train())[0], want_loss)
    bastile.reset()
    near(small.step(AutoModelForCausalLM.from_pretrained(tmp_path).train())[0], want_loss)


#: Of two layers: in each two norms with sums, and one norm behind them.
DENSE = {"rms_norm": 1, "rope": 2, "add_rms_norm": 4, "fused_linear_cross_entropy": 1}
RAN = {
    "llama": {**DENSE, "swiglu": 2},
    "qwen3": {"rms_norm": 1, "swiglu": 2, "qk_norm_rope": 2, "add_rms_norm": 4, "fused_linear_cross_entropy": 1},
    "gpt_oss": {**DENSE, "moe_experts": 2},
    "gemma": {**DENSE, "swiglu": 2},
    "qwen3_moe": {
        "rms_norm": 1,
        "qk_norm_rope": 2,
        "add_rms_norm": 4,
        "moe_experts": 2,
        "fused_linear_cross_entropy": 1,
    },
}


@types
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_each_implementation_of_attention(model_type: str, implementation: str) -> None:
    if (model_type, implementation) == ("gpt_oss", "sdpa"):
        pytest.skip("Transformers has no sdpa for it: its attention has sinks")
    model = small.small_model(model_type, attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    assert_as_stock(model, RAN[model_type])


@inductor  # makes the masks
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma"])
def test_flex_attention_in_training(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses gradients of it on a CPU because inductor has no kernel for them there. The same function has
    them uncompiled, and masks and options of Transformers reach it as they would reach the kernel. (GPT-OSS's sinks
    Transformers refuses on a CPU.)"""
    called: list[Any] = []

    def uncompiled(q: Any, k: Any, v: Any, training: bool = False, **options: Any) -> Any:
        called.append(type(options["block_mask"]))
        return flex_attention.flex_attention(q, k, v, **options)

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(transformers_flex_attention, "compile_friendly_flex_attention", uncompiled)
    assert_as_stock(small.small_model(model_type, attn_implementation="flex_attention"), RAN[model_type])
    assert called == 4 * [flex_attention.BlockMask]  # two layers, patched and stock


@on_a_gpu
@pytest.mark.parametrize(("model_type", "whole"), [("llama", False), ("gpt_oss", False), ("llama", True)])
def test_flex_attentions_compiled_kernel_in_training(model_type: str, whole: bool) -> None:
    """Its own forward and backward kernels, behind our queries and keys and before our gradients: by itself, with sinks
    too, and where the model is compiled around it."""
    model = small.small_model(model_type, attn_implementation="flex_attention", hidden_size=64, head_dim=16).cuda()
    batch = {name: value.cuda() for name, value in tiny_batch(model, 3, 130).items()}  # more than a block of the mask
    results = []
    for patched in (True, False):
        bastile.report(reset=True)
        loss = (torch.compile(model) if whole else model)(**batch, use_cache=False).loss
        loss.backward()
        results.append((loss.detach(), gradients(model)))
        told = bastile.report()
        ran = {operator: told.ran(operator) for operator in RAN[model_type]}
        assert whole or ran == (RAN[model_type] if patched else dict.fromkeys(ran, 0))
        bastile.reset()
    (loss, got), (want_loss, want) = results
    near(loss, want_loss)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        near(got[name], gradient)


@types
def test_an_attention_of_the_users_own(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered under a name, and its mask: called with what stock calls it with, and its result is what counts."""
    told: list[Any] = []

    def halved(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        told.append((q.shape, k.shape, v.shape, mask.shape, sorted(options), options["scaling"], options["dropout"]))
        output, weights = sdpa_attention_forward(module, q, k, v, mask, **options)
        return output / 2, weights

    monkeypatch.setitem(AttentionInterface._global_mapping, "halved", halved)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "halved", own_mask)
    assert_as_stock(small.small_model(model_type, attn_implementation="halved"), RAN[model_type])
    assert len(told) == 4
    assert told[:2] == told[2:]


def own_mask(*args: Any, **kwargs: Any) -> Any:
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


def own_experts(self: Any, *given: Any) -> torch.Tensor:
    return batched_mm_experts_forward(self, *given) / 2


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm", "halved"])
@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
def test_each_implementation_of_experts(model_type: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """grouped_mm, which is Transformers' default, is what the operator takes the place of; all others are called, one
    of the user's own too."""
    monkeypatch.setitem(ExpertsInterface._global_mapping, "halved", own_experts)
    model = small.small_model(model_type, experts_implementation=implementation)
    assert model.config._experts_implementation == implementation
    is_ours = implementation == "grouped_mm"
    told = assert_as_stock(model, {**RAN[model_type], "moe_experts": 2 * is_ours})
    aside = [reason for line in told for reason in line.aside if line.operator == "moe_experts"]
    why = f"the model's experts_implementation is '{implementation}', not 'grouped_mm'"
    assert aside == ([] if is_ours else [why])


def assert_as_stock(model: Any, ran: dict[str, int]) -> Report:
    """A step, in which these operators ran so often."""
    bastile.report(reset=True)
    loss, gradients = small.step(model)
    told = bastile.report()
    assert {operator: told.ran(operator) for operator in ran} == ran
    bastile.reset()
    want_loss, want = small.step(model)
    near(loss, want_loss)
    assert gradients.keys() == want.keys()
    for name, gradient in want.items():
        near(gradients[name], gradient)
    return told
