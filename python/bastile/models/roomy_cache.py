"""Keys and values of a text that is being generated, with room for tokens to come.

The usual cache becomes a longer tensor with each token, elsewhere each time: no graph could read it. Here a token's
keys and values go to its place in memory that is there already, and attention reads all of it, beneath a mask that says
what has been written. A prompt is computed as with the usual cache. There is room for the whole text where that is
little; else, where there is none left, twice as much is made for the tokens behind the prompt, so memory is at most
twice what is in it, and its pointers change seldom.

Windows are the mask's: all layers have room for the whole text."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from bastile.graphs.kept_memory import Memory
from bastile.ops._common import cast_type

#: Tokens that there is room for behind a prompt at first.
_FIRST = 64
#: Room is a multiple of: for each length cuDNN builds a kernel, which takes a quarter of a second on an H100.
_MULTIPLE = 128
#: Bytes of a layer, up to which a text has all its room from the start. On an H200 to read so much takes 4 us, which
#: 28 layers pay for in hundreds of tokens what one more capture takes.
_AT_ONCE = 16 << 20
_ATTENDS = (DynamicLayer, DynamicSlidingWindowLayer)
#: What linear attention has of a text is of one size, and written over in place; and what keeps nothing.
_KEEPS_NOTHING = "DummyLayer"
_STAYS = frozenset({"LinearAttentionLayer", _KEEPS_NOTHING})


class _Layer(CacheLayerMixin):
    """As Transformers' StaticLayer, but for the prompt, with the cache's room and position for all layers."""

    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, cache: RoomyCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether a mask of four dimensions is made for the whole room, which is so behind a prompt."""
        return self.is_initialized

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        self.batch_size = key_states.shape[0]
        # Zeros: what a mask hides is multiplied by zero, which makes NaN of a NaN.
        self.keys, self.values = (
            self._taken(name, states, self.cache.type_of(states))
            for name, states in (("keys", key_states), ("values", value_states))
        )
        self.is_initialized = True

    def _taken(self, name: str, states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        shape = *states.shape[:2], self.cache.room, states.shape[3]
        return self.cache.memory.take((self.index, name), shape, dtype, states.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            count = key_states.shape[2]
            self.cache.begin(key_states, value_states)
            self.lazy_initialization(key_states, value_states)
            self.keys[:, :, :count] = key_states
            self.values[:, :, :count] = value_states
            return key_states, value_states
        self.keys.index_copy_(2, self.cache.position, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.cache.position, value_states.to(self.values.dtype))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Of as many tokens, or earlier releases: of tokens at these positions."""
        count = query_length if isinstance(query_length, int) else len(query_length)
        return (self.cache.room if self.is_initialized else count), 0

    def get_seq_length(self) -> Any:
        return self.cache.length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.cache.room

    get_max_cache_shape = get_max_length  # its name in earlier releases

    def grow(self) -> None:
        if not self.is_initialized:
            return
        for name in ("keys", "values"):  # one by one: the longer one and the one before lie side by side meanwhile
            old = getattr(self, name).clone()  # the longer one may lie where it does
            longer = self._taken(name, old, old.dtype)
            longer[:, :, : old.shape[2]] = old
            setattr(self, name, longer)


class RoomyCache(Cache):
    """In the place of a DynamicCache in which nothing is.

    Args:
        cache: that one.
        most: tokens that may be generated.
        casts: that what attention reads may be kept as autocast casts it for attention: to the same bits, and not with
            every token anew. Under autocast keys are of float32, for so is what turns them.
        memory: for all of it, but what layers have that stay as they are.

    Attributes:
        under_autocast: whether attention is.
        stays: whether a text behind this one would have all that is read in the same memory.
    """

    def __init__(self, cache: DynamicCache, most: int, *, casts: bool = False, memory: Memory | None = None) -> None:
        layers: list[Any] = cache.layers
        made = [_Layer(self, index) if type(layer) in _ATTENDS else layer for index, layer in enumerate(layers)]
        super().__init__(layers=made)
        self.most, self.casts, self.memory = most, casts, memory or Memory()
        self.room = self.prompt = self.seen = 0
        self.under_autocast = False
        self.stays = all(type(layer) is _Layer or type(layer).__name__ == _KEEPS_NOTHING for layer in made)

    def _make_room(self, tokens: int) -> None:
        """For so many tokens behind the prompt, or all that there may be."""
        self.room = -(-(self.prompt + min(tokens, self.most)) // _MULTIPLE) * _MULTIPLE

    def type_of(self, states: torch.Tensor) -> torch.dtype:
        """In which keys or values are kept."""
        cast = cast_type(states)
        self.under_autocast |= cast is not None
        return (cast if self.casts else None) or states.dtype

    def begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The first layer gets the prompt. Behind it each call is of one token, at this position."""
        if not self.seen:
            self.prompt = self.seen = keys.shape[2]
            self._make_room(self.most)
            if self.room * (keys.nbytes + values.nbytes) > _AT_ONCE * self.prompt:
                self._make_room(_FIRST)
            self.position = self.memory.take("position", (1,), torch.int64, keys.device).fill_(self.prompt)
            self.length = self.position.squeeze(0)

    def put_into(self, cache: DynamicCache) -> None:
        """What is here, into the cache whose place this one took."""
        layers: list[Any] = cache.layers
        for mine, theirs in zip(self.layers, layers, strict=True):
            if isinstance(mine, _Layer) and mine.is_initialized:
                theirs.update(mine.keys[:, :, : self.seen], mine.values[:, :, : self.seen])

    def release(self) -> None:
        """The text is done. Layers and cache have each other, and would wait for Python's garbage collection."""
        self.layers = []

    def advance(self) -> bool:
        """A token's keys and values are there. Whether memory is another one for those that follow."""
        self.seen += 1
        self.position += 1
        if self.seen < self.room or self.seen >= self.prompt + self.most:
            return False
        self._make_room(2 * (self.room - self.prompt))
        for layer in self.layers:
            if isinstance(layer, _Layer):
                layer.grow()
        return True


def why_not(cache: Any, most: int) -> str | None:
    """Why a text of so many tokens must be generated with this cache; None: RoomyCache may take its place."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return "a cache that is not the usual one"
    layers: list[Any] = cache.layers
    kinds = [type(layer) for layer in layers]
    if not any(kind in _ATTENDS for kind in kinds):
        return "no layer that keeps keys and values, or a cache that does not know its layers"
    if cache.get_seq_length():
        return "a cache that has something in it"
    for layer, kind in zip(layers, kinds, strict=True):
        if kind is DynamicSlidingWindowLayer and most > max(_MOST_WINDOWS * layer.sliding_window, _MOST_TOKENS):
            return "a text much longer than its attention's window, of which the usual cache keeps that alone"
        if kind not in _ATTENDS and (kind.__name__ not in _STAYS or not layer.is_compileable):
            return f"its layers keep a {kind.__name__}"
    return None


#: Layers with a window have room for texts of up to so many of them, or so many tokens.
_MOST_WINDOWS, _MOST_TOKENS = 2, 4096
