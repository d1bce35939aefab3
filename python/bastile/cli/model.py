"""Finding a model by the name that a user gave: its folder, its config, its tokenizer."""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from bastile.cli.errors import UsageError
from bastile.shapes import MODELS

_SECONDS = 10  # for the hub's answer; loading would repeat its questions for half a minute before it gave up


def find_model(name: str) -> str:
    """The name, or the folder in the hub's cache where the hub cannot be reached; an error where there is neither."""
    if Path(name).is_dir():
        return name
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=_SECONDS)
        return name
    except HFValidationError as error:
        raise UsageError(
            f"--model {name}: there is no such folder, and it is no hub name (such as Qwen/Qwen3-0.6B)"
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"--model {name}: neither a folder nor a model on the Hugging Face hub; check the spelling "
            f"(owner/name, such as Qwen/Qwen3-0.6B). A private model needs `hf auth login` first"
        ) from error
    except Exception as error:  # whatever the network did; the hub's client has no one class for it
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            logging.getLogger(__name__).info("the hub cannot be reached; using the copy in %s", cached)
            return str(Path(cached).parent)
        raise UsageError(
            f"--model {name}: no such folder, no copy in the hub's cache, and the hub cannot be asked "
            f"({type(error).__name__}); check the spelling and the network, or give a folder written by "
            f"save_pretrained"
        ) from error


def load_config(name: str) -> Any:
    """The config of a model whose type is supported."""
    from transformers import AutoConfig

    try:
        return _supported(f"--model {name}", AutoConfig.from_pretrained(name))
    except (OSError, ValueError) as error:
        raise _not_there(name, error) from error


def of_model_or_shape(options: argparse.Namespace) -> tuple[str | None, Any]:
    """Where the weights are (None: random ones of --shape), and the config; None for it where neither was given."""
    if options.model is not None:
        name = find_model(options.model)
        if not sys.stderr.isatty():
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()
        return name, load_config(name)
    if options.shape is None:
        return None, None
    from transformers import AutoConfig

    return None, _supported(f"--shape {options.shape}", AutoConfig.for_model(**MODELS[options.shape]))


def _supported(option: str, config: Any) -> Any:
    from bastile.models.support import serves  # needs Transformers

    if not serves(config.model_type):
        raise UsageError(
            f"{option} is of the type {config.model_type}, in which bastile knows no code; `bastile support` lists "
            f"what it knows"
        )
    return config


def build(config: Any, dtype: str, device: Any = "cpu", pretrained: str | None = None) -> Any:
    """The model in training mode: with the weights that are there, or with random ones of this config. These are drawn
    where they are used: on a CPU, billions take minutes."""
    from transformers import AutoModelForCausalLM

    kind = getattr(torch, dtype)
    model: Any
    with torch.device(device):
        if pretrained:
            model = AutoModelForCausalLM.from_pretrained(pretrained, config=config, dtype=kind)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=kind)
    model.config.use_cache = False
    return model.to(device).train()


def load_in_4bit(name: str, dtype: str, device: torch.device) -> Any:
    """The model in training mode with its linear layers, but the head, in bitsandbytes' NF4, doubly quantised, as QLoRA
    has them; they compute in this type."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    kind = getattr(torch, dtype)
    as_in_qlora = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=kind,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        name, dtype=kind, quantization_config=as_in_qlora, device_map={"": device}
    )
    model.config.use_cache = False
    return model.train()


#: The products that LoRA adapts: all of a decoder layer's.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_adapters(model: Any, rank: int, alpha: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
    )


def checkpoint_activations(model: Any) -> None:
    """Layers then keep their inputs alone. Newer releases of Transformers have another name for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise _not_there(name, error) from error


def _not_there(name: str, error: Exception) -> UsageError:
    reason = str(error).strip().splitlines()[0]
    return UsageError(
        f"--model {name}: no config and tokenizer found there ({reason}); give a folder written by save_pretrained, "
        f"or a hub name"
    )
