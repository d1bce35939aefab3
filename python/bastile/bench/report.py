"""Showing results: a table a case that fits a terminal, a summary, and the dated JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bastile.bench.peers import PEERS

# Nine columns in 80 characters. "+-": half of what lies between the quartiles; "of limit": limit / time; "1st call"
# includes compiling and tuning.
_HEAD = ("", "time", "+-", "GB/s", "of limit", "x ours", "extra MiB", "1st call", "by")

_STEADY = 0.25


def printer() -> Callable[[dict[str, Any]], None]:
    """Prints a case: with rich where it is installed, else in plain text."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return lambda result: print(as_text(result), flush=True)
    console = Console()

    def show(result: dict[str, Any]) -> None:
        head, names, rows, tail = lines(result)
        console.print(Text(head, style="bold"))
        if rows:
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for i, name in enumerate(names):
                table.add_column(name, justify="right" if 0 < i < len(names) - 1 else "left", no_wrap=True)
            for row in rows:
                table.add_row(*map(Text, row), style="green" if row[0] == "bastile" else "")
            console.print(table)
        for line in tail:
            style = "red" if "MISSED" in line else "green" if "met" in line else "dim"
            console.print(Text("  " + line, style=style))
        console.print()

    return show


def as_text(result: dict[str, Any]) -> str:
    head, names, rows, tail = lines(result)
    shown = [head]
    if rows:
        table = [names, *rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(names))]
        for row in table:
            cells = [
                cell.rjust(width) if 0 < i < len(names) - 1 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            shown.append("  ".join(cells).rstrip())
    return "\n".join([*shown, *("  " + line for line in tail), ""])


def lines(result: dict[str, Any]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """A case as its headline, its table's head and rows, and the lines under it: needs and notes."""
    head = result["title"]
    limit = result.get("floor") or {}
    if limit.get("seconds"):
        what = "products alone" if limit["flops"] else "copy of as many bytes"
        head += f"; limit {duration(limit['seconds'])} ({what})"
    if "sm_mhz" in result:
        head += f"; {result['sm_mhz']:.0f} MHz, {result['watts']:.0f} W"
    ours = next((row.get("seconds") for row in result["rows"] if row["name"] == "bastile"), None)
    rows = [_cells(row, limit, ours) for row in result["rows"]]
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
    return head, tuple("TFLOP/s" if name == "GB/s" and limit.get("flops") else name for name in _HEAD), rows, tail


def _found(need: dict[str, Any]) -> str:
    """In three digits, or in as many as show that a limit is missed."""
    texts = [f"{need['found']:.{digits}g}" for digits in range(3, 7)]
    return next((text for text in texts if need["met"] or float(text) > need["limit"]), texts[-1])


def _cells(row: dict[str, Any], limit: dict[str, Any], ours: float | None) -> tuple[str, ...]:
    def shown(value: float | None, text: Callable[[float], str]) -> str:
        return "-" if value is None else text(value)

    seconds, extra = row.get("seconds"), row.get("extra_bytes")
    return (
        row["name"],
        shown(seconds, duration),
        shown(row.get("spread"), "{:.0%}".format),
        shown(row.get("rate"), lambda rate: _short(rate / (1e12 if limit.get("flops") else 1e9))),
        shown(row.get("share"), "{:.0%}".format),
        shown(seconds / ours if seconds and ours else None, "{:.2f}".format),
        shown(extra, lambda size: _short(size / 2**20)),
        shown(row.get("first_call"), "{:.1f} s".format),
        row.get("way", ""),
    )


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
    table = [("host us of a call", *names)]
    for result, found in zip(chosen, times, strict=True):
        cells = (_short(found[name] * 1e6) if name in found else "-" for name in names)
        table.append((result["op"] + (f", {result['dtype']}" if several_types else ""), *cells))
    widths = [max(len(row[i]) for row in table) for i in range(len(names) + 1)]
    return "\n".join(
        " ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    )


def summary(results: Sequence[dict[str, Any]]) -> str:
    verdicts = [need["met"] for result in results for need in result["needs"]]
    text = f"{verdicts.count(True)} needs met, {verdicts.count(False)} missed, {verdicts.count(None)} not known"
    counted = [text] if verdicts else []
    missed = [
        f"  {result['title']}: {need['text']} {_found(need)}, <= {need['limit']:.3g} needed"
        for result in results
        for need in result["needs"]
        if need["met"] is False
    ]
    broken = [
        f"  {result['title']}: {row['note']}"
        for result in results
        for row in result["rows"]
        if row["name"] == "bastile" and row.get("failed")
    ]
    broken += [f"  {result['title']}: {result['note']}" for result in results if "note" in result]
    return "\n".join(
        [*counted, *(["Missed:", *missed] if missed else []), *(["Not measured:", *broken] if broken else [])]
    )


def save(run: dict[str, Any], path: Path) -> None:
    """Whole or not at all: a run may be stopped at any time, and is saved after each case."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(run, indent=1) + "\n")
    os.replace(draft, path)
