"""The options of the commands: each stands here once, with its help, whichever of them take it; and their checks.

Spellings of earlier versions go on working, and --help does not show them."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from bastile.cli.errors import UsageError
from bastile.models.table import OPERATORS, USUAL
from bastile.shapes import MODELS

#: Types by their names in torch; each is known by its short name too.
SHORT_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LONG_TYPES = {short: name for name, short in SHORT_TYPES.items()}
#: Shorter flags for operators whose names are long.
_SHORT = {"fused_linear_cross_entropy": "cross_entropy"}


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def type_name(text: str) -> str:
    """A type's name in torch, given that or the short one."""
    return _LONG_TYPES.get(text, text)


def _shape(text: str) -> str:
    if text not in MODELS:
        raise argparse.ArgumentTypeError(f"there is no {text!r}; give one of {', '.join(MODELS)}")
    return text


class _Option(NamedTuple):
    metavar: str | None  #: what stands for its value, which tells the kind of value too; None: a flag
    help: str  #: {what} and {shown}, the default, are filled in by the command
    was: tuple[str, ...] = ()  #: spellings of earlier versions
    more: Mapping[str, Any] = MappingProxyType({})  #: for argparse


_KINDS = {"N": count, "X": float, "SECONDS": float, "GIB": float, "FILE": Path, "FOLDER": Path}
_COMMAS = ", with commas (default: {shown})"

