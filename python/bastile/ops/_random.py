"""The state of PyTorch's generators, and which elements a dropout loses, without keeping a mask."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn.functional import dropout


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


class Masks:
    """The states of the random generator from which each of several dropouts began, in place of the masks.

    A generator has no state to read while a CUDA graph is captured: what a graph draws depends on where the generator
    is at a replay. The masks themselves are kept then, by the node that asks for them with `leave` and hands them back
    to `take`, as it keeps other tensors: a checkpoint drops them and makes them again."""

    def __init__(self, device: torch.device) -> None:
        self.generator = generator_of(device)
        self._keeps = _is_captured(device)
        self._states: dict[int, Any] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._left: list[int] = []

    def drop(self, i: int, tensor: torch.Tensor, p: float) -> torch.Tensor:
        """The tensor as dropout i leaves it. The first call for i draws; later ones, of a tensor of the same shape,
        lose the same elements and leave the generator where it is."""
        if not p:
            return tensor
        if i in self._kept:
            return torch.ops.aten.native_dropout_backward(tensor, self._kept[i], _scale(p, tensor.dtype))
        if self._keeps:
            dropped, self._kept[i] = torch.native_dropout(tensor, p, True)
            return dropped
        if i not in self._states:
            self._states[i] = state_of(self.generator)
            return dropout(tensor, p)
        now = state_of(self.generator)
        set_state(self.generator, self._states[i])
        try:
            return dropout(tensor, p)
        finally:
            set_state(self.generator, now)

    def leave(self) -> Sequence[torch.Tensor]:
        """The masks that are kept, if any are; they are not here until `take` is given them."""
        if not self._kept:
            return ()
        kept, self._kept = self._kept, {}
        self._left = list(kept)
        return list(kept.values())

    def take(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """These are tensors with the masks behind them; those before the masks are returned."""
        if not self._left:
            return tensors
        end = len(tensors) - len(self._left)
        self._kept = dict(zip(self._left, tensors[end:], strict=True))
        return tensors[:end]


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and not is_compiling() and torch.cuda.is_current_stream_capturing()


def _scale(p: float, dtype: torch.dtype) -> float:
    """What PyTorch's dropout multiplies by what it leaves: the float32 next to 1 over the float32 next to 1 - p."""
    return 1 / (1 - p if dtype is torch.float64 else ctypes.c_float(1 - p).value)
