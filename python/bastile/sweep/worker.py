"""One process of the sweep: `python -m bastile.sweep.worker plan.json`.

Reads a plan as run.py writes it. Writes JSON objects, one a line, to standard output: {"machine": ...} if asked, a
{"result": ...} a length, {"steps": n} as training goes on, {"done": true} at the end. Everything else goes to standard
error. It ends when standard input does."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bastile.bench import machine
from bastile.cli.child import Parent, events, is_out_of_memory
from bastile.shapes import MODELS
from bastile.sweep import curve
from bastile.sweep.implementations import IMPLEMENTATIONS, CannotRun
from bastile.sweep.measure import measure, optimizer_for
from bastile.sweep.model import build, random_tokens
from bastile.sweep.sharded import Ranks

Send = Callable[[dict[str, Any]], None]


def run(plan: dict[str, Any], ranks: Ranks, send: Send) -> None:
    """Measures every length of the plan, shortest first; the first one that does not fit ends it."""
    device = ranks.device
    chosen = IMPLEMENTATIONS[plan["implementation"]]
    length = plan["lengths"][0]
    try:
        if plan["memory_limit"]:
            _limit_memory(plan["memory_limit"], device)
        patched = chosen.patch(MODELS[plan["model"]]["model_type"])
        model = build(plan["model"], getattr(torch, plan["dtype"]), device, plan["seed"])
        running = chosen.wrap(ranks.shard(model))
        if plan["kind"] == "curve":
            tokens = torch.load(plan["tokens"], weights_only=True)
            found = curve.train(running, tokens, {**plan, "length": length}, lambda n: send({"steps": n}))
            send({"result": {"length": length, "status": "ok", **found, "patched": patched}})
            return
        optimizer = optimizer_for(model, plan["optimizer"])
        for length in plan["lengths"]:
            if length != plan["lengths"][0]:
                torch.compiler.reset()  # compiled code for another length would be made general
            ids = random_tokens(
                model.config.vocab_size, plan["batch"], length, device, plan["seed"] * 1_000 + ranks.rank
            )
            found = ranks.joined(measure(running, ids, optimizer, plan, ranks.together))
            if ranks.rank == 0:
                send({"result": {"length": length, "status": "ok", **found, "patched": patched}})
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    except CannotRun as error:
        send({"result": {"length": length, "status": "cannot run", "reason": str(error)}})
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(error, file=sys.stderr)
        send({"result": {"length": length, "status": "out of memory"}})


def _limit_memory(gib: float, device: torch.device) -> None:
    """As if the device had no more. On CPU: beyond what the process has mapped once its libraries are loaded."""
    size = int(gib * 2**30)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), device)
    else:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    Parent()
    plan = json.loads(Path(sys.argv[1]).read_text())
    send = events()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(plan["device"])
    if device.type == "cuda":
        device = torch.device("cuda", rank if size > 1 else device.index or 0)
        torch.cuda.set_device(device)
    if rank == 0 and plan["describe"]:
        send({"machine": machine.describe(device)})
    ranks = Ranks(rank, size, plan.get("rendezvous"), device)
    run(plan, ranks, send)
    ranks.end()
    send({"done": True})
    os._exit(0)  # compilers' helpers may outlive their use; nothing is left to be written


if __name__ == "__main__":
    main()
