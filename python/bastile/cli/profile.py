"""`profile`: from options to a model, its profile, and the report."""

import argparse
from pathlib import Path
from typing import Any

import torch

from bastile.cli import model
from bastile.cli.errors import RunFailed, UsageError
from bastile.cli.files import check_file, check_folder, make_folder, write_json
from bastile.cli.options import add, add_operators, add_where, device_for, dtype_for, need_packages, operators
from bastile.shapes import MODELS


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="see where a training step's time goes, before and after",
        description="Profiles a training step of a model with stock Transformers and with Bastile, on random tokens: "
        "time by group and by kernel, side by side, and what limits the step.",
    )
    add(parser, "--model")
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # as --model
    add(parser, "--shape", what="in place of --model: random weights of this model's shapes")
    add(parser, "--layers")
    add(parser, "--batch", shown="CPU 1, CUDA 4")
    add(parser, "--sequence", shown="CPU 256, CUDA 2048")
    add(parser, "--steps", what="steps to time before one is profiled", default=5)
    add(parser, "--checkpointing", "--trace")
    add_where(parser)
    add(parser, "--out", what="profile.json and profile.png", default=Path("profile-out"))
    add(parser, "--json")
    add_operators(parser)
    parser.set_defaults(command=profile)


def profile(options: argparse.Namespace) -> int:
    need_packages("transformers", "rich", "matplotlib")
    if (options.model is None) == (options.shape is None):
        raise UsageError(f"give either --model, or --shape with one of {', '.join(MODELS)}")
    if options.trace:
        check_file("--trace", options.trace)
    patched = operators(options)
    device = device_for(options.device)
    out = check_folder("--out", options.out)
    name, config = model.of_model_or_shape(options)
    if options.layers is not None and options.layers > config.num_hidden_layers:
        raise UsageError(f"--layers is {options.layers}; the model has {config.num_hidden_layers}")
    on_cuda = device.startswith("cuda")
    batch, sequence = options.batch or (4 if on_cuda else 1), options.sequence or (2048 if on_cuda else 256)

    from rich.console import Console

    from bastile.bench.machine import describe_briefly
    from bastile.cli.shown import about
    from bastile.profile import record, report, run

    console = Console()
    dtype = dtype_for(options.dtype, device)
    title = f"{options.model or options.shape}, {options.layers or config.num_hidden_layers} layers, "
    title += f"{batch} x {sequence} tokens, {dtype}"
    console.print(f"A training step of {title}, on {device}")
    if on_cuda:
        torch.cuda.set_device(torch.device(device).index or 0)
    try:
        if options.layers is not None:
            config.num_hidden_layers = options.layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[: options.layers]
        torch.manual_seed(options.seed)
        built = model.build(config, dtype, device, name)
        if options.checkpointing:
            model.checkpoint_activations(built)
        runs, profilers = run.compare(built, batch, sequence, options.steps, patched, options.seed)
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise RunFailed(f"{reason}\nA smaller --batch or --sequence, --checkpointing or fewer --layers help") from error
    unit = "GPU" if on_cuda else "CPU"
    for each in runs:
        each["limit"] = report.sentence(each)
    console.print(report.groups_table(runs, unit), report.kernels_table(runs, unit), sep="\n")
    for each in runs:
        console.print(each["limit"], soft_wrap=True)
    make_folder("--out", out)
    report.draw(runs, title, out / "profile.png")
    settings = {"model": options.model, "shape": options.shape, "layers": config.num_hidden_layers, "batch": batch}
    settings |= {"sequence": sequence, "dtype": dtype, "steps": options.steps, "checkpointing": options.checkpointing}
    where = describe_briefly(torch.device(device))
    options.found = {**about(options.given), "device": where, "settings": settings, "runs": runs}
    write_json(out / "profile.json", options.found)
    console.print(f"Figures: {out / 'profile.json'}   Plot: {out / 'profile.png'}", soft_wrap=True)
    if options.trace:
        record.write_trace(profilers, options.trace)
        console.print(f"Trace: {options.trace} (open it at ui.perfetto.dev)", soft_wrap=True)
    return 0
