"""The cache of keys and values that a model makes for itself in training, where nobody has said use_cache=False.

The layers fill it, and nobody reads it. A graph fills one of its own, so that the products see what they would have
seen, and throws it away; the model's stays empty, and says so to whoever looks into it."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

#: What models call it: from Transformers 5.24 on, and before.
NAMES = ("cache", "past_key_values")


def name_in(arguments: Mapping[str, Any]) -> str:
    """What the cache is called among a call's keywords, or a model's outputs; "" where there is none."""
    return next((name for name in NAMES if arguments.get(name) is not None), "")


def given_in(arguments: Mapping[str, Any]) -> Any:
    """Likewise, the cache; None where there is none."""
    return arguments.get(name_in(arguments))


def taken_from(arguments: dict[str, Any]) -> Any:
    """As given_in, and it is among them no longer."""
    found = given_in(arguments)
    for name in NAMES:
        arguments.pop(name, None)
    return found


def _parts(cache: Any) -> list[Any]:
    """Of a decoder that has an encoder, that of its own keys and that of the encoder's."""
    from transformers.cache_utils import EncoderDecoderCache

    return [cache.self_attention_cache, cache.cross_attention_cache] if type(cache) is EncoderDecoderCache else [cache]


class Empty:
    """What a cache is like before it is filled. It holds nothing of the cache: it is in the keys of kinds of steps."""

    def __init__(self, cache: Any) -> None:
        self._like: Any = None
        layers = [[(type(layer), getattr(layer, "sliding_window", None)) for layer in p.layers] for p in _parts(cache)]
        self._kind = type(cache), tuple(map(tuple, layers))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Empty) and other._kind == self._kind

    def __hash__(self) -> int:
        return hash(self._kind)

    def keep(self, cache: Any, device: torch.device) -> None:
        """As it is the first time, so that others can be made. A copy takes half a millisecond, which most steps have
        no use for. device: where the layers are. Those with a sliding window bring a number there when they are first
        used, from memory that is not pinned: no graph could."""
        if self._like is None:
            self._like = copy.deepcopy(cache)
            for layer, name, tensor in self._tensors():
                setattr(layer, name, tensor.to(device))

    def made(self) -> Any:
        assert self._like is not None
        return copy.deepcopy(self._like, {id(tensor): tensor for *_, tensor in self._tensors()})  # which are only read

    def _tensors(self) -> list[tuple[Any, str, torch.Tensor]]:
        """With the layer that has it, and its name there."""
        layers = [layer for part in _parts(self._like) for layer in part.layers]
        named = [(layer, name, value) for layer in layers for name, value in vars(layer).items()]
        return [found for found in named if isinstance(found[2], torch.Tensor)]


def is_new(value: Any) -> bool:
    """Whether this is a cache of the usual class in which nothing is."""
    from transformers.cache_utils import DynamicCache

    parts = _parts(value)
    if any(type(part) is not DynamicCache or getattr(part, "offloading", False) for part in parts):
        return False
    return all(not getattr(layer, "is_initialized", True) for part in parts for layer in part.layers)


def is_shared(value: Any) -> bool:
    """Whether these are the keys and values that layers leave for later ones, Gemma 4's: a dictionary of a class of its
    own, before 5.23 a `UserDict`, before 5.9 a plain one."""
    if type(value) is UserDict:
        return True
    return type(value).__name__ == "KVSharingDict" and type(value).__module__ == "transformers.cache_utils"


def leave_unfilled(cache: Any) -> None:
    for part in _parts(cache):
        part.layers = _Unfilled()


def is_unfilled(cache: Any) -> bool:
    return all(type(part.layers) is _Unfilled for part in _parts(cache))


class _Unfilled:
    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            "bastile: the keys and values of a training step whose layers are CUDA graphs are not in its cache; "
            "bastile.apply(cuda_graphs=False) runs the layers without graphs"
        )

    __len__ = __iter__ = __getitem__ = __setitem__ = __getattr__ = __bool__ = _refuse
