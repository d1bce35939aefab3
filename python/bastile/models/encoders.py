"""Encoders, by their code: classes in whose layers each token sees all others, those that are masked left out.

They make masks by two functions of Transformers, or have a method do so, and hand them to their layers, or to a module
that has these. As in causal models (models/masked_attention.py) masks may be said in a few numbers, if all that becomes
of them is that they reach the function that attends."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

from bastile.guards import stock_of
from bastile.models.forms import Code, code_of
from bastile.models.mask_flow import (
    ATTENDED,
    MASK,
    Modules,
    hands_mask_to_modules,
    hands_masks_to_modules,
    is_name,
)
from bastile.models.rebind import parameter_names
from bastile.models.sites import ModelFile, calls, own_forward, owner_of_forward, parts_of

MAKERS = ("create_bidirectional_mask", "create_bidirectional_sliding_window_mask")
#: Which make a model of another file.
_ELSEWHERE = ("from_config", "_from_config")
_LAST = "last_hidden_state"
#: What counts the places of a row, which are others side by side.
_COUNTS = ("arange",)


def makes_masks(function: Any) -> bool:
    return any(calls(function, maker) for maker in MAKERS)


def of_file(file: ModelFile) -> tuple[type, ...]:
    """Classes that make masks, if nothing but functions that attend gets to see them; none, where one in the file does
    not do so."""
    found = []
    for cls in file.own_classes():
        if not any(_makes_own(function) for function in (own_forward(cls), *_methods(cls))):
            continue
        why = _elsewhere(file, cls)
        if why is not None:
            file.unknown[f"masks of {cls.__name__}"] = f"stay: {why}"
            return ()
        found.append(cls)
    others = [name for name, item in file.scope.items() if _is_of(file, item) and makes_masks(stock_of(item))]
    others += [
        name
        for name, cls in file.classes()
        if cls.__module__ == file.name and cls not in found and any(map(_makes_own, _methods(cls)))
    ]
    if others:
        file.unknown[f"masks of {others[0]}"] = "stay: it makes them, too, which layers do not get from it"
        return ()
    return tuple(found)


def _methods(cls: type) -> Iterator[Any]:
    """Its others."""
    for name, item in vars(cls).items():
        if name != "forward" and callable(stock_of(item)):
            yield stock_of(item)


def _is_of(file: ModelFile, item: Any) -> bool:
    return inspect.isfunction(stock_of(item)) and stock_of(item).__module__ == file.name


def _makes_own(function: Any) -> bool:
    """Whether it makes masks of its own tokens, not of others that these attend to."""
    if not makes_masks(function):
        return False
    code = code_of(inspect.unwrap(function))
    if code is None:
        return True
    made = [
        node
        for node in ast.walk(code.node)
        if isinstance(node, ast.Call) and any(is_name(node.func, m) for m in MAKERS)
    ]
    return not made or any(all(keyword.arg != ATTENDED for keyword in call.keywords) for call in made)


def _elsewhere(file: ModelFile, cls: type) -> str | None:
    """Why something else than an attention may see a mask of a class; None where nothing may."""
    made_of = parts_of([cls])
    if any(calls(part.__init__, name) for part in made_of for name in _ELSEWHERE):  # type: ignore[misc]
        return f"{cls.__name__} is made of models of other files"
    parts = [part for part in made_of[1:] if MASK in inspect.signature(_forward_of(part)).parameters]
    if not parts:
        return f"nothing that {cls.__name__} is made of takes one"
    if not file.read(cls, hands_masks_to_modules, cls):
        return f"{cls.__name__}.forward is not known to hand them to modules alone"
    for part in parts:
        owner = owner_of_forward(part)
        if owner.__module__ != file.name or not file.read(owner, hands_mask_to_modules, owner):
            return f"{owner.__name__}.forward is not known to hand them on to the function that attends alone"
    return None


def _forward_of(cls: type) -> Any:
    return own_forward(owner_of_forward(cls))


# ---- what takes hidden states through layers -------------------------------------------------------------------------


def stacks(file: ModelFile, encoder: type) -> Iterator[type]:
    """The classes within it that take hidden states and a mask, and do nothing with hidden states but take them
    through layers, and return them."""
    for part in parts_of([encoder])[1:]:
        if part.__module__ == file.name and "forward" in vars(part) and calls(part.__init__, "ModuleList"):  # type: ignore[misc]
            names = parameter_names(own_forward(part))
            is_known = MASK in names and file.read(part, _takes_hidden_through_layers, part)
            if is_known and not any(calls(_forward_of(each), name) for each in parts_of([part]) for name in _COUNTS):
                yield part


def _takes_hidden_through_layers(code: Code, cls: type) -> bool | None:
    names = [argument.arg for argument in code.node.args.args]
    hidden = names[1] if len(names) > 1 else ""
    nodes, modules = list(ast.walk(code.node)), Modules(code, cls)
    above = {child: each for each in nodes for child in ast.iter_child_nodes(each)}
    taken = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and _takes(node.value, hidden, modules)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    uses = [node for node in nodes if is_name(node, hidden)]
    return (bool(taken) and all(_goes_on(node, hidden, taken, modules, above) for node in uses)) or None


def _takes(node: ast.AST, hidden: str, modules: Modules) -> bool:
    """Whether it is a call of a layer with the hidden states, or of a module with these alone."""
    if not isinstance(node, ast.Call):
        return False
    is_layer = modules.calls_layer(node)
    if not is_layer and not modules.calls_own(node):
        return False
    first = [*node.args[:1], *(k.value for k in node.keywords if k.arg == hidden)]
    return len(first) == 1 and is_name(first[0], hidden) and (is_layer or len(node.args) + len(node.keywords) == 1)


def _goes_on(node: ast.AST, hidden: str, taken: set[str], modules: Modules, above: dict[ast.AST, ast.AST]) -> bool:
    match above.get(node):
        case ast.Assign(targets=[ast.Name()], value=value):  # of what a layer returns, or its first part
            of_taken = (
                isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and value.value.id in taken
            )
            is_first = of_taken and isinstance(value.slice, ast.Constant) and value.slice.value == 0  # type: ignore[attr-defined]
            return is_first or _takes(value, hidden, modules)
        case ast.Call(args=args) as call:
            return args[:1] == [node] and _takes(call, hidden, modules)
        case ast.keyword(arg=name) as keyword:
            return name == _LAST or (name == hidden and _takes(above[keyword], hidden, modules))
        case ast.Return():
            return True
        case ast.Tuple() | ast.List() as several:  # those of all layers, if they are asked for; what is returned
            return isinstance(above.get(several), (ast.BinOp, ast.Return, ast.comprehension))
    return False
