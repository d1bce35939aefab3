"""`bench`: from options to cases, their results as they come, and the files."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from bastile.cli.files import check_folder, make_folder, read_results, write_json
from bastile.cli.options import SHORT_TYPES, add, chosen, device_for, type_name
from bastile.peers.operators import AGAINST, PEERS


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time the operators beside the code they replace and other libraries",
        description="Measures each operator's time, host time and memory, beside other libraries in turns, against the "
        "limit of this machine. Peers that are not installed are left out with a note.",
        epilog="contenders: " + "; ".join(f"{name}: {peer.meaning}" for name, peer in PEERS.items()),
    )
    parser.add_argument("ops", nargs="*", metavar="op", help="operators to measure or show; none given: all")
    types = ", ".join(f"{name} ({short})" for name, short in SHORT_TYPES.items())
    types += ", with commas (default: CUDA bfloat16, CPU bfloat16,float32)"
    add(parser, "--dtype", metavar="T,T", type=str, choices=None, help=types)
    add(parser, "--against", what=", ".join(AGAINST), shown="all on CUDA, torch,hf on CPU")
    add(parser, "--device", what="cpu, cuda or cuda:N", shown="cuda where there is one")
    add(parser, "--cases", what="limits (a large GPU's) or small", shown="limits on CUDA, small on CPU")
    add(parser, "--host")
    add(parser, "--rounds", default=7)
    add(parser, "--budget", what="case")
    add(parser, "--out", what="the JSON and the plots", default=Path("bench-out"))
    add(parser, "--json", "--plots", "--show")
    parser.set_defaults(command=bench)


def bench(options: argparse.Namespace) -> int:
    """0; 1 where Bastile itself could not be measured in some case."""
    from bastile.bench import report

    if options.show:
        run = read_results(options.show, "bench", {"results", "machine", "date"})
        ops = _operators(options)
        run["results"] = [result for result in run["results"] if result["op"] in ops]
        show = report.printer()
        for result in run["results"]:
            show(result)
    else:
        run = _measure(options)
    options.found = run
    table = report.host_table(run["results"])
    print("\n\n".join(text for text in (table, report.summary(run["results"])) if text))
    if options.plots:
        try:
            for path in report.draw(run, make_folder("--out", options.out)):
                print(f"Plot: {path}", file=sys.stderr)
        except ImportError:
            print("No plots: matplotlib is not installed (--show FILE --plots draws them elsewhere)", file=sys.stderr)
    ours = [row for result in run["results"] for row in result["rows"] if row["name"] == "bastile"]
    return 0 if ours and not any(row.get("failed") for row in ours) else 1


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    from bastile.bench import cases, machine, report, run, timing
    from bastile.cli.shown import about

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
    contenders = ["bastile", "unfused", *(name for peer in peers for name in AGAINST[peer])]
    on_device = [] if options.host else [case for name in shapes for case in cases.SHAPES[name]]
    table = [*on_device, *cases.HOST]
    selected = [(case, dtype) for op in ops for dtype in dtypes for case in table if case.op == op]

    make_folder("--out", options.out)
    with machine.Monitor(device) as monitor:
        speed = timing.copy_speed(device)
        measured: dict[str, Any] = {
            **about(options.given),
            "device": device.type,
            "machine": machine.describe(device),
            "copy_bytes_per_second": speed,
            "options": {"shapes": shapes, "dtypes": dtypes, "contenders": contenders, "rounds": options.rounds},
            "results": [],
        }
        path = options.out / f"bench-{device.type}-{datetime.fromisoformat(measured['date']):%Y%m%d-%H%M%S}.json"
        print(f"{measured['machine']['name']}, copy {speed / 1e9:.4g} GB/s; results in {path}\n", flush=True)
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
            write_json(path, measured)
            show(result)
    return measured


def _operators(options: argparse.Namespace) -> list[str]:
    from bastile.bench import cases

    return chosen("op", ",".join(options.ops) or None, cases.OPS, list(cases.OPS))
