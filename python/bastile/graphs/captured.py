"""A stack of layers, captured for arguments of one kind: runs of layers, and the autograd function that replays one.

A run is one graph forward and one backward. Its output lies where the next one's graph reads its input, and its
gradient of its input where the graph of the one before reads that of its output: nothing is copied between them.
Gradients of parameters are lent, too: the next step writes there, and by then most training loops have let go of them.
Of those that have not they become copies, then and from then on.

Where layers are checkpointed gradients are always copies. What they take then is the memory that the loss had, which is
free by that time; in the pool of such a step, which keeps little else, it would be more memory for good. So are those
of a pass beside another one, for autograd adds them to the other's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bastile.graphs import collected, conditions
from bastile.graphs.arguments import CannotCapture, Place, Signature, differentiated, rebuilt, signature
from bastile.graphs.autocast import Autocast
from bastile.graphs.calls import bare
from bastile.graphs.recorder import Recorder, Replayed, uses_of_storage
from bastile.graphs.returned import hidden_of
from bastile.models.chunks import Chunks, lengths_of, open_up, opened, say
from bastile.ops._common import Function
from bastile.ops._random import generator_of, set_state, state_of

#: Layers in a run. More cost the host less, but what a run's graph writes is all there at once, and gradients are
#: ready for others, such as DDP's reduction, when the run is done.
MOST_LAYERS = 7
#: Likewise where they are checkpointed: the host has twice the time, and memory is what is wanted.
MOST_CHECKPOINTED = 3
#: And draw random numbers, a second time in the backward pass: a graph draws from where the generator is when it is
#: replayed, and the last of several layers, which comes first there, began somewhere else than the first.
MOST_DRAWN_AGAIN = 1


@dataclass(frozen=True)
class Call:
    """A layer's call in the step that was noted."""

    structure: Any  # of its arguments but the hidden states
    hidden: Signature
    hidden_requires_grad: bool
    is_chained: bool  # its hidden states are the very tensor that the layer before returned
    checkpoints: bool
    others: Any = None  # the structure of what it returned beside them
    against: str | None = None  # why it runs without a graph


@dataclass(frozen=True)
class Note:
    """A step that ran without graphs."""

    calls: list[Call]
    others: list[Signature]  # the tensors that layers were given beside the hidden states
    draws: bool  # random numbers
    settings: tuple[Any, ...]  # of the forward pass, those that a backward pass looks at
    backward: Autocast | None = None  # how it was set in the backward pass, once there was one
    ends: frozenset[int] = frozenset()  # layers whose output others than the next layer look at
    leaving: frozenset[int] = frozenset()  # layers whose output is the model's to keep
    read: dict[int, Chunks] = field(default_factory=dict)  # what the host was told by those of the others that it asked
    open: dict[int, int] = field(default_factory=dict)  # boundaries that are read on the device: see models.chunks
    differentiates: bool = True

    @property
    def checkpoints(self) -> bool:
        return any(call.checkpoints for call in self.calls)

    @property
    def returns_hidden(self) -> bool:
        """Whether each layer returns the hidden states alone."""
        return all(call.others is None and call.against is None for call in self.calls)

    def in_backward(self, device: str) -> Note | str:
        """With what can be seen in the backward pass, now; or why such a step cannot be captured."""
        if conditions.of_backward(self.checkpoints) != self.settings:
            return "settings that change between the forward and the backward pass"
        return replace(self, backward=Autocast(device))


