"""Training for a number of steps on text, for the loss curve."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bastile.bench.timing import begin_peak, peak_bytes, synchronize

_LR = 3e-4
#: Steps between two looks at the losses: waiting for each one would hide how well steps are queued.
_LOOK = 10


def train(
    model: nn.Module, tokens: torch.Tensor, plan: dict[str, Any], report: Callable[[int], None]
) -> dict[str, Any]:
    """plan["curve_steps"] steps of fused AdamW over the text, piece after piece. report(n): n steps are done.

    The first tenth of the steps is warm-up, of the learning rate and of everything that compiles, and is not timed."""
    device = next(model.parameters()).device
    steps, batch, length = plan["curve_steps"], plan["batch"], plan["length"]
    pieces = tokens[: len(tokens) // length * length].view(-1, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
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
        ids = pieces[chosen].to(device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        pending.append(loss.detach())
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
