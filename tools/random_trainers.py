"""Random runs of trainers, of TRL and of Transformers: whether bastile.apply() changes what they log and train.

    python tools/random_trainers.py [--seed 1] [--seconds 600 | --count 100] [--only dpo] [--type qwen3] [--says]

Each number, from --seed on, is a run of its own: a trainer, some of its options, a small model of any type with some of
its config's values changed, adapters of any of PEFT's kinds, rows of all lengths, evaluations, checkpoints that it is
resumed from. It runs with stock Transformers, with the same in float64, and after bastile.apply(). What is logged then,
and the trained weights, may be off float64's a few times as far as stock's are, if not by luck: a run that fails is
asked again with other weights, and must fail with two of three. Prints a JSON object of each that does, and at the end
how many there were of each kind; ends with 1 where something failed. A run again: --seed N --count 1. On a CPU graphs
are repeated calls, and float32 takes the ways that are 16 bits' elsewhere. Needs trl, datasets and peft."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import random
import shutil
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import random_models
import random_sentences
import torch
from random_cases import Unusable, add_options, tell
from random_models import TASKS, all_ways
from random_runs import OWN, Run, drawn, load, peft_config, rows_of, save_model, tokenizer, tokens_of

import bastile

#: What is logged and not compared: times, and which of two is ahead, that may be the same but for rounding.
_LEFT_OUT = ("runtime", "per_second", "time", "flos", "accuracies")
_IN_16_BITS = ("bf16", "bf16_full_eval")
_DRAW = {"grpo", "rloo", "distillation", "gkd"}
_LEARNING_RATE = {"sgd": 0.05, "adafactor": 0.003}


@dataclass
class Ran:
    logged: list[dict[str, float]]
    weights: dict[str, torch.Tensor]  # those that are trained
    begun: dict[str, torch.Tensor]

    def error(self, of: Ran) -> tuple[float, float]:
        """Of what is logged, the largest relative one; of the weights that of all together, of how far they went."""
        if self.weights.keys() != of.weights.keys() or len(self.logged) != len(of.logged):
            return math.inf, math.inf
        logged = max((_apart(own, its) for own, its in zip(self.logged, of.logged, strict=True)), default=0.0)
        apart = sum(float((w - of.weights[name]).square().sum()) for name, w in self.weights.items())
        size = sum(float((w - of.begun[name]).square().sum()) for name, w in of.weights.items())
        return logged, (apart / max(size, 1e-8)) ** 0.5

    def worst(self, of: Ran) -> dict[str, tuple[float, float]]:
        """What is logged furthest apart, by its name."""
        found: dict[str, tuple[float, float]] = {}
        for own, its in zip(self.logged, of.logged, strict=False):
            for name in own.keys() | its.keys():
                pair = own.get(name, math.nan), its.get(name, math.nan)
                if _far(*pair) > max(1e-3, _far(*found.get(name, (0.0, 0.0)))):
                    found[name] = pair
        return found


def _far(own: float, its: float) -> float:
    if math.isnan(its) or math.isnan(own):
        return 0.0 if math.isnan(its) == math.isnan(own) else math.inf
    if math.isinf(its) or math.isinf(own):
        return 0.0 if its == own else math.inf
    return abs(own - its) / max(abs(its), 0.1)


def _apart(own: dict[str, float], its: dict[str, float]) -> float:
    if own.keys() != its.keys():
        return math.inf
    return max((_far(own[name], its[name]) for name in its), default=0.0)


# ---- running ---------------------------------------------------------------------------------------------------------


def _reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(set(ids)) + 0.1 * (ids[0] % 7 if ids else 0) for ids in completion_ids]


def _metrics(predicted: Any) -> dict[str, float]:
    """Of what labels are beside: padding's logits nobody is promised."""
    logits = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    labels, logits = torch.as_tensor(predicted.label_ids), torch.as_tensor(logits).double()
    if logits.shape[:-1] == labels.shape:
        logits = logits[labels != -100]
    return {"size": float(logits.square().mean().sqrt()), "mean": float(logits.mean())}


def config_of(run: Run, cls: Any, folder: Path) -> Any:
    """Of the options those that it has."""
    has = {field.name for field in dataclasses.fields(cls)}
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4 if run.kind in ("grpo", "rloo") else 3,
        "learning_rate": _LEARNING_RATE.get(run.options["optim"], 0.01),
        "adam_epsilon": 0.01,  # so that rounding turns no sign of a step
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "eval_steps": 2,
        "save_strategy": "steps" if run.resumes else "no",
        "save_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "max_completion_length": 6,
        "max_new_tokens": 5,
        "num_generations": 2,
        "eval_strategy": "no",
        **run.options,
    }
    return cls(**{name: copy.deepcopy(value) for name, value in given.items() if name in has})


def trainer_of(run: Run, folder: Path, out: Path, dtype: torch.dtype, seed: int) -> Any:
    rng = random.Random(~seed)
    if run.kind in random_sentences.KINDS:
        return random_sentences.trainer_of(run, folder, dtype, rng, partial(config_of, run, folder=out))
    model = load(run, folder, dtype)
    if run.kind in TASKS:
        return _own_trainer(run, model, out, rng)
    import importlib

    import trl
    from datasets import Dataset

    name = {"sft": "SFT", "reward": "Reward", "distillation": "Distillation"}.get(run.kind, run.kind.upper())

    def find(what: str) -> Any:
        return getattr(trl, what, None) or getattr(importlib.import_module(f"trl.experimental.{run.kind}"), what)

    rows = rows_of(run, rng)
    more: dict[str, Any] = {}
    if run.adapters is not None:
        more["peft_config"] = peft_config(run, model)
    if run.kind in ("grpo", "rloo"):
        more["reward_funcs"] = _reward
    if run.kind in ("distillation", "gkd"):
        more["teacher_model"] = _beside(run, folder, dtype)
    if run.kind == "dpo" and run.adapters is None and not run.options.get("precompute_ref_log_probs"):
        more["ref_model"] = _beside(run, folder, dtype)
    args = config_of(run, find(f"{name}Config"), out)
    if run.reads_logits and run.kind == "sft":
        more["compute_metrics"] = _metrics
    evaluated = Dataset.from_list(rows[:5]) if args.eval_strategy != "no" else None
    return find(f"{name}Trainer")(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=evaluated,
        processing_class=tokenizer(),
        **more,
    )


