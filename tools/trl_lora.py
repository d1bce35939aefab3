"""Seconds a step and peak memory of TRL's SFT with LoRA, stock or with bastile.apply(), on one GPU.

    python tools/trl_lora.py --shape qwen3-8b --batch 4 --length 2048 [--stock] [--checkpointing] [--load-in-4bit]

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
from torch import nn

import bastile
from bastile.shapes import MODELS

UNTIMED = 4  # steps in which kernels are chosen and memory finds its size


def build(shape: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    options = dict(MODELS[shape])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def quantise(model: Any) -> None:
    """Each linear layer but the head in NF4 with double quantisation, as a loaded QLoRA base has them."""
    import bitsandbytes as bnb

    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is not nn.Linear or name == "lm_head":
                continue
            sizes = layer.in_features, layer.out_features
            quantised = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
            quantised.weight = bnb.nn.Params4bit(layer.weight.data.cpu(), requires_grad=False, quant_type="nf4")
            setattr(module, name, quantised.to("cuda"))
    model.is_loaded_in_4bit = True  # which PEFT asks for
    torch.cuda.empty_cache()


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


def run(options: argparse.Namespace) -> dict[str, Any]:
    if not options.stock:
        bastile.apply()
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    model = build(options.shape)
    if options.load_in_4bit:
        quantise(model)
    tokens = torch.randint(0, model.config.vocab_size, (64, options.length), generator=torch.Generator().manual_seed(1))
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
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                dataset_kwargs={"skip_prepare_dataset": True},
            ),
            train_dataset=Dataset.from_dict({"input_ids": tokens.tolist()}),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        trainer.add_callback(clock(times))
        trainer.train()
    timed = times[UNTIMED:]
    return {
        "implementation": "stock" if options.stock else "bastile",
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
    parser.add_argument("--stock", action="store_true", help="without Bastile")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--load-in-4bit", action="store_true")
    options = parser.parse_args()
    if options.steps <= UNTIMED:
        parser.error(f"--steps is {options.steps}; more than {UNTIMED} are needed")
    found = run(options)
    print(json.dumps(found))
    if not options.stock:
        print(bastile.report(), file=sys.stderr)


if __name__ == "__main__":
    main()
