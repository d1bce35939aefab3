"""`bastile run`: any command that trains, with bastile.apply() in each of its processes."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import bastile
from bastile.cli.errors import UsageError
from bastile.cli.options import add, add_operators, operators

#: Has a module that Python runs when it begins, and nothing else.
_AT_START = Path(bastile.__file__).parent / "at_start"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        help="run a command that trains, such as `trl sft ...`, with bastile.apply() in each of its processes",
        description="Runs the command, which has the terminal, signals and exit status to itself. In each Python that "
        "it begins, launchers' workers too, bastile.apply() is called when Transformers has been imported. Options "
        "come before the command; what follows it is its own.",
        usage="bastile run [options] COMMAND ...",
        epilog="For example: bastile run trl sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name my/data; "
        "bastile run torchrun --nproc-per-node 2 train.py; bastile run train.py",
    )
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="COMMAND", help="a command, or a Python file, and its arguments"
    )
    add(parser, "--report")
    add(parser, "--offload-checkpoints", help="keep checkpointed layers' inputs in the host's memory meanwhile")
    add_operators(parser)
    parser.set_defaults(command=run, json=False)


def run(options: argparse.Namespace) -> NoReturn:
    given = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not given:
        raise UsageError("a command is needed, such as: bastile run trl sft --model_name_or_path NAME ...")
    # What is not left out is not named: apply takes a name for a demand, which a model without a place for it refuses.
    chosen = {operator: False for operator, wanted in operators(options).items() if not wanted}
    chosen |= {"offload_checkpoints": True} if options.offload_checkpoints else {}
    words = [sys.executable, *given] if given[0].endswith(".py") else given
    environment = {
        **os.environ,
        "BASTILE_RUN": json.dumps({"apply": chosen, "report": options.report}),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_AT_START), os.environ.get("PYTHONPATH")))),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(words[0], words, environment)
    except FileNotFoundError as error:
        raise UsageError(f"there is no command {words[0]!r} on the path") from error
    except OSError as error:
        raise UsageError(
            f"{words[0]} is no program that can be run ({error.strerror}); of Python's: python FILE"
        ) from error
