"""What was noted of a step that ran without graphs, and the runs of layers that become one graph each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from bastile.graphs import conditions
from bastile.graphs.arguments import Signature, differentiated
from bastile.graphs.autocast import Autocast
from bastile.graphs.recorder import Replayed, uses_of_storage
from bastile.graphs.sharded import Gathered
from bastile.models.chunks import Chunks
from bastile.models.structure import each, parameters_of, tables_of

#: Layers in a run. More cost the host less, but what a run's graph writes is all there at once, and gradients are
#: ready for others, such as DDP's reduction, when the run is done.
MOST_LAYERS = 7
#: Likewise where they are checkpointed: the host has twice the time, and memory is what is wanted.
MOST_CHECKPOINTED = 3
#: The part of the parameters' bytes up to which those that are trained are little, as adapters are: gradients need no
#: memory to speak of then, and there are hundreds of them to copy.
LITTLE = 1 / 8
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
    of_routers: tuple[bool, ...] = ()  # of each router's logits that were collected: whether they require a gradient
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


def copies(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch._foreach_mul(list(tensors), 1.0) if tensors else ()


class Layer:
    """One layer of a run."""

    def __init__(self, module: nn.Module, call: Call, differentiates: bool, gathered: Gathered | None = None) -> None:
        """gathered: what takes its parameters' place while it is called, if they are sharded."""
        self.module, self.call = module, call
        #: Without the hooks that gather them.
        self.run: Callable[..., Any] = module if gathered is None else module.forward
        modules = list(each(module))
        there: Mapping[int, nn.Parameter] = {} if gathered is None else gathered.parameters
        memory: Mapping[int, torch.Tensor] = {} if gathered is None else gathered.memory
        self.all_parameters = [there.get(id(p), p) for p in parameters_of(modules)]
        self.parameters = [p for p in self.all_parameters if differentiates and p.requires_grad]
        # The same memory, but new to autograd, whose nodes for the parameters themselves belong to another stream.
        self.stand_ins: list[torch.Tensor] = [nn.Parameter(memory.get(id(p), p).detach()) for p in self.parameters]
        stand_ins = dict(zip(map(id, self.parameters), self.stand_ins, strict=True))
        own = [(table, name, p, there.get(id(p), p)) for table in tables_of(modules) for name, p in table.items()]
        others = [(table, name, p, stand_ins.get(id(whole), whole)) for table, name, p, whole in own]
        self._places = [(table, name, other) for table, name, p, other in others if other is not p]

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Within, its modules hold the stand-ins in place of the parameters that want gradients, and what is gathered
        in place of what is sharded."""
        before = [table[name] for table, name, _ in self._places]
        try:
            for table, name, stand_in in self._places:
                table[name] = stand_in
            yield
        finally:
            for (table, name, _), parameter in zip(self._places, before, strict=True):
                table[name] = parameter


class Run:
    """Layers that are called one after the other with the same arguments."""

    hidden: torch.Tensor  # where the graph reads the hidden states
    hidden_pointer: int
    output: Lent
    of_routers: list[torch.Tensor]  # logits that were collected, layer by layer
    upstreams: list[torch.Tensor | None]  # where the graph reads their gradients
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


def trains_little(modules: Sequence[nn.Module]) -> bool:
    parameters = parameters_of([part for module in modules for part in each(module)])
    return sum(p.nbytes for p in parameters if p.requires_grad) <= LITTLE * sum(p.nbytes for p in parameters)


def runs_of(
    modules: Sequence[nn.Module],
    note: Note,
    little: bool = False,
    gathered: Callable[[int], Gathered] | None = None,
) -> list[Run]:
    """little: is what is trained of them. gathered: by a layer's place, where each one's parameters are sharded and it
    is a run of its own, what takes their place while it is called."""
    runs: list[Run] = []
    layers: list[Layer] = []
    most_checkpointed = MOST_LAYERS if little else MOST_CHECKPOINTED
    most_checkpointed = MOST_DRAWN_AGAIN if note.draws else most_checkpointed
    for index, (module, call) in enumerate(zip(modules, note.calls, strict=False)):
        before = layers[-1].call if layers else None
        if before is not None and (
            not call.is_chained
            or call.against is not None
            or call.structure is not before.structure
            or call.checkpoints is not before.checkpoints
            or index - 1 in note.ends | note.leaving
            or len(layers) == (most_checkpointed if call.checkpoints else MOST_LAYERS)
            or gathered is not None
        ):
            runs.append(Run(len(runs), index - len(layers), layers, note))
            layers = []
        if call.against is None:
            is_behind = bool(index) and note.calls[index - 1].against is None
            call = call if is_behind else replace(call, is_chained=False)
            layers.append(Layer(module, call, note.differentiates, None if gathered is None else gathered(index)))
    if layers:
        runs.append(Run(len(runs), len(note.calls) - len(layers), layers, note))
    for run in runs:
        runs_itself = run.end < len(note.calls) and note.calls[run.end].against is not None
        # Who collects what nobody differentiates may keep all of it.
        is_result = run.end == len(note.calls) and not note.differentiates
        run.leaves = runs_itself or is_result or run.end - 1 in note.leaving
        run.reads_copy = run.first - 1 in note.leaving
    return runs
