"""Which rows of an encoder's last hidden states come into what a head makes of them, as the head's code shows.

A forward is gone through with kinds of values in place of values: what does not depend on hidden states of padding
(FREE and its like), hidden states and what is made of them row by row, and what may only be returned. Whatever is not
certain is not known. A test of the module's own attributes alone (`self.config.classifier_pooling == "cls"`) that
decides what is read is left to the module at hand."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bastile.guards import stock_of
from bastile.models.head_code import (
    POOLED,
    ROW_BY_ROW,
    STATES,
    NotKnown,
    Sources,
    found_in,
    is_of_layers,
    is_row_by_row,
    names_of,
    pooling,
)
from bastile.models.mask_flow import MASK

#: What a part of a model has to be, where it is not a class whose forward is read, nor ROW_BY_ROW.
CROSS_ENTROPY = "cross entropy"
Path = tuple[str, ...]  # of attributes, from the model

_FREE, _MASK, _COLUMN, _CROSS = "free", "mask", "mask of columns", "cross entropy"
_OUTPUTS, _HIDDEN, _ROWS, _FLAT, _MASKED = "outputs", "hidden", "rows", "flat rows", "masked rows"
_RETURNED, _MIXED = "returned", "mixed"
_GIVEN, _FLAT_GIVEN = "given ", "flat given "  # and a parameter's name behind
_OF_ROWS = (_HIDDEN, _ROWS)
_DEPENDENT = (_OUTPUTS, *_OF_ROWS, _FLAT, _MASKED, _RETURNED, _MIXED)
#: Of an encoder's outputs, what is returned only where it is asked for, and has no rows of padding's then.
_ASKED_FOR = ("hidden_states", "attentions", "cache", "past_key_values")
_ELEMENTWISE = (torch.tanh, torch.relu, torch.sigmoid, torch.erf, functional.gelu, functional.relu, functional.silu)
_SAME = ("to", "float", "contiguous", "type_as")


class _Undecided(Exception):
    """What is read depends on this test, of the module at this path."""

    def __init__(self, path: Path, test: ast.expr) -> None:
        self.path, self.test = path, test


@dataclass(frozen=True, eq=False)
class Reading:
    """What is read of the last hidden states, where the model's parts are these."""

    reads_first: bool  # the first row of each sequence
    labels: str | None  # the parameter that says which rows besides, by IGNORED; its logits are returned, too
    by_loss_function: bool  # if these are for the model's `loss_function`
    parts: tuple[tuple[Path, Any], ...]


@dataclass(frozen=True)
class Choice:
    """It depends on an attribute's value."""

    path: Path
    holds: Callable[[Any], Any]
    if_so: Reading | Choice | None
    if_not: Reading | Choice | None


def reading_of(cls: type, sources: Sources) -> Reading | Choice | None:
    """Of a class's own forward; None where that is not known."""
    return _tree(cls, sources, {})


def _tree(cls: type, sources: Sources, assumed: dict[tuple[Path, str], bool]) -> Reading | Choice | None:
    try:
        return _Analysis(sources, assumed).of_head(cls)
    except NotKnown:
        return None
    except _Undecided as found:
        key = found.path, ast.unparse(found.test)
        yes, no = (_tree(cls, sources, {**assumed, key: value}) for value in (True, False))
        if yes is None and no is None:
            return None
        return Choice(found.path, eval(f"lambda self: {key[1]}", {}), yes, no)


