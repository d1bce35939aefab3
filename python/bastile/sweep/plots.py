"""PNGs of a sweep: throughput, latency and peak memory over the length, or the loss curves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bastile.sweep.report import GIB, ORDER, title
from bastile.sweep.results import Record, Results

_COLOURS = {
    "hf": "#888888",
    "compile": "#e0a030",
    "compile-layers": "#c06020",
    "liger": "#7a5bb0",
    "liger-nofused": "#a98fd0",
    "liger-cute": "#d060a0",
    "bastile-compile": "#3f7fbf",
    "bastile": "#1b7f4d",
}


def draw(results: Results, stem: Path) -> list[Path]:
    """Writes <stem>-throughput.png, <stem>-latency.png and <stem>-memory.png, or for loss curves <stem>.png."""
    import matplotlib

    matplotlib.use("Agg")
    if results.settings["kind"] == "curve":
        return [_curves(results, stem.with_name(f"{stem.name}.png"))]
    whole = results.settings["optimizer"] == "step"
    time = "step_seconds" if whole else "seconds"
    what = "whole step" if whole else "forward + backward"
    panels: list[tuple[str, str, Callable[[Record], float | None], bool]] = [
        ("throughput", "tokens/s", lambda r: r["tokens_per_second"], False),
        ("latency", f"ms, {what}", lambda r: r[time] * 1e3, True),
        ("memory", "peak GiB" + (" a GPU" if results.settings["gpus"] > 1 else ""), _gib, False),
    ]
    return [
        _lines(results, _named(stem, name), label, value, logarithmic) for name, label, value, logarithmic in panels
    ]


def _named(stem: Path, name: str) -> Path:
    return stem.with_name(f"{stem.name}-{name}.png")


def _gib(record: Record) -> float | None:
    return None if record["peak_bytes"] is None else record["peak_bytes"] / GIB


def _lines(
    results: Results, path: Path, label: str, value: Callable[[Record], float | None], logarithmic: bool
) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    for name in results.implementations(ORDER):
        points = [
            (length, found)
            for length in results.lengths()
            if (record := results.find(name, length))
            and record["status"] == "ok"
            and (found := value(record)) is not None
        ]
        if not points:
            continue
        colour, ours, too_long = _COLOURS[name], name == "bastile", results.too_long(name)
        label_of = name if too_long is None else f"{name} (out of memory at {too_long})"
        width = 2.2 if ours else 1.4
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=label_of, linewidth=width, markersize=4)
        if too_long is not None:
            axes.plot(*points[-1], "x", color=colour, markersize=11, markeredgewidth=2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(results.lengths(), [str(length) for length in results.lengths()])
    axes.set_xlabel("tokens a sequence")
    axes.set_ylabel(label)
    if logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    return _finish(figure, axes, results, path)


def _curves(results: Results, path: Path) -> Path:
    """The losses above, their difference from the first implementation's below: the curves lie upon each other."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 6.4), height_ratios=(3, 1), sharex=True, layout="constrained"
    )
    ran = [r for name in results.implementations(ORDER) for r in results.records if r["implementation"] == name]
    ran = [record for record in ran if record["status"] == "ok"]
    curves = [[float("nan") if loss is None else loss for loss in record["losses"]] for record in ran]
    for place, (record, losses) in enumerate(zip(ran, curves, strict=True)):
        name = record["implementation"]
        steps = range(1, len(record["losses"]) + 1)
        label = f"{name}: {record['tokens_per_second']:,.0f} tokens/s"
        # The first ones are drawn broad, so that those upon them do not hide them.
        above.plot(steps, losses, color=_COLOURS[name], label=label, linewidth=1 + 1.2 * (len(ran) - 1 - place))
        if place:
            differences = [a - b for a, b in zip(losses, curves[0], strict=True)]
            below.plot(steps, differences, color=_COLOURS[name], linewidth=1)
    above.set_ylabel("loss")
    below.set_ylabel(f"minus {ran[0]['implementation']}'s" if ran else "")
    below.set_xlabel("step")
    below.grid(alpha=0.3)
    return _finish(figure, above, results, path)


def _finish(figure: Any, axes: Any, results: Results, path: Path) -> Path:
    from matplotlib import pyplot

    axes.set_title(title(results), fontsize=9)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
