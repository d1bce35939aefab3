"""The forward of a module that holds all experts of a layer.

It serves what Transformers computes where nobody has chosen an implementation: whole experts, of one type, with the
gate that the class defines. All else the original does: an implementation that someone chose or registered, experts
spread over devices, another gate."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from bastile.models.rebind import parameter_names
from bastile.models.sites import Found, ModelFile, Site
from bastile.ops._common import served, without_autocast
from bastile.ops.moe import MOST_EXPERTS, moe_experts
from bastile.report import Tally

PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")

#: The arguments, in their order.
ARGUMENTS = ("hidden_states", "router_indices", "routing_weights")

#: What Transformers takes where nobody chose.
_DEFAULT = "grouped_mm"


def sites(file: ModelFile) -> Iterator[Site]:
    for found in file.forwards("experts"):
        yield file.forward_site("moe_experts", found.owner, partial(experts_forward, found))


def experts_forward(found: Found, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    # Not at the head of the file, which the commands read where Transformers is not installed; nor within what follows,
    # where torch.compile would meet it.
    from transformers.integrations import moe

    names, table, default = parameter_names(original), moe.ALL_EXPERTS_FUNCTIONS, moe.grouped_mm_experts_forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden, indices, weights = [given.pop(name, None) for name in ARGUMENTS]
        if given or len(args) > len(names):
            return original(self, *args, **kwargs)
        if not found.is_kept_by(self) or table[_DEFAULT] is not default:
            tally.step_aside("the gate, or Transformers' grouped products, have been replaced by others")
            return original(self, *args, **kwargs)
        if not _are_whole(self):
            tally.step_aside("another implementation of experts was chosen, or they are spread over devices")
            return original(self, *args, **kwargs)
        parameters = [getattr(self, name) for name in PARAMETERS]
        if not _serves(hidden, indices, weights, parameters):
            tally.step_aside("types or shapes that the operator does not take")
            return original(self, *args, **kwargs)
        tally.count()
        # Grouped products are none that autocast casts: they have the type of the experts' weights.
        rows = hidden.to(parameters[0].dtype)
        with without_autocast(hidden.device.type):
            out = moe_experts(rows, indices, weights, *parameters, alpha=self.alpha, limit=self.limit)
        return out.to(hidden.dtype)

    return forward


def _are_whole(experts: nn.Module) -> bool:
    """Whether this module has all experts of the configuration, and they are computed in Transformers' default way."""
    config: Any = getattr(experts, "config", None)
    return (
        getattr(config, "_experts_implementation", None) == _DEFAULT
        and not getattr(experts, "_is_expert_parallel", False)
        and experts.num_experts == config.num_local_experts
    )


def _serves(hidden: Any, indices: Any, weights: Any, parameters: list[torch.Tensor]) -> bool:
    return (
        all(torch.is_tensor(t) for t in (hidden, indices, weights))
        and hidden.dim() == 2
        and indices.shape == weights.shape
        and served(hidden, weights, *parameters)
        and all(p.dtype == parameters[0].dtype for p in parameters)
        and parameters[0].shape[0] <= MOST_EXPERTS
    )
