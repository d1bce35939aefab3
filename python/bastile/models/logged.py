"""Numbers that TRL's SFT logs, read when they are logged.

Its compute_loss turns the entropy and the accuracy of each batch into Python numbers, and counts the tokens of a mask:
the host waits until the forward pass is done, and the GPU then until the backward pass is launched. In a copy of that
function they become numbers that are read when somebody calculates with them, as its `log` does with their sums; and
the mask is counted by the host, where it has sent it. The logs have the same numbers."""

from __future__ import annotations

import ast
import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from bastile.guards import stand_in_for, stock_of
from bastile.host_copies import on_host
from bastile.models.forms import code_of, forget_sources, runs
from bastile.models.rewrite import rewritten

_MODULE, _METHOD = "trl.trainer.sft_trainer", "compute_loss"
_LATER, _RATIO, _COUNT = "bastile_later", "bastile_ratio", "bastile_count"
#: A mask's tokens, of all processes.
_TOKENS = "self.accelerator.gather_for_metrics(inputs['attention_mask'].sum()).sum()"
_DEVICES = frozenset({"cuda"})


def put_into(trainer: type) -> list[type]:
    """Into the class of TRL that this is or is derived from; where it has been put."""
    found = []
    for cls in trainer.__mro__:
        there = vars(cls).get(_METHOD) if cls.__module__ == _MODULE else None
        made = _copy_of(cls, there) if there is not None and stock_of(there) is there else None
        if made is not None:
            setattr(cls, _METHOD, made)
            found.append(cls)
    return found


def take_out_of(classes: list[type]) -> None:
    for cls in classes:
        there = vars(cls).get(_METHOD)
        if there is not None and stock_of(there) is not there:
            setattr(cls, _METHOD, stock_of(there))


@functools.cache
def _copy_of(cls: type, function: Any) -> Any:
    """The function with numbers that are read later; None where its source is not what runs, or has none."""
    code = code_of(function)
    forget_sources()  # which are long
    if code is None or not runs(code.node, code, function):
        return None
    node = copy.deepcopy(code.node)
    reads = _Reads()
    reads.visit(node)
    if not reads.found or not isinstance(node, ast.FunctionDef):
        return None
    helpers = {"__class__": cls, _LATER: later, _RATIO: ratio, _COUNT: count}
    made = rewritten(node, code, function, helpers)
    stand_in_for(function, made)
    return made


class _Reads(ast.NodeTransformer):
    """`x.item()`; `x.item() if n > 0 else 0.0`."""

    def __init__(self) -> None:
        self.found = 0

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        match node:
            case ast.IfExp(
                test=ast.Compare(left=divisor, ops=[ast.Gt()], comparators=[ast.Constant(value=0)]),
                body=ast.Call(func=ast.Attribute(value=ast.BinOp(op=ast.Div(), right=by) as x, attr="item"), args=[]),
                orelse=ast.Constant(value=float(zero)),
            ) if zero == 0 and isinstance(divisor, ast.Name) and ast.dump(divisor) == ast.dump(by):
                return self._call(node, _RATIO, x, divisor)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Attribute(value=x, attr="item"), args=[], keywords=[]):
                if ast.unparse(x) == _TOKENS:
                    mask = ast.parse("inputs['attention_mask']", mode="eval").body
                    accelerator = ast.parse("self.accelerator", mode="eval").body
                    return self._call(node, _COUNT, accelerator, mask)
                return self._call(node, _LATER, x)
        return self.generic_visit(node)

    def _call(self, node: ast.expr, name: str, *args: ast.expr) -> ast.AST:
        self.found += 1
        return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), list(args), []), node)


# ---- what the copy calls ---------------------------------------------------------------------------------------------


def later(tensor: Any) -> Any:
    """tensor.item(), which waits when somebody wants to know it."""
    is_plain = type(tensor) is torch.Tensor and tensor.device.type in _DEVICES and not tensor.requires_grad
    return _Later(tensor) if is_plain else tensor.item()


def ratio(quotient: Any, divisor: Any) -> Any:
    """quotient.item() if divisor > 0 else 0.0."""
    if type(quotient) is torch.Tensor and type(divisor) is torch.Tensor and quotient.is_floating_point():
        return later(torch.where(divisor > 0, quotient, 0.0))
    return quotient.item() if divisor > 0 else 0.0


def count(accelerator: Any, mask: Any) -> Any:
    """The sum of a mask over all processes."""
    host = on_host(mask) if accelerator.num_processes == 1 else None
    if host is not None:
        return host.sum().item()
    return accelerator.gather_for_metrics(mask.sum()).sum().item()


class _Later:
    """A number that is still to be read. Whatever is asked of it, the number answers."""

    __slots__ = ("_number", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._number: Any = None

    @property
    def number(self) -> Any:
        if self._tensor is not None:
            self._number, self._tensor = self._tensor.item(), None
        return self._number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.number, name)

    def __reduce__(self) -> Any:
        return _itself, (self.number,)

    def __repr__(self) -> str:
        return repr(self.number)

    def __format__(self, spec: str) -> str:
        return format(self.number, spec)

    def __hash__(self) -> int:
        return hash(self.number)

    def __bool__(self) -> bool:
        return bool(self.number)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.number, digits)


def _itself(number: Any) -> Any:
    return number


def _number_of(value: Any) -> Any:
    return value.number if type(value) is _Later else value


def _binary(function: Callable[[Any, Any], Any], *, is_turned: bool) -> Callable[[Any, Any], Any]:
    def method(self: _Later, other: Any) -> Any:
        pair = (_number_of(other), self.number) if is_turned else (self.number, _number_of(other))
        return function(*pair)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(_Later, f"__{_name}__", _binary(getattr(operator, _name), is_turned=False))
    setattr(_Later, f"__r{_name}__", _binary(getattr(operator, _name), is_turned=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Later, f"__{_name}__", _binary(getattr(operator, _name), is_turned=False))
for _name, _function in {"float": float, "int": int, "neg": operator.neg, "pos": operator.pos, "abs": abs}.items():
    setattr(_Later, f"__{_name}__", lambda self, function=_function: function(self.number))
