"""Options that several commands share, and their checks."""

import argparse
import importlib.util
import math

import torch

from bastile.cli.errors import UsageError


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


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
