"""What becomes of an attention's mask in a model's code: whether anything but the function that attends may see it."""

from __future__ import annotations

import ast

from bastile.models.forms import Code

MASK = "attention_mask"
_INTERFACE, _LEAVES_OUT = "attention_interface", "apply_mask_to_padding_states"


def hands_mask_on(code: Code, of_others: bool = False) -> bool | None:
    """Whether a function does nothing with its mask but give it to one that it calls, under the same name, or to the
    one that attends. of_others: where a backbone makes other masks too, for layers with a state, what leaves out
    padding may be given one; False says that this function does that, and None that it does more."""
    uses = [node for node in ast.walk(code.node) if is_name(node, MASK)]
    handed = [
        value
        for call in ast.walk(code.node)
        if isinstance(call, ast.Call)
        for value in (
            *(k.value for k in call.keywords if k.arg == MASK),
            *(call.args if isinstance(call.func, ast.Name) and call.func.id == _INTERFACE else ()),
        )
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


def hands_masks_out(code: Code, may_return: bool = False) -> bool | None:
    """Whether a backbone gives the masks that it makes to its layers, as `attention_mask`, and does nothing else with
    them. may_return: or returns them."""
    return _Flow(code.node, may_return).is_only_to_layers() or None


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
    what makes one ("maker") and for several of these ("makers")."""

    def __init__(self, node: ast.AST, may_return: bool) -> None:
        self.may_return = may_return
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

    def kind(self, node: ast.AST) -> str | None:
        match node:
            case ast.Name(id=name):
                return "maker" if makes(name) else self.names.get(name)
            case ast.Call(func=ast.Attribute(value=value, attr="get")):
                return self._one_of(value)
            case ast.Call(func=function):
                return "mask" if self.kind(function) == "maker" else None
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
            case ast.Call(func=function):
                return kind == "maker" and function is node
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                return True
            case ast.keyword(arg=name):
                called = getattr(self.above[above], "func", None)
                to_layer = isinstance(called, ast.Name) and called.id in self.layers
                to_maker = called is not None and self.kind(called) == "maker"  # a user's, under the same name
                return kind == "mask" and name == MASK and (to_layer or to_maker)
            case ast.Return():
                return self.may_return
        return False


def names_in(target: ast.AST) -> list[ast.Name]:
    return [each for each in ast.walk(target) if isinstance(each, ast.Name)]


def makes(name: str) -> bool:
    return name.startswith("create_") and name.endswith("_mask")


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
