"""Batches of decoders that see an encoder's states, of ever new lengths: made few."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import bastile
from bastile.graphs import caches
from bastile.graphs.lengths import VARIES
from bastile.graphs.seq2seq import Decoders
from bastile.graphs.stack import Stack, _stacks
from conftest import gradients, older_than
from graphing import DEVICE, allow_graphs
from test_chunked_attention import assert_near
from test_graphs_lengths import LENGTHS, PADDED
from test_graphs_masked import FIRST, made

_BART = {"d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 97, "decoder_start_token_id": 2}
_BART |= {"pad_token_id": 1, "eos_token_id": 3, "max_position_embeddings": 64}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4, "vocab_size": 97, "pad_token_id": 0}
_T5 |= {"decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
_WHISPER = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64, "bos_token_id": 3}
#: Model -> its config's values.
TYPES: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": _BART,
    "MarianMTModel": _BART,
    "PegasusForConditionalGeneration": _BART,
    "M2M100ForConditionalGeneration": _BART,
    "T5ForConditionalGeneration": _T5,
    "MT5ForConditionalGeneration": {**_T5, "feed_forward_proj": "gated-gelu"},
    "WhisperForConditionalGeneration": {**_BART, **_WHISPER},
}
#: In earlier releases attention has code of its own, or does not say that it is not causal: nothing is padded there.
says_what_it_sees = pytest.mark.skipif(older_than("5.17"), reason="attention does not say what it sees")
#: Pairs of lengths are 16 or 32 of either, so four come for a first time, and each of them may do so twice.
PAIRS = 8


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch)


KEPT: list[Any] = []


def trained(
    model: nn.Module, graphs: bool, sources: Any = LENGTHS[::-1], answers: Any = LENGTHS, masked: bool = True
) -> list[Any]:
    """The loss and gradients of each step. Sources: lengths of what the encoder reads."""
    bastile.apply(cuda_graphs=graphs)
    bastile.report(reset=True)
    model = copy.deepcopy(model).to(DEVICE).train()
    found = []
    for step, (source, answer) in enumerate(zip(sources, answers, strict=True)):
        drawn = torch.Generator().manual_seed(step)
        labels = torch.randint(5, 90, (2, answer), generator=drawn)
        labels[1, answer - step % 3 :] = -100
        if hasattr(model.config, "num_mel_bins"):
            given = {"input_features": torch.randn(2, 8, 40, generator=drawn)}
        else:
            given = {"input_ids": torch.randint(5, 90, (2, source), generator=drawn)}
        if masked and "input_ids" in given:
            given["attention_mask"] = torch.ones_like(given["input_ids"])
            given["attention_mask"][1, source - step % 4 :] = 0
        out = model(**{name: tensor.to(DEVICE) for name, tensor in {**given, "labels": labels}.items()})
        assert out.logits.shape[1] == answer
        out.loss.backward()
        found.append((out.loss.detach(), gradients(model)))
        model.zero_grad()
    KEPT.append(model)
    return found


def of_decoders() -> tuple[Stack, Any]:
    """The stack that is padded, and the report's line of its class."""
    [(module, stack)] = [(module, each) for module, each in _stacks.items() if each.decoders.lengths._seen]
    lines = [line for line in bastile.report() if line.operator == "cuda_graphs"]
    [line] = [line for line in lines if line.where.endswith(f".{type(module).__name__}")]
    return stack, line


def same(got: list[Any], want: list[Any]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert_near(mine, theirs, 1e-5)


@says_what_it_sees
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "no mask"])
@pytest.mark.parametrize("name", TYPES)
def test_the_numbers_of_steps_without_graphs(name: str, masked: bool) -> None:
    """Of ever new lengths of both, but of Whisper's sound, which is always as long."""
    model = made(name, TYPES)
    want = trained(model, False, masked=masked)
    got = trained(model, True, masked=masked)
    same(got, want)
    stack, line = of_decoders()
    assert stack.decoders.lengths.never is False
    assert not line.aside
    assert line.ran >= PADDED - (FIRST if name.startswith("Whisper") else PAIRS)
    assert {key[1][0][1] for key in stack.captured} <= {16, 32}
    assert stack.decoders.sources.vary is not name.startswith("Whisper")


