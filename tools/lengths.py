"""Milliseconds and peak memory of a step of Transformers' Trainer on batches of ever new lengths, stock and with
bastile.apply(), on one GPU: shapes of published models, random weights, tokens and images.

    python tools/lengths.py [--only gemma4,qwen3_vl] [--batch 4] [--longest 768] [--same] [--no-graphs]

Each batch is as long as the longest of its rows, which have between an eighth of --longest and --longest tokens; rows
of models of images have one image each, of a size of its own. --same: all rows have --longest tokens, and images one
size. Decoders: adapters of rank 16 on all linear layers, float32 under autocast; without checkpointing. The others: all
weights, in float32 under autocast. Encoders: eight times as many rows, an eighth as long; classifiers, a masked
language model that is asked for every seventh token, and one whose embeddings of the first half of a batch are to be
nearest to those of the second, as Sentence Transformers trains them, with two forward passes before each backward pass.
Encoder-decoders: four times as many rows, half as long, and answers
of a quarter of the tokens that they answer; Whisper: transcripts of an eighth of the tokens. The mean of the steps
behind the untimed ones, for which nobody waits and which are not logged, and the median of a few for which a callback
waits. One process, stock first. Prints a JSON object a model as it goes. Needs peft and accelerate."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from encoders import LARGE, MODERN, QWEN3_VL_TOWER, ROBERTA, built, rope, with_adapters

import bastile
from bastile.sweep.trainer import clock
from families import widths

UNTIMED, WAITED = 30, 8  # steps in which lengths become few and graphs are captured; steps that a callback waits for
_ENCODERS = ("Bert", "Roberta", "ModernBert")
_MOST_PATCHES = 1 << 14
_KINDS = ["sliding_attention"] * 5 + ["full_attention"]
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
#: Gemma 3's tower of images.
_SIGLIP = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
    "image_size": 896, "patch_size": 14,
}  # fmt: skip


def texts(name: str, **values: Any) -> Any:
    return built(name, torch.bfloat16, **values)


def images() -> Any:
    text = widths(2048, 6144, 16, 8, 151936, 28, head_dim=128, **rope(24, 20, 20, mrope_interleaved=True))
    return built(
        "Qwen3VLForConditionalGeneration",
        torch.bfloat16,
        text_config=text,
        vision_config={
            **QWEN3_VL_TOWER,
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    )


def windows() -> Any:
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}
    text = widths(2048, 11008, 16, 2, 151936, 36, **rope(16, 24, 24))
    return built("Qwen2_5_VLForConditionalGeneration", torch.bfloat16, text_config=text, vision_config=tower)


#: In brackets whose shapes they are.
MODELS: dict[str, Callable[[], Any]] = {
    "gemma3_text": partial(texts, "Gemma3ForCausalLM", **widths(1152, 6912, 4, 1, 262144, 26, **_GEMMA)),  # Gemma 3 1B
    "gemma4": partial(
        texts, "Gemma4ForCausalLM",
        **widths(2560, 10240, 8, 2, 262144, 42, **_GEMMA, layer_types=_KINDS * 7, num_kv_shared_layers=18),
    ),  # Gemma 4 E4B
    "gemma3": partial(
        texts, "Gemma3ForConditionalGeneration",
        text_config=widths(2560, 10240, 8, 4, 262208, 34, **_GEMMA, sliding_window=1024), vision_config=_SIGLIP,
    ),  # Gemma 3 4B, of texts alone
    "gemma4_whole": partial(
        texts, "Gemma4ForConditionalGeneration", vision_config=None, audio_config=None,
        text_config=widths(2560, 10240, 8, 2, 262144, 42, **_GEMMA, layer_types=_KINDS * 7, num_kv_shared_layers=18),
    ),  # Gemma 4 E4B, as its checkpoint is loaded, without its towers
    "qwen3_5": partial(
        texts, "Qwen3_5ForCausalLM", **widths(1024, 3584, 8, 2, 248320, 24, head_dim=256, tie_word_embeddings=True)
    ),  # Qwen3.5 0.8B
    "lfm2": partial(
        texts, "Lfm2ForCausalLM",
        **widths(2048, 12288, 32, 8, 65536, 16, full_attn_idxs=[2, 5, 8, 10, 12, 14], tie_word_embeddings=True),
    ),  # LFM2 1.2B
    "qwen3_vl": images,  # Qwen3-VL 2B
    "qwen2_5_vl": windows,  # Qwen2.5-VL 3B
    "bert": partial(built, "BertForSequenceClassification"),  # BERT base
    "bert_embeddings": partial(built, "BertModel"),
    "bert_large": partial(built, "BertForSequenceClassification", **LARGE),
    "roberta": partial(built, "RobertaForMaskedLM", **ROBERTA),  # RoBERTa large
    "modernbert": partial(built, "ModernBertForSequenceClassification", **MODERN),  # ModernBERT large
    "t5": partial(
        built, "T5ForConditionalGeneration", d_model=768, d_kv=64, d_ff=2048, num_layers=12, num_heads=12,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    ),  # FLAN-T5 base
    "bart": partial(built, "BartForConditionalGeneration"),  # BART large
    "whisper": partial(
        built, "WhisperForConditionalGeneration", d_model=768, encoder_layers=12, decoder_layers=12,
        encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
    ),  # Whisper small
}  # fmt: skip


class Batches:
    """A collator: a batch of the numbers of its rows, each row of its own length, the same in every run."""

    def __init__(self, config: Any, rows: int, longest: int, same: bool) -> None:
        self.config, self.longest, self.same = config, longest, same
        vision = config.vision_config if hasattr(config, "vision_start_token_id") else None  # Qwen's
        self.patches = None if vision is None else torch.randn(_MOST_PATCHES, 6 * vision.patch_size**2)
        self.rows = [self.row(torch.Generator().manual_seed(number)) for number in range(rows)]

    def row(self, drawn: torch.Generator) -> tuple[torch.Tensor, tuple[int, int]]:
        """Tokens, and how many patches an image before them is high and wide, if there is one."""
        count = self.longest if self.same else int(torch.randint(self.longest // 8, self.longest, (), generator=drawn))
        most = min(self.config.get_text_config().vocab_size, 60000)  # below those that stand for images
        ids = torch.randint(10, most, (count,), generator=drawn)
        if self.patches is None:
            return ids, (0, 0)
        high, wide = (26, 26) if self.same else (2 * torch.randint(8, 19, (2,), generator=drawn)).tolist()
        start = torch.tensor([self.config.vision_start_token_id])
        return torch.cat([start, torch.full((high * wide // 4,), self.config.image_token_id), ids]), (high, wide)

    def __call__(self, rows: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        each, pictures = zip(*[self.rows[row["number"]] for row in rows], strict=True)
        ids = torch.nn.utils.rnn.pad_sequence(list(each), True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in each], True)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        if self.patches is not None:
            batch["pixel_values"] = self.patches[: sum(high * wide for high, wide in pictures)].clone()
            batch["image_grid_thw"] = torch.tensor([(1, *size) for size in pictures])
            batch["mm_token_type_ids"] = (ids == self.config.image_token_id).int()
        return batch


class OfEncoders(Batches):
    """Rows with a class each."""

    def __call__(self, rows: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(rows)
        return {**batch, "labels": batch["input_ids"][:, 0] % 2}


class OfMasked(Batches):
    """Rows of which every seventh token is asked for."""

    def __call__(self, rows: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(rows)
        is_asked = torch.arange(batch["labels"].shape[1]) % 7 == 3
        return {**batch, "labels": batch["labels"].masked_fill(~is_asked, -100)}


class OfAnswers(Batches):
    """Rows that are answered by the first quarter of their tokens."""

    def __call__(self, rows: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(rows)
        answers = [self.rows[row["number"]][0] for row in rows]
        answers = [ids[: len(ids) // 4] for ids in answers]
        return {**batch, "labels": torch.nn.utils.rnn.pad_sequence(answers, True, -100)}


class OfSound(Batches):
    """Half a minute each, and what is said in it."""

    def __init__(self, config: Any, *args: Any) -> None:
        super().__init__(config, *args)
        self.sound = torch.randn(64, config.num_mel_bins, 3000)

    def __call__(self, rows: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        return {"input_features": self.sound[: len(rows)].clone(), "labels": super().__call__(rows)["labels"]}


class OfPairs(transformers.Trainer):
    """Trains embeddings: of a pair, each is to be nearer to the other than to the rest of the batch."""

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
        halves = zip(inputs["input_ids"].chunk(2), inputs["attention_mask"].chunk(2), strict=True)
        one, other = [self.embedded(model, *half) for half in halves]
        return torch.nn.functional.cross_entropy(20 * one @ other.t(), torch.arange(len(one), device=one.device))

    def embedded(self, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=-1)


def run(made: Callable[[], Any], name: str, options: argparse.Namespace) -> dict[str, Any]:
    if name == "bastile":
        without = dict.fromkeys(filter(None, options.without.split(",")), False)
        bastile.apply(cuda_graphs=False if options.no_graphs else "auto", **without)
    bastile.report(reset=True)
    times: list[float] = []
    steps = UNTIMED + WAITED + options.steps
    try:
        model = made()
        collator, more, shorter = Batches, 1, 1
        if type(model).__name__.startswith(_ENCODERS):
            is_masked = type(model).__name__.endswith("MaskedLM")
            collator, more, shorter = OfMasked if is_masked else OfEncoders, 8, 8
        elif type(model).__name__.startswith("Whisper"):
            collator, more, shorter = OfSound, 4, 8
        elif model.config.is_encoder_decoder:
            collator, more, shorter = OfAnswers, 4, 2
        else:
            model = with_adapters(model)
        batch, longest = more * options.batch, options.longest // shorter
        model.train()
        with tempfile.TemporaryDirectory() as folder:
            trainer = (OfPairs if type(model).__name__ == "BertModel" else transformers.Trainer)(
                model,
                transformers.TrainingArguments(
                    folder,
                    per_device_train_batch_size=batch,
                    max_steps=steps,
                    bf16=True,
                    logging_steps=1,
                    report_to="none",
                    save_strategy="no",
                    disable_tqdm=True,
                    remove_unused_columns=False,
                ),
                train_dataset=[{"number": number} for number in range(steps * batch)],
                data_collator=collator(model.config, steps * batch, longest, options.same),
            )
            trainer.add_callback(clock(times, torch.device("cuda"), UNTIMED, WAITED, options.steps))
            trainer.train()
        said = str(bastile.report()) if name == "bastile" else ""
    finally:
        bastile.reset()
    *waited, queued = times[UNTIMED:]
    return {
        "queued_seconds": queued,
        "median_seconds": statistics.median(waited),
        "first_seconds": sum(times[:UNTIMED]),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][:12],
        "report": said,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODELS), help="which models, with commas between")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--longest", type=int, default=768, help="tokens of the longest row")
    parser.add_argument("--steps", type=int, default=32, help=f"that are timed, after {UNTIMED + WAITED} others")
    parser.add_argument("--same", action="store_true", help="all batches of one length")
    parser.add_argument("--no-graphs", action="store_true", help="with bastile, but without CUDA graphs")
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--without", default="", metavar="OPERATORS", help="of bastile.apply, with commas between")
    options = parser.parse_args()
    for kind in options.only.split(","):
        told = ("batch", "longest", "same", "without")
        row: dict[str, Any] = {"type": kind, **{k: getattr(options, k) for k in told}}
        for name in ["bastile"] if options.no_stock else ["stock", "bastile"]:
            try:
                row[name] = run(MODELS[kind], name, options)
            except Exception as error:  # whatever a model's own code raises here: the others are still wanted
                row[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            print(kind, name, {**row[name], "report": ""}, file=sys.stderr, flush=True)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
