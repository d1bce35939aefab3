"""Runs training steps: some to warm up, some timed as they are, one under torch.profiler."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bastile.bench.timing import begin_peak, peak_bytes, seconds_of, synchronize
from bastile.profile.groups import GROUPS, REGION, group_of

_PYTHON = "(Python between operators)"
_DRIVER_CALL = re.compile(r"(cuda|cu|hip)[A-Z]")


def measure(
    step: Callable[[], torch.Tensor], device: torch.device, steps: int, marks: Callable[[], AbstractContextManager]
) -> tuple[dict[str, Any], Any]:
    """What the steps cost, and the profiler of one more step. The profiler slows the host, not the kernels: so the
    time of a step is that of steps without it, and the kernels' share of it is taken from both."""
    loss = float(step())
    for _ in range(2):  # the optimiser's state, allocators, compiled kernels
        step()
    if device.type == "cuda":
        begin_peak(device)

    def timed() -> None:
        for _ in range(steps):
            step()

    seconds = seconds_of(timed, device) / steps
    peak = peak_bytes(device) if device.type == "cuda" else None
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with marks(), profile(activities=activities, acc_events=True) as profiler:
        step()
        synchronize(device)
    return {
        "first_loss": loss,
        "seconds_per_step": seconds,
        "peak_memory": peak,
        **summary(profiler.events(), device.type, seconds),
    }, profiler


def summary(events: Iterable[Any], device: str, step_seconds: float) -> dict[str, Any]:
    """Kernels (on CPU: operators) with their times in seconds, the groups' sums, and the part of the step in which the
    GPU was at work (None on a CPU)."""
    events = list(events)
    find = _Contexts(events)
    rows: dict[tuple[str, str], list[float]] = {}

    def add(name: str, microseconds: float, context: list[str], calls: int = 1) -> None:
        row = rows.setdefault((name, group_of(name, context)), [0, 0.0])
        row[0] += calls
        row[1] += microseconds * 1e-6

    host = [event for event in events if event.device_type == DeviceType.CPU]
    busy = None
    if device == "cpu":
        for event in host:
            marks_only = event.name.startswith((REGION, "autograd::engine", "Optimizer."))
            if event.self_cpu_time_total > 0:
                name = _PYTHON if marks_only else event.name
                add(name, event.self_cpu_time_total, find.context(event), 0 if marks_only else 1)
    else:
        # A region shows among the device's events too, from its first kernel to its last.
        launched = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
        own = _Own(launched)
        # The profiler can show a kernel below several events, for operators and calls of the driver are numbered apart:
        # it counts once, for an operator where there is one.
        for event in sorted(host, key=lambda event: bool(_DRIVER_CALL.match(event.name))):
            for kernel in event.kernels:
                if (microseconds := own.take(kernel.name, kernel.duration)) is not None:
                    add(kernel.name, microseconds, find.context(event))
        for name, microseconds in own.left():  # launched by no operator that the profiler saw
            add(name, microseconds, [])
        busy = min(1.0, covered((e.time_range.start, e.time_range.end) for e in launched) * 1e-6 / step_seconds)
    kernels = [
        {"name": name, "group": group, "calls": calls, "seconds": seconds}
        for (name, group), (calls, seconds) in sorted(rows.items(), key=lambda item: -item[1][1])
    ]
    return {
        "kernels": kernels,
        "groups": {group: sum(k["seconds"] for k in kernels if k["group"] == group) for group in GROUPS},
        "busy": busy,
    }


class _Own:
    """The part of each kernel's time in which none before it ran: a dependent launch begins before the kernel that it
    waits for has ended."""

    def __init__(self, launched: list[Any]) -> None:
        self._times: dict[tuple[str, int], list[float]] = {}
        launched = sorted(launched, key=lambda event: event.time_range.start)
        parts = _new_parts((e.time_range.start, e.time_range.end) for e in launched)
        for event, own in zip(launched, parts, strict=True):
            self._times.setdefault(self._key(event.name, event.time_range.elapsed_us()), []).append(own)

    @staticmethod
    def _key(name: str, microseconds: float) -> tuple[str, int]:
        return name, round(1000 * microseconds)

    def take(self, name: str, microseconds: float) -> float | None:
        """Of a kernel of that name and length, once; None where all have been taken."""
        times = self._times.get(self._key(name, microseconds))
        return times.pop() if times else None

    def left(self) -> Iterable[tuple[str, float]]:
        return ((name, own) for (name, _), times in self._times.items() for own in times)


class _Contexts:
    """What enclosed each event: operators and regions, innermost first, then those of the forward operator.

    An event of a backward pass carries the number that its forward operator had, and the thread that ran it."""

    def __init__(self, events: list[Any]) -> None:
        # Several operators can carry a number; the last one to begin is the one that recorded the gradient's function.
        self.forward = {
            (event.thread, event.sequence_nr): event
            for event in events
            if event.device_type == DeviceType.CPU and event.sequence_nr >= 0 and not event.fwd_thread
        }

    def context(self, event: Any) -> list[str]:
        names, linked = [], None
        while event is not None:
            names.append(event.name)
            if linked is None and event.fwd_thread and event.sequence_nr >= 0:
                linked = self.forward.get((event.fwd_thread, event.sequence_nr))
            event = event.cpu_parent
        while linked is not None:
            names.append(linked.name)
            linked = linked.cpu_parent
        return names


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of these (begin, end)."""
    return sum(_new_parts(sorted(intervals)))


def _new_parts(intervals: Iterable[tuple[float, float]]) -> Iterable[float]:
    """The length of each of these (begin, end), sorted by begin, that none before it covers."""
    reached = float("-inf")
    for begin, end in intervals:
        yield max(0.0, end - max(begin, reached))
        reached = max(reached, end)


def write_trace(profilers: dict[str, Any], path: Path) -> None:
    """One Chrome trace of several profiled steps, below each other and each beginning at 0."""
    merged: dict[str, Any] = {}
    for index, (name, profiler) in enumerate(profilers.items()):
        part = path.with_name(f"{path.name}.{name}.part")
        try:
            profiler.export_chrome_trace(str(part))
            trace = json.loads(part.read_text())
        finally:
            part.unlink(missing_ok=True)
        events = trace.pop("traceEvents")
        origin = min(event["ts"] for event in events if event.get("ph") == "X")
        for event in events:
            if "ts" in event:
                event["ts"] -= origin
            if isinstance(event.get("pid"), int):
                event["pid"] += index * 10_000_000  # more than Linux has process ids
            else:
                event["pid"] = f"{name}: {event.get('pid')}"
            if isinstance(event.get("id"), int):
                event["id"] += index << 40
            if event.get("name") == "process_name":
                event["args"]["name"] = f"{name}: {event['args']['name']}"
        merged.setdefault("traceEvents", []).extend(events)
        merged = {**trace, **merged}
    path.write_text(json.dumps(merged))
