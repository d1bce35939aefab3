"""Carrying out training runs, each in a process of its own, so that each one's peak memory is its own, and showing
their progress. Where a plan says so they take turns, some steps each: what slows the machine then meets all alike."""

import json
import os
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bastile.cli.errors import RunFailed, UsageError
from bastile.cli.files import write_json
from bastile.cli.processes import Process

#: Off a terminal: how many lines a run's progress has at least, and after how many seconds there is another one.
_LINES = 10
_SILENCE = 60.0


def plans(plan: dict[str, Any], names: Iterable[str], out: Path, resume: bool) -> list[dict[str, Any]]:
    """The plan for each name. With resume, one of a run that was interrupted goes on from its newest checkpoint. An
    error where what an earlier command left in the folder is not what is resumed, or would get mixed up with a new
    run."""
    made = []
    for name in names:
        each = {**plan, "name": name, "folder": str(out / name)}
        each["save"] = each["save"] if name == "bastile" else None
        _check_earlier(each, out, resume)
        made.append({**each, "checkpoint": _newest_checkpoint(each) if resume else None})
    return made


def run_all(plans: Sequence[dict[str, Any]], out: Path, resume: bool) -> list[dict[str, Any]]:
    """What train.train returned for each plan, with its name and the status "ok". Of a run that did not fit into memory
    the status is "out of memory" (or "killed", where that is not known), with the reason and the losses up to then; the
    others go on. With resume, a run that ended is not repeated."""
    results: dict[str, dict[str, Any]] = {}
    for plan in plans if resume else ():
        if (ended := _ended(out, plan)).exists():
            results[plan["name"]] = json.loads(ended.read_text())
    with _Shown(plans) as shown:
        runs = [_training(plan, out, shown, results) for plan in plans if plan["name"] not in results]
        for together in [runs] if plans[0]["turn"] else [[run] for run in runs]:
            waiting = together
            try:
                while waiting:
                    waiting = [run for run in waiting if next(run, _OVER) is not _OVER]
            finally:
                for run in together:
                    run.close()
    return [results[plan["name"]] for plan in plans]


def _ended(out: Path, plan: dict[str, Any]) -> Path:
    """The file that holds what came of a run, once it has ended well."""
    return out / f"{plan['name']}.result.json"


_OVER = object()


def _training(
    plan: dict[str, Any], out: Path, shown: "_Shown", results: dict[str, dict[str, Any]]
) -> Generator[None, None, None]:
    """One training in its process: stops when that has begun, and whenever it waits for its turn; puts what came of it
    among the results."""
    name, ended = plan["name"], _ended(out, plan)
    plan_file, log = out / f"{name}.plan.json", out / f"{name}.log"
    losses: list[float] = []

    def lost(status: str, reason: str) -> None:
        results[name] = {"name": name, "status": status, "reason": reason, "losses": losses}
        shown.say(f"{name}: {status} after {len(losses)} steps: {reason}")

    ended.unlink(missing_ok=True)
    write_json(plan_file, plan)
    shown.begin(name)
    process = start(plan, plan_file, log)
    try:
        yield
        lines = process.lines()
        while line := next(lines, None):
            event = json.loads(line)
            if "waits" in event:
                yield
                process.go_on()
                lines = process.lines()
            elif "losses" in event:
                losses += event["losses"]
                shown.steps(name, event)
            elif "out_of_memory" in event:
                lost("out of memory", event["out_of_memory"])
            else:
                write_json(ended, {"name": name, "status": "ok", **event["result"]})
                results[name] = json.loads(ended.read_text())
        if name in results:
            return
        ending = process.ending()
        if not ending.killed:
            end = "\n".join(f"    {line}" for line in process.tail() or [ending.reason])
            raise RunFailed(f"the {name} run failed; its whole output is in {log}, its end:\n{end}")
        lost(ending.status if ending.status == "out of memory" else "killed", ending.reason)
    finally:
        process.end()


def start(plan: dict[str, Any], plan_file: Path, log: Path) -> Process:
    """The process that carries out the plan."""
    command = [sys.executable, "-m", "bastile.cli.train", str(plan_file)]
    return Process(command, environment(plan["device"]), log, "a" if plan["checkpoint"] else "w")


class _Shown:
    """The progress of the runs: bars on a terminal; elsewhere a line after the first step, each tenth of them, and a
    minute without one."""

    def __init__(self, plans: Iterable[dict[str, Any]]) -> None:
        columns = [
            TextColumn("{task.description:>8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        ]
        self._console = Console()
        self._bars = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._runs = {plan["name"]: _Far(plan["steps"]) for plan in plans}

    def __enter__(self) -> "_Shown":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, name: str) -> None:
        if self._console.is_terminal:
            self._runs[name].bar = self._bars.add_task(name, total=self._runs[name].total, note="starting")
        else:
            self.say(f"{name}: starting")

    def steps(self, name: str, event: dict[str, Any]) -> None:
        """event: as train.py writes it."""
        far = self._runs[name]
        far.done += len(event["losses"])
        far.tokens += event["tokens"] if event["seconds"] else 0
        far.seconds += event["seconds"]
        note = f"loss {event['losses'][-1]:.4f}"
        if far.seconds:
            note += f", {far.tokens / far.seconds:,.0f} tokens/s"
        part, now = far.done * _LINES // far.total, time.monotonic()
        if far.bar is not None:
            self._bars.update(far.bar, completed=far.done, note=note)
        elif part > far.told or now - far.when > _SILENCE:
            far.told, far.when = part, now
            self.say(f"{name}: step {far.done} of {far.total}, {note}")


@dataclass
class _Far:
    """How far one run is."""

    total: int
    bar: Any = None
    done: int = 0
    tokens: int = 0
    seconds: float = 0.0
    told: int = -1  #: the part that the last line told of, in lines
    when: float = 0.0  #: and when that was


def _check_earlier(plan: dict[str, Any], out: Path, resume: bool) -> None:
    """That what an earlier command left in the folder is what is resumed, and is not mixed up with a new run."""
    file = out / f"{plan['name']}.plan.json"
    if not resume:
        if _newest_checkpoint(plan):
            raise UsageError(
                f"--out {out}: holds checkpoints of an earlier run; --resume continues it, another --out keeps both"
            )
        return
    if not file.exists():
        if plan["name"] == "stock" or not (out / "stock.plan.json").exists():
            raise UsageError(f"--resume: there is no run in {out} to go on with")
        return
    earlier = json.loads(file.read_text())
    if _ended(out, plan).exists() and plan["save"] not in (None, earlier["save"]):
        checkpoint = _newest_checkpoint(plan)
        held = f"; its last checkpoint, {checkpoint}, holds what it trained" if checkpoint else ""
        raise UsageError(f"--save {plan['save']}: the run in {out} had ended and is not repeated{held}")
    differs = [
        f"{key} (was {earlier.get(key)}, now {value})"
        for key, value in plan.items()
        if key not in ("save", "folder", "examples", "device") and earlier.get(key) != value
    ]
    if differs:
        raise UsageError(f"--resume: the run in {out} was started differently: {', '.join(differs)}")


def _newest_checkpoint(plan: dict[str, Any]) -> str | None:
    from transformers.trainer_utils import get_last_checkpoint

    return get_last_checkpoint(plan["folder"]) if Path(plan["folder"]).is_dir() else None


def environment(device: str) -> dict[str, str]:
    """For a process that is to see this one CUDA device only: Trainer would spread the model over all it sees."""
    changed = dict(os.environ)
    if device.startswith("cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        changed["CUDA_VISIBLE_DEVICES"] = seen[torch.device(device).index or 0]
    return changed
