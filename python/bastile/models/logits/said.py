"""What became of logits: how often a loss ran without them, how often they were made, and why."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Literal

from torch.compiler import is_compiling

from bastile.report import Tally

__all__ = ["counts", "note"]

Event = Literal["ran", "made", "stepped aside"]

_logger = logging.getLogger("bastile.logits")

#: (event, what, why) -> how often. `what` is the model's class.
counts: Counter[tuple[Event, str, str]] = Counter()


def note(event: Event, what: str, why: str = "") -> None:
    """Counts an event, and says it the first time: what keeps a loss from running fused as a warning, a reader of
    logits at debug level."""
    if is_compiling():  # and traces this once
        return
    key = event, what, why
    counts[key] += 1
    tally = Tally.of("fused_linear_cross_entropy", what)
    if event == "ran":
        tally.count()
    elif event == "stepped aside":
        tally.step_aside(why)
    if event == "made" and counts[key] == 1:
        _logger.debug("all logits of %s are made: %s", what, why)
