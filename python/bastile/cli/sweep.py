"""`sweep`: from options to a plan, its progress, and the report."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

from bastile.cli.errors import UsageError
from bastile.cli.files import check_folder, make_folder
from bastile.cli.options import add, add_where, chosen, device_for, dtype_for, need_packages
from bastile.peers.models import CURVES_ON_CUDA, IMPLEMENTATIONS, ON_CPU, ON_CUDA, SHARDED, TRAINED
from bastile.shapes import MODELS

_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_TINY_LENGTHS = (64, 128, 256)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "sweep",
        help="run whole models over sequence lengths, beside other implementations",
        description="Measures forward and backward of a model with random weights at several lengths: time, peak "
        "memory, loss; each configuration in a process of its own. Running out of memory is a result. A sweep that was "
        "stopped goes on when the same command is given again.",
        epilog="implementations: " + "; ".join(f"{name}: {one.meaning}" for name, one in IMPLEMENTATIONS.items()),
    )
    model = parser.add_argument_group("what is run")
    add(model, "--shape", what="the model (default: qwen3-8b on CUDA, tiny on CPU)")
    add(model, "--against", what="implementations beside bastile", shown="what suits the device")
    add(model, "--lengths")
    add(model, "--batch", shown="1; loss curves 4")
    add(model, "--lora", "--load-in-4bit")
    add(model, "--trainer", "--checkpointing", "--offload-checkpoints")
    add_where(model)

    how = parser.add_argument_group("how it is measured")
    add(how.add_mutually_exclusive_group(), "--whole-step", "--no-optimizer")
    add(how, "--steps", what="timed steps", default=5, was=["--repeats"])
    add(how, "--untimed", default=5)
    add(how, "--profile-floor", "--memory-limit")
    add(how, "--timeout", default=900.0)
    add(how, "--budget", what="configuration")
    add(how, "--share-process")
    add(parser.add_argument_group("other measurements"), "--fsdp", "--gpus", "--loss-curve")

    files = parser.add_argument_group("files")
    add(files, "--out", what="the JSON, the plots and the logs", default=Path("sweep-out"))
    add(files, "--fresh", "--show", "--json")
    parser.set_defaults(command=sweep)


def sweep(options: argparse.Namespace) -> int:
    """0; 1 where Bastile itself failed, or where --budget left something undone."""
    need_packages("transformers", "rich", "matplotlib")
    from bastile.sweep.results import Results

    if options.show:
        _report(options, Results.shown(options.show), make_folder("--out", options.out))
        return 0
    if int(os.environ.get("RANK", 0)) > 0:
        return 0  # torchrun has started this once a GPU; the first of them starts the workers of all
    settings, names, lengths = _plan(options)
    folder = check_folder("--out", options.out)
    results = Results.opened(folder / f"{_file_name(settings)}.json", settings, options.fresh)
    results.content.setdefault("command", options.given)
    try:
        complete = _measure(options, results, names, lengths, folder)
    except KeyboardInterrupt:
        print("Give the same command again to go on", file=sys.stderr)
        raise
    if results.records:
        _report(options, results, folder)
    if not complete:
        print("Not all was measured: give the same command again to go on", file=sys.stderr)
    ours = [record for record in results.records if record["implementation"] == "bastile"]
    return 0 if complete and all(record["status"] in ("ok", "out of memory") for record in ours) else 1


def _plan(options: argparse.Namespace) -> tuple[dict[str, Any], list[str], list[int]]:
    """The settings that all configurations share, the implementations, and the lengths."""
    from bastile.peers import versions

    device = device_for(options.device)
    on_cuda = device.startswith("cuda")
    curve = options.loss_curve is not None
    model = options.shape or ("qwen3-8b" if on_cuda else "tiny")
    gpus = _gpus(options, device)
    _check_adapters(options, gpus)
    _check_trainer(options)
    if curve:
        for name in ("fsdp", "whole_step", "no_optimizer", "budget"):
            if getattr(options, name):
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} does not go with it: --loss-curve trains whole steps")
    many = TRAINED if options.trainer else CURVES_ON_CUDA if curve else ON_CUDA
    on_one = many if on_cuda else ON_CPU
    suited = SHARDED if gpus > 1 else on_one
    names = chosen("--against", options.against, IMPLEMENTATIONS, suited)
    if gpus > 1:
        for name in names:
            if "compile" in name:
                raise UsageError(f"--fsdp: {name} is not measured on several GPUs; leave it out of --against")
    otherwise = _TINY_LENGTHS if model == "tiny" else _LENGTHS
    lengths = _lengths(options.lengths, ((64 if model == "tiny" else 1024),) if curve else otherwise)
    if curve and len(lengths) > 1:
        raise UsageError("--loss-curve: give one of --lengths, not several")
    return (
        {
            "kind": "curve" if curve else "sweep",
            "model": model,
            "device": device,
            "dtype": dtype_for(options.dtype, device),
            "batch": options.batch or (4 if curve else 1),
            "seed": options.seed,
            "gpus": gpus,
            "optimizer": "step" if options.whole_step else "none" if options.no_optimizer else "states",
            "warm_up": options.untimed,
            "repeats": options.steps,
            "curve_steps": options.loss_curve,
            "profile_floor": options.profile_floor,
            "memory_limit": options.memory_limit,
            "share_process": options.share_process,
            "versions": versions(),
            # Where there are none the settings are what they were before there could be.
            **({"lora": options.lora, "load_in_4bit": options.load_in_4bit} if options.lora else {}),
            **({"trainer": options.trainer, "checkpointing": options.checkpointing} if options.trainer else {}),
            **({"offload_checkpoints": True} if options.offload_checkpoints else {}),
        },
        [name for name in IMPLEMENTATIONS if name in names or name == "bastile"],
        lengths,
    )


def _check_adapters(options: argparse.Namespace, gpus: int) -> None:
    if not options.lora:
        if options.load_in_4bit:
            raise UsageError("--load-in-4bit goes with --lora: weights of 4 bits are not trained")
        return
    need_packages("peft", purpose="--lora")
    if options.load_in_4bit:
        need_packages("bitsandbytes", purpose="--load-in-4bit")
        if gpus > 1:
            raise UsageError("--load-in-4bit is measured on one GPU; leave --fsdp out")


def _check_trainer(options: argparse.Namespace) -> None:
    if options.offload_checkpoints and not options.checkpointing:
        raise UsageError("--offload-checkpoints goes with --checkpointing")
    if not options.trainer:
        if options.checkpointing:
            raise UsageError("--checkpointing goes with --trainer")
        return
    need_packages("trl", "peft", "datasets", purpose="--trainer")
    for name in ("fsdp", "loss_curve", "whole_step", "no_optimizer", "profile_floor", "share_process"):
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} does not go with --trainer, whose steps are whole ones")
    from bastile.sweep.trainer import WAYS

    for name in (options.against or "").split(","):
        if name.strip() in IMPLEMENTATIONS and name.strip() not in WAYS:
            raise UsageError(f"--trainer runs {', '.join(WAYS)}; leave {name.strip()} out of --against")


def _gpus(options: argparse.Namespace, device: str) -> int:
    world = int(os.environ.get("WORLD_SIZE", 1))
    if not options.fsdp:
        if options.gpus is not None or world > 1:
            raise UsageError("several processes are for --fsdp; give it too")
        return 1
    if int(os.environ.get("LOCAL_WORLD_SIZE", world)) != world:
        raise UsageError("--fsdp: all processes must run on one host; give torchrun --nnodes=1")
    on_cuda = device.startswith("cuda")
    if ":" in device:
        raise UsageError(f"--fsdp takes the first GPUs, not --device {device}: choose them by CUDA_VISIBLE_DEVICES")
    here = torch.cuda.device_count() if on_cuda else 2
    gpus = options.gpus or (world if world > 1 else here)
    if world > 1 and gpus != world:
        raise UsageError(f"--gpus {gpus}: torchrun has started {world} processes; leave --gpus out")
    if gpus < 2:
        given = "--gpus is" if options.gpus else "this machine has"
        raise UsageError(f"--fsdp needs at least 2 GPUs; {given} {gpus}")
    if on_cuda and gpus > here:
        raise UsageError(f"--gpus {gpus}: this machine has {here}")
    return gpus


def _lengths(given: str | None, otherwise: tuple[int, ...]) -> list[int]:
    if given is None:
        return list(otherwise)
    try:
        lengths = sorted({int(part) for part in given.split(",") if part.strip()})
    except ValueError as error:
        raise UsageError(f"--lengths {given}: give whole numbers with commas") from error
    if not lengths or lengths[0] < 2:
        raise UsageError(f"--lengths {given}: at least 2 tokens are needed, for each predicts the next one")
    return lengths


def _file_name(settings: dict[str, Any]) -> str:
    """One file for each kind of measurement, so that several go to one folder."""
    parts = [settings["model"]]
    if settings["kind"] == "curve":
        parts.append("curve")
    if settings["gpus"] > 1:
        parts.append(f"fsdp{settings['gpus']}")
    if settings.get("lora"):
        parts.append(f"{'q' if settings['load_in_4bit'] else ''}lora{settings['lora']}")
    if settings.get("trainer"):
        parts += [settings["trainer"], *["checkpointing"] * settings["checkpointing"]]
    if settings.get("offload_checkpoints"):
        parts.append("offloaded")
    parts += {"step": ["step"], "none": ["no-optimizer"]}.get(settings["optimizer"], [])
    return "-".join(parts)


def _measure(options: argparse.Namespace, results: Any, names: list[str], lengths: list[int], folder: Path) -> bool:
    from bastile.sweep import report, run

    extra = {}
    if results.settings["kind"] == "curve":
        extra["tokens"] = str(_tokens(results.settings, lengths[0], folder))
    todo = run.jobs(names, lengths, options.share_process)
    jobs = make_folder("--out", folder / "jobs" / results.path.stem)
    with report.progress(todo, results) as tell:
        limits = {"timeout": options.timeout, "budget": options.budget}
        return run.carry_out(results, todo, jobs, **limits, tell=tell, extra=extra)


def _tokens(settings: dict[str, Any], length: int, folder: Path) -> Path:
    """The text as tokens, in a file that is made once."""
    from bastile.cli import data

    vocabulary = min(8192, MODELS[settings["model"]]["vocab_size"])
    path = folder / f"tokens-{vocabulary}.pt"
    made = None
    if not path.exists():
        _, made = data.tokens_of(data.standard_library_text(), vocabulary)
    found = len(torch.load(path, weights_only=True) if made is None else made)
    if found < settings["batch"] * length:
        raise UsageError(f"the text has {found} tokens, and one step takes {settings['batch']} x {length}")
    if made is not None:
        draft = make_folder("--out", folder) / f"{path.stem}.part"
        torch.save(made, draft)
        draft.replace(path)
    return path.resolve()


def _report(options: argparse.Namespace, results: Any, folder: Path) -> None:
    from rich.console import Console

    from bastile.sweep import report

    options.found = report.as_json(results)
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(report.table(results))
    if (host := report.host_table(results)) is not None:
        console.print(host)
    for line in report.sentences(results):
        console.print(line, markup=False, highlight=False)
    for path in (results.path, *report.draw(results, folder / results.path.stem)):
        print(path, file=sys.stderr)
