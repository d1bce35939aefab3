"""What takes the place of a family's norm, MLP and rotary function.

Each builder gets a row of the table and the original, and returns the replacement. A replacement computes what the
original computes; a call it does not serve it hands to the original, arguments untouched. (Devices and types without
kernels are the operators' own business: they compute the same formula in plain torch there.)"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from bastile.guards import mark_as_ours, untouched
from bastile.models.adapters import gated_mlp
from bastile.models.table import Family
from bastile.ops.rms_norm import rms_norm
from bastile.ops.rope import rope

#: What a norm's code may mention beside its weight and epsilon, and no more: so nothing that it computes is left out.
NORM_MAY_READ = ("dtype", "to", "torch", "float32", "pow", "mean", "rsqrt")

#: Likewise a rotary function's code, and its arguments.
ROTARY_MAY_READ = ("unsqueeze", "rotate_half", "_apply_rotary_emb")
ROTARY_ARGUMENTS = ("q", "k", "cos", "sin", "unsqueeze_dim")

_SILU = frozenset({nn.SiLU, type(ACT2FN["silu"])})


def norm_forward(family: Family, original: Callable[..., Any]) -> Callable[..., Any]:
    eps, casting = family.norm_eps, family.norm_casting

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return original(self, *args, **kwargs)
        return rms_norm(args[0], self.weight, getattr(self, eps), casting=casting)

    return mark_as_ours(forward)


def mlp_forward(family: Family, original: Callable[..., Any]) -> Callable[..., Any]:
    gate, up, down, activation = family.gate, family.up, family.down, family.activation

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        act = getattr(self, activation)
        if len(args) != 1 or kwargs or type(act) not in _SILU or not untouched(act):
            return original(self, *args, **kwargs)
        return gated_mlp(args[0], getattr(self, gate), getattr(self, up), getattr(self, down))

    return forward


def rotary_function(family: Family, original: Callable[..., Any]) -> Callable[..., Any]:
    interleaved, half_table = family.rotary_interleaved, family.rotary_half_table

    @functools.wraps(original)
    def rotate(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        heads_first = kwargs == {"unsqueeze_dim": 1} or not kwargs  # q [B, heads, S, D]: the layout that rope takes
        if args or not heads_first or q.dim() != 4 or cos.dim() != 3:
            return original(q, k, cos, sin, *args, **kwargs)
        if half_table:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        return rope(q, k, cos, sin, interleaved=interleaved)

    return mark_as_ours(rotate)
