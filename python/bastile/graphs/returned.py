"""What a layer returns: the hidden states, alone or first of several, where the others are what it was given, None or
numbers. So T5's hand on the bias that the first of them has made."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bastile.graphs.arguments import CannotCapture, Given, rebuilt


def hidden_of(output: Any) -> Any:
    return output[0] if type(output) in (tuple, list) and output else output


def others_of(output: Any, given: Given) -> Any:
    """The structure of what is returned beside the hidden states; None where they are alone."""
    if type(output) is torch.Tensor:
        return None
    if type(output) not in (tuple, list) or not output or type(output[0]) is not torch.Tensor:
        raise CannotCapture(f"layers that return a {type(output).__qualname__}")
    others = output[1:]
    if any(isinstance(leaf, torch.Tensor) and not given.has(leaf) for leaf in tree_leaves(list(others))):
        raise CannotCapture("layers that return more than a tensor")
    return given.structure(others)


def returned(hidden: torch.Tensor, others: Any, tensors: list[torch.Tensor]) -> Any:
    """As the layer returns it. tensors: what the layers of this step were given."""
    if others is None:
        return hidden
    rest = rebuilt(others, tensors)
    return type(rest)((hidden, *rest))
