"""Linear layers of one input, with or without low-rank adapters, as one node: y = x W^T + bias + s (d(x) A^T) B^T, d
being the adapter's dropout (Hu et al., "LoRA", 2021); and MLPs of such layers, with a gate and without.

A layer and its adapter as modules of their own make a pass over memory for each cast, each scale, each sum of results
and each sum of gradients. Here products do all that: the thin product comes first, and the large one adds its result to
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling
from torch.nn.functional import dropout, linear

from bastile.ops._adapted import TENSORS, Found, Layer, of_layers, reads_input
from bastile.ops._adapted_mlp import AdaptedMLP, groups, of_unit
from bastile.ops._common import Function, cast_as_linear, first_order_only, served, without_autocast
from bastile.ops._glu import Activation, Unit, unit_of
from bastile.ops._late import finished, late
from bastile.ops._random import seeds
from bastile.ops._wide_adapters import are_wide, group_of
from bastile.ops._widened import missing, widened
from bastile.recompute import again

__all__ = ["Adapted", "adapted_gated_mlp", "adapted_linears", "adapted_mlp"]


class Adapted(NamedTuple):
    """A linear layer and its adapter.

    weight [N, K], bias [N] or None, a [r, K] and b [N, r] or both None, of float32, bfloat16 or float16. dequantise:
    what makes the weight, of x's type, where it is kept in another form; weight is None then. Its function `together`,
    if any, is given those of several layers in a list, and the type, and returns their weights, or None. dropout: the
    probability with which the adapter's input loses each element (0: it has none). outputs: N, where nothing else tells
    it; without it the weight is made once more to see."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0
    dropout: float = 0.0
    dequantise: Callable[[torch.dtype], torch.Tensor] | None = None
    outputs: int | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.weight, self.bias, self.a, self.b

    @property
    def known_outputs(self) -> int | None:
        """N, where something tells it."""
        known = [each.shape[0] for each in (self.weight, self.b, self.bias) if each is not None]
        return known[0] if known else self.outputs


#: Bytes from which on a node's input, in a checkpoint, is made again in place of being kept until its backward pass,
#: which comes last in a layer. It costs a pass over memory, 35 us of an H200 for 64 MiB.
_MADE_AGAIN = 32 << 20


class _Linears(Function):
    """Keeps x where a weight or an A is trained, or what x is made again of, the thin results where a B is, and the
    seeds of dropouts."""

    @staticmethod
    def forward(ctx, x, layers, rest, again, seeds, *tensors):
        ctx.set_materialize_grads(False)
        group, rows = group_of(layers, tensors, x.dtype, of_layers(layers, seeds)), x.reshape(-1, x.shape[-1])
        thin = group.thin(rows)
        keeps_x = reads_input(ctx.needs_input_grad[_BEFORE:])
        # For first_order_only, where x is not kept: an output without elements.
        way_back = None if (keeps_x and again is None) or is_compiling() else x.new_empty(0)
        kept: Any = (None,)
        if keeps_x:
            kept = (x,) if again is None else again.tensors
        ctx.again = again.without_tensors() if keeps_x and again is not None else None
        ctx.save_for_backward(thin, way_back, seeds, *tensors, *group.rounded, *kept)
        ctx.shape, ctx.layers, ctx.dtype, ctx.rounded = x.shape, layers, x.dtype, len(group.rounded)
        if rest is None:
            results = group.results(x, rows, thin)
        else:
            rest.leave(group.fill, rows, thin)
            results = group.places(x)
        return tuple(results) if way_back is None else (*results, way_back)

    @staticmethod
    def backward(ctx, *gradients):
        thin, way_back, seeds, *tensors = ctx.saved_tensors
        count = TENSORS * len(ctx.layers)
        kept = tensors[count + ctx.rounded :]
        tensors, rounded = tensors[:count], tensors[count : count + ctx.rounded]
        gradients = gradients[: len(ctx.layers)]
        want_x, wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[_BEFORE:]
        with without_autocast(next(t.device.type for t in gradients if t is not None)):
            group = group_of(ctx.layers, tensors, ctx.dtype, of_layers(ctx.layers, seeds), rounded)
            x = kept[0] if ctx.again is None else ctx.again.made(kept)
            rows = None if x is None else x.reshape(-1, x.shape[-1])
            of_rows = [None if dy is None else dy.reshape(-1, dy.shape[-1]) for dy in gradients]
            found = Found(wanted)
            g = group.through_b(found, of_rows, thin)
            group.base_gradients(found, of_rows, rows)
            group.add_gradients_of_a(found, of_rows, g, rows)
            dx = group.input_gradient(of_rows, g) if want_x else None
        made = [None if dx is None else dx.view(ctx.shape), *found.gradients]
        if torch.is_grad_enabled() and not is_compiling():
            made = [first_order_only("adapted_linears", d, x, way_back, *gradients, *tensors) for d in made]
        return made[0], *[None] * (_BEFORE - 1), *made[1:]


