"""The forward of a gated MLP: down(activation(gate(x)) * up(x)), gate and up apart or in one projection."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from transformers.activations import ACT2FN

from bastile.guards import untouched
from bastile.models.adapters import gated_mlp
from bastile.models.sites import Found, ModelFile, Site
from bastile.ops._glu import ACTIVATION_OF_CONFIG
from bastile.ops.glu import glu
from bastile.report import Tally

_OF_CLASS = {nn.SiLU: "silu", nn.ReLU: "relu"} | {
    type(ACT2FN[name]): of_ours for name, of_ours in ACTIVATION_OF_CONFIG.items() if name in ACT2FN
}


def sites(file: ModelFile) -> Iterator[Site]:
    for found in file.forwards("mlp"):
        yield file.forward_site("swiglu", found.owner, partial(mlp_forward, found))


def mlp_forward(found: Found, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    names = found.names
    activation, down = names.get("activation"), names["down"]
    gate, up, both = names.get("gate", ""), names.get("up", ""), names.get("gate_up") or names.get("up_gate")
    up_first = "up_gate" in names

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            tally.step_aside("it was not called with one tensor by position")
            return original(self, *args, **kwargs)
        act = "silu" if activation is None else activation_of(getattr(self, activation))
        if act is None:
            tally.step_aside("its activation is none that Bastile computes")
            return original(self, *args)
        tally.count()
        if both is None:
            return gated_mlp(args[0], getattr(self, gate), getattr(self, up), getattr(self, down), act)
        first, second = getattr(self, both)(args[0]).chunk(2, dim=-1)
        return getattr(self, down)(glu(second, first, act) if up_first else glu(first, second, act))

    return forward


def activation_of(module: Any) -> str | None:
    """The activation that this module computes, by the name that bastile.ops.glu has for it; None for any other."""
    if type(module) is nn.GELU and untouched(module):
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)
    return _OF_CLASS.get(type(module)) if isinstance(module, nn.Module) and untouched(module) else None
