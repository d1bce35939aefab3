"""Random runs of Sentence Transformers' trainers, of embeddings, of cross encoders and of sparse encoders, for
tools/random_trainers.py. A run's `data` is its loss, and says what its rows are."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from random_models import VOCABULARY

EMBEDDINGS = {
    "MultipleNegativesRankingLoss": "pairs",
    "MultipleNegativesSymmetricRankingLoss": "pairs",
    "CachedMultipleNegativesRankingLoss": "pairs",
    "CachedMultipleNegativesSymmetricRankingLoss": "pairs",
    "MegaBatchMarginLoss": "pairs",
    "MatryoshkaLoss": "pairs",
    "Matryoshka2dLoss": "pairs",
    "AdaptiveLayerLoss": "pairs",
    "GISTEmbedLoss": "pairs",
    "CachedGISTEmbedLoss": "pairs",
    "TripletLoss": "triplets",
    "CoSENTLoss": "scored",
    "AnglELoss": "scored",
    "CosineSimilarityLoss": "scored",
    "ContrastiveLoss": "binary",
    "OnlineContrastiveLoss": "binary",
    "SoftmaxLoss": "binary",
    "BatchAllTripletLoss": "labelled",
    "BatchSemiHardTripletLoss": "labelled",
    "MSELoss": "vectors",
}
CROSS = {
    "BinaryCrossEntropyLoss": "binary",
    "MSELoss": "scored",
    "MultipleNegativesRankingLoss": "pairs",
    "CachedMultipleNegativesRankingLoss": "pairs",
    "LambdaLoss": "listed",
    "ListNetLoss": "listed",
}
SPARSE = {"SpladeLoss": "pairs", "CachedSpladeLoss": "pairs"}
#: kind -> its losses; the class of Transformers that is beneath, as random_models has it for tasks.
KINDS: dict[str, tuple[dict[str, str], tuple[str, str]]] = {
    "embeddings": (EMBEDDINGS, ("MASKED_LM", "AutoModel")),
    "cross": (CROSS, ("SEQUENCE_CLASSIFICATION", "AutoModelForSequenceClassification")),
    "sparse": (SPARSE, ("MASKED_LM", "AutoModelForMaskedLM")),
}
#: Options of these trainers.
OPTIONS: dict[str, tuple[float, list[Any]]] = {
    "batch_sampler": (0.3, ["no_duplicates", "batch_sampler"]),
    "prompts": (0.2, ["w5 w6 w7 "]),
    "warmup_steps": (0.2, [2]),
}


def text(rng: random.Random, least: int = 1, most: int = 20) -> str:
    return " ".join(f"w{rng.randrange(3, VOCABULARY)}" for _ in range(rng.randint(least, most)))


def rows_of(kind: str, count: int, rng: random.Random) -> list[dict[str, Any]]:
    def row(number: int) -> dict[str, Any]:
        if kind == "listed":
            return {"query": text(rng), "docs": [text(rng) for _ in range(3)], "labels": [1.0, 0.0, float(number % 2)]}
        if kind == "labelled":
            return {"sentence": text(rng), "label": number % 3}
        if kind == "vectors":
            return {"sentence": text(rng), "label": [rng.random() for _ in range(32)]}
        found: dict[str, Any] = {"anchor": text(rng), "positive": text(rng)}
        if kind == "triplets":
            found["negative"] = text(rng)
        if kind == "scored":
            found["score"] = rng.random()
        if kind == "binary":
            found["label"] = number % 2
        return found

    return [row(number) for number in range(count)]


def trainer_of(run: Any, folder: Path, dtype: torch.dtype, rng: random.Random, config: Callable[[Any], Any]) -> Any:
    """config: makes a trainer's arguments of their class."""
    import sentence_transformers as st
    from datasets import Dataset

    device = "cpu" if run.options.get("use_cpu") else "cuda"
    kind = KINDS[run.kind][0][run.data]
    rows = Dataset.from_list(rows_of(kind, 24, rng))
    if run.kind == "cross":
        model: Any = st.CrossEncoder(str(folder), num_labels=1, max_length=32, device=device)
        trainer, args = st.CrossEncoderTrainer, st.CrossEncoderTrainingArguments
    elif run.kind == "sparse":
        from sentence_transformers.sparse_encoder.models import MLMTransformer, SpladePooling

        model = st.SparseEncoder(
            modules=[MLMTransformer(str(folder), max_seq_length=32), SpladePooling()], device=device
        )
        trainer, args = st.SparseEncoderTrainer, st.SparseEncoderTrainingArguments
    else:
        model = embedder(folder, rng.choice(["mean", "cls", "max", "lasttoken", "weightedmean"]), device)
        trainer, args = st.SentenceTransformerTrainer, st.SentenceTransformerTrainingArguments
    model = model.to(dtype)
    return trainer(
        model=model,
        args=config(args),
        train_dataset=rows,
        eval_dataset=rows.select(range(5)),
        loss=loss_of(run, model, folder, device, dtype),
    )


def embedder(folder: Path, pooling: str, device: str) -> Any:
    import sentence_transformers as st
    from sentence_transformers import models

    beneath = models.Transformer(str(folder), max_seq_length=32)
    parts = [beneath, models.Pooling(beneath.get_word_embedding_dimension(), pooling_mode=pooling)]
    return st.SentenceTransformer(modules=parts, device=device)


def loss_of(run: Any, model: Any, folder: Path, device: str, dtype: torch.dtype) -> Any:
    more = {"mini_batch_size": 2} if "Cached" in run.data else {}
    if run.kind == "cross":
        from sentence_transformers.cross_encoder import losses as of_cross

        return getattr(of_cross, run.data)(model, **more)
    if run.kind == "sparse":
        from sentence_transformers.sparse_encoder import losses as of_sparse

        inner = of_sparse.SparseMultipleNegativesRankingLoss(model)
        weights = {"document_regularizer_weight": 3e-3, "query_regularizer_weight": 5e-3}
        return getattr(of_sparse, run.data)(model, inner, **weights, **more)
    from sentence_transformers import losses

    made, width = getattr(losses, run.data), model.get_sentence_embedding_dimension()
    if "Matryoshka" in run.data:
        return made(model, losses.MultipleNegativesRankingLoss(model), matryoshka_dims=[width, width // 2])
    if run.data == "AdaptiveLayerLoss":
        return made(model, losses.MultipleNegativesRankingLoss(model))
    if "GIST" in run.data:
        return made(model, embedder(folder, "mean", device).to(dtype), **more)
    if run.data == "SoftmaxLoss":
        return made(model, width, 2)
    return made(model, **more)
