"""Logits of several heads as torch.stack makes one tensor of them: models of sound have a head for each codebook.

A stack takes copies of its heads' logits, so what is done to those later is not seen in it. One head's part of it is
logits like others, whose loss runs fused. What changes each number is done to each head's; what moves them, noted."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils.hooks import RemovableHandle

from bastile.guards import gathers
from bastile.models.logits import follow, parts  # noqa: F401  (they enter what is followed of each head's)
from bastile.models.logits.pending import Pending
from bastile.models.logits.tensor import FOLLOWED, Logits, OnDemand, Part, followed, logits_of

_T = torch.Tensor
View = Callable[[torch.Tensor], torch.Tensor]


class Stack:
    """Memory that has not been made: several heads' logits along a dimension."""

    def __init__(self, heads: list[Logits], along: int) -> None:
        self.heads, self.along = _tied(heads), along
        self.made: torch.Tensor | None = None
        one = list(heads[0].shape)
        self.shape = torch.Size([*one[:along], len(heads), *one[along:]])
        self.with_grad = any(head.requires_grad for head in self.heads)
        for head in self.heads:
            head.pending.stack = weakref.ref(self)

    def make(self) -> torch.Tensor:
        if self.made is None:
            of_heads = [head.pending for head in self.heads]
            with torch.set_grad_enabled(self.with_grad):
                self.made = torch.stack([pending.made_alone() for pending in of_heads], self.along)
                for number, pending in enumerate(of_heads):
                    pending.take(self.made.select(self.along, number))
        return self.made


@dataclass(frozen=True)
class Shown:
    """What of a stack a tensor shows. views: from the stack to it. heads, along: each head's logits that are in it, and
    the dimension in which they stand; None: a view has mixed them."""

    stack: Stack
    shape: torch.Size
    views: tuple[View, ...] = ()
    heads: tuple[Logits, ...] | None = None
    along: int = 0


class Stacked(OnDemand):
    """A stack of logits that are made when they are read, or a view of one."""

    table: ClassVar[dict[Any, Callable[..., Any]]] = {}
    shown: Shown
    _value: torch.Tensor | None

    def __init__(self, shown: Shown) -> None:
        self.shown, self.call, self._value = shown, shown.stack.heads[0].call, None

    @staticmethod
    def __new__(cls, shown: Shown) -> Stacked:
        first = shown.stack.heads[0]
        return torch.Tensor._make_wrapper_subclass(cls, shown.shape, dtype=first.dtype, device=first.device)

    @property
    def is_made(self) -> bool:
        return self.shown.stack.made is not None

    def read(self, all_of_them: bool = False) -> torch.Tensor:
        if self._value is None:
            with torch.set_grad_enabled(self.requires_grad):
                value = self.shown.stack.make()
                value = value if self.requires_grad else value.detach()
                for view in self.shown.views:
                    value = view(value)
            self._value = value
        return self._value


class _StandIn(torch.autograd.Function):
    """A stack's place in the graph, behind those of its heads."""

    @staticmethod
    def forward(ctx, shown, *heads):
        ctx.shown = shown
        return Stacked(shown)

    @staticmethod
    def backward(ctx, gradient):
        shown = ctx.shown
        if shown.views:
            with torch.enable_grad():
                whole = value = gradient.new_zeros(shown.stack.shape).requires_grad_()
                for view in shown.views:
                    value = view(value)
            (gradient,) = torch.autograd.grad(value, whole, gradient)
        return None, *gradient.unbind(shown.stack.along)


class _Tie(torch.autograd.Function):
    """The rows behind each head, with gradients of zero for all weights: behind a stack a head that no loss looks at
    has a gradient too, which shardings count on."""

    @staticmethod
    def forward(ctx, weights, *tensors):
        ctx.weights = weights
        return tensors[len(weights) :]

    @staticmethod
    def backward(ctx, *gradients):
        zero = (w.new_zeros(()).expand(w.shape) if w.requires_grad else None for w in ctx.weights)
        return None, *zero, *gradients


def _tied(heads: list[Logits]) -> list[Logits]:
    """Copies of these, whose gradients come together. None is all of its memory: who writes to it writes to a stack."""
    calls, grad = [head.call for head in heads], torch.is_grad_enabled()
    rows = [head.part.rows for head in heads]
    if grad and all(r.requires_grad for r in rows):
        tensors = [t for c in calls if not c.is_gathered for t in c.tensors]
        rows = list(_Tie.apply(tensors, *tensors, *rows))
    return [
        logits_of(
            Pending(head.call, r, [*head.pending.steps], head.dtype),
            Part(r, is_whole=False),
            grad and head.requires_grad,
        )
        for head, r in zip(heads, rows, strict=True)
    ]


def _stacked(shown: Shown, with_grad: bool) -> Stacked:
    if not with_grad:
        return Stacked(shown)
    with torch.enable_grad():
        return _StandIn.apply(shown, *shown.stack.heads)


def _new(heads: list[Logits], along: int) -> Stacked:
    stack = Stack(heads, along)
    return _stacked(Shown(stack, stack.shape, heads=tuple(stack.heads), along=along), stack.with_grad)


