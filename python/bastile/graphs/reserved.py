"""How much PyTorch's allocator has beside graphs: no more than steps without them have needed."""

from __future__ import annotations

from bastile.graphs.recorder import Recorder

#: So many steps with graphs pay for one time that memory goes back to the driver, which can cost one of a small model
#: a tenth of its time; and so many times are paid in advance, for it is in the first steps that batches are longer than
#: any before.
_STEPS = 64
_IN_ADVANCE = 8


class Reserved:
    """Without graphs, activations leave free what the loss' logits then take. With graphs those lie in a pool of their
    own, and the logits of a batch that is longer than those before it fit nothing that is free: each such batch would
    add its own to what the allocator has. So when that becomes more than eager steps have needed, what is free goes
    back to the driver."""

    def __init__(self) -> None:
        self._allowed: int | None = None  # bytes
        self._paid = _IN_ADVANCE * _STEPS
        self._has_tidied = False  # before the last step

    def before_graphs(self, recorder: Recorder) -> None:
        """Graphs are about to be captured."""
        if self._allowed is None:
            self._allowed = recorder.most_reserved()

    def begin(self, recorder: Recorder) -> None:
        """A step with graphs begins."""
        assert self._allowed is not None
        self._paid = min(self._paid + 1, _IN_ADVANCE * _STEPS)
        reserved = recorder.reserved()
        if self._has_tidied:  # the step before found nothing that others had left, and needed this
            self._allowed = max(self._allowed, reserved)
            self._has_tidied = False
        elif reserved > self._allowed and self._paid >= _STEPS:
            recorder.tidy()
            self._has_tidied = True
            self._paid -= _STEPS
