"""What a comparison found: a table on the terminal, curves.png and result.json in the output folder."""

import math
import platform
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import bastile
from bastile.cli import strict_json

_TITLES = {"stock": "Stock Transformers", "bastile": "Bastile"}


def write(plan: dict[str, Any], runs: list[dict[str, Any]], out: Path, command: str) -> None:
    """Prints the runs side by side and the comparison, and writes both files. command: as it was given."""
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
            text = f"{_TITLES[run['name']]}: {run['status']}: {run['reason']}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    _plot(runs, out / "curves.png")
    result = {**about(command), "plan": plan, "measured": how, "runs": runs, "comparison": comparison}
    strict_json.write(out / "result.json", result)
    console.print(f"Command: {command}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Curves: {out / 'curves.png'}   Figures: {out / 'result.json'}")


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


def about(command: str) -> dict[str, Any]:
    """When, by what command and with what a result was made."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "versions": {
            "bastile": bastile.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
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


def _table(steps: int, runs: list[dict[str, Any]], comparison: dict[str, Any]) -> Table:
    table = Table("", *(_TITLES[run["name"]] for run in runs), *(["ratio"] if comparison else []))
    for column in table.columns:
        column.overflow = "fold"  # the names of patches whole, also in a narrow terminal

    def row(title: str, cell: Callable[[dict[str, Any]], str], ratio: float | None = None) -> None:
        """Of a run that did not end there are but losses."""
        cells = [cell(run) if run["status"] == "ok" else run["status"] for run in runs]
        table.add_row(title, *cells, *([_times(ratio) if ratio else ""] if comparison else []))

    for step in sorted({1, *(max(1, steps * quarter // 4) for quarter in (1, 2, 3, 4))}):
        losses = [_number(run["losses"][step - 1], ".4f") if step <= len(run["losses"]) else "-" for run in runs]
        table.add_row(f"loss at step {step}", *losses, *([""] if comparison else []))
    row("seconds a step", lambda run: _number(run["seconds_per_step"], ".4g"))
    row("tokens/s", lambda run: _number(run["tokens_per_second"], ",.0f"), comparison.get("speed"))
    row("peak memory", lambda run: bytes_text(run["peak_memory"]), comparison.get("memory"))
    row("before the first step", lambda run: bytes_text(run["memory_before_training"]))
    row("trained weights", lambda run: f"{run['trainable_parameters']:,} of {run['parameters']:,}")
    row("patched", lambda run: "\n".join(run["patched"]) or "nothing")
    row("device", lambda run: run["device"])
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} x"


def bytes_text(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _plot(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    styles: tuple[dict[str, Any], ...] = ({"linewidth": 3, "alpha": 0.5}, {"linewidth": 1, "color": "black"})
    for run, style in zip(reversed(runs), styles, strict=False):
        losses = [math.nan if loss is None else loss for loss in run["losses"]]  # a gap in the curve
        axes.plot(range(1, len(losses) + 1), losses, label=_TITLES[run["name"]], **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    speeds = (f"{_TITLES[run['name']]}: {_number(run.get('tokens_per_second'), ',.0f')} tokens/s" for run in runs)
    axes.legend(title=", ".join(speeds))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
