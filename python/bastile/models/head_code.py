"""What the code of a head upon an encoder is made of: the functions that it calls, the classes of its parts, and what
an encoder pools."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from bastile.guards import stock_of
from bastile.models.forms import code_of, runs
from bastile.models.mask_flow import is_name

#: What a part of a model has to be, where it is not a class whose forward is read.
ROW_BY_ROW = "row by row"
STATES, POOLED = "last_hidden_state", "pooler_output"
_MODULES_OF_ROWS = (nn.Linear, nn.Identity, nn.Dropout, nn.LayerNorm, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid)


class NotKnown(Exception):
    """Code of which it is not certain what it does."""


class Sources:
    """The code of a file's functions and classes, read once."""

    def __init__(self) -> None:
        self._read: dict[Any, tuple[Any, ast.FunctionDef]] = {}
        self._attributes: dict[type, dict[str, list[Any]]] = {}

    def read(self, function: Any) -> tuple[Any, ast.FunctionDef]:
        if function not in self._read:
            self._read[function] = _read(function)
        return self._read[function]

    def forward(self, cls: Any) -> tuple[Any, ast.FunctionDef]:
        return self.read(stock_of(cls.forward))

    def attributes(self, cls: Any) -> dict[str, list[Any]]:
        """What a class's constructor makes its attributes of: a class, ROW_BY_ROW, or None where that is not known."""
        if cls not in self._attributes:
            self._attributes[cls] = _attributes(*self.read(cls.__init__))
        return self._attributes[cls]

    def outputs(self, cls: Any) -> Iterator[list[str]]:
        """The names of what an encoder's forward returns, in their order, where it makes that itself."""
        function, node = self.forward(cls)
        for each in ast.walk(node):
            match each:
                case ast.Return(value=ast.Call(func=called)):
                    made = found_in(called, function.__globals__)
                    if isinstance(made, type) and is_dataclass(made):
                        yield [field.name for field in fields(made)]


def _read(function: Any) -> tuple[Any, ast.FunctionDef]:
    """What does the work in a function, and its code, which is what runs."""
    inner = function
    while hasattr(inner, "__wrapped__") and inner.__globals__.get("__name__", "").startswith("transformers."):
        inner = stock_of(inner.__wrapped__)
    code = code_of(inner) if inspect.isfunction(inner) else None
    if code is None or not isinstance(code.node, ast.FunctionDef) or not runs(code.node, code, inner):
        raise NotKnown
    return inner, code.node


def _attributes(function: Any, node: ast.FunctionDef) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for each in ast.walk(node):
        match each:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
                found.setdefault(name, []).extend(_made(value, function.__globals__))
    return {name: [each for each in made if each is not Ellipsis] for name, made in found.items()}


def _made(node: ast.expr, scope: dict[str, Any]) -> Iterator[Any]:
    match node:
        case ast.IfExp(body=one, orelse=other):
            yield from (*_made(one, scope), *_made(other, scope))
        case ast.Constant(value=None):
            yield Ellipsis
        case ast.Attribute(value=ast.Name(id="config"), attr="hidden_act"):  # a function in place of its name
            yield Ellipsis
        case ast.Call(func=called, args=args, keywords=keywords):
            made = found_in(called, scope)
            is_plain = made is not nn.CrossEntropyLoss or not (args or keywords)
            is_activation = not isinstance(made, type) and _is_of_activations(made)
            yield ROW_BY_ROW if is_activation else made if isinstance(made, type) and is_plain else None
        case ast.Subscript(value=value):
            yield ROW_BY_ROW if _is_of_activations(type(found_in(value, scope))) else None
        case _:
            yield None


def found_in(node: ast.expr, scope: dict[str, Any]) -> Any:
    match node:
        case ast.Name(id=name):
            return stock_of(scope.get(name))
        case ast.Attribute(value=value, attr=name):
            return getattr(found_in(value, scope), name, None)
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=key)) if isinstance(scope.get(name), dict):
            return scope[name].get(key)
    return None


def pooling(node: ast.FunctionDef) -> tuple[ast.expr, set[str]]:
    """What an encoder's forward pools, and the names of its last hidden states there, of which it makes nothing else
    but what it returns."""
    calls = [c for c in ast.walk(node) if isinstance(c, ast.Call) and {STATES, POOLED} <= {k.arg for k in c.keywords}]
    if len(calls) != 1:
        raise NotKnown
    named = {k.arg: k.value for k in calls[0].keywords}
    states, pooled = named[STATES], named[POOLED]
    if not isinstance(states, ast.Name) or not isinstance(pooled, ast.Name):
        raise NotKnown
    made = [
        each for each in node.body if isinstance(each, ast.Assign) and any(is_name(t, pooled.id) for t in each.targets)
    ]
    if len(made) != 1 or [*_stored(node)].count(pooled.id) != 1:
        raise NotKnown
    at = node.body.index(made[0])
    names = _same_as(states.id, node.body[:at])
    for each in node.body[at + 1 :]:
        is_return = isinstance(each, ast.If) and all(isinstance(e, ast.Return) for e in each.body) and not each.orelse
        if not (is_return or isinstance(each, ast.Return)) and names & set(names_of(each)):
            raise NotKnown
    return made[0].value, names


def _same_as(name: str, body: list[ast.stmt]) -> set[str]:
    """The names of what is called so behind these statements."""
    made: dict[str, Any] = {}  # by which statement
    for at, each in enumerate(body):
        match each:
            case ast.Assign(targets=[ast.Name(id=one)], value=ast.Name(id=other)):
                made[one] = made.setdefault(other, other)
            case _:
                made.update({stored: (at, stored) for stored in _stored(each)})
    return {each for each in made if name in made and made[each] == made[name]}


def names_of(node: ast.AST) -> Iterable[str]:
    return (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def _stored(node: ast.AST) -> Iterable[str]:
    return (e.id for e in ast.walk(node) if isinstance(e, ast.Name) and isinstance(e.ctx, ast.Store))


def is_row_by_row(cls: type) -> bool:
    return cls in _MODULES_OF_ROWS or cls.__name__.endswith(("LayerNorm", "RMSNorm")) or _is_of_activations(cls)


def is_of_layers(cls: Any) -> bool:
    """Whether this is a model of its own, which may leave out padding as the encoder does."""
    return isinstance(cls, type) and any(each.__name__ == "PreTrainedModel" for each in cls.__mro__)


def _is_of_activations(item: Any) -> bool:
    return getattr(item, "__module__", "") == "transformers.activations"
