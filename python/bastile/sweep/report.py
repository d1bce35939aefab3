"""A sweep's progress, its tables in less than 100 columns, the sentences under them, and its plots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bastile.cli.shown import GIB, draw_losses, number, plot, ratio
from bastile.peers.models import IMPLEMENTATIONS
from bastile.sweep.results import FINISHED, Record, Results, largest_loss_difference
from bastile.sweep.run import Told, seconds_left

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
        if settings.get("trainer"):
            what += ", steps of TRL's SFT" + ", gradient checkpointing" * settings["checkpointing"]
            what += " (inputs in the host's memory)" * settings.get("offload_checkpoints", False)
    if settings.get("lora"):
        what += f", LoRA of rank {settings['lora']}" + ", base in NF4" * settings["load_in_4bit"]
    return f"{settings['model']}, {settings['dtype']}, {what}; {where}, {results.content['date'][:10]}"


def table(results: Results) -> Table:
    settings = results.settings
    whole, curve = settings["optimizer"] == "step", settings["kind"] == "curve"
    shown = Table(title=title(results), title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    columns = ["tokens", "implementation", "step\nms" if curve or settings.get("trainer") else "fwd+bwd\nms"]
    columns += ["step\nms"] if whole else []
    columns += ["tokens/s", "x hf", "peak\nGiB", "last\nloss" if curve else "loss"]
    columns += ["x floor", "idle\n%"] if settings["profile_floor"] else []
    for name in columns:
        shown.add_column(name, justify="left" if name == "implementation" else "right", no_wrap=True)
    for length in results.lengths():
        floor = floor_at(results, length)
        for name in results.implementations():
            record = results.find(name, length)
            if record is None:
                continue
            cells = [str(length), name, *_cells(record, results.find("hf", length), whole, curve)]
            if settings["profile_floor"] and record["status"] == "ok":
                cells += [ratio(record["seconds"], floor), _idle(record)]
            shown.add_row(*cells[: len(columns)], style="green" if name == "bastile" else "")
        shown.add_section()
    return shown


def _cells(record: Record, hf: Record | None, whole: bool, curve: bool) -> list[str]:
    if record["status"] != "ok":
        return [_SHORT[record["status"]]]
    milliseconds = [f"{record['seconds'] * 1e3:.1f}"] + ([f"{record['step_seconds'] * 1e3:.1f}"] if whole else [])
    speed = ratio(record["tokens_per_second"], hf.get("tokens_per_second") if hf else None)
    loss = record["losses"][-1 if curve else 0]
    return [
        *milliseconds,
        f"{record['tokens_per_second']:,.0f}",
        speed,
        number(record["peak_bytes"], lambda peak: f"{peak / GIB:.2f}"),
        "nan" if loss is None else f"{loss:.5f}",
    ]


def host_table(results: Results) -> Table | None:
    """What the host and the device have of a step each; None where no device was profiled."""
    profiled = [record for record in results.records if record.get("device")]
    if not profiled:
        return None
    shown = Table(title="Host and device", title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("tokens", "implementation", "host\nms", "kernels\nms", "kernels,\ncopies", "idle\n%"):
        shown.add_column(name, justify="left" if name == "implementation" else "right", no_wrap=True)
    for record in sorted(profiled, key=lambda record: record["length"]):
        device = record["device"]
        times = [
            number(seconds and seconds * 1e3, ".1f") for seconds in (record.get("host_seconds"), device["seconds"])
        ]
        count = number(device.get("launches"), ",.0f")
        shown.add_row(str(record["length"]), record["implementation"], *times, count, _idle(record))
    return shown


def _idle(record: Record) -> str:
    """The share of a step in which the device does nothing, in per cent; files of earlier versions have none."""
    return number((record.get("device") or {}).get("idle"), lambda share: f"{share * 100:.0f}")


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
    found = largest_loss_difference(results, IMPLEMENTATIONS, None if curve else 1)
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
    found = largest_loss_difference(results, IMPLEMENTATIONS, None if curve else 1)
    return {**results.content, "largest_relative_loss_difference": found and found[0]}


# ---- progress --------------------------------------------------------------------------------------------------------


@contextmanager
def progress(todo: Sequence[tuple[str, list[int]]], results: Results) -> Iterator[Callable[[Told], None]]:
    """A bar with the time that is left, and a line for each configuration that is done."""
    columns = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    ]
    everything = [(name, length) for name, lengths in todo for length in lengths]

    def done() -> int:
        return sum(results.is_finished(name, length) for name, length in everything)

    with Progress(*columns, console=Console()) as bars:
        before = done()
        if before:
            bars.console.print(f"{before} of {len(everything)} were measured before", highlight=False)
        task = bars.add_task("", total=len(everything), completed=before, left="")
        ended = before

        def tell(told: Told) -> None:
            nonlocal ended
            what = f"{told.implementation}, {told.length} tokens" + (f", step {told.steps}" if told.steps else "")
            if told.record is not None:
                ended += 1
                bars.console.print(one_line(told.record), markup=False, highlight=False, soft_wrap=True)
            bars.update(task, description=what, completed=max(done(), ended), left=left())

        def left() -> str:
            seconds = seconds_left(todo, results)
            return "" if seconds is None else f"about {timedelta(seconds=round(seconds))} left"

        yield tell


# ---- plots -----------------------------------------------------------------------------------------------------------


def draw(results: Results, stem: Path) -> list[Path]:
    """Writes <stem>-throughput.png, <stem>-latency.png and <stem>-memory.png, or for loss curves <stem>.png."""
    if results.settings["kind"] == "curve":
        return [_curves(results, stem.with_name(f"{stem.name}.png"))]
    whole = results.settings["optimizer"] == "step"
    time = "step_seconds" if whole else "seconds"
    what = "whole step" if whole or results.settings.get("trainer") else "forward + backward"
    panels: list[tuple[str, str, Callable[[Record], float | None], bool]] = [
        ("throughput", "tokens/s", lambda r: r["tokens_per_second"], False),
        ("latency", f"ms, {what}", lambda r: r[time] * 1e3, True),
        ("memory", "peak GiB" + (" a GPU" if results.settings["gpus"] > 1 else ""), _gib, False),
    ]
    return [
        _lines(results, stem.with_name(f"{stem.name}-{name}.png"), label, value, logarithmic)
        for name, label, value, logarithmic in panels
    ]


def _gib(record: Record) -> float | None:
    return None if record["peak_bytes"] is None else record["peak_bytes"] / GIB


def _lines(
    results: Results, path: Path, label: str, value: Callable[[Record], float | None], logarithmic: bool
) -> Path:
    with plot(path, figsize=(8, 4.8)) as axes:
        for name in results.implementations():
            ran = [(length, results.find(name, length)) for length in results.lengths()]
            found = [(length, value(record)) for length, record in ran if record and record["status"] == "ok"]
            points = [(length, figure) for length, figure in found if figure is not None]
            if not points:
                continue
            colour, too_long = IMPLEMENTATIONS[name].colour, results.too_long(name)
            shown = name if too_long is None else f"{name} (out of memory at {too_long})"
            width = 2.2 if name == "bastile" else 1.4
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=shown, linewidth=width, markersize=4)
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
        axes.set_title(title(results), fontsize=9)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    return path


def _curves(results: Results, path: Path) -> Path:
    ran = [r for name in results.implementations() for r in results.records if r["implementation"] == name]
    curves = [
        (
            f"{record['implementation']}: {record['tokens_per_second']:,.0f} tokens/s",
            IMPLEMENTATIONS[record["implementation"]].colour,
            record["losses"],
        )
        for record in ran
        if record["status"] == "ok"
    ]
    draw_losses(path, title(results), curves)
    return path
