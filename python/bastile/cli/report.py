"""What a comparison found: tables on the terminal, curves.png and result.json in the output folder."""

import json
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import bastile

_TITLES = {"stock": "Stock Transformers", "bastile": "Bastile"}


def write(plan: dict[str, Any], runs: list[dict[str, Any]], out: Path) -> None:
    """Prints a table a run and the comparison, and writes both files."""
    console = Console()
    for run in runs:
        console.print(_table(run))
    comparison = compared(runs) if len(runs) == 2 else {}
    if comparison:
        console.print(
            f"Bastile against stock: {comparison['speed']:.2f} x the tokens/s, {comparison['memory']:.2f} x the peak "
            f"memory, largest difference between the losses {comparison['largest_loss_difference']:.1e} "
            f"(step {comparison['at_step']})"
        )
    _plot(runs, out / "curves.png")
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "bastile": bastile.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "plan": plan,
        "runs": runs,
        "comparison": comparison,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1))
    console.print(f"Curves: {out / 'curves.png'}   Figures: {out / 'result.json'}")


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Bastile's run, the second, as a multiple of the stock run, and how far the loss curves part."""
    stock, ours = runs
    # A NaN on either side is the largest difference there is: max alone would pass over it.
    gaps = [
        abs(a - b) if abs(a - b) == abs(a - b) else float("inf")
        for a, b in zip(stock["losses"], ours["losses"], strict=True)
    ]
    largest = max(gaps)
    return {
        "speed": ours["tokens_per_second"] / stock["tokens_per_second"],
        "memory": ours["peak_memory"] / stock["peak_memory"],
        "largest_loss_difference": largest,
        "at_step": gaps.index(largest) + 1,
    }


def _table(run: dict[str, Any]) -> Table:
    table = Table(title=_TITLES[run["name"]], title_justify="left", show_header=False)
    losses = run["losses"]
    for step in sorted({1, *(max(1, len(losses) * quarter // 4) for quarter in (1, 2, 3, 4))}):
        table.add_row(f"loss at step {step}", f"{losses[step - 1]:.4f}")
    table.add_row("tokens/s", f"{run['tokens_per_second']:,.0f}")
    table.add_row(
        "peak memory", f"{_bytes(run['peak_memory'])} ({_bytes(run['memory_before_training'])} before the first step)"
    )
    table.add_row("patched", "\n".join(run["patched"]) or "nothing")
    table.add_row("device", run["device"])
    return table


def _bytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _plot(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run, style in zip(
        reversed(runs), ({"linewidth": 3, "alpha": 0.5}, {"linewidth": 1, "color": "black"}), strict=False
    ):
        axes.plot(range(1, len(run["losses"]) + 1), run["losses"], label=_TITLES[run["name"]], **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(title=", ".join(f"{_TITLES[run['name']]}: {run['tokens_per_second']:,.0f} tokens/s" for run in runs))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