OPTIONS: dict[str, _Option] = {
    # What is run.
    "--model": _Option("NAME", "a folder, or a name on the Hugging Face hub{what}"),
    "--shape": _Option("NAME", "{what}; one of " + ", ".join(MODELS), ("--model",), {"type": _shape}),
    "--layers": _Option("N", "so many layers only (default: all)"),
    "--against": _Option("NAMES", "{what}" + _COMMAS),
    "--trainer": _Option(
        None,
        "measure steps of a trainer in place of bare ones: TRL's SFT, with its defaults",
        more={"action": "store", "choices": ["trl"]},
    ),
    "--data": _Option(
        "DATA", "a text file in UTF-8; a .jsonl file with a chat or a text a line; or a data set on the hub; needed"
    ),
    "--split": _Option("NAME", "of a data set (default: {shown})", more={"default": "train"}),
    "--text": _Option("FILE", "train on this text (default: the Python standard library's sources)"),
    "--vocabulary": _Option("N", "tokens of the BPE vocabulary that is trained first (default: {shown})"),
    "--cases": _Option("NAMES", "{what}" + _COMMAS, ("--shapes", "--shape")),
    "--host": _Option(None, "measure only the host's time of a call, at one row"),
    "--lengths": _Option("N,N", "tokens a sequence (default: 256 to 16384 by doubling)"),
    "--batch": _Option("N", "sequences a batch (default: {shown})"),
    "--sequence": _Option("N", "tokens a sequence, at least 2 (default: {shown})"),
    "--steps": _Option("N", "{what} (default: {shown})", ("--max-steps",)),
    "--epochs": _Option("X", "train this often on all data, in place of --steps"),
    "--accumulate": _Option("N", "batches whose gradients make one step (default: {shown})", more={"default": 1}),
    "--checkpointing": _Option(None, "recompute activations to save memory", ("--gradient-checkpointing",)),
    "--offload-checkpoints": _Option(
        None, "with --checkpointing: Bastile keeps the layers' inputs in the host's memory meanwhile"
    ),
    "--seed": _Option("N", "of all that is drawn at random (default: {shown})", more={"type": int, "default": 0}),
    "--device": _Option("D", "{what} (default: {shown})"),
    "--dtype": _Option(
        "T", "of the weights: {choices}; default: {shown}", more={"type": type_name, "choices": ("float32", "bfloat16")}
    ),
    # How it is trained.
    "--lr": _Option("X", "AdamW's learning rate, after the warm-up (default: {shown})"),
    "--schedule": _Option(
        None,
        "the learning rate after the warm-up (default: {shown})",
        more={"action": "store", "choices": ["constant", "linear", "cosine"], "default": "constant"},
    ),
    "--lr-warmup": _Option(
        "N",
        "steps over which the learning rate rises to --lr (default: a tenth of all)",
        ("--warmup", "--warm-up"),
        {"dest": "warmup", "type": int},
    ),
    "--weight-decay": _Option("X", "AdamW's (default: {shown})", more={"default": 0.0}),
    "--optimizer": _Option(
        None,
        "AdamW of the Bastile run: bastile.optim's, as bastile.apply() gives it to a Trainer, with stochastic rounding "
        "of bfloat16, or with moments of 8 bits; or torch's, which the stock run has (default: {shown})",
        more={
            "action": "store",
            "choices": ["bastile", "bastile-stochastic", "bastile-8bit", "torch"],
            "default": "bastile",
        },
    ),
    "--max-grad-norm": _Option("X", "clip gradients to this norm (default: {shown})", more={"default": 1.0}),
    "--bf16": _Option(None, "float32 weights, products in bfloat16 (autocast): mixed precision"),
    "--lora": _Option(
        "RANK",
        "train LoRA adapters on every projection of the layers, of this rank (default: 16)",
        more={"type": count, "nargs": "?", "const": 16},
    ),
    "--load-in-4bit": _Option(None, "with --lora: the model's own weights in 4 bits (QLoRA: NF4, double quantisation)"),
    "--lora-alpha": _Option("X", "LoRA's scale (default: twice the rank)"),
    "--no-baseline": _Option(
        None, "do not train with stock Transformers first", more={"action": "store_false", "dest": "baseline"}
    ),
    "--save-every": _Option("N", "save a checkpoint every N steps; the newest two are kept"),
    "--resume": _Option(None, "go on with the run in --out from its newest checkpoint"),
    "--save": _Option("FOLDER", "where to save the model (or the adapters) trained with Bastile, and the tokenizer"),
    # How it is measured.
    "--rounds": _Option("N", "turns of the contenders of a case (default: {shown})"),
    "--whole-step": _Option(None, "also time the whole step, with fused AdamW", ("--step",)),
    "--no-optimizer": _Option(None, "without the optimiser's states, which otherwise lie in memory"),
    "--untimed": _Option("N", "steps before them, not timed (default: {shown})", ("--warm-up", "--warmup")),
    "--profile-floor": _Option(
        None,
        "also profile steps; the table then has times as multiples of the products and attention in Bastile's, and the "
        "share of a step in which a GPU is idle",
    ),
    "--memory-limit": _Option("GIB", "as if the device had no more than this"),
    "--timeout": _Option("SECONDS", "of one length (default: {shown})"),
    "--budget": _Option("SECONDS", "start no {what} after this time"),
    "--share-process": _Option(None, "one process for all lengths of an implementation"),
    "--fsdp": _Option(None, "on several GPUs by FSDP2; batch is per GPU, tokens/s are all GPUs'"),
    "--gpus": _Option("N", "processes; only with --fsdp (default: all GPUs; CPU 2)"),
    "--loss-curve": _Option(
        "STEPS",
        "train on the Python standard library's sources instead, at one of --lengths; not with --fsdp, --whole-step, "
        "--no-optimizer or --budget",
        more={"type": count},
    ),
    "--chip": _Option("CHIP", "compile for this chip, which need not be there, in place of a device: {what}"),
    "--threads": _Option("N", "kernels to compile at once (default: CPU cores, at most 8)"),
    # Where the results go.
    "--out": _Option("FOLDER", "folder for {what} (default: {shown})"),
    "--fresh": _Option(None, "forget what an earlier sweep has left in --out"),
    "--trace": _Option("FILE", "a Chrome trace of both steps, for ui.perfetto.dev"),
    "--show": _Option("FILE", "tables and plots of a saved JSON; measure nothing"),
    "--check": _Option(None, "build each type or saved model small, and compare a step, stock and patched, in float32"),
    "--trust-remote-code": _Option(None, "run the Python files that a folder has of its own, as its config asks"),
    "--import": _Option(
        "MODULE",
        "a Python module to import first, such as one that registers model types of your own; may be repeated",
        more={"action": "append", "dest": "modules"},
    ),
    "--report": _Option(None, "print which operators ran, when the command has ended, on standard error"),
    "--json": _Option(None, "print the results as JSON on standard output, all else on standard error"),
    "--plots": _Option(None, "also draw bars, one PNG an operator (needs matplotlib)"),
}


