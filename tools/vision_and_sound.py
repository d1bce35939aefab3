"""Milliseconds and peak memory of a training step of models of images, sounds and documents, and of older families of
text, stock and with bastile.apply(), on one GPU: shapes of published models, random weights and inputs.

    python tools/vision_and_sound.py [--only vit,wav2vec2] [--kernels 12]

All weights, in float32 under autocast, as a Trainer with bf16=True trains them; models that answer questions about
images with PEFT's adapters (r = 16, all linear layers, float32) on bfloat16 weights, likewise under autocast. One
process, stock first. Prints a JSON object a model as it goes, with the kernels' groups and the longest of them; one
that cannot run here says why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from encoders import DEVICE, built, classifier, main, masked, tokens_of, with_adapters

from bastile.sweep.model import fill, random_tokens
from families import widths

Made = tuple[Any, dict[str, Any]]


def drawn(*size: int) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))


def classes(count: int, most: int = 2) -> torch.Tensor:
    return torch.arange(count, device=DEVICE) % most


def of_images(name: str, batch: int, *size: int, given: str = "pixel_values", **values: Any) -> Made:
    """A classifier of what has such a size."""
    return built(name, **values), {given: drawn(batch, *size), "labels": classes(batch)}


def of_pixels(name: str, batch: int, side: int, **values: Any) -> Made:
    labels = classes(batch * side * side).view(batch, side, side)
    return built(name, **values), {"pixel_values": drawn(batch, 3, side, side), "labels": labels}


def of_pairs(name: str, batch: int, side: int, length: int, **values: Any) -> Made:
    """Texts and images, each nearest to its own."""
    model = built(name, **values)
    ids = random_tokens(model.config.text_config.vocab_size, batch, length, DEVICE, 1)
    return model, {"input_ids": ids, "pixel_values": drawn(batch, 3, side, side), "return_loss": True}


def of_speech(name: str, batch: int, seconds: int, **values: Any) -> Made:
    """Transcribed, ten characters a second."""
    model = built(name, **values)
    labels = random_tokens(model.config.vocab_size - 1, batch, 10 * seconds, DEVICE, 1) + 1
    return model, {"input_values": drawn(batch, 16000 * seconds), "labels": labels}


def of_documents(name: str, batch: int, length: int, **values: Any) -> Made:
    model = built(name, **values)
    given = tokens_of(model, batch, length)
    boxes = torch.tensor([10, 20, 30, 40], device=DEVICE).repeat(batch, length, 1)
    labels = torch.where(given["attention_mask"] == 1, given["input_ids"] % 2, -100)
    return model, {**given, "bbox": boxes, "pixel_values": drawn(batch, 3, 224, 224), "labels": labels}


def of_text(name: str, batch: int, length: int, **values: Any) -> Made:
    """Full rows of a causal model, as packed by whoever continues a pretraining."""
    model = built(name, **values)
    ids = random_tokens(model.config.vocab_size, batch, length, DEVICE, 1)
    return model, {"input_ids": ids, "labels": ids}


def answers(name: str, batch: int, length: int, tokens: int, *size: int, **values: Any) -> Made:
    """Rows of which so many tokens stand for an image."""
    model = built(name, torch.bfloat16, **values)
    token = next(n for n in ("image_token_id", "image_token_index") if hasattr(model.config, n))
    token = getattr(model.config, token)
    ids = random_tokens(30000, batch, length, DEVICE, 1)
    ids[:, 1 : 1 + tokens] = token
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    given["pixel_values"] = drawn(batch, *size)
    if name.startswith("PaliGemma"):
        given["token_type_ids"] = (ids != token).long()
    return with_adapters(model), given


def of_captions(name: str, batch: int, side: int, length: int, **values: Any) -> Made:
    """Images, and texts that tell what is there."""
    model = built(name, **values)
    ids = random_tokens(30000, batch, length, DEVICE, 1)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return model, {**given, "pixel_values": drawn(batch, 3, side, side)}


def of_scans(encoder: str, decoder: str, batch: int, side: int, length: int, *of_both: dict[str, Any]) -> Made:
    """An encoder of images whose text a decoder writes."""
    configs = [
        getattr(transformers, f"{name}Config")(**values)
        for name, values in zip((encoder, decoder), of_both, strict=True)
    ]
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*configs)
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    with torch.device(DEVICE):
        model = transformers.VisionEncoderDecoderModel(config=config).to(DEVICE).train()
    fill(model, 0)
    labels = random_tokens(30000, batch, length, DEVICE, 1)
    return model, {"pixel_values": drawn(batch, 3, side, side), "labels": labels}


def of_boxes(name: str, batch: int, side: int, boxes: int, **values: Any) -> Made:
    model = built(name, **values)
    corner = torch.rand(boxes, 4, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)) * 0.4 + 0.1
    labels = [{"class_labels": classes(boxes, 5), "boxes": corner} for _ in range(batch)]
    return model, {"pixel_values": drawn(batch, 3, side, side), "labels": labels}


def of_questions(name: str, batch: int, length: int, tokens: int, *size: int, **values: Any) -> Made:
    """Rows of which so many tokens stand for a sound."""
    model = built(name, torch.bfloat16, **values)
    token = next(t for t in (getattr(model.config, n, None) for n in ("audio_token_id", "audio_token_index")) if t)
    ids = random_tokens(30000, batch, length, DEVICE, 1)
    ids[:, 1 : 1 + tokens] = token
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    given["input_features"] = drawn(batch, *size)
    if name.startswith("Qwen2Audio"):
        given["feature_attention_mask"] = torch.ones(batch, size[-1], dtype=torch.long, device=DEVICE)
    return with_adapters(model), given


#: As speech models are fine-tuned.
_TUNED = {
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
    **dict.fromkeys(("layerdrop", "mask_time_prob"), 0.0),
}
_LLAMA_VISION = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
_SMALL_SIGLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}

#: In brackets whose shapes they are.
MODELS: dict[str, Callable[[], Made]] = {
    "vit": partial(of_images, "ViTForImageClassification", 64, 3, 224, 224),  # ViT base
    "dinov2": partial(of_images, "Dinov2ForImageClassification", 64, 3, 224, 224, image_size=518, patch_size=14),
    "swin": partial(
        of_images, "SwinForImageClassification", 64, 3, 224, 224, embed_dim=128, depths=[2, 2, 18, 2],
        num_heads=[4, 8, 16, 32],
    ),  # Swin base
    "convnext": partial(of_images, "ConvNextForImageClassification", 64, 3, 224, 224),  # ConvNeXt tiny
    "videomae": partial(of_images, "VideoMAEForVideoClassification", 8, 16, 3, 224, 224),  # VideoMAE base
    "ast": partial(of_images, "ASTForAudioClassification", 16, 1024, 128, given="input_values"),  # AST base
    "segformer": partial(
        of_pixels, "SegformerForSemanticSegmentation", 8, 512, depths=[3, 4, 6, 3], hidden_sizes=[64, 128, 320, 512],
        decoder_hidden_size=768,
    ),  # SegFormer b2
    "clip": partial(of_pairs, "CLIPModel", 128, 224, 77),  # CLIP ViT-B/32
    "siglip": partial(
        of_pairs, "SiglipModel", 64, 224, 64, text_config=_SMALL_SIGLIP, vision_config=_SMALL_SIGLIP
    ),  # SigLIP base
    "wav2vec2": partial(
        of_speech, "Wav2Vec2ForCTC", 8, 10, ctc_loss_reduction="mean", **_TUNED
    ),  # wav2vec 2.0 base
    "wav2vec2_bert": partial(
        of_images, "Wav2Vec2BertForSequenceClassification", 8, 500, 160, given="input_features", num_hidden_layers=12,
        **_TUNED,
    ),  # half of w2v-BERT 2.0
    "layoutlmv3": partial(
        of_documents, "LayoutLMv3ForTokenClassification", 8, 512, max_position_embeddings=514
    ),  # LayoutLMv3 base
    "albert": partial(
        classifier, "Albert", 32, 128, hidden_size=768, intermediate_size=3072, num_attention_heads=12
    ),  # ALBERT base
    "distilbert": partial(masked, "DistilBert", 32, 256),
    "xlnet": partial(classifier, "XLNet", 16, 256, d_model=768, n_layer=12, n_head=12, d_inner=3072),  # XLNet base
    "longformer": partial(classifier, "Longformer", 4, 2048, max_position_embeddings=4098),
    "gpt2": partial(of_text, "GPT2LMHeadModel", 8, 1024),
    "opt": partial(
        of_text, "OPTForCausalLM", 4, 1024, hidden_size=1024, ffn_dim=4096, num_hidden_layers=24,
        num_attention_heads=16, word_embed_proj_dim=1024,
    ),  # near OPT 350M
    "bloom": partial(of_text, "BloomForCausalLM", 4, 1024, hidden_size=1024, n_layer=24, n_head=16),  # BLOOM 560M
    "phi": partial(
        of_text, "PhiForCausalLM", 4, 1024, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24,
        num_attention_heads=32, partial_rotary_factor=0.5,
    ),  # Phi 1.5
    "llava": partial(
        answers, "LlavaForConditionalGeneration", 4, 768, 576, 3, 336, 336,
        text_config=widths(4096, 11008, 32, 32, 32064, 8, max_position_embeddings=4096),
        vision_config={"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14, **_LLAMA_VISION},
    ),  # LLaVA 1.5 7B
    "paligemma": partial(
        answers, "PaliGemmaForConditionalGeneration", 4, 512, 256, 3, 224, 224, projection_dim=2304,
        text_config={"model_type": "gemma2", **widths(2304, 9216, 8, 4, 257216, 8, head_dim=256)},
        vision_config={"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 14, **_SIGLIP},
    ),  # PaliGemma 2 3B
    "smolvlm": partial(
        answers, "SmolVLMForConditionalGeneration", 4, 768, 320, 5, 3, 512, 512, scale_factor=4, pad_token_id=0,
        image_token_id=49190,
        text_config={"model_type": "llama", **widths(960, 2560, 15, 5, 49280, 32, head_dim=64)},
        vision_config={"image_size": 512, "patch_size": 16, **_SMALL_SIGLIP},
    ),  # SmolVLM 500M
    "internvl": partial(
        answers, "InternVLForConditionalGeneration", 4, 768, 256, 3, 448, 448,
        text_config={"model_type": "qwen2", **widths(896, 4864, 14, 2, 151674, 24)},
        vision_config={"image_size": [448, 448], **_LLAMA_VISION},
    ),  # InternVL 2.5 1B
    "mpnet": partial(masked, "MPNet", 16, 256),  # MPNet base
    "blip": partial(
        of_captions, "BlipForConditionalGeneration", 16, 384, 32, text_config={"encoder_hidden_size": 768},
        vision_config={"image_size": 384},
    ),  # BLIP base
    "git": partial(of_captions, "GitForCausalLM", 16, 224, 64, num_hidden_layers=6),  # GIT base
    "trocr": partial(
        of_scans, "ViT", "TrOCR", 16, 384, 48,
        {"image_size": 384, "qkv_bias": False},
        {"d_model": 1024, "decoder_layers": 12, "decoder_ffn_dim": 4096, "decoder_attention_heads": 16,
         "cross_attention_hidden_size": 768, "vocab_size": 50265},
    ),  # TrOCR base
    "donut": partial(
        of_scans, "DonutSwin", "MBart", 2, 960, 256,
        {"image_size": [960, 960], "embed_dim": 128, "depths": [2, 2, 14, 2], "num_heads": [4, 8, 16, 32],
         "window_size": 10},
        {"decoder_layers": 4, "vocab_size": 57525, "is_decoder": True, "add_cross_attention": True},
    ),  # near Donut base
    "yolos": partial(
        of_boxes, "YolosForObjectDetection", 8, 512, 6, image_size=[512, 864], hidden_size=384, num_attention_heads=6,
        intermediate_size=1536, num_labels=8,
    ),  # YOLOS small
    "qwen2_audio": partial(
        of_questions, "Qwen2AudioForConditionalGeneration", 4, 1024, 750, 128, 3000,
        text_config={"model_type": "qwen2", **widths(4096, 11008, 32, 32, 156032, 4)}, audio_token_index=151646,
        audio_config={"d_model": 1280, "encoder_layers": 8, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120},
    ),  # an eighth and a quarter of Qwen2-Audio 7B
    "falcon": partial(
        of_text, "FalconForCausalLM", 2, 2048, hidden_size=4544, num_hidden_layers=2, num_attention_heads=71,
    ),  # Falcon 7B's
    "mpt": partial(of_text, "MptForCausalLM", 2, 1024, d_model=2048, n_heads=16, n_layers=8),
    "gptj": partial(
        of_text, "GPTJForCausalLM", 2, 1024, n_embd=2048, n_layer=8, n_head=16, rotary_dim=64, n_positions=2048
    ),
}  # fmt: skip


if __name__ == "__main__":
    main(__doc__, MODELS)
