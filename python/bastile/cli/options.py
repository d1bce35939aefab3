"""Options that several commands share, and their checks."""

import argparse
import importlib.util
import math
from pathlib import Path

import torch

from bastile.cli.errors import UsageError
from bastile.models.table import OPERATORS

#: Shorter flags for operators whose names are long.
_ALIASES = {"fused_linear_cross_entropy": ["--cross-entropy"]}


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def add_operators(parser: argparse.ArgumentParser) -> None:
    """A flag for each operator that goes into models; what was chosen is read by `operators`."""
    group = parser.add_argument_group("operators", "which of Bastile's operators to use; none given: all")
    for operator, row in OPERATORS.items():
        group.add_argument(
            f"--{operator.replace('_', '-')}",
            *_ALIASES.get(operator, []),
            dest="operators",
            action="append_const",
            const=operator,
            help=row.summary,
        )


def operators(options: argparse.Namespace) -> dict[str, bool]:
    """As bastile.apply takes them."""
    chosen = options.operators or OPERATORS
    return {operator: operator in chosen for operator in OPERATORS}


def add_run(parser: argparse.ArgumentParser, out: str, holds: str) -> None:
    """Where and in what type a model runs, and where the results go."""
    parser.add_argument(
        "--seed", type=int, metavar="N", default=0, help="of all that is drawn at random (default: %(default)s)"
    )
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="of the weights (default: bfloat16 on CUDA, else float32)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", default=Path(out), help=f"for {holds} (default: %(default)s)"
    )


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