_BEFORE = 5  # what _Linears takes before its layers' tensors


def _drawn(x: torch.Tensor, layers: Sequence[Layer]) -> torch.Tensor | None:
    """The seeds of all dropouts of a call, in the layers' order, in one launch."""
    count = sum([layer.dropout > 0 for layer in layers])
    return seeds(x.device, count) if count else None


def _prepared(
    x: torch.Tensor, layers: Sequence[Adapted]
) -> tuple[torch.Tensor, tuple[Layer, ...], list[torch.Tensor | None]] | None:
    """What a node takes: x, weights and biases as linear layers cast them under autocast, adapters as they are. None
    where no node serves them: other devices, subclasses of tensors, types that do not go together, functorch."""
    plain = [t for layer in layers for t in layer.tensors]
    if not served(x, *plain):
        return None
    x, *cast = cast_as_linear(x, *[t for layer in layers for t in layer.tensors[:2]])
    if any([t is not None and t.dtype is not x.dtype for t in cast]):
        return None
    tensors: list[torch.Tensor | None] = []
    for i, layer in enumerate(layers):
        tensors += cast[2 * i], cast[2 * i + 1], layer.a, layer.b
    wide = are_wide(x, *[layer.a for layer in layers])
    plain_layers = [Layer(each.scale, 0.0 if each.a is None else each.dropout, *each[-2:], wide) for each in layers]
    return x, tuple(plain_layers), tensors


def _is_differentiated(x: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or any([t is not None and t.requires_grad for t in tensors]))


def _check(op: str, x: torch.Tensor, layer: Adapted, name: str) -> None:
    def fault(what: str, t: torch.Tensor | None, needed: str) -> RuntimeError:
        given = "missing" if t is None else f"of shape {list(t.shape)}"
        return RuntimeError(f"{op}: {name}.{what} is {given}; {needed} is needed")

    weight, bias, a, b = layer.tensors
    if (weight is None) == (layer.dequantise is None):
        raise RuntimeError(f"{op}: {name} needs either a weight or dequantise, which makes one")
    if weight is not None and (weight.dim() != 2 or weight.shape[1] != x.shape[-1]):
        raise fault("weight", weight, f"[N, {x.shape[-1]}]")
    if (a is None) != (b is None):
        raise fault("b" if b is None else "a", None, "with one of a and b the other")
    if a is not None and (a.dim() != 2 or a.shape[1] != x.shape[-1]):
        raise fault("a", a, f"[r, {x.shape[-1]}]")
    n = weight.shape[0] if weight is not None else b.shape[0] if b is not None else None
    if a is not None and b is not None and list(b.shape) != [n, a.shape[0]]:
        raise fault("b", b, f"[{n}, {a.shape[0]}]")
    if bias is not None and n is not None and list(bias.shape) != [n]:
        raise fault("bias", bias, f"[{n}]")
    if not 0 <= layer.dropout < 1:
        raise ValueError(f"{op}: {name}.dropout is {layer.dropout}; a probability from 0 to below 1 is needed")


def adapted_linears(x: torch.Tensor, layers: Sequence[Adapted]) -> tuple[torch.Tensor, ...]:
    """Each layer's x W^T + bias + scale (d(x) A^T) B^T, d being its adapter's dropout.

    Args:
        x: [..., K]; float32, bfloat16 or float16.
        layers: see Adapted. Weights and biases of x's type (under autocast all three are cast as a linear layer casts
            them). A and B may be of any type: a call rounds them to x's, and makes their gradients in their own;
            outside of autocast those of float32 beside bfloat16 are computed to float32's accuracy.

    Returns:
        One [..., N] for each layer, of x's type. Gradients flow to x and all weights, biases, A and B, each computed
        only where it is wanted; x's is summed within the products. Kept for them are the inputs and [..., r] numbers of
        each adapter, and of its dropout 16 bytes, a seed drawn from torch's generator, of which the mask is made in
        each pass (see `bastile.ops.dropout`). Other types or devices, mixed types and subclasses of tensors run the
        original torch code.

    Raises:
        RuntimeError, ValueError: naming the layer and tensor, what was given and what is needed.
    """
    for i, layer in enumerate(layers):
        _check("adapted_linears", x, layer, f"layers[{i}]")
    prepared = _prepared(x, layers)
    if prepared is None:
        return tuple([_original(x, layer) for layer in layers])
    x, plain, tensors = prepared
    drawn = _drawn(x, plain)
    if _is_differentiated(x, tensors):
        rest = late()
        is_large = rest is not None and x.numel() * x.element_size() >= _MADE_AGAIN
        results = _Linears.apply(x, plain, rest, again(x) if is_large else None, drawn, *tensors)[: len(layers)]
        if rest is not None:
            rest.do(*results)
        return results
    group, rows = group_of(plain, tensors, x.dtype, of_layers(plain, drawn)), x.reshape(-1, x.shape[-1])
    return tuple(group.results_alone(x, rows))


