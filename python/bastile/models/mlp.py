"""The forward of an MLP: down(activation(gate(x)) * up(x)), gate and up apart or in one projection, with what a form
has beside: a norm or a dropout before the last layer, factors, a dropout behind it, a limit of gate and up, a cut of
the gate by a method of the class; and down(activation(up(x))), with dropouts."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bastile.guards import does_as_its_class
from bastile.models.adapters import NotServed, gated_mlp, mlp, prepare_for_compiler
from bastile.models.sites import Found, ModelFile, Site
from bastile.ops._glu import ACTIVATION_OF_CONFIG, QUICK_GELU
from bastile.ops._modules import plain_linear
from bastile.ops.gated_mlp import gated_mlp_of_halves
from bastile.ops.glu import glu
from bastile.report import Tally

#: What computes the last layer's result, of the module, its input and the activation.
Output = Callable[[Any, Any, str], Any]
#: Activations that are functions. No dictionary: torch.compile reads through none whose keys are functions.
_FUNCTIONS = ((F.silu, "silu"), (F.relu, "relu"), (F.gelu, "gelu"))


def sites(file: ModelFile) -> Iterator[Site]:
    prepare_for_compiler(file)
    for found in file.forwards("mlp"):
        yield file.forward_site("swiglu", found.owner, partial(mlp_forward, found))


def mlp_forward(found: Found, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    names, variant = found.names, found.form.variant
    has_gate = bool(names.keys() & {"gate", "gate_up", "up_gate"})
    output, classes = (_gated if has_gate else _plain)(found), activations(not has_gate)
    activation, own_activation = names.get("activation"), variant.get("activation", "silu")
    scale_out, dropout_out = names.get("scale_out"), names.get("dropout_out")
    behind = names.get(variant.get("behind", "behind"))

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            tally.step_aside("it was not called with one tensor by position")
            return original(self, *args, **kwargs)
        act = own_activation if activation is None else activation_of(getattr(self, activation), classes)
        if act is None:
            tally.step_aside("its activation is none that Bastile computes")
            return original(self, *args)
        try:
            y = output(self, args[0], act)
        except NotServed as why:
            tally.step_aside(str(why))
            return original(self, *args)
        tally.count()
        if scale_out is not None:
            y = y * getattr(self, scale_out)
        if behind is not None:
            y = getattr(self, behind)(y)
        return y if dropout_out is None else F.dropout(y, getattr(self, dropout_out), self.training)

    return forward


def _plain(found: Found) -> Output:
    """Of an MLP without a gate. It raises NotServed."""
    names = found.names
    up, down = names["up"], names["down"]
    module, function = names.get("dropout"), names.get("drop")  # the activation and the last layer
    casts = found.form.variant.get("casts", False)

    def output(self: Any, x: Any, act: str) -> Any:
        drops = function is not None and self.training and getattr(self, function) > 0
        if drops or (module is not None and not _does_nothing(getattr(self, module))):
            raise NotServed("it drops some of what is activated")
        if casts and not _are_of_one_type(x, getattr(self, up), getattr(self, down)):
            raise NotServed("its last layer computes in another type")
        return mlp(x, getattr(self, up), getattr(self, down), act)

    return output


def _gated(found: Found) -> Output:
    names = found.names
    down = names["down"]
    gate, up, both = names.get("gate", ""), names.get("up", ""), names.get("gate_up") or names.get("up_gate")
    up_first = "up_gate" in names
    between = names.get("norm") or names.get("dropout")  # the unit and the last layer
    scale_gate, sparsity = names.get("scale_gate"), names.get("sparsity")
    (cut,) = found.methods.values() if sparsity is not None else (None,)
    limit, alpha = names.get("limit"), names.get("alpha")
    casts = found.form.variant.get("casts", False)

    def is_cut(self: Any) -> bool:
        return sparsity is not None and getattr(self, sparsity) > 0

    def unit(self: Any, x: Any, act: str) -> Any:
        options = {} if limit is None else {"limit": getattr(self, limit)}
        if alpha is not None:
            options["alpha"] = getattr(self, alpha)
        if both is not None:
            h = getattr(self, both)(x)
            if not up_first:
                return glu(h, None, act, **options)
            first, second = h.chunk(2, dim=-1)
            return glu(second, first, act, **options)
        first = getattr(self, gate)(x)
        if cut is not None and is_cut(self):
            first = cut(self, first)
        return glu(
            first if scale_gate is None else first * getattr(self, scale_gate), getattr(self, up)(x), act, **options
        )

    def output(self: Any, x: Any, act: str) -> Any:
        middle = None if between is None else getattr(self, between)
        is_plain = limit is None and (middle is None or _does_nothing(middle))
        if casts:
            is_plain = is_plain and _are_of_one_type(x, getattr(self, gate), getattr(self, down))
        if both is None and scale_gate is None and is_plain and not is_cut(self):
            return gated_mlp(x, getattr(self, gate), getattr(self, up), getattr(self, down), act)
        if both is not None and is_plain:
            first, last = getattr(self, both), getattr(self, down)
            if plain_linear(first) and plain_linear(last):
                return gated_mlp_of_halves(x, first.weight, last.weight, act, up_first=up_first)
        y = unit(self, x, act)
        y = y if middle is None else middle(y)
        return getattr(self, down)(_cast_for(getattr(self, down), y) if casts else y)

    return output


def _cast_for(layer: Any, y: torch.Tensor) -> torch.Tensor:
    """As T5 does, whose last layers may be kept in float32."""
    weight = getattr(layer, "weight", None)
    of_another = isinstance(weight, torch.Tensor) and weight.dtype not in (y.dtype, torch.int8)
    return y.to(weight.dtype) if of_another else y  # type: ignore[union-attr]


def _are_of_one_type(x: torch.Tensor, *layers: Any) -> bool:
    """Whether a cast to a layer's type changes nothing: autocast casts all there is, else all have one type."""
    kinds = {getattr(getattr(layer, "weight", None), "dtype", None) for layer in layers}
    return torch.is_autocast_enabled(x.device.type) or len(kinds) == 1


def _does_nothing(module: Any) -> bool:
    """Whether this is a dropout that drops nothing."""
    return type(module) is nn.Dropout and does_as_its_class(module) and (not module.training or module.p == 0)


@functools.cache
def activations(alone: bool = False) -> dict[type, str]:
    """Classes of activations, and the names that bastile.ops.glu has for them; alone: without a gate. Asked for where a
    forward is made: this file is imported where Transformers is not installed, and torch.compile would meet what the
    forward imports."""
    from transformers.activations import ACT2FN

    names = {type(ACT2FN[name]): of_ours for name, of_ours in ACTIVATION_OF_CONFIG.items() if name in ACT2FN}
    if alone:
        names[type(ACT2FN[QUICK_GELU])] = QUICK_GELU
    return {nn.SiLU: "silu", nn.ReLU: "relu", **names}


def activation_of(module: Any, classes: dict[type, str]) -> str | None:
    """The activation that this module or function computes, by the name that bastile.ops.glu has for it; None for any
    other. classes: activations()."""
    if type(module) is nn.GELU and does_as_its_class(module):
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)
    if isinstance(module, nn.Module):
        return classes.get(type(module)) if does_as_its_class(module) else None
    for function, name in _FUNCTIONS:
        if module is function:
            return name
    return None


def activation_named(name: Any) -> str | None:
    """Likewise of an activation that Transformers has under this name."""
    return ACTIVATION_OF_CONFIG.get(name) if isinstance(name, str) else None
