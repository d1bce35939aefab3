"""Embeddings by Sentence Transformers' trainer, whose usual loss goes forward several times before it goes backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import bastile
from graphing import allow_graphs
from trl_runs import tokenizer, words

pytest.importorskip("sentence_transformers")

_ALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
#: Model, and what a step's passes run: each layer once a pass.
MODELS = {
    "Bert": (_ALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "layer_norm", "mean"),
    "Qwen3": (_ALL | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}, "qk_norm_rope", "lasttoken"),
}
STEPS = 12


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch, "cpu")


def run(name: str, loss: str, folder: Path) -> tuple[list[tuple[float, float]], Any]:
    """Each step's loss and gradient's norm."""
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers import losses, models

    told, saved = tokenizer(), folder / "model"
    told.add_special_tokens({"cls_token": "<cls>", "sep_token": "<sep>"})
    torch.manual_seed(0)
    values, _, pooling = MODELS[name]
    config = getattr(transformers, f"{name}Config")(vocab_size=len(told), **values)
    getattr(transformers, f"{name}Model")(config).save_pretrained(saved)
    told.save_pretrained(saved)
    parts = [models.Transformer(str(saved), max_seq_length=32), models.Pooling(32, pooling_mode=pooling)]
    model = st.SentenceTransformer(modules=parts, device="cpu")
    rows = [{"anchor": words(n, 4 + n % 3), "positive": words(n + 50, 3 + n % 4)} for n in range(64)]
    trainer = st.SentenceTransformerTrainer(
        model=model,
        args=st.SentenceTransformerTrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            optim="sgd",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_list(rows),
        loss=losses.MultipleNegativesRankingLoss(model)
        if loss == "usual"
        else losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4),
    )
    bastile.report(reset=True)
    trainer.train()
    logged = [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]
    return logged, bastile.report()


@pytest.mark.parametrize("loss", ["usual", "cached"])
@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_of_stock(name: str, loss: str, tmp_path: Path) -> None:
    stock, _ = run(name, loss, tmp_path / "stock")
    bastile.apply(cuda_graphs=True)
    ours, report = run(name, loss, tmp_path / "ours")
    assert len(ours) == len(stock) == STEPS
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert report.ran(MODELS[name][1]) > 0
    # Of two passes a step, but for the first of each kind; "cached" goes forward again, and then through one at a time.
    assert report.ran("cuda_graphs") >= STEPS
    aside = {why for line in report for why in line.aside if line.operator == "cuda_graphs"}
    assert aside <= {"a step before has not had its backward pass yet"}