@followed(torch.stack)
def _stack(tensors: Any, dim: int = 0, **options: Any) -> Any:
    if options or not all(isinstance(t, Logits) and not t.is_made and t.part.move is None for t in tensors):
        return NotImplemented
    if len({(t.shape, t.dtype, t.device) for t in tensors}) > 1 or dim % (tensors[0].dim() + 1) == tensors[0].dim():
        return NotImplemented
    return _new(list(tensors), dim % (tensors[0].dim() + 1))


# ---- what is followed of a stack -------------------------------------------------------------------------------------


def _follows(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(follow_it: Callable[..., Any]) -> Callable[..., Any]:
        Stacked.table.update(dict.fromkeys(functions, follow_it))
        return follow_it

    return enter


def _each_head(function: Any) -> None:
    """A new tensor, each of whose numbers comes from the one in its place."""

    def do(stacked: Stacked, *args: Any, **kwargs: Any) -> Any:
        shown = stacked.shown
        of_each = shown.stack.heads if shown.heads is None else shown.heads
        made = [FOLLOWED[function](head, *args, **kwargs) for head in of_each]
        if all(one is head for one, head in zip(made, of_each, strict=True)):  # a cast to the type that they have
            return stacked
        if not all(isinstance(one, Logits) for one in made):
            return NotImplemented
        if shown.heads is not None:
            return _new(made, shown.along)
        stack = Stack(made, shown.stack.along)
        return _stacked(Shown(stack, shown.shape, shown.views), stack.with_grad)

    _follows(function)(do)


for _owner, _names in (
    (_T, "float half bfloat16 to type type_as clone mul __mul__ __rmul__ div __truediv__ tanh"),
    (torch, "clone mul div true_divide tanh"),
):
    for _name in _names.split():
        _each_head(getattr(_owner, _name))


@_follows(_T.detach, torch.detach)
def _detach(stacked: Stacked) -> Stacked:
    shown = stacked.shown
    heads: Any = None if shown.heads is None else tuple(head.detach() for head in shown.heads)
    return Stacked(Shown(shown.stack, shown.shape, shown.views, heads, shown.along))


@_follows(_T.register_hook)
def _register_hook(stacked: Stacked, hook: Callable[[torch.Tensor], Any]) -> Any:
    """As of one head's (follow.py): before whichever gradient comes first."""
    if not stacked.requires_grad or not gathers(hook):
        return NotImplemented
    first, *others = (head.call.hooks for head in stacked.shown.stack.heads)
    handle = RemovableHandle(first, extra_dict=others)
    for hooks in (first, *others):
        hooks[handle.id] = hook
    return handle


def _view(stacked: Stacked, view: View, heads: tuple[Logits, ...] | None = None, along: int = 0) -> Stacked:
    """The same memory. Its shape is that of the view of a tensor without any."""
    shown, shape = stacked.shown, view(torch.empty(stacked.shape, device="meta")).shape
    return _stacked(Shown(shown.stack, shape, (*shown.views, view), heads, along), stacked.requires_grad)


def _moves(function: Any) -> None:
    def move(stacked: Stacked, *args: Any, **kwargs: Any) -> Any:
        return _view(stacked, lambda z: function(z, *args, **kwargs))

    _follows(function)(move)


for _owner in (_T, torch):
    for _name in ("view", "reshape", "flatten", "transpose", "permute", "unsqueeze", "squeeze"):
        if hasattr(_owner, _name):
            _moves(getattr(_owner, _name))


@_follows(_T.__getitem__)
def _getitem(stacked: Stacked, index: Any) -> Any:
    """One head's logits, or a part of all."""
    shown, index = stacked.shown, index if isinstance(index, tuple) else (index,)
    plain = [isinstance(i, (int, slice)) and not isinstance(i, bool) for i in index]
    dots = [number for number, i in enumerate(index) if i is Ellipsis]
    missing = stacked.dim() - sum(plain)
    if shown.heads is None or sum(plain) + len(dots) != len(index) or len(dots) > 1 or missing < 0:
        return NotImplemented
    at = dots[0] if dots else len(index)
    index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
    which, rest = index[shown.along], (*index[: shown.along], *index[shown.along + 1 :])
    if rest[-1] != slice(None):
        return NotImplemented
    if isinstance(which, int):
        return _part(shown.heads[which], rest)
    heads = tuple(_part(head, rest) for head in shown.heads[which])
    along = sum(isinstance(i, slice) for i in index[: shown.along])
    return _view(stacked, lambda z: z[index], heads, along) if heads else NotImplemented


def _part(head: Logits, index: tuple[Any, ...]) -> Any:
    return head if all(i == slice(None) for i in index) else head[index]


@_follows(_T.select, torch.select)
def _select(stacked: Stacked, dim: int, index: int) -> Any:
    return _getitem(stacked, (*[slice(None)] * (dim % stacked.dim()), index))


@_follows(_T.unbind, torch.unbind)
def _unbind(stacked: Stacked, dim: int = 0) -> Any:
    dim %= stacked.dim()
    if stacked.shown.heads is None or dim == stacked.dim() - 1:
        return NotImplemented
    return tuple(_select(stacked, dim, number) for number in range(stacked.shape[dim]))


@_follows(_T.__iter__)
def _iter(stacked: Stacked) -> Any:
    each = _unbind(stacked)
    return each if each is NotImplemented else iter(each)
