"""The forward of a gated MLP: down(silu(gate(x)) * up(x)), gate and up apart or in one projection."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from transformers.activations import ACT2FN

from bastile.guards import untouched
from bastile.models.sites import Found, ModelFile, Site
from bastile.ops.swiglu import swiglu, swiglu_mlp
from bastile.report import Tally

_SILU = frozenset({nn.SiLU, type(ACT2FN["silu"])})


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
        if activation is not None and not _is_silu(getattr(self, activation)):
            tally.step_aside("its activation is not SiLU alone")
            return original(self, *args)
        tally.count()
        if both is None:
            return swiglu_mlp(args[0], getattr(self, gate), getattr(self, up), getattr(self, down))
        first, second = getattr(self, both)(args[0]).chunk(2, dim=-1)
        return getattr(self, down)(swiglu(second, first) if up_first else swiglu(first, second))

    return forward


def _is_silu(activation: Any) -> bool:
    return type(activation) in _SILU and untouched(activation)
