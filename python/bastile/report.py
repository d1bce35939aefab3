"""What ran and what stepped aside: for each operator and place, how often, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from torch.compiler import is_compiling

__all__ = ["Line", "Report", "report"]

_log = logging.getLogger("bastile")


class Tally:
    """Counts one operator's calls in one place. Compiled code does not count: it is counted once, when it is traced,
    or never."""

    __slots__ = ("aside", "operator", "ran", "where")
    _all: ClassVar[dict[tuple[str, str], Tally]] = {}

    def __init__(self, operator: str, where: str) -> None:
        self.operator = operator
        self.where = where
        self.ran = 0
        self.aside: dict[str, int] = {}

    @classmethod
    def of(cls, operator: str, where: str) -> Tally:
        """The one of this place, which outlives the patch."""
        return cls._all.setdefault((operator, where), cls(operator, where))

    def count(self) -> None:
        if not is_compiling():
            self.ran += 1

    def step_aside(self, reason: str, is_usual: bool = False) -> None:
        """Counts a call that the original code served. is_usual: it is by the operator's purpose, as evaluation is for
        a loss without logits; anything else is a warning, said once."""
        if is_compiling():
            return
        times = self.aside.get(reason, 0)
        self.aside[reason] = times + 1
        if times == 0:
            level = logging.INFO if is_usual else logging.WARNING
            _log.log(level, "%s steps aside in %s: %s; the original code runs", self.operator, self.where, reason)


@dataclass(frozen=True)
class Line:
    """One operator in one place."""

    operator: str
    where: str  # the module's class, or the function
    ran: int  # calls that the operator served
    aside: dict[str, int]  # reason -> calls that the original code served


@dataclass(frozen=True)
class Report:
    """What `report` returns: lines, and as text a table of them: how often each operator ran in each place, and below
    how often the original code ran there instead, and why."""

    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()  # what else is worth knowing, a sentence each

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def ran(self, operator: str) -> int:
        """How often the operator ran, in all places."""
        return sum(line.ran for line in self.lines if line.operator == operator)

    def __str__(self) -> str:
        if not self.lines:
            return "Bastile: no operator has been called in a model yet"
        told = [f"{'operator':28}{'calls':>8}  where"]
        for line in self.lines:
            told.append(f"{line.operator:28}{line.ran:>8}  {line.where}")
            told += [f"{'':28}{times:>8}  stepped aside: {reason}" for reason, times in line.aside.items()]
        told += [f"note: {note}" for note in self.notes]
        return "\n".join(told)


@contextmanager
def unreported() -> Iterator[None]:
    """What runs or steps aside within is neither counted nor said."""
    before = {key: (tally.ran, dict(tally.aside)) for key, tally in Tally._all.items()}
    _log.disabled = True
    try:
        yield
    finally:
        _log.disabled = False
        for key, tally in Tally._all.items():
            tally.ran, tally.aside = before.get(key, (0, {}))


_noting: list[Callable[[], str | None]] = []


def noting(function: Callable[[], str | None]) -> Callable[[], str | None]:
    """Has this function asked for a sentence whenever there is a report; None: there is nothing to say."""
    _noting.append(function)
    return function


def report(reset: bool = False) -> Report:
    """How often each operator has run in each class of modules since the process began, or the last reset, and how
    often the original code ran instead, with the reasons. Each reason is also said once, through the logger "bastile".
    Notes say what else is worth knowing: that gradient checkpointing, which costs time, is on though a step would fit
    into memory without it.

    Calls of single modules of bastile.ops, and calls inside code that torch.compile has compiled, are not counted.

    Args:
        reset: begin to count anew.
    """
    tallies = [tally for tally in Tally._all.values() if tally.ran or tally.aside]
    lines = tuple(Line(t.operator, t.where, t.ran, dict(t.aside)) for t in tallies)
    if reset:
        for tally in tallies:
            tally.ran = 0
            tally.aside.clear()
    return Report(lines, tuple([note for ask in _noting if (note := ask()) is not None]))
