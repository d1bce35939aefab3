"""Starting a training run in a process of its own, so that its peak memory is its own, and showing its progress."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bastile.cli.errors import RunFailed


def run(plan: dict[str, Any], out: Path) -> dict[str, Any]:
    """Trains as the plan says and returns what train.train returned, with the plan's name."""
    name = plan["name"]
    plan_file, log_file = out / f"{name}.plan.json", out / f"{name}.log"
    plan_file.write_text(json.dumps(plan, indent=1))
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
        log_file.open("w") as log,
        Progress(*columns) as progress,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        task = progress.add_task(name, total=plan["steps"], note="starting")
        assert process.stdout is not None
        done, first = 0, 0.0
        try:
            for line in process.stdout:
                event = json.loads(line)
                if "result" in event:
                    result = event["result"]
                    continue
                done += len(event["losses"])
                first = first or time.perf_counter()
                speed = (done - 1) * plan["batch"] * plan["sequence"] / max(time.perf_counter() - first, 1e-9)
                note = f"loss {event['losses'][-1]:.4f}" + (f", {speed:,.0f} tokens/s" if done > 1 else "")
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
