"""Where the host's time counts.

Two operators save the GPU a few microseconds of what it moves and cost the host more of them than the one or two
kernels whose place they take, for each is a node of autograd in Python. Layers that are CUDA graphs, or may become
some, cost it nothing, and around them there are few calls. Where there are no graphs, because layers cannot have them
or a model has no stack of layers, such an operator runs where the call alone is large."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from bastile.ops._common import has_values, on_gpu
from bastile.recompute import is_recomputing

#: Below so many multiplications outside of graphs the host's time counts: an H100 does three times as many, of which a
#: training step has need, in some 150 us, of which a node of autograd of our own takes the host the larger part.
LEAST = 1 << 34
#: Calls since the last stack of layers ran until it is seen that there is none.
_MANY = 512

_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class _State:
    """Of the process."""

    def __init__(self) -> None:
        self.asked = True  # not where graphs are off: numbers are those of graphs then, to the last bit
        self.stacks = 0  # of layers that are running
        self.calls = 0  # since one has
        #: What is computed twice is to be computed alike: then nothing changes from one call to the next.
        self.has_seen_checkpoints = False
        self.without: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules of layers that have no graphs


state = _State()


def counts(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether the host's time does in a call of this module with such an input."""
    if not state.asked or not on_gpu(x) or not has_values(x):
        return False
    if module in state.without:
        return True
    if state.stacks or state.has_seen_checkpoints:
        return False
    state.calls += 1
    if _hooks(False) is not None and not is_recomputing():
        state.has_seen_checkpoints = True
        return False
    return state.calls > _MANY


@contextmanager
def of_stack() -> Iterator[None]:
    """Within, a stack of layers runs, with graphs or without."""
    state.stacks += 1
    try:
        yield
    finally:
        state.stacks -= 1
        state.calls = 0


def say(layers: Iterable[nn.Module], have_graphs: bool) -> None:
    """Whether these layers have graphs, or may get some."""
    modules = [module for layer in layers for module in layer.modules()]
    if have_graphs:
        state.without.difference_update(modules)
    else:
        state.without.update(modules)
