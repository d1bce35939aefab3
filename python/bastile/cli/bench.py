"""`bench`: from options to cases, their results as they come, and the files."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from bastile.cli import options as shared
from bastile.cli.choices import chosen
from bastile.cli.errors import UsageError
from bastile.cli.folder import check_folder, make_folder
from bastile.cli.options import SHORT_TYPES, add_option, count, device_for, need_positive, type_name


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time the operators beside the code they replace and other libraries",
        description="Measures each operator's time, host time and memory, beside other libraries in turns, against the "
        "limit of this machine. Peers that are not installed are left out with a note.",
    )
    parser.add_argument("ops", nargs="*", metavar="op", help="operators to measure or show; none given: all")
    parser.add_argument(
        "--dtype",
        metavar="T,T",
        help="float32 (fp32), bfloat16 (bf16), float16 (fp16), with commas (default: CUDA bfloat16, CPU "
        "bfloat16,float32)",
    )
    shared.add_against(parser, "torch, hf, compile, liger, quack", "all on CUDA, torch,hf on CPU")
    shared.add_device(parser)
    add_option(
        parser,
        "--cases",
        was=["--shapes", "--shape"],
        metavar="NAMES",
        help="limits (a large GPU's) or small, with commas (default: limits on CUDA, small on CPU)",
    )
    parser.add_argument("--host", action="store_true", help="measure only the host's time of a call, at one row")
    parser.add_argument(
        "--rounds", type=count, metavar="N", default=7, help="turns of the contenders of a case (default: 7)"
    )
    shared.add_budget(parser, "case")
    shared.add_out(parser, "bench-out", "the JSON and the plots")
    shared.add_json(parser)
    parser.add_argument("--plots", action="store_true", help="also draw bars, one PNG an operator (needs matplotlib)")
    shared.add_show(parser)
    parser.set_defaults(command=bench)


def bench(options: argparse.Namespace) -> int:
    """0; 1 where Bastile itself could not be measured in some case."""
    from bastile.bench import report

    if options.show:
        run = _saved(options.show)
        ops = _operators(options)
        run["results"] = [result for result in run["results"] if result["op"] in ops]
        if not options.json:
            show = report.printer()
            for result in run["results"]:
                show(result)
    else:
        run = _measure(options)
    if options.json:
        print(json.dumps(run, indent=1))
    else:
        table = report.host_table(run["results"])
        print("\n\n".join(text for text in (table, report.summary(run["results"])) if text))
    if options.plots:
        _plot(run, options.out)
    ours = [row for result in run["results"] for row in result["rows"] if row["name"] == "bastile"]
    return 0 if ours and not any(row.get("failed") for row in ours) else 1


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    from bastile.bench import cases, machine, report, run, timing
    from bastile.bench.peers import AGAINST

    check_folder("--out", options.out)
    device = torch.device(device_for(options.device))
    on_cuda = device.type == "cuda"
    if on_cuda:
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    shapes = chosen("--cases", options.cases, cases.SHAPES, ["limits" if on_cuda else "small"])
    otherwise = ["bfloat16"] if on_cuda else ["bfloat16", "float32"]
    dtypes = [SHORT_TYPES[name] for name in chosen("--dtype", options.dtype, SHORT_TYPES, otherwise, type_name)]
    peers = chosen("--against", options.against, AGAINST, list(AGAINST) if on_cuda else ["torch", "hf"])
    ops = _operators(options)
    if options.budget is not None:
        need_positive("--budget", options.budget)
    contenders = ["bastile", "unfused", *(name for peer in peers for name in AGAINST[peer])]
    on_device = [] if options.host else [case for name in shapes for case in cases.SHAPES[name]]
    table = [*on_device, *cases.HOST]
    selected = [(case, dtype) for op in ops for dtype in dtypes for case in table if case.op == op]

    make_folder("--out", options.out)
    now = datetime.now(timezone.utc)
    path = options.out / f"bench-{device.type}-{now:%Y%m%d-%H%M%S}.json"
    tell = sys.stderr if options.json else sys.stdout
    with machine.Monitor(device) as monitor:
        speed = timing.copy_speed(device)
        measured: dict[str, Any] = {
            "date": now.isoformat(timespec="seconds"),
            "command": options.given,
            "versions": machine.versions(),
            "device": device.type,
            "machine": machine.describe(device),
            "copy_bytes_per_second": speed,
            "options": {"shapes": shapes, "dtypes": dtypes, "contenders": contenders, "rounds": options.rounds},
            "results": [],
        }
        print(f"{measured['machine']['name']}, copy {speed / 1e9:.4g} GB/s; results in {path}\n", file=tell, flush=True)
        show = report.printer()
        for result in run.run_cases(
            selected,
            contenders,
            device,
            copy_speed=speed,
            rounds=options.rounds,
            budget=options.budget,
            machine_since=monitor.since,
        ):
            measured["results"].append(result)
            report.save(measured, path)
            if options.json:
                print(f"{len(measured['results'])}/{len(selected)} {result['title']}", file=tell, flush=True)
            else:
                show(result)
    return measured


def _operators(options: argparse.Namespace) -> list[str]:
    from bastile.bench import cases

    return chosen("op", ",".join(options.ops) or None, cases.OPS, list(cases.OPS))


def _saved(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text())
        if not isinstance(run, dict) or not {"results", "machine", "date"} <= run.keys():
            raise ValueError("its keys are others")
    except OSError as error:
        raise UsageError(f"--show {path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"--show {path}: not a file that bench has written ({error})") from error
    return run


def _plot(run: dict[str, Any], out: Path) -> None:
    from bastile.bench import plots

    try:
        for path in plots.draw(run, make_folder("--out", out)):
            print(f"Plot: {path}", file=sys.stderr)
    except ImportError:
        print("No plots: matplotlib is not installed (bench --show FILE --plots draws them elsewhere)", file=sys.stderr)
