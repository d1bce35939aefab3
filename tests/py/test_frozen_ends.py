"""Embeddings and output heads, whose weights others than their own calls may read: which are kept in bfloat16 while a
Trainer trains (see test_frozen_bf16.py), and which stay."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import bastile
import trl_runs
from bastile.models import frozen_bf16
from bastile.models.readers import may_read_ends
from bastile.ops._narrow import narrow, widen
from looks import AsksForItsType, Looks
from oracle import assert_same_bits
from test_frozen_bf16 import LAYERS, adapters, narrowed_in


@pytest.fixture(autouse=True)
def taken_out() -> Iterator[None]:
    yield
    bastile.reset()


class Reads(Looks):
    """The weight of a head."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        assert model.get_output_embeddings().weight.dtype is torch.float32
        super().on_step_end(args, state, control, model, **more)


def test_ends_that_others_code_may_read(tmp_path: Path) -> None:
    """A callback's, or a trainer's that is somebody's own; code that cannot be seen may."""
    bastile.apply()
    trainer = trl_runs.trainer(
        "sft", trl_runs.saved_as_loaded("qwen3", tmp_path), tmp_path, bf16=True, peft_config=adapters()
    )
    reads = Reads(narrowed_in)
    trainer.add_callback(reads)
    trainer.train()
    assert reads.seen == [LAYERS]

    own = type(trainer)
    assert not may_read_ends(trainer)
    assert not may_read_ends(Looks())
    assert may_read_ends(Reads())
    for file in (__name__, "nowhere"):
        trainer.__class__ = type("Own", (own,), {"__module__": file})
        assert may_read_ends(trainer)
    trainer.__class__ = type("Own", (own,), {"__module__": "looks"})
    assert not may_read_ends(trainer)


def ends_of(model: nn.Module) -> list[set[str]]:
    """Each weight's, by their paths."""
    names = {id(module): name for name, module in model.named_modules()}
    return [{names[id(end)] for end in group} for group in frozen_bf16._ends(model, lambda p: True)]


SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def test_ends_of_models() -> None:
    both_ways = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))
    parts = {f"bert.embeddings.{name}_embeddings" for name in ("word", "position", "token_type")}
    assert set.union(*ends_of(both_ways)) == parts | {"cls.predictions.decoder"}
    assert {"bert.embeddings.word_embeddings", "cls.predictions.decoder"} in ends_of(both_ways)

    seq2seq = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2)
    )
    assert {"shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"} in ends_of(seq2seq)

    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    assert ends_of(llama) == [{"model.embed_tokens"}, {"lm_head"}]
    llama.another = nn.Linear(16, 64)
    llama.another.weight = llama.lm_head.weight
    assert ends_of(llama) == [{"model.embed_tokens"}]
    llama.lm_head.register_forward_hook(lambda *_: None)
    del llama.another
    assert ends_of(llama) == [{"model.embed_tokens"}]
    llama.model.embed_tokens.max_norm = 1.0
    assert ends_of(llama) == []


class ReadsItsEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_words, self.embed_places = nn.Embedding(8, 4), nn.Embedding(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed_places(x) @ self.embed_words.weight.t()


class Adds(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


def test_ends_that_stay() -> None:
    """Where the model asks of what type its first weight is, which an embedding's is; where a weight is read; where a
    call does more than read."""
    assert ends_of(AsksForItsType(transformers.LlamaConfig(**SMALL))) == [{"lm_head"}]
    assert ends_of(ReadsItsEmbedding()) == [{"embed_places"}]
    assert ends_of(nn.Sequential(Adds(8, 4))) == []
    embedding = nn.Embedding(8, 4)
    embedding.forward = lambda input: input  # type: ignore[method-assign]
    assert ends_of(nn.Sequential(embedding)) == []


def test_an_embedding_that_is_narrow() -> None:
    """It is of its class, can be copied and saved, and is what it was when it is wide again."""
    model = trl_runs.MODELS["gemma2"]
    embedding = model[1](model[0](**{**trl_runs.SIZES, "hidden_size": 40})).get_input_embeddings()
    embedding.weight.data = embedding.weight.data.bfloat16().float()
    kind, ids = type(embedding), torch.tensor([[3, 5, 3]])
    wanted, weight = embedding(ids), embedding.weight.clone()
    narrow(embedding)
    assert embedding.weight.dtype is torch.bfloat16
    assert isinstance(embedding, kind)
    for one in (embedding, copy.deepcopy(embedding), pickle.loads(pickle.dumps(embedding))):
        assert_same_bits(one(ids), wanted)
        widen(one)
        assert type(one) is kind
        assert_same_bits(one.weight, weight)
        assert_same_bits(one(ids), wanted)
