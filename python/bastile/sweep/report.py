"""A sweep's tables, in less than 100 columns, and the sentences under them."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from bastile.sweep.implementations import IMPLEMENTATIONS
from bastile.sweep.results import FINISHED, Record, Results, largest_loss_difference

#: First what others are compared with, Bastile last.
ORDER = tuple(IMPLEMENTATIONS)
GIB = 2**30
_SHORT = {"out of memory": "OOM", "timed out": "timeout", "failed": "failed", "cannot run": "n/a"}


def title(results: Results) -> str:
    settings, machine = results.settings, results.content["machine"] or {}
    name = machine.get("name", "unknown machine")
    where = f"{settings['gpus']} x {name}" if settings["gpus"] > 1 else name
    if settings["kind"] == "curve":
        what = f"{settings['curve_steps']} steps, batch {settings['batch']}"
    else:
        what = f"batch {settings['batch']}" + (" a rank" if settings["gpus"] > 1 else "")
        what += {"step": ", whole steps", "none": ", no optimiser"}.get(settings["optimizer"], "")
    return f"{settings['model']}, {settings['dtype']}, {what}; {where}, {results.content['date'][:10]}"


def table(results: Results) -> Table:
    settings = results.settings
    whole, curve = settings["optimizer"] == "step", settings["kind"] == "curve"
    shown = Table(title=title(results), title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    columns = ["tokens", "implementation", "step\nms" if curve else "fwd+bwd\nms"]
    columns += ["step\nms"] if whole else []
    columns += ["tokens/s", "x hf", "peak\nGiB", "last\nloss" if curve else "loss"]
    columns += ["x floor"] if settings["profile_floor"] else []
    for name in columns:
        shown.add_column(name, justify="left" if name == "implementation" else "right", no_wrap=True)
    for length in results.lengths():
        floor = floor_at(results, length)
        for name in results.implementations(ORDER):
            record = results.find(name, length)
            if record is None:
                continue
            cells = [str(length), name, *_cells(record, results.find("hf", length), whole, curve)]
            cells += [_ratio(record.get("seconds"), floor)] if settings["profile_floor"] else []
            shown.add_row(*cells[: len(columns)], style="green" if name == "bastile" else "")
        shown.add_section()
    return shown


def _cells(record: Record, hf: Record | None, whole: bool, curve: bool) -> list[str]:
    if record["status"] != "ok":
        return [_SHORT[record["status"]]]
    milliseconds = [f"{record['seconds'] * 1e3:.1f}"] + ([f"{record['step_seconds'] * 1e3:.1f}"] if whole else [])
    speed = _ratio(record["tokens_per_second"], hf.get("tokens_per_second") if hf else None)
    loss = record["losses"][-1 if curve else 0]
    return [
        *milliseconds,
        f"{record['tokens_per_second']:,.0f}",
        speed,
        "-" if record["peak_bytes"] is None else f"{record['peak_bytes'] / GIB:.2f}",
        "nan" if loss is None else f"{loss:.5f}",
    ]


def _ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}"


def floor_at(results: Results, length: int) -> float | None:
    """Seconds of matrix products and attention in one step: Bastile's, for its profile holds the fewest others. It is
    their share of the profiled steps, taken of the timed ones: a chip at its power limit has another clock in each."""
    record = results.find("bastile", length)
    if not record or "floor" not in record:
        return None
    return record["seconds"] * record["floor"]["seconds"] / record["floor"]["wall"]


def one_line(record: Record) -> str:
    """A finished configuration, for a log."""
    head = f"{record['length']:>6} tokens  {record['implementation']:<15}"
    if record["status"] != "ok":
        reason = f": {record['reason']}" if record.get("reason") else ""
        return f"{head} {record['status']}{reason}"
    peak = "" if record["peak_bytes"] is None else f", peak {record['peak_bytes'] / GIB:.2f} GiB"
    return (
        f"{head} {record['seconds'] * 1e3:.1f} ms, {record['tokens_per_second']:,.0f} tokens/s{peak} "
        f"(took {record['took']:.0f} s)"
    )


def sentences(results: Results) -> list[str]:
    told: list[str] = []
    curve = results.settings["kind"] == "curve"
    # Steps of an optimiser carry rounding on from step to step; of those only the first is of one and the same model.
    found = largest_loss_difference(results, ORDER, None if curve else 1)
    if found is not None:
        difference, record, reference = found
        told.append(
            f"Largest relative difference of a loss from {reference['implementation']}'s: {difference:.1e} "
            f"({record['implementation']}" + (")" if curve else f", {record['length']} tokens)")
        )
    troubles: dict[tuple[str, str], list[str]] = {}
    for record in results.records:
        if record["status"] not in FINISHED:
            trouble = record["implementation"], f"{record['status']}: {record['reason']}"
            troubles.setdefault(trouble, []).append(str(record["length"]))
    return told + [f"{name} ({', '.join(lengths)} tokens) {what}" for (name, what), lengths in troubles.items()]


def as_json(results: Results) -> dict[str, Any]:
    """The content with what follows from its records."""
    curve = results.settings["kind"] == "curve"
    found = largest_loss_difference(results, ORDER, None if curve else 1)
    return {**results.content, "largest_relative_loss_difference": found and found[0]}
