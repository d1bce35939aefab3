"""Milliseconds of a text that a model generates by Transformers' own loop, and of each of its tokens, with
bastile.apply() or stock.

    python tools/generated_text.py [--shape qwen3-0.6b] [--lora] [--rows 8] [--prompt 48] [--tokens 144] [--stock]

Random weights of the named shape in bfloat16, random prompts, tokens that are drawn, --lora: adapters of rank 16 in
float32 on all linear layers. Prints one JSON object: the median of the texts behind the third, and what each token of
the second half of one takes, by texts of half as many. Needs peft for --lora."""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import torch

import bastile
from bastile.bench.timing import synchronize
from bastile.shapes import MODELS
from bastile.sweep.model import build

UNTIMED, TEXTS = 3, 5


def model_of(options: argparse.Namespace, device: torch.device) -> Any:
    model = build(options.shape, torch.bfloat16, device, 0)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    return model.eval()


def seconds(model: Any, prompt: torch.Tensor, tokens: int) -> float:
    """Of a text: the median of those behind the first ones."""
    times = []
    for _ in range(UNTIMED + TEXTS):
        synchronize(prompt.device)
        begun = time.perf_counter()
        model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            eos_token_id=None,
        )
        synchronize(prompt.device)
        times.append(time.perf_counter() - begun)
    return median(times[UNTIMED:])


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    if not options.stock:
        bastile.apply()
    model = model_of(options, device)
    prompt = torch.randint(3, 1000, (options.rows, options.prompt), device=device)
    whole, half = (seconds(model, prompt, tokens) for tokens in (options.tokens, options.tokens // 2))
    token = (whole - half) / (options.tokens - options.tokens // 2)
    names = ("shape", "lora", "rows", "prompt", "tokens", "stock")
    found = {name: getattr(options, name) for name in names}
    return {**found, "text_ms": round(1e3 * whole, 1), "token_ms": round(1e3 * token, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(MODELS), default="qwen3-0.6b")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of each row that are given")
    parser.add_argument("--tokens", type=int, default=144, help="and that are generated")
    parser.add_argument("--stock", action="store_true", help="without Bastile")
    options = parser.parse_args()
    if options.tokens < 2:
        parser.error(f"--tokens is {options.tokens}; two are needed")
    print(json.dumps(run(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))), flush=True)


if __name__ == "__main__":
    main()