def add(
    parser: Any,
    *names: str,
    what: str = "",
    shown: str = "%(default)s",
    was: Sequence[str] | None = None,
    **changes: Any,
) -> None:
    """Gives the command (or a group of its options) these options. was and changes: in place of the table's."""
    for name in names:
        option = OPTIONS[name]
        keywords: dict[str, Any] = {"action": "store_true"}
        if option.metavar:
            keywords = {"metavar": option.metavar, "type": _KINDS.get(option.metavar, str)}
        keywords |= {**option.more, "help": option.help, **changes}
        choices = ", ".join(f"{one} ({SHORT_TYPES.get(one)})" for one in keywords.get("choices") or ())
        keywords["help"] = keywords["help"].format(what=what, shown=shown, choices=choices)
        _declare(parser, name, option.was if was is None else was, **keywords)


def _declare(parser: Any, name: str, was: Sequence[str], **keywords: Any) -> None:
    action = parser.add_argument(name, **keywords)
    was = [spelling for spelling in was if spelling not in parser._option_string_actions]
    if was:
        parser.add_argument(*was, **{**keywords, "dest": action.dest, "help": argparse.SUPPRESS})


def add_where(parser: Any) -> None:
    """Of a model that is trained or measured."""
    add(parser, "--seed")
    add(parser, "--device", what="cpu, cuda or cuda:N", shown="cuda where there is one")
    add(parser, "--dtype", shown="bfloat16 on CUDA, else float32")


def add_operators(parser: argparse.ArgumentParser) -> None:
    """Two flags for each operator that goes into models, with it and without; what was chosen is read by
    `operators`."""
    group = parser.add_argument_group(
        "operators",
        "which of Bastile's operators to use: only those that are named (and what they fuse), or all but those named "
        "with --no-; none named: all",
    )
    for operator in USUAL:  # what is left out as a rule has an option of its own, which leaves no other out
        short, summary = _SHORT.get(operator), OPERATORS[operator].summary
        keywords = {"dest": f"use_{operator}", "action": argparse.BooleanOptionalAction, "help": summary}
        _declare(group, _flag(short or operator), [_flag(operator)] if short else [], **keywords)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def operators(options: argparse.Namespace) -> dict[str, bool]:
    """As bastile.apply takes them. One that is named brings those that it fuses."""
    asked = {operator: getattr(options, f"use_{operator}", None) for operator in USUAL}
    named = [operator for operator, wanted in asked.items() if wanted]
    if not named:
        return {operator: wanted is None for operator, wanted in asked.items()}
    for operator in named.copy():
        for needed in OPERATORS[operator].needs:
            if asked[needed] is False:
                raise UsageError(f"{_flag(operator)} fuses {needed}: it does not go with --no-{_flag(needed)[2:]}")
            named.append(needed)
    return {operator: operator in named for operator in asked}


# ---- checks ----------------------------------------------------------------------------------------------------------

_POSITIVE = ("lr", "epochs", "memory_limit", "timeout", "budget")
_TWO = {
    "sequence": "each token predicts the next one",
    "loss_curve": "the first step warms up and is not timed",
}


def check(options: argparse.Namespace) -> None:
    """What holds of an option in every command."""
    for name, value in vars(options).items():
        if name in _POSITIVE and value is not None:
            need_positive(_flag(name), value)
        if name in _TWO and value == 1:
            raise UsageError(f"{_flag(name)} must be at least 2: {_TWO[name]}")


def need_positive(option: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise UsageError(f"{option} is {value}; a positive number is needed")


def need_packages(*packages: str, purpose: str = "") -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{purpose or 'this command'} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def chosen(
    option: str,
    given: str | None,
    known: Iterable[str],
    otherwise: Iterable[str],
    meant: Callable[[str], str] = lambda name: name,
) -> list[str]:
    """The names given with commas between them, each once; `otherwise` where none were. An error that names the option
    for an unknown one. meant: the name that another one stands for."""
    if given is None:
        return list(otherwise)
    known = list(known)
    names = [meant(name.strip()) for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"{option}: there is no {name!r}; give one or more of {', '.join(known)}")
    return list(dict.fromkeys(names))


def device_for(given: str | None) -> str:
    name = given or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name}: give cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: give cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"--device {name}: this PyTorch sees no CUDA device; leave --device out to use the CPU")
        if (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA device(s), from 0 on")
    return name


def dtype_for(given: str | None, device: str) -> str:
    return given or ("bfloat16" if device.startswith("cuda") else "float32")
