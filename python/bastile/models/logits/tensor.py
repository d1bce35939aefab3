"""The tensor that a head returns in place of logits: shape and type of theirs, and no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map_only

from bastile.models.logits.pending import Call, Pending, Step
from bastile.models.logits.said import note

_T = torch.Tensor
#: What is answered without values: properties, and methods.
_PROPERTIES = ["shape", "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "ndim", "names", "itemsize"]
_PROPERTIES += ["nbytes", "output_nr", "retains_grad", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr"]
_PROPERTIES += ["is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xpu", "is_xla", "_base", "_version", "name"]
_METHODS = ["size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "__len__"]
_METHODS += ["is_floating_point", "is_complex", "is_signed", "is_inference", "is_same_size", "get_device"]
_METHODS += ["element_size", "is_conj", "is_neg"]
METADATA: frozenset[Any] = frozenset(
    [getattr(_T, name).__get__ for name in _PROPERTIES if hasattr(_T, name)]
    + [getattr(_T, name) for name in _METHODS]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference, torch.is_same_size]
)
#: Functions that change their first argument although their names do not end in "_".
_WRITE = {"__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"}
_WRITE |= {"__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "retain_grad"}

#: What is followed: a function, to what does it to Logits without making them, or returns NotImplemented.
FOLLOWED: dict[Any, Callable[..., Any]] = {}


def followed(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(follow: Callable[..., Any]) -> Callable[..., Any]:
        FOLLOWED.update(dict.fromkeys(functions, follow))
        return follow

    return enter


@dataclass(frozen=True)
class Part:
    """Which of the pending logits a tensor shows.

    rows [..., H]: the hidden states behind it. views: from all logits to it. is_whole: whether it shows all of them.
    move: what puts the vocabulary of three dimensions second, at the end of views; None where it is last. is_turned:
    whether the rows stand in another order than in memory, so that contiguous ones are a copy."""

    rows: torch.Tensor
    views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    is_whole: bool = True
    move: Callable[[torch.Tensor], torch.Tensor] | None = None
    is_turned: bool = False


class OnDemand(torch.Tensor):
    """A tensor without memory, whose values are made when they are read."""

    #: What is done to it without making it.
    table: ClassVar[dict[Any, Callable[..., Any]]]
    #: One of the calls that it comes from.
    call: Call

    @property
    def is_made(self) -> bool:
        raise NotImplementedError

    def read(self, all_of_them: bool = False) -> torch.Tensor:
        """The values. all_of_them: those that share its memory, too, since they may be written to."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, (tuple, list)) and first:  # of tensors
            first = first[0]
        if isinstance(first, OnDemand) and not first.is_made:
            follow = first.table.get(func)
            result = NotImplemented if follow is None else follow(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _of_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """For those who call PyTorch below its Python functions."""
        return _of_values(func, args, kwargs or {})


class Logits(OnDemand):
    """Logits that are made when they are read; see bastile.models.logits."""

    table = FOLLOWED
    pending: Pending
    part: Part
    _value: tuple[Any, torch.Tensor] | None

    def __init__(self, pending: Pending, part: Part) -> None:
        self.pending, self.part, self.call, self._value = pending, part, pending.call, None
        pending.show(self)

    @staticmethod
    def __new__(cls, pending: Pending, part: Part) -> Logits:
        shape = [*part.rows.shape[:-1], pending.vocabulary]
        if part.move is not None:
            shape[1:] = reversed(shape[1:])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=pending.dtype, device=part.rows.device)

    @property
    def is_made(self) -> bool:
        return self.pending.made is not None

    def read(self, all_of_them: bool = False) -> torch.Tensor:
        """What they are, made now if they have not been; a part by itself, unless all are made or wanted."""
        pending, part = self.pending, self.part
        with torch.set_grad_enabled(self.requires_grad):
            if pending.made is None and not part.is_whole and not all_of_them:
                if self._value is not None and self._value[0] == len(pending.steps):
                    return self._value[1]
                if pending.may_make(part.rows.shape[:-1].numel()):
                    piece = pending.call.announce(pending.compute(part.rows))
                    self._value = len(pending.steps), piece if part.move is None else part.move(piece)
                    return self._value[1]
            made = pending.make()
            if self._value is None or self._value[0] is not made:
                value = made if self.requires_grad else made.detach()
                for view in part.views:
                    value = view(value)
                self._value = made, value
            return self._value[1]


