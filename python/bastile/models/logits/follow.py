"""Types and steps of logits that have not been made: what models and trainers do to them on the way to a loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from bastile.guards import gathers
from bastile.models.logits.pending import Step
from bastile.models.logits.tensor import Logits, copied, followed, in_place, with_step
from bastile.ops._common import HALVES

_T = torch.Tensor

# ---- types -----------------------------------------------------------------------------------------------------------


def _cast(logits: Logits, dtype: torch.dtype) -> Any:
    if dtype is logits.dtype:
        return logits
    if not dtype.is_floating_point:
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
    # What is not contiguous is copied, so that what is written there is not written to the rest.
    part = logits.part
    return logits if part.is_whole and part.move is None and not part.is_turned else copied(logits)


@followed(_T.clone, torch.clone)
def _clone(logits: Logits, memory_format: Any = None) -> Any:
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
    """A bias that is no part of the head, [V] or [1, V]. Under autocast BART's is of float32 where logits have 16 bits,
    which hold it too."""
    if options or not isinstance(other, _T) or isinstance(other, Logits) or logits.part.move is not None:
        return NotImplemented
    fits = other.dim() > 0 and other.numel() == other.shape[-1] == logits.pending.vocabulary
    call = logits.pending.call
    if not fits or other.dim() > logits.dim():
        return NotImplemented
    if other.requires_grad and (not logits.requires_grad or call.adapter is not None):
        return NotImplemented
    if other.dtype is torch.float32 and logits.dtype in HALVES and _hold(logits.dtype, other):
        logits = _cast(logits, torch.float32)
    if other.dtype is not logits.dtype:
        return NotImplemented
    call.watch(other)
    return with_step(logits, Step("add", lambda z: z + other, other.reshape(-1)))


#: Of a bias: how often it had been written to, and by type whether this holds its numbers.
_held = WeakTensorKeyDictionary()


def _hold(dtype: torch.dtype, bias: torch.Tensor) -> bool:
    """Whether this type does its numbers: asked once, for the host waits for the answer."""
    now = 0 if bias.is_inference() else bias._version
    version, answers = _held.get(bias, (None, {}))
    if version != now:
        answers = {}
        _held[bias] = now, answers
    if dtype not in answers:
        if bias.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        answers[dtype] = torch.equal(bias.to(dtype).to(bias.dtype), bias)
    return bool(answers[dtype])


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
