"""What random runs of trainers are drawn from, for tools/random_trainers.py: trainers and their options, models,
adapters, rows."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import random_models
import random_sentences
import torch
from random_models import TASKS, VOCABULARY
from random_sentences import text

from bastile.models import small
from bastile.sweep.trainer import tokenizer as words

ROWS = 12
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }} </s> {% endgeneration %}"
    "{% else %}{{ message['content'] }} </s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
#: Options of any trainer, and how often one is given.
USUAL: dict[str, tuple[float, list[Any]]] = {
    "gradient_accumulation_steps": (0.3, [2, 3]),
    "gradient_checkpointing": (0.6, [True, False]),
    "gradient_checkpointing_kwargs": (0.3, [{"use_reentrant": True}, {"use_reentrant": False}]),
    "optim": (0.4, ["adamw_torch", "adamw_torch_fused", "adafactor"]),
    "weight_decay": (0.3, [0.1]),
    "max_grad_norm": (0.3, [0.0, 0.01, 1.0]),
    "lr_scheduler_type": (0.3, ["linear", "cosine"]),
    "eval_strategy": (0.4, ["steps", "epoch"]),
    "eval_on_start": (0.1, [True]),
    "prediction_loss_only": (0.1, [True]),
    "eval_accumulation_steps": (0.2, [1]),
    "label_smoothing_factor": (0.1, [0.1]),
    "neftune_noise_alpha": (0.1, [5.0]),
    "torch_empty_cache_steps": (0.1, [1]),
    "average_tokens_across_devices": (0.2, [False]),
    "train_sampling_strategy": (0.2, ["group_by_length", "sequential"]),
    "include_num_input_tokens_seen": (0.2, ["all", "non_padding"]),
    "logging_first_step": (0.2, [True]),
    "dataloader_drop_last": (0.2, [True]),
    "auto_find_batch_size": (0.1, [True]),
    "bf16": (0.15, [True]),
    "bf16_full_eval": (0.05, [True]),
    "use_cache": (0.1, [True]),
    "pad_to_multiple_of": (0.3, [None, 8, 16]),
    "activation_offloading": (0.1, [True]),
}
_OF_A_POLICY: dict[str, tuple[float, list[Any]]] = {
    "temperature": (0.4, [0.7, 1.3]),
    "num_iterations": (0.3, [2]),
    "steps_per_generation": (0.3, [1, 2]),
    "beta": (0.5, [0.0, 0.1]),
    "epsilon_high": (0.3, [0.3]),
    "mask_truncated_completions": (0.2, [True]),
    "disable_dropout": (0.2, [True]),
    "top_k": (0.2, [10]),
    "top_p": (0.2, [0.9]),
    "repetition_penalty": (0.1, [1.2]),
    "cache_implementation": (0.2, ["static", "dynamic"]),
    "shuffle_dataset": (0.2, [False]),
    "sync_ref_model": (0.2, [True]),
    "ref_model_sync_steps": (0.5, [1]),
}
_OF_A_REFERENCE: dict[str, tuple[float, list[Any]]] = {
    "beta": (0.4, [0.01, 0.5]),
    "precompute_ref_log_probs": (0.2, [True]),
    "sync_ref_model": (0.2, [True]),
    "ref_model_sync_steps": (0.5, [1]),
    "disable_dropout": (0.2, [False]),
    "max_length": (0.4, [8, 12]),
}
#: Options of a trainer alone.
OWN: dict[str, dict[str, tuple[float, list[Any]]]] = {
    "sft": {
        "loss_type": (0.6, ["nll", "dft", "chunked_nll"]),
        "packing": (0.3, [True]),
        "packing_strategy": (0.4, ["bfd", "bfd_split", "wrapped"]),
        "padding_free": (0.2, [True]),
        "eval_packing": (0.2, [True, False]),
        "max_length": (0.5, [8, 16, None]),
        "completion_only_loss": (0.3, [True, False]),
        "assistant_only_loss": (0.3, [True]),
        "truncation_mode": (0.2, ["keep_end"]),
        "shuffle_dataset": (0.2, [True]),
    },
    "dpo": {
        **_OF_A_REFERENCE,
        "loss_type": (
            0.7,
            [
                *["hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"],
                *["apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm", ["sigmoid", "bco_pair", "sft"]],
            ],
        ),
        "loss_weights": (0.1, [[0.8, 0.2, 1.0]]),
        "label_smoothing": (0.3, [0.1]),
        "ld_alpha": (0.2, [0.5]),
        "f_divergence_type": (0.3, ["reverse_kl", "js_divergence", "alpha_divergence"]),
        "use_weighting": (0.2, [True]),
        "padding_free": (0.2, [True]),
        "truncation_mode": (0.2, ["keep_end"]),
    },
    "kto": {
        **_OF_A_REFERENCE,
        "loss_type": (0.3, ["apo_zero_unpaired"]),
        "desirable_weight": (0.2, [1.3]),
    },
    "grpo": {
        **_OF_A_POLICY,
        "loss_type": (0.7, ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]),
        "importance_sampling_level": (0.3, ["sequence"]),
        "scale_rewards": (0.3, ["batch", "none"]),
        "delta": (0.2, [2.0]),
        "entropy_coef": (0.2, [0.01]),
        "use_adaptive_entropy": (0.1, [True]),
        "use_bias_correction_kl": (0.2, [False]),
        "off_policy_mask_threshold": (0.2, [0.1]),
        "cast_lm_head_to_fp32": (0.1, [True]),
    },
    "rloo": {**_OF_A_POLICY, "normalize_advantages": (0.3, [True]), "reward_clip_range": (0.3, [(-1.0, 1.0)])},
    "reward": {"center_rewards_coefficient": (0.4, [0.01]), "max_length": (0.4, [8])},
    "distillation": {
        "beta": (0.6, [0.0, 0.5, 1.0]),
        "temperature": (0.4, [0.7, 1.3]),
        "disable_dropout": (0.2, [True]),
        "cache_implementation": (0.2, ["static"]),
    },
    "gkd": {"beta": (0.5, [0.0, 0.5, 1.0]), "lmbda": (0.5, [0.0, 1.0]), "seq_kd": (0.1, [True])},
    "orpo": {"beta": (0.4, [0.5])},
    "cpo": {
        "beta": (0.4, [0.5]),
        "loss_type": (0.5, ["sigmoid", "hinge", "ipo", "simpo", "alphapo"]),
        "cpo_alpha": (0.4, [0.0, 0.5]),
    },
    "causal": {},
    "sequences": {},
    "tokens": {},
    "masked": {},
    **dict.fromkeys(random_sentences.KINDS, random_sentences.OPTIONS),
    "seq2seq": {"predict_with_generate": (0.3, [True]), "generation_max_length": (0.5, [6])},
}
#: Of the trainers that TRL has: what their rows are.
DATA = {
    "sft": ["texts", "chats", "completions"],
    "dpo": ["pairs"],
    "kto": ["labelled"],
    "grpo": ["prompts"],
    "rloo": ["prompts"],
    "reward": ["pairs"],
    "distillation": ["prompts"],
    "gkd": ["chats"],
    "orpo": ["pairs"],
    "cpo": ["pairs"],
    **{kind: list(losses) for kind, (losses, _) in random_sentences.KINDS.items()},
}
#: PEFT's methods by the names of their configs, with what a small model needs.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4}),
    "rslora": ("LoraConfig", {"r": 8, "use_rslora": True}),
    "dora": ("LoraConfig", {"r": 4, "use_dora": True}),
    "lora with biases": ("LoraConfig", {"r": 4, "bias": "lora_only"}),
    "lora of a head": ("LoraConfig", {"r": 4, "modules_to_save": ["lm_head"]}),
    "lora of tokens": ("LoraConfig", {"r": 4, "trainable_token_indices": [3, 4, 7]}),
    "lora of one layer": ("LoraConfig", {"r": 4, "layers_to_transform": [1]}),
    "lora of ranks": ("LoraConfig", {"r": 4, "rank_pattern": {"q_proj": 2, "v_proj": 8}}),
    "adalora": ("AdaLoraConfig", {"total_step": 10, "init_r": 4, "target_r": 2}),
    "loha": ("LoHaConfig", {"r": 4}),
    "lokr": ("LoKrConfig", {"r": 4}),
    "ia3": ("IA3Config", {"feedforward_modules": []}),
    "vera": ("VeraConfig", {"r": 4}),
    "oft": ("OFTConfig", {"oft_block_size": 4}),
    "hra": ("HRAConfig", {"r": 4}),
    "norms": ("LNTuningConfig", {}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    "tokens": ("TrainableTokensConfig", {"token_indices": [3, 4, 7]}),
}
_WITHOUT_TARGETS = {"norms", "prompt", "prefix", "p-tuning", "tokens"}


@dataclass
class Run:
    kind: str
    model_type: str
    changes: dict[str, Any]
    data: str
    options: dict[str, Any]
    dtype: str
    adapters: str | None
    graphs: Any
    attention: str | None
    resumes: bool
    reads_logits: bool


# ---- drawing ---------------------------------------------------------------------------------------------------------


def drawn(seed: int, only: str | None, model_type: str | None, dtypes: list[str]) -> Run:
    from transformers.models.auto import modeling_auto

    rng = random.Random(seed)
    kind = only or rng.choice(["sft", "sft", "dpo", "grpo", "causal", "causal", "embeddings", *OWN])
    names = sorted(getattr(modeling_auto, f"MODEL_FOR_{task_of(kind)[0]}_MAPPING_NAMES"))
    often = ["llama", "qwen3", "gemma2", "qwen3_moe", "mistral", "gpt2", "gemma3_text", "qwen2", "phi3", "opt", "bert"]
    chosen = model_type or rng.choice(rng.choice([names, [name for name in often if name in names] or names]))
    options = {name: rng.choice(values) for name, (p, values) in {**USUAL, **OWN[kind]}.items() if rng.random() < p}
    options.setdefault("optim", "sgd")
    embeds = kind in random_sentences.KINDS
    if options.get("eval_strategy", "no") == "no":
        options.pop("eval_on_start", None)
    if not options.get("beta", kind != "grpo"):
        options.pop("sync_ref_model", None)
    return Run(
        kind=kind,
        model_type=chosen,
        changes=random_models.changed(rng, chosen) if rng.random() < 0.5 else {},
        data=rng.choice(DATA.get(kind, ["rows"])),
        options=options,
        dtype=rng.choice(dtypes),
        # Those of Transformers, which Sentence Transformers asks for them, need a newer PEFT than there is.
        adapters=None if embeds else rng.choice([None, None, None, "lora", "lora", *ADAPTERS]),
        graphs=rng.choice([True, True, "auto", False]),
        attention=rng.choice([None, None, None, "sdpa", "eager"]),
        resumes=rng.random() < 0.15,
        reads_logits=rng.random() < 0.3,
    )


def task_of(kind: str) -> tuple[str, str]:
    """Transformers' table of the models of a run's kind, and the class that makes one."""
    if kind in random_sentences.KINDS:
        return random_sentences.KINDS[kind][1]
    return TASKS[kind if kind in TASKS else "sequences" if kind == "reward" else "causal"]


def save_model(run: Run, folder: Path, weights: int) -> None:
    """Without dropout, whose numbers would be others."""
    import transformers

    torch.manual_seed(weights)
    more = {"num_labels": 1} if run.kind in ("reward", "cross") else {}
    config = small.small_config(run.model_type, **run.changes, **more)
    model: Any = getattr(transformers, task_of(run.kind)[1]).from_config(config, dtype=torch.float32)
    random_models.undropped(small.prepared(model)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def load(run: Run, folder: Path, dtype: torch.dtype) -> Any:
    import transformers

    more = {"attn_implementation": run.attention} if run.attention else {}
    model = getattr(transformers, task_of(run.kind)[1]).from_pretrained(folder, dtype=dtype, **more)
    if dtype == torch.float64:
        with contextlib.suppress(AttributeError, ValueError):
            model.set_experts_implementation("eager")  # others have no float64
    return model


def peft_config(run: Run, model: Any) -> Any:
    import peft

    assert run.adapters is not None
    name, given = ADAPTERS[run.adapters]
    kinds = {"sequences": "SEQ_CLS", "reward": "SEQ_CLS", "tokens": "TOKEN_CLS", "seq2seq": "SEQ_2_SEQ_LM"}
    given = {"task_type": kinds.get(run.kind, "CAUSAL_LM" if run.kind != "masked" else None), **given}
    if run.adapters not in _WITHOUT_TARGETS:
        given["target_modules"] = random_models.kinds_of_linear(model)
    elif run.adapters == "norms":
        given["target_modules"] = sorted({n.split(".")[-1] for n, _ in model.named_modules() if n.endswith("norm")})
    return getattr(peft, name)(**given)


def tokenizer() -> Any:
    made = words(VOCABULARY)
    made.chat_template = _TEMPLATE
    made.model_max_length = 64
    made.padding_side = "left"
    return made


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows_of(run: Run, rng: random.Random) -> list[dict[str, Any]]:
    """Of TRL's: texts."""

    def row(number: int) -> dict[str, Any]:
        prompt, answer = text(rng, 2, 7), " " + text(rng, 1, 14)
        if run.data == "texts":
            return {"text": text(rng, 2, 24)}
        if run.data == "chats":
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer.strip()}]
            return {"messages": turns * (1 + number % 2)}
        if run.data == "pairs":
            other = " " + text(rng, 1, 14)
            return {"prompt": prompt, "chosen": answer, "rejected": other}
        whole = {"prompt": prompt, "completion": answer, "label": number % 3 != 0}
        names = {"completions": ["prompt", "completion"], "labelled": list(whole), "prompts": ["prompt"]}[run.data]
        return {name: whole[name] for name in names}

    return [row(number) for number in range(ROWS)]


def tokens_of(run: Run, rng: random.Random, classes: int) -> list[dict[str, Any]]:
    """Of Transformers' own trainers: tokens and labels."""

    def row() -> dict[str, Any]:
        ids = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(2, 24))]
        if run.kind == "sequences":
            return {"input_ids": ids, "labels": rng.randrange(classes)}
        if run.kind == "seq2seq":
            return {"input_ids": ids, "labels": [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 9))]}
        if run.kind == "tokens":
            return {"input_ids": ids, "labels": [n % classes for n in ids]}
        labels = [n if rng.random() < (0.3 if run.kind == "masked" else 0.8) else -100 for n in ids]
        return {"input_ids": ids, "labels": [*labels[:-1], ids[-1]]}

    return [row() for _ in range(ROWS)]
