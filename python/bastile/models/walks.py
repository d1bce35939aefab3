"""Walks over a model's modules that a training step makes, without what nobody asks for.

A Trainer calls model.train(), model.parameters() and model.zero_grad() in each step. PyTorch makes the name of every
module and parameter for the latter two, and sets every module's mode for the first, though it is what it was: of
Qwen3-0.6B some milliseconds for which a GPU may wait. What is here yields the same parameters in the same order, and
leaves a model alone whose modules are all in the mode that is wanted."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from bastile.models.forms import code_of, forget_sources
from bastile.models.parameter_count import names_as_torch

#: Wraps a model, and may be imported later than models are.
ADAPTED = "peft.peft_model"
#: Of methods `train` that do nothing to a model that is in that mode: of PreTrainedModel and DistributedDataParallel.
_FINGERPRINTS = frozenset({"c5ad9c3f6e9c", "90c453361e7f"})
_named_modules, _train, _children = nn.Module.named_modules, nn.Module.train, nn.Module.children

_originals: dict[type, Any] = {}  # of the classes that have our `train`; None: it was inherited
_harmless: set[Any] = {_train}


def put_into(base: type) -> None:
    """Into PreTrainedModel, and what may be around one."""
    for cls in (base, DistributedDataParallel):
        _put(cls)
    put_into_adapted()


def put_into_adapted() -> None:
    cls = getattr(sys.modules.get(ADAPTED), "PeftModel", None)
    if cls is not None:
        _put(cls)


def take_out() -> None:
    """What others have put there since stays."""
    for cls, original in _originals.items():
        if vars(cls).get("parameters") is parameters:
            del cls.parameters  # type: ignore[attr-defined]
        ours = vars(cls).get("train")
        if ours in _harmless and ours is not original:
            if original is None:
                del cls.train  # type: ignore[attr-defined]
            else:
                cls.train = original  # type: ignore[attr-defined]
    _originals.clear()
    _harmless.clear()
    _harmless.add(_train)


def _put(cls: Any) -> None:
    if cls in _originals:
        return
    own = vars(cls)
    _originals[cls] = original = own.get("train")
    if "parameters" not in own:
        cls.parameters = parameters
    if (cls.train is _train) if original is None else _is_known(original):
        cls.train = _unless_in_mode(cls, original)
        _harmless.update({original, cls.train} - {None})


@functools.cache
def _is_known(function: Any) -> bool:
    code = code_of(function)
    forget_sources()  # which are long
    return code is not None and code.fingerprint in _FINGERPRINTS


def _modules(root: nn.Module) -> Iterator[nn.Module]:
    """As `named_modules` yields them."""
    seen: set[nn.Module] = set()
    waiting: list[Any] = [root]
    while waiting:
        module = waiting.pop()
        if module is None or module in seen:
            continue
        if type(module).named_modules is not _named_modules:
            for _, each in module.named_modules(seen, "", True):
                yield each
            continue
        seen.add(module)
        yield module
        if module._modules:
            waiting.extend(reversed(module._modules.values()))


def parameters(self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    """As torch.nn.Module.parameters."""
    if not recurse or is_compiling() or not names_as_torch(self):
        yield from nn.Module.parameters(self, recurse)
        return
    seen = set()
    for module in _modules(self):
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _unless_in_mode(cls: Any, original: Any) -> Callable[..., Any]:
    @functools.wraps(original or _train)
    def train(self: nn.Module, mode: bool = True) -> Any:
        if isinstance(mode, bool) and not is_compiling() and _is_in_mode(self, mode):
            return self
        return (original or super(cls, self).train.__func__)(self, mode)

    return train


def _is_in_mode(root: nn.Module, mode: bool) -> bool:
    """Whether `train` would change nothing."""
    modules = list(_modules(root))
    scopes = [module.__dict__ for module in modules]
    if any([scope.get("training") is not mode or "train" in scope for scope in scopes]):
        return False
    classes: set[Any] = set(map(type, modules))
    return all(cls.train in _harmless and cls.children is _children for cls in classes)
