"""What the `bastile` command accepts."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import bastile
from bastile.cli import bench, commands


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
        "Sizes not given follow the device: on a CPU both runs take a few minutes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--text", type=Path, help="train on this text file; not given: the standard library's sources")
    demo.add_argument(
        "--vocabulary", type=_positive, default=8192, help="tokens of the BPE vocabulary that is trained first"
    )
    _add_training(demo, steps=None, batch=None, sequence=None, lr=3e-4)
    demo.set_defaults(
        command=commands.demo, out=Path("demo-out"), gradient_checkpointing=False, save=None, baseline=True
    )

    finetune = subparsers.add_parser(
        "finetune",
        help="fine-tune your own model on your own text",
        description="Fine-tunes every weight of a model on a text file. The baseline is the same run with stock "
        "Transformers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    finetune.add_argument("--model", required=True, help="a folder, or a name on the Hugging Face hub")
    finetune.add_argument("--data", type=Path, required=True, help="a text file in UTF-8")
    _add_training(finetune, steps=100, batch=1, sequence=1024, lr=1e-5)
    finetune.add_argument(
        "--baseline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also train with stock Transformers, first",
    )
    finetune.add_argument("--gradient-checkpointing", action="store_true", help="recompute activations to save memory")
    finetune.add_argument("--save", type=Path, help="where to save the model trained with Bastile, and its tokenizer")
    finetune.set_defaults(command=commands.finetune, out=Path("finetune-out"))

    bench.add_parser(subparsers)
    return parser.parse_args(arguments)


def _add_training(
    parser: argparse.ArgumentParser, steps: int | None, batch: int | None, sequence: int | None, lr: float
) -> None:
    parser.add_argument("--steps", type=_positive, default=steps, help="training steps of each run, at least 2")
    parser.add_argument("--batch", type=_positive, default=batch, help="sequences a step")
    parser.add_argument("--sequence", type=_positive, default=sequence, help="tokens a sequence")
    parser.add_argument("--lr", type=float, default=lr, help="AdamW's learning rate, reached after a linear warm-up")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; not given: cuda where there is one")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="of weights; not given: bfloat16 on CUDA, else float32"
    )
    parser.add_argument("--out", type=Path, help="folder for curves.png, result.json and the logs")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value
