"""Processes: starting the workers of one job, reading what they say, and ending them, whatever becomes of them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class Ending:
    """How a job ended that did not end well."""

    status: str  #: "failed", "timed out" or "out of memory"
    reason: str


def run_job(
    command: Sequence[str],
    environments: Sequence[dict[str, str]],
    logs: Sequence[Path],
    timeout: float,
    handle: Callable[[dict[str, Any]], bool],
) -> Ending | None:
    """Starts the command once for each environment (added to this one), its standard error going to the log beside it.

    handle(event) is called for each line of JSON that any of them writes; it returns whether to go on. The job is done
    when all have written {"done": true}; when one ends without, or the time is over, the others are ended too."""
    events: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
    processes: list[subprocess.Popen[str]] = []
    killed_before = _killed_for_memory()
    deadline = time.monotonic() + timeout
    try:
        for number, (environment, log) in enumerate(zip(environments, logs, strict=True)):
            with log.open("w") as file:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,  # its end tells them that we are gone
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
            processes.append(process)
            threading.Thread(target=_forward, args=(process.stdout, number, events), daemon=True).start()
        running = set(range(len(processes)))
        while running:
            try:
                number, line = events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return Ending("timed out", f"not done after {timeout:.0f} s")
            if line is not None:
                event = json.loads(line)
                if "done" in event:
                    running.discard(number)
                elif not handle(event):
                    return None
            elif number in running:
                return _ending(processes[number], logs[number], _killed_for_memory() > killed_before)
        return None
    finally:
        for process in processes:
            # Not waited for yet, so the number is still theirs. The group: their compilers' helpers too.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def _forward(stream: IO[str], number: int, events: queue.SimpleQueue[tuple[int, str | None]]) -> None:
    with stream:
        for line in stream:
            events.put((number, line))
    events.put((number, None))


def _ending(process: subprocess.Popen[str], log: Path, for_memory: bool) -> Ending:
    """Reads the status and leaves it to be waited for."""
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    status = found.si_status if found is not None else 0
    if found is not None and found.si_code != os.CLD_EXITED:
        if status == signal.SIGKILL and for_memory:
            return Ending("out of memory", "killed by the system, which had run out of memory")
        return Ending("failed", f"killed by {signal.Signals(status).name}")
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Ending("failed", lines[-1][:300] if lines else f"ended with status {status} and said nothing")


def _killed_for_memory() -> int:
    """How many processes Linux has killed for want of memory since it started."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0
