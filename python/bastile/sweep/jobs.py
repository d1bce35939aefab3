"""Jobs: the processes that measure one configuration, read together and ended together, whatever becomes of them."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bastile.cli.processes import Ending, Process


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
    processes: list[Process] = []
    readers: list[threading.Thread] = []
    deadline = time.monotonic() + timeout
    try:
        for number, (environment, log) in enumerate(zip(environments, logs, strict=True)):
            processes.append(Process(command, {**os.environ, **environment}, log))
            readers.append(threading.Thread(target=_forward, args=(processes[-1], number, events), daemon=True))
            readers[-1].start()
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
                return processes[number].ending()
        return None
    finally:
        for process in processes:
            process.end()


def _forward(process: Process, number: int, events: queue.SimpleQueue[tuple[int, str | None]]) -> None:
    for line in process.lines():
        events.put((number, line))
    events.put((number, None))
