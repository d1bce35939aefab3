"""Seconds a step and peak memory of TRL's SFT with LoRA on one GPU: with bastile.apply(), stock, or beside others.

    python tools/trl_lora.py --shape qwen3-8b --batch 4 --length 2048 [--checkpointing] [--load-in-4bit]
        [--with stock|compile|liger|unsloth]

Random weights of the named shape in bfloat16, r = 16 on all linear layers, random tokens, TRL's defaults but for what
is named. Prints one JSON object: the median of the steps after the fourth, by a callback that waits for the device;
peak memory allocated from the third step on; the losses. Needs trl, peft and datasets; bitsandbytes for four bits."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from typing import Any

import torch

import bastile
from bastile.shapes import MODELS
from bastile.sweep.model import quantise

UNTIMED = 4  # steps in which kernels are chosen and memory finds its size


def build(shape: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    options = dict(MODELS[shape])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def tokenizer(size: int = 3) -> Any:
    """One that TRL can ask for its special tokens; of `size` tokens, the others of which are the words w3, w4, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{n}": n for n in range(3, size)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def clock(times: list[float]) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            self.begun = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            times.append(time.perf_counter() - self.begun)
            if len(times) == UNTIMED - 1:
                torch.cuda.reset_peak_memory_stats()

    return Clock()


def _lora() -> dict[str, Any]:
    return {"r": 16, "lora_alpha": 16}


def _by_unsloth(options: argparse.Namespace) -> Any:
    """Its own loading and adapters, of the same random weights, which it wants from a folder. Without a trainer's
    adapters then."""
    import unsloth

    with tempfile.TemporaryDirectory() as folder:
        build(options.shape).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        torch.cuda.empty_cache()
        model, _ = unsloth.FastLanguageModel.from_pretrained(
            folder,
            max_seq_length=options.length,
            dtype=torch.bfloat16,
            load_in_4bit=options.load_in_4bit,
            local_files_only=True,
        )
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    how = "unsloth" if options.checkpointing else False
    return unsloth.FastLanguageModel.get_peft_model(
        model, target_modules=linear, lora_dropout=0, bias="none", use_gradient_checkpointing=how, **_lora()
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.implementation == "bastile":
        bastile.apply()
    with_unsloth = options.implementation == "unsloth"
    model = _by_unsloth(options) if with_unsloth else build(options.shape)  # it wants to be imported before the others
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    if options.load_in_4bit and not with_unsloth:
        quantise(model)
    tokens = torch.randint(0, model.config.vocab_size, (64, options.length), generator=torch.Generator().manual_seed(1))
    adapters = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **_lora())
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder,
                max_length=options.length,
                per_device_train_batch_size=options.batch,
                max_steps=options.steps,
                bf16=True,
                gradient_checkpointing=options.checkpointing,
                torch_compile=options.implementation == "compile",
                use_liger_kernel=options.implementation == "liger",
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                dataset_kwargs={"skip_prepare_dataset": True},
            ),
            train_dataset=Dataset.from_dict({"input_ids": tokens.tolist()}),
            processing_class=tokenizer(),
            peft_config=None if with_unsloth else adapters,
        )
        trainer.add_callback(clock(times))
        trainer.train()
    timed = times[UNTIMED:]
    return {
        "implementation": options.implementation,
        "shape": options.shape,
        "batch": options.batch,
        "length": options.length,
        "checkpointing": options.checkpointing,
        "load_in_4bit": options.load_in_4bit,
        "median_seconds": statistics.median(timed),
        "least_seconds": min(timed),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(MODELS), default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12, help=f"more than {UNTIMED}; the first {UNTIMED} are not timed")
    ways = ["bastile", "stock", "compile", "liger", "unsloth"]
    parser.add_argument("--with", dest="implementation", choices=ways, default="bastile", help="the implementation")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--load-in-4bit", action="store_true")
    options = parser.parse_args()
    if options.steps <= UNTIMED:
        parser.error(f"--steps is {options.steps}; more than {UNTIMED} are needed")
    found = run(options)
    print(json.dumps(found))
    if options.implementation == "bastile":
        print(bastile.report(), file=sys.stderr)


if __name__ == "__main__":
    main()
