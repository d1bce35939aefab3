"""Finding a model by the name that a user gave: its folder, its config, its tokenizer."""

import logging
from pathlib import Path
from typing import Any

from bastile.cli.errors import UsageError
from bastile.models.support import serves

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
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise _not_there(name, error) from error
    if not serves(config.model_type):
        raise UsageError(
            f"--model {name} is of the type {config.model_type}, in which bastile knows no code; `bastile support` "
            f"lists what it knows"
        )
    return config


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
