"""What tools/random_models.py and random_trainers.py share: a number is a case, a case that fails is asked again."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any


class Unusable(Exception):
    """What has been drawn is none, or stock Transformers cannot train it."""


#: Of a seed, its case and which weights: what came of it. "verdict": "the same", "differs" or "raises".
Judge = Callable[[int, Any, int], dict[str, Any]]


def look(
    seeds: Iterable[int],
    draw: Callable[[int], Any],
    judge: Judge,
    told: Callable[[dict[str, Any]], None] = lambda found: None,
    says: bool = False,
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """What failed, of which is told at once, and how many cases there were of each kind. says: why one cannot be
    judged."""
    failed: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            case = draw(seed)
            found = judge(seed, case, 0)
        except Unusable as error:
            if "CUDA error" in str(error):  # of a device that this process cannot use any more
                raise
            counts["not to be trained"] += 1
            if says:
                print(f"{seed}: {str(error)[:300]}", file=sys.stderr)
            continue
        if found["verdict"] == "differs" and not any(_fails(seed, case, judge, weights) for weights in (1, 2)):
            found["verdict"] = "the same, but for luck"
        counts[found["verdict"]] += 1
        if "kind" in found:
            counts[found["kind"]] += 1
        counts["with graphs"] += bool(found.get("graphs"))
        if found["verdict"] in ("differs", "raises"):
            failed.append({"seed": seed, **asdict(case), **found})
            told(failed[-1])
    return failed, counts


def _fails(seed: int, case: Any, judge: Judge, weights: int) -> bool:
    try:
        return judge(seed, case, weights)["verdict"] != "the same"
    except Unusable:
        return False


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="the first case (default: 1)")
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--seconds", type=float, default=600.0, help="begin no case after so many (default: 600)")
    much.add_argument("--count", type=int, help="so many cases")
    parser.add_argument("--says", action="store_true", help="say why a case cannot be judged")


def tell(options: argparse.Namespace, draw: Callable[[int], Any], judge: Judge) -> int:
    """Prints what fails and how many there were; the exit status."""
    end = time.monotonic() + options.seconds
    numbers = range(options.seed, options.seed + options.count) if options.count else itertools.count(options.seed)
    seeds = itertools.takewhile(lambda _: options.count or time.monotonic() < end, numbers)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    told = lambda found: print(json.dumps(found, default=str), flush=True)  # noqa: E731
    failed, counts = look(seeds, draw, judge, told, options.says)
    print(json.dumps(counts))
    return 1 if failed else 0
