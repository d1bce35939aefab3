"""`demo` and `finetune`: from options to a training plan, its runs, and the report."""

import argparse
import importlib.util
import math
from pathlib import Path
from typing import Any

import torch

from bastile.cli import data
from bastile.cli.errors import UsageError
from bastile.cli.folder import make_folder
from bastile.models.table import FAMILIES

# Per device: a model large enough for its operators to matter there, small enough that both runs stay within minutes.
DEMO_SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "training": {"steps": 150, "batch": 4, "sequence": 256},
        "model": {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
    },
    "cuda": {
        "training": {"steps": 200, "batch": 8, "sequence": 1024},
        "model": {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
    },
}


def demo(options: argparse.Namespace) -> int:
    device, out = _prepare(options)
    sizes = DEMO_SIZES[torch.device(device).type]
    for name, value in sizes["training"].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    text = data.read_text(options.text) if options.text else data.standard_library_text()
    print(f"Training a BPE vocabulary on {len(text):,} characters of text", flush=True)
    tokenizer = data.train_tokenizer(text, options.vocabulary)
    tokens = torch.tensor(tokenizer.encode(text).ids)
    config = {
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": options.sequence,
        "tie_word_embeddings": True,
        **sizes["model"],
    }
    return _train(options, device, out, tokens, {"config": config})


def finetune(options: argparse.Namespace) -> int:
    device, out = _prepare(options)
    text = data.read_text(options.data)
    tokenizer = _load_model_parts(options.model)
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if options.save:
        tokenizer.save_pretrained(make_folder("--save", options.save))
    return _train(options, device, out, tokens, {"pretrained": options.model})


def _prepare(options: argparse.Namespace) -> tuple[str, Path]:
    """The device and the output folder, after the checks that need no model."""
    missing = [name for name in ("transformers", "rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if options.steps == 1:
        raise UsageError("--steps must be at least 2: the first step warms up and is not timed")
    if options.sequence == 1:
        raise UsageError("--sequence must be at least 2: each token predicts the next one")
    if not 0 < options.lr < math.inf:
        raise UsageError(f"--lr is {options.lr}; a positive number is needed")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UsageError(f"--device {device}: give cpu, cuda or cuda:N") from error
    if kind not in DEMO_SIZES:
        raise UsageError(f"--device {device}: give cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: this PyTorch sees no CUDA device; leave --device out to train on the CPU")
    return device, make_folder("--out", options.out)


def _load_model_parts(name: str) -> Any:
    """The model's tokenizer, once its config is known to be of a supported type."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        model_type = AutoConfig.from_pretrained(name).model_type
        if model_type not in FAMILIES:
            raise UsageError(
                f"--model {name} is of the type {model_type}; supported are: {', '.join(sorted(FAMILIES))}"
            )
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"--model {name}: no config and tokenizer found there ({reason}); give a folder written by "
            f"save_pretrained, or a hub name"
        ) from error


def _train(options: argparse.Namespace, device: str, out: Path, tokens: torch.Tensor, model: dict[str, Any]) -> int:
    from bastile.cli import compare, report

    blocks = len(tokens) // options.sequence
    if blocks < options.batch:
        raise UsageError(
            f"the text has {len(tokens)} tokens, and one step takes {options.batch} x {options.sequence}: give a "
            f"longer text, or a smaller --batch or --sequence"
        )
    torch.save(tokens, out / "tokens.pt")
    plan = {
        "model": model,
        "tokens": str(out / "tokens.pt"),
        "device": device,
        "dtype": options.dtype or ("bfloat16" if device.startswith("cuda") else "float32"),
        "gradient_checkpointing": options.gradient_checkpointing,
        **{name: getattr(options, name) for name in ("steps", "batch", "sequence", "lr", "seed")},
    }
    runs = []
    for name in ("stock", "bastile") if options.baseline else ("bastile",):
        save = str(options.save) if options.save and name == "bastile" else None
        runs.append(compare.run({**plan, "name": name, "save": save}, out))
    report.write(plan, runs, out)
    return 0