@says_what_it_sees
@pytest.mark.parametrize("varies", ["sources", "answers"])
def test_one_of_both_that_varies(varies: str) -> None:
    """The other one stays as long as it is."""
    model = made("BartForConditionalGeneration", TYPES)
    lengths = {name: LENGTHS if name == varies else [13] * len(LENGTHS) for name in ("sources", "answers")}
    want, got = (trained(model, graphs, **lengths) for graphs in (False, True))
    same(got, want)
    stack, line = of_decoders()
    assert line.ran >= PADDED - FIRST
    assert {key[1][0][1] for key in stack.captured} <= ({16, 32} if varies == "answers" else {13})


@says_what_it_sees
def test_without_a_cache() -> None:
    """As trainers have it."""
    model = made("BartForConditionalGeneration", TYPES, use_cache=False)
    want, got = (trained(model, graphs) for graphs in (False, True))
    same(got, want)
    assert of_decoders()[1].ran >= PADDED - PAIRS


@says_what_it_sees
def test_a_cache_of_a_padded_step_says_that_it_is_not_filled() -> None:
    model = made("BartForConditionalGeneration", TYPES).to(DEVICE).train()
    bastile.apply(cuda_graphs=True)
    for step, length in enumerate(LENGTHS):
        ids = torch.arange(5, 5 + length, device=DEVICE)[None]
        out = model(input_ids=ids, decoder_input_ids=ids)
        out.logits.square().mean().backward()
        if step >= VARIES - 1:  # whether or not it had graphs
            with pytest.raises(RuntimeError, match="are not in its cache"):
                len(caches.given_in(out).self_attention_cache.layers)
    assert of_decoders()[0].decoders.lengths.vary


@says_what_it_sees
def test_batches_that_bring_no_mask_are_no_kind_of_their_own() -> None:
    model = made("BartForConditionalGeneration", TYPES)
    trained(model, True, LENGTHS, LENGTHS)
    stack, _ = of_decoders()
    kinds = len(stack.captured)
    bastile.report(reset=True)
    for length in LENGTHS:
        ids = torch.arange(5, 5 + length, device=DEVICE).repeat(2, 1)
        KEPT[-1](input_ids=ids, labels=ids).loss.backward()
    assert of_decoders()[1].ran == len(LENGTHS)
    assert len(stack.captured) == kinds


@says_what_it_sees
def test_eager_attention_is_left() -> None:
    model = made("BartForConditionalGeneration", TYPES, attn_implementation="eager")
    want, got = (trained(model, graphs) for graphs in (False, True))
    same(got, want)
    assert not any(stack.decoders.lengths._seen for stack in _stacks.values())


# ---- what is padded, and how ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.proj = nn.Linear(4, 4)


class Layer(nn.Module):
    def __init__(self, *are_causal: bool) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(map(Attention, are_causal))

    def forward(
        self, hidden_states: Any, attention_mask: Any = None, encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None, cache: Any = None,
    ) -> Any:  # fmt: skip
        return hidden_states


LAYER = Layer(True, False)


def decoders(answers: bool = True, sources: bool = True) -> Decoders:
    """Of which answers, and what encoders have read, have been of ever new lengths."""
    found = Decoders()
    for length in range(1, 10):
        given = torch.ones(2, length if answers else 37, 4), None, torch.ones(2, length if sources else 19, 4)
        assert found.of([LAYER], given, {}) is None or length == 9
    assert (found.lengths.vary, found.sources.vary) == (answers, sources)
    return found


