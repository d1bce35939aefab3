"""The sweep's progress: a bar with the time that is left, and a line for each configuration that is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bastile.sweep import report
from bastile.sweep.results import Results
from bastile.sweep.run import Told, seconds_left


@contextmanager
def shown(todo: Sequence[tuple[str, list[int]]], results: Results, stream: TextIO) -> Iterator[Callable[[Told], None]]:
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

    with Progress(*columns, console=Console(file=stream)) as progress:
        before = done()
        if before:
            progress.console.print(f"{before} of {len(everything)} were measured before", highlight=False)
        task = progress.add_task("", total=len(everything), completed=before, left="")
        ended = before

        def tell(told: Told) -> None:
            nonlocal ended
            what = f"{told.implementation}, {told.length} tokens" + (f", step {told.steps}" if told.steps else "")
            if told.record is not None:
                ended += 1
                progress.console.print(report.one_line(told.record), markup=False, highlight=False, soft_wrap=True)
            progress.update(task, description=what, completed=max(done(), ended), left=left())

        def left() -> str:
            seconds = seconds_left(todo, results)
            return "" if seconds is None else f"about {timedelta(seconds=round(seconds))} left"

        yield tell
