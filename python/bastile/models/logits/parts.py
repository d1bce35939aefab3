"""Parts and other shapes of logits that have not been made: those of the hidden states behind them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from bastile.models.logits.tensor import Logits, Part, copied, followed, with_part

_T = torch.Tensor


def _part(logits: Logits, of_rows: Any, of_values: Any, is_whole: bool, is_turned: bool = False) -> Logits:
    part = logits.part
    with torch.set_grad_enabled(logits.requires_grad):
        new = Part(
            of_rows(part.rows),
            (*part.views, of_values),
            part.is_whole and is_whole,
            is_turned=part.is_turned or is_turned,
        )
    return with_part(logits, new)


@followed(_T.view, _T.reshape, torch.reshape)
def _reshape(logits: Logits, *shape: Any, **named: Any) -> Any:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    if named or not shape or logits.part.move is not None or not all(isinstance(n, int) for n in shape):
        return NotImplemented
    shape = tuple(shape)
    if shape.count(-1) == 1 and 0 not in shape:
        known = math.prod([n for n in shape if n != -1])
        shape = tuple(logits.numel() // known if n == -1 else n for n in shape)
    vocabulary = logits.pending.vocabulary
    if math.prod(shape) != logits.numel() or shape[-1] != vocabulary or -1 in shape:
        return NotImplemented
    if logits.part.is_turned:
        if len(shape) != 2 or not logits.part.is_whole:  # a view or a copy, as its sizes have it
            return NotImplemented
        logits = copied(logits)
    rows = (*shape[:-1], logits.part.rows.shape[-1])
    return _part(logits, lambda t: t.reshape(rows), lambda z: z.reshape(shape), True)


@followed(_T.view_as, _T.reshape_as)
def _view_as(logits: Logits, other: torch.Tensor) -> Any:
    """Autograd asks for it where a function returns what it was given."""
    if other is logits:
        return with_part(logits, logits.part)
    return _reshape(logits, *other.shape)


@followed(_T.flatten, torch.flatten)
def _flatten(logits: Logits, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last = start_dim % logits.dim(), end_dim % logits.dim()
    if last == logits.dim() - 1 or first > last:
        return logits if first == last else NotImplemented
    shape = logits.shape
    return _reshape(logits, *shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])


@followed(_T.__getitem__)
def _getitem(logits: Logits, index: Any) -> Any:
    index = index if isinstance(index, tuple) else (index,)
    if logits.part.move is not None:
        return NotImplemented
    taken = sum(_dimensions(i) for i in index if i is not None and i is not Ellipsis)
    rest = logits.dim() - taken
    if rest < 0 or sum(i is Ellipsis for i in index) > 1:
        return NotImplemented
    if any(i is Ellipsis for i in index):
        at = next(number for number, i in enumerate(index) if i is Ellipsis)
        index = (*index[:at], *[slice(None)] * rest, *index[at + 1 :])
        rest = 0
    if rest == 0:  # the last one is the vocabulary's
        *index, of_vocabulary = index
        if not isinstance(of_vocabulary, slice) or of_vocabulary.indices(logits.shape[-1]) != (0, logits.shape[-1], 1):
            return NotImplemented
    index = tuple(index)
    if any(isinstance(i, (_T, list)) for i in index):  # a copy
        if any(isinstance(i, Logits) for i in index):
            return NotImplemented
        return _of_rows(logits, logits.part.rows[index])
    if not all(i is None or isinstance(i, (int, slice)) for i in index) or any(isinstance(i, bool) for i in index):
        return NotImplemented
    return _part(logits, lambda t: t[index], lambda z: z[index], False)


def _dimensions(index: Any) -> int:
    return index.dim() if isinstance(index, _T) and index.dtype in (torch.bool, torch.uint8) else 1


def _of_rows(logits: Logits, rows: torch.Tensor) -> Logits:
    """New logits of other rows, by the same steps."""
    return copied(with_part(logits, Part(rows)))


@followed(_T.index_select, torch.index_select)
def _index_select(logits: Logits, dim: int, index: torch.Tensor) -> Any:
    if logits.part.move is not None or not isinstance(dim, int) or dim % logits.dim() == logits.dim() - 1:
        return NotImplemented
    return _of_rows(logits, logits.part.rows.index_select(dim % logits.dim(), index))


def _along(function: Any, at: int, default: int | None, many: bool) -> None:
    """Follows a function that takes parts along a dimension, its argument number `at` or `dim`."""
    name = function.__name__

    def follow(logits: Logits, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[at] if len(args) > at else default)
        if not isinstance(dim, int) or logits.part.move is not None or dim % logits.dim() == logits.dim() - 1:
            return NotImplemented

        def of(t: torch.Tensor) -> Any:
            return getattr(t, name)(*args, **kwargs)

        if not many:
            return _part(logits, of, of, False)
        pieces = of(logits.part.rows)
        return tuple(
            _part(logits, lambda _, piece=piece: piece, lambda z, number=number: of(z)[number], False)
            for number, piece in enumerate(pieces)
        )

    followed(function)(follow)


for _owner in (_T, torch):
    for _name, _at, _default, _many in (
        ("split", 1, 0, True),
        ("chunk", 1, 0, True),
        ("unbind", 0, 0, True),
        ("narrow", 0, None, False),
        ("select", 0, None, False),
    ):
        _along(getattr(_owner, _name), _at, _default, _many)


@followed(_T.__iter__)
def _iter(logits: Logits) -> Any:
    return iter(logits.unbind(0)) if logits.dim() > 1 else NotImplemented


@followed(_T.unsqueeze, torch.unsqueeze)
def _unsqueeze(logits: Logits, dim: int) -> Any:
    if dim % (logits.dim() + 1) == logits.dim() or logits.part.move is not None:
        return NotImplemented
    of = partial(torch.unsqueeze, dim=dim)
    return _part(logits, of, of, True)


@followed(_T.squeeze, torch.squeeze)
def _squeeze(logits: Logits, dim: Any = None) -> Any:
    if not isinstance(dim, int) or dim % logits.dim() == logits.dim() - 1 or logits.part.move is not None:
        return NotImplemented
    of = partial(torch.squeeze, dim=dim)
    return _part(logits, of, of, True)


@followed(_T.transpose, torch.transpose)
def _transpose(logits: Logits, *dims: Any, **named: Any) -> Any:
    many = logits.dim()
    if named or len(dims) != 2 or not all(isinstance(dim, int) and -many <= dim < many for dim in dims):
        return NotImplemented
    first, second = dims[0] % many, dims[1] % many
    return _turn(logits, [second if dim == first else first if dim == second else dim for dim in range(many)])


@followed(_T.permute, torch.permute)
def _permute(logits: Logits, *dims: Any, **named: Any) -> Any:
    dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    many = logits.dim()
    if named or not all(isinstance(dim, int) and -many <= dim < many for dim in dims):
        return NotImplemented
    return _turn(logits, [dim % many for dim in dims])


def _turn(logits: Logits, order: list[int]) -> Any:
    """The rows in another order, as models with time first have them; or [B, T, V] to [B, V, T], as torch's loss takes
    it."""
    part, many = logits.part, logits.dim()
    if part.move is not None or sorted(order) != list(range(many)):
        return NotImplemented
    if order[-1] == many - 1:
        long = [dim for dim in order if logits.shape[dim] > 1]
        return _part(logits, lambda t: t.permute(order), lambda z: z.permute(order), True, long != sorted(long))
    if order != [0, 2, 1] or part.is_turned:
        return NotImplemented

    def move(z: torch.Tensor) -> torch.Tensor:
        return z.transpose(1, 2)

    return with_part(logits, Part(part.rows, (*part.views, move), part.is_whole, move))
