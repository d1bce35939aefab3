"""`demo`: a small Qwen3 trained from scratch on text that every machine has."""

import argparse
from typing import Any

import torch

from bastile.cli import data, runs
from bastile.cli.examples import Examples
from bastile.cli.options import add, device_for


def _model(hidden: int, layers: int) -> dict[str, int]:
    """Qwen3's proportions, with heads of 64."""
    heads = hidden // 64
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "head_dim": 64}
    return {**shape, "num_attention_heads": heads, "num_key_value_heads": heads // 2}


# Per device: a model large enough for its operators to matter there, small enough that both runs stay within minutes;
# and the steps of a turn: a second or two, beside which it takes no time to begin one.
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"training": {"steps": 150, "batch": 4, "sequence": 256}, "turn": 5, "model": _model(256, 4)},
    "cuda": {"training": {"steps": 200, "batch": 8, "sequence": 1024}, "turn": 10, "model": _model(1024, 8)},
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train a small Qwen3 from scratch on the Python standard library's sources",
        description="Trains a small Qwen3, built from Transformers' own classes, on real text: with stock "
        "Transformers and with Bastile, in turns of some steps each, and compares losses, speed and memory. Needs no "
        "download. On a CPU it takes a few minutes.",
    )
    add(parser, "--text")
    add(parser, "--vocabulary", default=8192)
    training = {kind: sizes["training"] for kind, sizes in SIZES.items()}
    runs.add_training(parser, training, lr=3e-4, out="demo-out", holds="the logs, the plans and the tokens")
    parser.set_defaults(command=demo)


def demo(options: argparse.Namespace) -> int:
    sizes = SIZES[torch.device(device_for(options.device)).type]
    for name, value in sizes["training"].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.turn = sizes["turn"]
    runs.check(options)
    text = data.read_text(options.text) if options.text else data.standard_library_text()
    tokenizer, tokens = data.tokens_of(text, options.vocabulary)
    examples = Examples.of_text(tokens, options.sequence)
    config = {
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": options.sequence,
        "tie_word_embeddings": True,
        **sizes["model"],
    }
    runs.train(options, {"config": config}, examples, ("stock", "bastile"))
    return 0
