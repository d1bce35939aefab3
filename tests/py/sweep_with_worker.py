"""`bastile sweep` with other workers: a module for copies.begin, whose first argument is the worker's program."""

import sys

from bastile import cli
from bastile.sweep import run


def main() -> int:
    use(sys.argv.pop(1))
    return cli.main()


def use(program: str) -> None:
    assert run.carry_out.__kwdefaults__ is not None
    run.carry_out.__kwdefaults__["worker"] = (sys.executable, "-S", program)


if __name__ == "__main__":
    sys.exit(main())
