"""Rotary tables of a batch's usual positions are made once, and anew when anything that they depend on has changed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, masking_utils
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM, Gemma3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import bastile
from bastile.graphs import tables
from bastile.graphs.arguments import Place, signature
from bastile.graphs.stack import stack_of
from bastile.graphs.tables import Tables
from bastile.models import masks
from bastile.report import Tally
from conftest import tiny_model
from graphing import DEVICE, allow_graphs, assert_alike, batch_of, train

counts = pytest.mark.skipif(
    "cache_position" in inspect.signature(masking_utils.create_causal_mask).parameters,
    reason="models have their positions from cache_position, not from Bastile",
)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    allow_graphs(monkeypatch)
    monkeypatch.setattr(masks, "_DEVICES", frozenset({DEVICE}))
    yield
    bastile.reset()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of rotary modules that made tables."""
    calls: list[Any] = []
    for cls in (Qwen3RotaryEmbedding, Gemma3RotaryEmbedding):
        now = cls.forward

        @functools.wraps(now)
        def forward(self: Any, *args: Any, now: Any = now, **kwargs: Any) -> Any:
            calls.append(self)
            return now(self, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", forward)
    return calls


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each tensor that a graph reads beside the hidden states: whether it was copied."""
    copied: list[bool] = []
    fill = Place.fill

    def counted(self: Place, tensor: torch.Tensor, is_steady: bool = False) -> None:
        copied.append(not is_steady or self._filled_with is not tensor)
        fill(self, tensor, is_steady)

    monkeypatch.setattr(Place, "fill", counted)
    return copied


def bare(model: Any, step: int) -> dict[str, torch.Tensor]:
    return batch_of(model, step, mask=False)


def tables_of(model: Any) -> Tables:
    return stack_of(model.model, Tally.of("cuda_graphs", "test")).tables


def nothing(model: Any) -> None:
    pass


@counts
def test_they_are_made_once(made: list[Any], filled: list[bool]) -> None:
    want = train(tiny_model(), False, steps=5, batches=bare)
    assert len(made) == 5
    made.clear()
    got = train(tiny_model(), True, steps=5, batches=bare)
    assert got.replayed == 4
    assert len(made) == 1
    assert len(filled) == 3 + 12
    assert sum(filled) == 3 + 3  # cosines, sines and positions: captured, and in the first step that is replayed
    assert all(map(torch.equal, got.losses + got.parameters, want.losses + want.parameters))


@counts
def test_of_each_kind_of_layer_and_each_length(made: list[Any]) -> None:
    lengths = [11, 11, 13, 11, 13, 12]

    def batches(model: Any, step: int) -> dict[str, torch.Tensor]:
        return batch_of(model, step, columns=lengths[step], mask=False)

    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "sliding_window": 8}
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    torch.manual_seed(0)
    assert_alike(Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, **kinds)), 5, steps=6, batches=batches)
    assert len(made) == 2 * (6 + 3)


def test_positions_that_a_batch_brings_are_another_in_each_step(made: list[Any], filled: list[bool]) -> None:
    def batches(model: Any, step: int) -> dict[str, torch.Tensor]:
        batch = bare(model, step)
        return {**batch, "position_ids": torch.arange(11, device=DEVICE).expand(2, 11) + step}

    assert_alike(tiny_model(), 3, steps=4, batches=batches)
    assert len(made) == 8
    assert all(filled)


def frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(1.5)


def other_frequencies(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", rotary.inv_freq * 1.5, persistent=False)


def frequencies_elsewhere(model: Any) -> None:
    model.model.rotary_emb.inv_freq.data = model.model.rotary_emb.inv_freq * 1.5


def a_scale(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.5


def a_hook(model: Any) -> None:
    model.model.rotary_emb.register_forward_hook(lambda module, args, result: (result[0] * 1.5, result[1] * 1.5))


def a_forward_of_its_own(model: Any) -> None:
    rotary = model.model.rotary_emb
    stock = rotary.forward
    rotary.forward = lambda *args: tuple(table * 1.5 for table in stock(*args))


def a_module(model: Any) -> None:
    config = model.config.__class__(**{**model.config.to_dict(), "rope_parameters": None, "rope_theta": 7.0})
    model.model.rotary_emb = Qwen3RotaryEmbedding(config).to(DEVICE)


def positions(model: Any) -> None:
    for each in masks._made.values():
        each.mul_(2)


CHANGES = [
    frequencies,
    other_frequencies,
    frequencies_elsewhere,
    a_scale,
    a_hook,
    a_forward_of_its_own,
    a_module,
    positions,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps(change: Callable[[Any], None]) -> None:
    assert_alike(tiny_model(), 5, steps=6, batches=bare, before=[*[nothing] * 3, change])


def test_positions_that_a_loop_writes_into_one_tensor(made: list[Any], filled: list[bool]) -> None:
    row = torch.arange(11, device=DEVICE).unsqueeze(0)
    one = row.clone()

    def batches(model: Any, step: int) -> dict[str, torch.Tensor]:
        return {**bare(model, step), "position_ids": one.copy_(row + step)}

    assert_alike(tiny_model(), 3, steps=4, batches=batches)
    assert len(made) == 8
    assert all(filled)


def test_tables_that_someone_has_written_to() -> None:
    """Those of the next step are new."""

    def scribble(model: Any) -> None:
        for each in tables_of(model)._made.values():
            each.result[0].mul_(1.5)

    assert_alike(tiny_model(), 5, steps=6, batches=bare, before=[*[nothing] * 3, scribble])


@counts
def test_a_graph_gets_what_was_written_between() -> None:
    model = tiny_model().to(DEVICE)
    bastile.apply(cuda_graphs=True)
    model(**bare(model, 0)).loss.backward()
    ((cos, sin),) = [each.result for each in tables_of(model)._made.values()]
    assert tables_of(model).is_steady(cos)
    cos.mul_(1.5)
    assert not tables_of(model).is_steady(cos)
    assert tables_of(model).is_steady(sin)
    place = Place(signature(cos))
    place.fill(cos, is_steady=True)
    cos.mul_(1.5)
    place.fill(cos, is_steady=False)
    assert torch.equal(place.tensor, cos)


def test_one_that_keeps_something_of_a_call_is_called_each_time(made: list[Any]) -> None:
    """As those do whose frequencies depend on the longest batch so far."""

    class Qwen3CountingRotaryEmbedding(Qwen3RotaryEmbedding):
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            cos, sin = super().forward(*args, **kwargs)
            return cos * self.calls, sin

    Qwen3CountingRotaryEmbedding.__module__ = Qwen3RotaryEmbedding.__module__
    Qwen3CountingRotaryEmbedding.forward.__module__ = Qwen3RotaryEmbedding.__module__

    def counting(model: Any) -> None:
        model.model.rotary_emb = Qwen3CountingRotaryEmbedding(model.config).to(DEVICE)

    assert_alike(tiny_model(), 5, steps=6, batches=bare, before=[counting])
    assert len(made) == 12


@counts
def test_large_ones_are_made_anew_and_few_are_kept(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_BYTES", 11 * 16 * 2 * 4 - 1)
    train(tiny_model(head_dim=16), True, steps=3, batches=bare)
    assert len(made) == 3
    monkeypatch.undo()
    allow_graphs(monkeypatch)
    monkeypatch.setattr(masks, "_DEVICES", frozenset({DEVICE}))
    monkeypatch.setattr(tables, "_MOST", 2)
    model = tiny_model().to(DEVICE)
    bastile.apply(cuda_graphs=True)
    for length in (7, 8, 9, 10, 9):
        model(**batch_of(model, 0, columns=length, mask=False)).loss.backward()
    assert len(tables_of(model)._made) == 2
    assert len(tables_of(model)._versions) == 4


def test_evaluation_and_stock_know_nothing_of_it(made: list[Any]) -> None:
    model = tiny_model().to(DEVICE)
    bastile.apply(cuda_graphs=True)
    model.eval()
    for step in range(2):
        model(**bare(model, step))
    assert len(made) == 2
    bastile.reset()
    model.train()
    for step in range(2):
        model(**bare(model, step))
    assert len(made) == 4
    assert "_compiled_call_impl" not in vars(model.model.rotary_emb)
