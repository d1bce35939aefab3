"""The layers. `kernels` gives a module of a model the forward of one of these: `self` is that module, with its weights.

What a class computes is known by its code, as to `bastile.apply`. A class whose code is not known, though its layer has
the same name in Transformers, runs its own; so does one that is imported after this."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

try:
    from bastile.models.loading import model_files
    from bastile.models.mlp import mlp_forward
    from bastile.models.norm import Norm, norm_forward
    from bastile.models.sites import Found, file_of
    from bastile.report import Tally
except ImportError as error:
    raise ImportError("the bastile-layers kernel needs the package bastile: pip install it first") from error


def _stock(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _known(kind: str) -> Iterator[tuple[str, Found]]:
    for file in map(file_of, model_files()):
        for found in file.forwards(kind):
            yield _name(found.owner), found


_NORMS = {name: norm_forward(Norm.of(found), Tally.of("rms_norm", name), _stock) for name, found in _known("norm")}
_MLPS = {name: mlp_forward(found, Tally.of("swiglu", name), _stock) for name, found in _known("mlp")}


class RMSNorm(nn.Module):
    """For what Transformers calls RMSNorm."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _NORMS.get(_name(type(self)), _stock)(self, hidden_states)


class SwiGLUMLP(nn.Module):
    """For a gated MLP; its class must be given this name first (kernels.replace_kernel_forward_from_hub)."""

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _MLPS.get(_name(type(self)), _stock)(self, x)
