"""Clocks. Every figure is a median of rounds in which the contenders take turns, so that drift meets them all.

Device time on CUDA, by one of two ways, named with each figure:
    graph   a CUDA graph that holds several calls, replayed: the sum of the kernels, free of the host's launch gaps;
    queue   calls queued behind a long kernel and timed between two events: for calls of several milliseconds, and for
            what cannot be captured. Where the host fell behind the device all the same, the figure says so.
On CPU, wall: the wall clock over a block of calls.

Calls go round a set of copies of the inputs that together exceed three times the last cache, and their results stay
alive for one turn of it, so that neither is found in the cache. Before each sample the inputs are restored: some
contenders write over them.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from bastile.bench.operators import Tensors

Call = Callable[[Tensors], tuple[torch.Tensor, ...]]

_GRAPH_BELOW = 3e-3  #: seconds; a longer call hides its launches, and a graph would hold on to its memory
_GRAPH_SECONDS = 8e-3  #: of one replay, at the speed of calls that wait: well above the resolution of events, 0.5 us
_LAUNCH_SECONDS = 1e-3  #: ample for the launch of a graph, which would else count as device time
_QUEUE_SECONDS = 40e-3
_WALL_SECONDS = 40e-3
_COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}  #: far more than a cache holds
_MOST_SETS = 32
_MOST_SLEEP = 0.5
_BEHIND = "the host did not stay ahead (it waits, or the queue was full): gaps may be included"


class Rotation:
    """Copies of one set of inputs; those in `leaves` ask for gradients."""

    def __init__(self, pristine: Tensors, leaves: tuple[str, ...], device: torch.device):
        self._pristine = pristine
        size = sum(t.numel() * t.element_size() for t in pristine.values())
        wanted = min(_MOST_SETS, 3 * _cache_bytes(device) // size + 1)
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            wanted = min(wanted, max(1, free // (4 * size)))
        self.sets = [{name: t.clone() for name, t in pristine.items()} for _ in range(wanted)]
        for tensors in self.sets:
            for name in leaves:
                tensors[name].requires_grad_()

    def restore(self) -> None:
        with torch.no_grad():
            for tensors in self.sets:
                for name, tensor in tensors.items():
                    tensor.copy_(self._pristine[name])


def _cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        return 32 << 20


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """The wall time of one call and of the device's work for it."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin


# ---- device time -----------------------------------------------------------------------------------------------------


def between_events(work: Callable[[], object]) -> float:
    """Seconds from one event of CUDA's current stream to another, with what the work queues between them."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    work()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1e3


class Clock(Protocol):
    way: str
    note: str

    def sample(self) -> float:
        """Restores the inputs; seconds of one call."""


def _keep_one_turn(call: Call, rotation: Rotation, calls: int) -> list[Any]:
    """Runs that many calls round the sets. A result is freed when its set comes round again, before the call."""
    kept: list[Any] = [None] * len(rotation.sets)
    for i in range(calls):
        place = i % len(kept)
        kept[place] = None
        kept[place] = call(rotation.sets[place])
    return kept


class _Graph:
    way, note = "graph", ""

    def __init__(self, call: Call, rotation: Rotation, expected: float):
        sets = len(rotation.sets)
        turns = max(1, round(_GRAPH_SECONDS / max(expected, 1e-6) / sets))
        self._calls = sets * min(turns, max(1, 400 // sets))
        self._rotation = rotation
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what a capture must not do for the first time: modules, workspaces, autotuning
            _keep_one_turn(call, rotation, min(self._calls, 3))
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side):
            kept = _keep_one_turn(call, rotation, self._calls)
        del kept

    def sample(self) -> float:
        self._rotation.restore()
        torch.cuda._sleep(int(_LAUNCH_SECONDS * _cycles_per_second()))
        return between_events(self._graph.replay) / self._calls


class _Queue:
    way = "queue"

    def __init__(self, call: Call, rotation: Rotation, expected: float, note: str = ""):
        self.note = note
        self._call, self._rotation = call, rotation
        self._calls = max(1, min(50, round(_QUEUE_SECONDS / max(expected, 1e-6))))
        self._host = 0.0  # seconds that queueing took, at most

    def _queue(self) -> list[Any]:
        begin = time.perf_counter()
        kept = _keep_one_turn(self._call, self._rotation, self._calls)
        self._queued = time.perf_counter() - begin
        return kept

    def sample(self) -> float:
        # Memory first: the caching allocator may have given this contender's blocks to another one.
        self._rotation.restore()
        self._queue()
        self._host = max(self._host, self._queued)
        torch.cuda.synchronize()
        sleep = min(_MOST_SLEEP, 1.5 * self._host + 1e-3)
        self._rotation.restore()
        torch.cuda._sleep(int(sleep * _cycles_per_second()))
        kept: list[Any] = []
        seconds = between_events(lambda: kept.extend(self._queue()))
        if self._queued > sleep and _BEHIND not in self.note:
            self.note = "; ".join(filter(None, (self.note, _BEHIND)))
        return seconds / self._calls


@functools.cache
def _cycles_per_second() -> float:
    """How fast the kernel behind torch.cuda._sleep counts."""
    cycles = 20_000_000
    between_events(lambda: torch.cuda._sleep(cycles))  # warms up
    return cycles / between_events(lambda: torch.cuda._sleep(cycles))


class _Wall:
    way, note = "wall", ""

    def __init__(self, call: Call, rotation: Rotation, expected: float):
        self._call, self._rotation = call, rotation
        self._calls = max(1, min(200, round(_WALL_SECONDS / max(expected, 1e-6))))

    def sample(self) -> float:
        self._rotation.restore()
        # How much memory the first calls must ask of the system depends on who ran before.
        _keep_one_turn(self._call, self._rotation, self._calls)
        begin = time.perf_counter()
        kept = _keep_one_turn(self._call, self._rotation, self._calls)
        seconds = (time.perf_counter() - begin) / self._calls
        del kept
        return seconds


def _what_waits(once: Callable[[], None]) -> str | None:
    """What a call waits for the device with, or None. Asked before a capture, because one that fails leaves PyTorch's
    random generator believing that it still runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            once()
        except RuntimeError as error:
            return (str(error).strip().splitlines() or [""])[0][:60]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return None


