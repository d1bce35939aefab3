"""What the `bastile` command accepts."""

import argparse
from collections.abc import Sequence

import bastile
from bastile.cli import bench, demo, finetune, profile, sweep, warmup


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with `command` the function that carries them out."""
    parser = argparse.ArgumentParser(
        prog="bastile",
        description="Fine-tune a language model with Bastile's operators and compare it with stock Transformers; see "
        "where a training step's time goes; time the operators alone.",
    )
    parser.add_argument("--version", action="version", version=f"bastile {bastile.__version__}")
    subparsers = parser.add_subparsers(dest="name", required=True, metavar="command")
    for command in (demo, finetune, profile, bench, sweep, warmup):
        command.add_parser(subparsers)
    return parser.parse_args(arguments)
