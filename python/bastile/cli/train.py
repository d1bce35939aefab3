"""One training run in a process of its own: `python -m bastile.cli.train plan.json`.

Reads a plan as written by compare.run. Writes one JSON object a line to standard output: {"losses": [...]} for the
steps since the last such line, at the end {"result": {...}}. Everything else goes to standard error. With and without
Bastile the same lines run; only bastile.apply() differs."""

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import bastile


def train(plan: dict[str, Any], report: Any) -> dict[str, Any]:
    """Carries out the plan; report(losses) is called as training goes on. Returns what the run measured."""
    device = torch.device(plan["device"])
    torch.manual_seed(plan["seed"])
    model = _build_model(plan).to(device).train()
    if plan["gradient_checkpointing"]:
        model.gradient_checkpointing_enable()
        model.config.use_cache = False
    patched = bastile.apply(model_types=[model.config.model_type]) if plan["name"] == "bastile" else []
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan["lr"])
    warm_up = max(1, plan["steps"] // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    batches = _batches(torch.load(plan["tokens"], weights_only=True), plan)
    # A GPU is asked for its losses only now and then: waiting for each would hide how well the steps are queued.
    interval = 10 if device.type == "cuda" else 1
    losses: list[float] = []
    pending: list[torch.Tensor] = []
    memory_before = _memory_now(device)
    begin = 0.0
    for step in range(plan["steps"]):
        ids = next(batches).to(device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        pending.append(loss.detach())
        if step == 0 or (step + 1) % interval == 0 or step + 1 == plan["steps"]:
            new = torch.stack(pending).tolist()  # waits for the device
            pending.clear()
            losses.extend(new)
            report(new)
        if step == 0:
            begin = time.perf_counter()  # the first step warms up: allocators, compiled kernels
    seconds = time.perf_counter() - begin
    if plan["save"]:
        model.save_pretrained(plan["save"])
    return {
        "losses": losses,
        "timed_seconds": seconds,
        "tokens_per_second": (plan["steps"] - 1) * plan["batch"] * plan["sequence"] / seconds,
        "peak_memory": _memory_peak(device),
        "memory_before_training": memory_before,
        "patched": patched,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, threads: {torch.get_num_threads()}",
    }


def _build_model(plan: dict[str, Any]) -> PreTrainedModel:
    dtype = getattr(torch, plan["dtype"])
    if "pretrained" in plan["model"]:
        return AutoModelForCausalLM.from_pretrained(plan["model"]["pretrained"], dtype=dtype)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**plan["model"]["config"]), dtype=dtype)


def _batches(tokens: torch.Tensor, plan: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The text cut into sequences, in an order that the seed alone decides, again and again."""
    length, batch = plan["sequence"], plan["batch"]
    blocks = tokens[: len(tokens) // length * length].view(-1, length)
    generator = torch.Generator().manual_seed(plan["seed"])
    while True:
        for chosen in torch.randperm(len(blocks), generator=generator).split(batch):
            if len(chosen) == batch:
                yield blocks[chosen]


def _memory_now(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _process_memory("VmRSS")


def _memory_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _process_memory("VmHWM")


def _process_memory(key: str) -> int:
    """Bytes. On Linux its own count for this process: ru_maxrss there begins with what the parent process held."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get among the events

    def send(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=events, flush=True)

    send({"result": train(plan, lambda losses: send({"losses": losses}))})


if __name__ == "__main__":
    main()
