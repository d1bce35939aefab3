"""Processes that train or measure for a command: starting them, reading what they say, ending them, and how they ended;
and at the end of this file their own side of it.

Such a process writes JSON objects, one a line, to its standard output; its standard error goes to a log. Its standard
input tells it when to go on, and by its end that the command is gone."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch


@dataclass(frozen=True)
class Ending:
    """How a process or a job ended that did not end well."""

    status: str  #: "failed", "timed out" or "out of memory"
    reason: str
    killed: bool = False  #: by SIGKILL, which no process can answer


class Process:
    """mode: of the log, as for open()."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, mode: str = "w"):
        self.log = log
        self._killed_before = killed_for_memory()
        with log.open(mode) as file:
            self._process = self._begin(command, environment, file)

    def _begin(self, command: Sequence[str], environment: Mapping[str, str], log: IO[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def _exit_code(self) -> int:
        """Waits for its end, and leaves the code to be had again. A signal's is negative."""
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if found is None or found.si_code == os.CLD_EXITED:
            return found.si_status if found is not None else 0
        return -found.si_status

    def lines(self) -> Iterator[str]:
        """What it writes, until it writes no more; a later call goes on where an earlier one was left."""
        stream = self._process.stdout
        assert stream is not None
        yield from iter(stream.readline, "")
        stream.close()

    def go_on(self) -> None:
        """Tells one that waits to go on."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its lines will show
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def ending(self) -> Ending:
        """Waits for its end."""
        code = self._exit_code()
        if code >= 0:
            lines = [line.strip() for line in self.tail()]
            return Ending("failed", lines[-1][:300] if lines else f"ended with status {code} and said nothing")
        if code != -signal.SIGKILL:
            return Ending("failed", f"killed by {signal.Signals(-code).name}")
        now = killed_for_memory()
        if now is not None and now > (self._killed_before or 0):
            return Ending("out of memory", "killed by the system, which had run out of memory", killed=True)
        return Ending("failed", "killed by SIGKILL", killed=True)

    def tail(self, most: int = 8) -> list[str]:
        """The last lines of the log that hold anything."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-most:]

    def end(self) -> None:
        """Ends it, and what it has started: compilers have helpers."""
        if self._process.returncode is None:  # not waited for yet, so the number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def killed_for_memory() -> int | None:
    """How many processes Linux has killed for want of memory since it started; None where it does not say."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


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


# ---- the process's own side ------------------------------------------------------------------------------------------

#: How PyTorch, the driver, cuBLAS, Triton and Bastile say it.
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|ALLOC_FAILED|bad_alloc", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
    )


@contextlib.contextmanager
def out_of_memory(tell: Callable[[str], None]) -> Iterator[None]:
    """What fails within for want of memory is told, as its first line, and ends there."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.print_exc()
        tell(str(error).strip().partition("\n")[0] or type(error).__name__)


def begin() -> tuple[dict[str, Any], Callable[[dict[str, Any]], None], Callable[[], None]]:
    """The plan, whose file the first argument names; what sends an event; and what waits until the command says to go
    on."""
    parent = _Parent()
    return json.loads(Path(sys.argv[1]).read_text()), _events(), parent.wait


def _events() -> Callable[[dict[str, Any]], None]:
    """What writes an object as a line of JSON to standard output. What libraries print there goes to standard error
    from now on."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=stream, flush=True)

    return send


class _Parent:
    """The command, at the other end of standard input. When it is gone, so is the use of this process, which ends."""

    def __init__(self) -> None:
        self._go = threading.Semaphore(0)
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self) -> None:
        """Until it says to go on."""
        self._go.acquire()

    def _read(self) -> None:
        while sys.stdin.buffer.readline():
            self._go.release()
        os._exit(1)
