"""What the gradient of an adapter's second product leaves, in one pass over it; what adapters add to results of few
rows; and products that are summed up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import HALVES, PLAIN, cast_type, is_batched, need_floats, on_gpu, served

__all__ = ["low_rank_add", "low_rank_backward"]

#: Of dy, thin, b and scale; of dy, thin, b, where g is to be, and scale, returning db alone.
backward = torch.ops.bastile.low_rank_backward.default
backward_into = torch.ops.bastile.low_rank_backward_into.default
#: y = x weight^T + scale thin b^T + bias of x, weight, thin, b, bias or None, where y is to be, and scale
#: (bst_low_rank_linear).
linear_into = torch.ops.bastile.low_rank_linear.default
#: dx = g a + sum of dy_i weight_i, of dy_0, weight_0 to dy_3, weight_3, g, a, None for what there is not, and where dx
#: is to be (bst_low_rank_dx).
dx_into = torch.ops.bastile.low_rank_dx.default
#: A gated unit's backward pass with the adapters around it, bst_low_rank_glu_backward: of the unit (Unit.apart), gate's
#: and up's scales, dy, gate, up, thin, their b, g_down and a_down or None, where g is to be, and whether y, da_down and
#: thin_down are wanted; dgate over gate, dup over up, y over dy; returning db_gate, db_up, da_down, thin_down.
glu_backward = torch.ops.bastile.low_rank_glu_backward.default
#: What adapters add to results y in place, of x, y_0, a_0, b_0 to y_2, a_2, b_2, None for what there is not, and the
#: three layers' scales (bst_low_rank_add).
add_into = torch.ops.bastile.low_rank_add.default
#: Numbers of float32, and their pieces of bfloat16, of x [T, G, P, R], where sum, pieces and repeated are to be, None
#: for what is not wanted, and a scale (bst_low_rank_split).
split_into = torch.ops.bastile.low_rank_split.default

#: y_i = x weight_i^T + bias_i + scale_i (x a_i^T) b_i^T of x, weight_0, bias_0, where y_0 is to be, a_0, b_0, to those
#: of the third layer, None for what there is not, and the three layers' scales (bst_low_rank_layers).
layers_into = torch.ops.bastile.low_rank_layers.default

#: Of bfloat16, that are a number of float32.
PIECES = 3
MOST_ADDED = 3


def low_rank_backward(
    dy: torch.Tensor, thin: torch.Tensor, b: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The backward pass of y = scale thin b^T: g = scale dy b and db = scale dy^T thin.

    Args:
        dy: [T, N]; float32, bfloat16 or float16, its last dimension contiguous.
        thin: [T, R], of dy's type, its last dimension contiguous.
        b: [N, R], of dy's type.
        scale: a finite number.

    Returns:
        g [T, R], the gradient of thin, of dy's type, and db [N, R], that of b, in float32: sums are in float32, g is
        rounded once. On CUDA, in 16 bits, R of 8, 16, 24 or 32 and N of a multiple of 8, dy is read once; else these
        are two matrix products. Other types or devices and subclasses of tensors run plain torch code.

    Raises:
        RuntimeError, TypeError, ValueError: naming the argument, what was given and what is needed.
    """
    if served(dy, thin, b):
        return backward(dy, thin, b.contiguous(), scale)
    need_floats("low_rank_backward", dy=dy, thin=thin, b=b)
    return scale * (dy @ b), scale * (dy.t() @ thin)


def _need_shape(name: str, t: torch.Tensor, shape: tuple[int, ...], of: str) -> None:
    if t.shape != shape:
        raise ValueError(f"low_rank_add: {name} has shape {list(t.shape)}; {list(shape)}, as {of} have it, is needed")


