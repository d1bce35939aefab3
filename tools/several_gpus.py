"""Seconds a step and peak memory of TRL's SFT on several GPUs, one process each, by DistributedDataParallel, FSDP2 or
DeepSpeed: with bastile.apply() or stock.

    torchrun --nproc-per-node 2 tools/several_gpus.py --shape qwen3-8b --batch 4 --length 2048 [--lora 16]
        [--checkpointing] [--fsdp | --zero 2|3] [--float32] [--ragged] [--with stock|liger]
        [--no-graphs | --always-graphs]

Random weights of the named shape in bfloat16 or float32, random tokens, --batch rows for each process, TRL's defaults
but for what is named. Prints one JSON object: the median of the steps after the eighth, by a callback that waits for
the device; the mean of as many behind them, for which it does not wait; peak memory from the eighth on; the losses.
Seconds are those of the first process, memory is that of the process that needs most. Start it with one process for
what a GPU does alone. Needs trl, peft and datasets, and deepspeed for --zero."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch
from torch import distributed

import bastile
from bastile.shapes import MODELS
from bastile.sweep import trainer
from bastile.sweep.model import build

UNTIMED = 8  # steps in which kernels are chosen, memory finds its size and graphs are captured

#: What Accelerate's and TRL's examples write into a configuration, beside the stage.
DEEPSPEED = {
    "bf16": {"enabled": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "zero_allow_untested_optimizer": True,
}


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if options.fsdp:
        arguments.update(fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]})
        if options.checkpointing:
            arguments["fsdp_config"]["activation_checkpointing"] = True
    if options.zero:
        stage: dict[str, Any] = {"stage": options.zero}
        if options.leaves:
            stage["leaf_module"] = {"classes": ["Qwen3DecoderLayer"]}
        arguments["deepspeed"] = {**DEEPSPEED, "zero_optimization": stage}
    plan = {
        "implementation": {"stock": "hf"}.get(options.implementation, options.implementation),
        "batch": options.batch,
        "dtype": "bfloat16",
        "seed": 0,
        "lora": options.lora,
        "checkpointing": options.checkpointing and not options.fsdp,
        "ragged": options.ragged,
        "warm_up": UNTIMED,
        "repeats": options.steps - UNTIMED,
        "arguments": arguments,
    }
    if options.implementation == "bastile":
        bastile.apply(cuda_graphs=True if options.always_graphs else False if options.no_graphs else "auto")
    shape = options.shape
    dtype = torch.float32 if options.float32 else torch.bfloat16
    return trainer.measure(lambda: build(shape, dtype, device, 0), options.length, device, plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(MODELS), default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=4, help="rows for each process")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20, help=f"more than {UNTIMED}; the first {UNTIMED} are not timed")
    parser.add_argument("--with", dest="implementation", choices=["bastile", "stock", "liger"], default="bastile")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters on all linear layers (0: all weights)")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2, in place of DistributedDataParallel")
    parser.add_argument("--zero", type=int, choices=[2, 3], default=0, help="DeepSpeed's ZeRO of this stage")
    parser.add_argument("--leaves", action="store_true", help="with --zero 3: each decoder layer's weights at a time")
    parser.add_argument("--float32", action="store_true", help="weights in float32, under autocast: TRL's own default")
    parser.add_argument("--ragged", action="store_true", help="rows of an eighth of the length and longer")
    parser.add_argument("--no-graphs", action="store_true", help="with bastile, but without CUDA graphs")
    parser.add_argument("--always-graphs", action="store_true", help="also where they are not known to pay")
    options = parser.parse_args()
    if options.no_graphs and options.always_graphs:
        parser.error("--no-graphs and --always-graphs exclude each other")
    if options.fsdp and options.zero:
        parser.error("--fsdp and --zero exclude each other")
    if options.steps <= UNTIMED:
        parser.error(f"--steps is {options.steps}; more than {UNTIMED} are needed")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        device = torch.device("cuda", torch.cuda.current_device())
    found = run(options, device)
    peaks = [(found["peak_bytes"], torch.cuda.max_memory_reserved() if device.type == "cuda" else None)]
    if distributed.is_initialized():
        everyone: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, peaks[0])
        peaks = everyone
    if int(os.environ.get("RANK", 0)) == 0:
        names = ["implementation", "shape", "batch", "length", "lora"]
        names += ["checkpointing", "fsdp", "zero", "leaves", "float32", "ragged", "no_graphs", "always_graphs"]
        row = {name: getattr(options, name) for name in names}
        row.update(processes=len(peaks), median_seconds=found["seconds"], queued_seconds=found["queued_seconds"])
        if device.type == "cuda":
            row.update(peak_bytes=max(peak for peak, _ in peaks), reserved_bytes=max(more for _, more in peaks))
        print(json.dumps({**row, "losses": found["losses"]}), flush=True)
        if options.implementation == "bastile":
            print(bastile.report(), file=sys.stderr, flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
