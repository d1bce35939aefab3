"""The forward of a model's backbone, which records less than autograd asks for: see bastile.recompute."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bastile.models.rebind import parameter_names
from bastile.models.table import Family
from bastile.recompute import min_tokens, recomputing


def backbone_forward(family: Family, original: Callable[..., Any]) -> Callable[..., Any]:
    names = parameter_names(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if _tokens(given) < min_tokens() or _is_partitioned(self):
            return original(self, *args, **kwargs)
        with recomputing():
            return original(self, *args, **kwargs)

    return forward


def _tokens(given: dict[str, Any]) -> int:
    ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    if torch.is_tensor(ids):
        return ids.numel()
    return embeddings.shape[:-1].numel() if torch.is_tensor(embeddings) else 0


def _is_partitioned(model: nn.Module) -> bool:
    """Whether ZeRO-3 has the weights: a norm's is whole only while the norm itself runs, too late for what its output
    is recomputed for."""
    return hasattr(next(model.parameters(), None), "ds_id")