class Lent:
    """A tensor of the pool that the model gets to see, step after step, each time as another tensor object."""

    __slots__ = ("_in_use", "pointer", "storage", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.pointer = tensor.data_ptr()
        self.storage = tensor.untyped_storage()._cdata
        self._in_use = 0

    def settle(self) -> None:
        """Nobody but us holds it now."""
        self._in_use = uses_of_storage(self.storage)

    def holders(self) -> int:
        """Tensor objects of others that have its memory."""
        return uses_of_storage(self.storage) - self._in_use

    def is_held(self) -> bool:
        return self.holders() > 0

    def lend(self) -> torch.Tensor:
        return self.tensor.detach()


class Gradients:
    """What the graphs have written into the pool for parameters."""

    def __init__(self, runs: Sequence[Run]) -> None:
        pairs = [pair for run in runs for pair in zip(run.parameters, run.gradients, strict=True)]
        self._of = [(parameter, lent) for parameter, lent in pairs if lent is not None]
        self._storages = [lent.storage for _, lent in self._of]
        for _, lent in self._of:
            lent.settle()
        self._in_use = sum(map(uses_of_storage, self._storages))

    def are_held(self) -> bool:
        return sum(map(uses_of_storage, self._storages)) > self._in_use

    def become_copies(self) -> bool:
        """Those that are a parameter's .grad, and nobody else's, get memory of their own. False, and nothing is
        changed, where someone else holds one."""
        held = [(parameter.grad, lent) for parameter, lent in self._of if lent.is_held()]
        for gradient, lent in held:
            is_there = gradient is not None and gradient.untyped_storage()._cdata == lent.storage
            if not is_there or lent.holders() > 1:
                return False
        gradients = [gradient for gradient, _ in held if gradient is not None]
        for gradient, copied in zip(gradients, copies(gradients), strict=True):
            gradient.data = copied
        return True

    def tensors(self) -> list[torch.Tensor]:
        return [lent.tensor for _, lent in self._of]


def copies(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch._foreach_mul(list(tensors), 1.0) if tensors else ()


class Layer:
    """One layer of a run."""

    def __init__(self, module: nn.Module, call: Call, differentiates: bool) -> None:
        self.module, self.call = module, call
        self.parameters = [p for p in dict.fromkeys(module.parameters()) if differentiates and p.requires_grad]
        # The same memory, but new to autograd, whose nodes for the parameters themselves belong to another stream.
        self.stand_ins: list[torch.Tensor] = [nn.Parameter(p.detach()) for p in self.parameters]


class Run:
    """Layers that are called one after the other with the same arguments."""

    hidden: torch.Tensor  # where the graph reads the hidden states
    hidden_pointer: int
    output: Lent
    forward: Replayed
    upstream: torch.Tensor  # where the graph reads the gradient of the output
    upstream_pointer: int
    hidden_gradient: Lent | None
    gradients: list[Lent | None]  # of the parameters, for the graph to write into
    others_gradients: list[torch.Tensor | None]  # of what else it is given and has gradients
    backward: Replayed

    def __init__(self, index: int, first: int, layers: list[Layer], note: Note) -> None:
        self.index, self.first, self.layers = index, first, layers
        self.call = layers[0].call
        self.differentiated = differentiated(self.call.structure) if note.differentiates else []  # places of others
        self.leaves = False  # its output is the model's to keep, or a layer's without a graph: these get a copy
        self.reads_copy = False  # so the run before has given it one
        self.draws_again = note.draws and self.call.checkpoints
        self.end = first + len(layers)
        self.parameters = [p for layer in layers for p in layer.parameters]
        self.hidden_gradient = None
        leads = bool(self.parameters or self.differentiated) or self.call.hidden_requires_grad
        self.wants_gradients = leads and note.differentiates

    def lent(self) -> Iterable[torch.Tensor | None]:
        """The gradients."""
        return [None if lent is None else lent.lend() for lent in self.gradients]

    def copied(self) -> Iterable[torch.Tensor | None]:
        made = iter(copies([lent.tensor for lent in self.gradients if lent is not None]))
        return [None if lent is None else next(made) for lent in self.gradients]

    def copied_to_stay(self) -> Iterable[torch.Tensor | None]:
        """Copies but where they are to be added to a .grad: all of a model's parameters have one, or none has."""
        return self.copied() if any(parameter.grad is None for parameter in self.parameters) else self.lent()


def runs_of(modules: Sequence[nn.Module], note: Note) -> list[Run]:
    runs: list[Run] = []
    layers: list[Layer] = []
    most_checkpointed = MOST_DRAWN_AGAIN if note.draws else MOST_CHECKPOINTED
    for index, (module, call) in enumerate(zip(modules, note.calls, strict=False)):
        before = layers[-1].call if layers else None
        if before is not None and (
            not call.is_chained
            or call.against is not None
            or call.structure is not before.structure
            or call.checkpoints is not before.checkpoints
            or index - 1 in note.ends | note.leaving
            or len(layers) == (most_checkpointed if call.checkpoints else MOST_LAYERS)
        ):
            runs.append(Run(len(runs), index - len(layers), layers, note))
            layers = []
        if call.against is None:
            is_behind = bool(index) and note.calls[index - 1].against is None
            layers.append(Layer(module, call if is_behind else replace(call, is_chained=False), note.differentiates))
    if layers:
        runs.append(Run(len(runs), len(note.calls) - len(layers), layers, note))
    for run in runs:
        runs_itself = run.end < len(note.calls) and note.calls[run.end].against is not None
        # Who collects what nobody differentiates may keep all of it.
        is_result = run.end == len(note.calls) and not note.differentiates
        run.leaves = runs_itself or is_result or run.end - 1 in note.leaving
        run.reads_copy = run.first - 1 in note.leaving
    return runs


class Captured:
    """The graphs of a stack."""

    def __init__(
        self,
        recorder: Recorder,
        modules: Sequence[nn.Module],
        note: Note,
        autocast: Autocast,
        is_new: bool = False,
        lends_gradients: bool = True,
        given: Sequence[torch.Tensor] = (),
    ) -> None:
        """is_new: no such step has run; the note is one of others. lends_gradients: those of parameters may lie in the
        pool until the next step, where they are not to be copied anyway. given: the first of such a step's tensors."""
        self.is_foreseen = is_new  # until a step has been called as the note says
        self.broken_off = 0  # steps that were to be replayed and became something else on the way
        self.runs = runs_of(modules, note)
        self.at = {run.first: run for run in self.runs}
        self.others = [Place(each) for each in note.others]
        for each, tensor in zip(self.others, given, strict=False):
            each.fill(tensor)
        for place, chunks in note.read.items():
            say(self.others[place].tensor, Chunks(chunks.lengths))
        for place, longest in note.open.items():
            _open(self.others[place].tensor, longest, note.calls[0].hidden[0])
        self._recorder, self._autocast, self._note = recorder, autocast, note
        self._own: list[torch.Tensor] = []  # memory beside the pool's
        self.lends_gradients = lends_gradients and not note.checkpoints
        self.lowest = next((run.index for run in self.runs if run.wants_gradients), len(self.runs))
        with recorder.recording(self._warm_up if is_new else None):
            self._record()
        self._lent = [lent for run in self.runs for lent in (run.output, run.hidden_gradient) if lent is not None]
        for lent in self._lent:
            lent.settle()
        self.gradients = Gradients(self.runs[self.lowest :])

    # ---- recording ----------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Runs each layer by itself, of zeros: what is to be chosen, compiled and loaded cannot be while it is
        captured."""
        device = self._note.calls[0].hidden[3]
        with _drawing_again(device, state_of(generator_of(device))):
            for layer in [layer for run in self.runs for layer in run.layers]:
                run, kept = Run(0, 0, [layer], self._note), [None]
                hidden = Place(layer.call.hidden).tensor
                (output,) = self._forward_of(run, hidden, kept)()
                if run.wants_gradients:
                    self._backward_of(run, hidden, torch.zeros_like(output), [None] * len(run.differentiated), kept)()

    def _record(self) -> None:
        kept: list[Any] = [None] * len(self.runs)
        #: Where each run reads, and behind the last one its output. What is in the pool must be held until it has been
        #: read last: it is another's memory then.
        places = self._record_forward(kept)
        upstream: torch.Tensor | None = None
        gradients: list[Any] = []  # held, for they are to be there when the backward pass has ended
        totals: dict[int, torch.Tensor] = {}  # by place: the gradients of what the runs behind are given, too
        for run in reversed(self.runs[self.lowest :]):
            is_read_next = run.index + 1 < len(self.runs) and self.runs[run.index + 1].call.is_chained
            if upstream is None or not is_read_next:
                upstream = torch.zeros_like(run.output.tensor)
                self._own.append(upstream)
            run.upstream, run.upstream_pointer = self._recorder.borrowed(upstream), upstream.data_ptr()
            before = [totals.pop(place, None) for place in run.differentiated]
            upstream = self._record_backward(run, gradients, totals, places[run.index], upstream, before, kept)
            places[run.index] = None

    def _record_forward(self, kept: list[Any]) -> list[Any]:
        places: list[Any] = []
        output: Any = None
        for run in self.runs:
            if run.call.is_chained:
                places.append(output)
            else:
                places.append(Place(run.call.hidden).tensor)
                self._own.append(places[-1])
            run.hidden, run.hidden_pointer = self._recorder.borrowed(places[-1]), places[-1].data_ptr()
            run.forward, (output,) = self._recorder.record(self._forward_of(run, places[-1], kept))
            run.output = Lent(self._recorder.borrowed(output))
        return [*places, output]

    def _record_backward(
        self, run: Run, made: list[Any], totals: dict[int, torch.Tensor], *rest: Any
    ) -> torch.Tensor | None:
        """The gradient of the hidden states; those of the parameters, if they are lent, are added to `made`, and those
        of what the run before is given too become its `totals`."""
        run.backward, (hidden, *gradients) = self._recorder.record(self._backward_of(run, *rest))
        others, gradients = gradients[: len(run.differentiated)], gradients[len(run.differentiated) :]
        run.hidden_gradient = None if hidden is None else Lent(self._recorder.borrowed(hidden))
        goes_on = hidden is not None and run.call.is_chained and run.index > self.lowest
        run.others_gradients = []
        for place, gradient in zip(run.differentiated, others, strict=True):
            if gradient is not None and goes_on and place in self.runs[run.index - 1].differentiated:
                totals[place], gradient = gradient, None
            run.others_gradients.append(None if gradient is None else self._recorder.borrowed(gradient))
        run.gradients = [None if g is None else Lent(self._recorder.borrowed(g)) for g in gradients]
        if self.lends_gradients:
            made += gradients
        return hidden

    def _forward_of(self, run: Run, hidden: torch.Tensor, kept: list[Any]) -> Callable[[], Sequence[Any]]:
        def forward() -> Sequence[Any]:
            read = output = hidden.detach().requires_grad_(run.call.hidden_requires_grad)
            others = [place.tensor for place in self.others]
            for place in run.differentiated:
                others[place] = others[place].detach().requires_grad_()
            called = self._checkpointed if run.call.checkpoints else self._called
            with self._autocast.as_noted(), torch.set_grad_enabled(self._note.differentiates):
                for layer in run.layers:
                    output = called(layer, output, others)
                # Made last, so that a backward pass takes their gradient first: what it adds to.
                sums = [(others[place], others[place].view_as(others[place])) for place in run.differentiated]
            if self._note.differentiates:
                kept[run.index] = read, sums, output
            return (output.detach(),)

        return forward

    def _backward_of(
        self,
        run: Run,
        hidden: torch.Tensor,
        upstream: torch.Tensor,
        before: Sequence[torch.Tensor | None],
        kept: list[Any],
    ) -> Callable[[], Sequence[Any]]:
        """before: of what else has gradients, the sums of those of the runs behind. Autograd would add up each use's
        gradient one after the other, and so do we, run by run."""

        def backward() -> Sequence[Any]:
            (read, sums, output), kept[run.index] = kept[run.index], None
            outputs, upstreams = [output], [upstream]
            for (_, seen), total in zip(sums, before, strict=True):
                if total is not None:
                    outputs.insert(0, seen)
                    upstreams.insert(0, total)
            with self._autocast.off() if self._note.backward is None else self._note.backward.as_noted():
                wanted = [read] * run.call.hidden_requires_grad + [other for other, _ in sums]
                wanted += [p for layer in run.layers for p in layer.stand_ins]
                found = torch.autograd.grad(outputs, wanted, upstreams, allow_unused=True)
            return _apart(upstream, *(() if run.call.hidden_requires_grad else (None,)), *found)

        return backward

    def _checkpointed(self, layer: Layer, hidden: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        """Keeps the layer's input alone. The backward pass runs the layer again, as far as it needs."""
        return checkpoint(
            self._called,
            layer,
            hidden,
            others,
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="none",
        )

    def _called(self, layer: Layer, hidden: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        args, kwargs = rebuilt(layer.call.structure, others)
        with bare(layer.module), _standing_in(layer), collected.nothing():
            output = hidden_of(layer.module(hidden, *args, **kwargs))
        leads = torch.is_grad_enabled() and (
            hidden.requires_grad or bool(layer.parameters) or any(other.requires_grad for other in others)
        )
        if not isinstance(output, torch.Tensor) or output.requires_grad is not leads:
            raise CannotCapture("a layer does not return one tensor that its parameters or hidden states lead to")
        return output

    # ---- replaying ----------------------------------------------------------------------------------------------

    def reads_the_same(self, place: int, tensor: torch.Tensor) -> bool:
        """Whether the host would be told by this tensor what it was told when the layers were captured."""
        if place in self._note.read:
            return lengths_of(tensor) == self._note.read[place].lengths
        return opened(tensor) == self._note.open.get(place)

    def runs_itself(self, index: int) -> bool:
        """Whether a layer has no graph."""
        return index < len(self._note.calls) and self._note.calls[index].against is not None

    def structure_of(self, index: int) -> Any:
        """What a layer is given beside the hidden states."""
        return self._note.calls[index].structure

    def is_free(self) -> bool:
        """Whether nobody else holds what lies in the pool, gradients of parameters apart."""
        return not any(lent.is_held() for lent in self._lent)

    def begin(self) -> None:
        self._recorder.begin([*(lent.tensor for lent in self._lent), *self.gradients.tensors()])

    def against_backward(self) -> str | None:
        """Why the backward pass that begins is not what was captured."""
        found, before = self._note.in_backward(self._autocast.device), self._note.backward
        if isinstance(found, str):
            return found
        if Autocast(self._autocast.device).key() != (before is not None and before.key()):
            return "autocast in the backward pass that is switched from step to step"
        return None

    def fits(self, run: Run, hidden: torch.Tensor) -> bool:
        call = run.call
        if call.is_chained and hidden.data_ptr() != run.hidden_pointer and not run.reads_copy:
            return False
        return hidden.requires_grad is call.hidden_requires_grad and signature(hidden) == call.hidden


def _open(boundaries: torch.Tensor, longest: int, shape: torch.Size) -> None:
    """With some that a batch of this shape may have, for the runs before the first one is there."""
    rows = shape[:-1].numel()
    boundaries.copy_((torch.arange(len(boundaries)) * (longest or rows)).clamp_(max=rows))
    open_up(boundaries, longest)


def _apart(upstream: torch.Tensor, hidden: torch.Tensor | None, *gradients: torch.Tensor | None) -> Sequence[Any]:
    """Each of the gradients in memory of its own, as autograd sees to it where one tensor is several's gradient: who
    has one may write there."""
    taken = [_extent(tensor) for tensor in (upstream, hidden) if tensor is not None]
    found: list[Any] = [hidden]
    for gradient in gradients:
        if gradient is not None:
            begin, end = _extent(gradient)
            if any(begin < other[1] and other[0] < end for other in taken):
                gradient = gradient.clone()
            taken.append(_extent(gradient))
        found.append(gradient)
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses that it may have, from the first to behind the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.element_size() if tensor.numel() else begin


@contextmanager
def _standing_in(layer: Layer) -> Iterator[None]:
    """Within, the layer's modules hold the stand-ins in place of the parameters that want gradients."""
    stand_ins = {id(p): other for p, other in zip(layer.parameters, layer.stand_ins, strict=True)}
    with ExitStack() as undo:
        for table in [module._parameters for module in layer.module.modules()]:
            for name, parameter in list(table.items()):
                if id(parameter) in stand_ins:
                    undo.callback(table.__setitem__, name, parameter)
                    table[name] = stand_ins[id(parameter)]  # type: ignore[assignment]
        yield


# ---- a step ----------------------------------------------------------------------------------------------------------


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


@contextmanager
def _drawing_again(device: torch.device, state: Any) -> Iterator[None]:
    """Within, random numbers are those that were drawn from this state on, if there is one; behind, the generator is
    where it was."""
    if state is None:
        yield
        return
    generator = generator_of(device)
    now = state_of(generator)
    set_state(generator, state)
    try:
        yield
    finally:
        set_state(generator, now)


class Replay(Function):
    """A run, of its hidden states, what else it is given and has gradients, and the parameters that want some."""

    @staticmethod
    def forward(
        ctx: Any, passage: Passage, run: Run, hidden: torch.Tensor, *others_and_parameters: torch.Tensor
    ) -> Any:
        if hidden.data_ptr() != run.hidden_pointer:
            run.hidden.copy_(hidden)
        ctx.random = state_of(generator_of(hidden.device)) if run.draws_again else None
        run.forward.replay()
        ctx.passage, ctx.run = passage, run
        return run.output.tensor.clone() if run.leaves else run.output.lend()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        passage, run = ctx.passage, ctx.run
        if passage is None:
            raise RuntimeError(_ONCE)
        passage.reach(run)
        if gradient.data_ptr() != run.upstream_pointer or gradient.stride() != run.upstream.stride():
            run.upstream.copy_(gradient)
        del gradient
        with _drawing_again(run.upstream.device, ctx.random):
            run.backward.replay()
        hidden = None if run.hidden_gradient is None else run.hidden_gradient.lend()
        if hidden is not None and not run.call.is_chained:
            # It leaves the layers; adapters' input keeps it as its .grad until the loss is gone.
            hidden = hidden.clone()
        others = [None if gradient is None else gradient.clone() for gradient in run.others_gradients]
        ctx.passage = ctx.run = None  # many a loop keeps its loss, which holds this, and would hold the graphs
        return None, None, hidden, *others, *passage.gradients(run)
