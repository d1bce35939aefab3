"""The file that a sweep writes as it goes: its settings and a record of each configuration. A sweep that was stopped
reads it again and does what is left."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bastile.cli.errors import UsageError
from bastile.cli.files import read_results, write_json
from bastile.cli.shown import now
from bastile.peers.models import IMPLEMENTATIONS

Record = dict[str, Any]

#: What need not be tried again. A crash may have been the machine's, and what was missing may have been installed.
FINISHED = ("ok", "out of memory")


class Results:
    def __init__(self, path: Path, content: dict[str, Any]):
        self.path, self.content = path, content
        self.machine_is_checked = False  #: asked of the first worker of each run, for asking takes time

    @classmethod
    def opened(cls, path: Path, settings: dict[str, Any], fresh: bool) -> Results:
        """Those at the path, if they were made with the same settings; new ones if there is no file or `fresh`."""
        if fresh or not path.exists():
            return cls(path, {"date": now(), "settings": settings, "machine": None, "records": []})
        results = cls.shown(path)
        before = results.content["settings"]
        for key in sorted(before.keys() | settings.keys()):
            if before.get(key) != settings.get(key):
                raise UsageError(
                    f"{path} was made with other settings ({key}: {before.get(key)!r} then, {settings.get(key)!r} "
                    f"now): --fresh starts it over, --out FOLDER starts another"
                )
        return results

    @classmethod
    def shown(cls, path: Path) -> Results:
        return cls(path, read_results(path, "sweep", {"date", "settings", "records"}))

    @property
    def records(self) -> list[Record]:
        return self.content["records"]

    @property
    def settings(self) -> dict[str, Any]:
        return self.content["settings"]

    def set_machine(self, machine: dict[str, Any]) -> None:
        if self.content["machine"] not in (None, machine):
            raise UsageError(
                f"{self.path} was made on another machine ({self.content['machine']['name']}; this one is "
                f"{machine['name']}): --fresh starts it over, --out FOLDER starts another"
            )
        self.content["machine"] = machine
        self.machine_is_checked = True

    def add(self, record: Record) -> None:
        """Takes the place of an earlier record of the same configuration. Saved at once."""
        old = self.find(record["implementation"], record["length"])
        if old is not None:
            self.records.remove(old)
        self.records.append({**record, "date": now()})
        write_json(self.path, self.content)

    def find(self, implementation: str, length: int) -> Record | None:
        for record in self.records:
            if record["implementation"] == implementation and record["length"] == length:
                return record
        return None

    def is_finished(self, implementation: str, length: int) -> bool:
        record = self.find(implementation, length)
        return record is not None and record["status"] in FINISHED

    def too_long(self, implementation: str) -> int | None:
        """The shortest length that is known not to fit into memory."""
        lengths = [
            record["length"]
            for record in self.records
            if record["implementation"] == implementation and record["status"] == "out of memory"
        ]
        return min(lengths, default=None)

    def lengths(self) -> list[int]:
        return sorted({record["length"] for record in self.records})

    def implementations(self) -> list[str]:
        present = {record["implementation"] for record in self.records}
        return [name for name in IMPLEMENTATIONS if name in present]


def loss_difference(record: Record, reference: Record, steps: int | None = None) -> float:
    """The largest relative difference of the losses of the first `steps` steps (None: of all). Infinite where one is
    not a number, for such losses agree with nothing."""
    worst = 0.0
    for ours, theirs in zip(record["losses"][:steps], reference["losses"][:steps], strict=True):
        if ours is None or theirs is None or ours != ours or theirs != theirs:
            return float("inf")
        worst = max(worst, abs(ours - theirs) / abs(theirs))
    return worst


def largest_loss_difference(
    results: Results, order: Iterable[str], steps: int | None
) -> tuple[float, Record, Record] | None:
    """Of all records: the difference from the first implementation in `order` that ran at the same length, the record,
    and that other one. None where there was nothing to compare."""
    order = list(order)
    found = []
    for length in results.lengths():
        ran = [record for name in order if (record := results.find(name, length)) and record["status"] == "ok"]
        found += [(loss_difference(record, ran[0], steps), record, ran[0]) for record in ran[1:]]
    return max(found, key=lambda one: one[0], default=None)
