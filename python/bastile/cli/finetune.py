"""`finetune`: your own model on your own data."""

import argparse
import math
import sys
from typing import Any

from bastile.cli import data, model, runs
from bastile.cli.errors import UsageError
from bastile.cli.files import check_folder
from bastile.cli.options import add, add_operators, need_packages, need_positive

_STEPS = 100


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "finetune",
        help="fine-tune your own model on your own text or chats",
        description="Fine-tunes a model twice, with stock Transformers and with Bastile, from the same weights, seed "
        "and data, by Transformers' Trainer, and compares losses, speed and memory.",
    )
    add(parser, "--model", what="; needed", required=True)
    add(parser, "--data", required=True)
    add(parser, "--split")
    length = runs.add_training(
        parser,
        {"": {"steps": _STEPS, "batch": 1, "sequence": 1024}},
        lr=1e-5,
        out="finetune-out",
        holds="the logs, the plans, the tokens and the checkpoints",
    )
    add(length, "--epochs")
    add(parser, "--accumulate", "--schedule", "--lr-warmup", "--weight-decay", "--max-grad-norm", "--bf16")
    add(parser, "--optimizer")
    add(parser, "--checkpointing", "--offload-checkpoints", "--lora", "--lora-alpha", "--load-in-4bit")
    add(parser, "--no-baseline", "--save-every", "--resume", "--save")
    add_operators(parser)
    parser.set_defaults(command=finetune)


def finetune(options: argparse.Namespace) -> int:
    if options.bf16 and options.dtype == "bfloat16":
        raise UsageError("--bf16 keeps float32 weights; leave it out, or --dtype bfloat16")
    if options.bf16:
        options.dtype = "float32"
    if options.offload_checkpoints and not options.checkpointing:
        raise UsageError("--offload-checkpoints goes with --checkpointing")
    if options.lora_alpha is not None and not options.lora:
        raise UsageError("--lora-alpha goes with --lora")
    if options.load_in_4bit:
        if not options.lora:
            raise UsageError("--load-in-4bit goes with --lora: weights of 4 bits are not trained")
        need_packages("bitsandbytes", purpose="--load-in-4bit")
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
