"""What becomes of an attention's mask in a model's code: whether anything but the function that attends may see it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

from bastile.guards import stock_of
from bastile.models.forms import Code, code_of, is_known, runs
from bastile.models.sites import classes_in

MASK = "attention_mask"
#: Of what else a maker is told: hidden states of another sequence, which queries attend to.
ATTENDED = "encoder_hidden_states"
_INTERFACE, _LEAVES_OUT = "attention_interface", "apply_mask_to_padding_states"
#: Methods that return what they are given first, each in its place, or what it is of the last tokens: Gemma 4's.
_HAND_BACK = frozenset({"3fb9df9f7670", "8338dd60377a"})


def hands_mask_on(code: Code, of_others: bool = False) -> bool | None:
    """Whether a function does nothing with its mask but give it to one that it calls, under the same name, or to the
    one that attends. of_others: where a backbone makes other masks too, for layers with a state, what leaves out
    padding may be given one; False says that this function does that, and None that it does more."""
    uses = [node for node in ast.walk(code.node) if is_name(node, MASK)]
    handed = [
        value
        for call in ast.walk(code.node)
        if isinstance(call, ast.Call)
        for value in (*(k.value for k in call.keywords if k.arg == MASK), *(call.args if _attends(call) else ()))
        if is_name(value, MASK)
    ]
    if len(handed) == len(uses):
        return True
    left_out = [
        value
        for call in ast.walk(code.node)
        if isinstance(call, ast.Call) and is_name(call.func, _LEAVES_OUT)
        for value in call.args
        if is_name(value, MASK)
    ]
    return False if of_others and len(left_out) == len(uses) else None


def hands_mask_to_modules(code: Code, cls: type) -> bool | None:
    """Whether a class's forward does nothing with its mask but give it to modules that it calls, as their mask, or to
    the function that attends. An attention over something else may choose another."""
    nodes, modules = list(ast.walk(code.node)), Modules(code, cls)
    handed = [node for each in nodes for node in _of_choice(each)]
    for call in nodes:
        if isinstance(call, ast.Call):
            given = [node for node in (*call.args, *(k.value for k in call.keywords)) if is_name(node, MASK)]
            handed += [node for node in given if _attends(call) or modules.take_mask(call, node)]
    return len(handed) == len([node for node in nodes if is_name(node, MASK)]) or None


#: Of what makes a loss of a router's logits, [B S, E] of each layer, with the mask of padding as its fourth argument.
BALANCE = "load_balancing_loss_func"
_BALANCES = frozenset({"e4dbbf15c296", "4b41ba3a0256", "1f070ce0dc5f"})  # from 5.23 on, from 5.16 on, before


def masks_router(code: Code) -> bool | None:
    """Whether a forward makes a loss of its router's logits by what is called so, with its mask as it was given."""
    calls = [n for n in ast.walk(code.node) if isinstance(n, ast.Call) and is_name(n.func, BALANCE)]
    names = [n for n in ast.walk(code.node) if isinstance(n, ast.Name) and n.id == MASK]
    stored = [n for n in names if isinstance(n.ctx, ast.Store)]
    takes_mask = all(len(call.args) > 3 and is_name(call.args[3], MASK) for call in calls)
    return (bool(calls) and takes_mask and not stored) or None


def is_balance(function: Any) -> bool:
    """Whether this leaves out what the mask does."""
    return is_known(function, _BALANCES)


def _attends(call: ast.Call) -> bool:
    return is_name(call.func, _INTERFACE)


def hands_masks_out(code: Code, may_return: bool = False, cls: type | None = None) -> bool | None:
    """Whether a backbone gives the masks that it makes to its layers, as `attention_mask`, and does nothing else with
    them. may_return: or returns them. cls: whose code this is."""
    return _Flow(code.node, may_return, hands_back=_handing_back(code, cls)).is_only_to_layers() or None