def low_rank_add(
    x: torch.Tensor,
    results: Sequence[torch.Tensor],
    adapters: Sequence[tuple[torch.Tensor, torch.Tensor]],
    scales: Sequence[float],
) -> None:
    """What the adapters of up to three linear layers of one input add to their results, in place: of each y, a, b and
    scale y becomes y + scale (x a^T) b^T. Sums are in float32, x a^T is kept in it, and y is rounded once. For few
    rows, and not to be differentiated.

    Args:
        x: [T, K]; float32, bfloat16 or float16, its last dimension contiguous.
        results: the layers' y, [T, N] each, of x's type, their last dimension contiguous; one may not overlap another.
        adapters: of each layer a [R, K] and b [N, R], all of x's type or all of float32.
        scales: of each layer a finite number.

    Other types or devices and subclasses of tensors run plain torch code.

    Raises:
        RuntimeError, TypeError, ValueError: naming the argument, what was given and what is needed. RuntimeError where
            a tensor requires a gradient while gradients are enabled.
    """
    if not len(results) == len(adapters) == len(scales) <= MOST_ADDED:
        raise ValueError(
            f"low_rank_add: {len(results)} results, {len(adapters)} adapters and {len(scales)} scales are given; as "
            f"many of each are needed, at most {MOST_ADDED}"
        )
    layers = [(y, *pair) for y, pair in zip(results, adapters, strict=True)]
    tensors = [x, *(t for layer in layers for t in layer)]
    names = ["x", *(f"{name}_{i}" for i in range(len(layers)) for name in "yab")]
    need_floats("low_rank_add", **dict(zip(names, tensors, strict=True)))
    for name, t in zip(names, tensors, strict=True):
        if t.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"low_rank_add: {name} requires a gradient; torch.no_grad() around the call is needed")
    if not layers:
        return
    if served(*tensors):
        add_to(x, layers, scales)
        if not is_compiling():
            torch.autograd.graph.increment_version([y for y in results if not y.is_inference()])
        return
    for i, ((y, a, b), scale) in enumerate(zip(layers, scales, strict=True)):
        _need_shape(f"y_{i}", y, (*x.shape[:-1], b.shape[0]), f"rows of x and of b_{i}")
        _need_shape(f"a_{i}", a, (b.shape[-1], x.shape[-1]), f"columns of b_{i} and x")
        wide = torch.promote_types(torch.promote_types(x.dtype, a.dtype), torch.float32)
        y.copy_(y.to(wide) + scale * (x.to(wide) @ a.to(wide).t() @ b.to(wide).t()))


def add_to(
    x: torch.Tensor, layers: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], scales: Sequence[float]
) -> None:
    """By the operator alone; layers: y, a and b of each."""
    missing = MOST_ADDED - len(layers)
    add_into(x, *[t for layer in layers for t in layer], *[None] * (3 * missing), *scales, *[0.0] * missing)


#: What a layer's adapter adds: a, b and scale.
Adapter = tuple[torch.Tensor, torch.Tensor, float]
_NO_ADAPTER = (None, None, 0.0)


