"""The layers. `kernels` gives a module of a model the forward of one of these: `self` is that module, with its weights.

What a class computes stands in Bastile's table of families. A class that is not in it, though its layer has the same
name in Transformers, runs its own code: another family's norm may round elsewhere."""

from typing import Any

import torch
from torch import nn

try:
    from bastile.models.layers import mlp_forward, norm_forward
    from bastile.models.table import FAMILIES
except ImportError as error:
    raise ImportError("the bastile-layers kernel needs the package bastile: pip install it first") from error


def _stock(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


_NORMS = {family.norm_class: norm_forward(family, _stock) for family in FAMILIES.values()}
_MLPS = {family.mlp_class: mlp_forward(family, _stock) for family in FAMILIES.values()}


class RMSNorm(nn.Module):
    """For what Transformers calls RMSNorm."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _NORMS.get(type(self).__name__, _stock)(self, hidden_states)


class SwiGLUMLP(nn.Module):
    """For a gated MLP; its class must be given this name first (kernels.replace_kernel_forward_from_hub)."""

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _MLPS.get(type(self).__name__, _stock)(self, x)
