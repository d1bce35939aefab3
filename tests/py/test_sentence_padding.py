"""Sentence Transformers' trainers on batches with padding: stock's numbers, without it in the layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import bastile
from bastile.models import padding, sdpa, side_by_side, small

pytest.importorskip("trl")  # as which it has a tokenizer and words
sentences: Any = pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")
from sentence_transformers.cross_encoder import losses as losses_of_pairs  # noqa: E402
from sentence_transformers.sentence_transformer import losses as losses_of_sentences  # noqa: E402

import trl_runs  # noqa: E402
from test_graphs_masked import _BERT  # noqa: E402

MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertModel(
        transformers.BertConfig(**_BERT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ),
    "qwen3": lambda: small.small_model("qwen3").model,
}


@pytest.fixture(autouse=True)
def any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "TYPES", (*sdpa.TYPES, torch.float32))
    monkeypatch.setattr(side_by_side, "_LEAST_STEP", 2)


def model_of(folder: Path, name: str, side: str = "right", pooling: Any = "mean", **more: Any) -> Any:
    torch.manual_seed(0)
    model, tokenizer = MODELS[name](), trl_runs.tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    modules = sentences.sentence_transformer.modules
    encoder = modules.Transformer(str(folder / name))
    encoder.tokenizer.padding_side = side
    return sentences.SentenceTransformer(modules=[encoder, modules.Pooling(32, pooling, **more)], device="cpu")


def pairs() -> Any:
    import datasets

    texts = [trl_runs.words(i, 2 + 3 * (i % 4)) for i in range(24)]
    return datasets.Dataset.from_dict({"anchor": texts[:12], "positive": texts[12:]})


def trained(model: Any, folder: Path) -> list[float]:
    torch.manual_seed(0)
    trainer = sentences.SentenceTransformerTrainer(
        model,
        sentences.SentenceTransformerTrainingArguments(
            str(folder),
            per_device_train_batch_size=4,
            max_steps=4,
            logging_steps=1,
            learning_rate=1e-3,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=pairs(),
        loss=losses_of_sentences.MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken", ("mean", "weightedmean")])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_pairs_of_sentences(name: str, side: str, pooling: Any, tmp_path: Path) -> None:
    """Two passes a step, of the second step's on without padding; the first token of a row that begins with padding is
    what some poolings have read."""
    want = trained(model_of(tmp_path, name, side, pooling), tmp_path)
    bastile.apply()
    got = trained(model_of(tmp_path, name, side, pooling), tmp_path)
    passes = bastile.report().ran("padding_free")
    assert got == pytest.approx(want, abs=2e-5)
    assert bool(passes) == (side == "right" or pooling != "cls")


def rows(model: Any) -> Any:
    """What is said of them in a pass."""
    found: list[Any] = []
    inner = model[0].model
    stock = inner.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found.append(padding._here.labels)
        return stock(*args, **kwargs)

    inner.forward = forward
    ids = torch.randint(5, 20, (2, 5))
    model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return found[0]


class Other(sentences.sentence_transformer.modules.Pooling):  # type: ignore[misc, name-defined]
    def forward(self, features: Any, **kwargs: Any) -> Any:
        features["sentence_embedding"] = features["token_embeddings"].mean(1)
        return features


def evaluated(model: Any) -> None:
    model.eval()


def pooled_otherwise(model: Any) -> None:
    model[1].__class__ = Other


def of_another_release(model: Any) -> None:
    """Whose pooling has the same name, and other code."""
    model[1].__class__ = type("Pooling", (Other,), {"__module__": "sentence_transformers.models.Pooling"})


def of_tokens(model: Any) -> None:
    modules = sentences.sentence_transformer.modules
    model.add_module("2", modules.Normalize(module_input_name="token_embeddings"))


def alone(model: Any) -> None:
    del model._modules["1"]


@pytest.mark.parametrize("change", [evaluated, pooled_otherwise, of_another_release, of_tokens, alone])
def test_what_may_read_other_rows(change: Callable[[Any], None], tmp_path: Path) -> None:
    bastile.apply()
    model = model_of(tmp_path, "bert").train()
    assert rows(model) is not None
    model = model_of(tmp_path, "bert").train()
    change(model)
    assert rows(model) is None


def test_embeddings_are_stock_s(tmp_path: Path) -> None:
    """And are taken out again."""
    model = model_of(tmp_path, "bert")
    texts = [trl_runs.words(i, 2 + 3 * (i % 4)) for i in range(6)]
    want = model.encode(texts, convert_to_tensor=True)
    stock = type(model).forward
    bastile.apply()
    assert type(model).forward is not stock
    for _ in range(2):
        torch.testing.assert_close(model.encode(texts, convert_to_tensor=True), want, rtol=1e-5, atol=1e-6)
    bastile.reset()
    assert type(model).forward is stock


def test_cross_encoders(tmp_path: Path) -> None:
    """Which are Transformers' classifiers."""
    import datasets

    torch.manual_seed(0)
    values = {**_BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 1}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**values))
    tokenizer = trl_runs.tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "pairs")
    tokenizer.save_pretrained(tmp_path / "pairs")
    data = datasets.Dataset.from_dict({**{n: pairs()[n] for n in ("anchor", "positive")}, "label": [0.0, 1.0] * 6})

    def losses() -> list[float]:
        torch.manual_seed(0)
        encoder = sentences.CrossEncoder(str(tmp_path / "pairs"), device="cpu")
        arguments = sentences.cross_encoder.CrossEncoderTrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, max_steps=4, logging_steps=1, learning_rate=1e-3,
            report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        loss = losses_of_pairs.BinaryCrossEntropyLoss(encoder)
        trainer = sentences.cross_encoder.CrossEncoderTrainer(encoder, arguments, train_dataset=data, loss=loss)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    want = losses()
    bastile.apply()
    got = losses()
    assert got == pytest.approx(want, abs=2e-5)
    assert bastile.report().ran("padding_free") >= 2
