"""Processes of the command that begin at once.

They take seconds to import what they need. Those of tests are copies of a server that has imported it all, once, and
done nothing else: each with streams, environment, session and end of its own, and one thread, since models as small as
these only wait for a second one. Where there is a GPU, which no copy of a process can use that has looked for one, they
are begun as they are for users.

    python copies.py 3    the server, which takes its orders from that descriptor"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

#: A model this small only waits for a second thread; tables are to be as wide as their words.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "140"}
_IMPORTED = ["bastile.cli.arguments", "bastile.cli.report", "bastile.cli.train", "bastile.sweep.worker"]
_IMPORTED += ["bastile.profile.report", "bastile.profile.run", "bastile.warmup", "matplotlib.pyplot", "peft"]


def begin(module: str, arguments: Sequence[str], environment: Mapping[str, str], streams: Sequence[IO[str]]) -> Any:
    """Runs `python -m module arguments` on these three streams, in a session of its own. Has pid and wait() of a
    subprocess.Popen."""
    import torch

    if not torch.cuda.is_available():
        return _Copy(module, arguments, environment, streams)
    given, printed, told = streams
    # A module of the tests is found as the server of copies finds it.
    paths = [str(Path(__file__).parent), *filter(None, [environment.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", module.removesuffix(".cli"), *arguments],
        stdin=given,
        stdout=printed,
        stderr=told,
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )


class _Copy:
    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], streams: Sequence[IO[str]]
    ) -> None:
        order = {"module": module, "arguments": list(arguments), "environment": dict(environment), "in": os.getcwd()}
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = [*(stream.fileno() for stream in streams), theirs.fileno()]
            socket.send_fds(_server(), [json.dumps(order).encode()], descriptors)
        self._told = mine
        self.pid = int(self._told.recv(64))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._told.settimeout(timeout)
            self.returncode = int(self._told.recv(64))
            self._told.close()
        return self.returncode


@functools.cache
def _server() -> socket.socket:
    """It ends when this process does, for nobody else holds the other end."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, **ENVIRONMENT})
    return mine


# ---- the server ------------------------------------------------------------------------------------------------------


def _serve(orders: socket.socket) -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for the copies
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, 1 << 20, 4)
        if not message:
            return
        if os.fork() == 0:
            orders.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _supervise(json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _supervise(order: dict[str, Any], descriptors: list[int]) -> None:
    """Tells the copy's number, waits for its end and tells its code."""
    *streams, told = descriptors
    begun, beginning = os.pipe()
    copy = os.fork()
    if copy == 0:
        os.close(told)
        os.setsid()
        os.close(begun)
        os.close(beginning)
        _become(order, streams)
    os.close(beginning)
    for stream in streams:
        os.close(stream)
    os.read(begun, 1)  # until its session is its own
    os.write(told, str(copy).encode())
    _, status = os.waitpid(copy, 0)
    os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(order: dict[str, Any], streams: list[int]) -> None:
    code: Any = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["in"])
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for stream in streams:
            os.close(stream)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
        sys.argv = [order["module"], *order["arguments"]]
        code = importlib.import_module(order["module"]).main() or 0
    except SystemExit as ending:
        code = ending.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        _serve(given)
