"""One length of one implementation: steps with their times, memory and losses; or a training, for its loss curve."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from bastile.bench.timing import begin_peak, peak_bytes, seconds_of, synchronize
from bastile.profile.groups import group_of
from bastile.profile.record import covered

_LR = 1e-5
_CURVE_LR = 3e-4
#: Steps between two looks at the losses: waiting for each one would hide how well steps are queued.
_LOOK = 10


def optimizer_for(model: nn.Module, kind: str) -> torch.optim.Optimizer | None:
    """Fused AdamW, or None where `kind` is "none". Where it is "states" its steps leave the weights as they are."""
    if kind == "none":
        return None
    lr = _LR if kind == "step" else 0.0
    return torch.optim.AdamW(trained(model), lr=lr, weight_decay=0.0, fused=True)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def forward_backward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The loss; each token is a label. Gradients are left where they are."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach().clone()  # its memory may be a CUDA graph's


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


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
    training. Where that is "step", the whole step with the optimiser is timed too. host_seconds is the time until all
    of that is queued. `together` is called before each step: processes that work together begin it together."""
    device = ids.device
    whole = plan["optimizer"] == "step"
    losses: list[torch.Tensor] = []
    seconds: list[float] = []
    step_seconds: list[float] = []
    host: list[float] = []
    peaks: list[int | None] = []

    def update() -> None:
        if optimizer is not None:
            optimizer.step()

    for turn in range(plan["warm_up"]):
        synchronize(device)  # as below: what is chosen by how long steps take is chosen here
        losses.append(forward_backward(model, ids))
        if whole or turn == 0:  # the first one makes the states
            update()
        clear(model)
    before = begin_peak(device)
    for _ in range(plan["repeats"]):
        together()
        synchronize(device)
        begin = time.perf_counter()
        losses.append(forward_backward(model, ids))
        host.append(time.perf_counter() - begin)
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
        peaks.append(peak_bytes(device))
        if whole:
            resumed = time.perf_counter()
            update()
            host[-1] += time.perf_counter() - resumed
            synchronize(device)
            step_seconds.append(time.perf_counter() - begin)
        clear(model)
        begin_peak(device)
    found: dict[str, Any] = {
        "seconds": median(seconds),
        "samples": seconds,
        "host_seconds": median(host),
        "tokens_per_second": ids.numel() / median(step_seconds if whole else seconds),
        "before_bytes": before,
        "peak_bytes": None if before is None or None in peaks else max(peak for peak in peaks if peak is not None),
        "losses": torch.stack(losses).float().tolist(),
    }
    if whole:
        found |= {"step_seconds": median(step_seconds), "step_samples": step_seconds}
    if plan["profile_floor"]:

        def once() -> None:
            forward_backward(model, ids)
            clear(model)

        def all_of_it() -> None:
            forward_backward(model, ids)
            if whole:
                update()
            clear(model)

        if plan["implementation"] == "bastile":
            found["floor"] = floor(once, device)
        if device.type == "cuda":
            found["device"] = on_device(all_of_it, median(step_seconds if whole else seconds))
    return found


def train(
    model: nn.Module, tokens: torch.Tensor, plan: dict[str, Any], report: Callable[[int], None]
) -> dict[str, Any]:
    """plan["curve_steps"] steps of fused AdamW over the text, piece after piece. report(n): n steps are done.

    The first tenth of the steps is warm-up, of the learning rate and of everything that compiles, and is not timed."""
    device = next(model.parameters()).device
    steps, batch, length = plan["curve_steps"], plan["batch"], plan["length"]
    pieces = tokens[: len(tokens) // length * length].view(-1, length)
    optimizer = torch.optim.AdamW(trained(model), lr=_CURVE_LR, fused=True)
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    losses: list[float] = []
    pending: list[torch.Tensor] = []
    before = begin_peak(device)
    begin = 0.0
    for step in range(steps):
        if step == warm_up:
            synchronize(device)
            begin = time.perf_counter()
        chosen = (step * batch + torch.arange(batch)) % len(pieces)
        pending.append(forward_backward(model, pieces[chosen].to(device)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % _LOOK == 0 or step + 1 == steps:
            losses += torch.stack(pending).float().tolist()
            pending.clear()
            report(step + 1)
    synchronize(device)
    seconds = (time.perf_counter() - begin) / (steps - warm_up)
    return {
        "seconds": seconds,
        "tokens_per_second": batch * length / seconds,
        "before_bytes": before,
        "peak_bytes": None if before is None else peak_bytes(device),
        "losses": losses,
    }


# ---- the floor of a step: its matrix products and its attention, which Bastile leaves to others ----------------------


def kind_of(name: str) -> str:
    """ "attention", "products" or "rest"."""
    group = group_of(name)
    return group if group in ("attention", "products") else "rest"


def floor(step: Callable[[], object], device: torch.device, steps: int = 4) -> dict[str, float]:
    """Seconds of one step by kind: of the kernels on CUDA, of the operators on CPU; as "seconds" those of products and
    attention together, as "wall" those of the whole step, each begun and ended when the device is idle."""
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        wall = sum(seconds_of(step, device) for _ in range(steps)) / steps
    found = {"products": 0.0, "attention": 0.0, "rest": 0.0}
    for event in profiler.key_averages():
        # Only what ran itself: an operator's time on CUDA is that of its kernels, which are events of their own.
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        own = event.self_device_time_total if on_device else 0.0 if on_cuda else event.self_cpu_time_total
        found[kind_of(event.key)] += own / 1e6 / steps
    return {**found, "seconds": found["products"] + found["attention"], "wall": wall}


def on_device(step: Callable[[], object], seconds: float, steps: int = 4) -> dict[str, float]:
    """What the device does in one step, which takes so many seconds where nobody looks: seconds in which a kernel or a
    copy runs, their number, and the share of the step in which none does."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    ran = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy = covered((e.time_range.start, e.time_range.end) for e in ran) / 1e6 / steps
    return {"seconds": busy, "launches": len(ran) / steps, "idle": max(0.0, 1.0 - busy / seconds)}
