"""How far the loss of each implementation in bfloat16 is from a float32 run of the very same weights, which tells
rounding from a fault: a routed model sends tokens to other experts where two are nearly equal.

    python tools/loss_differences.py gpt-oss-20b qwen3-8b --out FILE.json

Random weights of published shapes. Told for each implementation, as the mean over the batches: the relative difference
of the loss, that of the last hidden states (norm of the difference over norm), and the share of tokens for which a
layer chose another set of experts than in float32. The float32 model needs twice the memory of the other."""

import argparse
import gc
import multiprocessing
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import bastile
from bastile.bench.machine import describe_briefly
from bastile.cli.files import write_json
from bastile.cli.shown import about
from bastile.peers.models import IMPLEMENTATIONS, CannotRun
from bastile.shapes import MODELS
from bastile.sweep.model import build, random_tokens

#: What is told of, by the sweep's names, and how experts are computed where that is not the usual way. Liger-Kernel is
#: the last, for it cannot be taken out.
WAYS = (
    ("Transformers", "hf", None),
    ("Transformers, experts one by one", "hf", "eager"),
    ("Bastile", "bastile", None),
    ("Liger-Kernel", "liger", None),
)
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


def compare(name: str, device: torch.device) -> dict[str, dict[str, float | None]]:
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{name}: float32", flush=True)
    model = build(name, torch.bfloat16, device, seed=0).float()  # the weights that the others have
    batches = [random_tokens(model.config.vocab_size, 1, length, device, seed) for length, seed in BATCHES]
    truth = [run(model, tokens) for tokens in batches]
    found = {}
    for title, implementation, experts in WAYS:
        del model
        gc.collect()
        try:
            IMPLEMENTATIONS[implementation].patch(MODELS[name]["model_type"])
        except CannotRun as reason:
            print(f"{name}: {reason}")
            break
        model = build(name, torch.bfloat16, device, seed=0)
        if experts and not hasattr(model.config, "num_local_experts"):
            continue
        if experts:
            model.set_experts_implementation(experts)
        print(f"{name}: {title}", flush=True)
        found[title] = difference([run(model, tokens) for tokens in batches], truth)
        bastile.reset()
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
        **about(shlex.join(sys.argv)),
        "machine": describe_briefly(device),
        "batches": [{"tokens": length, "seed": seed} for length, seed in BATCHES],
        "models": {},
    }
    for name in options.models:
        with multiprocessing.get_context("spawn").Pool(1) as process:  # one each, for Liger-Kernel stays in force
            content["models"][name] = process.apply(compare, (name, device))
        write_json(options.out, content)


if __name__ == "__main__":
    main()
