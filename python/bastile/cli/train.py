"""One training run in a process of its own: `python -m bastile.cli.train plan.json`.

Reads a plan as written by compare.run_all. Writes JSON objects, one a line, to standard output. {"losses": [...],
"tokens": N, "seconds": X}: of the steps since the last such line, with the tokens that they trained on and the time
that they took; 0 and 0 for steps of an earlier process, and no time for the first step, which warms up allocators and
compiles kernels. {"waits": true}: where runs take turns, before the first step and after each turn; it goes on when a
line comes by standard input. At the end {"result": {...}}, or {"out_of_memory": "why"}. All else goes to standard
error. With and without Bastile the same lines run; only bastile.apply() differs. The loop is Transformers' Trainer."""

import resource
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, Trainer, TrainerCallback, TrainingArguments

import bastile
from bastile.bench.machine import describe_briefly
from bastile.bench.timing import cuda_peak, held
from bastile.cli.examples import Examples, batch
from bastile.cli.model import build, checkpoint_activations, load_in_4bit, with_adapters
from bastile.cli.processes import begin, out_of_memory

#: A GPU is asked for its losses only now and then: waiting for each would hide how well the steps are queued.
_INTERVAL = 10

Report = Callable[[list[float], int, float], None]
Wait = Callable[[], None]


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
    """Losses, time and tokens of the steps, and the turns. The losses go to the trainer's log, which its checkpoints
    hold. turn: so many steps each, the first one by itself; None: this run waits for no other."""

    def __init__(self, trainer: _Trainer, report: Report, wait: Wait, turn: int | None) -> None:
        self.trainer, self.report, self.wait, self.turn = trainer, report, wait, turn
        self.losses: list[torch.Tensor] = []
        self.steps = self.reported_tokens = 0
        self.begin = 0.0  # of the time that the next report is about
        self.turns = [_no_turn()]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        earlier = logged(state)
        if earlier:
            self.report(earlier, 0, 0.0)
        if self.turn:
            self.wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.losses.append(torch.stack(self.trainer.micro_losses).sum())
        self.trainer.micro_losses.clear()
        self.steps += 1
        interval = (self.turn or _INTERVAL) if args.device.type == "cuda" else 1
        last = state.global_step == state.max_steps
        turn_is_over = self.turn is not None and (self.steps - 1) % self.turn == 0
        if (self.steps - 1) % interval == 0 or turn_is_over or control.should_save or last:
            self._report(state)
        if turn_is_over and not last:
            self.wait()
            self.begin = time.perf_counter()
            self.turns.append(_no_turn())

    def _report(self, state: Any) -> None:
        values = torch.stack(self.losses).tolist()  # waits for the device
        now = time.perf_counter()
        self.losses.clear()
        first = state.global_step - len(values) + 1
        state.log_history += [{"step": first + at, "step_loss": value} for at, value in enumerate(values)]
        tokens = int(self.trainer.tokens) - self.reported_tokens
        self.reported_tokens += tokens
        seconds = now - self.begin if self.steps > 1 else 0.0
        self.report(values, tokens, seconds)
        if self.steps > 1:
            for key, value in (("steps", len(values)), ("tokens", tokens), ("seconds", seconds)):
                self.turns[-1][key] += value
        self.begin = now

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begin = time.perf_counter()

    def measured(self) -> dict[str, Any]:
        """Medians over the turns. None for what a process that made one step at most cannot say."""
        turns = [turn for turn in self.turns if turn["steps"]]
        return {
            "timed_steps": sum(turn["steps"] for turn in turns),
            "timed_seconds": sum(turn["seconds"] for turn in turns) if turns else None,
            "seconds_per_step": median(turn["seconds"] / turn["steps"] for turn in turns) if turns else None,
            "tokens_per_second": median(turn["tokens"] / turn["seconds"] for turn in turns) if turns else None,
            "turns": turns,
        }


def _no_turn() -> dict[str, Any]:
    return {"steps": 0, "tokens": 0, "seconds": 0.0}


def train(plan: dict[str, Any], report: Report, wait: Wait = lambda: None) -> dict[str, Any]:
    """Carries out the plan; report(losses, tokens, seconds) is called as training goes on, and wait() where the plan
    has turns and this one's is over. Returns what the run measured."""
    arguments = _arguments(plan)
    device = arguments.device
    torch.manual_seed(plan["seed"])
    model = _build_model(plan)
    if plan["checkpointing"]:
        checkpoint_activations(model)
    chosen = {operator: False for operator, is_used in plan["operators"].items() if not is_used}
    if plan["optimizer"] == "torch":
        chosen["adamw"] = False
    if plan["offload_checkpoints"]:
        chosen["offload_checkpoints"] = True
    patched = bastile.apply(model_types=[model.config.model_type], **chosen) if plan["name"] == "bastile" else []
    if plan["lora"]:
        model = with_adapters(model, plan["lora"], plan["lora_alpha"])
    optimizer = _optimizer(plan, arguments)
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=Examples.load(plan["examples"]),
        data_collator=batch,
        optimizer_cls_and_kwargs=optimizer,
    )
    if optimizer:
        bastile.optim.clip_in_step(trainer)
    watch = _Watch(trainer, report, wait, plan["turn"])
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
        "device": describe_briefly(device),
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
        # PEFT's adapters are float32: beside weights of 16 bits they are meant to run under autocast.
        bf16=plan["bf16"] or bool(plan["lora"] and plan["dtype"] == "bfloat16"),
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


#: What --optimizer asks of bastile.optim.AdamW. That of "bastile" is bastile.apply()'s own.
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "bastile-stochastic": {"rounding": "stochastic"},
    "bastile-8bit": {"moments": "8bit"},
}


def _optimizer(plan: dict[str, Any], arguments: TrainingArguments) -> tuple[type, dict[str, Any]] | None:
    """None: the trainer's own, or what bastile.apply() makes of that."""
    if plan["name"] != "bastile" or plan["optimizer"] not in _OPTIMIZERS:
        return None
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    options = {"lr": arguments.learning_rate, "betas": betas, "eps": arguments.adam_epsilon, "seed": plan["seed"]}
    return bastile.optim.AdamW, options | _OPTIMIZERS[plan["optimizer"]]


def _build_model(plan: dict[str, Any]) -> Any:
    name = plan["model"].get("pretrained")
    if plan["load_in_4bit"]:
        return load_in_4bit(name, plan["dtype"], torch.device(plan["device"]))
    return build(None if name else AutoConfig.for_model(**plan["model"]["config"]), plan["dtype"], pretrained=name)


def _memory_now(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _process_memory("VmRSS")


def _memory_peak(device: torch.device) -> int:
    return cuda_peak(device) if device.type == "cuda" else _process_memory("VmHWM")


def _process_memory(key: str) -> int:
    try:
        return held(key)  # ru_maxrss begins with what the parent process held, on Linux
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run(plan: dict[str, Any], send: Callable[[dict[str, Any]], None], go_on: Wait) -> None:
    """Carries out the plan and sends the events that the head of this file names; go_on() waits for its turn."""

    def report(losses: list[float], tokens: int, seconds: float) -> None:
        send({"losses": losses, "tokens": tokens, "seconds": seconds})

    def wait() -> None:
        send({"waits": True})
        go_on()

    with out_of_memory(lambda why: send({"out_of_memory": why})):
        send({"result": train(plan, report, wait)})


def main() -> None:
    run(*begin())


if __name__ == "__main__":
    main()
