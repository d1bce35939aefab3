"""Carrying out a sweep: job after job, each in processes of its own, with the time that is left."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bastile.cli.files import write_json
from bastile.cli.processes import Ending, run_job
from bastile.peers.models import IMPLEMENTATIONS
from bastile.sweep.results import Record, Results

WORKER = (sys.executable, "-m", "bastile.sweep.worker")


@dataclass(frozen=True)
class Told:
    """What happens, for whoever shows it."""

    implementation: str
    length: int
    record: Record | None = None  #: finished, in this run or an earlier one; None: begins
    steps: int = 0  #: of a loss curve, done so far


def jobs(implementations: Sequence[str], lengths: Sequence[int], share: bool) -> list[tuple[str, list[int]]]:
    """Lengths in order, the implementations of one length after each other: a clock that drifts meets them alike. Where
    lengths share a process, implementation after implementation."""
    ordered = sorted(lengths)
    if share:
        return [(name, ordered) for name in implementations]
    return [(name, [length]) for length in ordered for name in implementations]


def carry_out(
    results: Results,
    todo: Sequence[tuple[str, list[int]]],
    folder: Path,
    *,
    timeout: float,
    budget: float | None,
    tell: Callable[[Told], None],
    extra: dict[str, Any] | None = None,
    worker: Sequence[str] = WORKER,
) -> bool:
    """Does what is not done yet; whether all of it is now. The plan of a job is the settings and `extra`. No job starts
    after `budget` seconds; one configuration may take `timeout`."""
    begin = time.monotonic()
    unable: dict[str, Record] = {}
    for name, lengths in todo:
        left = list(_left(results, name, lengths, unable))
        while left:
            if budget is not None and time.monotonic() - begin > budget:
                return False
            reported = _run_one(results, name, left, folder, timeout, tell, extra or {}, worker)
            last = results.find(name, reported[-1])
            if last is not None and last["status"] == "cannot run":
                unable[name] = last
            left = list(_left(results, name, [length for length in left if length not in reported], unable))
    return True


def _left(results: Results, name: str, lengths: Sequence[int], unable: dict[str, Record]) -> Iterator[int]:
    """The lengths still to be measured. One beyond a length that did not fit is recorded as not fitting, untried; and
    so is each length of an implementation that could not run at another."""
    for length in lengths:
        too_long = results.too_long(name)
        if results.is_finished(name, length):
            continue
        if name in unable:
            results.add({**unable[name], "length": length})
            continue
        if too_long is not None and too_long < length:
            record = {"implementation": name, "length": length, "status": "out of memory", "took": 0.0}
            results.add({**record, "reason": f"not tried: {too_long} tokens were too many"})
            continue
        yield length


def _run_one(
    results: Results,
    name: str,
    lengths: Sequence[int],
    folder: Path,
    timeout: float,
    tell: Callable[[Told], None],
    extra: dict[str, Any],
    worker: Sequence[str],
) -> list[int]:
    """Runs one job and records what came of it. Returns the lengths that have a record now: not all of them, where the
    job ended early."""
    title = f"{name}-{lengths[0]}" + (f"-to-{lengths[-1]}" if len(lengths) > 1 else "")
    size = results.settings["gpus"]
    rendezvous = folder / f"rendezvous-{uuid.uuid4().hex}"
    plan = {**results.settings, **extra, "implementation": name, "lengths": list(lengths)}
    plan["describe"] = not results.machine_is_checked
    if size > 1:
        plan["rendezvous"] = str(rendezvous.resolve())
    plan_file = folder / f"{title}.plan.json"
    write_json(plan_file, plan)
    shared = {**IMPLEMENTATIONS[name].environment, **_of_device(results.settings.get("device", ""))}
    environments = [{**shared, **_of_rank(rank, size)} for rank in range(size)]
    logs = [folder / (f"{title}.log" if size == 1 else f"{title}.rank{rank}.log") for rank in range(size)]
    reported: list[int] = []
    began = time.monotonic()

    def record(figures: dict[str, Any]) -> None:
        nonlocal began
        results.add({"implementation": name, "took": time.monotonic() - began, **figures})
        began = time.monotonic()
        reported.append(figures["length"])
        tell(Told(name, figures["length"], results.find(name, figures["length"])))
        if reported != list(lengths) and figures["status"] == "ok":
            tell(Told(name, lengths[len(reported)]))

    def handle(event: dict[str, Any]) -> bool:
        if "machine" in event:
            results.set_machine(event["machine"])
        elif "steps" in event:
            tell(Told(name, lengths[0], steps=event["steps"]))
        else:
            record(event["result"])
            return event["result"]["status"] == "ok"
        return True

    tell(Told(name, lengths[0]))
    try:
        ending = run_job([*worker, str(plan_file)], environments, logs, timeout * len(lengths), handle)
    finally:
        rendezvous.unlink(missing_ok=True)
    if ending is None and not reported:
        ending = Ending("failed", "ended without a result")
    if ending is not None and len(reported) < len(lengths):
        record({"length": lengths[len(reported)], "status": ending.status, "reason": ending.reason})
    return reported


def _of_device(device: str) -> dict[str, str]:
    """On a CPU no GPU is seen: PyTorch would open one now and then, which takes time, and memory of the host."""
    return {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}


def _of_rank(rank: int, size: int) -> dict[str, str]:
    if size == 1:
        return {"RANK": "0", "WORLD_SIZE": "1"}
    # NVLink's multicast needs rights that containers often lack.
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "NCCL_NVLS_ENABLE": "0"}


def seconds_left(todo: Sequence[tuple[str, list[int]]], results: Results) -> float | None:
    """What the rest will take, if each configuration takes as long as its implementation did at the nearest length, or
    else as all did on average. None before there is any."""
    took = [r for r in results.records if r.get("took") and r["status"] in ("ok", "out of memory")]
    if not took:
        return None
    average = sum(r["took"] for r in took) / len(took)
    total = 0.0
    for name, lengths in todo:
        own = sorted((r["length"], r["took"]) for r in took if r["implementation"] == name)
        for length in lengths:
            if not results.is_finished(name, length):
                nearest = min(own, key=lambda one: (abs(one[0] - length), -one[0]), default=(0, average))
                total += nearest[1]
    return total
