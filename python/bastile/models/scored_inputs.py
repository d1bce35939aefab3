"""The forward of a block of experts that weights what its experts are given, not what they return.

The code gives every expert all tokens, each times its score for that expert, and adds up what they return. The score is
zero for experts that a token has not chosen, and of zero a gated unit without biases makes zero: so the chosen experts
alone are computed, of the token's states times the score. Zeros have no gradients that count, for the same reason."""

import functools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from bastile.guards import runs
from bastile.models.mlp import activation_of, activations
from bastile.models.sites import Found, ModelFile, Site
from bastile.ops._common import served, without_autocast
from bastile.ops.moe import MOST_EXPERTS, moe_experts
from bastile.report import Tally


def sites(file: ModelFile) -> Iterator[Site]:
    routers, experts = file.modules_of("router"), file.modules_of("experts of all tokens")
    for found in file.forwards("block of experts"):
        yield file.forward_site("moe_experts", found.owner, partial(block_forward, found, routers, experts))


def _of(module: Any, known: Iterable[Found]) -> Found | None:
    """What this module's class is among these, where calling it runs that code and nothing else."""
    return next((found for found in known if runs(module, found.function)), None)


def block_forward(
    found: Found, routers: list[Found], experts: list[Found], tally: Tally, original: Callable[..., Any]
) -> Callable[..., Any]:
    names, classes = found.names, activations()

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
            tally.step_aside("it was not called with one tensor by position")
            return original(self, *args, **kwargs)
        router, held = getattr(self, names["router"]), getattr(self, names["experts"])
        route, unit = _of(router, routers), _of(held, experts)
        if route is None or unit is None:
            tally.step_aside("its router or experts have hooks, or code that is not known")
            return original(self, *args)
        gate_up, down = (getattr(held, unit.names[name]) for name in ("gate_up", "down"))
        act = activation_of(getattr(held, unit.names["activation"]), classes)
        hidden = args[0].reshape(-1, getattr(self, names["hidden_dim"]))
        autocasts = torch.is_autocast_enabled(hidden.device.type)
        is_served = served(hidden, gate_up, down) and gate_up.shape[0] <= MOST_EXPERTS
        if act is None or not is_served or not (autocasts or hidden.dtype == gate_up.dtype == down.dtype):
            tally.step_aside("types, shapes or an activation that the operator does not take")
            return original(self, *args)
        tally.count()
        scores, logits = router(hidden)
        chosen, indices = scores.topk(getattr(router, route.names["top_k"]), dim=1)
        rows = (hidden.unsqueeze(1) * chosen.unsqueeze(-1)).reshape(-1, hidden.shape[-1])
        if autocasts:  # batched products are cast
            dtype = torch.get_autocast_dtype(hidden.device.type)
            rows, gate_up, down = rows.to(dtype), gate_up.to(dtype), down.to(dtype)
        ones = torch.ones(rows.shape[0], 1, dtype=rows.dtype, device=rows.device)
        with without_autocast(hidden.device.type):
            routed = moe_experts(rows, indices.reshape(-1, 1), ones, gate_up, None, down, None, activation=act)
        out = getattr(self, names["shared"])(hidden)
        out.add_(routed.view(hidden.shape[0], -1, hidden.shape[-1]).sum(1))
        return out, logits

    return forward
