"""Bastile's fused loss as a loss of torchtune, of those releases whose losses take the output layer. In its YAML:

loss:
  _component_: bastile.integrations.torchtune.LinearCrossEntropyLoss
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtune.modules import loss

from bastile.ops._common import served
from bastile.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from bastile.report import Tally

__all__ = ["LinearCrossEntropyLoss"]


class LinearCrossEntropyLoss(loss.LinearCrossEntropyLoss):
    """torchtune's, of which forward alone is another: hidden states [B, T, H] and targets [B, T] to the mean loss.
    Where the output layer is more than a weight, or parted, torchtune's own runs."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        tally, layer = Tally.of("fused_linear_cross_entropy", "torchtune"), self.linear_projection
        weight: Any = getattr(layer, "weight", None)
        bias: Any = getattr(layer, "bias", None)
        if type(layer) is not nn.Linear or not served(outputs, weight, bias):
            tally.step_aside(f"the output layer is a {type(layer).__name__}, or not a plain one")
            return super().forward(outputs, targets)
        items = (targets != self.ignore_index).sum().clamp_min(1)  # the mean of nothing is 0, as torchtune has it
        tally.count()
        return fused_linear_cross_entropy(
            outputs, weight, targets, bias=bias, ignore_index=self.ignore_index, num_items=items
        )
