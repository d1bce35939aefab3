"""How rounding moves a run away from float32's: the demo's model, trained on the Python standard library's sources from
the same weights on the same batches, in float32 and in bfloat16, with AdamW of each kind. Prints, for each, the mean
distance of its losses from float32's over the last quarter of the run, and its mean loss there.

    python tools/optimizer_curves.py                       the demo's model for the device that is there
    python tools/optimizer_curves.py --steps 300 --json f  a shorter run, and all losses in a file

Rounding alone is compared: all runs have the same moments' betas, learning rate and data. A learning rate that is small
against the weights, as in fine-tuning, is where bfloat16's neighbours are too far apart for a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import bastile
from bastile.cli import data, demo

#: What is compared with float32: type of the weights, and options of bastile.optim.AdamW.
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16, nearest": {},
    "bfloat16, stochastic": {"rounding": "stochastic"},
    "bfloat16, 8-bit moments, stochastic": {"rounding": "stochastic", "moments": "8bit"},
    "bfloat16, master weights": {"master_weights": True, "moments": torch.float32},
}


def batches(tokens: torch.Tensor, count: int, batch: int, sequence: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, len(tokens) - sequence, (count, batch), generator=generator)
    return [torch.stack([tokens[start : start + sequence] for start in row.tolist()]) for row in starts]


def train(model: Any, given: list[torch.Tensor], lr: float, **options: Any) -> torch.Tensor:
    device = next(model.parameters()).device
    optimizer = bastile.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, max_grad_norm=1.0, **options)
    losses = []
    for at, ids in enumerate(given):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (at + 1) / (len(given) // 20 + 1))
        ids = ids.to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    return torch.stack(losses).cpu().double()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=("cpu", "cuda"), help="the demo's model for this (default: the device's)")
    parser.add_argument("--kinds", type=int, default=len(KINDS), help="so many of them only: nearest, stochastic, ...")
    parser.add_argument("--json", type=Path, help="also write all losses here")
    options = parser.parse_args()
    sizes = demo.SIZES[options.size or torch.device(options.device).type]
    tokenizer, tokens = data.tokens_of(data.standard_library_text(), options.vocabulary)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=tokenizer.get_vocab_size(), tie_word_embeddings=True, **sizes["model"]
    )
    size = sizes["training"]
    given = batches(torch.as_tensor(tokens), options.steps, size["batch"], size["sequence"])
    bastile.apply()

    def run(dtype: torch.dtype, **kind: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(options.device, dtype)
        return train(model, given, options.lr, **kind)

    exact, last = run(torch.float32), options.steps // 4
    found = {"float32": exact}
    print(f"float32: mean loss {exact[-last:].mean():.5f} over the last {last} of {options.steps} steps")
    for name, kind in list(KINDS.items())[: options.kinds]:
        found[name] = run(torch.bfloat16, **kind)
        off = (found[name] - exact)[-last:]
        print(f"{name}: {off.abs().mean():.5f} from float32's, mean loss {off.mean():+.5f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({name: losses.tolist() for name, losses in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
