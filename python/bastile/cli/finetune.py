"""`finetune`: your own model on your own data."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from bastile.cli import data, model, runs
from bastile.cli.errors import UsageError
from bastile.cli.folder import check_folder
from bastile.cli.options import (
    add_checkpointing,
    add_model,
    add_operators,
    add_option,
    count,
    need_packages,
    need_positive,
)

_STEPS = 100
_RANK = 16  # of LoRA's matrices, where --lora is given without one


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "finetune",
        help="fine-tune your own model on your own text or chats",
        description="Fine-tunes a model twice, with stock Transformers and with Bastile, from the same weights, seed "
        "and data, by Transformers' Trainer, and compares losses, speed and memory.",
    )
    add_model(parser, required=True)
    parser.add_argument(
        "--data",
        metavar="DATA",
        required=True,
        help="a text file in UTF-8; a .jsonl file with a chat or a text a line; or a data set on the hub; needed",
    )
    parser.add_argument("--split", default="train", help="of a data set (default: %(default)s)")
    length = runs.add_training(
        parser,
        {"": {"steps": _STEPS, "batch": 1, "sequence": 1024}},
        lr=1e-5,
        out="finetune-out",
        holds="the logs, the plans, the tokens and the checkpoints",
    )
    length.add_argument("--epochs", type=float, metavar="X", help="train this often on all data, in place of --steps")
    parser.add_argument(
        "--accumulate", type=count, metavar="N", default=1, help="batches whose gradients make one step (default: 1)"
    )
    parser.add_argument(
        "--schedule",
        choices=["constant", "linear", "cosine"],
        default="constant",
        help="the learning rate after the warm-up (default: %(default)s)",
    )
    add_option(
        parser,
        "--lr-warmup",
        was=["--warmup", "--warm-up"],
        dest="warmup",
        type=int,
        metavar="N",
        help="steps over which the learning rate rises to --lr (default: a tenth of all)",
    )
    parser.add_argument("--weight-decay", type=float, metavar="X", default=0.0, help="AdamW's (default: %(default)s)")
    parser.add_argument(
        "--max-grad-norm", type=float, metavar="X", default=1.0, help="clip gradients to this norm (default: 1.0)"
    )
    parser.add_argument(
        "--bf16", action="store_true", help="float32 weights, products in bfloat16 (autocast): mixed precision"
    )
    add_checkpointing(parser)
    parser.add_argument(
        "--lora",
        type=count,
        metavar="RANK",
        nargs="?",
        const=_RANK,
        help=f"train LoRA adapters on every projection of the layers, of this rank (default: {_RANK})",
    )
    parser.add_argument("--lora-alpha", type=float, metavar="X", help="LoRA's scale (default: twice the rank)")
    parser.add_argument(
        "--no-baseline", action="store_false", dest="baseline", help="do not train with stock Transformers first"
    )
    parser.add_argument(
        "--save-every", type=count, metavar="N", help="save a checkpoint every N steps; the newest two are kept"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out from its newest checkpoint")
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FOLDER",
        help="where to save the model (or the adapters) trained with Bastile, and the tokenizer",
    )
    add_operators(parser)
    parser.set_defaults(command=finetune)


def finetune(options: argparse.Namespace) -> int:
    if options.bf16 and options.dtype == "bfloat16":
        raise UsageError("--bf16 keeps float32 weights; leave it out, or --dtype bfloat16")
    if options.bf16:
        options.dtype = "float32"
    if options.lora_alpha is not None and not options.lora:
        raise UsageError("--lora-alpha goes with --lora")
    if options.lora:
        need_packages("peft", purpose="--lora")
        options.lora_alpha = options.lora_alpha or 2 * options.lora
    if options.max_grad_norm != 0:
        need_positive("--max-grad-norm (0: do not clip)", options.max_grad_norm)
    if not 0 <= options.weight_decay < math.inf:
        raise UsageError(f"--weight-decay is {options.weight_decay}; 0 or more is needed")
    if options.warmup is not None and options.warmup < 0:
        raise UsageError(f"--lr-warmup is {options.warmup}; 0 or more is needed")
    runs.check(options)
    if options.save:
        check_folder("--save", options.save)
    if options.epochs is not None:
        need_positive("--epochs", options.epochs)
    name = model.find_model(options.model)
    most = getattr(model.load_config(name), "max_position_embeddings", None)
    if most and options.sequence > most:
        print(
            f"Note: --sequence is {options.sequence}, but the model was made for at most {most} tokens "
            "(max_position_embeddings)",
            file=sys.stderr,
        )
    tokenizer = model.load_tokenizer(name)
    examples, what = data.load(options.data, options.split, tokenizer, options.sequence)
    print(f"Training data: {what}", flush=True)
    if options.epochs is not None:
        batches = len(examples) // options.batch
        options.steps = max(2, math.ceil(options.epochs * math.ceil(batches / options.accumulate)))
    elif options.steps is None:
        options.steps = _STEPS
    names = ("stock", "bastile") if options.baseline else ("bastile",)
    try:
        runs.train(options, {"pretrained": name}, examples, names)
    except KeyboardInterrupt:
        if options.save_every:
            print("The same command with --resume goes on from the newest checkpoint", file=sys.stderr)
        raise
    if options.save:
        tokenizer.save_pretrained(options.save)
        print(f"{'Adapters' if options.lora else 'Model'} and tokenizer: {options.save}")
    return 0
