"""A profile's tables, its sentence, and its plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bastile.cli.shown import TITLES, bytes_text, plot, ratio, table
from bastile.profile.groups import GROUPS, short_name

# Above these shares of the step the GPU's waiting is worth naming, and is what limits the step.
_WAITING, _LAUNCH_BOUND = 0.05, 0.25


def groups_table(runs: list[dict[str, Any]], device: str) -> Any:
    shown = table(f"{device} time by group", ["milliseconds a step"], ["stock", "", "bastile", "", "ratio"])
    sums = [sum(run["groups"].values()) for run in runs]

    def times(title: str, seconds: list[float], shares: tuple[str, str] = ("", "")) -> None:
        before, after = seconds
        shown.add_row(
            title, _ms(before), shares[0], _ms(after), shares[1], ratio(after, before) if before and after else ""
        )

    for group in GROUPS:
        spent = [run["groups"][group] for run in runs]
        before, after = (f"{100 * seconds / total:.0f}%" for seconds, total in zip(spent, sums, strict=True))
        times(group, spent, (before, after))
    shown.add_section()
    times("sum", sums)
    times("a step, not profiled", [run["seconds_per_step"] for run in runs])
    stock, ours = runs
    if stock["busy"] is not None:
        before, after = (f"{100 * (1 - run['busy']):.0f}%" for run in runs)
        shown.add_row("the GPU waits", "", before, "", after, "")
        calls = [sum(kernel["calls"] for kernel in run["kernels"]) for run in runs]
        shown.add_row("kernels and copies", f"{calls[0]:,.0f}", "", f"{calls[1]:,.0f}", "", ratio(calls[1], calls[0]))
    if stock["peak_memory"]:
        peaks = stock["peak_memory"], ours["peak_memory"]
        shown.add_row("peak memory", bytes_text(peaks[0]), "", bytes_text(peaks[1]), "", ratio(peaks[1], peaks[0]))
    return shown


def kernels_table(runs: list[dict[str, Any]], device: str, most: int = 20) -> Any:
    """The kernels (on CPU: operators) that take the most time in either run."""
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}
    for run in runs:
        for kernel in run["kernels"]:
            row = rows.setdefault((kernel["group"], short_name(kernel["name"])), {})
            entry = row.setdefault(run["name"], [0, 0.0])
            entry[0] += kernel["calls"]
            entry[1] += kernel["seconds"]
    heads = ["group", "kernel" if device == "GPU" else "operator"]
    shown = table(f"The {most} that take longest", heads, ["stock ms", "calls", "bastile ms", "calls"])
    shown.columns[0].no_wrap = True
    if device == "CPU":
        shown.columns[1].overflow = "fold"  # operators' names are short, and told apart by their ends
    ordered = sorted(rows.items(), key=lambda item: -max(seconds for _, seconds in item[1].values()))
    for (group, name), row in ordered[:most]:
        pairs = [row.get(which) for which in ("stock", "bastile")]
        shown.add_row(group, name, *(cell for pair in pairs for cell in _calls(pair)))
    return shown


def _calls(pair: list[float] | None) -> tuple[str, str]:
    return (_ms(pair[1]), f"{pair[0]:,.0f}") if pair else ("", "")


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
    names = [TITLES[run["name"]] for run in runs]
    bottoms = [0.0] * len(runs)
    with plot(path, figsize=(7, 5)) as axes:
        for number, group in enumerate(GROUPS):
            heights = [1000 * run["groups"][group] for run in runs]
            if max(heights) > 0:
                axes.bar(names, heights, bottom=bottoms, label=group, color=f"C{number}", width=0.5)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        rest = [max(0.0, 1000 * run["seconds_per_step"] - bottom) for run, bottom in zip(runs, bottoms, strict=True)]
        axes.bar(names, rest, bottom=bottoms, label="rest of the step", color="none", edgecolor="grey", width=0.5)
        axes.set_ylabel("milliseconds a step")
        axes.set_title(title)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"
