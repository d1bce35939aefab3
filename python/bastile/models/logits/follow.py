"""What is followed: what models and trainers do to logits on the way to a loss, without making them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from bastile.models.logits.head import gathers
from bastile.models.logits.pending import Step
from bastile.models.logits.tensor import Logits, Part, followed, in_place, with_part, with_step

_T = torch.Tensor

# ---- types -----------------------------------------------------------------------------------------------------------


def _cast(logits: Logits, dtype: torch.dtype) -> Any:
    if dtype is logits.dtype:
        return logits
    if not dtype.is_floating_point or logits.part.move is not None:
        return NotImplemented
    return with_step(logits, Step("cast", lambda z: z.to(dtype), dtype), dtype)


for _name, _dtype in (("float", torch.float32), ("half", torch.float16), ("bfloat16", torch.bfloat16)):
    followed(getattr(_T, _name))(
        lambda logits, dtype=_dtype, **options: NotImplemented if options else _cast(logits, dtype)
    )


@followed(_T.to)
def _to(logits: Logits, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(argument, _T) for argument in (*args, *kwargs.values())) or "copy" in kwargs:
        return NotImplemented
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):
        return NotImplemented
    if memory_format is not None or (device is not None and not _is_there(logits, device)):
        return NotImplemented
    return logits if dtype is None else _cast(logits, dtype)


def _is_there(logits: Logits, device: torch.device) -> bool:
    mine = logits.device
    return device.type == mine.type and (device.index is None or device.index == mine.index)


@followed(_T.type)
def _type(logits: Logits, dtype: Any = None) -> Any:
    return _cast(logits, dtype) if isinstance(dtype, torch.dtype) else NotImplemented


@followed(_T.type_as)
def _type_as(logits: Logits, other: torch.Tensor) -> Any:
    return _cast(logits, other.dtype) if _is_there(logits, other.device) else NotImplemented


# ---- the same memory -------------------------------------------------------------------------------------------------


@followed(_T.contiguous)
def _contiguous(logits: Logits, memory_format: Any = torch.contiguous_format) -> Any:
    if memory_format is not torch.contiguous_format:
        return NotImplemented
    # A part is copied by it, so that what is written there is not written to the rest.
    return logits if logits.part.is_whole or logits.part.move is not None else _copy(logits)


@followed(_T.clone, torch.clone)
def _clone(logits: Logits, memory_format: Any = None) -> Any:
    return NotImplemented if logits.part.move is not None else _copy(logits)


def _copy(logits: Logits) -> Any:
    return with_step(logits, Step("cast", lambda z: z, logits.dtype))


@followed(_T.detach, torch.detach)
def _detach(logits: Logits) -> Any:
    return Logits(logits.pending, logits.part)


@followed(_T.register_hook)
def _register_hook(logits: Logits, hook: Callable[[torch.Tensor], Any]) -> Any:
    """Shardings register one on whatever a model returns, to gather weights before the backward pass."""
    if not logits.requires_grad or not gathers(hook):
        return NotImplemented
    hooks = logits.pending.call.hooks
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


@followed(_T.grad.__get__)  # type: ignore[union-attr]
def _grad(logits: Logits) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return logits.grad


def _like_nothing(logits: Logits, *args: Any, function: Any, **kwargs: Any) -> Any:
    """What takes only type and device of its first argument."""
    return function(torch.empty(0, dtype=logits.dtype, device=logits.device), *args, **kwargs)


for _function in (_T.new_zeros, _T.new_ones, _T.new_empty, _T.new_full, _T.new_tensor):
    followed(_function)(partial(_like_nothing, function=_function))

# ---- parts and shapes: of the hidden states instead ------------------------------------------------------------------


def _part(logits: Logits, of_rows: Any, of_values: Any, is_whole: bool) -> Logits:
    part = logits.part
    with torch.set_grad_enabled(logits.requires_grad):
        new = Part(of_rows(part.rows), (*part.views, of_values), part.is_whole and is_whole)
    return with_part(logits, new)


@followed(_T.view, _T.reshape, torch.reshape)
def _reshape(logits: Logits, *shape: Any, **named: Any) -> Any:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    if named or not shape or logits.part.move is not None or not all(isinstance(n, int) for n in shape):
        return NotImplemented
    shape = tuple(shape)
    if shape.count(-1) == 1 and 0 not in shape:
        known = math.prod(n for n in shape if n != -1)
        shape = tuple(logits.numel() // known if n == -1 else n for n in shape)
    vocabulary = logits.pending.vocabulary
    if math.prod(shape) != logits.numel() or shape[-1] != vocabulary or -1 in shape:
        return NotImplemented
    rows = (*shape[:-1], logits.part.rows.shape[-1])
    return _part(logits, lambda t: t.reshape(rows), lambda z: z.reshape(shape), True)


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
    return with_step(with_part(logits, Part(rows)), Step("cast", lambda z: z, logits.dtype))


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


@followed(_T.transpose, torch.transpose, _T.permute, torch.permute)
def _move(logits: Logits, *dims: Any, **named: Any) -> Any:
    """[B, T, V] to [B, V, T], as torch's loss takes it."""
    dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    part = logits.part
    if named or logits.dim() != 3 or part.move is not None or len(dims) not in (2, 3):
        return NotImplemented
    dims = tuple(dim % 3 for dim in dims)
    if (sorted(dims) if len(dims) == 2 else dims) not in ([1, 2], (0, 2, 1)):
        return NotImplemented

    def move(z: torch.Tensor) -> torch.Tensor:
        return z.transpose(1, 2)

    return with_part(logits, Part(part.rows, (*part.views, move), part.is_whole, move))


