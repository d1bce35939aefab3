"""PyTorch's generators: their state, and seeds that are drawn from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seeds(device: torch.device, count: int) -> torch.Tensor:
    """[count, 2] int64, drawn from torch's generator of this device, on it: nothing waits for the numbers, a CUDA graph
    that draws them draws others at each replay, and a checkpoint's second run draws them again."""
    return torch.randint(2**63 - 1, (count, 2), device=device)


def generator_of(device: torch.device) -> Any:
    """What operators on this device draw from."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def state_of(generator: Any) -> Any:
    # Of CUDA's generator seed and offset say all, and both are the host's.
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    return generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    if isinstance(state, tuple):
        seed, offset = state
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        generator.set_offset(offset)
    else:
        generator.set_state(state)


@contextmanager
def drawing_again(device: torch.device, state: Any) -> Iterator[None]:
    """Within, random numbers are those that were drawn from this state on, if there is one; behind, the generator is
    where it was."""
    if state is None:
        yield
        return
    generator = generator_of(device)
    now = state_of(generator)
    set_state(generator, state)
    try:
        yield
    finally:
        set_state(generator, now)