class _Analysis:
    """Of one head, under what is assumed of its attributes."""

    def __init__(self, sources: Sources, assumed: dict[tuple[Path, str], bool]) -> None:
        self.sources, self.assumed = sources, assumed
        self.parts: dict[Path, Any] = {}
        self.encoder: tuple[str, type] | None = None
        self.reads_first = self.means = self.returns_rows = self.by_loss_function = False
        self.labels: set[str] = set()

    def of_head(self, cls: type) -> Reading:
        function, node = self.sources.forward(cls)
        names = [each.arg for each in (*node.args.args[1:], *node.args.kwonlyargs)]
        env = {name: _MASK if name == MASK else _GIVEN + name for name in names}
        self.keep(_Function(self, cls, (), function, env).result(node))
        is_of_tokens = self.returns_rows or bool(self.labels)
        if self.encoder is None or len(self.labels) != is_of_tokens or not (is_of_tokens or self.has_read()):
            raise NotKnown
        labels = next(iter(self.labels), None)
        return Reading(self.reads_first, labels, self.by_loss_function, tuple(self.parts.items()))

    def has_read(self) -> bool:
        return self.reads_first or self.means

    def keep(self, kind: Any) -> str:
        """What becomes a part of what is returned."""
        for each in kind if isinstance(kind, tuple) else (kind,):
            if isinstance(each, tuple):
                self.keep(each)
            elif each in _OF_ROWS[1:]:
                self.returns_rows = True
            elif each in _DEPENDENT and each != _RETURNED:
                raise NotKnown
        return _RETURNED

    def pools(self) -> bool:
        return self.encoder is None or any(POOLED in names for names in self.sources.outputs(self.encoder[1]))

    def pooled(self) -> str:
        """Of the encoder's outputs, that of its pooler, which must read the first rows alone of what is returned."""
        attribute, cls = self.encoder or ("", object)
        function, node = self.sources.forward(cls)
        value, states = pooling(node)
        if any(names[:2] != [STATES, POOLED] for names in self.sources.outputs(cls)):
            raise NotKnown
        env = dict.fromkeys(states, _HIDDEN)
        if not _is_free(_Function(self, cls, (attribute,), function, env).kind(value)):
            raise NotKnown
        return _FREE


