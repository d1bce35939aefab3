"""One process of the sweep: `python -m bastile.sweep.worker plan.json`.

Reads a plan as run.py writes it. Writes JSON objects, one a line, to standard output: {"machine": ...} if asked, a
{"result": ...} a length, {"steps": n} as training goes on, {"done": true} at the end. Everything else goes to standard
error. It ends when standard input does."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn

from bastile.bench import machine
from bastile.bench.timing import held
from bastile.cli.processes import begin, out_of_memory
from bastile.graphs import stack
from bastile.peers.models import IMPLEMENTATIONS, CannotRun
from bastile.shapes import MODELS
from bastile.sweep.measure import clear, forward_backward, measure, optimizer_for, train
from bastile.sweep.model import add_adapters, build, random_tokens
from bastile.sweep.trainer import measure as measure_trainer
from bastile.sweep.trainer import prepare

Send = Callable[[dict[str, Any]], None]


class Ranks:
    """FSDP2: this process among the others, one a GPU, with the weights, gradients and optimiser states spread over all
    of them. Without any others, rank 0 of 1."""

    def __init__(self, rank: int, size: int, rendezvous: str | None, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        if size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            distributed.init_process_group(
                backend,
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=size,
                device_id=device if device.type == "cuda" else None,
            )

    def shard(self, model: Any) -> Any:
        """Each layer by itself. Embedding, last norm and head stay with the model as a whole, so that the head's weight
        is whole when the loss is computed."""
        if self.size > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device.type, (self.size,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def together(self) -> None:
        if self.size > 1:
            distributed.barrier()

    def joined(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's figures for all: losses are means, tokens are sums, memory is the largest rank's and each one's."""
        if self.size == 1:
            return figures
        everyone: list[Any] = [None] * self.size
        distributed.all_gather_object(everyone, figures)
        peaks = [one["peak_bytes"] for one in everyone]
        return {
            **figures,
            "losses": [sum(step) / self.size for step in zip(*(one["losses"] for one in everyone), strict=True)],
            "tokens_per_second": figures["tokens_per_second"] * self.size,
            "peak_bytes": None if None in peaks else max(peaks),
            "peak_bytes_of_ranks": peaks,
        }

    def end(self) -> None:
        if self.size > 1:
            distributed.barrier()
            distributed.destroy_process_group()


def run(plan: dict[str, Any], ranks: Ranks, send: Send) -> None:
    """Measures every length of the plan, shortest first; the first one that does not fit ends it."""
    device = ranks.device
    chosen = IMPLEMENTATIONS[plan["implementation"]]
    length = plan["lengths"][0]

    def end(status: str, **more: Any) -> None:
        send({"result": {"length": length, "status": status, **more}})

    with out_of_memory(lambda _: end("out of memory")):
        try:
            if plan.get("trainer"):
                patched = prepare(plan["implementation"], plan.get("offload_checkpoints", False))
            else:
                patched = chosen.patch(MODELS[plan["model"]]["model_type"])
        except CannotRun as error:
            end("cannot run", reason=str(error))
            return
        if plan["memory_limit"] and device.type == "cuda":
            _limit_gpu(plan["memory_limit"], device)
        if plan.get("trainer"):

            def made() -> Any:
                return build(plan["model"], getattr(torch, plan["dtype"]), device, plan["seed"])

            try:
                end("ok", **measure_trainer(made, length, device, plan), patched=patched)
            except CannotRun as error:
                end("cannot run", reason=str(error))
            return
        model = build(plan["model"], getattr(torch, plan["dtype"]), device, plan["seed"])
        if plan.get("lora"):
            add_adapters(model, plan["lora"], plan["load_in_4bit"], plan["seed"])
        if plan["memory_limit"] and device.type == "cpu":
            _limit_process(plan["memory_limit"], model)
        running = chosen.wrap(ranks.shard(model))
        if plan["kind"] == "curve":
            tokens = torch.load(plan["tokens"], weights_only=True)
            found = train(running, tokens, {**plan, "length": length}, lambda n: send({"steps": n}))
            end("ok", **found, patched=patched)
            return
        optimizer = optimizer_for(model, plan["optimizer"])
        for length in plan["lengths"]:
            if length != plan["lengths"][0]:
                torch.compiler.reset()  # compiled code for another length would be made general
                stack.forget()  # graphs of another length would have their memory beside this one's
            seed = plan["seed"] * 1_000 + ranks.rank
            ids = random_tokens(model.config.vocab_size, plan["batch"], length, device, seed)
            found = ranks.joined(measure(running, ids, optimizer, plan, ranks.together))
            if ranks.rank == 0:
                end("ok", **found, patched=patched)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _limit_gpu(gib: float, device: torch.device) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), device)


def _limit_process(gib: float, model: nn.Module) -> None:
    """The model and what its steps take may hold so much. What the libraries hold does not count, and is there after a
    step of two tokens and some work for all threads: parts are loaded, and threads begun, when first used. The limit
    is on writable private memory: address space is reserved by the gigabyte where a library has a GPU in mind."""
    torch.ones(1 << 20).exp()
    small = nn.Linear(1, 1)
    small(torch.ones(1, 1)).backward()
    torch.optim.AdamW(small.parameters(), fused=True).step()
    forward_backward(model, torch.zeros(1, 2, dtype=torch.long))
    clear(model)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    most = held("VmData") - weights + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def main() -> None:
    plan, send, _ = begin()
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
