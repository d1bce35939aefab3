"""Layers that are more than a weight: with an adapter of PEFT's LoRA, quantised by bitsandbytes, or both, read as what
the operators of ops/lora.py take. What a layer is, its class's code and its attributes say; one that may do anything
else is left to its own forward."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from bastile.guards import stock_of
from bastile.models.forms import code_of
from bastile.models.known import KNOWN
from bastile.models.sites import ModelFile, Site
from bastile.ops._common import PLAIN
from bastile.ops._modules import has_hooks, plain_linear
from bastile.ops.glu import glu_mlp
from bastile.ops.lora import Adapted, adapted_gated_mlp, adapted_linears
from bastile.ops.projections import projections
from bastile.report import Tally


class NotServed(Exception):
    """Why a layer is left to its own forward."""


def adapted(module: nn.Module, x: torch.Tensor) -> Adapted:
    """What this layer computes of x.

    Raises:
        NotServed: where that is more than a product, an adapter and a bias; says why.
    """
    kind = type(module)
    if kind is not nn.Linear and _form(stock_of(kind.forward)) == "adapted linear":
        return _with_adapter(module, x)
    return _base(module, x)


@functools.lru_cache(maxsize=64)
def _form(forward: Any) -> str | None:
    """What kind of layer a forward is of, by its code."""
    code = code_of(forward)
    form = None if code is None else KNOWN.get(code.fingerprint)
    return None if form is None else form.kind


def _base(module: Any, x: torch.Tensor) -> Adapted:
    """A layer without adapter."""
    kind = type(module)
    if kind is nn.Linear:
        own = module._parameters
        if "forward" in vars(module) or has_hooks(module) or type(own.get("weight")) not in PLAIN:
            raise NotServed("a layer has hooks, a forward of its own, or a weight that is sharded or quantised")
        return Adapted(own["weight"], own.get("bias"))
    if _form(stock_of(kind.forward)) != "4-bit linear":
        raise NotServed(f"{kind.__module__}.{kind.__qualname__} is no layer that Bastile knows")
    if "forward" in vars(module) or has_hooks(module):
        raise NotServed("a quantised layer has hooks or a forward of its own")
    state = getattr(module.weight, "quant_state", None)
    if state is None:
        raise NotServed("a layer of bitsandbytes is not quantised yet")
    if module.compute_dtype not in (None, _dtype(x)):
        raise NotServed(f"a layer of bitsandbytes computes in {module.compute_dtype}, its input's type is {_dtype(x)}")
    return Adapted(None, module.bias, dequantise=functools.partial(_dequantised, module.weight))


def _dequantised(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """[N, K], as bitsandbytes's own product makes it."""
    made = sys.modules["bitsandbytes"].functional.dequantize_4bit(weight.data, weight.quant_state)
    return made.to(dtype)


def _dtype(x: torch.Tensor) -> torch.dtype:
    """The type in which a linear layer multiplies x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _with_adapter(module: Any, x: torch.Tensor) -> Adapted:
    if "forward" in vars(module) or has_hooks(module):
        raise NotServed("a layer with an adapter has hooks or a forward of its own")
    base = _base(module.base_layer, x)
    if module.merged or module.disable_adapters:
        raise NotServed("adapters are merged or disabled")
    active = [name for name in module.active_adapters if name in module.lora_A]
    if not active:
        return base
    if len(active) > 1:
        raise NotServed("several adapters are active at once")
    (name,) = active
    if name in module.lora_variant:
        raise NotServed(f"the adapter is a {type(module.lora_variant[name]).__name__}")
    a, b = module.lora_A[name], module.lora_B[name]
    if not (plain_linear(a) and plain_linear(b)):
        raise NotServed("an adapter's matrices have biases, hooks or a forward of their own")
    if a.weight.dtype is not _dtype(x) and not torch.is_autocast_enabled(x.device.type):
        raise NotServed(f"without autocast adapters of {a.weight.dtype} compute in their own type")
    return base._replace(
        a=a.weight, b=b.weight, scale=float(module.scaling[name]), dropout=_dropout(module.lora_dropout[name])
    )


def _dropout(layer: nn.Module) -> float:
    if has_hooks(layer) or "forward" in vars(layer):
        raise NotServed("an adapter's dropout has hooks or a forward of its own")
    if type(layer) is nn.Identity:
        return 0.0
    if type(layer) is not nn.Dropout or layer.p >= 1:
        raise NotServed(f"an adapter's dropout is a {type(layer).__name__}")
    if layer.training and layer.p and torch.compiler.is_compiling():
        raise NotServed("an adapter's dropout is compiled")
    return layer.p if layer.training else 0.0


def _result_dtype(module: Any, x: torch.Tensor) -> torch.dtype:
    """bitsandbytes's layers give results of their input's type."""
    base = getattr(module, "base_layer", module)
    return x.dtype if type(base) is not nn.Linear else _dtype(x)


def sites(file: ModelFile) -> Iterator[Site]:
    """PEFT's layers, each by itself; what serves several layers at once asks `linears` and `gated_mlp`."""
    for found in file.forwards("adapted linear"):
        yield file.forward_site("lora_linear", found.owner, linear_forward)


def linear_forward(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of the forward of PEFT's layers."""

    @functools.wraps(original)
    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            tally.step_aside("a layer was not called with one tensor by position")
            return original(self, x, *args, **kwargs)
        try:
            layer = adapted(self, x)
        except NotServed as why:
            tally.step_aside(str(why))
            return original(self, x)
        tally.count()
        (y,) = adapted_linears(x, (layer,))
        return y.to(_result_dtype(self, x))

    return forward


def linears(x: torch.Tensor, modules: tuple[nn.Module, ...]) -> Sequence[torch.Tensor]:
    """Each module's result; by one node where all of them are layers that it serves."""
    plain = [module.weight for module in modules if plain_linear(module)]
    if len(plain) == len(modules):
        return projections(x, *plain)
    try:
        layers = [adapted(module, x) for module in modules]
    except NotServed as why:
        _step_aside(modules, why)
        return [module(x) for module in modules]
    results = adapted_linears(x, layers)
    return [y.to(_result_dtype(m, x)) for m, y in zip(modules, results, strict=True)]


def gated_mlp(x: torch.Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, activation: str) -> torch.Tensor:
    """The gated MLP of these layers; by one node where it serves all of them."""
    if all([type(layer) is nn.Linear and layer._parameters.get("bias") is None for layer in (gate, up, down)]):
        return glu_mlp(x, gate, up, down, activation)  # which looks at the rest
    try:
        first, second, third = (adapted(module, x) for module in (gate, up, down))
    except NotServed as why:
        _step_aside((gate, up, down), why)
        return glu_mlp(x, gate, up, down, activation)
    return adapted_gated_mlp(x, first, second, third, activation).to(_result_dtype(down, x))


def _step_aside(modules: Sequence[nn.Module], why: NotServed) -> None:
    """Told where adapters are among the layers; others are called as modules as a matter of course."""
    for module in modules:
        if hasattr(module, "lora_A"):
            Tally.of("lora_linear", f"{type(module).__module__}.{type(module).__qualname__}").step_aside(
                f"layers of one input were called one by one: {why}"
            )
            return
