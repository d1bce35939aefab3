"""What `demo` and `finetune` share: the options of a training run, its plan, and the comparison of two runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bastile.cli.errors import RunFailed, UsageError
from bastile.cli.examples import Examples
from bastile.cli.files import check_folder, make_folder
from bastile.cli.options import add, add_where, device_for, dtype_for, need_packages, operators

#: What a plan holds beside what every command asks for; `finetune` has an option for each.
_PLAIN: dict[str, Any] = {
    "accumulate": 1,
    "bf16": False,
    "checkpointing": False,
    "load_in_4bit": False,
    "lora": None,
    "lora_alpha": None,
    "max_grad_norm": 1.0,
    "offload_checkpoints": False,
    "optimizer": "torch",
    "save": None,
    "save_every": None,
    "schedule": "constant",
    "turn": None,
    "warmup": None,
    "weight_decay": 0.0,
}


def add_training(
    parser: argparse.ArgumentParser, sizes: dict[str, dict[str, int]], lr: float, out: str, holds: str
) -> Any:
    """sizes: the defaults of steps, batch and sequence; where there is one set for each kind of device, the command
    chooses among them. holds: what lies in the folder beside curves.png and result.json. Returns the group that the
    number of steps is in, for what may stand in its place."""

    def shown(name: str) -> str:
        return ", ".join(f"{kind.upper()} {size[name]}".strip() for kind, size in sizes.items())

    default = sizes.get("", {})
    length = parser.add_mutually_exclusive_group()
    add(length, "--steps", what="training steps of each run, at least 2", shown=shown("steps"))
    for name in ("batch", "sequence"):
        add(parser, f"--{name}", default=default.get(name), shown=shown(name))
    add(parser, "--lr", default=lr)
    add_where(parser)
    add(parser, "--out", what=f"curves.png, result.json, {holds}", default=Path(out))
    add(parser, "--json")
    return length


def check(options: argparse.Namespace) -> None:
    """What needs no model. Fills in the device and the type."""
    need_packages("transformers", "accelerate", "rich", "matplotlib")
    if options.steps == 1:
        raise UsageError("--steps must be at least 2: the first step warms up and is not timed")
    operators(options)
    options.device = device_for(options.device)
    options.dtype = dtype_for(options.dtype, options.device)
    check_folder("--out", options.out)


def _plan(options: argparse.Namespace, model: dict[str, Any]) -> dict[str, Any]:
    """Everything that decides how a run goes, as train.train reads it."""
    made = {name: getattr(options, name, value) for name, value in _PLAIN.items()}
    made.update({name: getattr(options, name) for name in ("steps", "batch", "sequence", "lr", "seed")})
    if made["warmup"] is None:
        made["warmup"] = max(1, options.steps // 10)
    if made["schedule"] == "constant":
        made["schedule"] = "constant_with_warmup"  # as Transformers names it
    made["operators"] = operators(options)
    made["save"] = str(made["save"]) if made["save"] else None
    return {"model": model, "device": options.device, "dtype": options.dtype, **made}


def train(options: argparse.Namespace, model: dict[str, Any], examples: Examples, names: Sequence[str]) -> None:
    """Trains under each name and reports. An error where it is the last of them that failed: what stands before it is
    there to be compared with."""
    from bastile.cli import compare, report

    plan, out, resume = _plan(options, model), options.out, getattr(options, "resume", False)
    if len(examples) < plan["batch"]:
        raise UsageError(
            f"the data makes {len(examples)} sequences of at most {plan['sequence']} tokens, and one batch takes "
            f"{plan['batch']}: give a longer text, or a smaller --batch or --sequence"
        )
    plan["examples"] = str(out / "examples.pt")
    plan["data"] = examples.digest()
    plans = compare.plans(plan, names, out, resume)
    make_folder("--out", out)
    if plan["save"]:
        make_folder("--save", Path(plan["save"]))
    examples.save(out / "examples.pt")
    found = compare.run_all(plans, out, resume)
    options.found = report.write(plan, found, out, options.given)
    if found[-1]["status"] != "ok":
        raise RunFailed(
            f"the {found[-1]['name']} run did not end ({found[-1]['status']}): a smaller --batch or --sequence takes "
            f"less memory, and so do --checkpointing and --lora of bastile finetune"
        )
