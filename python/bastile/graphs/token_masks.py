"""The masks of a call for one token, made within its graph. Transformers' loop makes them before each call, by a dozen
launches that take the host longer than everything else that it prepares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bastile.graphs.arguments import CannotCapture

#: By which name Transformers' loop gives what it makes masks of for padding: [B, tokens so far].
_PADDING = "attention_mask"


class TokenMasks:
    """In the place of a model's `create_masks_for_generate`, for one text.

    Args:
        make: what it is.
        cache: of the text (RoomyCache): that a call is of this text, and how long its masks are to be.
    """

    def __init__(self, make: Callable[..., Any], cache: Any) -> None:
        self.make, self.cache = make, cache
        self.maker = getattr(make, "__func__", make)
        self.are_late: bool | None = None  # None: that is not known yet
        self.padding: torch.Tensor | None = None  # [B, room], zeros where tokens are to come

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args or self.are_late is False or not any(value is self.cache for value in kwargs.values()):
            return self.make(*args, **kwargs)
        made = None
        if self.are_late is None:
            made, padding = self.make(**kwargs), kwargs.get(_PADDING)
            self.are_late = self.are_of_room(made) and (padding is None or padding.dim() == 2)
            if not self.are_late:
                return made
        return LateMasks(self, kwargs, made)

    def are_of_room(self, made: Any) -> bool:
        """Whether these are masks of one query and the whole room, and nothing for layers that read none."""
        found = [mask for mask in (made.values() if isinstance(made, dict) else [made]) if mask is not None]
        size = 1, self.cache.room
        return bool(found) and all(
            isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[2:] == size for mask in found
        )

    def keep_padding(self, padding: torch.Tensor) -> None:
        """As long as the room, where a graph reads it."""
        room = self.cache.room
        if self.padding is None or self.padding.shape[1] != room:
            shape = padding.shape[0], room
            self.padding = self.cache.memory.take(_PADDING, shape, padding.dtype, padding.device)
        self.padding[:, : padding.shape[1]].copy_(padding)


class LateMasks:
    """What the masks of one call are to be made of, in place of them.

    Args:
        masks: that makes them.
        arguments: its keywords.
        made: they themselves, where they have been made already.

    Attributes:
        given: of the keywords, those that a call has of its own, but for the padding.
    """

    def __init__(self, masks: TokenMasks, arguments: dict[str, Any], made: Any) -> None:
        self.masks, self._arguments, self._made = masks, arguments, made
        self.padding: torch.Tensor | None = arguments.get(_PADDING)
        self.given = {name: value for name, value in arguments.items() if name != _PADDING and not self._stays(value)}

    def _stays(self, value: Any) -> bool:
        """The model's configuration, the cache, and embeddings without elements, which stand for a shape and a type."""
        if isinstance(value, torch.Tensor):
            return not value.numel()
        return value is self.masks.cache or hasattr(value, "to_dict")

    def structure(self) -> dict[str, Any]:
        """What a graph is captured for (bastile.graphs.arguments). The padding goes to where that reads it."""
        padding = self.padding
        if padding is not None:
            self.masks.keep_padding(padding)
        return {**self.given, _PADDING: None if padding is None else (len(padding), padding.dtype)}

    def now(self) -> Any:
        if self._made is None:
            self._made = self.masks.make(**self._arguments)
        return self._made

    def of(self, structure: dict[str, Any]) -> Any:
        """Made of this, in which tensors may be others, and of the padding that has been kept."""
        padding = None if self.padding is None else self.masks.padding
        made = self.masks.make(**{**self._arguments, **structure, _PADDING: padding})
        if not self.masks.are_of_room(made):
            raise CannotCapture("masks that are others within a graph")
        return made


def late_masks_of(inputs: dict[str, Any]) -> dict[str, LateMasks]:
    return {name: value for name, value in inputs.items() if isinstance(value, LateMasks)}
