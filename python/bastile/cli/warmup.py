"""`warmup`: from options to a config, its kernels compiled, and what each operator took."""

import argparse
from typing import Any

import torch

from bastile.cli import model
from bastile.cli import options as shared
from bastile.cli.errors import RunFailed, UsageError
from bastile.cli.options import count, device_for, need_packages
from bastile.shapes import MODELS


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "warmup",
        help="compile a model's GPU kernels now, into the cache on disk",
        description="Compiles every kernel that training a model needs, several at once, so that no first step of this "
        "user on this machine waits for them. Needs no weights. Neither --model nor --shape given: every supported "
        "model type's default config.",
    )
    shared.add_model(parser)
    shared.add_shape(parser, "in place of --model: this model's shapes")
    shared.add_dtype(parser, ("float32", "bfloat16", "float16"), "bfloat16", "bfloat16")
    shared.add_device(parser, "cuda or cuda:N", "cuda")
    parser.add_argument(
        "--threads", type=count, metavar="N", help="kernels to compile at once (default: CPU cores, at most 8)"
    )
    parser.set_defaults(command=warmup)


def warmup(options: argparse.Namespace) -> int:
    """0, also where there is no GPU and so nothing to do."""
    need_packages("transformers", "rich")
    if options.model is not None and options.shape is not None:
        raise UsageError("give either --model or --shape, not both")

    from rich.console import Console

    from bastile.warmup import warmup_all_kernels

    # Where no device is there at all, naming one is no mistake: the command then says so and has nothing to do.
    device = device_for(options.device) if torch.cuda.is_available() else None
    dtype = getattr(torch, options.dtype)
    try:
        done = warmup_all_kernels(_config(options), dtype, device, threads=options.threads)
    except RuntimeError as error:
        raise RunFailed(str(error)) from error
    console = Console()
    if done.seconds:
        console.print(_table(done.seconds))
    console.print(str(done), soft_wrap=True)
    return 0


def _config(options: argparse.Namespace) -> Any:
    """None: of every supported model type."""
    if options.model is not None:
        return model.load_config(model.find_model(options.model))
    if options.shape is None:
        return None
    from transformers import AutoConfig

    return AutoConfig.for_model(**MODELS[options.shape])


def _table(seconds: dict[str, float]) -> Any:
    from rich.table import Table

    table = Table("operator and width")
    table.add_column("seconds", justify="right")
    for title, took in sorted(seconds.items(), key=lambda item: -item[1]):
        table.add_row(title, f"{took:.2f}")
    return table
