"""`bastile support`: what of the installed Transformers' models, or of a saved one, the operators serve, what stays
stock, and why."""

import argparse
import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bastile.cli.errors import RunFailed, UsageError
from bastile.cli.options import add, need_packages

if TYPE_CHECKING:  # they need Transformers
    from bastile.models.support import Check, Support


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "support",
        help="which operators serve a model, what stays stock and why",
        description="What bastile knows of the code of a model type, or of the very model that a folder holds, of "
        "which only the config is read. Without either: how many types each operator serves.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a model type, such as qwen3; or a saved model's folder, such as ./my-model",
    )
    add(parser, "--check", "--trust-remote-code", "--import", "--json")
    parser.set_defaults(command=support)


@dataclass(frozen=True)
class _Asked:
    """A type or a folder that was asked for."""

    title: str
    support: "Support"
    check: "Callable[[], Check]"
    notes: tuple[str, ...] = ()


def support(options: argparse.Namespace) -> int:
    need_packages("transformers")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is loaded
    if not options.models and options.check:
        raise UsageError("--check needs model types or folders of saved models to check")
    for name in options.modules or ():
        _import(name)
    options.found = {}
    if not options.models:
        return _all(options.found)
    asked = {name: _asked(name, options.trust_remote_code) for name in options.models}
    for name, each in asked.items():
        options.found[name] = {"places": each.support.places, "stock": each.support.stock}
        print(f"{each.title}:")
        for operator, places in each.support.places.items():
            print(f"  {operator:28}{', '.join(dict.fromkeys(places))}")
        stock: dict[tuple[str, str], list[str]] = {}
        for operator, pieces in each.support.stock.items():
            for piece in pieces.items():
                stock.setdefault(piece, []).append(operator)
        for (where, why), operators in stock.items():
            print(f"  {', '.join(operators):26}  stock: {where} {why}")
        for note in each.notes:
            print(f"  note: {note}")
    return _check(asked, options.found) if options.check else 0


def _asked(name: str, trust_remote_code: bool) -> _Asked:
    from bastile.models.support import check, parts_of_other_types, support

    if not _is_folder(name):
        try:
            found, others = support(name), parts_of_other_types(name)
            parts = ", ".join(f"{of} ({part})" for part, of in others.items())
            note = f"parts of it are of other types, by default {parts}; a saved model's folder tells of all its parts"
            return _Asked(name, found, lambda: check(name), (note,) if others else ())
        except ImportError as error:
            raise RunFailed(f"{name}: Transformers' file of it cannot be imported here: {error}") from error
        except ValueError as error:
            raise UsageError(
                f"{error}, and there is no such folder. A type of your own is known when its module is: --import MODULE"
            ) from error
    return _saved(name, trust_remote_code)


def _is_folder(name: str) -> bool:
    """Whether this is meant as one: a type's name has no separator, and wins over a folder that is called so."""
    from bastile.models.loading import known_types

    return os.sep in name or (Path(name).is_dir() and name not in known_types())


def _saved(name: str, trust_remote_code: bool) -> _Asked:
    from bastile.models import saved
    from bastile.models.support import check_model, support_of

    try:
        found = saved.read(_folder(name), trust_remote_code)
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        model = found.without_weights()
    except Exception as error:  # whatever a model of any kind may raise
        raise RunFailed(f"{name}: its model cannot be built: {type(error).__name__}: {error}") from error
    title = f"{name} ({type(model).__name__}, {found.config.model_type})"
    return _Asked(title, support_of(model), lambda: check_model(found.built_small()), found.notes)


def _folder(name: str) -> str:
    """Itself, or that in the hub's cache for a model's name on the hub."""
    from huggingface_hub import try_to_load_from_cache

    path = Path(name)
    with suppress(ValueError):  # no name that the hub would have
        cached = None if path.exists() else try_to_load_from_cache(name, "config.json")
        path = Path(cached) if isinstance(cached, str) else path
    if not path.exists():
        raise UsageError(
            f"there is no folder {name}, nor a model of that name in the hub's cache, and nothing is downloaded: give "
            "a folder written by save_pretrained, or a model type"
        )
    return str(path if path.is_dir() else path.parent)


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


def _check(asked: dict[str, _Asked], told: dict[str, Any]) -> int:
    from bastile.models.table import OF_BACKBONES

    failed = []
    for name, each in asked.items():
        try:
            done = each.check()
        except Exception as error:  # whatever a model of any kind may raise
            raise RunFailed(f"{name} cannot be checked: {type(error).__name__}: {error}") from error
        parameter, worst = done.worst
        told[name]["check"] = {
            "same": done.passed,
            "loss": done.loss,
            "logits": done.logits,
            "gradients": worst,
            "ran": dict(done.ran),
            "aside": dict(done.aside),
        }
        ran = ", ".join(f"{operator} {count}" for operator, count in done.ran.items()) or "nothing"
        print(
            f"{name}: {'the same' if done.passed else 'DIFFERS'}: loss by {done.loss:.1e}, logits by "
            f"{done.logits:.1e}, gradients by {worst:.1e} at most ({parameter}); ran: {ran}"
        )
        for operator, why in done.aside.items():
            if operator not in OF_BACKBONES:  # which serve no model as small as this
                print(f"  {operator:28}stepped aside: {why}")
        if not done.passed:
            failed.append(name)
    if failed:
        raise RunFailed(f"{', '.join(failed)}: patched, a step is not what it is in stock Transformers")
    return 0
