"""Seconds a step and peak memory of TRL's SFT with LoRA on one GPU: with bastile.apply(), stock, or beside others. One
row of `bastile sweep --lora 16 --trainer trl`, in this process, with what Bastile reports of itself.

    python tools/trl_lora.py --shape qwen3-8b --batch 4 --length 2048 [--checkpointing [--offload-checkpoints]]
        [--load-in-4bit] [--attention-only] [--dropout 0.05] [--float32] [--floor] [--with stock|compile|liger|unsloth]

Random weights of the named shape in bfloat16, r = 16 on all linear layers or on attention's, random tokens, TRL's
defaults but for what is named. Prints one JSON object: the median of the steps after the fourth, by a callback that
waits for the device; the mean of as many behind them, for which it does not wait; peak memory from the fourth on; the
losses. --float32: the same weights in float32, without autocast: what losses in 16 bits should be. --floor: then, on
the device that the steps have warmed, as many times the products of the frozen weights and the attention of a step, and
nothing else. Needs trl, peft and datasets; bitsandbytes for four bits."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import bastile
from bastile.bench.timing import seconds_of
from bastile.shapes import MODELS
from bastile.sweep import trainer
from bastile.sweep.model import build

UNTIMED = 4  # steps in which kernels are chosen and memory finds its size
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_DEVICE = torch.device("cuda")


def run(options: argparse.Namespace) -> dict[str, Any]:
    plan = {
        "implementation": {"stock": "hf"}.get(options.implementation, options.implementation),
        "batch": options.batch,
        "dtype": "float32" if options.float32 else "bfloat16",
        "seed": 0,
        "lora": 16,
        "lora_dropout": options.dropout,
        "load_in_4bit": options.load_in_4bit,
        **({"targets": ATTENTION} if options.attention_only else {}),
        "checkpointing": options.checkpointing,
        "warm_up": UNTIMED,
        "repeats": options.steps - UNTIMED,
    }
    trainer.prepare(plan["implementation"], options.offload_checkpoints)

    def model() -> torch.nn.Module:
        made = build(options.shape, torch.bfloat16, _DEVICE, 0)
        return made.float() if options.float32 else made

    found = trainer.measure(model, options.length, _DEVICE, plan)
    return {
        "implementation": options.implementation,
        "shape": options.shape,
        "batch": options.batch,
        "length": options.length,
        "checkpointing": options.checkpointing,
        "offload_checkpoints": options.offload_checkpoints,
        "load_in_4bit": options.load_in_4bit,
        "dropout": options.dropout,
        "attention_only": options.attention_only,
        "float32": options.float32,
        "median_seconds": found["seconds"],
        "least_seconds": min(found["samples"]),
        "queued_seconds": found["queued_seconds"],
        "peak_bytes": found["peak_bytes"],
        "losses": found["losses"],
    }


def floor_of(options: argparse.Namespace) -> Callable[[], None]:
    """What a step multiplies where nothing but adapters is trained: forward, the gradients of inputs and, with
    checkpointing, the layers' products but the last and attention again; a dense model's, by PyTorch's operators.
    Weights are as many as the model's, results take each other's places."""
    shape, rows = MODELS[options.shape], options.batch * options.length
    width, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    head, groups = shape["head_dim"], shape["num_key_value_heads"]

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=_DEVICE).mul_(0.02)

    of_layer = [(heads * head, width), (groups * head, width), (groups * head, width), (width, heads * head)]
    of_layer += [(inner, width), (inner, width), (width, inner)]
    layers = [[draw(*size) for size in of_layer] for _ in range(shape["num_hidden_layers"])]
    output_head = draw(shape["vocab_size"], width)
    pieces = min(rows, 2048)  # of a head's logits, which nobody makes of all rows at once
    inputs = {size: draw(rows, size) for size in {width, inner, heads * head, groups * head}}
    results = {size: torch.empty_like(given) for size, given in inputs.items()}
    logits = draw(pieces, shape["vocab_size"])
    query, key, value = (
        draw(options.batch, options.length, n, head).transpose(1, 2).requires_grad_() for n in (heads, groups, groups)
    )
    gradient = draw(options.batch, options.length, heads, head).transpose(1, 2)

    def forward(weights: list[torch.Tensor]) -> None:
        for weight in weights:
            outputs, columns = weight.shape
            torch.mm(inputs[columns], weight.t(), out=results[outputs])

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads > groups)

    def step() -> None:
        for weights in layers:
            forward(weights)
            attended = attend()
        for at in range(0, rows, pieces):
            part = slice(at, min(at + pieces, rows))
            its = logits[: part.stop - at]
            torch.mm(inputs[width][part], output_head.t(), out=its)
            torch.mm(its, output_head, out=results[width][part])
        for weights in layers:
            if options.checkpointing:
                forward(weights[:-1])
                attended = attend()
            for weight in weights:
                outputs, columns = weight.shape
                torch.mm(inputs[outputs], weight, out=results[columns])
            torch.autograd.grad(attended, (query, key, value), gradient, retain_graph=True)

    return step


def floor(options: argparse.Namespace) -> list[float]:
    step = floor_of(options)
    for _ in range(UNTIMED):
        step()
    return [seconds_of(step, _DEVICE) for _ in range(options.steps - UNTIMED)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(MODELS), default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12, help=f"more than {UNTIMED}; the first {UNTIMED} are not timed")
    ways = ["bastile", "stock", "compile", "liger", "unsloth"]
    parser.add_argument("--with", dest="implementation", choices=ways, default="bastile", help="the implementation")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--offload-checkpoints", action="store_true", help="with bastile")
    parser.add_argument("--load-in-4bit", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0, help="of the adapters")
    parser.add_argument("--attention-only", action="store_true", help="no adapters but on queries, keys, values and o")
    parser.add_argument("--float32", action="store_true", help="weights in float32, no autocast: for their losses")
    parser.add_argument("--floor", action="store_true", help="time the products and attention of a step behind it, too")
    options = parser.parse_args()
    if options.steps <= UNTIMED:
        parser.error(f"--steps is {options.steps}; more than {UNTIMED} are needed")
    found = run(options)
    if options.floor:
        gc.collect()
        torch.cuda.empty_cache()
        times = floor(options)
        found["floor_seconds"] = statistics.median(times)
        found["of_floor"] = found["median_seconds"] / found["floor_seconds"]
    print(json.dumps(found))
    if options.implementation == "bastile":
        print(bastile.report(), file=sys.stderr)


if __name__ == "__main__":
    main()
