"""What training loops run beside the passes, in every step, and which classes and modules get it done in less time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from bastile.models import (
    adapter_switch,
    checkpointing_switch,
    compiled_parts,
    masks,
    parameter_count,
    running_loss,
    scored,
    sdpa,
    waits,
    walks,
    zero3,
)

#: By module: the class in it, or None for the module itself, and what is put into that.
_PIECES: dict[str, tuple[str | None, tuple[Any, ...]]] = {
    "accelerate.utils.other": (None, (compiled_parts,)),
    "deepspeed.runtime.zero.parameter_offload": ("DeepSpeedZeRoOffload", (zero3,)),
    "peft.peft_model": ("PeftModel", (adapter_switch, walks)),
    "torch.nn.parallel.distributed": ("DistributedDataParallel", (walks,)),
    "transformers.integrations.sdpa_attention": (None, (sdpa,)),
    "transformers.masking_utils": (None, (masks,)),
    "transformers.modeling_layers": (None, (scored,)),
    "transformers.modeling_utils": ("PreTrainedModel", (checkpointing_switch, parameter_count, walks)),
    "transformers.trainer": ("Trainer", (running_loss, waits)),
}
MODULES = frozenset(_PIECES)


def put_into(module: str) -> None:
    """Into the place in a module of these, if it has been imported."""
    for place, piece in _places(module):
        piece.put_into(place)


def take_out() -> None:
    for module in MODULES:
        for place, piece in _places(module):
            piece.take_out_of(place)


def _places(module: str) -> Iterator[tuple[Any, Any]]:
    name, pieces = _PIECES[module]
    there = sys.modules.get(module)
    place = there if name is None else getattr(there, name, None)  # none yet, while its module is being imported
    if place is not None:
        for piece in pieces:
            yield place, piece
