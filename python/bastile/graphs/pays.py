"""Whether the device waits for the host in a kind of step, so that graphs pay."""

from __future__ import annotations

import math
import time

import torch

#: The forward pass through the layers takes the device as long as the host where the device waits for the host; where
#: it has more to do than that, it falls behind. Up to here the host is what counts.
_RATIO = 1.15
#: Of more tokens than others that have graphs: where it is not measured yet, since a step without graphs, of which
#: three are needed to know, has its activations beside the graphs' memory, and replays take no longer.
_RATIO_BESIDE_GRAPHS = 2.3

#: In such a part of the layers' backward passes the device has done with the one before when the host has launched it,
#: if it waits for the host there.
_WAITS = 0.5

#: Steps that are measured; the last one counts, for what is lazily made in the one before is none of it.
_STEPS = 2


class Pays:
    """Measures forward passes, and backward passes where they are shown, without waiting for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: tuple[torch.cuda.Event, ...] = ()
        self._left = _STEPS
        self._begin = self._seconds = 0.0
        self._is_behind = False
        self._backward = _Backward()

    def begin(self) -> None:
        self._events = ()
        self._backward = _Backward()
        if self._device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self._begin = time.perf_counter()

    def end(self) -> None:
        self._seconds = time.perf_counter() - self._begin
        self._left -= 1
        if self._events:
            self._events[1].record()
            # The host may have waited for room in the queue of launches, and its time be the device's.
            self._is_behind = not self._events[0].query()

    def show(self, output: torch.Tensor) -> None:
        """A layer's, by which its backward pass is seen to begin: where the host does more in that than in the forward
        pass, and trainers read the loss in between, the device may wait there alone."""
        if self._events and output.requires_grad:
            output.register_hook(self._backward.begins)

    def wants_more(self) -> bool:
        return self._left > 0

    def ratio(self) -> float | None:
        """The device's time over the host's; infinite where the device began when the host had ended. None: not known
        yet. No more than 1 where the device waits in the backward pass."""
        if not self._events:
            return 0.0
        forward = self._forward_ratio()
        return min(1.0, forward or 1.0) if self._backward.waits() else forward

    def _forward_ratio(self) -> float | None:
        if self._is_behind:
            return math.inf
        if not self._events[1].query():
            return None
        return self._events[0].elapsed_time(self._events[1]) / 1e3 / self._seconds


class _Backward:
    """Of one step."""

    def __init__(self) -> None:
        self._before: torch.cuda.Event | None = None  # as the backward pass of the layer before began
        self._seen = self._waited = 0

    def begins(self, _: torch.Tensor) -> None:
        """A layer's."""
        if self._before is not None:
            self._seen += 1
            self._waited += self._before.query()
        self._before = torch.cuda.Event()
        self._before.record()

    def waits(self) -> bool:
        return self._waited > _WAITS * self._seen


def pays(ratio: float, beside_graphs: bool = False) -> bool:
    """beside_graphs: the ratio is what others' say, and these have graphs."""
    return ratio < (_RATIO_BESIDE_GRAPHS if beside_graphs else _RATIO)
