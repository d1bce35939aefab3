"""Whether anybody reads what a causal model makes of the padding behind its sequences.

Nothing that is read depends on it: no token sees what comes behind it. So where the labels say that a loss leaves those
rows out, no mask need hide them. Labels are asked on the host, where it knows them; else, of a pass whose result can be
made again, it is taken for granted, counted on the device meanwhile, and looked at behind the pass."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from bastile.host_copies import fetched, on_host
from bastile.ops._valid_rows import ValidCount

IGNORED = -100
_T = TypeVar("_T")


class _Here(threading.local):
    labels: torch.Tensor | None = None
    is_assumed = False


_here = _Here()
#: Models of which it was taken for granted once, and was not so.
_are_read: weakref.WeakSet[Any] = weakref.WeakSet()


@contextmanager
def read_by(labels: Any) -> Iterator[None]:
    """Within, in this thread, a model makes hidden states of which those rows are read whose labels are not IGNORED, or
    the row before each of these. None: nothing is known."""
    before = _here.labels
    is_known = isinstance(labels, torch.Tensor) and labels.dim() == 2 and not labels.is_floating_point()
    _here.labels = labels if is_known else None
    try:
        yield
    finally:
        _here.labels = before


def is_unread(mask: torch.Tensor) -> bool:
    """mask: of the batch's tokens, on the host. What stands behind the labels is cut off before anybody sees it."""
    if _here.is_assumed:
        return True
    labels = _here.labels
    host = None if labels is None else labels if labels.is_cpu else on_host(labels)
    if host is None or len(host) != len(mask) or host.shape[1] > mask.shape[1]:
        return False
    return not bool(((host != IGNORED) & (mask[:, : host.shape[1]] == 0)).any())


def wait_for_labels() -> None:
    """Where the host has waited for the device anyway: it has nothing left to do but to copy these."""
    if _here.labels is not None:
        fetched(_here.labels)


def _is_counted_later(target: torch.Tensor) -> bool:
    return target.is_cuda and not torch.cuda.is_current_stream_capturing()


def assumed(model: Any, mask: Any, target: torch.Tensor, run: Callable[[], _T]) -> _T:
    """What a pass makes of which rows are read whose targets, [B, S], are not IGNORED. It runs as if none were padding,
    and again where some are."""
    if not isinstance(mask, torch.Tensor) or mask.shape != target.shape or mask.device != target.device:
        return run()
    if not _is_counted_later(target) or model in _are_read:
        with read_by(target):
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
