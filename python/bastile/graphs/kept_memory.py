"""The memory that a model's texts have one after another, so that a captured call reads the next one's tokens, too."""

from __future__ import annotations

import math
from typing import Any

import torch


class Memory:
    """Where texts of a model, one after another, keep what they have of their tokens.

    Attributes:
        version: another one when something lies elsewhere than before.
    """

    def __init__(self) -> None:
        self.version = 0
        self._taken: dict[Any, torch.Tensor] = {}

    def take(self, name: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros, where what was taken under this name before lay, if there is room."""
        size, found = math.prod(shape), self._taken.get(name)
        if (
            found is None
            or found.numel() < size
            or (found.dtype, found.device) != (dtype, device)
            or found.is_inference() != torch.is_inference_mode_enabled()
        ):
            self.version += found is not None
            found = self._taken[name] = torch.zeros(size, dtype=dtype, device=device)
            return found.view(shape)
        return found[:size].view(shape).zero_()

    def nbytes(self) -> int:
        return sum([tensor.nbytes for tensor in self._taken.values()])
