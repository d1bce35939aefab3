"""Small runs of TRL's trainers, of whatever release: a model, a tokenizer, a dataset and few steps each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    # Caps its logits, and has so few that the cap shows.
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"final_logit_softcapping": 0.5, "query_pre_attn_scalar": 8}),
}
# Whose trainers add a loss of its routers' logits.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.5}
MODELS["qwen3_moe"] = (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, _EXPERTS)
if hasattr(transformers, "Qwen3_5ForCausalLM"):  # a layer that is linear attention
    _HEADS = {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
    _HEADS |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    MODELS["qwen3_5"] = (
        transformers.Qwen3_5TextConfig,
        transformers.Qwen3_5ForCausalLM,
        {**_HEADS, "layer_types": ["linear_attention", "full_attention"]},
    )
if hasattr(transformers, "Gemma4ForConditionalGeneration"):  # a model of images, which makes its text model's masks
    MODELS["gemma4"] = (
        lambda **text: transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=None),
        transformers.Gemma4ForConditionalGeneration,
        {
            "global_head_dim": 16,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    )
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }} </s> {% endgeneration %}"
    "{% else %}{{ message['content'] }} </s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def saved_model(kind: str, folder: Path) -> str:
    """Trainers load a reference model from where the model is from."""
    config, cls, more = MODELS[kind]
    torch.manual_seed(0)
    model = cls(config(**SIZES, **more))
    for parameter in model.parameters() if kind != "gemma4" else ():  # whose losses would hang on last digits
        parameter.data.mul_(2)  # logits that differ from one another
    model.save_pretrained(folder / kind)
    return str(folder / kind)


def saved_as_loaded(kind: str, folder: Path) -> str:
    """A model in float32 whose numbers are bfloat16's, as TRL loads most checkpoints."""
    path = saved_model(kind, folder)
    model = load(path)
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    model.save_pretrained(path)
    return path


def load(path: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, **options)


def head_weight(model: Any) -> torch.nn.Parameter:
    return model.get_output_embeddings().weight


def tokenizer() -> Any:
    known = ["<pad>", "</s>", "<unk>", "user", "assistant", *(f"w{n}" for n in range(5, VOCABULARY))]
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(known)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = _TEMPLATE
    made.padding_side = "left"
    return made


def words(seed: int, count: int) -> str:
    drawn = torch.randint(5, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{n}" for n in drawn.tolist())


_ROWS = range(8)


def _texts() -> dict[str, Any]:
    return {"text": [words(n, 6 + n) for n in _ROWS]}


def _chats() -> dict[str, Any]:
    return {
        "messages": [
            [{"role": "user", "content": words(n, 4)}, {"role": "assistant", "content": words(n + 50, 3 + n % 4)}]
            for n in _ROWS
        ]
    }


def _completions() -> dict[str, Any]:
    return {"prompt": [words(n, 4) for n in _ROWS], "completion": [" " + words(n + 50, 5) for n in _ROWS]}


def _pairs() -> dict[str, Any]:
    return {
        "prompt": [words(n, 4) for n in _ROWS],
        "chosen": [" " + words(n + 50, 5) for n in _ROWS],
        "rejected": [" " + words(n + 90, 4) for n in _ROWS],
    }


def _labelled() -> dict[str, Any]:
    return {**_completions(), "label": [n % 2 == 0 for n in _ROWS]}


def _prompts() -> dict[str, Any]:
    return {"prompt": [words(n, 4) for n in _ROWS]}


def _length(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(set(text.split()))) + 0.1 * len(text) for text in completions]


def find(name: str) -> Any:
    """A class of TRL's by its name, wherever the release has it; ImportError."""
    import trl

    kind = name.removesuffix("Trainer").removesuffix("Config").lower()
    try:
        if kind == "distillation":  # which is an alias there, with a warning
            return getattr(trl, name)
        return getattr(importlib.import_module(f"trl.experimental.{kind}"), name)
    except (ImportError, AttributeError):
        pass
    try:
        return getattr(trl, name)
    except (AttributeError, RuntimeError) as error:
        raise ImportError(str(error)) from error


_SAMPLED = {"max_completion_length": 5, "temperature": 0.7}
GENERATION = {**_SAMPLED, "num_generations": 2, "beta": 0.1}
#: Of every run's config.
USUAL: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.01,
    "optim": "sgd",  # Adam's first steps are signs of gradients, which rounding may turn
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
}
#: kind of a run -> trainer, its data, options of its config, more arguments of the trainer.
KINDS: dict[str, tuple[str, Callable[[], dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "sft": ("SFT", _texts, {}, {}),
    "sft packed": ("SFT", _texts, {"packing": True, "max_length": 16}, {}),
    "sft assistant": ("SFT", _chats, {"assistant_only_loss": True}, {}),
    "sft completion": ("SFT", _completions, {"completion_only_loss": True}, {}),
    "sft dft": ("SFT", _texts, {"loss_type": "dft"}, {}),
    "sft chunked": ("SFT", _texts, {"loss_type": "chunked_nll"}, {}),
    "dpo": ("DPO", _pairs, {}, {}),
    "kto": ("KTO", _labelled, {}, {}),
    "grpo": ("GRPO", _prompts, GENERATION, {"reward": True}),
    "rloo": ("RLOO", _prompts, GENERATION, {"reward": True}),
    "distillation": ("Distillation", _prompts, {**_SAMPLED, "beta": 0.5}, {"teacher": True}),
    "distillation forward": ("Distillation", _prompts, {**_SAMPLED, "beta": 0.0}, {"teacher": True}),
    "distillation reverse": ("Distillation", _prompts, {**_SAMPLED, "beta": 1.0}, {"teacher": True}),
    "gkd": ("GKD", _chats, {"lmbda": 0.0, "max_new_tokens": 4}, {"teacher": True}),
}


def trainer(kind: str, path: str, folder: Path, model: Any = None, peft_config: Any = None, **options: Any) -> Any:
    """A trainer of this kind with the model that is saved there. ImportError: where TRL itself cannot be imported."""
    from datasets import Dataset

    name, data, own, more = KINDS[kind]
    cls, config = find(f"{name}Trainer"), find(f"{name}Config")
    given: dict[str, Any] = {
        "output_dir": str(folder),
        **USUAL,
        **own,
        **options,
    }
    arguments: dict[str, Any] = {
        "model": load(path) if model is None else model,
        "args": config(**given),
        "train_dataset": Dataset.from_dict(data()),
        "processing_class": tokenizer(),
        "peft_config": peft_config,
    }
    if more.get("reward"):
        arguments["reward_funcs"] = _length
    if more.get("teacher"):
        arguments["teacher_model"] = _beside(path)
    if kind == "dpo" and peft_config is None:
        # Another one than the model: where the two agree, rounding alone says which of a pair is ahead.
        arguments["ref_model"] = _beside(path)
    return cls(**arguments)


def _beside(path: str) -> Any:
    model = load(path)
    with torch.no_grad():
        other = model.lm_head.weight + 0.1 * torch.eye(VOCABULARY, SIZES["hidden_size"])
        model.lm_head.weight.copy_(other.bfloat16())
    return model


_TIMES = ("runtime", "per_second", "time", "flos")


def numbers_of(run: Any) -> list[dict[str, float]]:
    """What it logged, but for times."""
    return [
        {name: float(value) for name, value in entry.items() if not any(part in name for part in _TIMES)}
        for entry in run.state.log_history
    ]
