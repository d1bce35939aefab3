"""Queries and keys of a model of float32 under autocast: rounded where they are turned, not by the attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bastile
from bastile.models import attention
from conftest import gradients, tiny_batch, tiny_model
from oracle import assert_same_bits, devices


def trained(
    device: str, told: list[bool], patch: pytest.MonkeyPatch, masked: bool = False, **more: Any
) -> dict[str, torch.Tensor]:
    """The loss and gradients; told: whether results were to have the type of the projections."""

    def noted(*args: Any, keep_type: bool, **kwargs: Any) -> Any:
        told.append(keep_type)
        return plain(*args, keep_type=keep_type, **kwargs)

    plain = attention.qk_norm_rope
    with patch.context() as patched:
        patched.setattr(attention, "qk_norm_rope", noted)
        model = tiny_model("qwen3", **more).to(device).train()
        batch = {name: tensor.to(device) for name, tensor in tiny_batch(model).items()}
        if not masked:
            del batch["attention_mask"]
        with torch.autocast(device, torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@pytest.mark.parametrize("device", devices())
def test_the_bits_are_those_of_the_attentions_own_cast(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bastile.apply()
    told: list[bool] = []
    got = trained(device, told, monkeypatch)
    assert told
    assert all(told)
    monkeypatch.setattr(attention, "_CASTING", frozenset())
    late: list[bool] = []
    want = trained(device, late, monkeypatch)
    assert not any(late)
    for name, tensor in want.items():
        assert_same_bits(got[name], tensor)


def test_keys_that_are_repeated_for_each_query_head_have_gradients_summed_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bastile.apply()
    told: list[bool] = []
    trained("cpu", told, monkeypatch, masked=True)
    assert told
    assert not any(told)
    trained("cpu", told, monkeypatch, masked=True, num_key_value_heads=tiny_model("qwen3").config.num_attention_heads)
    assert any(told)


def test_an_attention_that_reads_them_as_they_are_gets_them_so(monkeypatch: pytest.MonkeyPatch) -> None:
    bastile.apply()
    told: list[bool] = []
    trained("cpu", told, monkeypatch, attn_implementation="eager")
    assert told
    assert not any(told)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_without_autocast_nothing_is_rounded(weights: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    plain = attention.qk_norm_rope
    monkeypatch.setattr(attention, "qk_norm_rope", lambda *a, **k: (told.append(k["keep_type"]), plain(*a, **k))[1])
    bastile.apply()
    model = tiny_model("qwen3").to(weights)
    model(**tiny_batch(model), use_cache=False).loss.backward()
    assert told
    assert not any(told)


def test_a_cache_is_filled_with_what_it_was() -> None:
    bastile.apply()
    model = tiny_model("qwen3").eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = model(input_ids=tiny_batch(model)["input_ids"], use_cache=True)
    cache = out.get("cache", out.get("past_key_values"))
    assert cache.layers[0].keys.dtype is torch.float32
