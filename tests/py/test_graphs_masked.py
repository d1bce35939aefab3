"""Batches of encoders of ever new lengths: padded to few, beneath a mask."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import bastile
from bastile.graphs.masked import Masks
from bastile.graphs.stack import Stack, _stacks
from bastile.models import sdpa
from conftest import gradients, older_than
from graphing import DEVICE, allow_graphs
from test_chunked_attention import assert_near
from test_graphs_lengths import LENGTHS, PADDED

_BERT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 97}
_BART = {"d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 97}
_ROPE = {"pad_token_id": 0, "max_position_embeddings": 64}
#: Model -> its config's values.
TYPES: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": _BERT,
    "RobertaForMaskedLM": {**_BERT, "pad_token_id": 1},
    "XLMRobertaForMaskedLM": {**_BERT, "pad_token_id": 1},
    "ElectraForMaskedLM": {**_BERT, "embedding_size": 32},
    "DistilBertForMaskedLM": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": 97},
    "ModernBertForMaskedLM": {**_BERT, **_ROPE, "local_attention": 8, "global_attn_every_n_layers": 2},
    "EsmForMaskedLM": {**_BERT, "pad_token_id": 1, "mask_token_id": 2, "position_embedding_type": "rotary"},
    "NomicBertModel": {**_BERT, **_ROPE},
    "BartForConditionalGeneration": {**_BART, "decoder_start_token_id": 2},
    "T5EncoderModel": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4, "vocab_size": 97},
}
#: So many of these steps come at a kind's first time, or a second time after the larger one has taken its memory.
FIRST = 4


@pytest.fixture(autouse=True, params=[False, True], ids=["masks", "segments"])
def graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a number for each pair of tokens, and with where sequences are (models/sdpa.py), of float32 too."""
    allow_graphs(monkeypatch)
    if request.param:
        monkeypatch.setattr(sdpa, "TYPES", (*sdpa.TYPES, torch.float32))


def made(name: str, types: dict[str, dict[str, Any]] = TYPES, **more: Any) -> Any:
    """Without dropout."""
    cls = getattr(transformers, name, None)
    if cls is None:
        pytest.skip("this Transformers has no such model")
    torch.manual_seed(0)
    config = cls.config_class(**types[name], **more)
    for dropout in [each for each in config.to_dict() if "drop" in each]:
        if isinstance(getattr(config, dropout), float):
            setattr(config, dropout, 0.0)
    model = cls(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model


KEPT: list[Any] = []


def trained(
    model: nn.Module, graphs: bool, masked: bool = True, lengths: Sequence[int] = LENGTHS, **more: Any
) -> list[Any]:
    bastile.apply(cuda_graphs=graphs)
    bastile.report(reset=True)
    model = copy.deepcopy(model).to(DEVICE).train()
    found = []
    for step, length in enumerate(lengths):
        drawn = torch.Generator().manual_seed(step)
        ids = torch.randint(5, 90, (2, length), generator=drawn)
        given = {"input_ids": ids}
        if masked:
            given["attention_mask"] = torch.ones_like(ids)
            given["attention_mask"][1, length - step % 3 :] = 0
        out = model(**{name: tensor.to(DEVICE) for name, tensor in given.items()}, **more)
        hidden = out[0]
        assert hidden.shape[1] == length
        seen = hidden if not masked else hidden[given["attention_mask"].bool().to(DEVICE)]
        loss = seen.square().mean()
        loss.backward()
        found.append((loss.detach(), gradients(model)))
        model.zero_grad()
    KEPT.append(model)
    return found


def of_encoders() -> tuple[Stack, Any]:
    """The stack that is padded, and the report's line of it."""
    lines = [line for line in bastile.report() if line.operator == "cuda_graphs"]
    [(module, stack)] = [(module, each) for module, each in _stacks.items() if each.masks.lengths._seen]
    [line] = [line for line in lines if line.where.endswith(f".{type(module).__name__}")]
    return stack, line


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "no mask"])
@pytest.mark.parametrize("name", TYPES)
def test_the_numbers_of_steps_without_graphs(name: str, masked: bool) -> None:
    """Where nothing is masked the layers are given no mask, and get one."""
    if older_than("5.17") and name.startswith(("Modern", "Esm", "Bart", "T5")):
        pytest.skip("its attention has code of its own there, or does not say that it is not causal")
    model = made(name)
    want = trained(model, False, masked)
    got = trained(model, True, masked)
    for mine, theirs in zip(got, want, strict=True):
        assert_near(mine, theirs, 1e-5)
    stack, line = of_encoders()
    assert stack.masks.lengths.never is False
    assert not line.aside
    assert line.ran >= PADDED - FIRST
    assert {key[1][0][1] for key in stack.captured} <= {16, 32}


def test_layers_in_one_graph() -> None:
    """The padding goes from layer to layer, and is cut off behind the last one alone."""
    trained(made("BertForMaskedLM"), True)
    stack, _ = of_encoders()
    assert stack.captured
    assert all(len(captured.runs) == 1 for captured in stack.captured.values())


