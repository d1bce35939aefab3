"""How commands show what they found: the words for figures, tables and plots, and what a result says of its making."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bastile.peers import versions

GIB, MIB = 2**30, 2**20
#: The two runs that `demo`, `finetune` and `profile` compare.
TITLES = {"stock": "Stock Transformers", "bastile": "Bastile"}


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def about(command: str) -> dict[str, Any]:
    """When, by what command and with what a result was made."""
    return {"date": now(), "command": command, "versions": versions()}


# ---- words -----------------------------------------------------------------------------------------------------------


def number(value: float | None, form: str | Callable[[float], str]) -> str:
    """As format() or a function writes it; "-" for what was not measured, or was not a number."""
    if value is None:
        return "-"
    return format(value, form) if isinstance(form, str) else form(value)


def ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}"


def bytes_text(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,), gap: str = "  ") -> list[str]:
    """A table as lines of text, its columns as wide as what they hold; `left`: those that begin at their left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# ---- tables and plots ------------------------------------------------------------------------------------------------


def table(title: str, left: Sequence[str], right: Sequence[str], **options: Any) -> Any:
    """A table of rich with these columns, those of figures at the right."""
    from rich.table import Table

    made = Table(*left, title=title or None, **options)
    for name in right:
        made.add_column(name, justify="right")
    return made


@contextmanager
def plot(path: Path, rows: int = 1, **options: Any) -> Iterator[Any]:
    """The axes of a new figure, or a list of them where there are several rows; written to the path as a PNG.
    ImportError where matplotlib is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, layout="constrained", **options)
    yield axes
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_losses(path: Path, title: str, curves: Sequence[tuple[str, str | None, Sequence[float | None]]]) -> None:
    """Of each run its label, its colour and its losses (None: not a number, a gap): the losses above, their difference
    from the first run's below, for the curves lie upon each other."""
    with plot(path, 2, figsize=(8, 6.4), height_ratios=(3, 1), sharex=True) as (above, below):
        first: list[float] = []
        for place, (label, colour, losses) in enumerate(curves):
            values = [math.nan if loss is None else loss for loss in losses]
            steps = range(1, len(values) + 1)
            # The first ones are drawn broad, so that those upon them do not hide them.
            above.plot(steps, values, color=colour, label=label, linewidth=1 + 1.2 * (len(curves) - 1 - place))
            first = first or values
            if place:
                differences = [a - b for a, b in zip(values, first, strict=False)]
                below.plot(steps[: len(differences)], differences, color=colour, linewidth=1)
        above.set_ylabel("loss")
        above.set_title(title, fontsize=9)
        below.set_ylabel(f"minus {curves[0][0].partition(':')[0]}'s" if curves else "")
        below.set_xlabel("step")
        below.grid(alpha=0.3)
        if curves:
            above.legend(fontsize=8)
