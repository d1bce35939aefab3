"""Profiles a training step of a model, with stock Transformers and then with Bastile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import bastile
from bastile.profile.record import measure
from bastile.profile.regions import marked, region


def compare(
    model: Any, batch: int, sequence: int, steps: int, operators: dict[str, bool], seed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The two runs, stock and Bastile, and their profilers by name. The model's weights change as it trains."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (batch, sequence), generator=generator).to(device)
    step = _step(model, optimizer, ids)
    left_out = {operator: False for operator, is_used in operators.items() if not is_used}
    runs, profilers = [], {}
    for name in ("stock", "bastile"):
        patched = bastile.apply(model_types=[model.config.model_type], **left_out) if name == "bastile" else []
        try:
            measured, profilers[name] = measure(step, device, steps, partial(marked, model))
        finally:
            bastile.reset(patched)
        tokens = batch * sequence / measured["seconds_per_step"]
        runs.append({"name": name, "patched": patched, "tokens_per_second": tokens, **measured})
    return runs, profilers


def _step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        with region("optimiser"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
