"""What the `bastile` command accepts."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import bastile
from bastile.cli import bench, commands, sweep


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with `command` the function that carries them out."""
    parser = argparse.ArgumentParser(
        prog="bastile",
        description="Fine-tune a language model with Bastile's operators and compare it with stock Transformers: the "
        "same model, seed and data, each run in a process of its own.",
    )
    parser.add_argument("--version", action="version", version=f"bastile {bastile.__version__}")
    subparsers = parser.add_subparsers(dest="name", required=True, metavar="command")

    demo = subparsers.add_parser(
        "demo",
        help="train a small Qwen3 from scratch on the Python standard library's sources",
        description="Trains a small Qwen3, built from Transformers' own classes, on real text. Needs no download. "
        "On a CPU both runs take a few minutes.",
    )
    demo.add_argument(
        "--text", type=Path, metavar="FILE", help="train on this text (default: the Python standard library's sources)"
    )
    demo.add_argument(
        "--vocabulary",
        type=_count,
        metavar="N",
        default=8192,
        help="tokens of the BPE vocabulary that is trained first (default: %(default)s)",
    )
    _add_training(demo, sizes=None, lr=3e-4, out="demo-out")
    demo.set_defaults(command=commands.demo, gradient_checkpointing=False, save=None, baseline=True)

    finetune = subparsers.add_parser(
        "finetune",
        help="fine-tune your own model on your own text",
        description="Fine-tunes every weight of a model on a text file. The baseline is the same run with stock "
        "Transformers.",
    )
    finetune.add_argument(
        "--model", metavar="NAME", required=True, help="a folder, or a name on the Hugging Face hub; needed"
    )
    finetune.add_argument("--data", type=Path, metavar="FILE", required=True, help="a text file in UTF-8; needed")
    _add_training(finetune, sizes={"steps": 100, "batch": 1, "sequence": 1024}, lr=1e-5, out="finetune-out")
    finetune.add_argument(
        "--no-baseline", action="store_false", dest="baseline", help="do not train with stock Transformers first"
    )
    finetune.add_argument("--gradient-checkpointing", action="store_true", help="recompute activations to save memory")
    finetune.add_argument(
        "--save", type=Path, metavar="FOLDER", help="where to save the model trained with Bastile, and its tokenizer"
    )
    finetune.set_defaults(command=commands.finetune)

    bench.add_parser(subparsers)
    sweep.add_parser(subparsers)
    return parser.parse_args(arguments)


def _add_training(parser: argparse.ArgumentParser, sizes: dict[str, int] | None, lr: float, out: str) -> None:
    """sizes: the defaults of steps, batch and sequence; None: the demo's, which depend on the device."""
    for name, meaning in (
        ("steps", "training steps of each run, at least 2"),
        ("batch", "sequences a step"),
        ("sequence", "tokens a sequence, at least 2"),
    ):
        by_device = [f"{kind.upper()} {size['training'][name]}" for kind, size in commands.DEMO_SIZES.items()]
        default = sizes[name] if sizes else ", ".join(by_device)
        parser.add_argument(
            f"--{name}",
            type=_count,
            metavar="N",
            default=sizes and default,
            help=f"{meaning} (default: {default})",
        )
    parser.add_argument(
        "--lr",
        type=float,
        metavar="X",
        default=lr,
        help="AdamW's learning rate, reached after a linear warm-up (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        default=0,
        help="of the weights and of the order of the data (default: %(default)s)",
    )
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="of the weights (default: bfloat16 on CUDA, else float32)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=Path(out),
        help="for curves.png, result.json and the logs (default: %(default)s)",
    )


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value
