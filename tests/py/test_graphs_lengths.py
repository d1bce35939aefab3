"""Batches of many lengths with graphs: few kinds of steps, and the results of batches that nobody pads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DynamicCache

import bastile
from bastile.graphs import lengths as module
from bastile.graphs.pays import Pays
from bastile.graphs.stack import _stacks
from bastile.models import small
from conftest import older_than, tiny_batch, tiny_model
from graphing import DEVICE, ON_CUDA, allow_graphs, counted
from test_gpt_oss import tiny_gpt_oss

LENGTHS = [7, 23, 9, 30, 12, 25, 5, 28, 19, 21, 14, 27, 18, 29, 11, 22, 31, 6, 17, 26]
#: After the ninth length: these all become 16 or 32.
PADDED = len(LENGTHS) - 8


KEPT: list[nn.Module] = []  # with the graphs of their layers


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    allow_graphs(monkeypatch)
    yield
    KEPT.clear()


def batch(model: Any, step: int, length: int, mask: str | None = "right") -> dict[str, torch.Tensor]:
    given = tiny_batch(model, 2, length, seed=step)
    masked = torch.ones(2, length, dtype=torch.int64)
    if mask in ("right", "left"):
        masked[1, -2:] = 0
        masked = masked if mask == "right" else masked.flip(1)
    given["attention_mask"] = masked
    given["labels"] = given["labels"].masked_fill(masked == 0, -100)
    if mask is None:
        del given["attention_mask"]
    if mask == "packed":
        del given["attention_mask"]
        cut = length // 3
        given["position_ids"] = torch.cat((torch.arange(cut), torch.arange(length - cut)))[None].expand(2, -1)
    return {name: t.to(DEVICE) for name, t in given.items()}


def trained(
    model: nn.Module, graphs: bool | str, mask: str | None, lengths: Any = LENGTHS, **more: Any
) -> list[torch.Tensor]:
    """Losses, logits and gradients of each step, of weights that stay."""
    bastile.apply(cuda_graphs=graphs)
    counted()
    model = copy.deepcopy(model).to(DEVICE)
    found = []
    for step, length in enumerate(lengths):
        given = batch(model, step, length, mask)
        out = model(**given, **more)
        out.loss.backward()
        assert out.logits.shape[:2] == given["input_ids"].shape
        found += [out.loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]
        if isinstance(cache := out.past_key_values, DynamicCache) and type(cache.layers) is list:
            assert cache.get_seq_length() == length
        model.zero_grad()
    KEPT.append(model)
    return found


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * max(1.0, other.abs().max().item()))


@pytest.mark.parametrize("mask", ["right", "left", "ones", None, "packed"])
def test_the_results_are_those_of_their_own_lengths(mask: str | None) -> None:
    model = tiny_model()
    want = trained(model, False, mask)
    got = trained(model, True, mask)
    replayed, aside = counted()
    assert_close(got, want)
    [stack] = _stacks.values()
    assert len(stack.captured) == 2
    assert replayed == PADDED - 1  # one kind is noted, and the other foreseen
    assert not aside


def test_layers_of_two_kinds_of_masks_and_experts() -> None:
    model = tiny_gpt_oss(num_hidden_layers=4)
    want = trained(model, False, "right", use_cache=False)
    got = trained(model, True, "right", use_cache=False)
    assert_close(got, want)
    assert ON_CUDA or counted()[0] >= PADDED - 2  # on a GPU any number, as in test_graphs.py


#: Experts in float32 wait for a GPU's numbers, and so have no graphs.
WITHOUT_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"mlp_only_layers": list(range(8))},
    "dots1": {"first_k_dense_replace": 8},
}


@pytest.mark.skipif(older_than("5.17"), reason="states are made ready otherwise")
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "lfm2", "bamba", "falcon_h1", "olmo_hybrid", "dots1"])
def test_layers_with_a_state(kind: str) -> None:
    """Which goes from one token to the next, and never back; convolutions likewise. The last makes its masks in
    functions within its forward."""
    model = small.small_model(kind, **WITHOUT_EXPERTS.get(kind, {})).train()
    want = trained(model, False, "right", use_cache=False)
    got = trained(model, True, "right", use_cache=False)
    assert_close(got, want)
    assert counted()[0] >= PADDED - 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_with_adapters(reentrant: bool) -> None:
    model = get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    want = trained(model, False, "right")
    got = trained(model, True, "right")
    assert_close(got, want)
    assert counted()[0] == PADDED - 1


def test_few_lengths_keep_their_bits() -> None:
    """Up to eight are not padded."""
    lengths, model = [5, 6, 7, 8, 9, 10, 11, 12] * 3, tiny_model()
    want = trained(model, False, "right", lengths)
    got = trained(model, True, "right", lengths)
    assert counted()[0] == 16
    assert all(map(torch.equal, got, want))


ASIDE = {
    "hidden states": {"output_hidden_states": True},
    "cumulated lengths of a packed batch": {"cu_seq_lens_q": torch.tensor([0, 5])},
}


@pytest.mark.parametrize("name", ASIDE)
def test_what_could_be_noticed_is_left_alone(name: str) -> None:
    """No length is even looked at."""
    bastile.apply(cuda_graphs=True)
    model = tiny_model().to(DEVICE)
    for step, length in enumerate(LENGTHS):
        out = model(**batch(model, step, length), **ASIDE[name])
        out.loss.backward()
        if name == "hidden states":
            assert {t.shape[1] for t in out.hidden_states} == {length}
    [stack] = _stacks.values()
    assert not stack.lengths._seen


@pytest.mark.parametrize("most", ["max_position_embeddings", "original_max_position_embeddings"])
def test_no_batch_gets_longer_than_positions_go(most: str) -> None:
    """Tables of positions end there, and scaled rotary embeddings change."""
    bastile.apply(cuda_graphs=True)
    model = tiny_model().to(DEVICE)
    setattr(model.config, most, 31)
    assert module.most_positions(model.config) == 31
    seen = set()
    model.model.norm.register_forward_hook(lambda _, args, out: seen.add(out.shape[1]))
    for step, length in enumerate(LENGTHS):
        model(**batch(model, step, length)).loss.backward()
    assert max(seen) == 31
    assert 16 in seen


def test_tokens_that_see_others_behind_them() -> None:
    bastile.apply(cuda_graphs=True)
    model = tiny_model().to(DEVICE)
    model.model.layers[1].self_attn.is_causal = False
    for step, length in enumerate(LENGTHS):
        model(**batch(model, step, length)).loss.backward()
    [stack] = _stacks.values()
    assert stack.lengths.never
    assert not stack.captured


def test_what_a_model_returns_beside_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not known how to cut that: the step is taken again as it came, and no later one is padded."""
    states = torch.zeros(1, 4, 2)
    assert not module.shortened({"last_hidden_state": states, "more": states}, 3)
    assert not module.shortened((states,), 3)
    model = tiny_model()
    want = trained(model, False, "right")
    monkeypatch.setattr("bastile.models.graphs.shortened", lambda result, length: False)
    assert_close(trained(model, True, "right"), want)
    [stack] = _stacks.values()
    assert stack.lengths.never


def test_where_graphs_do_not_pay_nothing_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what is longer."""
    monkeypatch.setattr(Pays, "ratio", lambda self: 2.0)
    model = tiny_model()
    trained(model, "auto", "right", [*LENGTHS, *LENGTHS, *LENGTHS])
    [stack] = _stacks.values()
    assert stack.lengths._too_many <= 64
    assert not stack.captured
    assert stack.lengths.of(2, 31) == 31


def test_lengths() -> None:
    for length in range(1, 5000):
        to = module.padded(length)
        assert length <= to < length * 1.25 + module._LEAST_STEP
        assert module.padded(to) == to
    assert len({module.padded(n) for n in range(513, 1025)}) == 4
