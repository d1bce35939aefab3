"""The `bastile` command: `demo` and `finetune` train with stock Transformers and with Bastile, and compare; `run` has
any command train with it; `profile` shows where a training step's time goes; `bench` times the operators alone, `sweep`
whole models over sequence lengths; `warmup` compiles a model's GPU kernels ahead; `support` tells what of a model type
is served."""

import contextlib
import os
import sys
from collections.abc import Sequence

from bastile.cli.errors import RunFailed, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 1 where a training run failed, 2 for a mistake in the command."""
    from bastile.cli.arguments import parse
    from bastile.cli.files import dumps
    from bastile.cli.options import check

    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
    except SystemExit as ending:  # --help, --version, and what argparse refuses
        return int(ending.code or 0)
    options.found = None  # what a command measured, for --json
    status = 1
    try:
        if "BASTILE_RUN" in os.environ:  # what is measured as stock Transformers would have Bastile in it
            raise UsageError("Bastile's own commands are not for `bastile run`: they apply it where it is to be")
        check(options)
        with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
            status = options.command(options)
    except UsageError as error:
        print(f"bastile {options.name}: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"bastile {options.name}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"bastile {options.name}: interrupted", file=sys.stderr)
        return 130
    if options.json and options.found is not None:
        print(dumps(options.found))
    return status
