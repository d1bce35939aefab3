"""Where the host's time counts.

Some operators save the GPU a few microseconds of what it moves, and cost the host more of them than the kernels whose
place they take: each is a node of autograd in Python. Layers that are CUDA graphs, or may become some, cost it nothing,
so there they always pay. Elsewhere they do where the call is so large that the GPU is the slower one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from bastile.ops._common import has_values, on_gpu

#: Not where graphs are off: numbers are those of graphs then, to the last bit.
counts = True

#: The modules of layers that are graphs, or may become some, by number.
_in_graphs: dict[int, weakref.ref[nn.Module]] = {}


def is_free(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether a call of this module with such an input costs the host nothing that anybody waits for: on a CPU, where
    shapes alone are wanted, within graphs, and where these are off."""
    if not counts or not on_gpu(x) or not has_values(x):
        return True
    found = _in_graphs.get(id(module))
    return found is not None and found() is module


def say(layers: Iterable[nn.Module], are_graphs: bool) -> None:
    """Whether these layers are graphs, or may become some."""
    for module in [module for layer in layers for module in layer.modules()]:
        if are_graphs:
            number = id(module)
            _in_graphs[number] = weakref.ref(module, lambda _, number=number: _forget(number))  # type: ignore[misc]
        else:
            _in_graphs.pop(id(module), None)


def _forget(number: int) -> None:
    """The module is gone; another one may have its number since."""
    found = _in_graphs.get(number)
    if found is not None and found() is None:
        del _in_graphs[number]
