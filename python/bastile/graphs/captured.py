"""A stack of layers, captured for arguments of one kind: each run of layers forward and backward.

A run is one graph forward and one backward. Its output lies where the next one's graph reads its input, and its
gradient of its input where the graph of the one before reads that of its output: nothing is copied between them.
Gradients of parameters are lent, too: the next step writes there, and by then most training loops have let go of them.
Of those that have not they become copies, then and from then on.

Where layers are checkpointed gradients are always copies. What they take then is the memory that the loss had, which is
free by that time; in the pool of such a step, which keeps little else, it would be more memory for good. So are those
of a pass beside another one, for autograd adds them to the other's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bastile.graphs import collected
from bastile.graphs.arguments import CannotCapture, Place, rebuilt, signature
from bastile.graphs.autocast import Autocast
from bastile.graphs.calls import bare
from bastile.graphs.recorder import Recorder, uses_of_storage
from bastile.graphs.returned import hidden_of
from bastile.graphs.runs import Layer, Lent, Note, Run, copies, runs_of, trains_little
from bastile.graphs.sharded import Sharded
from bastile.models.alike import kind_of
from bastile.models.chunks import Chunks, lengths_of, open_up, opened, say
from bastile.ops._random import drawing_again, generator_of, state_of

#: Bytes at whose multiples memory may begin that kernels read in the widest pieces.
_ALIGNED = 16


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
        sharded: Sharded | None = None,
    ) -> None:
        """is_new: no such step has run; the note is one of others. lends_gradients: those of parameters may lie in the
        pool until the next step, where they are not to be copied anyway. given: the first of such a step's tensors.
        sharded: what becomes of the layers' parameters."""
        self.is_foreseen = is_new  # until a step has been called as the note says
        self.broken_off = 0  # steps that were to be replayed and became something else on the way
        little = note.checkpoints and trains_little(modules)
        self.runs = runs_of(modules, note, little, None if sharded is None else sharded.gathered)
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
        self.lends_gradients = lends_gradients and (little or not note.checkpoints) and sharded is None
        self.lowest = next((run.index for run in self.runs if run.wants_gradients), len(self.runs))
        with recorder.recording(self._warm_up if is_new else None):
            self._record()
        self._lent = [lent for run in self.runs for lent in (run.output, run.hidden_gradient) if lent is not None]
        for lent in self._lent:
            lent.settle()
        self.gradients = Gradients(self.runs[self.lowest :])

    # ---- recording ----------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Runs a layer of each kind by itself, of zeros: what is to be chosen, compiled and loaded cannot be while it
        is captured."""
        device = self._note.calls[0].hidden[3]
        with drawing_again(device, state_of(generator_of(device))):
            for layer in self._of_each_kind():
                run, kept = Run(0, 0, [layer], self._note), [None]
                hidden = Place(layer.call.hidden).tensor
                output, *of_routers = self._forward_of(run, hidden, kept)()
                run.upstreams = self._upstreams_of(run, of_routers)
                if run.wants_gradients:
                    self._backward_of(run, hidden, torch.zeros_like(output), [None] * len(run.differentiated), kept)()

    def _of_each_kind(self) -> Iterable[Layer]:
        """One for all layers that are called alike, and whose weights are alike down to how they lie, for that, too,
        may decide what runs. And the last one, for some nodes do there what they do nowhere else."""
        found: dict[Any, Layer] = {}
        layers = [(run.first + at, layer) for run in self.runs for at, layer in enumerate(run.layers)]
        for place, layer in layers:
            lie = [(p.stride(), p.data_ptr() % _ALIGNED) for p in layer.all_parameters]
            call = replace(layer.call, is_chained=True)
            found.setdefault((layer is layers[-1][1], call, kind_of(layer.module, place), *lie), layer)
        return found.values()

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
            run.forward, results = self._recorder.record(self._forward_of(run, places[-1], kept))
            output, *of_routers = [result for result in results if result is not None]
            run.output = Lent(self._recorder.borrowed(output))
            run.of_routers = list(map(self._recorder.borrowed, of_routers))
            run.upstreams = self._upstreams_of(run, of_routers)
        return [*places, output]

    def _upstreams_of(self, run: Run, of_routers: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Where the graph reads the gradients of routers' logits; None for those that have none."""
        lead = [lead for layer in run.layers for lead in layer.call.of_routers]
        return [torch.zeros_like(each) if leads else None for each, leads in zip(of_routers, lead, strict=True)]

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
                of_routers: list[torch.Tensor] = []
                for layer in run.layers:
                    output, *more = called(layer, output, others)
                    of_routers += more
                # Made last, so that a backward pass takes their gradient first: what it adds to.
                sums = [(others[place], others[place].view_as(others[place])) for place in run.differentiated]
            if self._note.differentiates:
                kept[run.index] = read, sums, [output, *of_routers]
            return [each.detach() for each in (output, *of_routers)]

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
            (read, sums, results), kept[run.index] = kept[run.index], None
            pairs = [each for each in zip(results, (upstream, *run.upstreams), strict=True) if each[1] is not None]
            outputs, upstreams = [result for result, _ in pairs], [into for _, into in pairs]
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

    def _checkpointed(self, layer: Layer, hidden: torch.Tensor, others: list[torch.Tensor]) -> Sequence[torch.Tensor]:
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

    def _called(self, layer: Layer, hidden: torch.Tensor, others: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What the layer returns, and what its routers do."""
        args, kwargs = rebuilt(layer.call.structure, others)
        are_wanted = bool(layer.call.of_routers)
        with bare(layer.module), layer.standing_in(), collected.routers_alone(are_wanted) as of_routers:
            output = hidden_of(layer.run(hidden, *args, **kwargs))
        leads = torch.is_grad_enabled() and (
            hidden.requires_grad or bool(layer.parameters) or any(other.requires_grad for other in others)
        )
        if not isinstance(output, torch.Tensor) or output.requires_grad is not leads:
            raise CannotCapture("a layer does not return one tensor that its parameters or hidden states lead to")
        return output, *of_routers

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
