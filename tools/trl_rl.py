"""Seconds a step and peak memory of TRL's SFT, DPO, KTO, reward or GRPO trainer, of a whole model or of adapters, or of
Transformers' own Trainer, stock or with bastile.apply(), on one GPU.

    python tools/trl_rl.py --trainer dpo --shape qwen3-0.6b --batch 4 --length 1024 [--stock] [--no-checkpointing]
        [--no-graphs] [--lora] [--no-autocast] [--float32] [--ragged] [--packing] [--without OPERATOR]
    python tools/trl_rl.py --trainer grpo --generate --batch 8 --length 192 --steps 4 --untimed 1 [--stock]
    python tools/trl_rl.py --whole --trainer sft --lora --ragged --steps 100 [--stock]

Random weights of the named shape in bfloat16, or with --float32, as TRL itself loads a model by its name, in float32
under autocast; random words, TRL's defaults but for what is named. All rows have --length tokens; --ragged: between an
eighth of it and all, so that no two batches are alike; --packing: these side by side, as TRL's SFT puts them together.
DPO, reward: `batch` pairs, each of two sequences; DPO and KTO
have a reference model. GRPO: `batch` completions of one prompt, three quarters of a sequence
each; they are drawn at random, not generated, where generation is vLLM's work; --generate: by the model, as TRL has it
where vLLM is not used. Trainer: without checkpointing, which is not its default. Prints one JSON object: the median of
the steps after the untimed ones, by a callback that waits for the device; the mean of as many behind them, for which it
does not wait, and which are not logged; seconds in which a kernel ran, by two further steps under the profiler, but
where the model generates; peak memory behind the untimed steps; the losses; how often Bastile's losses and graphs ran.
Needs trl and datasets, for --lora peft."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import bastile
from bastile.profile.record import covered
from bastile.shapes import MODELS
from bastile.sweep import model as models
from bastile.sweep.trainer import clock, tokenizer

ROWS = 64
UNTIMED = 6  # steps in which kernels are chosen, graphs are captured, and memory finds its size; --untimed
OF_TOKENS = {"transformers.generation.utils.GenerationMixin"}  # the report's name of calls for one token each
PROFILED = 2  # further steps, the last ones


def build(options: argparse.Namespace) -> Any:
    made = models.build(options.shape, torch.bfloat16, torch.device("cuda"), 0)
    made = made.float() if options.float32 else made
    torch.cuda.empty_cache()  # what only making it took is no run's
    torch.cuda.reset_peak_memory_stats()
    return made


def judge(options: argparse.Namespace) -> Any:
    """The model with a head of one score, as reward models have it."""
    from transformers import AutoModelForSequenceClassification

    backbone = build(options)
    backbone.config.num_labels, backbone.config.pad_token_id = 1, 0
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = AutoModelForSequenceClassification.from_config(backbone.config, dtype=backbone.dtype)
    made.model = backbone.model
    return made.train()


def texts(options: argparse.Namespace, length: int, vocabulary: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    count = rows_of(options)
    drawn = torch.randint(3, vocabulary, (count, length), generator=generator).tolist()
    if options.ragged:
        ends = torch.randint(length // 8, length + 1, (count,), generator=generator).tolist()
        drawn = [row[:end] for row, end in zip(drawn, ends, strict=True)]
    return [" ".join(f"w{n}" for n in row) for row in drawn]


def rows_of(options: argparse.Namespace) -> int:
    """As many as are trained on where no two batches are to be alike; packed rows take up to eight."""
    return steps_of(options) * options.batch * (2 if options.packing else 1) if options.ragged else ROWS


def data(options: argparse.Namespace, vocabulary: int) -> dict[str, list[Any]]:
    """Rows whose sequences have `length` tokens, their end among them, or up to as many."""
    if options.trainer == "sft":
        return {"text": texts(options, options.length - 1, vocabulary, 1)}
    prompt = options.length // 4
    found: dict[str, list[Any]] = {"prompt": texts(options, prompt, vocabulary, 1)}
    names = {"dpo": ("chosen", "rejected"), "reward": ("chosen", "rejected"), "kto": ("completion",)}
    for seed, name in enumerate(names.get(options.trainer, ()), 2):
        found[name] = [" " + text for text in texts(options, options.length - prompt - 1, vocabulary, seed)]
    if options.trainer == "kto":
        found["label"] = [number % 2 == 0 for number in range(rows_of(options))]
    return found


def draws(model: Any, count: int, vocabulary: int) -> Any:
    """In the place of the model's generate: completions of so many random tokens."""

    def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        drawn = torch.randint(3, vocabulary, (input_ids.shape[0], count), device=input_ids.device)
        return torch.cat([input_ids, drawn], 1)

    return generate


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[0] % 17) for ids in completion_ids]