def clock_for(call: Call, rotation: Rotation, device: torch.device, *, capture: bool = True) -> Clock:
    """A warmed-up clock for these calls; on CUDA a graph, if `capture` and the call allow one."""

    def once() -> None:
        call(rotation.sets[0])

    expected = min(seconds_of(once, device) for _ in range(3))
    if device.type != "cuda":
        return _Wall(call, rotation, expected)
    if capture and expected < _GRAPH_BELOW:
        waits = _what_waits(once)
        if waits is not None:
            return _Queue(call, rotation, expected, f"not capturable ({waits})")
        try:
            return _Graph(call, rotation, expected)
        except Exception as error:  # whatever a foreign library raises when it is captured
            torch.cuda.synchronize()
            first = (str(error).strip().splitlines() or [""])[0][:60]
            return _Queue(call, rotation, expected, f"not capturable ({type(error).__name__}: {first})")
    return _Queue(call, rotation, expected)


# ---- the host's time, memory, the copy -------------------------------------------------------------------------------


def host_seconds(call: Call, tensors: Tensors, device: torch.device, calls: int = 50) -> float:
    """Wall time of one call without waiting for the device, over a block of calls; short enough that the queue of
    launches never fills."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call(tensors)
    seconds = (time.perf_counter() - begin) / calls
    synchronize(device)
    return seconds


def extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """The most memory that a call, already run once, held at one time beyond what there was before it, results
    included. On CUDA by PyTorch's allocator. On CPU by the process's resident pages, which count every allocator's,
    to about 0.3 MiB; None where the system cannot reset that peak (only Linux can)."""
    before = begin_peak(device)
    call()
    peak = peak_bytes(device)
    return None if before is None or peak is None else max(0, peak - before)


def cuda_peak(device: torch.device) -> int:
    """PyTorch's peak, and what CUDA graphs keep for their replays in pools of their own, which it counts as free: no
    more than the driver ever gave, for graphs that were captured meanwhile are in both."""
    index = torch.cuda.current_device() if device.index is None else device.index
    pools = [
        s for s in torch.cuda.memory_snapshot() if s.get("device", index) == index and s["segment_pool_id"] != (0, 0)
    ]
    kept = sum(s["total_size"] - s["active_size"] for s in pools)
    return min(torch.cuda.max_memory_allocated(device) + kept, torch.cuda.max_memory_reserved(device))


def begin_peak(device: torch.device) -> int | None:
    """The bytes held now, from which on peak_bytes counts; None where the system cannot tell a new peak from an old
    one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if sys.platform != "linux":
        return None
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that malloc holds back would hide what a call takes
        Path("/proc/self/clear_refs").write_text("5")
        return held("VmRSS")
    except (OSError, AttributeError):
        return None


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes held at one time since begin_peak; on CPU the process's resident pages."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return cuda_peak(device)
    try:
        return held("VmHWM")
    except OSError:
        return None


def held(key: str) -> int:
    """Bytes that Linux counts for this process: VmRSS, VmHWM (the most of it so far), VmData."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {key}")


def copy_speed(device: torch.device) -> float:
    """Bytes a second of a large copy within the device's memory, read plus written: the ceiling of what moves bytes."""
    size = _COPY_BYTES[device.type]
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    seconds = [between_events(copy) if device.type == "cuda" else seconds_of(copy, device) for _ in range(9)]
    return 2 * size / median(seconds[2:])