def adapted_gated_mlp(
    x: torch.Tensor, gate: Adapted, up: Adapted, down: Adapted, activation: str = "silu", *, remake: bool = False
) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) of three layers as adapted_linears computes them (Shazeer, "GLU Variants Improve
    Transformer", 2020).

    Args:
        x: [..., H]; float32, bfloat16 or float16.
        gate, up: of H inputs and I outputs. down: of I inputs and H outputs.
        activation: as in `bastile.ops.glu.glu`.
        remake: whether to make again in the backward pass what would be kept, where that can be done in parts.

    Returns:
        [..., H]. As adapted_linears; kept are x, [..., 2I] numbers, which the last backward pass over a graph writes
        over, and the adapters' thin results. In a layer that is checkpointed (`use_reentrant=False`), or with
        `remake`, with frozen weights and without dropout, the 2I numbers are made in the backward pass, for a part of
        a large x at a time.

    Raises:
        RuntimeError, ValueError: naming the layer and tensor, what was given and what is needed.
    """
    return _mlp(unit_of("adapted_gated_mlp", activation), x, {"gate": gate, "up": up}, down, remake)


def adapted_mlp(
    x: torch.Tensor, up: Adapted, down: Adapted, activation: str = "gelu", *, remake: bool = False
) -> torch.Tensor:
    """As adapted_gated_mlp, without a gate: down(act(up(x))). Of plain weights and biases it is the MLP of GPT-NeoX,
    StarCoder2, Nemotron and of most vision towers.

    Args:
        x: [..., H]; float32, bfloat16 or float16.
        up: of H inputs and I outputs. down: of I inputs and H outputs.
        activation: "silu", "gelu_tanh", "gelu", "relu", "relu2", its square, or "quick_gelu", x sigmoid(1.702 x).
        remake: as in adapted_gated_mlp.

    Returns:
        [..., H]. As adapted_gated_mlp; kept are x where a gradient reads it, [..., I] numbers, and the adapters' thin
        results.

    Raises:
        RuntimeError, ValueError: naming the layer and tensor, what was given and what is needed.
    """
    return _mlp(Activation("adapted_mlp", activation), x, {"up": up}, down, remake)


def _mlp(unit: Unit, x: torch.Tensor, first: dict[str, Adapted], down: Adapted, remake: bool) -> torch.Tensor:
    """first: the layers before the unit, by their names."""
    for name, layer in first.items():
        _check(unit.op, x, layer, name)
    layers = [*first.values(), down]
    by = missing(x, layers[0].known_outputs)
    prepared = _prepared(x, widened(layers, by) if by else layers)
    if prepared is None:
        return _original(unit.original(*of_unit([_original(x, layer) for layer in first.values()])), down)
    x, plain, tensors = prepared
    drawn = _drawn(x, plain)
    if _is_differentiated(x, tensors):
        rest = late(remake)
        return finished(rest, AdaptedMLP.apply(x, plain, unit, rest, drawn, *tensors))
    before, behind = groups(plain, tensors, x.dtype, drawn)
    y = unit.forward(*of_unit(before.results_alone(x, x.reshape(-1, x.shape[-1]))))
    return behind.results_alone(y, y.view(-1, y.shape[-1]))[0]


def _original(x: torch.Tensor, layer: Adapted) -> torch.Tensor:
    weight: Any = layer.weight if layer.dequantise is None else layer.dequantise(x.dtype)
    y = linear(x, weight, layer.bias)
    if layer.a is None or layer.b is None:
        return y
    adapter_input = x if torch.is_autocast_enabled(x.device.type) else x.to(layer.a.dtype)
    thin = linear(dropout(adapter_input, layer.dropout), layer.a)
    return (y + linear(thin, layer.b) * layer.scale).to(y.dtype)
