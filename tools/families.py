"""Milliseconds and peak memory of a training step of other families than Qwen3 and Llama, stock and with
bastile.apply(), on one GPU: a few layers at the widths of published models, random weights and tokens.

    python tools/families.py [--lora] [--only gemma2,phi3] [--batch 4] [--length 2048] [--kernels 12]

Forward and backward passes of bfloat16 models, all weights trained; --lora: r = 16 on all linear layers, adapters in
float32 under autocast, as PEFT's users have it. One process, stock first. Prints a JSON object a family as it goes,
with the kernels' groups and the longest of them; a family that cannot run here says why. Needs peft for --lora."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

import bastile
from bastile.cli import model as models
from bastile.profile.groups import short_name
from bastile.profile.record import measure
from bastile.profile.regions import marked
from bastile.sweep.model import add_adapters, fill, random_tokens

_DEVICE = torch.device("cuda")
UNTIMED = 6  # steps in which kernels are compiled, and CUDA graphs made where they pay


def widths(
    hidden: int, inner: int, heads: int, groups: int, vocabulary: int, layers: int, **others: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        **others,
    }


def _widths(*sizes: int, layers: int = 6, **others: Any) -> dict[str, Any]:
    return {
        **widths(*sizes, layers=layers),
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **others,
    }


#: By model type: what its config takes. In brackets whose widths they are.
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": _widths(4096, 14336, 32, 8, 32768),  # Mistral 7B v0.3
    "qwen2": _widths(3584, 18944, 28, 4, 152064),  # Qwen2.5 7B
    "gemma2": _widths(3584, 14336, 16, 8, 256000, head_dim=256, tie_word_embeddings=True),  # Gemma 2 9B
    "gemma3_text": _widths(2560, 10240, 8, 4, 262144, head_dim=256, tie_word_embeddings=True),  # Gemma 3 4B
    "phi3": _widths(5120, 17920, 40, 10, 100352),  # Phi-4
    "olmo2": _widths(4096, 11008, 32, 32, 100352),  # OLMo 2 7B
    "granite": _widths(4096, 12800, 32, 8, 49159, head_dim=128),  # Granite 3.3 8B
    "glm4": _widths(4096, 13696, 32, 2, 151552, head_dim=128),  # GLM 4 9B
    "smollm3": _widths(2048, 11008, 16, 4, 128256),  # SmolLM3 3B
    "cohere2": _widths(4096, 14336, 32, 8, 256000, tie_word_embeddings=True),  # Command R7B
    "starcoder2": _widths(4608, 18432, 36, 4, 49152),  # StarCoder2 7B
    "gpt_neox": _widths(4096, 16384, 32, 32, 50432),  # Pythia 6.9B
    "nemotron": _widths(4096, 16384, 32, 8, 256000),  # Minitron 8B
    "gpt_oss": _widths(2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4),
    "olmoe": _widths(2048, 1024, 16, 16, 50304, num_experts=64, num_experts_per_tok=8),  # OLMoE 1B-7B
    "deepseek_v3": _widths(  # Moonlight 16B-A3B
        2048, 11264, 16, 16, 163840, moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6,
        n_shared_experts=2, first_k_dense_replace=1, n_group=1, topk_group=1, kv_lora_rank=512, q_lora_rank=None,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
    ),
    "qwen3_5_text": _widths(2560, 9216, 16, 4, 248320, head_dim=256, layers=8),  # Qwen3.5 4B
    "granitemoehybrid": _widths(  # Granite 4.0 H Micro
        2048, 8192, 32, 8, 100352, shared_intermediate_size=8192, num_local_experts=0, mamba_n_heads=64,
        mamba_d_head=64, mamba_d_state=128, layer_types=["linear_attention"] * 5 + ["full_attention"],
    ),
    "lfm2": _widths(2048, 12288, 32, 8, 65536),  # LFM2 1.2B
}  # fmt: skip


def step_of(kind: str, options: argparse.Namespace) -> tuple[Any, Any]:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **FAMILIES[kind])
    model = models.build(config, "bfloat16", _DEVICE)
    fill(model, 0)
    if options.lora:
        add_adapters(model, 16, False, 0)
    ids = random_tokens(config.vocab_size, options.batch, options.length, _DEVICE, 1)

    return model, step_with(model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss)


def step_with(model: Any, loss_of: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A forward and a backward pass, whose gradients are dropped."""

    def step() -> torch.Tensor:
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    return step


def run(made: Callable[[], tuple[Any, Any]], name: str, options: argparse.Namespace) -> dict[str, Any]:
    """made: a model, and a step of its training that returns the loss."""
    put_in = bastile.apply() if name == "bastile" else []
    bastile.report(reset=True)
    try:
        model, step = made()
        for _ in range(UNTIMED):
            step()
        found, _ = measure(step, _DEVICE, options.steps, partial(marked, model))
        said = str(bastile.report()) if name == "bastile" else ""
    finally:
        bastile.reset(put_in)
    longest = [(short_name(k["name"]), k["group"], k["calls"], k["seconds"]) for k in found["kernels"]]
    return {**found, "kernels": longest[: options.kernels], "report": said}


def compare(row: dict[str, Any], made: Callable[[], tuple[Any, Any]], options: argparse.Namespace) -> None:
    """Adds what a step takes to the row, stock and with ours, and prints it."""
    names = ("bastile",) if options.no_stock else ("stock", "bastile")
    for name in names:
        try:
            row[name] = run(made, name, options)
        except Exception as error:  # whatever a model's own code raises here: the others are still wanted
            row[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(row), flush=True)
    times = [f"{1e3 * row[n]['seconds_per_step']:.1f}" if "error" not in row[n] else row[n]["error"] for n in names]
    print(row["type"], *times, file=sys.stderr, flush=True)


def parser_of(description: str | None, types: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(types), help="model types, with commas between")
    parser.add_argument("--steps", type=int, default=5, help="that are timed, after nine others")
    parser.add_argument("--kernels", type=int, default=12, help="how many of the longest are shown")
    parser.add_argument("--no-stock", action="store_true")
    return parser


def main() -> None:
    parser = parser_of(__doc__, FAMILIES)
    parser.add_argument("--lora", action="store_true", help="adapters on all linear layers, and nothing else trained")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args()
    for kind in options.only.split(","):
        row: dict[str, Any] = {"type": kind, "lora": options.lora, "batch": options.batch, "length": options.length}
        compare(row, partial(step_of, kind, options), options)


if __name__ == "__main__":
    main()