def test_what_stands_behind() -> None:
    """The encoder's states behind are seen by the tokens behind alone, and tokens behind by nobody."""
    own, theirs = (torch.ones(2, 1, 37, columns, dtype=torch.bool) for columns in (37, 19))
    own[1, ..., 30:] = theirs[1, ..., 11:] = False
    args = torch.ones(2, 37, 4), own, torch.ones(2, 19, 4), theirs
    found = decoders().of([LAYER], args, {})
    assert found is not None
    (hidden, mask, states, states_mask), named = found.longer(args, {}, is_first=True)
    assert not named
    assert hidden.shape == (2, 64, 4)
    assert states.shape == (2, 32, 4)
    assert not states[:, 19:].any()
    assert torch.equal(mask[..., :37, :37], own)
    assert not mask[..., :37, 37:].any()
    assert torch.equal(states_mask[..., :37, :19], theirs)
    assert not states_mask[..., :37, 19:].any()
    assert states_mask.any(-1).all()  # a row of which nothing is seen would be NaN
    again, _ = found.longer(args, {}, is_first=False)
    assert all(one is other for one, other in zip(again[1:], (mask, states, states_mask), strict=True))


def test_a_layer_that_is_given_other_states() -> None:
    args = torch.ones(2, 37, 4), None, torch.ones(2, 19, 4)
    found = decoders().of([LAYER], args, {})
    assert found is not None
    assert found.takes(args, {})
    assert not found.takes((*args[:2], torch.ones(2, 18, 4)), {})


def test_a_mask_of_one_row() -> None:
    theirs = torch.ones(2, 1, 1, 19, dtype=torch.bool)
    args = torch.ones(2, 37, 4), None, torch.ones(2, 19, 4)
    found = decoders().of([LAYER], args, {"encoder_attention_mask": theirs})
    assert found is not None
    _, named = found.longer(args, {"encoder_attention_mask": theirs}, is_first=True)
    assert named["encoder_attention_mask"].shape == (2, 1, 1, 32)
    assert not named["encoder_attention_mask"][..., 19:].any()


def test_no_masks() -> None:
    """What the encoder has read is masked where it is padded alone; a decoder is causal by itself."""
    args = torch.ones(2, 37, 4), None, torch.ones(2, 19, 4)
    found = decoders().of([LAYER], args, {})
    assert found is not None
    (_, mask, _), named = found.longer(args, {}, is_first=True)
    assert mask is None
    seen = named["encoder_attention_mask"]
    assert seen.shape == (2, 1, 64, 32)
    assert seen[..., :19].all()
    assert not seen[..., 19:].any()
    found = decoders(sources=False).of([LAYER], args, {})
    assert found is not None
    (hidden, mask, states), named = found.longer(args, {}, is_first=True)
    assert (hidden.shape[1], mask, states) == (48, None, args[2])
    assert named == {"encoder_attention_mask": None}


def test_a_cache_that_is_filled_by_somebody_else_is_left() -> None:
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    args = torch.ones(2, 37, 4), None, torch.ones(2, 19, 4), None
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    assert decoders().of([LAYER], args, {"cache": cache}) is not None
    cache.self_attention_cache.update(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), 0)
    assert decoders().of([LAYER], args, {"cache": cache}) is None


@pytest.mark.parametrize(
    "args",
    [
        (torch.ones(2, 1, 37, 37), torch.ones(2, 19, 4)),
        (torch.ones(2, 1, 1, 37, dtype=torch.bool), torch.ones(2, 19, 4)),
        (None, None),
        (None, torch.ones(1, 19, 4)),
        (None, torch.ones(2, 19, 4), torch.ones(2, 1, 37, 18, dtype=torch.bool)),
        (None, torch.ones(2, 19, 4), torch.zeros(2, 1, 37, 19)),
    ],
    ids=["added", "of one row", "no states", "states of another batch", "another mask", "a mask that is added"],
)
def test_what_is_not_known_is_left(args: Any) -> None:
    assert decoders().of([LAYER], (torch.ones(2, 37, 4), *args), {}) is None


@pytest.mark.parametrize("are_causal", [(True, True), (False, False), (True,), (True, False, False)])
def test_layers_that_are_left(are_causal: tuple[bool, ...]) -> None:
    found = decoders()
    found.lengths.never = None
    assert found.of([Layer(*are_causal)], (torch.ones(2, 37, 4), None, torch.ones(2, 19, 4)), {}) is None
    assert found.lengths.never is True