def _handing_back(code: Code, cls: type | None) -> dict[str | None, int]:
    """By name: those that the code calls, and how many arguments they return."""
    found: dict[str | None, int] = {}
    for name in {of_self(each.func) for each in ast.walk(code.node) if isinstance(each, ast.Call)}:
        method = stock_of(getattr(cls, name, None)) if name is not None else None
        read = code_of(method) if isinstance(method, FunctionType) and is_known(method, _HAND_BACK) else None
        for each in ast.walk(read.node) if read is not None else ():
            if isinstance(each, ast.Return) and isinstance(each.value, ast.Tuple):
                found[name] = len(each.value.elts)
    return found


def hands_masks_to_modules(code: Code, cls: type) -> bool | None:
    """Whether a class's forward gives the masks that it makes, or has a method of the class make, to modules that it
    calls, as their masks, and does nothing else with them. Those of what a decoder attends to beside are none of
    them."""
    return _Flow(code.node, False, (code, cls)).is_only_to_layers() or None


def goes_to_makers_alone(code: Code, makers: tuple[str, ...]) -> bool | None:
    """Whether a backbone does nothing with the mask that it is given but hand it to functions that make masks, which
    are these alone."""
    nodes = list(ast.walk(code.node))
    made = {node.id for node in nodes if isinstance(node, ast.Name) and makes(node.id)}
    above = {child: each for each in nodes for child in ast.iter_child_nodes(each)}
    uses = [node for node in nodes if is_name(node, MASK)]
    return True if made <= set(makers) and all(_is_handed_or_asked(node, above) for node in uses) else None


