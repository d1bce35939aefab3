"""`profile`: from options to a model, its profile, and the report."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from bastile.cli import model, strict_json
from bastile.cli import options as shared
from bastile.cli.errors import RunFailed, UsageError
from bastile.cli.folder import check_file, check_folder, make_folder
from bastile.cli.options import add_operators, count, device_for, dtype_for, need_packages, operators
from bastile.shapes import MODELS


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="see where a training step's time goes, before and after",
        description="Profiles a training step of a model with stock Transformers and with Bastile, on random tokens: "
        "time by group and by kernel, side by side, and what limits the step.",
    )
    shared.add_model(parser)
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # as --model
    shared.add_shape(parser, "in place of --model: random weights of this model's shapes")
    parser.add_argument("--layers", type=count, metavar="N", help="so many layers only (default: all)")
    shared.add_batch(parser, None, "CPU 1, CUDA 4")
    shared.add_sequence(parser, None, "CPU 256, CUDA 2048")
    shared.add_steps(parser, "steps to time before one is profiled (default: %(default)s)", 5)
    shared.add_checkpointing(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a Chrome trace of both steps, for ui.perfetto.dev")
    shared.add_seed(parser)
    shared.add_device(parser)
    shared.add_dtype(parser)
    shared.add_out(parser, "profile-out", "profile.json and profile.png")
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
    name, config = _config(options)
    if options.layers is not None and options.layers > config.num_hidden_layers:
        raise UsageError(f"--layers is {options.layers}; the model has {config.num_hidden_layers}")
    on_cuda = device.startswith("cuda")
    batch, sequence = options.batch or (4 if on_cuda else 1), options.sequence or (2048 if on_cuda else 256)
    if sequence < 2:
        raise UsageError("--sequence must be at least 2: each token predicts the next one")

    from rich.console import Console

    from bastile.cli.report import about
    from bastile.profile import record, report, run

    console = Console()
    dtype = dtype_for(options.dtype, device)
    title = f"{options.model or options.shape}, {options.layers or config.num_hidden_layers} layers, "
    title += f"{batch} x {sequence} tokens, {dtype}"
    console.print(f"A training step of {title}, on {device}")
    if on_cuda:
        torch.cuda.set_device(torch.device(device).index or 0)
    try:
        built = run.build(config, name, options.layers, dtype, device, options.seed)
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
    where = torch.cuda.get_device_name() if on_cuda else f"CPU, threads: {torch.get_num_threads()}"
    strict_json.write(
        out / "profile.json", {**about(options.given), "device": where, "settings": settings, "runs": runs}
    )
    console.print(f"Figures: {out / 'profile.json'}   Plot: {out / 'profile.png'}", soft_wrap=True)
    if options.trace:
        record.write_trace(profilers, options.trace)
        console.print(f"Trace: {options.trace} (open it at ui.perfetto.dev)", soft_wrap=True)
    return 0


def _config(options: argparse.Namespace) -> tuple[str | None, Any]:
    """Where the weights are (None: random), and the config."""
    if options.model is not None:
        name = model.find_model(options.model)
        if not sys.stderr.isatty():
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()
        return name, model.load_config(name)
    from transformers import AutoConfig

    shape = MODELS[options.shape]
    return None, AutoConfig.for_model(**shape)
