"""Starting training runs in processes of their own, so that each one's peak memory is its own, and showing their
progress."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bastile.cli import strict_json
from bastile.cli.errors import RunFailed, UsageError


def run_all(plan: dict[str, Any], names: Iterable[str], out: Path, resume: bool = False) -> list[dict[str, Any]]:
    """Trains as the plan says under each name and returns what train.train returned. With resume, a run that ended is
    not repeated, and one that was interrupted goes on from its newest checkpoint."""
    plans = [{**plan, "name": name, "folder": str(out / name)} for name in names]
    for each in plans:
        each["save"] = each["save"] if each["name"] == "bastile" else None
        _check_earlier(each, out, resume)
    runs = []
    for each in plans:
        ended = out / f"{each['name']}.result.json"
        if not (resume and ended.exists()):
            checkpoint = _newest_checkpoint(each) if resume else None
            ended.unlink(missing_ok=True)
            strict_json.write(ended, _run({**each, "checkpoint": checkpoint}, out))
        runs.append(json.loads(ended.read_text()))
    return runs


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
    ended = (out / f"{plan['name']}.result.json").exists()
    if ended and plan["save"] not in (None, earlier["save"]):
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


def _run(plan: dict[str, Any], out: Path) -> dict[str, Any]:
    name = plan["name"]
    plan_file, log_file = out / f"{name}.plan.json", out / f"{name}.log"
    strict_json.write(plan_file, plan)
    result: dict[str, Any] | None = None
    columns = [
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    ]
    command = [sys.executable, "-m", "bastile.cli.train", str(plan_file)]
    with (
        log_file.open("a" if plan["checkpoint"] else "w") as log,
        Progress(*columns) as progress,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(plan["device"])
        ) as process,
    ):
        task = progress.add_task(name, total=plan["steps"], note="starting")
        assert process.stdout is not None
        done = tokens = 0
        first = 0.0
        try:
            for line in process.stdout:
                event = json.loads(line)
                if "result" in event:
                    result = event["result"]
                    continue
                done += len(event["losses"])
                note = f"loss {event['losses'][-1]:.4f}"
                if event["tokens"] and first:
                    tokens += event["tokens"]
                    note += f", {tokens / max(time.perf_counter() - first, 1e-9):,.0f} tokens/s"
                elif event["tokens"]:
                    first = time.perf_counter()
                progress.update(task, completed=done, note=note)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0 or result is None:
        tail = log_file.read_text(errors="replace").strip().splitlines()[-8:]
        raise RunFailed(
            f"the {name} run ended with status {process.returncode}; its whole output is in {log_file}, its end:\n"
            + "\n".join(f"    {line}" for line in tail)
        )
    return {"name": name, **result}


def environment(device: str) -> dict[str, str]:
    """For a process that is to see this one CUDA device only: Trainer would spread the model over all it sees."""
    changed = dict(os.environ)
    if device.startswith("cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        changed["CUDA_VISIBLE_DEVICES"] = seen[torch.device(device).index or 0]
    return changed