def test_batches_of_which_nothing_is_masked_are_no_kind_of_their_own() -> None:
    """One of three; nor is one with a mask that is as long by itself as others are when they are padded."""
    trained(made("BertForMaskedLM"), True, lengths=[*LENGTHS, 16, 32, 16, 32])
    stack, line = of_encoders()
    assert len(stack.captured) == 2
    assert line.ran >= PADDED + 4 - FIRST


def test_eager_attention_is_left() -> None:
    model = made("BertForMaskedLM", attn_implementation="eager")
    want, got = (trained(model, graphs) for graphs in (False, True))
    for mine, theirs in zip(got, want, strict=True):
        assert_near(mine, theirs, 1e-6)
    assert not any(stack.masks.lengths._seen for stack in _stacks.values())


def test_what_single_layers_have_made_is_not_padded() -> None:
    model = made("BertForMaskedLM")
    want, got = (trained(model, graphs, output_hidden_states=True) for graphs in (False, True))
    for mine, theirs in zip(got, want, strict=True):
        assert_near(mine, theirs, 1e-6)
    assert not any(stack.masks.lengths._seen for stack in _stacks.values())


# ---- what is padded, and how ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    is_causal = False

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.proj = nn.Linear(4, 4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, hidden_states: Any, attention_mask: Any = None, position_embeddings: Any = None, **_: Any) -> Any:
        return hidden_states


def masks() -> Masks:
    found = Masks()
    for length in range(1, 10):
        assert found.of([Layer()], (torch.ones(2, length, 4), None), {}) is None or length == 9
    assert found.lengths.vary
    return found


def test_the_padding_is_masked() -> None:
    mask = torch.ones(2, 1, 37, 37, dtype=torch.bool)
    mask[1, ..., 30:] = False
    hidden, tables = torch.ones(2, 37, 4), (torch.ones(1, 37, 3), torch.ones(2, 37, 3))
    found = masks().of([Layer()], (hidden, mask), {"position_embeddings": tables})
    assert found is not None
    (longer, seen), named = found.longer((hidden, mask), {"position_embeddings": tables}, is_first=True)
    assert longer.shape == (2, 48, 4)
    assert [t.shape[1] for t in named["position_embeddings"]] == [48, 48]
    assert torch.equal(seen[..., :37, :37], mask)
    assert not seen[..., :37, 37:].any()
    assert seen[..., 37:, :].all()  # a row of which nothing is seen would be NaN
    again, same = found.longer((hidden, mask), {"position_embeddings": tables}, is_first=False)
    assert again[1] is seen
    assert same["position_embeddings"] is named["position_embeddings"]


def test_a_mask_that_has_been_written_to() -> None:
    mask, hidden = torch.ones(2, 1, 37, 37, dtype=torch.bool), torch.ones(2, 37, 4)
    found = masks().of([Layer()], (hidden, mask), {})
    assert found is not None
    before = found.longer((hidden, mask), {}, is_first=True)[0][1]
    mask[1, ..., 30:] = False
    after = found.longer((hidden, mask), {}, is_first=False)[0][1]
    assert torch.equal(after[..., :37, :37], mask)
    assert before[..., :37, :37].all()


@pytest.mark.parametrize("given", [((None,), {}), ((), {}), ((), {"attention_mask": None})])
def test_no_mask_becomes_one(given: Any) -> None:
    hidden = torch.ones(2, 37, 4)
    args, kwargs = (hidden, *given[0]), given[1]
    found = masks().of([Layer()], args, kwargs)
    assert found is not None
    longer, named = found.longer(args, kwargs, is_first=True)
    seen = named.get("attention_mask", longer[-1])
    assert seen[..., :37, :37].all()
    assert not seen[..., :37, 37:].any()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"attention_mask": torch.zeros(2, 1, 37, 37)},
        {"attention_mask": torch.ones(2, 1, 1, 37, dtype=torch.bool)},
        {"is_causal": True},
        {"height": 3},
        {"other": torch.ones(2, 37)},
        {"position_embeddings": (torch.ones(37, 3), torch.ones(37, 3))},
    ],
    ids=["added", "of one row", "causal", "a number", "another tensor", "other tables"],
)
def test_what_is_not_known_is_left(kwargs: dict[str, Any]) -> None:
    assert masks().of([Layer()], (torch.ones(2, 37, 4),), kwargs) is None


@pytest.mark.parametrize("why", ["causal", "says nothing", "mixes", "takes no mask"])
def test_layers_that_are_left(why: str) -> None:
    found, layer = masks(), Layer()
    found.lengths.never = None
    if why == "causal":
        layer.attention.is_causal = True  # type: ignore[misc]
    elif why == "says nothing":
        layer = nn.Sequential(nn.Linear(4, 4))  # type: ignore[assignment]
    elif why == "mixes":
        layer.conv = nn.Conv1d(4, 4, 3)
    else:
        layer = type("Other", (Layer,), {"forward": lambda self, hidden_states: hidden_states})()
    assert found.of([layer], (torch.ones(2, 37, 4),), {}) is None
    assert found.lengths.never is True
