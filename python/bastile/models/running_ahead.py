"""Whether a text that is being generated ends, asked a token later.

Transformers' loop waits for the device after each token, to see whether every sequence has ended; and while the host
prepares the next token the device has nothing to do. Here it goes on, and reads behind the next token what was asked
before it, as Transformers itself does on Apple's GPUs (DeferredStopCheck, which leaves the generator as it is). Where
all had ended then, that token is taken back, and the random numbers that it drew: what is returned, and drawn next, is
what would have been."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from bastile.ops._random import generator_of, set_state, state_of


class Ahead:
    """The questions about one text.

    Args:
        device: the model's.
        longest: tokens of a sequence that ends for its length.
    """

    def __init__(self, device: torch.device, longest: int) -> None:
        self.longest, self.ended = longest, False
        self.generator = generator_of(device)
        self.states: deque[Any] = deque(maxlen=2)  # of the generator, behind the last tokens
        self.answers: deque[tuple[torch.Tensor, Any]] = deque(maxlen=2)  # with what says that they are there
        self.device = device

    def have_ended(self, unfinished: torch.Tensor, length: int) -> bool:
        self.states.append(state_of(self.generator))
        on_cuda = self.device.type == "cuda"
        answer = torch.empty((), dtype=torch.bool, pin_memory=on_cuda)
        answer.copy_(unfinished.max() == 0, non_blocking=True)
        self.answers.append((answer, torch.cuda.current_stream(self.device).record_event() if on_cuda else None))
        if len(self.answers) == 2:
            before, is_there = self.answers[0]
            if is_there is not None:
                is_there.synchronize()
            self.ended = bool(before)
        return self.ended or length >= self.longest

    def tokens_to_undo(self) -> int:
        if self.ended:
            set_state(self.generator, self.states[0])
        return int(self.ended)


_ahead: ContextVar[Ahead | None] = ContextVar("bastile_ahead", default=None)


def run_ahead(device: torch.device, longest: int, *called: Iterable[Any]) -> AbstractContextManager[None]:
    """Within, a text is generated so. called: what the loop calls for each token; where that is not Transformers' own,
    it may count its calls: then not. Nor is a text for a streamer, which is given each token as it comes, or one whose
    cache is returned."""
    others = [one for several in called for one in several if not type(one).__module__.startswith("transformers.")]
    return _with(None if others else Ahead(device, longest))


@contextmanager
def _with(ahead: Ahead | None) -> Iterator[None]:
    token = _ahead.set(ahead)
    try:
        yield
    finally:
        _ahead.reset(token)


def not_ahead() -> AbstractContextManager[None]:
    """Within, a text is generated as ever, though it be in the midst of one that is not."""
    return _with(None)


def check(original: Any) -> Any:
    """In the place of StopCheck.__call__."""

    @functools.wraps(original)
    def call(self: Any, unfinished_sequences: torch.Tensor, tokens: torch.Tensor, length: int) -> Any:
        ahead = _ahead.get()
        if ahead is None:
            return original(self, unfinished_sequences, tokens, length)
        return ahead.have_ended(unfinished_sequences, length)

    return call


def finish(original: Any) -> Any:
    """In the place of StopCheck.finish, which says how many tokens the loop takes back."""

    @functools.wraps(original)
    def done(self: Any) -> Any:
        ahead = _ahead.get()
        return original(self) if ahead is None else ahead.tokens_to_undo()

    return done