def one_token_layers(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    adapters: Sequence[Adapter | None] | None = None,
) -> list[torch.Tensor] | None:
    """The results of layers of one input in a call for one token of each of a few rows, as of a text that is generated,
    by a launch for each three of them. None: these are for products of their own, and so is each call with gradients,
    and that of several tokens, which may be a checkpoint's first run: its second one has to have the same bits.

    Args:
        x: [..., 1, K].
        weights, biases: [N, K] and [N] or None each.
        adapters: None: no layer has one. Those there are are such as bst_low_rank_layers takes.
    """
    if (
        torch.is_grad_enabled()
        or x.dim() < 3
        or x.shape[-2] != 1
        or not on_gpu(x)
        or x.dtype not in HALVES
        or x.shape[-1] % 8
        or not 0 < x.numel() <= _MOST_ROWS * x.shape[-1]
        or not _are_few(x.numel() // x.shape[-1], weights)
        or (cast_type(x) or x.dtype) is not x.dtype
        or not served(x, *weights, *biases)
        or is_compiling()
        or is_batched(x)
    ):
        return None
    rows = x.reshape(-1, x.shape[-1])
    given = [t for t in (*weights, *biases) if t is not None]
    if any([t.dtype is not x.dtype for t in given]) or not all([w is not None and in_rows(w) for w in weights]):
        return None
    results = [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]  # type: ignore[union-attr]
    places = [y.view(rows.shape[0], -1) for y in results]
    of_adapters = [each or _NO_ADAPTER for each in adapters or [None] * len(results)]
    layers = list(zip(weights, biases, places, of_adapters, strict=True))
    for i in range(0, len(layers), MOST_ADDED):
        fill_layers(rows, layers[i : i + MOST_ADDED])
    return results


def fill_layers(rows: torch.Tensor, layers: Sequence[tuple[Any, Any, torch.Tensor, Any]]) -> None:
    """By the operator alone; layers: weight, bias, y and (a, b, scale) of each, None for what there is not."""
    missing = MOST_ADDED - len(layers)
    tensors = [t for weight, bias, y, (a, b, _) in layers for t in (weight, bias, y, a, b)]
    scales = [scale for *_, (_, _, scale) in layers]
    layers_into(rows, *tensors, *[None] * (5 * missing), *scales, *[0.0] * missing)


#: Rows up to which bst_low_rank_layers has a kernel.
_MOST_ROWS = 32


def _are_few(rows: int, weights: Sequence[torch.Tensor | None]) -> bool:
    """Whether that kernel takes less time than cuBLAS: where launches are what takes it. On an H200, of its time: up to
    16 rows 0.33 of queries, keys and values of 1024 columns' width, 0.55 of 4096's, 0.51 of gate and up of 1024's, 0.96
    of 4096's, 0.65 of one layer of 3072's, 0.9 of 4096's and 1.12 of 12288's; of 32 rows 0.75 of such queries, keys and
    values, but 1.06 and 1.23 of gate and up of 2048's and 4096's."""
    width = max([weight.shape[-1] for weight in weights if weight is not None], default=0)
    numbers = sum([weight.numel() for weight in weights if weight is not None])
    return width <= _MOST_WIDTH and (rows <= _FEW_ROWS or len(weights) >= MOST_ADDED or numbers <= _FEW_NUMBERS)


_FEW_ROWS, _MOST_WIDTH, _FEW_NUMBERS = 16, 8192, 8 << 20


def input_gradient(
    gradients: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    g: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """g a + sum of dy weight, of a layer or more with one input: by an operator of ours that rounds it once, on the
    chips and in the sizes that it knows of. None: these are for products of their own. Not to be differentiated.

    Args:
        gradients, weights: [T, N] and [N, K] each.
        g, a: [T, R] and [R, K], or None.
        into: where it is to be, [T, K].
    """
    first, width = gradients[0], weights[0].shape[1]
    if len(gradients) + (g is not None) < 2 or len(gradients) > _MOST_PRODUCTS or not may_be_one_product(first):
        return None
    for dy, weight in zip(gradients, weights, strict=True):
        if type(weight) not in PLAIN or weight.shape[0] % 8 or not (in_rows(dy) and in_rows(weight)):
            return None
        if not dy.dtype is weight.dtype is first.dtype:
            return None
    if width % 8 or (g is not None and g.shape[1] % 8):
        return None
    dx = first.new_empty(first.shape[0], width) if into is None else into
    pairs = [t for pair in zip(gradients, weights, strict=True) for t in pair]
    dx_into(*pairs, *[None] * (2 * _MOST_PRODUCTS - len(pairs)), g, a, dx)
    return dx


_MOST_PRODUCTS = 4


def fills(y: torch.Tensor) -> bool:
    """Whether linear_into makes y [T, N] by one product, where it serves it at all: tiles leave few multiprocessors
    idle in their last round. As src/ops/low_rank/low_rank_linear.c has it."""
    chip = torch.cuda.get_device_properties(y.device)
    if (chip.major, chip.minor) != _HOPPER:
        return False
    clusters = chip.multi_processor_count // 2
    tiles = -(-y.shape[0] // _TILE) * -(-y.shape[1] // _TILE)
    return 10 * tiles >= 9 * clusters * -(-tiles // clusters)


_HOPPER = (9, 0)
_TILE = 256  # rows of a cluster's two tiles, and columns


def in_rows(matrix: torch.Tensor) -> bool:
    """Rows of neighbouring elements, one behind another: an expanded matrix has one row for all."""
    return matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]


def may_be_one_product(rows: torch.Tensor) -> bool:
    """Whether products of these rows may be summed up by an operator of ours."""
    return on_gpu(rows) and rows.dtype in HALVES and not is_compiling() and not is_batched(rows)
