"""One training run in a process of its own: `python -m bastile.cli.train plan.json`.

Reads a plan as written by compare.run. Writes one JSON object a line to standard output: {"losses": [...], "tokens": N}
for the steps since the last such line (tokens: how many these steps trained on; 0 for steps of an earlier process), at
the end {"result": {...}}. Everything else goes to standard error. With and without Bastile the same lines run; only
bastile.apply() differs. The loop is Transformers' Trainer."""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import bastile
from bastile.cli.examples import Examples, batch
from bastile.cli.model import checkpoint_activations

#: The products that LoRA adapts: all of a decoder layer's.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: A GPU is asked for its losses only now and then: waiting for each would hide how well the steps are queued.
_INTERVAL = 10

Report = Callable[[list[float], int], None]


class _Trainer(Trainer):
    """Trainer, which also keeps what each micro-batch contributed to its step's loss, and counts tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_losses: list[torch.Tensor] = []
        self.tokens: int | torch.Tensor = 0

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        mask = inputs.get("attention_mask")
        self.tokens = self.tokens + (inputs["input_ids"].numel() if mask is None else mask.sum())
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.micro_losses.append(loss)
        return loss


class _Watch(TrainerCallback):
    """Losses, time and tokens of the steps. The losses go to the trainer's log, which its checkpoints hold."""

    def __init__(self, trainer: _Trainer, report: Report) -> None:
        self.trainer, self.report = trainer, report
        self.losses: list[torch.Tensor] = []
        self.begin = self.away = 0.0  # when the first step ended; what saving took since
        self.last = 0.0
        self.first_tokens = self.reported_tokens = self.steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        earlier = logged(state)
        if earlier:
            self.report(earlier, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.losses.append(torch.stack(self.trainer.micro_losses).sum())
        self.trainer.micro_losses.clear()
        self.steps += 1
        interval = _INTERVAL if args.device.type == "cuda" else 1
        last = state.global_step == state.max_steps
        if self.steps == 1 or self.steps % interval == 0 or control.should_save or last:
            values = torch.stack(self.losses).tolist()  # waits for the device
            self.losses.clear()
            first = state.global_step - len(values) + 1
            state.log_history += [{"step": first + at, "step_loss": value} for at, value in enumerate(values)]
            tokens = int(self.trainer.tokens)
            self.last = time.perf_counter()
            if self.steps == 1:  # it warms up allocators and compiles kernels, and is not timed
                self.begin, self.first_tokens = self.last, tokens
            self.report(values, tokens - self.reported_tokens)
            self.reported_tokens = tokens

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.steps == 1:
            self.begin = time.perf_counter()
        elif state.global_step < state.max_steps:
            self.away += time.perf_counter() - self.last

    def measured(self) -> dict[str, Any]:
        """None for what a process that made one step at most cannot say."""
        steps, seconds = self.steps - 1, self.last - self.begin - self.away
        if steps < 1:
            return {"timed_steps": 0, "timed_seconds": None, "seconds_per_step": None, "tokens_per_second": None}
        return {
            "timed_steps": steps,
            "timed_seconds": seconds,
            "seconds_per_step": seconds / steps,
            "tokens_per_second": (int(self.trainer.tokens) - self.first_tokens) / seconds,
        }


def train(plan: dict[str, Any], report: Report) -> dict[str, Any]:
    """Carries out the plan; report(losses, tokens) is called as training goes on. Returns what the run measured."""
    arguments = _arguments(plan)
    device = arguments.device
    torch.manual_seed(plan["seed"])
    model = _build_model(plan)
    model.config.use_cache = False
    if plan["checkpointing"]:
        checkpoint_activations(model)
    patched = (
        bastile.apply(model_types=[model.config.model_type], **plan["operators"]) if plan["name"] == "bastile" else []
    )
    if plan["lora"]:
        model = _with_adapters(model, plan)
    trainer = _Trainer(model=model, args=arguments, train_dataset=Examples.load(plan["examples"]), data_collator=batch)
    watch = _Watch(trainer, report)
    trainer.add_callback(watch)
    memory_before = _memory_now(device)
    trainer.train(resume_from_checkpoint=plan["checkpoint"])
    if plan["save"]:
        model.save_pretrained(plan["save"])
    return {
        "losses": logged(trainer.state),
        **watch.measured(),
        "peak_memory": _memory_peak(device),
        "memory_before_training": memory_before,
        "patched": patched,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, threads: {torch.get_num_threads()}",
    }


def logged(state: Any) -> list[float]:
    """The loss of every step up to now, those of earlier processes too."""
    return [entry["step_loss"] for entry in state.log_history if "step_loss" in entry]


def _arguments(plan: dict[str, Any]) -> TrainingArguments:
    return TrainingArguments(
        output_dir=plan["folder"],
        max_steps=plan["steps"],
        per_device_train_batch_size=plan["batch"],
        gradient_accumulation_steps=plan["accumulate"],
        learning_rate=plan["lr"],
        lr_scheduler_type=plan["schedule"],
        warmup_steps=plan["warmup"],
        weight_decay=plan["weight_decay"],
        max_grad_norm=plan["max_grad_norm"],
        bf16=plan["bf16"],
        seed=plan["seed"],
        data_seed=plan["seed"],
        use_cpu=plan["device"] == "cpu",
        dataloader_drop_last=True,
        remove_unused_columns=False,
        save_strategy="steps" if plan["save_every"] else "no",
        save_steps=plan["save_every"] or 500,
        save_total_limit=2,
        logging_strategy="no",
        logging_nan_inf_filter=False,  # it would wait for the device at every step, and hide a NaN
        disable_tqdm=True,
        report_to="none",
    )


def _build_model(plan: dict[str, Any]) -> Any:
    dtype = getattr(torch, plan["dtype"])
    if "pretrained" in plan["model"]:
        return AutoModelForCausalLM.from_pretrained(plan["model"]["pretrained"], dtype=dtype)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**plan["model"]["config"]), dtype=dtype)


def _with_adapters(model: Any, plan: dict[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=plan["lora"], lora_alpha=plan["lora_alpha"], target_modules=LORA_TARGETS, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def _memory_now(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _process_memory("VmRSS")


def _memory_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _process_memory("VmHWM")


def _process_memory(key: str) -> int:
    """Bytes. On Linux its own count for this process: ru_maxrss there begins with what the parent process held."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get among the events

    def send(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=events, flush=True)

    send({"result": train(plan, lambda losses, tokens: send({"losses": losses, "tokens": tokens}))})


if __name__ == "__main__":
    main()
