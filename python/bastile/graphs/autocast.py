"""Autocast, as it is set for a step."""

from __future__ import annotations

from typing import Any

import torch


class Autocast:
    """How autocast is set for a step. Its cache of converted weights is left alone: what is in it would be gone at a
    replay, and what a graph puts there is for nobody else."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.is_on = torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device)

    def key(self) -> Any:
        return self.is_on and self.dtype

    def as_noted(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.is_on, cache_enabled=False)

    def off(self) -> torch.autocast:
        return torch.autocast(self.device, enabled=False, cache_enabled=False)
