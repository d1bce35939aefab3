"""A profile's tables, its sentence, and its plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from bastile.profile.groups import GROUPS, short_name

TITLES = {"stock": "Stock Transformers", "bastile": "Bastile"}
# Above these shares of the step the GPU's waiting is worth naming, and is what limits the step.
_WAITING, _LAUNCH_BOUND = 0.05, 0.25


def groups_table(runs: list[dict[str, Any]], device: str) -> Table:
    stock, ours = runs
    sums = [sum(run["groups"].values()) for run in runs]
    table = Table("milliseconds a step", "stock", "", "bastile", "", "ratio", title=f"{device} time by group")
    for column in table.columns[1:]:
        column.justify = "right"
    for group in GROUPS:
        before, after = stock["groups"][group], ours["groups"][group]
        shares = [f"{100 * time / total:.0f}%" for time, total in zip((before, after), sums, strict=True)]
        table.add_row(group, _ms(before), shares[0], _ms(after), shares[1], _ratio(before, after))
    table.add_section()
    table.add_row("sum", _ms(sums[0]), "", _ms(sums[1]), "", _ratio(*sums))
    table.add_row(
        "a step, not profiled",
        _ms(stock["seconds_per_step"]),
        "",
        _ms(ours["seconds_per_step"]),
        "",
        _ratio(stock["seconds_per_step"], ours["seconds_per_step"]),
    )
    if stock["busy"] is not None:
        waiting = [f"{100 * (1 - run['busy']):.0f}%" for run in runs]
        table.add_row("the GPU waits", "", waiting[0], "", waiting[1], "")
    if stock["peak_memory"]:
        gib = [f"{run['peak_memory'] / 2**30:.2f} GiB" for run in runs]
        table.add_row("peak memory", gib[0], "", gib[1], "", _ratio(stock["peak_memory"], ours["peak_memory"]))
    return table


def kernels_table(runs: list[dict[str, Any]], device: str, most: int = 20) -> Table:
    """The kernels (on CPU: operators) that take the most time in either run."""
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}
    for run in runs:
        for kernel in run["kernels"]:
            row = rows.setdefault((kernel["group"], short_name(kernel["name"])), {})
            entry = row.setdefault(run["name"], [0, 0.0])
            entry[0] += kernel["calls"]
            entry[1] += kernel["seconds"]
    what = "kernel" if device == "GPU" else "operator"
    table = Table("group", what, "stock ms", "calls", "bastile ms", "calls", title=f"The {most} that take longest")
    table.columns[0].no_wrap = True
    if device == "CPU":
        table.columns[1].overflow = "fold"  # operators' names are short, and told apart by their ends
    for column in table.columns[2:]:
        column.justify = "right"
    ordered = sorted(rows.items(), key=lambda item: -max(seconds for _, seconds in item[1].values()))
    for (group, name), row in ordered[:most]:
        cells = []
        for which in ("stock", "bastile"):
            calls, seconds = row.get(which, (0, 0.0))
            cells += [_ms(seconds), f"{calls:,.0f}"] if which in row else ["", ""]
        table.add_row(group, name, *cells)
    return table


def sentence(run: dict[str, Any]) -> str:
    """What limits this run's step, from its figures."""
    total = sum(run["groups"].values()) or 1.0
    shares = {group: seconds / total for group, seconds in run["groups"].items()}
    order = sorted(shares, key=lambda group: -shares[group])
    unit = "CPU" if run["busy"] is None else "GPU"
    text = f"{TITLES[run['name']]}: {_take(order[0])} {100 * shares[order[0]]:.0f}% of {unit} time, "
    text += f"then {order[1]} {100 * shares[order[1]]:.0f}% and {order[2]} {100 * shares[order[2]]:.0f}%"
    if run["busy"] is None:
        fused = any(kernel["name"].startswith("bastile::linear_cross_entropy") for kernel in run["kernels"])
        return text + (" (the products of the head are within the loss, one operator on a CPU)." if fused else ".")
    waiting = 1 - run["busy"]
    if waiting >= _WAITING:
        text += f"; the GPU waits for the host during {100 * waiting:.0f}% of the step"
    if waiting >= _LAUNCH_BOUND:
        return text + ": launch-bound. Larger batches, fewer and larger kernels, or CUDA graphs help."
    if order[0] in ("products", "attention"):
        return text + f": bound by arithmetic in {order[0]}, which only fewer or cheaper products would shorten."
    if order[0] == "optimiser":
        return text + ": bound by the optimiser's memory traffic. Larger batches or fewer trained weights (LoRA) help."
    return text + f": bound by memory traffic in {order[0]}."


def _take(group: str) -> str:
    return f"{group} {'takes' if group in ('attention', 'activation', 'loss', 'optimiser', 'other') else 'take'}"


def draw(runs: list[dict[str, Any]], title: str, path: Path) -> None:
    """A stacked bar for each run: its groups, and above them what the step takes beside."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
    colours = matplotlib.color_sequences["tab10"]
    names = [TITLES[run["name"]] for run in runs]
    bottoms = [0.0] * len(runs)
    for group, colour in zip(GROUPS, colours, strict=False):
        heights = [1000 * run["groups"][group] for run in runs]
        if max(heights) > 0:
            axes.bar(names, heights, bottom=bottoms, label=group, color=colour, width=0.5)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    rest = [max(0.0, 1000 * run["seconds_per_step"] - bottom) for run, bottom in zip(runs, bottoms, strict=True)]
    axes.bar(names, rest, bottom=bottoms, label="rest of the step", color="none", edgecolor="grey", width=0.5)
    axes.set_ylabel("milliseconds a step")
    axes.set_title(title)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"


def _ratio(before: float, after: float) -> str:
    return f"{after / before:.2f}" if before > 0 and after > 0 else ""