def profiled(found: dict[str, float], steps: int) -> Any:
    """A callback: the device's busy seconds a step, over the last PROFILED of so many steps."""
    from torch.profiler import ProfilerActivity, profile
    from transformers import TrainerCallback

    class Profiled(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == steps - PROFILED:
                torch.cuda.synchronize()
                self.profile = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
                self.profile.start()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == steps:
                torch.cuda.synchronize()
                self.profile.stop()
                ran = [e for e in self.profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
                found["busy"] = covered((e.time_range.start, e.time_range.end) for e in ran) / 1e6 / PROFILED

    return Profiled()


def steps_of(options: argparse.Namespace) -> int:
    if options.whole:
        return int(options.steps)
    return options.steps + (options.steps - options.untimed) + (0 if options.generate else PROFILED)


def seconds_since_the_process_began() -> float:
    begun = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun


def noted(ends: list[float]) -> Any:
    """A callback: when each step ended, for the host."""
    from transformers import TrainerCallback

    class Noted(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            ends.append(seconds_since_the_process_began())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(seconds_since_the_process_began())

    return Noted()


def peaks(found: dict[str, float]) -> Any:
    """A callback: peak memory of the training, before weights become what they were before it."""
    from transformers import TrainerCallback

    class Peaks(TrainerCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
            found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()

    return Peaks()


def plain_trainer(options: argparse.Namespace, given: dict[str, Any]) -> Any:
    """Transformers' own, of tokens."""
    from transformers import Trainer, TrainingArguments

    model = build(options)
    tokens = torch.randint(3, model.config.vocab_size, (ROWS, options.length)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(model, TrainingArguments(**given | {"gradient_checkpointing": False}), train_dataset=rows)


def trainer_of(options: argparse.Namespace, folder: str) -> Any:
    import trl
    from datasets import Dataset

    given: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": options.batch,
        "max_steps": steps_of(options),
        "bf16": not options.no_autocast,
        "gradient_checkpointing": not options.no_checkpointing,
        "logging_steps": 10 if options.whole else 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if options.trainer == "trainer":
        return plain_trainer(options, given)
    model = judge(options) if options.trainer == "reward" else build(options)
    vocabulary = model.config.vocab_size
    name = "Reward" if options.trainer == "reward" else options.trainer.upper()
    more: dict[str, Any] = {}
    if options.trainer == "grpo":
        completion = options.length - options.length // 4
        if not options.generate:
            model.generate = draws(model, completion, vocabulary)
        given |= {"num_generations": options.batch, "max_completion_length": completion}
        more["reward_funcs"] = reward
    else:
        given["max_length"] = options.length
    if options.packing:
        given["packing"] = True
    if options.lora:
        from peft import LoraConfig

        kind = "SEQ_CLS" if options.trainer == "reward" else "CAUSAL_LM"
        more["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=kind)
    elif options.trainer in ("dpo", "kto"):
        more["ref_model"] = build(options)
    return getattr(trl, f"{name}Trainer")(
        model=model,
        args=getattr(trl, f"{name}Config")(**given),
        train_dataset=Dataset.from_dict(data(options, vocabulary)),
        processing_class=tokenizer(vocabulary),
        **more,
    )


def apply(options: argparse.Namespace) -> None:
    if not options.stock:
        graphs = False if options.no_graphs else "auto"
        bastile.apply(cuda_graphs=graphs, **dict.fromkeys(options.without, False))


def whole(options: argparse.Namespace) -> dict[str, Any]:
    apply(options)
    ends: list[float] = []
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(options, folder)
        trainer.add_callback(noted(ends))
        trainer.add_callback(peaks(found))
        trainer.train()
        torch.cuda.synchronize()
        ends.append(seconds_since_the_process_began())
    return told(options) | {
        "seconds_of_ends": ends,  # of what comes before the first step, of each step, of the device's work
        **found,
    }


def told(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "implementation": "stock" if options.stock else "bastile",
        "graphs": not (options.stock or options.no_graphs),
        "trainer": options.trainer,
        "shape": options.shape,
        "batch": options.batch,
        "length": options.length,
        "checkpointing": not options.no_checkpointing and options.trainer != "trainer",
        "lora": options.lora,
        "autocast": not options.no_autocast,
        "float32": options.float32,
        "ragged": options.ragged,
        "packing": options.packing,
        "without": options.without,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    apply(options)
    times: list[float] = []
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(options, folder)
        count = options.steps - options.untimed
        trainer.add_callback(peaks(found))
        trainer.add_callback(clock(times, torch.device("cuda"), options.untimed, count, count))
        if not options.generate:
            trainer.add_callback(profiled(found, steps_of(options)))
        trainer.train()
    graphs = [line for line in bastile.report() if line.operator == "cuda_graphs"]
    *timed, queued = times[options.untimed :]
    return told(options) | {
        "median_seconds": statistics.median(timed),
        "least_seconds": min(timed),
        "queued_seconds": queued,
        "busy_seconds": found.get("busy"),
        "generates": options.generate,
        "peak_bytes": found["peak_bytes"],
        "peak_reserved_bytes": found["peak_reserved_bytes"],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "losses_by_bastile": bastile.report().ran("linear_logprobs"),
        "steps_by_graphs": sum(line.ran for line in graphs if line.where not in OF_TOKENS),
        "tokens_by_graphs": sum(line.ran for line in graphs if line.where in OF_TOKENS),
    }


def options_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=["sft", "dpo", "kto", "reward", "grpo", "trainer"], default="dpo")
    parser.add_argument("--shape", choices=sorted(MODELS), default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12, help="with those that are not timed")
    parser.add_argument("--untimed", type=int, default=UNTIMED, help=f"the first steps; {UNTIMED}")
    parser.add_argument("--no-autocast", action="store_true", help="bf16=False: in the types that are loaded")
    parser.add_argument("--lora", action="store_true", help="adapters of rank 16 on all linear layers; not of Trainer")
    parser.add_argument("--float32", action="store_true", help="weights in float32, under autocast")
    parser.add_argument("--ragged", action="store_true", help="rows of all lengths; not of Trainer")
    parser.add_argument("--packing", action="store_true", help="SFT's rows side by side, with --ragged")
    parser.add_argument("--without", action="append", default=[], metavar="OPERATOR", help="Bastile, but for this")
    parser.add_argument("--generate", action="store_true", help="GRPO's completions by the model itself")
    parser.add_argument("--whole", action="store_true", help="when each step ended, from the process' beginning on")
    parser.add_argument("--stock", action="store_true", help="without Bastile")
    parser.add_argument("--no-graphs", action="store_true", help="with Bastile, but without CUDA graphs")
    parser.add_argument("--no-checkpointing", action="store_true", help="which TRL does by default")
    return parser


def main() -> None:
    parser = options_parser()
    options = parser.parse_args()
    if options.packing and not (options.ragged and options.trainer == "sft"):
        parser.error("--packing is of --trainer sft --ragged")
    if options.steps <= options.untimed and not options.whole:
        parser.error(f"--steps is {options.steps}; more than {options.untimed} are needed")
    print(json.dumps(whole(options) if options.whole else run(options)))
    if not options.stock:
        print(bastile.report(), file=sys.stderr)


if __name__ == "__main__":
    main()