# ---- steps -----------------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _scale(function: Any, writes: bool, inverse: bool) -> Callable[..., Any]:
    def follow(logits: Logits, factor: Any, **options: Any) -> Any:
        if not _is_number(factor) or options or logits.part.move is not None or (inverse and factor == 0):
            return NotImplemented
        step = Step("scale", lambda z: function(z, factor), 1 / factor if inverse else factor)
        return in_place(logits, step) if writes else with_step(logits, step)

    return follow


followed(_T.mul, _T.__mul__, _T.__rmul__, torch.mul)(_scale(torch.mul, False, False))
followed(_T.mul_, _T.__imul__)(_scale(torch.mul, True, False))
followed(_T.div, _T.__truediv__, torch.div, torch.true_divide)(_scale(torch.div, False, True))
followed(_T.div_, _T.__itruediv__)(_scale(torch.div, True, True))


@followed(_T.tanh, torch.tanh)
def _tanh(logits: Logits) -> Any:
    return NotImplemented if logits.part.move is not None else with_step(logits, Step("tanh", torch.tanh))


@followed(_T.tanh_)
def _tanh_(logits: Logits) -> Any:
    return NotImplemented if logits.part.move is not None else in_place(logits, Step("tanh", torch.tanh))


@followed(_T.add, _T.__add__, torch.add)
def _add(logits: Logits, other: Any, **options: Any) -> Any:
    """A bias that is no part of the head, [V] or [1, V]."""
    if options or not isinstance(other, _T) or isinstance(other, Logits) or logits.part.move is not None:
        return NotImplemented
    fits = other.dim() > 0 and other.numel() == other.shape[-1] == logits.pending.vocabulary
    if not fits or other.dtype is not logits.dtype or other.dim() > logits.dim() or other.requires_grad:
        return NotImplemented
    return with_step(logits, Step("add", lambda z: z + other, other.reshape(-1)))


@followed(_T.log_softmax, torch.log_softmax, F.log_softmax)
def _log_softmax(logits: Logits, dim: Any = None, *args: Any, dtype: Any = None, **options: Any) -> Any:
    options.pop("_stacklevel", None)
    if options or not isinstance(dim, int) or dim % logits.dim() != logits.dim() - 1 or logits.part.move is not None:
        return NotImplemented
    if args:  # F.log_softmax(x, dim, _stacklevel, dtype); the others: (x, dim, dtype)
        dtype = next((argument for argument in args if isinstance(argument, torch.dtype)), dtype)
    device = logits.device.type
    if dtype is None:
        dtype = torch.float32 if torch.is_autocast_enabled(device) else logits.dtype
    if not dtype.is_floating_point:
        return NotImplemented
    return with_step(logits, Step("log_softmax", lambda z: torch.log_softmax(z, -1, dtype=dtype)), dtype)
