"""Whether anybody reads what a causal model makes of the padding behind its sequences.

Nothing that is read depends on it: no token sees what comes behind it. So where the labels say that a loss leaves those
rows out, no mask need hide them. Labels are asked on the host, where it knows them; else, of a pass whose result can be
made again, it is taken for granted, counted on the device meanwhile, and looked at behind the pass."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from bastile.guards import stock_of
from bastile.host_copies import fetched, on_host
from bastile.ops._valid_rows import ValidCount

IGNORED = -100
_T = TypeVar("_T")


class _Here(threading.local):
    labels: torch.Tensor | None = None
    is_assumed = False
    is_alone = False  # nobody gets to see other rows than those that are read
    are_next = False  # labels are of the tokens that come next: the row before each may be read in its place


_here = _Here()
#: Models of which it was taken for granted once, and was not so.
_are_read: weakref.WeakSet[Any] = weakref.WeakSet()


@contextmanager
def read_by(labels: Any, is_alone: bool = False, are_next: bool = False) -> Iterator[None]:
    """Within, in this thread, a model makes hidden states of which those rows are read whose labels are not IGNORED, or
    with are_next the row before each of these; and of a router's logits none of padding's. None: nothing is known.
    is_alone: nobody gets to see the others."""
    before = _here.labels, _here.is_alone, _here.are_next
    is_known = isinstance(labels, torch.Tensor) and labels.dim() == 2 and not labels.is_floating_point()
    _here.labels, _here.is_alone, _here.are_next = labels if is_known else None, is_alone and is_known, are_next
    try:
        yield
    finally:
        _here.labels, _here.is_alone, _here.are_next = before


def may_be_left_out(is_training: bool) -> bool:
    """Whether anything is known of which rows are read, and nobody will look at the others: logits of an evaluation are
    handed to whoever measures."""
    return _here.is_assumed or (_here.labels is not None and (is_training or _here.is_alone))


def is_unread(mask: torch.Tensor, before: bool = False) -> bool:
    """mask: of the batch's tokens, on the host. before: padding before sequences is not to be read either, of which the
    last row is by the first token's label, where that is of the token that comes next. What stands behind the labels is
    cut off before anybody sees it."""
    if _here.is_assumed:
        return True
    labels = _here.labels
    host = None if labels is None else labels if labels.is_cpu else on_host(labels)
    if host is None or len(host) != len(mask) or host.shape[1] > mask.shape[1]:
        return False
    is_read, is_padding = host != IGNORED, mask[:, : host.shape[1]] == 0
    if bool((is_read & is_padding).any()):
        return False
    return not (before and _here.are_next) or not bool((is_read[:, 1:] & is_padding[:, :-1]).any())


def on_host_with_labels(mask: torch.Tensor) -> torch.Tensor:
    """A mask's bools on the host, which waits for them once a step, where Transformers would. Where it does, the device
    has nothing left to do but to copy the labels too."""
    waits = not mask.is_cpu and on_host(mask) is None
    host = fetched(mask)
    if waits and _here.labels is not None:
        fetched(_here.labels)
    return host.bool()


def is_of_loss(model: Any, given: dict[str, Any], name: str) -> bool:
    """Whether a model's labels are for Transformers' loss of this name, which leaves out those that are IGNORED."""
    loss = inspect.unwrap(stock_of(getattr(model, "loss_function", None)))
    return getattr(loss, "__name__", None) == name and given.get("ignore_index", IGNORED) == IGNORED


def _is_counted_later(target: torch.Tensor) -> bool:
    return target.is_cuda and not torch.cuda.is_current_stream_capturing()


def assumed(model: Any, mask: Any, target: torch.Tensor, run: Callable[[], _T]) -> _T:
    """What a pass makes of which rows are read whose targets, [B, S], are not IGNORED, as in `read_by`. It runs as if
    none were padding, and again where some are."""
    if not isinstance(mask, torch.Tensor) or mask.shape != target.shape or mask.device != target.device:
        return run()
    if not _is_counted_later(target) or model in _are_read:
        with read_by(target, is_alone=True):
            return run()
    wrong = ValidCount((target != IGNORED) & (mask == 0), ignore_index=0)
    _here.is_assumed = True
    try:
        result = run()
    finally:
        _here.is_assumed = False
    if not wrong.rows():
        return result
    _are_read.add(model)
    del result
    return run()
