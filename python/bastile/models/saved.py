"""A model that somebody has saved, by its folder: of what its config.json says, without its weights."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bastile.models import loading, small

#: Of a small model: one that has more was not made small, for its config calls its sizes otherwise.
_MOST_PARAMETERS = 300_000_000
#: In the order in which they are asked for a class.
_AUTO = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")


@dataclass(frozen=True)
class Saved:
    folder: str
    config: Any
    build: Callable[..., Any]  # from a config to a model of the saved one's class
    notes: tuple[str, ...]  # of what is looked at otherwise than it was saved, a sentence each

    def without_weights(self) -> nn.Module:
        """The model as it is, but that its tensors have no memory."""
        with torch.device("meta"):
            model: nn.Module = self.build(_plain(self.config), dtype=torch.bfloat16)
        return model

    def built_small(self) -> nn.Module:
        """One of the same class, of a config that says the same with small numbers, with random weights.

        Raises:
            ValueError: for what is no language model, and for a config whose numbers nobody knows to reduce."""
        config = small.reduced(_plain(self.config))
        with torch.device("meta"):
            model = self.build(copy.deepcopy(config), dtype=torch.float32)
        if not _scores_tokens(model):
            raise ValueError(
                f"a {type(model).__name__} is no language model, which takes labels and has an output head; its code "
                "is looked at without --check"
            )
        count = sum(p.numel() for p in model.parameters())
        if count > _MOST_PARAMETERS:
            raise ValueError(
                f"with the numbers reduced that are known by name it has still {count} parameters; copy its folder "
                "without the weights, make the numbers in config.json small, and give that"
            )
        torch.manual_seed(0)
        return small.prepared(self.build(config, dtype=torch.float32))


def _scores_tokens(model: Any) -> bool:
    """Whether it takes a label for each token, as far as can be told: of code of someone's own, its step shows it."""
    is_transformers = type(model).__module__.startswith("transformers.")
    has_head = model.get_output_embeddings() is not None or type(model.config) in _mapping(
        "AutoModelForImageTextToText"
    )
    return "labels" in inspect.signature(model.forward).parameters and (has_head or not is_transformers)


def read(folder: str, trust_remote_code: bool = False) -> Saved:
    """What a folder's config.json says. Nothing is downloaded.

    Args:
        trust_remote_code: whether Python files of the folder's own, which its config names, may be run.

    Raises:
        ValueError: saying what is missing, or not known.
    """
    from transformers import AutoConfig

    written = _written(folder)
    mapped = written.get("auto_map") or {}
    model_type = written.get("model_type")
    if mapped and not trust_remote_code and not _is_known(model_type):
        raise ValueError(
            f"{folder} holds a model of the type {model_type!r}, whose code is its own "
            f"({', '.join(sorted({str(name) for name in mapped.values()}))}) and would run here: read it, and give "
            "--trust-remote-code"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # whatever code of its own may raise
        raise ValueError(
            f"{folder} has a config.json that transformers {loading.transformers_version()} cannot read "
            f"({type(error).__name__}: {_first_line(error)}). A type of your own is known when its module is: "
            "--import MODULE"
        ) from error
    notes = []
    if mapped and not trust_remote_code:
        notes.append("its config names code of its own, which is not looked at: Transformers has this type too")
    if getattr(config, "quantization_config", None):
        notes.append("its weights are quantised; they are looked at as if they were not")
    return Saved(folder, config, _class_of(config, trust_remote_code), tuple(notes))


def _written(folder: str) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no config.json{_instead(Path(folder))}; give a folder written by save_pretrained"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no config: an object with a model_type is needed")
    return found


def _instead(folder: Path) -> str:
    """What a folder of adapters is."""
    with suppress(OSError, ValueError, KeyError):
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
        return f", but PEFT's adapters of {base}: that model's folder is needed"
    return ""


def _is_known(model_type: Any) -> bool:
    """To Transformers, or to it by someone's registering."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _class_of(config: Any, trust_remote_code: bool) -> Callable[..., Any]:
    """What builds the class that was saved: code of its own where that may run, else Transformers' by its name, else
    the type's language model."""
    import transformers

    (named, *_) = getattr(config, "architectures", None) or [None]
    mapped = (getattr(config, "auto_map", None) or {}) if trust_remote_code else {}
    autos = [name for name in _AUTO if str(mapped.get(name)).rpartition(".")[2] == named]
    autos += [name for name in _AUTO if name in mapped]
    if autos:
        return partial(getattr(transformers, autos[0]).from_config, trust_remote_code=True)
    cls: Any = getattr(transformers, named, None) if named else None
    if isinstance(cls, type) and getattr(cls, "config_class", None) is type(config):
        return cls._from_config  # type: ignore[attr-defined]
    for name in _AUTO:
        if type(config) in _mapping(name):
            return partial(getattr(transformers, name).from_config, trust_remote_code=False)
    raise ValueError(
        f"transformers {loading.transformers_version()} has no model for a {type(config).__name__}"
        f"{f', such as the {named} that was saved' if named else ''}"
    )


def _mapping(auto: str) -> Any:
    """From classes of configs to those of models."""
    import transformers

    return getattr(transformers, auto)._model_mapping


def _plain(config: Any) -> Any:
    """A copy that says nothing of how weights are kept."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
