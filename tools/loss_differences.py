"""How far the loss of each implementation in bfloat16 is from a float32 run of the very same weights, which tells
rounding from a fault: a routed model sends tokens to other experts where two are nearly equal.

    python tools/loss_differences.py gpt-oss-20b qwen3-8b --out FILE.json

Random weights of published shapes. Told for each implementation, as the mean over the batches: the relative difference
of the loss, that of the last hidden states (norm of the difference over norm), and the share of tokens for which a
layer chose another set of experts than in float32. The float32 model needs twice the memory of the other."""

import argparse
import gc
import json
import multiprocessing
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import bastile
from bastile.bench.machine import versions
from bastile.shapes import MODELS
from bastile.sweep.model import build, random_tokens

BATCHES = ((512, 0), (2048, 1), (2048, 2), (2048, 3))  #: tokens, seed


@torch.no_grad()
def run(model: Any, tokens: torch.Tensor) -> tuple[float, torch.Tensor, list[torch.Tensor]]:
    """The loss, the last hidden states, and the experts that each layer chose, sorted."""
    chosen: list[torch.Tensor] = []

    def note(_module: Any, _arguments: Any, output: Any) -> None:
        chosen.append(output[-1].sort(-1).values)

    hooks = [m.register_forward_hook(note) for name, m in model.named_modules() if name.endswith("mlp.router")]
    hidden = model.model(input_ids=tokens)[0]
    for hook in hooks:
        hook.remove()
    if hidden.dtype == torch.float32:
        loss = F.cross_entropy(model.lm_head(hidden)[0, :-1].double(), tokens[0, 1:])
    else:
        loss = model(input_ids=tokens, labels=tokens).loss
    return loss.item(), hidden.float(), chosen


def implementations(model: Any) -> Iterator[str]:
    """Puts one after the other into force."""
    model_type = model.config.model_type
    yield "Transformers"
    if hasattr(model.config, "num_local_experts"):
        before = model.config._experts_implementation
        model.set_experts_implementation("eager")
        yield "Transformers, experts one by one"
        model.set_experts_implementation(before)
    bastile.apply(model_types=[model_type])
    yield "Bastile"
    bastile.reset()
    try:
        from liger_kernel import transformers as liger
    except ImportError:
        return
    getattr(liger, f"apply_liger_kernel_to_{model_type}")(model=model)  # the last, for it cannot be taken out
    yield "Liger-Kernel"


def compare(name: str, device: torch.device) -> dict[str, dict[str, float | None]]:
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{name}: float32", flush=True)
    model = build(name, torch.bfloat16, device, seed=0).float()  # the weights that the others have
    batches = [random_tokens(model.config.vocab_size, 1, length, device, seed) for length, seed in BATCHES]
    truth = [run(model, tokens) for tokens in batches]
    del model
    gc.collect()
    model = build(name, torch.bfloat16, device, seed=0)
    found = {}
    for implementation in implementations(model):
        print(f"{name}: {implementation}", flush=True)
        found[implementation] = difference([run(model, tokens) for tokens in batches], truth)
    return found


def difference(runs: list[Any], truth: list[Any]) -> dict[str, float | None]:
    losses, hidden, rerouted = [], [], []
    for (loss, states, experts), (true_loss, true_states, true_experts) in zip(runs, truth, strict=True):
        losses.append(abs(loss - true_loss) / true_loss)
        hidden.append(((states - true_states).norm() / true_states.norm()).item())
        others = [(a != b).any(-1).float().mean().item() for a, b in zip(experts, true_experts, strict=True)]
        rerouted += [sum(others) / len(others)] if others else []
    mean = {"loss": losses, "hidden": hidden, "rerouted": rerouted}
    return {key: sum(values) / len(values) if values else None for key, values in mean.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(MODELS))
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    content: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "batches": [{"tokens": length, "seed": seed} for length, seed in BATCHES],
        "models": {},
    }
    for name in options.models:
        with multiprocessing.get_context("spawn").Pool(1) as process:  # one each, for Liger-Kernel stays in force
            content["models"][name] = process.apply(compare, (name, device))
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
