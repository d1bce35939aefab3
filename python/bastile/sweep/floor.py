"""The floor of a step: its matrix products and its attention, which Bastile leaves to others, by the profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bastile.bench.timing import seconds_of
from bastile.profile.groups import group_of


def kind_of(name: str) -> str:
    """ "attention", "products" or "rest"."""
    group = group_of(name)
    return group if group in ("attention", "products") else "rest"


def profile(step: Callable[[], object], device: torch.device, steps: int = 4) -> dict[str, float]:
    """Seconds of one step by kind: of the kernels on CUDA, of the operators on CPU; as "seconds" those of products and
    attention together, as "wall" those of the whole step, each begun and ended when the device is idle."""
    from torch.profiler import ProfilerActivity

    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        wall = sum(seconds_of(step, device) for _ in range(steps)) / steps
    found = {"products": 0.0, "attention": 0.0, "rest": 0.0}
    for event in profiler.key_averages():
        found[kind_of(event.key)] += _microseconds(event, on_cuda) / 1e6 / steps
    return {**found, "seconds": found["products"] + found["attention"], "wall": wall}


def _microseconds(event: Any, on_cuda: bool) -> float:
    """Only what ran itself: an operator's time on CUDA is that of its kernels, which are events of their own."""
    if not on_cuda:
        return event.self_cpu_time_total
    return event.self_device_time_total if event.device_type == torch.autograd.DeviceType.CUDA else 0.0
