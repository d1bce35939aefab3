"""Any language model type of Transformers, of text alone or of images too, and any config, built small: for checks that
need a model and no weights."""

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

#: What sizes are called in configs, and small ones. A config takes those that it has.
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "attention_head_dim": 8,
    "rotary_dim": 4,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_seq_len": 64,
    "sliding_window": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,  # and experts in the second layer
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "swiglu_limit": 0.5,  # so that it is met
    "swiglu_alpha": 1.3,
    "n_group": 1,
    "n_groups": 2,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "adapter_in_dim": 32,
    "adapter_input_size": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "state_size": 8,
    "chunk_size": 8,
    "index_n_heads": 8,  # so that hardly a key has no score at all, and which of two such is chosen is luck
    "index_head_dim": 16,
    "index_topk": 4,
    "initializer_range": 0.2,  # so that no activation is small against epsilon
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _three_sections(*sizes: int) -> dict[str, Any]:
    """Of half a head, for time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sizes)}}


_PLACE = 95  # a token that stands where something of a picture is

#: What some types need beside or instead.
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text", "qwen2_5_omni_text", "glm4v_text", "glm_ocr_text"),
        _three_sections(2, 1, 1),
    ),
    "glm4v_moe_text": _three_sections(1, 1, 0),
    **{
        f"{name}_vision_model": {"image_size": 8, "patch_size": 4}
        for name in ("blip", "blip_2", "git", "instructblip", "instructblipvideo", "kosmos_2")
    },
    **{name: {"num_query_tokens": 2, "image_token_index": _PLACE} for name in ("blip-2", "instructblip")},
    "instructblipvideo": {"num_query_tokens": 2, "video_token_index": _PLACE},
    "idefics_vision": {"image_size": 8, "patch_size": 4},
    "kosmos-2": {"latent_query_num": 4},
    "pix2struct": {"decoder_start_token_id": 0, "pad_token_id": 0},
    "pix2struct_text_model": {"d_kv": 8, "num_heads": 4, "d_ff": 48},
    "apertus1p5": {"image_token_id": 71, "audio_token_id": 72, "image_token_offset": 73, "audio_token_offset": 85},
    "apertus1p5_vision_tokenizer": {"codebook_size": 12},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 211},
    "blt_local_decoder": {"hidden_size_global": 32},
    "blt_local_encoder": {"hidden_size_global": 32},
    "chameleon": {"vocabulary_map": {"<image>": 95, "IMGIMGA": 93, "IMGIMGB": 94}},  # the loss is without the latter
    "cosmos3_edge_text": _three_sections(2, 1, 1),
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dory": {"layer_types": ["full_attention", "mlp"]},
    "dots3_note_audio_encoder": {"adapter_out_dim": 32},
    "dots3_note_vision_encoder": {"adapter_out_dim": 32},
    "falcon_h1": {"mamba_d_ssm": 64},
    "flint": {"mlp_only_layers": [0]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.5, 0.0], "laurel_rank": 4},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "global_head_dim": 8,
    },
    "gemma4_unified_text": {"global_head_dim": 8},
    "glm5_next_text": {"index_kpool": 2, "qk_rope_head_dim": 0, "qk_head_dim": 8},
    "granite_docling_vision": {"out_hidden_size": 32},
    "hy_v4_vl_text": _three_sections(2, 1, 1),
    "hunyuan_vl_text": _three_sections(1, 1, 1, 1),
    **{name: {"unpadded_vocab_size": 97} for name in ("inkling2_text", "inkling2_loop_text")},
    "inkling2_vision": {"text_hidden_size": 32},
    "mistral4": {"head_dim": 16},
    "mistral_large4_text": {"kv_source_layers": [0, 1]},
    "molmo2_adapter": {"vision_feature_layer": [1, 0], "text_hidden_size": 32},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], **_three_sections(1, 1, 2)},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "muse_spark_audio": {"num_hidden_layers": 4, "out_hidden_size": 32},
    "musicgen_decoder": {"num_codebooks": 2},
    "musicgen_melody_decoder": {"num_codebooks": 2},
    "perception_lm": {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {"embed_dim": 32, "img_size": [16, 16], "depth": 1, "num_heads": 4, "ref_feat_shape": [1, 1]},
        }
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "reformer": {  # which seeds its dropout by the clock
        "is_decoder": True,
        "attn_layers": ["local"] * 2,
        "axial_pos_embds": False,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
    },
    "wavtokenizer_encoder": {"codebook_dim": 32, "codebook_size": 8},
    "udop": {"decoder_start_token_id": 0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2},  # hybrid ones share a part
    "zaya": {"num_experts_per_tok": 1},
}


def small_config(model_type: str, **more: Any) -> Any:
    """A config of this type with small numbers. more: instead of others."""
    from transformers import AutoConfig

    usual = AutoConfig.for_model(model_type)
    return AutoConfig.for_model(model_type, **{**_small(usual), **OVERRIDES.get(model_type, {}), **more})


def reduced(config: Any) -> Any:
    """A config that says what this one says, with small numbers. What it is without (None, 0, an empty list) it stays
    without, and flags and words stay as they are: the model has the parts that this one's has."""
    values = {**config.to_dict(), **_reduced(config)}
    # Not of layers that are not there, it follows from the rest; nor of the types in which weights are kept.
    for name in ("per_layer_config", "quantization_config", "dtype", "torch_dtype"):
        values.pop(name, None)
    made = type(config).from_dict(values)
    made._name_or_path = config._name_or_path  # where code of its own is found
    return made


