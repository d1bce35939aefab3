"""What the `bastile` command accepts."""

import argparse
import shlex
from collections.abc import Sequence

import bastile
from bastile.cli import bench, demo, finetune, profile, run, support, sweep, warmup


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="bastile",
        description="Fine-tune a language model with Bastile's operators and compare it with stock Transformers; see "
        "where a training step's time goes; time the operators alone.",
    )
    made.add_argument("--version", action="version", version=f"bastile {bastile.__version__}")
    subparsers = made.add_subparsers(dest="name", required=True, metavar="command")
    for command in (demo, finetune, run, profile, bench, sweep, warmup, support):
        command.add_parser(subparsers)
    return made


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, with `command` the function that carries them out, and `given` the command as it was written, which
    results hold so that they can be had again."""
    options = parser().parse_args(arguments)
    options.given = shlex.join(["bastile", *arguments])
    return options