def _beside(run: Run, folder: Path, dtype: torch.dtype) -> Any:
    """A teacher or a reference that is not the model: where the two agree, rounding alone says who is ahead."""
    other = load(run, folder, dtype)
    generator = torch.Generator().manual_seed(5)
    for parameter in other.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.data += (0.05 * noise * float(parameter.float().std() if parameter.numel() > 1 else 0)).to(dtype)
    return other


def _own_trainer(run: Run, model: Any, out: Path, rng: random.Random) -> Any:
    import transformers

    rows = tokens_of(run, rng, model.config.num_labels)
    if run.adapters is not None:
        from peft import get_peft_model

        model = get_peft_model(model, peft_config(run, model))
    name = "Seq2Seq" if run.kind == "seq2seq" else ""
    args = config_of(run, getattr(transformers, f"{name}TrainingArguments"), out)
    side = tokenizer()
    if run.kind == "sequences":
        collator: Any = transformers.DataCollatorWithPadding(side)
    elif run.kind == "seq2seq":
        collator = transformers.DataCollatorForSeq2Seq(side, model)
    else:
        collator = transformers.DataCollatorForTokenClassification(side)  # which pads labels
    reads = run.reads_logits and not run.options.get("predict_with_generate")
    return getattr(transformers, f"{name}Trainer")(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=rows[:5],
        processing_class=side,
        data_collator=collator,
        compute_metrics=_metrics if reads else None,
    )


def ran(run: Run, folder: Path, dtype: torch.dtype, seed: int, on_cpu: bool = False) -> Ran:
    with tempfile.TemporaryDirectory() as out:
        torch.manual_seed(0)
        run = dataclasses.replace(run, options={**run.options, "use_cpu": on_cpu or not torch.cuda.is_available()})
        trainer = trainer_of(run, folder, Path(out), dtype, seed)
        begun = _trained(trainer.model)
        trainer.train()
        logged = list(trainer.state.log_history)
        if run.resumes:
            trainer = trainer_of(run, folder, Path(out), dtype, seed)
            shutil.rmtree(Path(out) / "checkpoint-4", ignore_errors=True)
            trainer.train(resume_from_checkpoint=True)
            logged += trainer.state.log_history
        numbers = [{name: float(value) for name, value in entry.items() if _is_number(name, value)} for entry in logged]
        return Ran(numbers, _trained(trainer.model), begun)


def _is_number(name: str, value: Any) -> bool:
    return isinstance(value, int | float) and not any(part in name for part in _LEFT_OUT)


def _trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().double().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}


def judged(seed: int, run: Run, weights: int = 0) -> dict[str, Any]:
    """What came of a run: its verdict, and how far off float64 stock's numbers and Bastile's were."""
    dtype = getattr(torch, run.dtype)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        try:
            save_model(run, folder, weights)
            if torch.cuda.is_available():  # which an index that there is not would make unusable
                ran(run, folder, torch.float32, seed, on_cpu=True)
            stock = ran(run, folder, dtype, seed)
            exact = {**run.options, **dict.fromkeys(_IN_16_BITS, False)}
            truth = ran(dataclasses.replace(run, options=exact), folder, torch.float64, seed)
            if not all(bool(weight.isfinite().all()) for each in (stock, truth) for weight in each.weights.values()):
                raise ValueError("its weights are no numbers")
        except Exception as error:  # whatever a trainer's code raises
            raise Unusable(f"{type(error).__name__}: {error}") from error
        bastile.report(reset=True)
        try:
            bastile.apply(cuda_graphs=run.graphs)
            own = ran(run, folder, dtype, seed)
        except Exception:
            return {"verdict": "raises", "error": traceback.format_exc()[-3000:]}
        finally:
            bastile.reset()
    errors = {"stock": stock.error(truth), "bastile": own.error(truth)}
    rounds = "bfloat16" if any(run.options.get(name) for name in _IN_16_BITS) else run.dtype
    is_same = random_models.is_as_exact(errors["bastile"], errors["stock"], rounds)
    if rounds == "bfloat16" and run.kind in _DRAW:  # rounding says which token is drawn
        is_same = all(bool(weight.isfinite().all()) for weight in own.weights.values())
    found: dict[str, Any] = {"kind": run.kind, "verdict": "the same" if is_same else "differs", **errors}
    if not is_same:
        found["apart"] = own.worst(truth)
    found["graphs"] = bastile.report().ran("cuda_graphs")
    return found


def quietly_judged(seed: int, run: Run, weights: int = 0) -> dict[str, Any]:
    """Without what trainers print."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        return judged(seed, run, weights)


def main() -> int:
    import datasets

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--only", choices=OWN, help="runs of this trainer only")
    parser.add_argument("--type", metavar="TYPE", help="of this model type only")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="loaded in this type (default: float32)")
    options = parser.parse_args()
    datasets.disable_progress_bars()
    with all_ways(torch.device("cuda" if torch.cuda.is_available() else "cpu")):
        return tell(
            options, lambda seed: drawn(seed, options.only, options.type, [options.dtype or "float32"]), quietly_judged
        )


if __name__ == "__main__":
    sys.exit(main())
