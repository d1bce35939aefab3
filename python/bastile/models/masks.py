"""What Transformers asks of masks and positions in each step, answered without waiting for the GPU.

Whether a mask is all ones, and whether positions are those of packed sequences, its code asks the tensors: on a GPU the
host waits for the answer, behind all that has been launched before. Where the host knows what they hold, because it has
sent them (bastile.models.batches, in a Trainer) or made them, the same functions are asked about the host's own."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from operator import is_
from typing import Any

import torch

from bastile.graphs import caches
from bastile.guards import stand_in_for, stock_of
from bastile.host_copies import fetched, on_host, remember
from bastile.models.rebind import as_keywords
from bastile.ops._common import has_values

_GIVEN, _POSITIONS = "attention_mask", "position_ids"
_UNGIVEN = (_GIVEN, _POSITIONS, *caches.NAMES)  # where positions may be supplied
_MOST_LENGTHS = 64
_DEVICES = frozenset({"cuda"})
#: How positions are counted, of `position_ids is None`: a cache's length, where there is none; the count; its row.
_COUNTS = [
    "{cache}.get_seq_length()",
    "0",
    "torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)",
    "position_ids.unsqueeze(0)",
]

_is_in_force = False

#: Positions of batches that bring none, by length, device and stream.
_made: dict[Any, torch.Tensor] = {}


def put_into(module: Any) -> None:
    """Transformers' module of masks."""
    global _is_in_force
    _is_in_force = True
    for name, replacement in _REPLACED.items():
        there = getattr(module, name, None)
        if inspect.isfunction(there) and stock_of(there) is there:
            setattr(module, name, replacement(there))


def take_out_of(module: Any) -> None:
    global _is_in_force
    _is_in_force = False
    for name in _REPLACED:
        there = getattr(module, name, None)
        if there is not None and stock_of(there) is not there:
            setattr(module, name, stock_of(there))
    _made.clear()


# ---- masks -----------------------------------------------------------------------------------------------------------


def _prepares(original: Callable[..., Any]) -> Callable[..., Any]:
    """Casts a mask to booleans: the host knows these as well then."""
    names = tuple(inspect.signature(original).parameters)

    @functools.wraps(original)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if torch.compiler.is_compiling():
            return result
        given = as_keywords(names, args, kwargs).get(_GIVEN)
        host = on_host(given)
        mask = result[1] if host is not None and _only_casts(original) and isinstance(result, tuple) else None
        if isinstance(mask, torch.Tensor) and mask is not given and mask.dtype is torch.bool:
            remember(mask, host.to(torch.bool))  # type: ignore[union-attr]
        return result

    stand_in_for(original, prepare)
    return prepare


@functools.cache
def _only_casts(function: Callable[..., Any]) -> bool:
    """Whether such a function does nothing to a mask of two dimensions but cast it."""
    tree = _tree(function)
    nodes = [] if tree is None else list(ast.walk(tree))
    stores = [node for node in nodes if _is_store(node, _GIVEN)]
    return len(stores) == 1 and any(map(_is_cast, nodes))


def _is_store(node: ast.AST, name: str) -> bool:
    return _is_name(node, name) and isinstance(node.ctx, ast.Store)  # type: ignore[attr-defined]


def _is_cast(node: ast.AST) -> bool:
    match node:
        case ast.Assign(
            targets=[ast.Name(id=to)],
            value=ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr="to"), args=[], keywords=keywords),
        ):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
            return to == of == _GIVEN and set(given) == {"device", "dtype"} and given["dtype"] == "torch.bool"
    return False


def _asks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Whether a mask may be left out: a function of a mask's numbers, its shape and other numbers."""

    @functools.wraps(original)
    def ask(padding_mask: Any, *args: Any, **kwargs: Any) -> Any:
        host = None if torch.compiler.is_compiling() else on_host(padding_mask)
        return original(padding_mask if host is None else host, *args, **kwargs)

    stand_in_for(original, ask)
    return ask


# ---- positions -------------------------------------------------------------------------------------------------------


def _finds_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    """None where each row is one sequence; else the number of the sequence of each token."""

    @functools.wraps(original)
    def find(position_ids: Any, *args: Any, **kwargs: Any) -> Any:
        host = None if torch.compiler.is_compiling() else _rows_on_host(position_ids)
        if host is None or original(host, *args, **kwargs) is not None:
            return original(position_ids, *args, **kwargs)
        return None

    stand_in_for(original, find)
    return find


