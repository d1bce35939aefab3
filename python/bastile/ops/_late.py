"""What is left to do when a node is there.

A checkpoint that runs its function a second time ends it as soon as all is kept again that the backward pass reads: in
the middle of making the last node. What that node's forward has done by then was for nothing where only its result
needed it, as the last product of a decoder layer. So a node gives memory for its result, and what comes after it fills
that memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Late:
    """Given to a node's forward, which says by `leave` what is left; `do`, once the node is there, does it."""

    __slots__ = ("_work",)

    def __init__(self) -> None:
        self._work: tuple[Any, ...] | None = None

    def leave(self, work: Callable[..., None], *arguments: Any) -> None:
        """work: called with the arguments and the node's results."""
        self._work = work, *arguments

    def do(self, *results: torch.Tensor) -> None:
        if self._work is not None:
            work, *arguments = self._work
            with torch.no_grad():
                work(*arguments, *results)


def finished(rest: Late | None, out: Any) -> torch.Tensor:
    """A node's result, the first of several, once what it left is done."""
    out = out[0] if type(out) is tuple else out
    if rest is not None:
        rest.do(out)
    return out


class Place:
    """Memory for a result that comes when it is made, if it is: what nodes save of it is a token without elements."""

    __slots__ = ("token",)

    def __init__(self, like: torch.Tensor) -> None:
        self.token = like.new_empty(0)

    def take(self, *shape: int) -> torch.Tensor:
        storage = self.token.untyped_storage()
        storage.resize_(math.prod(shape) * self.token.element_size())
        return _seen_as(self.token, shape)


def taken(token: torch.Tensor, *shape: int) -> torch.Tensor | None:
    """The result for whose place this token stands, if it was made."""
    return _seen_as(token, shape) if token.untyped_storage().size() else None


def _seen_as(token: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return token.new_empty(0).set_(token.untyped_storage(), 0, shape)  # type: ignore[call-overload]


def in_backward() -> bool:
    """Whether a backward pass is under way in this thread: nodes that are made there are a checkpoint's second run."""
    return torch._C._current_graph_task_id() >= 0


def in_checkpoint() -> bool:
    """Whether what nodes keep goes to one of PyTorch's checkpoints, in its first run and in its second."""
    hooks = _hooks(True)
    return hooks is not None and hooks[0].__module__ == checkpoint.__module__


def late(anywhere: bool = False) -> Late | None:
    """None outside a checkpoint, where nothing runs again, unless `anywhere`, and while compiling: the compiler leaves
    out by itself what nobody reads."""
    return Late() if not is_compiling() and (anywhere or in_checkpoint()) else None
