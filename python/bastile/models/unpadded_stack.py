"""What takes an encoder's hidden states through its layers, as BERT's does, without a batch's padding.

Its backbone embeds tokens where they stand, and reads what comes of them in its own way, a pooler each row's first one.
So tokens are put side by side between these two, and each row sees itself alone: nothing in such layers knows where one
stands. What is padding the attention's mask remembers (models/sdpa.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bastile.graphs import collected
from bastile.graphs.lengths import asks_for_more
from bastile.models import padding, sdpa
from bastile.models.mask_flow import MASK
from bastile.models.rebind import as_keywords, parameter_names
from bastile.models.side_by_side import SideBySide
from bastile.models.token_layers import has_begun, known_of, never, put_back, side_by_side
from bastile.ops._common import in_transform
from bastile.report import Tally

#: What else such a forward may be given.
_TELLING = (bool, int, float, str, type(None))


def stack_forward(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    names = parameter_names(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(args) > len(names) or not padding.may_be_left_out(self.training):
            return original(self, *args, **kwargs)
        given = as_keywords(names, args, kwargs)
        hidden: Any = given.get(names[0])
        batch = _batch(self, hidden, names[0], given)
        if not isinstance(batch, SideBySide):
            if batch is not None:
                tally.step_aside(batch, is_usual=True)
            return original(self, *args, **kwargs)
        with sdpa.packed(batch.sequences, batch.rows * batch.length, batch.longest) as packed:
            mask = sdpa.mask_of(packed.segments(0, causal=False), batch.to, hidden.device)
            result = original(self, **{**given, names[0]: batch.of(hidden), MASK: mask})
        if not put_back(result, batch):
            never.add(self)
            return original(self, *args, **kwargs)
        tally.count()
        return result

    return forward


def _is_of_the_batch(value: Any) -> bool:
    """Whether an argument has nothing of single tokens, as how many labels a step has, which a Trainer counts."""
    return not value.dim() if isinstance(value, torch.Tensor) else isinstance(value, _TELLING)


def _batch(stack: nn.Module, hidden: Any, name: str, given: dict[str, Any]) -> SideBySide | str | None:
    """A batch without its padding; None where it keeps what it has, and why where a user might expect otherwise."""
    mask = given.get(MASK)
    if mask is None or not sdpa.is_ours(mask) or not isinstance(hidden, torch.Tensor) or stack in never:
        return None
    host = sdpa.padding_of(mask)
    if host is None or host.shape != hidden.shape[:2] or hidden.dim() != 3 or in_transform(hidden):
        return None
    if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if not all(_is_of_the_batch(value) for key, value in given.items() if key not in (name, MASK)):
        return "it is given more than hidden states and a mask"
    known = known_of(stack, causal=False, is_backbone=False)
    if not known.serves or known.mixers:
        return "its layers are not known to see more than one token in their attention alone"
    if asks_for_more(given, known.config) or collected.collector():
        return "more is asked of it than its last hidden states"
    if known.has_hooks():
        return "hooks on its modules"
    if not sdpa.is_known_to_take_ours(known.config) or not has_begun(stack):
        return None
    return side_by_side(stack, host, hidden.device, tells=False, causal=False)
