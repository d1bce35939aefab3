"""The forward of a module that holds all experts of a layer.

It serves the experts that Transformers itself would run in plain torch: whole, of one type, with the gate that the
class defines. All else the original does: experts spread over devices, implementations that someone registered, another
gate, autocast."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bastile.models.rebind import parameter_names
from bastile.models.table import Family
from bastile.ops._common import served
from bastile.ops.moe import MOST_EXPERTS, moe_experts

PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
GATE = "_apply_gate"

#: All that the code of the gate may mention, so that it is the one that the operator computes.
GATE_READS = ("limit", "clamp", "alpha", "sigmoid", "torch")

#: What the experts' own loop may mention beside its parameters and the gate, and no more.
MAY_READ = (
    "torch",
    "nn",
    "functional",
    "no_grad",
    "zeros_like",
    "dtype",
    "device",
    "one_hot",
    "permute",
    "greater",
    "sum",
    "nonzero",
    "where",
    "index_add_",
    "to",
)

#: The arguments, in their order.
ARGUMENTS = ("hidden_states", "router_indices", "routing_weights")

#: Transformers' own ways to compute the same.
_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


def experts_forward(family: Family, gate: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """gate: the class's own function for it."""
    names = parameter_names(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = [given.pop(name, None) for name in ARGUMENTS]
        if given or len(args) > len(names) or not _has_own_gate(self, gate) or not _are_whole(self):
            return original(self, *args, **kwargs)
        parameters = [getattr(self, name) for name in PARAMETERS]
        if not _serves(*tensors, parameters):
            return original(self, *args, **kwargs)
        return moe_experts(*tensors, *parameters, alpha=self.alpha, limit=self.limit)

    return forward


def _has_own_gate(experts: nn.Module, gate: Callable[..., Any]) -> bool:
    return GATE not in vars(experts) and getattr(type(experts), GATE) is gate


def _are_whole(experts: nn.Module) -> bool:
    """Whether this module has all experts of the configuration, and they are computed in one of the ways above."""
    config = getattr(experts, "config", None)
    return (
        getattr(config, "_experts_implementation", None) in _IMPLEMENTATIONS
        and not getattr(experts, "_is_expert_parallel", False)
        and experts.num_experts == config.num_local_experts
    )


def _serves(hidden: Any, indices: Any, weights: Any, parameters: list[torch.Tensor]) -> bool:
    return (
        all(torch.is_tensor(t) for t in (hidden, indices, weights))
        and hidden.dim() == 2
        and indices.shape == weights.shape
        and served(hidden, weights, *parameters)
        and all(p.dtype == hidden.dtype for p in parameters)
        and parameters[0].shape[0] <= MOST_EXPERTS
        and not torch.is_autocast_enabled(hidden.device.type)
    )
