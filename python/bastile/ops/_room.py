"""Room for a chunk of logits in PyTorch's allocator.

What an operator takes and gives back in each call is the largest block there is. Batches of all lengths make it of many
sizes, and each that is larger than those before leaves the block of the last one behind: too small for what comes, and
too large for what else is wanted, so that a run has several of them for good. So it lies where memory can grow.

Where that cannot be: what lives on, as a workspace of cuBLAS's, is put into the first such block when it has just
become free, which is then too small for a second call. So before a larger one than ever is made, what is free goes back
to the driver, and once more behind the first call. Sizes come in steps (bst__linear_cross_entropy_memory_rows): in a
run that happens a few times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bastile.ops._common import has_values
from bastile.ops._growing import can_grow, growing

#: Below that a block is worth no wait for the driver.
_LEAST_BYTES = 64 << 20
_STEP = 512  # rows

_most: dict[torch.device, int] = {}  # bytes


@contextmanager
def room(hidden: torch.Tensor, row_bytes: int, most_rows: int, is_kept: bool = False) -> Iterator[None]:
    """Around a call on hidden [T, H] that makes chunks of at most so many rows of logits. is_kept: till the backward
    pass, and not given back behind the call."""
    is_real = has_values(hidden) and not torch.cuda.is_current_stream_capturing()
    wanted = min(-(-hidden.shape[0] // _STEP) * _STEP, most_rows) * row_bytes if is_real else 0
    if wanted <= _LEAST_BYTES:
        yield
    elif can_grow(hidden.device):
        with growing():
            yield
    elif is_kept:
        yield
    else:
        before = _most.get(hidden.device, 0)
        _most[hidden.device] = max(before, wanted)
        if 0 < before < wanted:
            give_back()
        yield
        if not before:
            give_back()


def give_back() -> None:
    """What is free in PyTorch's allocator goes back to the driver. Nothing, where no GPU has been used."""
    torch.cuda.empty_cache()
