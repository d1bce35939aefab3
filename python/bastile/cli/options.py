"""The options of the commands: each that several of them take is declared here, once, under one name; and their checks.

Spellings of earlier versions go on working, and --help does not show them."""

import argparse
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bastile.cli.errors import UsageError
from bastile.models.table import OPERATORS
from bastile.shapes import MODELS

#: Shorter flags for operators whose names are long.
_SHORT = {"fused_linear_cross_entropy": "cross_entropy"}
#: Types by their names in torch; each is known by its short name too.
SHORT_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LONG_TYPES = {short: name for name, short in SHORT_TYPES.items()}


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


def add_option(parser: Any, *names: str, was: Sequence[str] = (), **keywords: Any) -> None:
    """As add_argument does. was: spellings of earlier versions."""
    action = parser.add_argument(*names, **keywords)
    if was:
        parser.add_argument(*was, **{**keywords, "dest": action.dest, "help": argparse.SUPPRESS})


# ---- what is run -----------------------------------------------------------------------------------------------------


def add_model(parser: Any, required: bool = False) -> None:
    text = "a folder, or a name on the Hugging Face hub" + ("; needed" if required else "")
    add_option(parser, "--model", metavar="NAME", required=required, help=text)


def add_shape(parser: Any, meaning: str, was: Sequence[str] = ()) -> None:
    meaning = f"{meaning}; one of {', '.join(MODELS)}"
    add_option(parser, "--shape", was=was, type=_shape, metavar="NAME", help=meaning)


def add_steps(parser: Any, meaning: str, default: int | None, was: Sequence[str] = ()) -> None:
    add_option(parser, "--steps", was=was, type=count, metavar="N", default=default, help=meaning)


def add_batch(parser: Any, default: int | None, shown: str) -> None:
    text = f"sequences a batch (default: {shown})"
    add_option(parser, "--batch", type=count, metavar="N", default=default, help=text)


def add_sequence(parser: Any, default: int | None, shown: str) -> None:
    text = f"tokens a sequence, at least 2 (default: {shown})"
    add_option(parser, "--sequence", type=count, metavar="N", default=default, help=text)


def add_checkpointing(parser: Any) -> None:
    add_option(
        parser,
        "--checkpointing",
        was=["--gradient-checkpointing"],
        action="store_true",
        help="recompute activations to save memory",
    )


def add_seed(parser: Any) -> None:
    text = "of all that is drawn at random (default: %(default)s)"
    add_option(parser, "--seed", type=int, metavar="N", default=0, help=text)


def add_device(parser: Any, kinds: str = "cpu, cuda or cuda:N", default: str = "cuda where there is one") -> None:
    add_option(parser, "--device", metavar="D", help=f"{kinds} (default: {default})")


def add_dtype(
    parser: Any,
    types: Sequence[str] = ("float32", "bfloat16"),
    default: str | None = None,
    shown: str = "bfloat16 on CUDA, else float32",
) -> None:
    """Of a model's weights."""
    known = ", ".join(f"{name} ({SHORT_TYPES[name]})" for name in types)
    add_option(
        parser,
        "--dtype",
        type=type_name,
        choices=types,
        metavar="T",
        default=default,
        help=f"of the weights: {known}; default: {shown}",
    )


def add_operators(parser: argparse.ArgumentParser) -> None:
    """Two flags for each operator that goes into models, with it and without; what was chosen is read by
    `operators`."""
    group = parser.add_argument_group(
        "operators",
        "which of Bastile's operators to use: only those that are named (and what they fuse), or all but those named "
        "with --no-; none named: all",
    )
    for operator, row in OPERATORS.items():
        short = _SHORT.get(operator)
        add_option(
            group,
            _flag(short or operator),
            was=[_flag(operator)] if short else [],
            dest=f"use_{operator}",
            action=argparse.BooleanOptionalAction,
            help=row.summary,
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def operators(options: argparse.Namespace) -> dict[str, bool]:
    """As bastile.apply takes them. One that is named brings those that it fuses."""
    asked = {operator: getattr(options, f"use_{operator}", None) for operator in OPERATORS}
    named = [operator for operator, wanted in asked.items() if wanted]
    if not named:
        return {operator: wanted is None for operator, wanted in asked.items()}
    for operator in named.copy():
        for needed in OPERATORS[operator].needs:
            if asked[needed] is False:
                raise UsageError(f"{_flag(operator)} fuses {needed}: it does not go with --no-{_flag(needed)[2:]}")
            named.append(needed)
    return {operator: operator in named for operator in OPERATORS}


# ---- how it is measured, and where the results go -------------------------------------------------------------------


def add_against(parser: Any, known: str, default: str) -> None:
    add_option(parser, "--against", metavar="NAMES", help=f"{known}, with commas (default: {default})")


def add_budget(parser: Any, what: str) -> None:
    add_option(parser, "--budget", type=float, metavar="SECONDS", help=f"start no {what} after this time")


def add_out(parser: Any, default: str, holds: str) -> None:
    text = f"folder for {holds} (default: %(default)s)"
    add_option(parser, "--out", type=Path, metavar="FOLDER", default=Path(default), help=text)


def add_show(parser: Any) -> None:
    add_option(parser, "--show", type=Path, metavar="FILE", help="tables and plots of a saved JSON; measure nothing")


def add_json(parser: Any) -> None:
    add_option(parser, "--json", action="store_true", help="print the JSON in place of the tables")


# ---- checks ----------------------------------------------------------------------------------------------------------


def need_packages(*packages: str, purpose: str = "") -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{purpose or 'this command'} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def need_positive(option: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise UsageError(f"{option} is {value}; a positive number is needed")


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
