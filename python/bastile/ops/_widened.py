"""MLPs whose inner width is no multiple of eight, as Qwen2.5-VL's tower has 3420: no row of such a result, and none of
the last layer's weight, begins where Hopper's copies of tiles can, and cuBLAS takes kernels of older chips, three times
as slow on an H100. With zeros behind each of them the layers compute the same.

A weight that is not trained gets its zeros where it is read, as a quantised one is made there, and no copy is kept: 9
MB in 6 us, where each product of 4096 rows has 36 GFLOP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn.functional import pad

from bastile.ops._common import on_gpu

_MULTIPLE = 8  # 16 bytes
_LEAST_ROWS = 512  # of fewer a product is not much more than a pass over its weight


def missing(x: torch.Tensor, inner: int | None) -> int:
    """How many columns such an MLP of x is to get; none where it would not pay."""
    if inner is None or not inner % _MULTIPLE or not on_gpu(x) or is_compiling():
        return 0
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    pays = dtype.itemsize == 2 and x.numel() >= _LEAST_ROWS * x.shape[-1]
    return -inner % _MULTIPLE if pays else 0


def widened(layers: Sequence[Any], by: int) -> list[Any]:
    """The layers, of the type bastile.ops.lora.Adapted: all but the last with so many results more, and the last with
    as many inputs."""
    *first, last = layers
    return [*[_with_zeros(layer, rows=by) for layer in first], _with_zeros(last, columns=by)]


def _with_zeros(layer: Any, rows: int = 0, columns: int = 0) -> Any:
    weight, make = layer.weight, layer.dequantise
    if weight is not None and weight.requires_grad:
        weight = pad(weight, (0, columns, 0, rows))
    else:
        weight, make = None, partial(_made, weight, make, rows, columns)
    bias, a, b, outputs = layer.bias, layer.a, layer.b, layer.known_outputs
    return layer._replace(
        weight=weight,
        bias=None if bias is None else pad(bias, (0, rows)),
        a=None if a is None else pad(a, (0, columns)),
        b=None if b is None else pad(b, (0, 0, 0, rows)),
        dequantise=make,
        outputs=None if outputs is None else outputs + rows,
    )


def _made(
    weight: torch.Tensor | None,
    make: Callable[[torch.dtype], torch.Tensor] | None,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    found: Any = weight if make is None else make(dtype)
    with torch.no_grad():
        return pad(found.to(dtype), (0, columns, 0, rows))
