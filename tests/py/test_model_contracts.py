"""What Transformers' own tests ask of every model, with Bastile in force in the process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import bastile
from bastile.models import small
from bastile.models.support import Check

TYPES = ("llama", "qwen3", "gpt_oss", "gemma")
types = pytest.mark.parametrize("model_type", TYPES)


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


@types
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_each_implementation_of_attention(model_type: str, implementation: str) -> None:
    if (model_type, implementation) == ("gpt_oss", "sdpa"):
        pytest.skip("Transformers has no sdpa for it: its attention has sinks")
    model = small.small_model(model_type, attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    assert_as_stock(model)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
def test_each_implementation_of_experts(model_type: str, implementation: str) -> None:
    model = small.small_model(model_type, experts_implementation=implementation)
    assert model.config._experts_implementation == implementation
    assert_as_stock(model)


def assert_as_stock(model: Any) -> None:
    loss, gradients = small.step(model)
    assert bastile.report().ran("fused_linear_cross_entropy") == 1
    bastile.reset()
    want_loss, want = small.step(model)
    near(loss, want_loss)
    for name, gradient in want.items():
        near(gradients[name], gradient)