def sequences_of(given: dict[str, Any]) -> torch.Tensor | None:
    """On the host, which sequence of its row each token is of, where Transformers asks positions for that, by its own
    code: where no mask and no cache are given. None where each row is one."""
    from transformers.masking_utils import find_packed_sequence_indices

    positions = given.get(_POSITIONS)
    if positions is None or given.get(_GIVEN) is not None or caches.name_in(given) or not has_values(positions):
        return None
    return stock_of(find_packed_sequence_indices)(fetched(positions))


def _rows_on_host(positions: Any) -> torch.Tensor | None:
    """Of positions, or of one row that is seen several times."""
    host = on_host(positions)
    row = getattr(positions, "_base", None)
    if host is None and row is not None and positions.dim() == 2 and positions.stride(0) == 0:
        is_row = row.shape == (1, positions.shape[1]) and positions.stride(1) == row.stride(1)
        host = on_host(row) if is_row else None
    return host


def with_positions(original: Callable[..., Any]) -> Callable[..., Any]:
    """A backbone's forward, which is given the positions that it would make: 0, 1, 2, ..., which the host knows."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_in_force and not args and all(kwargs.get(name) is None for name in _UNGIVEN):
            tokens = kwargs.get("input_ids")
            tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
            if isinstance(tokens, torch.Tensor) and tokens.device.type in _DEVICES and _counts_positions(original):
                kwargs[_POSITIONS] = _consecutive(tokens)
        return original(self, *args, **kwargs)

    return forward


def are_ours(positions: torch.Tensor) -> bool:
    """Whether these are such positions, which nobody has changed."""
    return on_host(positions) is not None and any(map(partial(is_, positions), _made.values()))


def _consecutive(tokens: torch.Tensor) -> torch.Tensor | None:
    length, device, stream = tokens.shape[1], tokens.device, 0
    if tokens.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(device).cuda_stream
    key = length, device, stream
    found = _made.get(key)
    if found is None or on_host(found) is None:  # or it has been changed
        if len(_made) >= _MOST_LENGTHS:
            _made.clear()
        found = _made[key] = torch.arange(length, device=device).unsqueeze(0).clone()  # no view, but what views are of
        remember(found, torch.arange(length).unsqueeze(0))
    return found


@functools.cache
def _counts_positions(forward: Callable[..., Any]) -> bool:
    """Whether a forward without positions and without a cache takes 0, 1, 2, ... in one row, and asks for nothing else
    whether it was given some."""
    tree = _tree(inspect.unwrap(forward))
    if tree is None:
        return False
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.Compare) and _is_name(node.left, _POSITIONS)]
    stores = [node for node in ast.walk(tree) if _is_store(node, _POSITIONS)]
    makes = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _counts(node)]
    return len(tests) == len(makes) == 1 and len(stores) == 2


def _counts(node: ast.If) -> bool:
    match node:
        case ast.If(
            test=ast.Compare(left=ast.Name(id="position_ids"), ops=[ast.Is()], comparators=[ast.Constant(value=None)]),
            body=[
                ast.Assign(
                    targets=[ast.Name(id=seen)],
                    value=ast.IfExp(
                        test=ast.Compare(
                            left=ast.Name(id=cache), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]
                        ),
                        body=length,
                        orelse=nothing,
                    ),
                ),
                ast.Assign(
                    targets=[ast.Name(id="position_ids")],
                    value=ast.BinOp(left=counted, op=ast.Add(), right=ast.Name(id=added)),
                ),
                ast.Assign(targets=[ast.Name(id="position_ids")], value=row),
            ],
            orelse=[],
        ):
            texts = [ast.unparse(each) for each in (length, nothing, counted, row)]
            return seen == added and cache in caches.NAMES and texts == [text.format(cache=cache) for text in _COUNTS]
    return False


def _tree(function: Any) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


#: What takes the place of each function of the module.
_REPLACED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "_preprocess_mask_arguments": _prepares,
    "_ignore_causal_mask_sdpa": _asks,
    "_ignore_bidirectional_mask_sdpa": _asks,
    "find_packed_sequence_indices": _finds_packed,
}
