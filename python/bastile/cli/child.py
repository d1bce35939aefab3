"""A process that trains or measures for a command; processes.py is the command's side. And what it calls too little
memory."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

#: How PyTorch, the driver, cuBLAS, Triton and Bastile say it.
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|ALLOC_FAILED|bad_alloc", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
    )


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
