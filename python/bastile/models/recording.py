"""What a step of a model calls: the step is run once on tensors without values, and each call of an operator is noted.

Nothing of the model is touched: what runs is a copy whose tensors have shapes and types, and no memory."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from bastile.guards import stock_of
from bastile.models.alike import kind_of
from bastile.models.checkpoints import is_checkpointed
from bastile.ops._common import fakes_on_gpu, has_values
from bastile.report import unreported


@dataclass(frozen=True)
class Like:
    """Stands for a tensor among the arguments of a call."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements: what a kernel may read at once depends on where a tensor begins
    dtype: torch.dtype

    @classmethod
    def of(cls, t: torch.Tensor) -> Like:
        return cls(tuple(t.shape), t.stride(), int(t.storage_offset()), t.dtype)

    def make(self) -> torch.Tensor:
        """On the CPU. Of memory that nobody touches, the system gives none."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        count = 0 if 0 in self.shape else self.offset + 1 + last
        return torch.empty(count, dtype=self.dtype).as_strided(self.shape, self.stride, self.offset if count else 0)


@dataclass(frozen=True)
class Call:
    """A call of torch.ops.bastile.<operator>; two that are equal need the same kernels."""

    operator: str
    arguments: tuple[Any, ...]

    @property
    def title(self) -> str:
        """The operator and the width of its rows."""
        width = next((f" {a.shape[-1]}" for a in self.arguments if isinstance(a, Like) and a.shape[1:] > (1,)), "")
        return self.operator.split("_forward")[0].split("_backward")[0].rstrip("_") + width

    def run(self) -> None:
        getattr(torch.ops.bastile, self.operator).default(*map(_made, self.arguments))


def _made(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return [_made(item) for item in argument]
    return argument.make() if isinstance(argument, Like) else argument


def _noted(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return tuple(map(_noted, argument))
    return Like.of(argument) if isinstance(argument, torch.Tensor) else argument


class _Notes(TorchDispatchMode):
    """Notes the calls of the library's operators, and answers where a model asks for values: with zeros, and with all
    places where it asks which ones are not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Call, None] = {}  # in the order of their first appearance

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Those with a kernel for CPU tensors: others are made of PyTorch's operators.
        if func.namespace == "bastile" and func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU):
            self.calls[Call(func._schema.name.removeprefix("bastile::"), tuple(map(_noted, args)))] = None
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            dtype = args[0].dtype
            return 0.0 if dtype.is_floating_point else dtype is not torch.bool and 0
        except DynamicOutputShapeException:
            if func is torch.ops.aten.nonzero.default:
                return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
            if func is torch.ops.aten.index.Tensor:
                return args[0][tuple(_as_numbers(args[1]))]
            raise


def _as_numbers(indices: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | slice]:
    """Masks as the indices of their places."""
    for index in indices:
        if index is None:
            yield slice(None)
        elif index.dtype in (torch.bool, torch.uint8):
            yield from index.nonzero().unbind(1)
        else:
            yield index


