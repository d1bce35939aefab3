"""`bastile support`: what of the installed Transformers' models the operators serve, what stays stock, and why."""

import argparse
import importlib
import os
import sys
from collections import Counter
from typing import Any

from bastile.cli.errors import RunFailed, UsageError
from bastile.cli.options import add, need_packages


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "support",
        help="which operators serve a model type, what stays stock and why",
        description="What of a model type's code bastile knows. Without a type: how many types each operator serves.",
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types, such as qwen3")
    add(parser, "--check", "--import", "--json")
    parser.set_defaults(command=support)


def support(options: argparse.Namespace) -> int:
    need_packages("transformers")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is loaded
    from bastile.models.support import support as support_of

    if not options.types and options.check:
        raise UsageError("--check needs model types to check")
    for name in options.modules or ():
        _import(name)
    options.found = {}
    if not options.types:
        return _all(options.found)
    for model_type in options.types:
        try:
            found = support_of(model_type)
        except ValueError as error:
            raise UsageError(f"{error}. A type of your own is known when its module is: --import MODULE") from error
        options.found[model_type] = {"places": found.places, "stock": found.stock}
        print(f"{model_type}:")
        for operator, places in found.places.items():
            print(f"  {operator:28}{', '.join(places)}")
        for operator, pieces in found.stock.items():
            for where, why in pieces.items():
                print(f"  {operator:28}stock: {where} {why}")
    if options.check:
        return _check(options.types, options.found)
    return 0


def _import(name: str) -> None:
    """A module that registers model types, from the folder that the command runs in or from Python's path."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"--import: {name} cannot be imported: {error}") from error
    finally:
        sys.path.remove(here)


def _all(told: dict[str, Any]) -> int:
    import transformers

    from bastile.models.small import causal_types
    from bastile.models.support import support

    served: Counter[str] = Counter()
    types = causal_types()
    for model_type in types:
        served.update(support(model_type).places.keys())
    told.update(types=len(types), transformers=transformers.__version__, served=dict(served))
    print(f"Of {len(types)} causal language model types of transformers {transformers.__version__}:")
    for operator, count in served.items():
        print(f"  {operator:28}has a place in {count}")
    return 0


def _check(types: list[str], told: dict[str, Any]) -> int:
    from bastile.models.support import check

    failed = []
    for model_type in types:
        try:
            done = check(model_type)
        except Exception as error:  # whatever a model of any kind may raise
            raise RunFailed(f"{model_type} cannot be checked: {type(error).__name__}: {error}") from error
        parameter, worst = done.worst
        told[model_type]["check"] = {"same": done.passed, "loss": done.loss, "gradients": worst, "ran": dict(done.ran)}
        ran = ", ".join(f"{operator} {count}" for operator, count in done.ran.items()) or "nothing"
        print(
            f"{model_type}: {'the same' if done.passed else 'DIFFERS'}: loss by {done.loss:.1e}, gradients by "
            f"{worst:.1e} at most ({parameter}); ran: {ran}"
        )
        if not done.passed:
            failed.append(model_type)
    if failed:
        raise RunFailed(f"{', '.join(failed)}: patched, a step is not what it is in stock Transformers")
    return 0
