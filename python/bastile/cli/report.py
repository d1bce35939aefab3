"""What a comparison found: a table on the terminal, curves.png and result.json in the output folder."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bastile.cli import shown
from bastile.cli.files import write_json
from bastile.cli.shown import TITLES, about, bytes_text, number
from bastile.peers.models import IMPLEMENTATIONS


def write(plan: dict[str, Any], runs: list[dict[str, Any]], out: Path, command: str) -> dict[str, Any]:
    """Prints the runs side by side and the comparison, and writes both files. Returns the result. command: as it was
    given."""
    console = Console()
    comparison = compared(runs) if len(runs) == 2 and all(run["status"] == "ok" for run in runs) else {}
    console.print(_table(plan["steps"], runs, comparison))
    if comparison:
        gap = comparison["largest_loss_difference"]
        console.print(
            f"Bastile against stock: {_times(comparison['speed'])} the tokens/s, {_times(comparison['memory'])} the "
            f"peak memory, largest difference between the losses {gap:.1e} (step {comparison['at_step']})"
        )
    how = _how(plan)
    for sentence in how.values():
        console.print(sentence)
    for run in runs:
        if run["status"] != "ok":
            text = f"{TITLES[run['name']]}: {run['status']}: {run['reason']}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    title = f"{plan['dtype']}, {plan['steps']} steps of {plan['batch']} x {plan['sequence']} tokens"
    shown.draw_losses(out / "curves.png", title, [_curve(run) for run in runs])
    result = {**about(command), "plan": plan, "measured": how, "runs": runs, "comparison": comparison}
    write_json(out / "result.json", result)
    console.print(f"Command: {command}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Curves: {out / 'curves.png'}   Figures: {out / 'result.json'}")
    return result


def _curve(run: dict[str, Any]) -> tuple[str, str, list[float | None]]:
    label = f"{TITLES[run['name']]}: {number(run.get('tokens_per_second'), ',.0f')} tokens/s"
    return label, IMPLEMENTATIONS["hf" if run["name"] == "stock" else run["name"]].colour, run["losses"]


def _how(plan: dict[str, Any]) -> dict[str, str]:
    """How speed and memory were measured."""
    turn = plan["turn"]
    by_turns = f"Speed: the runs take turns of {turn} steps; medians over the turns"
    after = "Speed: of all steps of a run; one run after the other, so that other work at the time of one alone shows"
    memory = {
        "cuda": "what PyTorch's allocator gave it at most",
        "cpu": "its resident pages, libraries and all",
    }[torch.device(plan["device"]).type]
    return {
        "speed": f"{by_turns if turn else after}. The first step, which compiles kernels, is not timed.",
        "memory": f"Memory: of each run's own process: {memory}.",
    }


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Bastile's run, the second, as a multiple of the stock run, and how far the loss curves part."""
    stock, ours = runs
    # A NaN on either side, which a saved result holds as null, is the largest difference there is.
    gaps = [_gap(a, b) for a, b in zip(stock["losses"], ours["losses"], strict=True)]
    largest = max(gaps)
    timed = stock["tokens_per_second"] and ours["tokens_per_second"]
    return {
        "speed": ours["tokens_per_second"] / stock["tokens_per_second"] if timed else None,
        "memory": ours["peak_memory"] / stock["peak_memory"],
        "largest_loss_difference": largest,
        "at_step": gaps.index(largest) + 1,
    }


def _gap(a: float | None, b: float | None) -> float:
    if a is None or b is None or math.isnan(a - b):
        return math.inf
    return abs(a - b)


def _table(steps: int, runs: list[dict[str, Any]], comparison: dict[str, Any]) -> Any:
    heads = ["", *(TITLES[run["name"]] for run in runs), *(["ratio"] if comparison else [])]
    table = shown.table("", heads, [])
    for column in table.columns:
        column.overflow = "fold"  # the names of patches whole, also in a narrow terminal

    def row(title: str, cell: Callable[[dict[str, Any]], str], ratio: float | None = None) -> None:
        """Of a run that did not end there are but losses."""
        cells = [cell(run) if run["status"] == "ok" else run["status"] for run in runs]
        table.add_row(title, *cells, *([_times(ratio) if ratio else ""] if comparison else []))

    for step in sorted({1, *(max(1, steps * quarter // 4) for quarter in (1, 2, 3, 4))}):
        losses = [number(run["losses"][step - 1], ".4f") if step <= len(run["losses"]) else "-" for run in runs]
        table.add_row(f"loss at step {step}", *losses, *([""] if comparison else []))
    row("seconds a step", lambda run: number(run["seconds_per_step"], ".4g"))
    row("tokens/s", lambda run: number(run["tokens_per_second"], ",.0f"), comparison.get("speed"))
    row("peak memory", lambda run: bytes_text(run["peak_memory"]), comparison.get("memory"))
    row("before the first step", lambda run: bytes_text(run["memory_before_training"]))
    row("trained weights", lambda run: f"{run['trainable_parameters']:,} of {run['parameters']:,}")
    row("patched", lambda run: "\n".join(run["patched"]) or "nothing")
    row("device", lambda run: run["device"])
    return table


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} x"
