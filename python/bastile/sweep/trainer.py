"""A trainer's steps with their times, memory and losses: TRL's SFT, with its defaults but for what is named, on random
tokens and random weights; of the whole model, or of adapters on it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from bastile.bench.timing import begin_peak, peak_bytes, synchronize
from bastile.cli.model import LORA_TARGETS
from bastile.peers.models import CannotRun

#: What of TRL's settings makes it run each implementation; the others are there when its model is built.
WAYS: dict[str, dict[str, Any]] = {
    "hf": {},
    "compile": {"torch_compile": True},
    "liger": {"use_liger_kernel": True},
    "unsloth": {},
    "bastile": {},
}


def prepare(implementation: str, offload_checkpoints: bool = False) -> list[str]:
    """What comes before the model; what was put in."""
    if implementation == "bastile":
        import bastile

        return bastile.apply(offload_checkpoints=offload_checkpoints)
    if implementation == "unsloth":
        try:
            import unsloth  # noqa: F401  (it puts itself in)
        except Exception as error:  # it looks for a GPU of its own, and for releases that suit it
            raise CannotRun(f"Unsloth cannot be imported ({error}): pip install unsloth") from error
    return []


def tokenizer(size: int = 3) -> Any:
    """One that TRL can ask for its special tokens; of `size` tokens, the others of which are the words w3, w4, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{n}": n for n in range(3, size)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def clock(times: list[float], device: torch.device, untimed: int, timed: int, queued: int = 0) -> Any:
    """What notes the seconds of each step, begun and ended when the device is idle, and begins the peak after the
    untimed ones. Behind these and `timed` others nobody waits: of `queued` further steps, one after the other and
    without a log, as most of a user's are, one number is noted, their mean."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        steps = 0
        last = untimed + timed

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if self.steps <= self.last:
                synchronize(device)
                self.begun = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps += 1
            if self.steps > self.last:
                control.should_log = False
            if self.steps <= self.last or self.steps == self.last + queued:
                synchronize(device)
                seconds = time.perf_counter() - self.begun
                times.append(seconds if self.steps <= self.last else seconds / queued)
            if self.steps == untimed:
                begin_peak(device)

    return Clock()


def measure(build: Callable[[], Any], length: int, device: torch.device, plan: dict[str, Any]) -> dict[str, Any]:
    """Medians of plan["repeats"] steps after plan["warm_up"] others, and the mean of as many behind them for which
    nobody waits. build: the model with random weights.

    plan: as the sweep's, with "implementation", "batch", "dtype", "checkpointing", and "lora" (a rank, or 0) with
    "load_in_4bit" and, where not all linear layers have adapters, "targets", the names of those that do; "ragged": rows
    of an eighth of the length and longer; "arguments": more of TRL's settings."""
    implementation, untimed = plan["implementation"], plan["warm_up"]
    timed = plan["repeats"]
    steps = untimed + 2 * timed
    if implementation == "unsloth":  # which wants to load and change it by itself
        model = _by_unsloth(build, length, plan)
    else:
        model = build()
        if plan.get("load_in_4bit"):
            from bastile.sweep.model import quantise

            quantise(model)
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    on_cpu = device.type == "cpu"
    generator = torch.Generator().manual_seed(plan["seed"] + 1)
    tokens = torch.randint(0, model.config.vocab_size, (8 * plan["batch"], length), generator=generator).tolist()
    if plan.get("ragged"):
        ends = torch.randint(length // 8, length + 1, (len(tokens),), generator=generator).tolist()
        tokens = [row[:end] for row, end in zip(tokens, ends, strict=True)]
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder,
                max_length=length,
                per_device_train_batch_size=plan["batch"],
                gradient_accumulation_steps=1,  # Unsloth's own default is two batches a step
                max_steps=steps,
                bf16=plan["dtype"] == "bfloat16",
                gradient_checkpointing=plan["checkpointing"],
                use_cpu=on_cpu,
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                seed=plan["seed"],
                dataset_kwargs={"skip_prepare_dataset": True},
                **WAYS[implementation],
                **plan.get("arguments", {}),
            ),
            train_dataset=Dataset.from_dict({"input_ids": tokens}),
            processing_class=tokenizer(),
            peft_config=_adapters(plan) if plan.get("lora") and implementation != "unsloth" else None,
        )
        trainer.add_callback(clock(times, device, untimed, timed, timed))
        trainer.train()
    *samples, queued = times[untimed:]
    return {
        "seconds": median(samples),
        "samples": samples,
        "queued_seconds": queued,
        "tokens_per_second": plan["batch"] * length / median(samples),
        "before_bytes": None,
        "peak_bytes": peak_bytes(device),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def _adapters(plan: dict[str, Any]) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=plan["lora"],
        lora_alpha=plan["lora"],
        lora_dropout=plan.get("lora_dropout", 0.0),
        target_modules=plan.get("targets", "all-linear"),
        task_type="CAUSAL_LM",
    )


def _by_unsloth(build: Callable[[], Any], length: int, plan: dict[str, Any]) -> Any:
    """Its own loading and adapters, of the same random weights, which it wants from a folder."""
    import unsloth

    if not plan.get("lora"):
        raise CannotRun("Unsloth is measured with adapters: give --lora")
    with tempfile.TemporaryDirectory() as folder:
        build().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        torch.cuda.empty_cache()
        model, _ = unsloth.FastLanguageModel.from_pretrained(
            folder,
            max_seq_length=length,
            dtype=torch.bfloat16,
            load_in_4bit=plan["load_in_4bit"],
            local_files_only=True,
        )
    return unsloth.FastLanguageModel.get_peft_model(
        model,
        r=plan["lora"],
        lora_alpha=plan["lora"],
        target_modules=plan.get("targets", LORA_TARGETS),
        lora_dropout=plan.get("lora_dropout", 0.0),
        bias="none",
        use_gradient_checkpointing="unsloth" if plan["checkpointing"] else False,
    )
