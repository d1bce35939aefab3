"""A forward pass through captured layers, and the autograd function that replays one run of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from bastile.graphs.captured import Captured
from bastile.graphs.runs import Run, copies
from bastile.ops._common import Function
from bastile.ops._random import drawing_again, generator_of, state_of

_ONCE = (
    "bastile: trying to backward through captured layers a second time, or after another step has begun: what "
    "their graphs keep for the backward pass is there once. bastile.apply(cuda_graphs=False) runs them without graphs"
)


class Passage:
    """One forward pass through captured layers, and the backward pass that belongs to it."""

    def __init__(
        self,
        captured: Captured,
        gradients: Callable[[Run], Iterable[torch.Tensor | None]],
        give_up: Callable[[str], None],
    ) -> None:
        """gradients: how those of parameters are handed out. give_up: called with the reason where such steps turn out
        not to be what was captured."""
        self.captured, self.gradients, self.give_up = captured, gradients, give_up
        self.is_over = False  # a later one has the memory
        self.when_finished: Callable[[], None] | None = None
        self._reached = len(captured.runs)

    @property
    def is_finished(self) -> bool:
        return self._reached <= self.captured.lowest

    def reach(self, run: Run) -> None:
        """The backward pass is at this run."""
        if self.is_over or run.index >= self._reached:
            raise RuntimeError(_ONCE)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "bastile: the gradients of captured layers cannot be differentiated again (create_graph=True); "
                "bastile.apply(cuda_graphs=False) runs them without graphs"
            )
        if self._is_kept(run):
            raise RuntimeError(
                "bastile: hidden states between captured layers, or their gradients, have been kept, and the "
                "backward pass is to write there; bastile.apply(cuda_graphs=False) runs the layers without graphs"
            )
        if self._reached == len(self.captured.runs):
            reason = self.captured.against_backward()
            if reason is not None:
                self.give_up(reason)
        self._reached = run.index
        if self.when_finished is not None and self.is_finished:
            self.when_finished()

    def _is_kept(self, run: Run) -> bool:
        """Whether someone holds what this run's backward pass may be the first to write over: its output, which the
        next run has read for the last time, and the gradient that the next run has read."""
        behind = self.captured.runs[run.index + 1 : run.index + 3]
        if behind and run.output.is_held():
            return True
        return len(behind) == 2 and behind[1].hidden_gradient is not None and behind[1].hidden_gradient.is_held()


class Replay(Function):
    """A run, of its hidden states, what else it is given and has gradients, and the parameters that want some. Returns
    the hidden states, and copies of what was collected of its routers."""

    @staticmethod
    def forward(
        ctx: Any, passage: Passage, run: Run, hidden: torch.Tensor, *others_and_parameters: torch.Tensor
    ) -> Any:
        if hidden.data_ptr() != run.hidden_pointer:
            run.hidden.copy_(hidden)
        ctx.random = state_of(generator_of(hidden.device)) if run.draws_again else None
        run.forward.replay()
        ctx.passage, ctx.run = passage, run
        output = run.output.tensor.clone() if run.leaves else run.output.lend()
        of_routers = copies(run.of_routers)
        ctx.mark_non_differentiable(
            *[each for each, into in zip(of_routers, run.upstreams, strict=True) if into is None]
        )
        return output, *of_routers

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *of_routers: torch.Tensor) -> Any:
        passage, run = ctx.passage, ctx.run
        if passage is None:
            raise RuntimeError(_ONCE)
        passage.reach(run)
        if gradient.data_ptr() != run.upstream_pointer or gradient.stride() != run.upstream.stride():
            run.upstream.copy_(gradient)
        del gradient
        pairs = [(into, found) for into, found in zip(run.upstreams, of_routers, strict=True) if into is not None]
        if pairs:  # zeros of what the loss is not of
            torch._foreach_copy_([into for into, _ in pairs], [found for _, found in pairs])
        with drawing_again(run.upstream.device, ctx.random):
            run.backward.replay()
        hidden = None if run.hidden_gradient is None else run.hidden_gradient.lend()
        if hidden is not None and not run.call.is_chained:
            # It leaves the layers; adapters' input keeps it as its .grad until the loss is gone.
            hidden = hidden.clone()
        others = [None if gradient is None else gradient.clone() for gradient in run.others_gradients]
        ctx.passage = ctx.run = None  # many a loop keeps its loss, which holds this, and would hold the graphs
        return None, None, hidden, *others, *passage.gradients(run)
