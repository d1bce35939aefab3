"""Logits while torch.compile traces a model, which knows no tensors without memory: an object that it reads through.

What models do to their logits on the way to a loss is followed as for Logits, by the same functions. Nothing of it is
left in the graph but the fused loss, or, where something else reads them, the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bastile.guards import untouched
from bastile.models.logits import follow, losses, parts  # noqa: F401  (they enter what is followed)
from bastile.models.logits.head import output_heads
from bastile.models.logits.pending import Compute, Forward, Pending
from bastile.models.logits.tensor import FOLLOWED, Part
from bastile.ops._common import served

_T = torch.Tensor
#: Methods of tensors that are followed, and those that write.
_METHODS = (
    *("float", "half", "bfloat16", "to", "type", "type_as", "contiguous", "clone", "detach", "mul", "__mul__"),
    *("__rmul__", "div", "__truediv__", "tanh", "add", "__add__", "view", "reshape", "view_as", "flatten"),
    *("__getitem__", "split", "chunk", "unbind", "narrow", "select", "unsqueeze", "squeeze", "transpose"),
    *("permute", "log_softmax", "gather", "logsumexp"),
)
_WRITE = ("mul_", "__imul__", "div_", "__itruediv__", "tanh_")
#: Functions that are followed. A tuple: torch.compile reads through no dictionary whose keys are functions.
_FUNCTIONS: tuple[Any, ...] = (
    *(F.cross_entropy, F.nll_loss, F.log_softmax, torch.tanh, torch.mul, torch.div, torch.true_divide),
    *(torch.add, torch.log_softmax, torch.gather, torch.logsumexp, torch.clone, torch.reshape, torch.flatten),
    *(torch.split, torch.chunk, torch.squeeze, torch.unsqueeze, torch.transpose, torch.permute),
)
_FOLLOWED = tuple((function, FOLLOWED[function]) for function in _FUNCTIONS)


class TracedCall:
    """head(hidden), put off, as bastile.models.logits.pending.Call is; a graph has no hooks and changes no weight."""

    is_gathered = is_parted = False
    adapter = None

    def __init__(self, head: Any, hidden: torch.Tensor, model: str) -> None:
        device = hidden.device.type
        autocasts = torch.is_autocast_enabled(device)
        self.forward, self.dtype = Forward(model), torch.get_autocast_dtype(device) if autocasts else hidden.dtype
        self.head, self.hidden, self.weight, self.bias = head, hidden, head.weight, head.bias
        self.with_grad = True

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(rows)

    def within(self, rows: torch.Tensor, compute: Compute, takes_parts: bool = False) -> torch.Tensor:
        return compute(rows, self.weight, self.bias)

    def announce(self, made: torch.Tensor) -> torch.Tensor:
        return made

    def watch(self, tensor: torch.Tensor) -> None:
        pass


class Traced:
    """As bastile.models.logits.Logits, but no tensor."""

    def __init__(self, pending: Pending, part: Part) -> None:
        self.pending, self.part = pending, part

    def read(self) -> torch.Tensor:
        value = self.pending.make()
        for view in self.part.views:
            value = view(value)
        return value

    @property
    def shape(self) -> torch.Size:
        sizes = [*self.part.rows.shape[:-1], self.pending.vocabulary]
        return torch.Size(sizes if self.part.move is None else [sizes[0], sizes[2], sizes[1]])

    @property
    def dtype(self) -> torch.dtype:
        return self.pending.dtype

    @property
    def device(self) -> torch.device:
        return self.part.rows.device

    @property
    def requires_grad(self) -> bool:
        return True

    @property
    def ndim(self) -> int:
        return self.part.rows.dim()

    def dim(self) -> int:
        return self.part.rows.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.read(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is _T.add and len(args) == 2 and isinstance(args[1], Traced)
        ):  # what torch.compile makes of logits + bias
            func, args = torch.add, (args[1], args[0])
        for function, follow_it in _FOLLOWED:
            if func is function and isinstance(args[0], Traced) and args[0].pending.made is None:
                result = follow_it(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        args = [a.read() if isinstance(a, Traced) else a for a in args]
        kwargs = {name: a.read() if isinstance(a, Traced) else a for name, a in kwargs.items()}
        return func(*args, **kwargs)


def _method(name: str, writes: bool) -> Callable[..., Any]:
    follow_it = FOLLOWED[getattr(_T, name)]

    def method(self: Traced, *args: Any, **kwargs: Any) -> Any:
        # Who writes to a part writes to what others may have a part of.
        if self.pending.made is None and (self.part.is_whole or not writes):
            result = follow_it(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return getattr(self.read(), name)(*args, **kwargs)

    return method


for _name in (*_METHODS, *_WRITE):
    setattr(Traced, _name, _method(_name, _name in _WRITE))


def head(model: Any, module: Any, hidden: Any) -> Any:
    """module(hidden), which is put off where the module is the model's head, and no more than a weight and a bias."""
    if (
        isinstance(hidden, torch.Tensor)
        and any(module is each for each in output_heads(model))
        and _is_plain(module, hidden)
    ):
        call: Any = TracedCall(module, hidden, type(model).__name__)
        return Traced(Pending(call, hidden, [], call.dtype), Part(hidden))
    return module(hidden)


def _is_plain(head: Any, hidden: torch.Tensor) -> bool:
    """Whether the head is weight and bias and nothing more. It is not where it carries an adapter, is quantised,
    offloaded, hooked, or sharded so that its weight is whole only inside its own call (ZeRO-3, FSDP: by hooks)."""
    if type(head) is not nn.Linear or not untouched(head):
        return False
    given = [t for t in (hidden, head.weight, head.bias) if t is not None]
    autocasts = torch.is_autocast_enabled(hidden.device.type)
    return served(*given) and (autocasts or all(t.dtype == hidden.dtype for t in given))


def loss_class(cls: Any) -> Any:
    """PyTorch's class of losses calls its function in a way that torch.compile does not look into."""
    return _Loss if cls is nn.CrossEntropyLoss else cls


class _Loss:
    def __init__(
        self,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        self.arguments = weight, size_average, ignore_index, reduce, reduction, label_smoothing

    def __call__(self, logits: Any, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, target, *self.arguments)


def without_logits(output: Any) -> Any:
    """A model's output as it leaves the graph: logits that nobody has read are None."""
    if isinstance(output, tuple):
        return tuple(_made(item) for item in output)
    return type(output)(**{name: _made(item) for name, item in output.items()})


def _made(item: Any) -> Any:
    if not isinstance(item, Traced):
        return item
    return None if item.pending.made is None else item.read()
