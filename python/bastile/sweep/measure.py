"""One length of one implementation: steps, their times, memory and losses."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from bastile.bench.timing import begin_peak, peak_bytes, synchronize
from bastile.sweep import floor

_LR = 1e-5


def optimizer_for(model: nn.Module, kind: str) -> torch.optim.Optimizer | None:
    """Fused AdamW, or None where `kind` is "none". Where it is "states" its steps leave the weights as they are."""
    if kind == "none":
        return None
    lr = _LR if kind == "step" else 0.0
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)


def measure(
    model: nn.Module,
    ids: torch.Tensor,
    optimizer: torch.optim.Optimizer | None,
    plan: dict[str, Any],
    together: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Medians of plan["repeats"] steps after plan["warm_up"] others.

    A step is forward and backward, begun when the device is idle and ended when it is idle again. Its peak memory
    holds weights, gradients, activations and, unless plan["optimizer"] is "none", the optimiser's states, as in
    training. Where that is "step", the whole step with the optimiser is timed too. `together` is called before each
    step: processes that work together begin it together."""
    device = ids.device
    whole = plan["optimizer"] == "step"
    losses: list[torch.Tensor] = []
    seconds: list[float] = []
    step_seconds: list[float] = []
    peaks: list[int | None] = []

    def forward_backward() -> None:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())

    def update() -> None:
        if optimizer is not None:
            optimizer.step()

    def clear() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    for turn in range(plan["warm_up"]):
        forward_backward()
        if whole or turn == 0:  # the first one makes the states
            update()
        clear()
    before = begin_peak(device)
    for _ in range(plan["repeats"]):
        together()
        synchronize(device)
        begin = time.perf_counter()
        forward_backward()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
        peaks.append(peak_bytes(device))
        if whole:
            update()
            synchronize(device)
            step_seconds.append(time.perf_counter() - begin)
        clear()
        begin_peak(device)
    found: dict[str, Any] = {
        "seconds": median(seconds),
        "samples": seconds,
        "tokens_per_second": ids.numel() / median(step_seconds if whole else seconds),
        "before_bytes": before,
        "peak_bytes": None if before is None or None in peaks else max(peak for peak in peaks if peak is not None),
        "losses": torch.stack(losses).float().tolist(),
    }
    if whole:
        found |= {"step_seconds": median(step_seconds), "step_samples": step_seconds}
    if plan["profile_floor"] and plan["implementation"] == "bastile":

        def once() -> None:
            forward_backward()
            clear()

        found["floor"] = floor.profile(once, device)
    return found
