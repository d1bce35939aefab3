"""Two versions of Bastile in turns: what each row of the bench takes before and after a change, in one run.

    git worktree add ../before main && meson setup ../before/build/fast ../before && ninja -C ../before/build/fast
    python tools/turns.py ../before . --shape host,limits --out turns.json

Each folder is a tree with `build/fast/libbastile.so`. Their processes, `--processes` of each, live side by side and
measure one after the other, in the order and then against it, by the clocks, inputs and calls of their own bench; rows
that only one tree has are left out. Clocks and memory drift from run to run and from process to process by more than
what is asked about, so a ratio is of the medians over all processes and rounds of a tree. Of the host's times, which
other work on the machine lengthens and nothing shortens, the last column has that of the lower quartiles.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any


def serve(device_name: str, dtype: str) -> None:
    """A process of one tree: takes a line of JSON, gives one back."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print

    import torch

    from bastile.bench import cases, operators, run, timing

    try:
        from bastile.peers.operators import PEERS
    except ImportError:  # until 0.5
        from bastile.bench.peers import PEERS  # type: ignore[no-redef,import-not-found]

    device = torch.device(device_name)
    rows = {f"{c.name}{', host' * c.host}": c for c in (*cases.LIMITS, *cases.SMALL, *cases.HOST)}
    shapes = {**cases.SHAPES, "host": cases.HOST}
    sample: Any = None

    def prepare(name: str) -> str:
        nonlocal sample
        case = rows[name]
        operator = operators.OPERATORS[case.op]
        torch.manual_seed(20261123)
        kind = run.DTYPES[dtype]
        random = (operators.Random(kind, device),) if hasattr(operators, "Random") else (kind, device)
        rotation = timing.Rotation(operator.inputs(case, *random), operator.leaves, device)
        call = run._call(PEERS["bastile"][case.op](), operator, case.backward)
        call(rotation.sets[0])
        if case.host:
            sample = partial(timing.host_seconds, call, rotation.sets[0], device)
            return "host"
        rotation.restore()
        clock = timing.clock_for(call, rotation, device, capture=not operator.cost(case, kind.itemsize).flops)
        sample = clock.sample
        return clock.way

    def drop(_: str) -> str:
        nonlocal sample
        sample = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return ""

    commands = {
        "rows": lambda wanted: [n for s in wanted.split(",") for n, c in rows.items() if c in shapes[s]],
        "prepare": prepare,
        "sample": lambda _: sample(),
        "drop": drop,
    }
    for line in sys.stdin:
        command, argument = json.loads(line)
        try:
            answer = {"answer": commands[command](argument)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        answers.write(json.dumps(answer) + "\n")


class Process:
    def __init__(self, tree: Path, options: argparse.Namespace):
        place = {"BASTILE_LIBRARY": str(tree / "build/fast/libbastile.so"), "BASTILE_CACHE": str(tree / "build/turns")}
        path = os.pathsep.join(filter(None, (str(tree / "python"), os.environ.get("PYTHONPATH"))))
        self._run = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--device", options.device, "--dtype", options.dtype],
            env={**os.environ, **place, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str, argument: str = "") -> None:
        assert self._run.stdin is not None
        self._run.stdin.write(json.dumps([command, argument]) + "\n")
        self._run.stdin.flush()

    def answer(self) -> Any:
        assert self._run.stdout is not None
        answer = json.loads(self._run.stdout.readline() or '{"failed": "the process ended"}')
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer["answer"]

    def end(self) -> None:
        self._run.kill()
        self._run.wait()


def all_at_once(processes: list[Process], command: str, argument: str = "") -> list[Any]:
    for process in processes:
        process.ask(command, argument)
    answers, faults = [], []
    for process in processes:
        try:
            answers.append(process.answer())
        except RuntimeError as error:
            faults.append(str(error))
    if faults:
        raise RuntimeError("; ".join(dict.fromkeys(faults)))
    return answers


def in_turns(processes: list[Process], rounds: int) -> list[list[float]]:
    """Seconds of each process. The first round does not count."""
    seconds: list[list[float]] = [[] for _ in processes]
    for turn in range(rounds + 1):
        order = range(len(processes))
        for i in order if turn % 2 else reversed(order):
            processes[i].ask("sample")
            found = processes[i].answer()
            seconds[i] += [found] if turn else []
    return seconds


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    begin = time.monotonic()
    trees = [Path(tree).resolve() for tree in options.trees]
    processes = [Process(tree, options) for _ in range(options.processes) for tree in trees]
    results: list[dict[str, Any]] = []
    try:
        listed = all_at_once(processes, "rows", options.shape)
        wanted = [name for name in listed[0] if name in listed[1] and name.startswith(tuple(options.only))]
        for name in wanted:
            if time.monotonic() - begin > options.seconds:
                print("the time is up: the rows that follow were not measured")
                break
            try:
                way = all_at_once(processes, "prepare", name)[0]
                seconds = in_turns(processes, options.rounds * (4 if way == "host" else 1))
            except RuntimeError as error:
                print(f"{name:60s} {error}", flush=True)
                continue
            finally:
                all_at_once(processes, "drop")
            before, after = ([s for p in seconds[tree::2] for s in p] for tree in range(2))
            ratio = median(after) / median(before)
            low = quantiles(after, n=4)[0] / quantiles(before, n=4)[0] if way == "host" else ratio
            results.append(
                {"row": name, "way": way, "before": seconds[::2], "after": seconds[1::2], "ratio": ratio, "low": low}
            )
            print(
                f"{name:60s} {median(before) * 1e6:10.1f} us {median(after) * 1e6:10.1f} us {ratio:7.4f} {low:7.4f}",
                flush=True,
            )
            if options.out:
                settings = {k: vars(options)[k] for k in ("trees", "shape", "device", "dtype", "processes", "rounds")}
                Path(options.out).write_text(json.dumps({**settings, "rows": results}) + "\n")
    finally:
        for process in processes:
            process.end()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", metavar="FOLDER", help="before, after")
    parser.add_argument("--shape", default="host,limits", help="of the bench: limits, small, host")
    parser.add_argument("--only", nargs="*", default=[""], metavar="NAME", help="rows that begin so")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--processes", type=int, default=2, help="of each tree")
    parser.add_argument(
        "--rounds", type=int, default=5, help="samples of a process; of the host's time four times that"
    )
    parser.add_argument("--seconds", type=float, default=3600, help="after which no row is begun")
    parser.add_argument("--out", help="a JSON file, rewritten after each row")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.device, options.dtype)
        return
    if len(options.trees) != 2:
        parser.error("two trees are needed: before, after")
    results = measure(options)
    worst = max((r["ratio"] for r in results), default=1.0)
    slower = [r["row"] for r in results if r["ratio"] > 1.01]
    print(f"{len(results)} rows, the slowest {worst:.4f} of before; beyond 1.01: {slower}")


if __name__ == "__main__":
    main()
