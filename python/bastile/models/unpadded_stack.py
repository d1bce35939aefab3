"""What takes an encoder's hidden states through its layers, as BERT's does, without a batch's padding.

Its backbone embeds tokens where they stand, and reads what comes of them in its own way, a pooler each row's first one.
So tokens are put side by side between these two, and each row sees itself alone: nothing in such layers knows where one
stands. What is padding the attention's mask remembers (models/sdpa.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from bastile.graphs import collected
from bastile.graphs.lengths import asks_for_more
from bastile.models import sdpa
from bastile.models.mask_flow import MASK
from bastile.models.rebind import parameter_names
from bastile.models.side_by_side import SideBySide
from bastile.models.token_layers import has_begun, known_of, never, side_by_side, without_padding
from bastile.ops._common import in_transform
from bastile.report import Tally

#: What else such a forward may be given.
_TELLING = (bool, int, float, str, type(None))


def stack_forward(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    name = parameter_names(original)[0]

    def arguments(given: dict[str, Any], batch: SideBySide, packed: sdpa.Packed) -> dict[str, Any]:
        hidden, packed.are_made = given[name], True
        mask = sdpa.mask_of(packed.segments(0, causal=False), batch.to, hidden.device)
        return {**given, name: batch.of(hidden), MASK: mask}

    return without_padding(tally, original, partial(_batch, name), arguments)


def _is_of_the_batch(value: Any) -> bool:
    """Whether an argument has nothing of single tokens, as how many labels a step has, which a Trainer counts."""
    return not value.dim() if isinstance(value, torch.Tensor) else isinstance(value, _TELLING)


def _batch(name: str, stack: nn.Module, given: dict[str, Any]) -> SideBySide | str | None:
    """Of hidden states by this name."""
    hidden, mask = given.get(name), given.get(MASK)
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