def _is_handed_or_asked(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    """Given to a function under its name, in a call or a dictionary of arguments, asked whether it is several, or the
    name of one that has been made."""
    match above.get(node):
        case ast.Assign(targets=[ast.Name()]):
            return isinstance(getattr(node, "ctx", None), ast.Store)
        case ast.keyword(arg=name):
            return name == MASK
        case ast.Dict(keys=keys, values=values):
            key = keys[next(i for i, value in enumerate(values) if value is node)]
            return isinstance(key, ast.Constant) and key.value == MASK
        case ast.NamedExpr() as named:
            return _is_isinstance(above.get(named))
        case asked:
            return _is_isinstance(asked)


def _is_isinstance(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and is_name(node.func, "isinstance")


class _Flow:
    """Where masks go in a function: which names stand for one ("mask"), for several by kinds of layers ("masks"), for
    what makes one ("maker") and for several of these ("makers"). of: a class's code, and this, whose modules may be
    given masks. hands_back: methods of its class that return what they are given first, and of how many."""

    def __init__(
        self,
        node: ast.AST,
        may_return: bool,
        of: tuple[Code, type] | None = None,
        hands_back: Mapping[str | None, int] = MappingProxyType({}),
    ) -> None:
        self.may_return, self.hands_back = may_return, hands_back
        self.cls: type | None = None if of is None else of[1]
        self.modules = None if of is None else Modules(*of)
        self.nodes = list(ast.walk(node))
        self.above = {child: each for each in self.nodes for child in ast.iter_child_nodes(each)}
        self.layers = {name.id for each in self.nodes if isinstance(each, ast.For) for name in names_in(each.target)}
        self.names: dict[str, str] = {}
        known = -1
        while known != len(self.names):
            known = len(self.names)
            for each in self.nodes:
                match each:
                    case ast.Assign(targets=[ast.Name(id=name)], value=value) if (kind := self.kind(value)) is not None:
                        self.names[name] = kind
                    case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name))], value=value) if self.is_mask(
                        value
                    ):
                        self.names[name] = "masks"
                    case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Call() as call):
                        kinds = self._handed_back(call) or self._returned(call) or ()
                        for to, kind in zip(names, kinds, strict=False):
                            if isinstance(to, ast.Name) and len(kinds) == len(names) and kind is not None:
                                self.names[to.id] = kind

    def _handed_back(self, call: ast.Call) -> list[str | None]:
        count = self.hands_back.get(of_self(call.func), 0)
        return [self.kind(each) for each in call.args[:count]]

    def _returned(self, call: ast.Call) -> list[str | None] | None:
        """The kinds of what a method of the class returns, if all it does with the masks that it makes is to return
        them."""
        match call.func:
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if self.cls is not None:
                method = stock_of(getattr(self.cls, name, None))
            case _:
                return None
        code = code_of(inspect.unwrap(method)) if isinstance(method, FunctionType) else None
        if code is None or not runs(code.node, code, inspect.unwrap(method)):
            return None
        assert self.cls is not None
        flow = _Flow(code.node, True, (code, self.cls))
        results = [each.value for each in flow.nodes if isinstance(each, ast.Return)]
        if len(results) != 1 or results[0] is None or not flow.is_only_to_layers():
            return None
        return [flow.kind(each) for each in results[0].elts] if isinstance(results[0], ast.Tuple) else None

    def kind(self, node: ast.AST) -> str | None:
        match node:
            case ast.Name(id=name):
                return "maker" if makes(name) else self.names.get(name)
            case ast.Call(func=ast.Attribute(value=value, attr="get")):
                return self._one_of(value)
            case ast.Call(func=function, keywords=keywords):
                is_cross = self.cls is not None and any(each.arg == ATTENDED for each in keywords)
                return "mask" if self.kind(function) == "maker" and not is_cross else None
            case ast.Lambda(body=body):
                return "maker" if self.is_mask(body) else None
            case ast.IfExp(body=one, orelse=other):
                return self.kind(one) or self.kind(other)
            case ast.Subscript(value=value):
                return self._one_of(value)
            case ast.Dict(values=values):
                kinds = {self.kind(value) for value in values} - {None}
                return f"{kinds.pop()}s" if len(kinds) == 1 else None
            case ast.DictComp(value=value):
                return "masks" if self.is_mask(value) else None
        return None

    def _one_of(self, node: ast.AST) -> str | None:
        return {"masks": "mask", "makers": "maker"}.get(self.kind(node) or "")

    def is_mask(self, node: ast.AST) -> bool:
        return self.kind(node) == "mask"

    def is_only_to_layers(self) -> bool:
        found = [(each, kind) for each in self.nodes if (kind := self.kind(each)) is not None and self._is_read(each)]
        return any(kind == "mask" for _, kind in found) and all(self._goes_on(*each) for each in found)

    def _goes_to_module(self, call: ast.AST, node: ast.AST) -> bool:
        """Or to a method of the class that makes masks of it."""
        assert self.modules is not None
        is_of_method = isinstance(call, ast.Call) and self._returned(call) is not None
        return self.modules.take_mask(call, node) or is_of_method

    def _is_read(self, node: ast.AST) -> bool:
        return not isinstance(getattr(node, "ctx", None), ast.Store)

    def _goes_on(self, node: ast.AST, kind: str) -> bool:
        above = self.above.get(node)
        match above:
            case ast.Assign(targets=[ast.Name()]):
                return True
            case ast.Assign(targets=[ast.Subscript(value=into)]):
                return kind == "mask" and self.kind(into) == "masks"
            case ast.Dict() | ast.IfExp() | ast.DictComp() | ast.Lambda():
                return self.kind(above) is not None
            case ast.Subscript(value=value):
                return kind in ("masks", "makers") and value is node
            case ast.Attribute():
                return self._one_of(node) is not None and self.kind(self.above[above]) is not None
            case ast.Call(func=function) if function is node:
                return kind == "maker"
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                return True
            case ast.keyword(arg=name):
                called = getattr(self.above[above], "func", None)
                to_layer = self.modules is None and isinstance(called, ast.Name) and called.id in self.layers
                to_maker = called is not None and self.kind(called) == "maker"  # a user's, under the same name
                to_module = self.modules is not None and self._goes_to_module(self.above[above], node)
                return kind == "mask" and name == MASK and (to_layer or to_maker or to_module)
            case ast.Call(func=function, args=args) if node in args[: self.hands_back.get(of_self(function), 0)]:
                return True
            case ast.Call() if self.modules is not None:
                return kind == "mask" and self.modules.take_mask(above, node)
            case ast.Tuple():
                return self.may_return and isinstance(self.above[above], ast.Return)
            case ast.Return():
                return self.may_return
        return False


