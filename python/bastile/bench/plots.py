"""Bars: one PNG an operator, one panel a case, one bar a contender; the line is the case's limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COLOURS = {
    "bastile": "#1b7f4d",
    "unfused": "#8fcfae",
    "torch": "#888888",
    "hf": "#bbbbbb",
    "hf-eager": "#cccccc",
    "hf-batched": "#dddddd",
    "compile": "#e0a030",
    "compile-torch": "#f0c878",
    "liger": "#7a5bb0",
    "cute": "#a98fd0",
    "quack": "#3f7fbf",
}


def draw(run: dict[str, Any], out: Path) -> list[Path]:
    """Writes the plots of a run into `out`. ImportError where matplotlib is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for op in dict.fromkeys(result["op"] for result in run["results"]):
        panels = [
            result
            for result in run["results"]
            if result["op"] == op and any("seconds" in row for row in result["rows"])
        ]
        if not panels:
            continue
        figure, axes = pyplot.subplots(
            len(panels), 1, figsize=(8, 0.6 + 1.9 * len(panels)), layout="constrained", squeeze=False
        )
        for axis, result in zip(axes[:, 0], panels, strict=True):
            _panel(axis, result)
        figure.suptitle(
            f"{op}: {run['machine']['name']}, {run['date'][:10]}; milliseconds, less is better", fontsize=10
        )
        path = out / f"{op}.png"
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
        written.append(path)
    return written


def _panel(axis: Any, result: dict[str, Any]) -> None:
    rows = [row for row in result["rows"] if "seconds" in row]
    values = [row["seconds"] * 1e3 for row in rows]
    bars = axis.barh(
        [row["name"] for row in rows], values, color=[_COLOURS.get(row["name"], "#cccccc") for row in rows]
    )
    axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_title(result["title"], fontsize=8, loc="left")
    axis.tick_params(labelsize=7)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    limit = (result.get("floor") or {}).get("seconds")
    if limit:
        axis.axvline(limit * 1e3, color="black", linewidth=0.8, linestyle="--")
