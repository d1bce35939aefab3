"""Which rows of hidden states the heads upon encoders read: that of a sequence its first token's or a mean over its
tokens, those of tokens that have a label. A forward whose code shows it (models/row_flow.py) runs within what says so
(models/padding.py). What else goes through the layers is padding that nobody reads."""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bastile.guards import function_of, stock_of
from bastile.host_copies import on_host
from bastile.models.forms import Code
from bastile.models.head_code import ROW_BY_ROW, Sources, is_row_by_row
from bastile.models.mask_flow import MASK
from bastile.models.padding import IGNORED, is_of_loss, read_by
from bastile.models.rebind import as_keywords, parameter_names
from bastile.models.row_flow import CROSS_ENTROPY, Choice, Path, Reading, reading_of
from bastile.models.sites import ModelFile, Site
from bastile.report import Tally

_OPERATOR = "padding_free"
_TOKENS = ("input_ids", "inputs_embeds")
_LOSSES = ("ForMaskedLMLoss", "ForTokenClassification")
#: Modules with others in them that work on each row by itself, where those do.
_AROUND = ("torch.nn.modules.container.", "peft.", "bitsandbytes.", "torchao.")


def sites(file: ModelFile) -> Iterator[Site]:
    sources = Sources()
    for cls in file.own_classes():
        forward = stock_of(vars(cls)["forward"])
        names = parameter_names(forward) if inspect.isfunction(inspect.unwrap(forward)) else ()
        if MASK in names and not set(names).isdisjoint(_TOKENS) and file.read(cls, _calls_something):
            found = reading_of(cls, sources)
            if found is not None:
                yield file.forward_site(_OPERATOR, cls, functools.partial(reading_forward, found))


def _calls_something(code: Code) -> bool | None:
    return bool(code.attributes) or None


def reading_forward(found: Reading | Choice, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    names = parameter_names(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(args) > len(names):
            return original(self, *args, **kwargs)
        given = as_keywords(names, args, kwargs)
        reading = _chosen(found, self) if given.get(MASK) is not None else None
        labels = _labels(reading, self, given) if reading is not None and _has_parts(self, reading) else None
        with read_by(labels, is_alone=reading is not None and reading.labels is None):
            return original(self, *args, **kwargs)

    return forward


def _chosen(found: Reading | Choice | None, model: nn.Module) -> Reading | None:
    try:
        while isinstance(found, Choice):
            found = found.if_so if found.holds(functools.reduce(getattr, found.path, model)) else found.if_not
    except AttributeError:  # another module than the one whose code has been read
        return None
    return found


# ---- the rows -------------------------------------------------------------------------------------------------------


def _labels(reading: Reading, model: nn.Module, given: dict[str, Any]) -> torch.Tensor | None:
    """[B, S], IGNORED but where a row is read; None where that is not known."""
    if reading.labels is None:
        shape = _shape(given)
        return None if shape is None else rows_read(math.prod(shape[:-1]), shape[-1], reading.reads_first)
    labels = given.get(reading.labels)
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        return None
    if reading.by_loss_function and not any(is_of_loss(model, given, name) for name in _LOSSES):
        return None
    return _with_first(labels) if reading.reads_first else labels


def _shape(given: dict[str, Any]) -> tuple[int, ...] | None:
    """Of a batch's tokens; choices of an answer are sequences of their own."""
    ids, embeddings = (given.get(name) for name in _TOKENS)
    if isinstance(ids, torch.Tensor) and embeddings is None:
        return tuple(ids.shape)
    return tuple(embeddings.shape[:-1]) if isinstance(embeddings, torch.Tensor) and ids is None else None


@functools.lru_cache(64)
def rows_read(sequences: int, length: int, are_read: bool) -> torch.Tensor:
    """Labels of a batch's first rows, where these are read, and of no others."""
    labels = torch.full((sequences, length), IGNORED)
    labels[:, :1] = 0 if are_read else IGNORED
    return labels


def _with_first(labels: torch.Tensor) -> torch.Tensor:
    known = labels if labels.is_cpu else on_host(labels)
    labels = (labels if known is None else known).clone()
    labels[:, :1] = 0
    return labels


# ---- the parts ------------------------------------------------------------------------------------------------------

#: Where a part is held, by which name, and which it was.
_Link = tuple[dict[str, Any], str, Any]
#: Of models, the parts that have been looked at, by reading, and whether they are what it takes.
_seen: weakref.WeakKeyDictionary[nn.Module, dict[Reading, tuple[list[_Link], bool]]] = weakref.WeakKeyDictionary()


def _has_parts(model: nn.Module, reading: Reading) -> bool:
    """Whether a model's parts are those whose code has been read: anybody may put others there."""
    seen = _seen.setdefault(model, {})
    links, has = seen.get(reading, (None, False))
    if links is None or any(held.get(name) is not part for held, name, part in links):
        links = []
        has = all([_is_as_read(each, kind) for path, kind in reading.parts for each in _at(model, path, links)])
        seen[reading] = links, has
    return has


def _at(model: nn.Module, path: Path, links: list[_Link]) -> list[Any]:
    """What is at a path; with PEFT's modules_to_save, a module and the copies that are trained in its place."""
    found: list[Any] = [model]
    for name in path:
        owners = [each for each in found if isinstance(each, nn.Module)]
        links += [(each._modules, name, each._modules.get(name)) for each in owners]
        found = [inner for each in owners for inner in _copies(getattr(each, name, None))]
    links += [(vars(each), "forward", vars(each).get("forward")) for each in found if isinstance(each, nn.Module)]
    return found or [None]


def _copies(module: Any) -> list[Any]:
    inner = module._modules.get("modules_to_save") if isinstance(module, nn.Module) else None
    if inner is None or not type(module).__module__.startswith("peft."):
        return [module]
    return [module.original_module, *inner.children()]


def _is_as_read(part: Any, kind: Any) -> bool:
    if kind == CROSS_ENTROPY:
        return type(part) is nn.CrossEntropyLoss and part.ignore_index == IGNORED
    if not isinstance(part, nn.Module):  # a function
        return kind == ROW_BY_ROW and _is_activation(part)
    own = vars(part).get("forward")
    if (
        own is not None
        and not _is_of_accelerate(own)
        and stock_of(function_of(own)) is not stock_of(type(part).forward)
    ):
        return False  # something else runs it
    if kind == ROW_BY_ROW:
        return all(is_row_by_row(type(each)) or _is_around(each) for each in part.modules())
    return stock_of(type(part).forward) is kind


def _is_of_accelerate(forward: Any) -> bool:
    """Whether this moves what a module is given to another device and runs its own."""
    return isinstance(forward, functools.partial) and forward.func.__module__.startswith("accelerate.")


def _is_activation(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(("torch.nn.functional", "torch._C._nn"))


def _is_around(module: nn.Module) -> bool:
    return f"{type(module).__module__}.".startswith(_AROUND)