def _small(usual: Any) -> dict[str, Any]:
    """The values of a config, and of those within it, that make it small."""
    known = {*usual.to_dict(), *getattr(usual, "attribute_map", {})}
    chosen = {name: size for name, size in SIZES.items() if name in known}
    if "kv_lora_rank" in known:  # each head has keys of its own
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    layers = chosen.get("num_hidden_layers", 2)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        own = getattr(usual, "attribute_map", {}).get(name, name)
        kinds = getattr(usual, name, None)
        follows = isinstance(getattr(type(usual), own, None), property)  # from other values
        if name in known and isinstance(kinds, (list, tuple)) and not follows:
            chosen[name] = _first_kinds(kinds, layers)
    for name in getattr(usual, "sub_configs", {}):
        inner = getattr(usual, name, None)
        if inner is not None:
            chosen[name] = {**inner.to_dict(), **_small(inner), **OVERRIDES.get(inner.model_type, {})}
            chosen[name].pop("per_layer_config", None)  # of layers that are not there; it follows from the rest
    return chosen


#: Of these no model gets more than it has.
_COUNTS = re.compile(r"layers?$|experts|num_key_value_heads|topk|moe_k|per_tok")
#: These follow from others where a config does not say them.
_FOLLOW = ("head_dim", "num_key_value_heads")
_PAIRS = SIZES["head_dim"] // 2  # of a head's elements that turn together


def _reduced(config: Any) -> dict[str, Any]:
    """As `_small`, of a config that somebody has written."""
    from transformers import PreTrainedConfig

    values, also = config.to_dict(), getattr(config, "attribute_map", {})
    heads, of_keys, layers = (
        values.get(also.get(name, name)) for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    )
    chosen: dict[str, Any] = {}
    for name, size in {**_following(type(config)), **_small(config)}.items():
        own = values.get(also.get(name, name))
        if name in _FOLLOW and own is None and name in values:
            chosen[name] = size
        elif name == "use_cache" or not (_is_absent(own) or isinstance(own, (bool, str, dict))):
            chosen[name] = min(own, size) if _COUNTS.search(name) and isinstance(own, int) else size
    if heads and of_keys in (heads, None) and "num_key_value_heads" in chosen:  # each head has keys of its own
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    for name, own in values.items():
        if isinstance(own, list) and len(own) == layers:  # a word for each layer
            chosen[name] = _first_kinds(own, chosen.get("num_hidden_layers", 2))
        if name in ("rope_parameters", "rope_scaling") and isinstance(own, dict):
            chosen[name] = _small_rope(own)
        if name == "partial_rotary_factor" and own and own < 1:
            chosen[name] = 0.5
    for name, inner in vars(config).items():
        if isinstance(inner, PreTrainedConfig):
            chosen[name] = {**inner.to_dict(), **_reduced(inner)}
            chosen[name].pop("per_layer_config", None)  # as above
    return {**chosen, **_fitting({**values, **chosen}, OVERRIDES.get(config.model_type, {}))}


def _following(config_class: Any) -> dict[str, Any]:
    """What changes with the small numbers in the default config of a class: it follows from them."""
    try:
        usual = config_class()
        small = config_class(**_small(usual)).to_dict()
    except Exception:  # whatever code of someone's own may raise
        return {}
    return {
        name: small[name]
        for name, value in usual.to_dict().items()
        if isinstance(value, (int, float, list)) and isinstance(small.get(name), type(value)) and small[name] != value
    }


def _is_absent(own: Any) -> bool:
    return own is None or (not isinstance(own, bool) and own in (0, [], (), {}))


