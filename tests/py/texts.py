"""Texts that a small model generates, with Bastile and as stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bastile
from bastile.models import small
from conftest import DENSE, tiny_batch, tiny_model
from graphing import DEVICE
from graphing import counted_tokens as counted

TOKENS = 24


def small_one(family: str) -> Any:
    model = tiny_model(family) if family in DENSE else small.small_model(family)
    return model.to(DEVICE).eval()


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny_model(), config).to(DEVICE).eval()


def generated(model: Any, tokens: int = TOKENS, rows: int = 3, seed: int = 0, **options: Any) -> Any:
    """Left-padded prompts of unequal length."""
    batch = tiny_batch(model, rows=rows, seed=seed)
    given_ = {name: batch[name].to(DEVICE) for name in ("input_ids", "attention_mask")}
    usual = {"do_sample": False, "repetition_penalty": 1.5, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(
        **given_, max_new_tokens=tokens, **{"use_cache": True, "disable_compile": True, **usual, **options}
    )


def stock(model: Any, *args: Any, **options: Any) -> Any:
    bastile.reset()
    found = generated(model, *args, **options)
    bastile.apply()
    counted()
    return found


def assert_text_of_stock(model: Any, tokens: int = TOKENS, replayed: int | None = None, **options: Any) -> None:
    want = stock(model, tokens, **options)
    got = generated(model, tokens, **options)
    assert want[:, -tokens:].unique().numel() > 5  # else the test could not fail
    assert torch.equal(got, want)
    # The first token is the prompt's, the second one's call is not captured in a model's first text.
    assert counted() == (tokens - 2 if replayed is None else replayed, {})
