"""Generating text with Bastile's operators: greedy, in float32, the tokens of stock Transformers."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import bastile
from conftest import DENSE, assert_token_by_token_gives_the_whole, tiny_batch, tiny_model
from oracle import devices

pytestmark = [
    pytest.mark.parametrize("family", sorted(DENSE)),
    pytest.mark.parametrize("device", devices()),
]

TOKENS = 24


def prompts(model: PreTrainedModel, rows: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts of unequal length."""
    batch = tiny_batch(model, rows=rows)
    assert rows == 1 or (batch["attention_mask"][1:, 0] == 0).all()
    return {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}


def generated(model: PreTrainedModel, rows: int, **options: Any) -> Any:
    inputs = prompts(model, rows)
    output = model.generate(
        **inputs, max_new_tokens=TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
    )
    assert output.sequences.shape == (rows, inputs["input_ids"].shape[1] + TOKENS)
    return output


def assert_same_text(model: PreTrainedModel, rows: int, **options: Any) -> None:
    want = generated(model, rows, **options)
    bastile.apply(cuda_graphs=False)  # of replayed calls none would be counted: test_generation_graphs.py
    got = generated(model, rows, **options)
    # The test could not fail where all tokens are one, nor is it fair where two tokens are as likely up to rounding.
    assert want.sequences[:, -TOKENS:].unique().numel() > 5
    best = torch.stack(want.logits).topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 1e-4
    assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("cache", [None, "static"])
def test_greedy_tokens_with_a_cache(family: str, device: str, cache: str | None, rows: int, calls: Any) -> None:
    model = tiny_model(family).eval().to(device)
    assert_same_text(model, rows, cache_implementation=cache, disable_compile=True)
    assert calls["add_rms_norm"] == 4 * TOKENS  # the prompt, then one token at a time
    assert calls["swiglu"] == 2 * TOKENS


def test_greedy_tokens_without_a_cache(family: str, device: str) -> None:
    assert_same_text(tiny_model(family).eval().to(device), 3, use_cache=False)


def test_beams(family: str, device: str) -> None:
    model = tiny_model(family).eval().to(device)
    want = model.generate(**prompts(model, 2), max_new_tokens=8, num_beams=3, do_sample=False)
    bastile.apply(cuda_graphs=False)
    assert torch.equal(model.generate(**prompts(model, 2), max_new_tokens=8, num_beams=3, do_sample=False), want)


def test_a_model_in_training_mode_generates_too(family: str, device: str) -> None:
    """As trainers do between steps."""
    assert_same_text(tiny_model(family).to(device), 3)


def test_token_by_token_gives_the_logits_of_the_whole(family: str, device: str) -> None:
    model = tiny_model(family).eval().to(device)
    ids = prompts(model, 1)["input_ids"]
    bastile.apply(cuda_graphs=False)
    assert_token_by_token_gives_the_whole(model, ids)