def stand_in(model: nn.Module, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """A copy of a model, or of what a sharded one is made of, with tensors of this device. dtype: of the weights; None:
    their own."""
    copies: dict[int, Any] = {}  # what copy.deepcopy takes in the place of what has this id
    modules = list(model.modules())
    of_own_class: list[torch.Tensor] = []
    for module in modules:
        copies[id(module)] = object.__new__(_stock_class(type(module)))
        for values in (vars(module), module._parameters, module._buffers):
            for t in values.values():
                if isinstance(t, torch.Tensor) and id(t) not in copies:
                    copies[id(t)] = _tensor_like(t, device, dtype)
                    if not has_values(t) and not _is_sharded(t):
                        of_own_class.append(t)  # what they say of themselves: how they are quantised
    for t in of_own_class:
        with FakeCopyMode(mode):
            vars(copies[id(t)]).update(copy.deepcopy(vars(t), copies))
    for module in modules:
        own = {
            name: _harmless(value) if name in _HOOKS else value
            for name, value in vars(module).items()
            if not name.startswith("__composable_api_state")  # what fully_shard knows of it
        }
        with FakeCopyMode(mode):
            vars(copies[id(module)]).update(copy.deepcopy(own, copies))
    return copies[id(model)]


def _tensor_like(t: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    kind = dtype if dtype is not None and t.is_floating_point() else t.dtype
    if _is_sharded(t):  # it is as large as the whole: PyTorch's says so itself, DeepSpeed's by an attribute
        new = torch.empty(getattr(t, "ds_shape", t.shape), dtype=kind, device=device)
    else:
        new = torch.empty_strided(t.shape, t.stride(), dtype=kind, device=device)
    return nn.Parameter(new, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else new


def skip_repeated_layers(model: nn.Module) -> None:
    """Of layers that are alike, those that would call what another one has called hand on their input. What they want
    gradients of depends on the layers before them, so after each layer of a new kind one of every kind runs again."""
    for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        kinds: set[Any] = set()
        ran: set[Any] = set()  # since there was a new kind
        for place, layer in enumerate(layers):
            kind = kind_of(layer, place) if is_checkpointed(layer) and _returns_a_tensor(layer) else place
            if kind in ran:
                layer.forward = _input
            elif kind in kinds:
                ran.add(kind)
            else:
                kinds.add(kind)
                ran.clear()


def _checkpoint_without_random_numbers(model: nn.Module) -> None:
    """Checkpoints would put back the state of a GPU's generator, which needs values."""
    for module in model.modules():
        checkpoint = vars(module).get("_gradient_checkpointing_func")
        if checkpoint is not None:
            vars(module)["_gradient_checkpointing_func"] = partial(checkpoint, preserve_rng_state=False)


def _returns_a_tensor(layer: nn.Module) -> bool:
    """And nothing beside it, as its code says."""
    stated = getattr(stock_of(type(layer).forward), "__annotations__", {}).get("return")
    return stated in (torch.Tensor, "torch.Tensor")


def _input(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return hidden_states


def _is_sharded(t: torch.Tensor) -> bool:
    return hasattr(t, "ds_shape") or "DTensor" in (type(t).__name__, type(t.data).__name__)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SHARDING = ("torch.distributed", "deepspeed")


def _stock_class(kind: type) -> type:
    """What a class was before torch.distributed.fsdp.fully_shard."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return kind.__mro__[2] if fsdp is not None and issubclass(kind, fsdp.FSDPModule) else kind


def _harmless(hooks: dict[int, Any]) -> dict[int, Any]:
    """Those that would gather shards do nothing; that there are any counts."""
    return type(hooks)(
        (key, _nothing if (getattr(hook, "__module__", None) or "").startswith(_SHARDING) else hook)
        for key, hook in hooks.items()
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _backward(loss: torch.Tensor) -> None:
    if loss.requires_grad:
        loss.backward()


def recorded(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype | None,
    shapes: Sequence[tuple[int, int]],
    prepare: Callable[[nn.Module], None],
    optimizer: Callable[[Any], torch.optim.Optimizer] | None,
    log_probs: bool,
) -> list[Call]:
    """Each call, once, of training steps on so many sequences of so many tokens, and of generation.

    Args:
        device: where the model will run. A CUDA device need not be there: CPU tensors then stand for its.
        dtype: of the weights; None: their own.
        prepare: what is to be done with the copy before it runs.
        optimizer: makes one of its parameters, for a step of it; None: there is none.
        log_probs: whether a step's loss may be of the tokens' log-probabilities too."""
    there = device if device.type == "cpu" or torch.cuda.is_available() else torch.device("cpu")
    autocast: Any = nullcontext()
    if there != device and torch.is_autocast_enabled(device.type):
        autocast = torch.autocast(there.type, torch.get_autocast_dtype(device.type))
    devices = [there.index] if there.type == "cuda" else []
    mode, notes = FakeTensorMode(allow_non_fake_inputs=True), _Notes()
    with torch.random.fork_rng(devices), unreported(), fakes_on_gpu(device.type == "cuda"), mode, notes, autocast:
        new: Any = stand_in(model, mode, there, dtype)
        prepare(new)
        skip_repeated_layers(new)
        _checkpoint_without_random_numbers(new)
        new.train()
        for batch, length in shapes:
            ids = torch.zeros((batch, length), dtype=torch.int64, device=there)
            _backward(new(input_ids=ids, labels=ids).loss)
            if log_probs:
                _backward(new(input_ids=ids).logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).sum())
            if optimizer is not None:
                optimizer([p for p in new.parameters() if p.requires_grad]).step()
            new.zero_grad()
        with torch.no_grad():
            new.eval()
            for length in (1, 8):
                new(input_ids=torch.zeros((1, length), dtype=torch.int64, device=there))
    return list(notes.calls)