def _fitting(own: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a type's overrides that its numbers need."""
    chosen = {}
    for name, value in overrides.items():
        has = own.get(name)
        if isinstance(value, dict) and isinstance(has, dict):
            chosen[name] = {**has, **{n: v for n, v in value.items() if not isinstance(has.get(n), (bool, str))}}
        elif not isinstance(has, (bool, str)) and (isinstance(value, str) or not _is_absent(has)):
            chosen[name] = value
    return chosen


def _small_rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """What says how positions turn a head, or how in each kind of layer, for small heads and few positions."""
    chosen = {name: _small_rope(value) if isinstance(value, dict) else value for name, value in given.items()}
    pairs = _PAIRS
    if 0 < (given.get("partial_rotary_factor") or 1) < 1:
        chosen["partial_rotary_factor"], pairs = 0.5, _PAIRS // 2
    for name, value in given.items():
        if name.endswith("_factor") and isinstance(value, (list, tuple)):  # one a pair
            chosen[name] = list(value[:pairs])
    if given.get("mrope_section"):
        chosen["mrope_section"] = [pairs - pairs // 2, pairs // 4 or 1, pairs // 4]
    if given.get("original_max_position_embeddings"):
        chosen["original_max_position_embeddings"] = SIZES["max_position_embeddings"] // 2
    return chosen


def _first_kinds(kinds: Any, count: int) -> list[Any]:
    """So many of a list of kinds, and as many different ones as there are room for."""
    different = list({repr(kind): kind for kind in kinds}.values())[:count]
    return (different + list(kinds))[:count]


def small_model(model_type: str, seed: int = 0, **more: Any) -> nn.Module:
    """A causal language model of this type, or one of text and images, in float32, in training, with random weights,
    those of norms too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if model_type in vision_types() else AutoModelForCausalLM
    config = small_config(model_type, **more)
    cls: Any = auto._model_mapping[type(config)]
    parts = [part for part in vars(config).values() if type(part) is getattr(cls, "config_class", type(config))]
    if parts:  # the class is of a part of what the type is
        return prepared(cls._from_config(parts[0], dtype=torch.float32))
    return prepared(auto.from_config(config, dtype=torch.float32))


def prepared(model: Any) -> nn.Module:
    """A model with random weights of norms too, without dropout, in training."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def causal_types() -> list[str]:
    """The types that have a causal language model in the installed Transformers."""
    from transformers.models.auto import modeling_auto

    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def vision_types() -> list[str]:
    """Those whose models read images and text, and are none of `causal_types`."""
    from transformers.models.auto import modeling_auto

    return sorted(set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(causal_types()))


def _of_codebooks(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tokens of sound: each moment has several, in books of their own."""
    count = model.config.num_codebooks
    return {"input_ids": ids.repeat_interleave(count, 0), "labels": labels[..., None].expand(-1, -1, count)}


def _picture(model: Any, ids: torch.Tensor, labels: torch.Tensor, *each: int) -> dict[str, torch.Tensor]:
    """each: how many there are of one sequence, where that is a dimension."""
    size = model.config.vision_config.image_size
    return {"pixel_values": torch.randn(len(ids), *each, 3, size, size).to(model.dtype)}


def _queries(*each: int) -> Any:
    """A picture, or the pictures of a film, and the tokens that its queries take the places of."""

    def given(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        more = {"qformer_input_ids": ids} if "qformer_input_ids" in inspect.signature(model.forward).parameters else {}
        ids = ids.clone()
        ids[:, : model.config.num_query_tokens * math.prod(each)] = _PLACE
        return {**_picture(model, ids, labels, *each), "input_ids": ids, **more}

    return given


def _picture_in_places(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    places = (torch.arange(ids.shape[1]) < model.config.latent_query_num).long().expand_as(ids)
    return {**_picture(model, ids, labels), "image_embeds_position_mask": places}


def _seen_by_all(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**_picture(model, ids, labels, 1), "image_attention_mask": torch.ones_like(ids)[..., None]}


def _patches(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a picture, each with its row and column."""
    width = model.config.vision_config.patch_embed_hidden_size
    return {"flattened_patches": torch.cat((torch.ones(2, 5, 2), torch.randn(2, 5, width)), -1).to(model.dtype)}


def _boxes(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Where on a page each word stands."""
    return {"bbox": torch.rand(*ids.shape, 4).to(model.dtype)}


#: What some types are given beside or instead.
_GIVEN = {
    "blip": _picture,
    "blip-2": _queries(),
    "git": _picture,
    "idefics": _seen_by_all,
    "instructblip": _queries(),
    "instructblipvideo": _queries(4),
    "kosmos-2": _picture_in_places,
    "pix2struct": _patches,
    "udop": _boxes,
    "musicgen_decoder": _of_codebooks,
    "musicgen_melody_decoder": _of_codebooks,
}


def step(model: Any, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one batch and the gradients, which are then cleared; labels ignore a few tokens."""
    loss, found, _ = step_with_output(model, seed)
    return loss, found


def step_with_output(model: Any, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    """As `step`, and what the model returned."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (2, 11), generator=generator)
    labels = ids.clone()
    labels[:, 4] = -100
    torch.manual_seed(seed)
    given = {"input_ids": ids, "labels": labels}
    takes = inspect.signature(model.forward).parameters
    if "num_items_in_batch" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        given["num_items_in_batch"] = torch.tensor(17)  # code of someone's own may not
    if model.config.model_type in vision_types():  # all of them text: some want to be told
        names = [name for name in ("token_type_ids", "mm_token_type_ids") if name in takes]
        given.update({name: torch.zeros_like(ids) for name in names})
    if model.config.model_type in _GIVEN:
        given.update(_GIVEN[model.config.model_type](model, ids, labels))
    output = model(**{name: value.to(model.device) for name, value in given.items()})
    output.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return output.loss.detach(), found, output
