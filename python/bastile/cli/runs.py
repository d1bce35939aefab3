"""What `demo` and `finetune` share: the options of a training run, its plan, and the comparison of two runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bastile.cli.errors import UsageError
from bastile.cli.examples import Examples
from bastile.cli.folder import make_folder
from bastile.cli.options import add_run, count, device_for, dtype_for, need_packages, need_positive, operators

#: What a plan holds beside what every command asks for; `finetune` has an option for each.
_PLAIN: dict[str, Any] = {
    "accumulate": 1,
    "bf16": False,
    "checkpointing": False,
    "lora": None,
    "lora_alpha": None,
    "max_grad_norm": 1.0,
    "operators": None,
    "save": None,
    "save_every": None,
    "schedule": "constant",
    "warmup": None,
    "weight_decay": 0.0,
}


def add_training(parser: argparse.ArgumentParser, sizes: dict[str, dict[str, int]], lr: float, out: str) -> None:
    """sizes: the defaults of steps, batch and sequence; where there is one set for each kind of device, the command
    chooses among them."""
    for flags, meaning in (
        (["--steps", "--max-steps"], "training steps of each run, at least 2"),
        (["--batch"], "sequences a batch"),
        (["--sequence"], "tokens a sequence, at least 2"),
    ):
        name = flags[0][2:]
        shown = ", ".join(f"{kind.upper()} {size[name]}".strip() for kind, size in sizes.items())
        parser.add_argument(
            *flags,
            type=count,
            metavar="N",
            default=sizes[""][name] if "" in sizes else None,
            help=f"{meaning} (default: {shown})",
        )
    parser.add_argument(
        "--lr",
        type=float,
        metavar="X",
        default=lr,
        help="AdamW's learning rate, after the warm-up (default: %(default)s)",
    )
    add_run(parser, out, "curves.png, result.json, the logs and the checkpoints")


def check(options: argparse.Namespace) -> Path:
    """The output folder, after the checks that need no model. Fills in the device and the type."""
    need_packages("transformers", "accelerate", "rich", "matplotlib")
    if options.steps == 1:
        raise UsageError("--steps must be at least 2: the first step warms up and is not timed")
    if options.sequence == 1:
        raise UsageError("--sequence must be at least 2: each token predicts the next one")
    need_positive("--lr", options.lr)
    options.device = device_for(options.device)
    options.dtype = dtype_for(options.dtype, options.device)
    return make_folder("--out", options.out)


def plan(options: argparse.Namespace, model: dict[str, Any]) -> dict[str, Any]:
    """Everything that decides how a run goes, as train.train reads it."""
    made = {name: getattr(options, name, value) for name, value in _PLAIN.items()}
    made.update({name: getattr(options, name) for name in ("steps", "batch", "sequence", "lr", "seed")})
    if made["warmup"] is None:
        made["warmup"] = max(1, options.steps // 10)
    if made["schedule"] == "constant":
        made["schedule"] = "constant_with_warmup"  # as Transformers names it
    made["operators"] = operators(argparse.Namespace(operators=made["operators"]))
    made["save"] = str(made["save"]) if made["save"] else None
    return {"model": model, "device": options.device, "dtype": options.dtype, **made}


def train(plan: dict[str, Any], examples: Examples, out: Path, names: Sequence[str], resume: bool = False) -> int:
    from bastile.cli import compare, report

    if len(examples) < plan["batch"]:
        raise UsageError(
            f"the data makes {len(examples)} sequences of at most {plan['sequence']} tokens, and one batch takes "
            f"{plan['batch']}: give a longer text, or a smaller --batch or --sequence"
        )
    plan["examples"] = str(out / "examples.pt")
    plan["data"] = examples.save(out / "examples.pt")
    found = compare.run_all(plan, names, out, resume=resume)
    report.write(plan, found, out)
    return 0
