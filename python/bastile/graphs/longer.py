"""What layers are called with in a step that is padded at its end, so that sizes of which hardly one comes twice become
few. Layers see the padding and nobody else does: what they return is cut before anybody looks at it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from bastile.graphs.between import Between
from bastile.graphs.returned import hidden_of
from bastile.graphs.runs import Note
from bastile.ops._valid_rows import version

#: Modules without others in them, by where they are defined: each row of theirs is of one row.
_OF_ROWS = (
    "torch.nn.modules.linear.",
    "torch.nn.modules.activation.",
    "torch.nn.modules.dropout.",
    "torch.nn.modules.container.",
    "transformers.activations.",
    "peft.",
    "bitsandbytes.",
    "torchao.",
)


class Longer(ABC):
    """One step's. `rows` become `to`, in dimension `dim` of the hidden states."""

    def __init__(self, rows: int, to: int, dim: int) -> None:
        self.rows, self.to, self.dim = rows, to, dim
        self._made: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}  # by number: what, its version, and padded
        self._containers: dict[int, tuple[Any, list[Any], Any]] = {}  # by number: what, its tensors padded, and padded
        self._given_out: Any = None
        self._inner: Any = None  # what that stands for

    def kind(self, asked: tuple[Any, ...]) -> tuple[Any, ...]:
        """What else tells one kind of such a step from another. asked: of those that are as long by themselves."""
        return asked

    @abstractmethod
    def takes(self, args: Any, kwargs: Any) -> bool:
        """Whether a layer is given nothing else than this knows to pad."""

    @abstractmethod
    def longer(self, args: Any, kwargs: Any, is_first: bool) -> tuple[Any, Any]:
        """The arguments of a layer."""

    @abstractmethod
    def padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """One of the tensors that a layer is given, but its hidden states and what has a name of its own."""

    def suits(self, note: Note) -> bool:
        """Whether what layers return in such a step is cut where it has to be."""
        return note.returns_hidden

    def was_asked(self) -> bool:
        """Whether the host has asked for numbers of the padding that it was not to ask for."""
        return False

    def hidden(self, hidden: Any) -> Any:
        """What goes from one layer to the next is what was before it was cut."""
        return self._inner if hidden is self._given_out else self.of_rows(hidden, self.dim)

    def cut(self, output: Any, is_last: bool) -> Any:
        """What a layer returns, without the padding."""
        self._inner = inner = hidden_of(output)
        if is_last:
            found = self._cut(inner).clone()  # whoever keeps it is not to keep a graph's memory
        elif type(inner) is Between:
            found = Between.of(lambda: self._cut(inner.seen()))
        else:
            found = self._cut(inner)
        self._given_out = found
        if inner is output:
            return found
        for other in output[1:]:
            if isinstance(other, torch.Tensor):
                self.keep(other, other)  # layers that get it are as long
        return type(output)((found, *output[1:]))

    def _cut(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.narrow(self.dim, 0, self.rows)

    def of_value(self, value: Any) -> Any:
        """An argument with its tensors padded: the same object for the same, so it is seen to have come before."""
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if type(value) not in (tuple, list, dict):
            return value
        was, before, made = self._containers.get(id(value), (None, [], None))
        now = [self._of_tensor(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if was is not value or len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
            made = tree_map(lambda leaf: self._of_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)
            self._containers[id(value)] = value, now, made
        return made

    def of_rows(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """With rows of zeros behind the others."""
        found = self.known(tensor)
        if found is None:
            behind = [0, 0] * (tensor.dim() - 1 - dim) + [0, self.to - self.rows]
            found = self.keep(tensor, nn.functional.pad(tensor, behind))
        return found

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.padded(tensor) if tensor.dim() else tensor

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        was, then, found = self._made.get(id(tensor), (None, 0, None))
        return found if was is tensor and then == version(tensor) else None

    def keep(self, tensor: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        self._made[id(tensor)] = tensor, version(tensor), padded
        return padded


def are_of_rows(layers: Sequence[Any], more: tuple[str, ...] = (), but: Collection[nn.Module] = ()) -> bool:
    """Whether nothing in layers but their attention has to do with more than one row at a time, as far as their modules
    say. more: how names of further classes end that have not. but: modules of which that is known."""
    modules = [module for layer in layers for module in layer.modules() if module not in but]
    leaves = {type(module) for module in modules if next(module.children(), None) is None}
    known = [cls.__name__.endswith(("Norm", *more)) or f"{cls.__module__}.".startswith(_OF_ROWS) for cls in leaves]
    return all(known) and not any(isinstance(module, nn.MultiheadAttention) for module in modules)
