"""Showing results: a table a case that fits a terminal, a summary, and a plot an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bastile.cli.shown import MIB, aligned, number, plot, ratio
from bastile.peers.operators import PEERS

# Nine columns in 80 characters. "+-": half of what lies between the quartiles; "of limit": limit / time; "1st call"
# includes compiling and tuning.
_HEAD = ("", "time", "+-", "GB/s", "of limit", "x ours", "extra MiB", "1st call", "by")

_STEADY = 0.25


def printer() -> Callable[[dict[str, Any]], None]:
    """Prints a case: in colours where rich is installed."""
    try:
        from rich.console import Console
    except ImportError:
        return lambda result: print(as_text(result), flush=True)
    console = Console()

    def show(result: dict[str, Any]) -> None:
        for number_, line in enumerate(as_text(result).split("\n")):
            style = "bold" if number_ == 0 else "green" if line.startswith("bastile ") else ""
            if line.startswith("  "):
                style = "red" if "MISSED" in line else "green" if line.endswith(", met") else "dim"
            console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    return show


def as_text(result: dict[str, Any]) -> str:
    """A case: its headline, its table, and under it needs and notes."""
    head = result["title"]
    limit = result.get("floor") or {}
    if limit.get("seconds"):
        what = "products alone" if limit["flops"] else "copy of as many bytes"
        head += f"; limit {duration(limit['seconds'])} ({what})"
    if "sm_mhz" in result:
        head += f"; {result['sm_mhz']:.0f} MHz, {result['watts']:.0f} W"
    ours = next((row.get("seconds") for row in result["rows"] if row["name"] == "bastile"), None)
    rows = [_cells(row, limit, ours) for row in result["rows"]]
    names = ["TFLOP/s" if name == "GB/s" and limit.get("flops") else name for name in _HEAD]
    tail = []
    for need in result["needs"]:
        verdict = {True: "met", False: "MISSED", None: "not known"}[need["met"]]
        found = "" if need["found"] is None else f"{_found(need)}, "
        tail.append(f"{need['text']} <= {need['limit']:.3g}: {found}{verdict}")
    tail += [f"{row['name']}: {row['note']}" for row in result["rows"] if "note" in row]
    if any(row.get("spread", 0) > _STEADY for row in result["rows"]):
        tail.append(f"unsteady (+- over {_STEADY:.0%}): is the machine busy? Do not rely on this")
    if "note" in limit:
        tail.append(f"limit: {limit['note']}")
    tail += [result[key] for key in ("unchecked", "note") if key in result]
    table = aligned([names, *rows], left=(0, len(_HEAD) - 1)) if rows else []
    return "\n".join([head, *table, *("  " + line for line in tail), ""])


def _found(need: dict[str, Any]) -> str:
    """In three digits, or in as many as show that a limit is missed."""
    texts = [f"{need['found']:.{digits}g}" for digits in range(3, 7)]
    return next((text for text in texts if need["met"] or float(text) > need["limit"]), texts[-1])


def _cells(row: dict[str, Any], limit: dict[str, Any], ours: float | None) -> list[str]:
    seconds = row.get("seconds")
    unit = 1e12 if limit.get("flops") else 1e9
    return [
        row["name"],
        number(seconds, duration),
        number(row.get("spread"), ".0%"),
        number(row.get("rate"), lambda rate: _short(rate / unit)),
        number(row.get("share"), ".0%"),
        ratio(seconds, ours),
        number(row.get("extra_bytes"), lambda size: _short(size / MIB)),
        number(row.get("first_call"), lambda took: f"{took:.1f} s"),
        row.get("way", ""),
    ]


def _short(value: float) -> str:
    """Three digits, all of them before a decimal point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def host_table(results: Sequence[dict[str, Any]]) -> str:
    """The host's microseconds of a call, forward and backward: a row an operator, a column a contender. Empty where
    none were measured."""
    chosen = [result for result in results if result["measured"] == "host"]
    times = [{row["name"]: row["seconds"] for row in result["rows"] if "seconds" in row} for result in chosen]
    names = [name for name in PEERS if any(name in found for found in times)]
    if not names:
        return ""
    several_types = len({result["dtype"] for result in chosen}) > 1
    table = [["host us of a call", *names]]
    for result, found in zip(chosen, times, strict=True):
        title = result["op"] + (f", {result['dtype']}" if several_types else "")
        table.append([title, *(number(found.get(name), lambda seconds: _short(seconds * 1e6)) for name in names)])
    return "\n".join(aligned(table, gap=" "))


def summary(results: Sequence[dict[str, Any]]) -> str:
    needs = [(result["title"], need) for result in results for need in result["needs"]]
    met = [need["met"] for _, need in needs]
    text = f"{met.count(True)} needs met, {met.count(False)} missed, {met.count(None)} not known"
    missed = [
        f"  {title}: {need['text']} {_found(need)}, <= {need['limit']:.3g} needed"
        for title, need in needs
        if need["met"] is False
    ]
    broken = [
        f"  {result['title']}: {one['note']}"
        for result in results
        for one in (*result["rows"], result)
        if "note" in one and (one is result or (one["name"] == "bastile" and one.get("failed")))
    ]
    lines = [text] if needs else []
    lines += ["Missed:", *missed] if missed else []
    lines += ["Not measured:", *broken] if broken else []
    return "\n".join(lines)


def draw(run: dict[str, Any], out: Path) -> list[Path]:
    """One PNG an operator, one panel a case, one bar a contender; the line is the case's limit."""
    written = []
    for op in dict.fromkeys(result["op"] for result in run["results"]):
        panels = [result for result in run["results"] if result["op"] == op]
        panels = [result for result in panels if any("seconds" in row for row in result["rows"])]
        if not panels:
            continue
        path = out / f"{op}.png"
        size = (8, 0.6 + 1.9 * len(panels))
        with plot(path, len(panels), figsize=size, squeeze=False) as axes:
            title = f"{op}: {run['machine']['name']}, {run['date'][:10]}; milliseconds, less is better"
            axes[0, 0].figure.suptitle(title, fontsize=10)
            for axis, result in zip(axes[:, 0], panels, strict=True):
                _panel(axis, result)
        written.append(path)
    return written


def _panel(axis: Any, result: dict[str, Any]) -> None:
    rows = [row for row in result["rows"] if "seconds" in row]
    names, values = [row["name"] for row in rows], [row["seconds"] * 1e3 for row in rows]
    bars = axis.barh(names, values, color=[PEERS[name].colour if name in PEERS else "#cccccc" for name in names])
    axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_title(result["title"], fontsize=8, loc="left")
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    limit = (result.get("floor") or {}).get("seconds")
    if limit:
        axis.axvline(limit * 1e3, color="black", linewidth=0.8, linestyle="--")
