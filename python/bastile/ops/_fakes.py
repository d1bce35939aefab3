"""The fakes of all operators that the library describes (bastile/torch.h): what torch.compile knows of their results.
Imported once, by bastile.ops."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bastile._library import library

#: In the order of src/core/dtype.h.
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)

#: BST_REDUCTION_NONE of bastile.h.
NOT_REDUCED = 2


def _descriptions() -> Iterator[tuple[int, str]]:
    text = ctypes.create_string_buffer(2048)
    for number in itertools.count():
        if library.bst_torch_describe(number, text, len(text)):
            return
        yield number, text.value.decode()


class _Shapes:
    """What the shapes of a call's arguments have bound."""

    def __init__(self) -> None:
        self.of: dict[str, torch.Size] = {}
        self.sizes: dict[str, Any] = {}
        self.leading: tuple[Any, ...] = ()

    def bind(self, name: str, shape: str, tensor: torch.Tensor) -> None:
        self.of[name] = tensor.shape
        if shape[0] in "=#.":
            return
        symbols, sizes = re.findall("[~-]?.", shape.removeprefix("*")), tensor.shape
        if shape[0] == "*":
            self.leading = tuple(sizes[: len(sizes) - len(symbols)])
            sizes = sizes[len(self.leading) :]
        for symbol, size in zip(symbols, sizes, strict=False):
            self.sizes.setdefault(symbol, size)

    def make(self, shape: str) -> tuple[Any, ...]:
        if shape[0] == "=":
            return tuple(self.of[shape[1:]])
        if shape == ".":
            return ()
        if shape[0] == "#":
            return (math.prod(self.leading), *map(int, shape[1:]))
        leading = self.leading if shape[0] == "*" else ()
        return (*leading, *(self._size(c) for c in re.findall("-?.", shape.removeprefix("*"))))

    def _size(self, symbol: str) -> Any:
        if symbol[0] == "-":
            return self.sizes[symbol[1:]] // 2
        return int(symbol) if symbol.isdigit() else self.sizes[symbol]


def _fake(number: int, arguments: list[tuple[str, str]], results: list[tuple[str, str]]) -> Callable[..., Any]:
    names = [name for name, _ in arguments]

    def types(values: tuple[Any, ...]) -> list[torch.dtype]:
        stack = (ctypes.c_int64 * len(values))()
        for i, (value, (_, shape)) in enumerate(zip(values, arguments, strict=True)):
            if shape:
                stack[i] = -1 if value is None else _TYPES.index(value.dtype)
            else:
                stack[i] = 0 if isinstance(value, float) else int(value)
        found = (ctypes.c_int64 * len(results))()
        library.bst_torch_result_types(number, stack, found)
        return [_TYPES[code] for code in found]

    def fake(*values: Any) -> Any:
        shapes, given = _Shapes(), dict(zip(names, values, strict=True))
        for name, shape in arguments:
            if shape and given[name] is not None:
                shapes.bind(name, shape, given[name])
            elif not shape and not isinstance(given[name], float):
                shapes.sizes.setdefault(name[0], given[name])
        device = next(given[name] for name, shape in arguments if shape and given[name] is not None).device
        made = []
        for (name, shape), dtype in zip(results, types(values), strict=True):
            wanted = not name.endswith("?") or given["want_" + name[:-1]]
            shape, _, padded = shape.partition("+")
            shape, _, reduced = shape.partition("/")
            shape, _, exchanged = shape.partition("^")
            if not wanted or (shape[0] == "=" and shape[1:] not in shapes.of):
                made.append(torch.empty((0,), dtype=torch.float32, device=device))
                continue
            size = () if reduced and given[reduced] != NOT_REDUCED else shapes.make(shape)
            if exchanged and given[exchanged]:
                size = (size[0], size[2], size[1], size[3])
                made.append(torch.empty(size, dtype=dtype, device=device).transpose(1, 2))
            elif padded:
                stride = (size[1] + int(padded) - 1) // int(padded) * int(padded)
                made.append(torch.empty_strided(size, (stride, 1), dtype=dtype, device=device))
            else:
                made.append(torch.empty(size, dtype=dtype, device=device))
        return None if not made else made[0] if len(made) == 1 else tuple(made)

    return fake


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    """Names and shapes; "" for what is no tensor."""
    return [(name, shape) for name, _, shape in (word.partition(":") for word in words)]


def _two_numbers(gradient: list[torch.Tensor], *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return gradient[0].new_empty((), dtype=torch.float32), gradient[0].new_empty((), dtype=torch.float32)


def _weights(parts: list[torch.Tensor], rows: list[Any], columns: Any, *sizes: int) -> torch.Tensor:
    return parts[0].new_empty((sum(rows), columns), dtype=_TYPES[sizes[-1]])


def register() -> None:
    for number, text in _descriptions():
        call, _, returned = text.partition(" ->")
        name, *words = call.split()
        torch.library.register_fake(f"bastile::{name}", _fake(number, _pairs(words), _pairs(returned.split())))

    # These take lists, of which no description speaks.
    torch.library.register_fake("bastile::optim_norm", _two_numbers)
    torch.library.register_fake("bastile::dequantize_4bit_group", _weights)


register()
