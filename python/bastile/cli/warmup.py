"""`warmup`: from options to a model without weights, its kernels compiled, and what each operator took."""

import argparse
from dataclasses import asdict
from typing import Any

import torch

from bastile.cli import model
from bastile.cli.errors import RunFailed, UsageError
from bastile.cli.options import SHORT_TYPES, add, device_for, need_packages
from bastile.warmup import CHIPS, warmup_all_kernels


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "warmup",
        help="compile a model's GPU kernels now, into the cache on disk",
        description="Compiles every kernel that training a model needs, several at once, so that no first step of this "
        "user on this machine waits for them. Needs no weights. Neither --model nor --shape given: the default config "
        "of the type of each model that `bastile sweep` knows.",
    )
    add(parser, "--model")
    add(parser, "--shape", what="in place of --model: this model's shapes")
    add(parser, "--dtype", default="bfloat16", choices=tuple(SHORT_TYPES))
    add(parser, "--device", what="cuda or cuda:N", shown="cuda")
    add(parser, "--chip", what=", ".join(CHIPS))
    add(parser, "--batch", "--sequence", shown="several")
    add(parser, "--lora", "--load-in-4bit", "--threads", "--json")
    parser.set_defaults(command=warmup)


def warmup(options: argparse.Namespace) -> int:
    """0, also where there is no GPU and so nothing to do."""
    need_packages("transformers", "rich")
    if options.model is not None and options.shape is not None:
        raise UsageError("give either --model or --shape, not both")

    from rich.console import Console

    from bastile.cli.shown import table

    if (options.batch is None) != (options.sequence is None):
        raise UsageError("--batch and --sequence go together")
    if options.lora and options.model is None and options.shape is None:
        raise UsageError("--lora needs --model or --shape")
    if options.load_in_4bit and not options.lora:
        raise UsageError("--load-in-4bit goes with --lora: weights of 4 bits are not trained")
    # Where no device is there at all, naming one is no mistake: the command then says so and has nothing to do.
    device = device_for(options.device) if torch.cuda.is_available() else None
    _, given = model.of_model_or_shape(options)
    dtype = getattr(torch, options.dtype)
    shapes = [(options.batch, options.sequence)] if options.batch else None
    try:
        if options.lora:
            need_packages("peft")
            made = model.build(given, options.dtype, "meta")
            if options.load_in_4bit:
                need_packages("bitsandbytes", purpose="--load-in-4bit")
                from bastile.sweep.model import quantise

                quantise(made)
            given = model.with_adapters(made, options.lora, 2 * options.lora)
        done = warmup_all_kernels(given, dtype, device, threads=options.threads, shapes=shapes, chip=options.chip)
    except ValueError as error:  # a type whose code is not known, or has no such layers; an unknown chip
        raise UsageError(str(error)) from error
    except RuntimeError as error:
        raise RunFailed(str(error)) from error
    options.found = asdict(done)
    console = Console()
    if done.seconds:
        shown = table("", ["operator and width"], ["seconds"])
        for title, took in sorted(done.seconds.items(), key=lambda item: -item[1]):
            shown.add_row(title, f"{took:.2f}")
        console.print(shown)
    console.print(str(done), soft_wrap=True)
    return 0