class _Function:
    """One of its functions: a forward, of the part at a path, or what a forward calls."""

    def __init__(self, analysis: _Analysis, cls: type | None, path: Path, function: Any, env: dict[str, Any]) -> None:
        self.all, self.cls, self.path, self.globals = analysis, cls, path, function.__globals__
        self.env: dict[str, Any] | None = env  # None behind a return
        self.returned: list[Any] = []

    def result(self, node: ast.FunctionDef) -> Any:
        self.run(node.body)
        if not self.returned:
            raise NotKnown
        found = self.returned[0]
        for each in self.returned[1:]:
            found = _joined(found, each)
        return found

    # ---- statements ---------------------------------------------------------------------------------------------

    def run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if self.env is None:
                return
            match statement:
                case ast.Assign(targets=targets, value=value):
                    kind = self.kind(value)
                    for target in targets:
                        self.bind(target, kind)
                case ast.AnnAssign(target=target, value=value) if value is not None:
                    self.bind(target, self.kind(value))
                case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                    if self.name(name) not in (_FREE, *_OF_ROWS[1:]):  # labels that are others by now
                        raise NotKnown
                    self.bind(target, self.operation(self.name(name), op, self.kind(value)))
                case ast.If():
                    self.branch(statement)
                case ast.Return(value=value):
                    self.returned.append(_FREE if value is None else self.kind(value))
                    self.env = None
                case ast.Raise():
                    self.env = None
                case ast.Expr(value=value):
                    self.kind(value)
                case _:
                    raise NotKnown

    def bind(self, target: ast.expr, kind: Any) -> None:
        assert self.env is not None
        match target:
            case ast.Name(id=name):
                self.env[name] = kind
            case ast.Tuple(elts=targets) if isinstance(kind, tuple) and len(kind) == len(targets):
                for each, one in zip(targets, kind, strict=True):
                    self.bind(each, one)
            case ast.Tuple(elts=targets) if _is_free(kind):
                for each in targets:
                    self.bind(each, _FREE)
            case ast.Attribute() | ast.Subscript():  # a tensor that something is written into: not the labels, say
                if not _is_free(kind) or self.kind(target.value) != _FREE:
                    raise NotKnown
            case _:
                raise NotKnown

    def branch(self, node: ast.If) -> None:
        decided = self.decided(node)
        if decided is not None:
            self.run(node.body if decided else node.orelse)
            return
        self.kind(node.test)
        before = self.env
        ways = []
        for body in (node.body, node.orelse):
            self.env = dict(before or {})
            self.run(body)
            ways.append(self.env)
        one, other = ways
        if one is None or other is None:
            self.env = other if one is None else one
        else:
            names = {**one, **other}
            self.env = {n: _joined(one.get(n, names[n]), other.get(n, names[n])) for n in names}

    def decided(self, node: ast.If) -> bool | None:
        """Which way it goes: with a mask; where something of hidden states is at stake, as the attributes say."""
        if (with_mask := self.is_masked(node.test)) is not None:
            return with_mask
        if not any(_is_dependent(self.name(n)) for part in (*node.body, *node.orelse) for n in names_of(part)):
            return None
        is_and = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
        tests = node.test.values if is_and else [node.test]  # type: ignore[attr-defined]
        for test in tests:
            if set(names_of(test)) == {"self"}:
                key = self.path, ast.unparse(test)
                if key not in self.all.assumed:
                    raise _Undecided(self.path, test)
                if not self.all.assumed[key]:
                    return False
                if len(tests) == 1:
                    return True
        return None

    def is_masked(self, test: ast.expr) -> bool | None:
        """What a test for None says of a mask that is there: without one there is no padding."""
        match test:
            case ast.Compare(ops=[op], left=ast.Name(id=name), comparators=[ast.Constant(value=None)]):
                return isinstance(op, ast.IsNot) if self.name(name) == _MASK else None
        return None

    # ---- expressions --------------------------------------------------------------------------------------------

    def name(self, name: str) -> Any:
        return (self.env or {}).get(name, _FREE)

    def kind(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name):
                return self.name(name)
            case ast.Attribute(value=value, attr=name):
                return self.attribute(self.kind(value), name)
            case ast.Subscript(value=value, slice=index):
                return self.item(self.kind(value), index)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return tuple(map(self.kind, elements))
            case ast.BinOp(left=left, op=op, right=right):
                return self.operation(self.kind(left), op, self.kind(right))
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant()]):
                self.kind(left)
                return _FREE
            case ast.IfExp(test=test, body=one, orelse=other):
                masked = self.is_masked(test)
                self.kind(test)
                return (
                    _joined(self.kind(one), self.kind(other)) if masked is None else self.kind(one if masked else other)
                )
            case ast.Call():
                return self.call(node)
        if any(_is_dependent(self.name(name)) for name in names_of(node)):
            raise NotKnown
        return _FREE

    def attribute(self, of: Any, name: str) -> str:
        if of == _OUTPUTS:
            if name == STATES:
                return _HIDDEN
            if name == POOLED:
                return self.all.pooled()
            if name.endswith(_ASKED_FOR):
                return _RETURNED
        elif _is_free(of) or (of in (*_OF_ROWS, _FLAT) and name in ("shape", "device", "dtype")):
            return _FREE
        raise NotKnown

    def item(self, of: Any, index: ast.expr) -> Any:
        if of == _OUTPUTS:
            match index:
                case ast.Constant(value=0):
                    return _HIDDEN
                case ast.Constant(value=1):
                    return self.all.pooled()
                case ast.Slice(lower=None, upper=ast.Constant(value=2), step=None):
                    return _HIDDEN, self.all.pooled()
                case ast.Slice(lower=ast.Constant(value=int(first)), upper=None, step=None) if first >= 1:
                    return _RETURNED if first > 1 or not self.all.pools() else self.all.keep(self.all.pooled())
        elif of in _OF_ROWS:
            match index:
                case ast.Tuple(elts=[every, ast.Constant(value=0), *more]) if all(map(_is_all, (every, *more))):
                    self.all.reads_first = True
                    return _FREE
                case ast.Tuple(elts=[every, ast.Slice(lower=None, upper=upper, step=None)]) if _is_all(every):
                    if upper is None or (not isinstance(upper, ast.UnaryOp) and _is_free(self.kind(upper))):
                        return of  # without what stands behind the tokens
        elif _is_free(of) and _is_free(self.kind(index)):
            return _FREE
        raise NotKnown

    def operation(self, left: Any, op: ast.operator, right: Any) -> Any:
        kinds = left, right
        if isinstance(op, ast.Add) and any(isinstance(k, tuple) or k == _RETURNED for k in kinds):
            return self.all.keep(kinds)
        if isinstance(op, ast.Mult) and _COLUMN in kinds and any(k in _OF_ROWS for k in kinds):
            return _MASKED
        if any(not _is_free(k) and k not in _OF_ROWS for k in kinds):
            raise NotKnown
        if isinstance(op, ast.MatMult) and not _is_free(right):
            raise NotKnown
        return _FREE if _is_free(left) and _is_free(right) else _ROWS

    # ---- calls --------------------------------------------------------------------------------------------------

    def call(self, node: ast.Call) -> Any:
        match node:  # what is there of what is to be returned
            case ast.Call(func=ast.Name(id="tuple"), args=[ast.GeneratorExp(elt=ast.Name(), generators=[one])]):
                return self.all.keep(self.kind(one.iter))
            case ast.Call(func=ast.Attribute(attr=name)) if name.endswith("_"):  # in place
                raise NotKnown
        args = [self.kind(each) for each in node.args]
        given = {each.arg or "**": self.kind(each.value) for each in node.keywords}
        every = (*args, *given.values())
        match node.func:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self.of_self(name, args, given)
            case ast.Attribute(value=value, attr=method) if (of := self.kind(value)) != _FREE:
                return self.method(of, method, node, all(map(_is_free, every)))
            case ast.Name(id=name) if self.name(name) == _CROSS:
                return self.loss(args, given)
        called = found_in(node.func, self.globals)
        if called is nn.CrossEntropyLoss and not every:
            return _CROSS
        if isinstance(called, type) and is_dataclass(called):
            return self.all.keep(every)
        if all(map(_is_free, every)):
            return _FREE
        if len(args) == 1 and args[0] in _OF_ROWS and not given:
            if called in _ELEMENTWISE or is_row_by_row(type(called)):
                return _ROWS
            if inspect.isfunction(called):
                return self.inner(None, self.path, called, args, given)
        raise NotKnown

    def method(self, of: Any, name: str, node: ast.Call, are_free: bool) -> Any:
        args = [ast.unparse(each) for each in (*node.args, *node.keywords)]
        if name in _SAME and are_free:
            return of
        if isinstance(of, str) and of.startswith(_GIVEN) and name in ("view", "reshape") and args == ["-1"]:
            return _FLAT_GIVEN + of.removeprefix(_GIVEN)
        if of == _MASK and name in ("view", "unsqueeze"):
            return _MASK if name == "view" else _COLUMN if args == ["-1"] else _FREE
        if _is_free(of) and are_free:
            return _FREE
        if of == _MASKED and name == "sum" and args in (["dim=1"], ["1"]):
            self.all.means = True
            return _FREE
        if of in _OF_ROWS and are_free:
            if name in ("view", "reshape") and len(args) == 2 and args[0] == "-1":
                return _FLAT
            if name == "matmul" or (name == "squeeze" and args == ["-1"]):
                return _ROWS
            if name == "size":
                return _FREE
        raise NotKnown

    def loss(self, args: list[Any], given: dict[str, Any]) -> str:
        """Cross entropy, of rows by labels that have not been shifted or cut."""
        if all(map(_is_free, (*args, *given.values()))):
            return _FREE
        if given or len(args) != 2 or args[0] != _FLAT or not str(args[1]).startswith(_FLAT_GIVEN):
            raise NotKnown
        self.all.labels.add(args[1].removeprefix(_FLAT_GIVEN))
        return _FREE

    def of_self(self, name: str, args: list[Any], given: dict[str, Any]) -> Any:
        every = (*args, *given.values())
        found = self.attributes().get(name) or [None]
        if MASK in given or _MASK in every or any(map(is_of_layers, found)):
            return self.encoded(name, found, args, given)
        if all(map(_is_free, every)):
            return _FREE
        if name == "loss_function":
            logits, labels = (given.get(n, a) for n, a in zip(("logits", "labels"), (*args, None, None), strict=False))
            rest = (*args[2:], *(v for k, v in given.items() if k not in ("logits", "labels")))
            if logits not in _OF_ROWS[1:] or not str(labels).startswith(_GIVEN) or not all(map(_is_free, rest)):
                raise NotKnown
            self.all.labels.add(labels.removeprefix(_GIVEN))
            self.all.by_loss_function = True
            return _FREE
        return self.part(name, args, given)

    def encoded(self, name: str, found: list[Any], args: list[Any], given: dict[str, Any]) -> str:
        """What the encoder makes, which runs once."""
        cls, are_free = found[0], all(map(_is_free, (*args, *given.values())))
        is_called_so = given.get(MASK) == _MASK and bool(args or "input_ids" in given) and self.path == () and are_free
        of_decoder = any(each.startswith("decoder_") for each in given)
        if (
            not is_called_so
            or of_decoder
            or len(found) != 1
            or not isinstance(cls, type)
            or self.all.encoder is not None
        ):
            raise NotKnown
        if not issubclass(cls, nn.Module) or any(names[:1] != [STATES] for names in self.all.sources.outputs(cls)):
            raise NotKnown
        self.all.encoder, self.all.parts[(name,)] = (name, cls), stock_of(cls.forward)
        return _OUTPUTS

    def part(self, name: str, args: list[Any], given: dict[str, Any]) -> Any:
        """What a module of the head makes of hidden states."""
        path, found = (*self.path, name), self.attributes().get(name) or [None]
        first, *others = found
        if any(each is not first for each in others):
            raise NotKnown
        if first is nn.CrossEntropyLoss:
            self.all.parts[path] = CROSS_ENTROPY
            return self.loss(args, given)
        if first == ROW_BY_ROW or (isinstance(first, type) and is_row_by_row(first)):
            if len(args) != 1 or args[0] not in _OF_ROWS or given:
                raise NotKnown
            self.all.parts[path] = ROW_BY_ROW
            return _ROWS
        if not isinstance(first, type):
            raise NotKnown
        self.all.parts[path] = stock_of(first.forward)  # type: ignore[attr-defined]
        return self.inner(first, path, stock_of(first.forward), args, given)  # type: ignore[attr-defined]

    def inner(self, cls: type | None, path: Path, function: Any, args: list[Any], given: dict[str, Any]) -> Any:
        function, node = self.all.sources.read(function)
        names = [each.arg for each in node.args.args][cls is not None :]
        if len(args) > len(names):
            raise NotKnown
        env = {**dict(zip(names, args, strict=False)), **{k: v for k, v in given.items() if k in names}}
        if any(not _is_free(v) for k, v in given.items() if k not in names):
            raise NotKnown
        return _Function(self.all, cls, path, function, env).result(node)

    def attributes(self) -> dict[str, list[Any]]:
        return {} if self.cls is None else self.all.sources.attributes(self.cls)


def _joined(one: Any, other: Any) -> Any:
    """What is one or the other."""
    if one == other:
        return one
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(map(_joined, one, other))
    return _FREE if _is_free(one) and _is_free(other) else _MIXED


def _is_dependent(kind: Any) -> bool:
    return any(map(_is_dependent, kind)) if isinstance(kind, tuple) else kind in _DEPENDENT


def _is_free(kind: Any) -> bool:
    return not _is_dependent(kind)


def _is_all(node: ast.expr) -> bool:
    return isinstance(node, ast.Slice) and node.lower is node.upper is node.step is None
