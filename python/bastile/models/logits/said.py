"""What became of logits: how often a loss ran without them, how often they were made, and why."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Literal

__all__ = ["counts", "note"]

Event = Literal["ran", "made", "stepped aside"]

_logger = logging.getLogger("bastile.logits")

#: (event, what, why) -> how often. `what` is the model's class.
counts: Counter[tuple[Event, str, str]] = Counter()


def note(event: Event, what: str, why: str = "") -> None:
    """Counts an event, and says it the first time: what keeps a loss from running fused as a warning, a reader of
    logits at debug level."""
    key = event, what, why
    counts[key] += 1
    if counts[key] > 1 or event == "ran":
        return
    if event == "made":
        _logger.debug("bastile: all logits of %s are made: %s", what, why)
    else:
        _logger.warning("bastile: a loss of %s does not run fused, and its logits are made: %s", what, why)
