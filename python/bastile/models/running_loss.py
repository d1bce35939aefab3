"""The sum of losses that a Trainer keeps for its log, without waiting for each step's.

After every backward pass the Trainer asks whether the loss is finite before it adds it up (`logging_nan_inf_filter`):
the host waits for the device, and the device then waits for the host until clipping and the optimiser come: of a model
with adapters 15 ms a step. Here that is asked on the device: in the Trainer's loop, and nowhere else, a step's loss
answers that it is finite, and where it is added and is not, what is added is what the Trainer would have added. A loop
that does anything else with a step's loss runs as it is."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bastile.guards import stand_in_for, stock_of
from bastile.models import waits

_NAME, _STEP = "tr_loss_step", "training_step"  # what the loop calls a step's loss, and what makes one
_TESTS = frozenset({torch.isnan, torch.isinf})
_SUMS = frozenset({torch.Tensor.__add__, torch.Tensor.__iadd__, torch.Tensor.add, torch.Tensor.add_, torch.add})
_DEVICES = frozenset({"cpu", "cuda"})

_is_in_force = False


def put_into(trainer: type) -> None:
    """Into the method of Trainer that has the loop."""
    global _is_in_force
    _is_in_force = True
    for name, there in _loops(trainer):
        if stock_of(there) is there:
            setattr(trainer, name, _loop(there))


def take_out_of(trainer: type) -> None:
    """What others have put around it since stays, and comes to the original."""
    global _is_in_force
    _is_in_force = False
    for name, there in _loops(trainer):
        if stock_of(there) is not there:
            setattr(trainer, name, stock_of(there))


def _loops(trainer: type) -> list[tuple[str, Any]]:
    """_run_epoch, or _inner_training_loop in releases that have no other."""
    codes = {name: getattr(stock_of(item), "__code__", None) for name, item in vars(trainer).items()}
    return [(name, vars(trainer)[name]) for name, code in codes.items() if code and _NAME in code.co_varnames]


def _loop(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        with waits.training():
            return looped(self, *args, **kwargs)

    def looped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_in_force or _STEP in vars(self) or "torch_xla" in sys.modules or not _only_adds(original):
            return original(self, *args, **kwargs)
        step = partial(_step, self)
        setattr(self, _STEP, step)
        try:
            return original(self, *args, **kwargs)
        finally:
            if vars(self).get(_STEP) is step:
                delattr(self, _STEP)

    stand_in_for(original, loop)
    return loop


def _step(trainer: Any, *args: Any, **kwargs: Any) -> Any:
    loss = getattr(type(trainer), _STEP)(trainer, *args, **kwargs)
    is_plain = type(loss) is torch.Tensor and not loss.requires_grad and loss.device.type in _DEVICES
    if not (_is_in_force and is_plain and trainer.args.logging_nan_inf_filter):
        return loss
    return _Unread.of(loss, trainer)


class _Unread(torch.Tensor):
    """A step's loss, of which nobody learns what it is."""

    _loss: torch.Tensor
    _trainer: Any

    @classmethod
    def of(cls, loss: torch.Tensor, trainer: Any) -> _Unread:
        self = torch.Tensor._make_subclass(cls, loss)
        self._loss, self._trainer = loss, trainer
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _TESTS:
            return False
        if function in _SUMS and type(args[1]) is cls:
            return function(args[0], args[1]._added_to(args[0]))
        return function(*[each._loss if type(each) is cls else each for each in args], **(kwargs or {}))

    def _added_to(self, total: torch.Tensor) -> torch.Tensor:
        """The loss, or the mean of those before it, as the Trainer has it."""
        trainer = self._trainer
        steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
        return torch.where(torch.isfinite(self._loss), self._loss, total / steps)


@functools.cache
def _only_adds(loop: Callable[..., Any]) -> bool:
    """Whether the loop asks of a step's loss that it be no NaN and no infinity, and on which device it is, and adds it
    up: no more than what `_Unread` knows."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(loop)))
    except (OSError, TypeError, SyntaxError):
        return False
    return set(_uses(tree)) == {"made", "isnan", "isinf", "device", "add"}


def _uses(tree: ast.AST) -> Iterator[str | None]:
    """What is done with a step's loss, each time; None: something else."""
    around = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for name in ast.walk(tree):
        if isinstance(name, ast.Name) and name.id == _NAME:
            node = around[name]
            yield _use(name, node, around[node])


def _use(name: ast.Name, node: ast.AST, beyond: ast.AST) -> str | None:
    match node:
        case ast.Assign(targets=[made], value=ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=attr))):
            return "made" if made is name and attr == _STEP else None
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="isnan" | "isinf" as test), args=[_]):
            return test if isinstance(beyond, ast.BoolOp) else None
        case ast.Attribute(attr="device"):
            return "device"
        case ast.AugAssign(op=ast.Add(), value=added) | ast.BinOp(op=ast.Add(), right=added):
            return "add" if added is name else None
    return None
