"""Products of rows that are sorted into groups, each with the matrix of its group.

On Hopper, in 16 bits, rows are multiplied by a kernel of ours, and what an adapter adds with them. Gradients of groups'
matrices, products that waste our tiles, and on Blackwell data centre GPUs all products are PyTorch's in bfloat16
(`torch.nn.functional.grouped_mm`). Both read the groups' ends on the device. Elsewhere the groups are multiplied one by
one, which on CUDA waits for their ends.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.library import Library, register_fake

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import has_values, is_batched, is_hopper, is_warming_up

_library = Library("bastile", "FRAGMENT")
_library.define(
    "grouped_rows(Tensor rows, Tensor matrices, Tensor ends, Tensor? thin=None, Tensor? b=None, float scale=1.0)"
    " -> Tensor"
)
_library.define("grouped_matrices(Tensor left, Tensor right, Tensor ends) -> Tensor")

_fused: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


_linear = torch.ops.bastile.moe_linear.default
#: The largest rank of adapters that the kernel adds.
_MOST_RANK = 64
#: Columns of a tile of the kernel.
_TILE = 256


@functools.cache
def _chip_has_it(device: torch.device) -> bool:
    return _fused is not None and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _aligned(t: torch.Tensor) -> bool:
    """What the kernel needs: one dimension dense, the others' strides and the address multiples of 16 bytes."""
    dense = 1 if t.stride(-1) != 1 else 0
    size = t.element_size()
    others = [s * size % 16 == 0 for i, s in enumerate(t.stride()) if i != t.dim() - 1 - dense]
    return t.stride(-1 - dense) == 1 and all(others) and t.data_ptr() % 16 == 0


def _on_device(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the kernel serves this product, with a dense result."""
    if not a.is_cuda or a.dtype is not torch.bfloat16 or not _chip_has_it(a.device):
        return False
    # The result's rows, too, begin at multiples of 16 bytes: it is padded, not dense, unless they are so long.
    return b.shape[-1] % 8 == 0 and _aligned(a) and _aligned(b)


def _in_tiles(rows: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Whether our kernel serves this product: where `bst_moe_linear` (bastile/moe.h) does not wait for the host."""
    is_ahead = is_warming_up(rows)
    has_kernel = is_ahead or (rows.is_cuda and is_hopper(rows.device))
    if not has_kernel or rows.dtype not in (torch.bfloat16, torch.float16) or not rows.numel() or not matrices.numel():
        return False
    return matrices.shape[2] % 8 == 0 and rows.stride(1) == 1 and (is_ahead or (_aligned(rows) and _aligned(matrices)))


def _takes_tiles(rows: torch.Tensor, matrices: torch.Tensor, thin: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether it is also the fastest. A twentieth of what tiles compute, and more, behind the last column is wasted. 16
    columns of 36,864 rows of 2048 take our kernel 108 us, PyTorch's 69; GPT-OSS' five products, three of them with 2880
    columns, 1.5 % more than PyTorch's, where without waste they take 1 and 2 % less (an H200, for seconds on end,
    limited by its power). But what an adapter adds need not be written and read."""
    if thin is not None and b is not None:
        return thin.shape[1] <= _MOST_RANK and _in_tiles(rows, matrices) and _in_tiles(thin, b)
    columns = matrices.shape[2]
    is_wasteful = -columns % _TILE * 20 > columns and _fused is not None and rows.dtype is torch.bfloat16
    return not is_wasteful and _in_tiles(rows, matrices)


def _one_by_one(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes the product of each group that has rows. What is not matrices [E, ...] is rows."""
    with torch.no_grad(), torch.autocast(left.device.type, enabled=False):
        start = 0
        for group, end in enumerate(ends.tolist()):
            if end > start:
                parts = (t[group] if t.dim() == 3 else t[start:end] for t in (left, right, out))
                a, b, target = parts
                torch.mm(a if out.dim() == 2 else a.t(), b, out=target)
            start = end
    return out


def _rows(
    rows: torch.Tensor,
    matrices: torch.Tensor,
    ends: torch.Tensor,
    thin: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    if _takes_tiles(rows, matrices, thin, b):
        return _linear(rows, matrices, ends, thin, b, scale)
    if rows.shape[0] and _on_device(rows, matrices):
        y = _fused(rows, matrices, offs=ends)
    else:
        y = rows.new_empty((rows.shape[0], matrices.shape[2]))
        if rows.shape[0]:
            _one_by_one(rows, matrices, ends, y)
    return y if thin is None or b is None else y.add_(_rows(thin, b, ends), alpha=scale)


def _matrices(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if left.shape[0] and _on_device(left, right):
        return _fused(left.t(), right, offs=ends)
    out = left.new_zeros((ends.shape[0], left.shape[1], right.shape[1]))
    return _one_by_one(left, right, ends, out) if left.shape[0] else out


_library.impl("grouped_rows", _rows, "CompositeExplicitAutograd")
_library.impl("grouped_matrices", _matrices, "CompositeExplicitAutograd")


@register_fake("bastile::grouped_rows")
def _(rows, matrices, ends, thin=None, b=None, scale=1.0):
    return rows.new_empty((rows.shape[0], matrices.shape[2]))


@register_fake("bastile::grouped_matrices")
def _(left, right, ends):
    return left.new_empty((ends.shape[0], left.shape[1], right.shape[1]))


def _lacks_values(*tensors: torch.Tensor) -> bool:
    """Whether only shapes are wanted, while compiling and of fake tensors, or vmap has the values."""
    return torch.compiler.is_compiling() or not has_values(*tensors) or any([is_batched(t) for t in tensors])


def grouped_rows(
    rows: torch.Tensor,
    matrices: torch.Tensor,
    ends: torch.Tensor,
    thin: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """rows [N, A] times matrices [E, A, B]: row n with the matrix of the group e that has ends[e - 1] <= n < ends[e].
    With thin [N, R] and b [E, R, B], plus scale · thin times b likewise.

    Any strides; those of a transposed tensor cost no copy. Rows behind the last group's are left as they come.
    """
    if _lacks_values(rows, matrices) and not (is_warming_up(rows) and _takes_tiles(rows, matrices, thin, b)):
        return torch.ops.bastile.grouped_rows(rows, matrices, ends, thin, b, scale)
    return _rows(rows, matrices, ends, thin, b, scale)


def grouped_matrices(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """left [N, A] transposed times right [N, B], group by group: [E, A, B], zeros where a group is empty."""
    if _lacks_values(left, right):
        return torch.ops.bastile.grouped_matrices(left, right, ends)
    return _matrices(left, right, ends)
