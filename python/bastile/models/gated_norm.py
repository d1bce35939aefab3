"""The forward of an RMS norm with a gate: of linear attention, whose gate multiplies the norm's result, and of Mamba-2,
whose gate multiplies what is normed, maybe in groups."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bastile.guards import mark_as_ours
from bastile.models.sites import Found, ModelFile, Site
from bastile.ops._common import FLOATS
from bastile.ops.gated_rms_norm import gated_rms_norm
from bastile.report import Tally

#: Transformers' names of activations -> those here.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


def sites(file: ModelFile) -> Iterator[Site]:
    for found in file.forwards("gated norm"):
        yield file.forward_site("gated_rms_norm", found.owner, partial(gated_norm_forward, found))


def _group_of(names: dict[str, str], module: Any, columns: int) -> int:
    """How many columns the module norms together, of rows of so many; 0: they are in no groups of one size."""
    if "group" in names:
        size = getattr(module, names["group"])
        return 0 if size < 1 or columns % size else size
    count = getattr(module, names["groups"]) if "groups" in names else 1
    return 0 if count < 1 or columns % count else columns // count


def _options(found: Found, module: Any, columns: int) -> dict[str, Any] | str:
    """What the operator is told of a module and rows of so many columns, or why it cannot serve them."""
    names, variant = found.names, found.form.variant
    named = getattr(module, names["activation"]) if "activation" in names else "silu"
    activation = _ACTIVATIONS.get(named) if isinstance(named, str) else None
    group = _group_of(names, module, columns)
    if activation is None:
        return "its activation is neither silu nor sigmoid"
    if not group:
        return "its groups are not of one size"
    first = not getattr(module, names["norm_first"]) if "norm_first" in names else variant["gate_first"]
    return {
        "activation": activation,
        "gate_first": first,
        "group": 0 if group == columns else group,
        "promote": variant["promote"],
    }


def _refusal(found: Found, module: Any, x: torch.Tensor, gate: torch.Tensor) -> str | None:
    """Why the operator does not compute what the code does for these; None where it does."""
    weight, squeezes = getattr(module, found.names["weight"]), found.form.variant.get("squeezes", False)
    if not x.dim() or x.shape != gate.shape or weight.shape != x.shape[-1:]:
        return "its input, gate and weight are not of one width"
    if x.dtype not in FLOATS or gate.dtype not in FLOATS:
        return "its input or gate is of a type without kernels"  # which the original computes in float32
    if squeezes and (x.dim() not in (2, 3) or (x.dim() == 3 and x.shape[1] == 1)):
        return "its result has other dimensions"
    return None if found.is_kept_by(module) else "a subclass computes something else"


def gated_norm_forward(found: Found, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    names = found.names

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or kwargs or not isinstance(args[1], torch.Tensor):
            tally.step_aside("it was not called with two tensors by position")
            return original(self, *args, **kwargs)
        x, gate = args
        options = _refusal(found, self, x, gate) or _options(found, self, x.shape[-1])
        if isinstance(options, str):
            tally.step_aside(options)
            return original(self, *args)
        tally.count()
        return gated_rms_norm(x, gate, getattr(self, names["weight"]), getattr(self, names["eps"]), **options)

    return mark_as_ours(forward)