class _StandIn(torch.autograd.Function):
    """Gives Logits their place in the graph: for those who look at it, or send gradients into it, without reading."""

    @staticmethod
    def forward(ctx, pending, part, *sources):
        # Not by save_for_backward: hooks that offload activations would copy the weight, for what is seldom used.
        ctx.pending, ctx.part, ctx.sources = pending, part, sources
        return Logits(pending, part)

    @staticmethod
    def backward(ctx, gradient):
        sources = list(ctx.sources)
        wanted = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            rows = sources[0] = ctx.part.rows.detach().requires_grad_()
            z = ctx.pending.compute(rows)
            z = z if ctx.part.move is None else ctx.part.move(z)
        if ctx.pending.call.is_gathered:  # the head's own gradients go where its hooks expect them
            torch.autograd.backward(z, gradient)
            return None, None, rows.grad
        asked = [t for t, want in zip(sources, wanted, strict=True) if want]
        found = iter(torch.autograd.grad(z, asked, gradient))
        return None, None, *[next(found) if want else None for want in wanted]


def logits_of(pending: Pending, part: Part, with_grad: bool) -> Logits:
    """Logits that show this part. with_grad: with a place in the graph."""
    if not with_grad:
        return Logits(pending, part)
    call = pending.call
    weights = () if call.is_gathered else call.tensors
    with torch.enable_grad():
        return _StandIn.apply(pending, part, part.rows, *weights)


def put_off(call: Call) -> Logits:
    """The logits of a call."""
    return logits_of(Pending(call, call.hidden, [], call.dtype), Part(call.hidden), call.with_grad)


def with_step(logits: Logits, step: Step, dtype: torch.dtype | None = None, keeps_order: bool = True) -> Logits:
    """New logits: these, and a step further. keeps_order: of rows in memory."""
    old, rows, move = logits.pending, logits.part.rows, logits.part.move
    before = old if rows is old.rows and move is None else None
    new = Pending(old.call, rows, [*old.steps, step], dtype or old.dtype, before)
    part = Part(rows, () if move is None else (move,), move=move, is_turned=keeps_order and logits.part.is_turned)
    return _like(logits, new, part, logits.requires_grad and torch.is_grad_enabled())


def copied(logits: Logits) -> Any:
    """New logits of the same values, contiguous but for a vocabulary that is not last."""
    return with_step(logits, Step("cast", lambda z: z, logits.dtype), keeps_order=False)


def in_place(logits: Logits, step: Step) -> Any:
    """These very logits, and all that share their memory, a step further. A part of them where nobody sees the rest."""
    with_grad = logits.pending.call.with_grad
    is_all = logits.part.is_whole or logits.pending.is_shown_by_alone(logits)
    if not is_all or (logits.requires_grad and torch.is_grad_enabled()) != with_grad:
        return NotImplemented  # the gradient knows nothing of what is written without it
    logits.pending.steps.append(step)
    return logits


def with_part(logits: Logits, part: Part) -> Logits:
    """A view of the same memory. It requires a gradient where its base does, in no_grad too."""
    return _like(logits, logits.pending, part, logits.requires_grad)


def _like(logits: Any, pending: Pending, part: Part, with_grad: bool) -> Any:
    """What is followed may be an object of another class, which torch.compile reads through."""
    return logits_of(pending, part, with_grad) if isinstance(logits, Logits) else type(logits)(pending, part)


def _of_values(func: Any, args: Any, kwargs: Any) -> Any:
    """func of the values."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # of a property
        name = getattr(func.__self__, "__name__", name)
    writes = name in _WRITE or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
    if isinstance(func, torch._ops.OpOverload):
        writes = func._schema.is_mutable
    values: dict[int, tuple[OnDemand, torch.Tensor]] = {}

    def value(logits: OnDemand) -> torch.Tensor:
        if id(logits) not in values:
            if not logits.is_made:
                _say(logits, name)
            values[id(logits)] = logits, logits.read(all_of_them=writes)
        return values[id(logits)][1]

    args, kwargs = tree_map_only(OnDemand, value, (args, kwargs))
    result = func(*args, **kwargs)
    for logits, made in values.values():
        if writes and result is made:
            return logits
    return result


def _say(logits: OnDemand, name: str) -> None:
    forward = logits.call.forward
    loses_the_loss = forward.is_open and logits.requires_grad
    note("stepped aside" if loses_the_loss else "made", forward.model, f"{name} reads them")
