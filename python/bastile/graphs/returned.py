"""What a layer returns: the hidden states, alone or first of several. The others are what it was given, None, numbers,
or tensors at which nobody looks. So T5's hand on the bias that the first of them has made, and Swin's have features for
those who ask for them. A graph does not hand these out: what stands for them has the layer run itself, should somebody
look at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bastile.graphs.arguments import CannotCapture, Given, rebuilt
from bastile.graphs.between import Between

#: In a structure, a tensor that is no argument.
_OWN = "own"


def hidden_of(output: Any) -> Any:
    return output[0] if type(output) in (tuple, list) and output else output


def others_of(output: Any, given: Given) -> Any:
    """The structure of what is returned beside the hidden states; None where they are alone."""
    if type(output) is torch.Tensor:
        return None
    if type(output) not in (tuple, list) or not output or type(output[0]) is not torch.Tensor:
        raise CannotCapture(f"layers that return a {type(output).__qualname__}")
    others = output[1:]
    flat = [_is_own(each, given) for each in others]
    if any(
        _is_own(leaf, given) for each, own in zip(others, flat, strict=True) if not own for leaf in tree_leaves(each)
    ):
        raise CannotCapture("layers that return tensors within others")
    each = [(_OWN, None) if own else given.structure(other) for other, own in zip(others, flat, strict=True)]
    return type(others), tuple(each)


def _is_own(value: Any, given: Given) -> bool:
    return isinstance(value, torch.Tensor) and not given.has(value)


def has_own(others: Any) -> bool:
    """Whether there is a tensor among them that is no argument."""
    return others is not None and any(each[0] == _OWN for each in others[1])


def returned(
    hidden: torch.Tensor,
    others: Any,
    tensors: list[torch.Tensor],
    made: Callable[[int], Callable[[], torch.Tensor]] | None = None,
    looked_at: Callable[[], None] | None = None,
) -> Any:
    """As the layer returns it. tensors: what the layers of this step were given. made: of a place in what is returned,
    what makes the tensor there; looked_at: called where somebody looks at one."""
    if others is None:
        return hidden
    kind, structures = others
    rest = [
        Between.of(made(place), looked_at) if each[0] == _OWN and made is not None else rebuilt(each, tensors)
        for place, each in enumerate(structures, 1)
    ]
    return kind((hidden, *rest))
