"""Statements that cut queries, keys and values into chunks and call an attention for each, found in a function's code
and made one call:

    lengths = boundaries[1:] - boundaries[:-1]
    splits = [torch.split(t, lengths.tolist(), dim=2) for t in (q, k, v)]
    y = [attend(self, *each)[0] for each in zip(*splits)]
    y = torch.cat(y, dim=1)                             ->  y = chunked.output(attend, self, q, k, v, boundaries)

and the same with what else the attention returns. All else of the function stays as it is."""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection
from typing import Any

from bastile.models.forms import Code
from bastile.models.rewrite import COMPREHENSIONS, Blocks, Statements, call_in, is_closed, store

CHUNKED = "bastile_chunked"


def chunks(code: Code) -> ast.FunctionDef | None:
    """The function with the calls of an attention for each chunk of what it is given as one, by way of `CHUNKED`."""
    return None if is_closed(code) else chunks_in(code.node)


def chunks_in(function: Any) -> ast.FunctionDef | None:
    """As `chunks`, of a function that may have been rewritten before."""
    node = copy.deepcopy(function)
    rewriter = _Chunks(node)
    rewriter.visit(node)
    return node if rewriter.found and isinstance(node, ast.FunctionDef) else None


def _parsed(text: str) -> Statements:
    return ast.parse(text).body


#: The statements that compute chunks, in which a name that begins with _ stands for any, and _CALL for a call.
_LENGTHS = _parsed("_lengths = _boundaries[1:] - _boundaries[:-1]")
_SPLITS = _parsed("_splits = [torch.split(_t, _lengths.tolist(), dim=2) for _t in (_query, _key, _value)]")
_EACH = "for _q, _k, _v in zip(*_splits)"
#: By the method of `CHUNKED` that takes their place: which results it gives.
_CHUNKS: list[tuple[str, Statements, tuple[str, ...]]] = [
    (method, [*_LENGTHS, *_SPLITS, *_parsed(text)], results)
    for method, text, results in (
        ("output", f"_all = [_CALL[0] {_EACH}]\n_result = torch.cat(_all, dim=1)", ("_result",)),
        ("output", f"_result = torch.cat([_CALL[0] {_EACH}], dim=1)", ("_result",)),
        (
            "with_weights",
            f"_all, _weights = [], []\n{_EACH}:\n"
            "    _one, _own = _CALL\n    _all.append(_one)\n    _weights.append(_own)\n"
            "_result = torch.cat(_all, dim=1)",
            ("_result", "_weights"),
        ),
        (
            "with_outputs",
            f"_all = [_CALL {_EACH}]\n_result = torch.cat([_each[0] for _each in _all], dim=1)",
            ("_result", "_all"),
        ),
    )
]
#: Of these nobody may know but those statements themselves.
_INNER = ("_lengths", "_splits", "_all", "_one", "_own", "_q", "_k", "_v")


class _Chunks(Blocks):
    def __init__(self, function: ast.AST) -> None:
        self.function = function
        self.found = 0

    def block(self, body: Statements) -> Statements:
        for place in range(len(body)):
            for method, pattern, results in _CHUNKS:
                given = body[place : place + len(pattern)]
                meant: dict[str, Any] = {}
                if (
                    len(given) == len(pattern)
                    and _fits(pattern, given, meant)
                    and self._is_inner(given, meant, results)
                ):
                    call, names = meant["_CALL"], [meant[name] for name in results]
                    target = store(names[0]) if len(names) == 1 else ast.Tuple(list(map(store, names)), ast.Store())
                    tensors = [
                        ast.Name(meant[name], ast.Load()) for name in ("_query", "_key", "_value", "_boundaries")
                    ]
                    value = call_in(CHUNKED, method, [call.func, call.args[0], *tensors])
                    value.keywords = call.keywords
                    self.found += 1
                    made = ast.copy_location(ast.Assign([target], value), given[0])
                    return [*body[:place], made, *body[place + len(pattern) :]]
        return body

    def _is_inner(self, given: Statements, meant: dict[str, Any], results: tuple[str, ...]) -> bool:
        """Whether the call is one that may be made once for all chunks, and what the statements name is not asked for
        elsewhere."""
        call = meant["_CALL"]
        each = [meant[name] for name in ("_q", "_k", "_v")]
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or len(call.args) != 4:
            return False
        first, *rest = call.args
        told = [call.func, first, *(keyword.value for keyword in call.keywords)]
        inner = {meant[name] for name in _INNER if name in meant} - {meant[name] for name in results}
        if [getattr(arg, "id", None) for arg in rest] != each or len({*each}) != 3 or not isinstance(first, ast.Name):
            return False
        if any(isinstance(node, _CHANGING) or _is_one_of(node, inner) for one in told for node in ast.walk(one)):
            return False
        within = [id(node) for statement in given for node in ast.walk(statement)]
        # A comprehension's own names are no others' of that name.
        inner -= set() if "_own" in meant else set(each)
        others = (node for node in ast.walk(self.function) if id(node) not in within)
        return not any(_is_one_of(node, inner) for node in others)


#: What may give another result each time.
_CHANGING = (ast.Call, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Starred, *COMPREHENSIONS)


def _is_one_of(node: ast.AST, names: Collection[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _fits(pattern: Any, node: Any, meant: dict[str, Any]) -> bool:
    """Whether code is what a pattern says, each of whose names means one name, and what they mean."""
    if isinstance(pattern, ast.Name) and pattern.id == "_CALL":
        return meant.setdefault("_CALL", node) is node
    if isinstance(pattern, ast.Name) and pattern.id.startswith("_"):
        return isinstance(node, ast.Name) and meant.setdefault(pattern.id, node.id) == node.id
    if isinstance(pattern, list):
        pairs = zip(pattern, node, strict=False)
        return isinstance(node, list) and len(pattern) == len(node) and all(_fits(p, n, meant) for p, n in pairs)
    if isinstance(pattern, ast.AST):
        fields = ((getattr(pattern, name, None), getattr(node, name, None)) for name in pattern._fields)
        return type(pattern) is type(node) and all(_fits(p, n, meant) for p, n in fields)
    return bool(pattern == node)