class Modules:
    """What a class's forward calls: modules that an object of it has, found by how they are made."""

    def __init__(self, code: Code, cls: type) -> None:
        #: Of what loops go through, what it is of self.
        self._loops = {
            name.id: attribute
            for each in ast.walk(code.node)
            if isinstance(each, ast.For)
            for attribute in [a for a in map(of_self, ast.walk(each.iter)) if a is not None][:1]
            for name in names_in(each.target)
        }
        self._made, self._classes = _made_by(cls)

    def called(self, node: ast.AST | None) -> list[type]:
        """The classes of which one is called, with arguments that each stand for one; none, where it is no module."""
        if not isinstance(node, ast.Call) or any(isinstance(each, ast.Starred) for each in node.args):
            return []
        name = self._loops.get(node.func.id) if isinstance(node.func, ast.Name) else of_self(node.func)
        return self._classes(name) if name is not None else []

    def calls_own(self, node: ast.Call) -> bool:
        """Whether it calls a module, of whatever class, that no loop goes through."""
        return of_self(node.func) in self._made

    def calls_layer(self, node: ast.Call) -> bool:
        return isinstance(node.func, ast.Name) and node.func.id in self._loops

    def take_mask(self, call: ast.AST | None, node: ast.AST) -> bool:
        """Whether what is called takes this argument as its mask."""
        classes = self.called(call)
        if not classes or not isinstance(call, ast.Call):
            return False
        if any(keyword.value is node and keyword.arg == MASK for keyword in call.keywords):
            return True
        at = next((i for i, each in enumerate(call.args) if each is node), None)
        return at is not None and all(_parameters(each)[at + 1 : at + 2] == [MASK] for each in classes)


def of_self(node: ast.AST) -> str | None:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return None


def _parameters(cls: type) -> list[str]:
    return list(inspect.signature(stock_of(cls.forward)).parameters)  # type: ignore[attr-defined]


def _made_by(cls: type) -> tuple[set[str], Callable[[str], list[type]]]:
    """What attributes are assigned where an object is made; and by what one is called, the classes of modules that it
    may be of: all that are made beside it where that does not show."""
    init = inspect.unwrap(cls.__init__)  # type: ignore[misc]
    code = code_of(init) if isinstance(init, FunctionType) else None
    if code is None:
        return set(), lambda _: []
    scope = init.__globals__

    def classes(node: ast.AST) -> list[type]:
        return [each for name in names_in(node) for each in classes_in(scope.get(name.id))]

    made = [
        (target, each.value)
        for each in ast.walk(code.node)
        if isinstance(each, ast.Assign)
        for target in map(of_self, each.targets)
        if target is not None
    ]
    names = {name for name, _ in made}

    def classes_of(name: str) -> list[type]:
        own = [each for to, value in made if to == name for each in classes(value)]
        return own or (classes(code.node) if name in names else [])

    return names, classes_of


def _of_choice(node: ast.AST) -> list[ast.AST]:
    """The mask's places where it, or another one, becomes the mask by a choice."""
    match node:
        case ast.Assign(targets=[ast.Name() as target], value=ast.IfExp(body=one, orelse=other)) if is_name(
            target, MASK
        ):
            return [each for each in (target, one, other) if is_name(each, MASK)]
    return []


def names_in(target: ast.AST) -> list[ast.Name]:
    return [each for each in ast.walk(target) if isinstance(each, ast.Name)]


def makes(name: str) -> bool:
    return name.startswith("create_") and name.endswith("_mask")


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
