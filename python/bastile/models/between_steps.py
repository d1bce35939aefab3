"""What training loops run beside the passes, in every step, and which classes get it done in less time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from bastile.models import parameter_count, running_loss, waits, walks

_PIECES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "peft.peft_model": ("PeftModel", (walks,)),
    "torch.nn.parallel.distributed": ("DistributedDataParallel", (walks,)),
    "transformers.modeling_utils": ("PreTrainedModel", (parameter_count, walks)),
    "transformers.trainer": ("Trainer", (running_loss, waits)),
}
#: Which have such a class.
MODULES = frozenset(_PIECES)


def put_into(module: str) -> None:
    """Into the class of a module of these, if it has been imported."""
    for cls, piece in _places(module):
        piece.put_into(cls)


def take_out() -> None:
    for module in MODULES:
        for cls, piece in _places(module):
            piece.take_out_of(cls)


def _places(module: str) -> Iterator[tuple[type, Any]]:
    name, pieces = _PIECES[module]
    cls = getattr(sys.modules.get(module), name, None)  # none yet, while its module is being imported
    if cls is not None:
        for piece in pieces:
            yield cls, piece
