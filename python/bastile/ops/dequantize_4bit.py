"""Weights out of codes of four bits, as bitsandbytes keeps them (Dettmers et al., "QLoRA", 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import FLOATS, PLAIN, in_transform

__all__ = ["Group", "Nested", "Quantised", "dequantize_4bit", "dequantize_4bit_group"]

_dequantize = torch.ops.bastile.dequantize_4bit.default
_dequantize_group = torch.ops.bastile.dequantize_4bit_group.default


class Nested(NamedTuple):
    """What a block's absmax, a byte, stands for: code[byte] * absmax[block // blocksize] + offset.

    code [256], absmax [ceil(blocks / blocksize)], offset of one element, all float32; blocksize: a power of two."""

    code: torch.Tensor
    absmax: torch.Tensor
    offset: torch.Tensor
    blocksize: int = 256


class Quantised(NamedTuple):
    """A weight as the arguments of dequantize_4bit, but for its type."""

    packed: torch.Tensor
    absmax: torch.Tensor
    code: torch.Tensor
    shape: tuple[int, int]
    blocksize: int = 64
    nested: Nested | None = None


def dequantize_4bit(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    blocksize: int = 64,
    nested: Nested | None = None,
) -> torch.Tensor:
    """The matrix whose elements are code[number] * absmax[block], in float32, rounded once.

    Args:
        packed: uint8, ceil(N K / 2) elements: numbers of four bits, row by row, the first of two in the upper half.
        absmax: of each block of `blocksize` elements, row by row across their ends; float32, or uint8 with nested.
        code: [16], float32: what each number stands for.
        shape: (N, K).
        dtype: float32, bfloat16 or float16.
        blocksize: a power of two, 8 to 65536.
        nested: see Nested; its product and its sum are each rounded to float32.

    Returns:
        [N, K], of that type, without a gradient; the bits that bitsandbytes' dequantize_4bit gives, whose memory is the
        allocator's: let go of it after a product, and the next weight takes its place. Devices other than CPU and CUDA
        and subclasses of tensors run plain torch code.

    Raises:
        RuntimeError, ValueError: naming the argument, what was given and what is needed.
    """
    if dtype not in FLOATS:
        raise ValueError(f"dequantize_4bit: dtype is {dtype}; float32, bfloat16 or float16 is needed")
    rows, columns = shape
    if not _are_served((packed, absmax, code, *(nested[:3] if nested is not None else ()))):
        return _original(packed, absmax, code, (rows, columns), dtype, blocksize, nested)
    if nested is None:
        return _dequantize(packed, absmax, code, None, None, None, rows, columns, blocksize, 1, FLOATS.index(dtype))
    nested_code, nested_absmax, offset, nested_blocksize = nested
    return _dequantize(
        packed,
        absmax,
        code,
        nested_code,
        nested_absmax,
        offset,
        rows,
        columns,
        blocksize,
        nested_blocksize,
        FLOATS.index(dtype),
    )


def dequantize_4bit_group(weights: Sequence[Quantised], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """Each weight as dequantize_4bit makes it; on CUDA those of one input in one launch for each four of them.

    Args:
        weights: see Quantised.
        dtype: float32, bfloat16 or float16.

    Returns:
        A [N, K] for each. Where all have as many columns, blocks of the same sizes, and are nested alike, they are
        parts of one memory, one below the other, which lives as long as any of them; else each has its own.

    Raises:
        RuntimeError, ValueError: naming the weight and argument, what was given and what is needed.
    """
    if dtype not in FLOATS:
        raise ValueError(f"dequantize_4bit_group: dtype is {dtype}; float32, bfloat16 or float16 is needed")
    return Group(weights)(dtype)


class Group:
    """The weights of dequantize_4bit_group, looked at once, for one call or many: `group(dtype)`."""

    def __init__(self, weights: Sequence[Quantised]) -> None:
        self._weights = weights
        self._parts = [t for w in weights for t in (w.packed, w.absmax, w.code, *(w.nested[:3] if w.nested else ()))]
        self._rows = [w.shape[0] for w in weights]
        layouts = {(w.shape[1], w.blocksize, 1 if w.nested is None else w.nested.blocksize) for w in weights}
        nested = {w.nested is None for w in weights}
        together = len(weights) > 1 and len(layouts) == len(nested) == 1 and _are_served(self._parts)
        self._sizes = layouts.pop() if together else None

    def __call__(self, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        if self._sizes is None:
            return [_one(w, dtype) for w in self._weights]
        made = _dequantize_group(self._parts, self._rows, *self._sizes, FLOATS.index(dtype))
        return made.split_with_sizes(self._rows)


def _one(w: Quantised, dtype: torch.dtype) -> torch.Tensor:
    return dequantize_4bit(w.packed, w.absmax, w.code, w.shape, dtype, blocksize=w.blocksize, nested=w.nested)


def _are_served(tensors: Sequence[torch.Tensor]) -> bool:
    return not in_transform(*tensors) and all([type(t) in PLAIN and (t.is_cpu or t.is_cuda) for t in tensors])


def _original(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    blocksize: int,
    nested: Nested | None,
) -> torch.Tensor:
    count = shape[0] * shape[1]
    numbers = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).flatten()[:count]
    if nested is not None:
        scales = nested.absmax.repeat_interleave(nested.blocksize)[: absmax.numel()]
        absmax = nested.code[absmax.flatten().long()] * scales + nested.offset
    each = absmax.flatten().repeat_interleave(blocksize)[:count]
    return (code[numbers.long()] * each).to(dtype).view(shape)
