"""Room for a chunk of logits in PyTorch's allocator.

What an operator takes and gives back in each call is the largest block there is. Batches of all lengths make it of many
sizes, and each that is larger than those before leaves the block of the last one behind: too small for what comes, and
too large for what else is wanted, so that a run has several of them for good. And what lives on, as a workspace of
cuBLAS's, is put into the first such block when it has just become free, which is then too small for a second call.
So where a larger one than ever is about to be made, what is free goes back to the driver first, and once more behind
the first call. Sizes come in steps (bst__linear_cross_entropy_memory_rows): in a run that happens a few times."""

from __future__ import annotations

import torch

from bastile.ops._common import has_values

#: Below that a block is worth no wait for the driver.
_LEAST_BYTES = 64 << 20
_STEP = 512  # rows

_most: dict[torch.device, int] = {}  # bytes


def make_room(hidden: torch.Tensor, row_bytes: int, most_rows: int) -> bool:
    """Before a call on hidden [T, H] that makes chunks of at most so many rows of logits. Whether it is the first one,
    behind which `give_back` is to be called."""
    if not has_values(hidden) or torch.cuda.is_current_stream_capturing():
        return False
    wanted = min(-(-hidden.shape[0] // _STEP) * _STEP, most_rows) * row_bytes
    before = _most.get(hidden.device, 0)
    if wanted <= max(before, _LEAST_BYTES):
        return False
    _most[hidden.device] = wanted
    if before:
        give_back()
    return not before


def give_back() -> None:
    """What is free in PyTorch's allocator goes back to the driver. Nothing, where no GPU has been used."""
    torch.cuda.empty_cache()
