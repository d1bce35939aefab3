"""Whether gradient checkpointing is needed. Trainers switch it on by default, and it costs a forward pass a step; what
a layer would keep without it shows where it is run again in a backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.batchnorm import _BatchNorm

from bastile.models.structure import torchs_wrapper
from bastile.offload.mover import bytes_held
from bastile.ops._common import has_values
from bastile.ops._late import in_backward
from bastile.report import noting

_graph_task = torch._C._current_graph_task_id  # -1 outside of a backward pass
#: Of the memory that is there: so much may be in use before it is called tight.
_SHARE = 0.9
_GIB = 1 << 30


class _Seen:
    """Layers that ran within a backward pass: how many of them, and what one of them kept."""

    def __init__(self) -> None:
        self.task, self.layers, self.most = -1, 0, 0
        self.kept: int | None = None
        self.device: torch.device | None = None


_seen = _Seen()


def runs_again(x: torch.Tensor) -> bool:
    """Whether a layer of this input is being run a second time, on a GPU."""
    return not is_compiling() and in_backward() and x.is_cuda and has_values(x)


def is_checkpointed(layer: object) -> bool:
    """Whether Transformers may put this layer's call in a checkpoint."""
    # It imports files of models, which bastile.apply must not: where a layer runs, they are there.
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(layer, GradientCheckpointingLayer)


def is_layer(module: nn.Module) -> bool:
    """Whether this is one of a stack's layers: one that Transformers may checkpoint, or of an older model that never
    is, as MPNet's. What keeps statistics of its calls is not: it may be run once more than it is called."""
    if is_checkpointed(module):
        return True
    cls = type(module)
    named = cls.__module__.startswith("transformers.models.") and cls.__name__.endswith(("Layer", "Block"))
    return named and not any(isinstance(each, _BatchNorm) for each in module.modules())


def unwrapped(layer: nn.Module) -> nn.Module:
    """What PyTorch's wrappers for modules that are checkpointed or offloaded have in them; any other module itself."""
    wrapper = torchs_wrapper("ActivationWrapper")
    while wrapper and isinstance(layer, wrapper):
        layer = layer._modules["_checkpoint_wrapped_module"]
    return layer


def wrapped_by_checkpoint(layer: nn.Module) -> bool:
    """Whether PyTorch's wrapper for modules that are checkpointed is around this layer, and no other."""
    wrapper = torchs_wrapper("CheckpointWrapper")
    is_one = wrapper is not None and isinstance(layer, wrapper) and type(layer).forward is wrapper.forward
    return is_one and unwrapped(layer) is layer._checkpoint_wrapped_module


@contextmanager
def watched(x: torch.Tensor) -> Iterator[None]:
    """Around such a run. A checkpoint may end it by an exception, once all is there again that was needed."""
    task = _graph_task()
    if task != _seen.task:
        _seen.task, _seen.layers = task, 0
    _seen.layers += 1
    _seen.most = max(_seen.most, _seen.layers)
    if _seen.kept is not None or _is_captured():
        yield
        return
    before = _allocated(x.device)
    try:
        yield
    finally:
        _seen.kept, _seen.device = _allocated(x.device) - before, x.device


def _is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device)


def _room(device: torch.device) -> tuple[int, int]:
    """The peak so far, and what this process may have, in bytes."""
    free, _ = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_allocated(device), free + torch.cuda.memory_reserved(device)


@noting
def note() -> str | None:
    """What the report says of it."""
    if _seen.kept is None or _seen.device is None or _seen.most < 2:
        return None
    peak, available = _room(_seen.device)
    needed = peak + (_seen.most - 1) * _seen.kept + bytes_held()  # inputs of layers would be there, too
    if needed > _SHARE * available:
        return None
    return (
        f"gradient checkpointing costs each step a second forward pass of {_seen.most} layers; without it a step would "
        f"take some {needed / _GIB:.0f} of the {available / _GIB:.0f} GiB that this process may have, with it it takes "
        f"{peak / _GIB:.0f}"
    )
