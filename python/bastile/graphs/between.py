"""What stands for the hidden states between layers that were replayed at once, or that are to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

_NOTHING = torch.empty(0)


class Between(torch.Tensor):
    """Goes from one layer's call to the next as it is. Who does anything else with it gets the hidden states
    themselves, which the layers before then compute, without graphs."""

    make: Callable[[], torch.Tensor] | None
    made_once: torch.Tensor | None
    looked_at: Callable[[], None] | None

    @classmethod
    def of(cls, make: Callable[[], torch.Tensor], looked_at: Callable[[], None] | None = None) -> Between:
        """looked_at: called where somebody else does something with it."""
        found = torch.Tensor._make_subclass(cls, _NOTHING)
        with torch._C.DisableTorchFunctionSubclass():
            found.make, found.made_once, found.looked_at = make, None, looked_at
        return found

    @property
    def made(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if self.made_once is None:
                assert self.make is not None
                make, self.make = self.make, None
                self.made_once = make()
            return self.made_once

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = themselves((args, kwargs or {}))
        return function(*args, **kwargs)

    def seen(self) -> torch.Tensor:
        """By somebody else than the next layer."""
        with torch._C.DisableTorchFunctionSubclass():
            looked_at = self.looked_at
        if looked_at is not None:
            looked_at()
        return self.made


def themselves(tree: Any) -> Any:
    """With the hidden states in place of what stands for them."""
    return tree_map(lambda item: item.seen() if type(item) is Between else item, tree)
