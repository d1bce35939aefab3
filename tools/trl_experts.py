"""Milliseconds and memory of a step of TRL's SFT of mixtures of experts, stock or with bastile.apply(), on one GPU:
shapes of published models, random weights and tokens.

    python tools/trl_experts.py [--only gpt_oss,qwen3_moe] [--with stock] [--batch 4] [--longest 2048] [--kernels 25]

TRL's defaults: bfloat16, checkpointing, padded batches, a loss that balances routers. Rows of an eighth of --longest to
--longest tokens, or with --same all of --longest. Adapters of rank 16 on all linear layers, by which PEFT means experts
too where it knows them, or with --attention-only on attention's; models that are named `trained` are trained whole.
The mean of --steps steps behind the untimed ones, for which nobody waits, and the median of a few for which a callback
waits; peak memory from the beginning. --kernels: then two more steps, with what each kernel took. Prints a JSON object
a model as it goes. Needs trl, peft and datasets."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from functools import partial
from typing import Any

import torch
from encoders import built
from trl_lora import ATTENTION

import bastile
from bastile.sweep.trainer import clock, tokenizer
from families import widths

UNTIMED, WAITED = 32, 8  # steps in which lengths become few and graphs are captured; steps that a callback waits for
TOLD = ("implementation", "batch", "longest", "same", "attention_only", "without")
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DENSE = {"num_experts": 64, "num_experts_per_tok": 8}


def _model(name: str, *sizes: int, **values: Any) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # in float32 the largest would not fit for the time of a moment
    try:
        return built(f"{name}ForCausalLM", torch.bfloat16, **widths(*sizes, **_ENDS, **values))
    finally:
        torch.set_default_dtype(before)


#: In brackets whose shapes they are.
MODELS = {
    "gpt_oss": partial(  # GPT-OSS 20B
        _model, "GptOss", 2880, 2880, 64, 8, 201088, 24, head_dim=64, num_local_experts=32, num_experts_per_tok=4
    ),
    "qwen3_moe": partial(  # a half of Qwen3 30B-A3B
        _model, "Qwen3Moe", 2048, 6144, 32, 4, 151936, 24, head_dim=128, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8,
    ),
    "olmoe": partial(_model, "Olmoe", 2048, 1024, 16, 16, 50304, 16, **_DENSE),  # OLMoE 1B-7B
    "deepseek_v2": partial(  # a half of DeepSeek-V2-Lite
        _model, "DeepseekV2", 2048, 10944, 16, 16, 102400, 14, moe_intermediate_size=1408, n_routed_experts=64,
        num_experts_per_tok=6, n_shared_experts=2, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    ),
    "small_trained": partial(  # Granite 3.1 1B-A400M, by Qwen3's code: TRL 1.16 cannot balance Granite's
        _model, "Qwen3Moe", 1024, 512, 16, 8, 49155, 24, head_dim=64, moe_intermediate_size=512, num_experts=32,
        num_experts_per_tok=8, tie_word_embeddings=True,
    ),
}  # fmt: skip


def run(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    if options.implementation == "bastile":
        bastile.apply(**dict.fromkeys(filter(None, options.without.split(",")), False))
    model, steps = MODELS[kind](), UNTIMED + WAITED + options.steps
    drawn = torch.Generator().manual_seed(0)
    least = options.longest if options.same else options.longest // 8
    lengths = torch.randint(least, options.longest + 1, (steps * options.batch,), generator=drawn).tolist()
    rows = [torch.randint(10, 40000, (length,), generator=drawn).tolist() for length in lengths]
    times: list[float] = []
    targets = ATTENTION if options.attention_only else "all-linear"
    adapters = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder,
                max_length=options.longest,
                per_device_train_batch_size=options.batch,
                max_steps=steps,
                bf16=True,
                optim="adamw_torch",
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                dataset_kwargs={"skip_prepare_dataset": True},
            ),
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer(),
            peft_config=None if kind.endswith("_trained") else adapters,
        )
        trainer.add_callback(clock(times, torch.device("cuda"), UNTIMED, WAITED, options.steps))
        trainer.train()
        said = bastile.report()
        kernels = _kernels(trainer, options.kernels) if options.kernels else []
    *waited, queued = times[UNTIMED:]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "queued_seconds": queued,
        "median_seconds": statistics.median(waited),
        "first_seconds": sum(times[:UNTIMED]),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "losses": [entry["loss"] for entry in logged][:4],
        "aux_losses": [entry.get("aux_loss") for entry in logged][:4],
        "kernels": kernels,
        "report": str(said),
    }


def _kernels(trainer: Any, most: int) -> list[Any]:
    """Milliseconds of a step and calls in two of these, the sum first."""
    from torch.profiler import ProfilerActivity, profile

    batches = iter(trainer.get_train_dataloader())
    trainer.model.train()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(2):
            trainer.training_step(trainer.model, next(batches))
        torch.cuda.synchronize()
    found = [(event.self_device_time_total / 2e3, event.count, event.key[:90]) for event in profiled.key_averages()]
    return [sum(milliseconds for milliseconds, *_ in found), *sorted(found, reverse=True)[:most]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODELS), help="which models, with commas between")
    parser.add_argument("--with", dest="implementation", choices=["bastile", "stock"], default="bastile")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest row")
    parser.add_argument("--attention-only", action="store_true", help="no adapters but on attention's layers")
    parser.add_argument("--same", action="store_true", help="all rows as long")
    parser.add_argument("--steps", type=int, default=24, help=f"that are timed, after {UNTIMED + WAITED} others")
    parser.add_argument("--without", default="", metavar="OPERATORS", help="of bastile.apply, with commas between")
    parser.add_argument(
        "--kernels", type=int, default=0, metavar="MOST", help="so many that took longest, of two steps"
    )
    options = parser.parse_args()
    for kind in options.only.split(","):
        told = {name: getattr(options, name) for name in TOLD}
        try:
            found = run(kind, options)
        except Exception as error:  # whatever a model's own code raises here: the others are still wanted
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({"type": kind, **told, **found}), flush=True)
        bastile.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    sys.exit(main())
