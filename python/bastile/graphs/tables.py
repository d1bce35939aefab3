"""Rotary tables of positions that come in each step: made once.

A model makes its cosines and sines anew for each batch, by some eleven kernels that the host launches one by one before
the first layer, 0.25 ms of a step that begins on an idle GPU. Where a batch brings no positions, they are 0, 1, 2, ...
in a tensor of Bastile's own (models.masks), and the tables always the same, as long as their module is as it was."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from bastile.graphs import conditions
from bastile.graphs.calls import bare, called_instead, is_called_instead
from bastile.graphs.watch import HOOKS, SETTINGS
from bastile.models.masks import are_ours

#: Larger ones take the device longer to make than the host.
MOST_BYTES = 1 << 20
_MOST = 16


class Tables:
    """Of one backbone."""

    def __init__(self) -> None:
        self._made: OrderedDict[Any, _Made] = OrderedDict()
        self._versions: dict[int, int] = {}  # of their tensors, by number

    def calls(self, backbone: nn.Module) -> AbstractContextManager[None]:
        """Within, the backbone's rotary modules are called through here."""
        modules = [module for module in backbone._modules.values() if module is not None and _is_rotary(module)]
        return called_instead(modules, [partial(self._call, module) for module in modules])

    def is_steady(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that comes again holds what it held before: one of the tables, or such positions."""
        then = self._versions.get(id(tensor))
        return then == tensor._version if then is not None else are_ours(tensor)

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        key, kept = _key(module, args, kwargs), None
        found = None if key is None else self._made.get(key)
        if found is not None and found.is_as_it_was():
            self._made.move_to_end(key)
            return found.result
        with bare(module):
            result = module(*args, **kwargs)
        if key is not None and key == _key(module, args, kwargs):  # it keeps nothing of a call
            kept = _Made.of(result, module, args, kwargs)
        if kept is not None:
            self._made[key] = kept
            while len(self._made) > _MOST:
                self._made.popitem(last=False)
            self._versions = dict(chain.from_iterable(made.versions.items() for made in self._made.values()))
        return result


def _key(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """All that the tables depend on; None where that is not known."""
    positions = _positions(args, kwargs)
    hidden, *others = [value for value in (*args, *kwargs.values()) if value is not positions] or [None]
    if not isinstance(positions, torch.Tensor) or not isinstance(hidden, torch.Tensor) or not are_ours(positions):
        return None
    if not all(isinstance(other, str) for other in others) or torch.is_inference_mode_enabled():
        return None
    scope, device = vars(module), hidden.device
    if any(scope[hooks] for hooks in HOOKS):
        return None
    return (
        module,
        type(module).forward,
        (hidden.dtype, device, id(positions), *others),
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        conditions.of_backward(checkpoints=False),
        *[(name, value) for name, value in scope.items() if isinstance(value, SETTINGS)],
        *[(name, b.data_ptr(), b._version) for name, b in module._buffers.items() if b is not None],
    )


def _positions(args: Any, kwargs: Any) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("position_ids")


class _Made:
    def __init__(self, result: tuple[torch.Tensor, ...], *held: Any) -> None:
        self.result = result
        self.versions = {id(tensor): tensor._version for tensor in result}
        self._held = held  # so that no other has their number, or address

    @classmethod
    def of(cls, result: Any, module: nn.Module, args: Any, kwargs: Any) -> _Made | None:
        """None where it is not to be kept."""
        if type(result) is not tuple or not all(type(t) is torch.Tensor and not t.requires_grad for t in result):
            return None
        if sum(tensor.nbytes for tensor in result) > MOST_BYTES:
            return None
        return cls(result, _positions(args, kwargs), *module._buffers.values())

    def is_as_it_was(self) -> bool:
        return all([self.versions[id(tensor)] == tensor._version for tensor in self.result])


def _is_rotary(module: nn.Module) -> bool:
    """Whether it is one of Transformers' own, called as its class says."""
    cls = type(module)
    return (
        cls.__name__.endswith("RotaryEmbedding")
        and cls.__module__.startswith("transformers.models.")
        and cls.forward.__module__.startswith("transformers.")
        and "forward" not in vars(module)
        and not is_called_instead(module)
    )
