"""Milliseconds and peak memory of a training step of encoders, encoder-decoders and models of images, stock and with
bastile.apply(), on one GPU: widths of published models, random weights, tokens and images.

    python tools/encoders.py [--only bert,t5] [--kernels 12]

Encoders and encoder-decoders as a Trainer with bf16=True trains them: float32 weights under autocast, of padded
batches. Models of images at a few of their text's layers and all of their tower's, in bfloat16 with PEFT's adapters
(r = 16, all linear layers, float32) under autocast. One process, stock first. Prints a JSON object a model as it goes,
with the kernels' groups and the longest of them; one that cannot run here says why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from bastile.sweep.model import fill, random_tokens
from families import compare, parser_of, step_with, widths

DEVICE = torch.device("cuda")
LARGE: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096
}  # fmt: skip
ROBERTA: dict[str, Any] = {"vocab_size": 50265, "max_position_embeddings": 514, **LARGE}
MODERN: dict[str, Any] = {**LARGE, "num_hidden_layers": 28, "intermediate_size": 2624}
_DISENTANGLED = {
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}
_FLAN = {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 24, "num_heads": 16}


def built(name: str, dtype: torch.dtype = torch.float32, **values: Any) -> Any:
    cls: Any = getattr(transformers, name)
    with torch.device(DEVICE):
        model = cls(cls.config_class(**values)).to(DEVICE, dtype).train()
    fill(model, 0)
    return model


def padded(batch: int, length: int) -> torch.Tensor:
    """A mask of rows that end at different places, the first at the last."""
    ends = length - torch.arange(batch, device=DEVICE) * 7 % (length // 3)
    return (torch.arange(length, device=DEVICE) < ends[:, None]).long()


def tokens_of(model: nn.Module, batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = random_tokens(model.config.vocab_size, batch, length, DEVICE, 1)  # type: ignore[union-attr, arg-type]
    return {"input_ids": ids, "attention_mask": padded(batch, length)}


def classifier(name: str, batch: int, length: int, **values: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    model = built(f"{name}ForSequenceClassification", **values)
    return model, {**tokens_of(model, batch, length), "labels": torch.arange(batch, device=DEVICE) % 2}


def masked(name: str, batch: int, length: int, **values: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A seventh of the tokens is asked for."""
    model = built(f"{name}ForMaskedLM", **values)
    given = tokens_of(model, batch, length)
    labels = torch.where(torch.arange(length, device=DEVICE) % 7 == 0, given["input_ids"], -100)
    return model, {**given, "labels": labels}


def translator(name: str, batch: int, length: int, answer: int, **values: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    model = built(f"{name}ForConditionalGeneration", **values)
    return model, {**tokens_of(model, batch, length), "labels": tokens_of(model, batch, answer)["input_ids"]}


def whisper(batch: int, **values: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    model = built("WhisperForConditionalGeneration", **values)
    drawn = torch.Generator(DEVICE).manual_seed(1)
    sound = torch.randn(batch, 128, 3000, device=DEVICE, generator=drawn)
    return model, {"input_features": sound, "labels": tokens_of(model, batch, 128)["input_ids"]}


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))


def images(name: str, batch: int, text: dict[str, Any], vision: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Rows of 768 tokens, of which 256 stand for an image of 1024 patches, or of 4096."""
    model = built(name, torch.bfloat16, text_config=text, vision_config=vision)
    config = model.config
    ids = random_tokens(140000, batch, 768, DEVICE, 1)
    ids[:, 10:266] = config.image_token_id
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    drawn = torch.Generator(DEVICE).manual_seed(1)
    if "image_size" in vision:
        size = vision["image_size"]
        given["pixel_values"] = torch.randn(batch, 3, size, size, device=DEVICE, generator=drawn)
        given["token_type_ids"] = (ids == config.image_token_id).int()
    else:
        ids[:, 9] = config.vision_start_token_id
        patch = config.vision_config.patch_size
        given["pixel_values"] = torch.randn(batch * 1024, 6 * patch * patch, device=DEVICE, generator=drawn)
        given["image_grid_thw"] = torch.tensor([[1, 32, 32]] * batch, device=DEVICE)
        given["mm_token_type_ids"] = (ids == config.image_token_id).int()
    return with_adapters(model), given


def rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 1e6, **more}}


QWEN3_VL_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}

#: In brackets whose widths they are.
MODELS: dict[str, Callable[[], tuple[Any, dict[str, torch.Tensor]]]] = {
    "bert": partial(classifier, "Bert", 32, 128, **LARGE),  # BERT large
    "bert_base": partial(classifier, "Bert", 16, 512),  # BERT base
    "roberta": partial(masked, "Roberta", 16, 256, **ROBERTA),
    "modernbert": partial(classifier, "ModernBert", 16, 512, **MODERN),  # ModernBERT large
    "deberta-v2": partial(classifier, "DebertaV2", 16, 256, vocab_size=128100, **_DISENTANGLED, **{
        **LARGE, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072
    }),  # DeBERTa v3 base
    "t5": partial(
        translator, "T5", 8, 512, 128, **_FLAN, feed_forward_proj="gated-gelu", decoder_start_token_id=0
    ),  # FLAN-T5 large
    "bart": partial(translator, "Bart", 8, 512, 128),  # BART large
    "whisper": partial(
        whisper, 8, d_model=1280, encoder_layers=8, decoder_layers=8, encoder_attention_heads=20,
        decoder_attention_heads=20, encoder_ffn_dim=5120, decoder_ffn_dim=5120, num_mel_bins=128, vocab_size=51866,
    ),  # Whisper large v3
    "qwen2_5_vl": partial(
        images, "Qwen2_5_VLForConditionalGeneration", 4,
        widths(3584, 18944, 28, 4, 152064, 7, **rope(16, 24, 24)),
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584},
    ),  # Qwen2.5-VL 7B
    "qwen3_vl": partial(
        images, "Qwen3VLForConditionalGeneration", 4,
        widths(4096, 12288, 32, 8, 151936, 8, head_dim=128, **rope(24, 20, 20, mrope_interleaved=True)),
        {**QWEN3_VL_TOWER, "out_hidden_size": 4096, "deepstack_visual_indexes": [1, 3, 5]},
    ),  # Qwen3-VL 8B
    "gemma3": partial(
        images, "Gemma3ForConditionalGeneration", 4,
        widths(2560, 10240, 8, 4, 262208, 7, head_dim=256),
        {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
         "image_size": 896, "patch_size": 14},
    ),  # Gemma 3 4B
}  # fmt: skip


def step_of(made: Callable[[], tuple[Any, dict[str, torch.Tensor]]]) -> tuple[Any, Any]:
    model, batch = made()

    def loss() -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return model(**batch).loss  # type: ignore[no-any-return]

    return model, step_with(model, loss)


def main(description: str | None, models: dict[str, Callable[[], tuple[Any, dict[str, Any]]]]) -> None:
    options = parser_of(description, models).parse_args()
    for name in options.only.split(","):
        compare({"type": name}, partial(step_of, models[name]), options)


if __name__ == "__main__":
    main(__doc__, MODELS)
