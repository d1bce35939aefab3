"""One forward pass through a stack's layers: noted, captured, replayed, or left alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from bastile.graphs import caches, collected, conditions
from bastile.graphs.arguments import CannotCapture, Given, rebuilt, signature
from bastile.graphs.autocast import Autocast
from bastile.graphs.between import Between, themselves
from bastile.graphs.calls import called_instead, itself
from bastile.graphs.captured import Captured
from bastile.graphs.foreseen import foreseen
from bastile.graphs.longer import Longer
from bastile.graphs.passage import Passage, Replay
from bastile.graphs.pays import Pays, pays
from bastile.graphs.returned import has_own, hidden_of, others_of, returned
from bastile.graphs.runs import Call, Note, Run
from bastile.graphs.stack import HOOKED, Stack
from bastile.models.chunks import asked, opened
from bastile.ops._common import has_values

Mode = Literal["auto"] | bool

_log = logging.getLogger("bastile")
_CROWDED = (
    "more kinds of steps than graphs are kept for; where they are lengths of batches, pad_to_multiple_of of the data "
    "collator makes few of many"
)
_SHORT = "larger steps, which have no graphs, need the memory that graphs would have"
#: So many replayed steps of a kind may turn out to be something else, as where layers are left out at random.
_MOST_BROKEN_OFF = 2
_WRITTEN = "arguments of the layers that are written to between them"
_DIFFERS = "a layer got other arguments than when it was captured"
_CHANGED = "layers that have changed"
_WHOLE = "weights of sharded layers that are whole at a time"
_AWAITED = "weights of sharded layers that a backward pass is still to read"
_CAST = "arguments or results of layers that FSDP casts"


class Step:
    def __init__(self, stack: Stack, mode: Mode, asked: tuple[Any, ...]) -> None:
        """asked: what else tells one kind of step from another."""
        self.stack, self.mode, self.asked = stack, mode, asked
        self.layers = stack.layers
        #: What nobody differentiates has no second run.
        self.checkpointing = [stack.differentiates and conditions.checkpoints(layer) for layer in self.layers]
        self.given = Given()
        self.beside: list[torch.Tensor] = []  # made for layers of which the first is not given all, as masks
        self.first_given = 0  # so many tensors it had before its first layer, beside the hidden states
        self.next = 0
        self.passage: Passage | None = None
        self.has_replayed = False
        self.noting: _Noting | None = None
        self.noted: _Noting | None = None  # what was to be, even if it was given up
        self.measuring: Pays | None = None
        self.is_slower = False  # the device is, than the host
        again = [layer for layer, on in zip(self.layers, self.checkpointing, strict=True) if on]
        self._keeps_random = all(map(conditions.keeps_random_state, again))
        self._thread = threading.get_ident()
        self.may_pad = False  # what goes through its layers
        self.longer: Longer | None = None  # how it is
        self.run: Run | None = None  # which has been replayed, and whose layers are still being called
        self.hidden: Any = None  # what its first layer was given
        self.output: Any = None  # its last layer's
        self.of_routers: list[torch.Tensor] = []  # of its layers that are still to be called
        self.output_between: Any = None  # what the layer before has returned
        self._structure: Any = None  # of the arguments that the layer before was called with
        self._previous: tuple[Any, Any] = (), {}  # those arguments

    def calls(self) -> AbstractContextManager[None]:
        """Within, the step is called in the layers' place."""
        return called_instead(self.layers, [partial(self._padded, index) for index in range(len(self.layers))])

    def end(self, result: Any) -> Any:
        """The backbone has returned this. What it is to return."""
        self.stack.ran(without_graphs=not (self.passage or self.noting or self.measuring or self.is_slower))
        if self.measuring is not None:
            self.measuring.end()
        if self.noted is not None:
            left, result = self.noted.left(result)
        if self.noting is not None:
            found = self.noting.ended(left, self.stack, self._keeps_random)
            key = self.noting.key
            if self.longer is not None and self.longer.was_asked():
                self.stack.never_longer()
            if isinstance(found, str):
                self.stack.tally.step_aside(found)
            elif found.read:
                key = self.stack.reads(key, found, self.given.tensors[: self.first_given])
            self.stack.note(key, found)
            if not isinstance(found, str):
                for output in (self.noting.output, *[hidden for _, hidden in self.noting.collected]):
                    self.stack.look_at_backward(key, found, output)
        if self.passage is not None:
            self.passage.captured.is_foreseen = False  # it was right
            self.stack.tally.count()
        is_empty = self.longer is not None or (self.has_replayed and not any(self.checkpointing))
        if self.given.cache is not None and is_empty:
            caches.leave_unfilled(self.given.cache)
        return result

    # ---- calls of layers ----------------------------------------------------------------------------------------

    def _padded(self, index: int, *args: Any, **kwargs: Any) -> Any:
        if index == 0 and self.next == 0 and self.may_pad and threading.get_ident() == self._thread:
            self.longer = self.stack.longer(args, kwargs)
        longer = self.longer
        if longer is not None and not longer.takes(args, kwargs):
            self.stack.never_longer()
            self._give_up("layers that are given what cannot be padded")
            self.longer = longer = None
        if longer is None:
            return self._call(index, *args, **kwargs)
        args, kwargs = longer.longer(args, kwargs, is_first=index == 0)
        return longer.cut(self._call(index, *args, **kwargs), is_last=index + 1 == len(self.layers))

    def _call(self, index: int, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return self._itself(index, args, kwargs)
        if index == 0 and self.next == 0:
            self._decide(args, kwargs)
        if index != self.next:
            self._give_up("layers that are not called one after the other")
        self.next = index + 1
        if self.passage is not None:
            output = self._replayed(self.passage, index, args, kwargs)
            if output is not None:
                if self.passage is not None and not self.passage.captured.runs_itself(index):
                    collected.collect(self.layers[index], args, output)
                return output
            self._give_up(_CHANGED if self.stack.is_wary else _DIFFERS)
        if args and type(args[0]) is Between:
            args = args[0].made, *args[1:]
        if any(type(each) is Between for each in (*args[1:], *kwargs.values())):  # of what was returned beside those
            args, kwargs = themselves((args, kwargs))
        if self.noting is not None:
            try:
                self.noting.call(self.given, bool(self.checkpointing[index]), args, kwargs)
            except CannotCapture as reason:
                self._give_up(str(reason))
        output = self._itself(index, args, kwargs)
        if self.measuring is not None and self.stack.sharded is not None:
            self.measuring.show(hidden_of(output))
        if self.noting is not None:
            return self.noting.returned(self.given, output, self.layers[index], is_last=index + 1 == len(self.layers))
        return output

    def _itself(self, index: int, args: Any, kwargs: Any) -> Any:
        layer = self.layers[index]
        with itself(layer, self.checkpointing[index] is not False and layer is self.stack.inner[index]):
            return layer(*args, **kwargs)

    def _give_up(self, reason: str) -> None:
        """For this step; for all of its kind, where it was to be noted."""
        if self.passage is not None or self.noting is not None:
            self.stack.tally.step_aside(reason)
        if self.noting is not None:
            self.stack.note(self.noting.key, reason)
        if self.passage is not None:
            captured = self.passage.captured
            captured.broken_off += 1
            if captured.is_foreseen or captured.broken_off > _MOST_BROKEN_OFF:
                self.passage.give_up(reason)
        self.passage = self.noting = None
        self.run = self.hidden = self.output = self.output_between = None

    def _replayed(self, passage: Passage, index: int, args: Any, kwargs: Any) -> Any:
        """What the layer returns; None where it is called in another way than it was captured."""
        run = self.run
        if self.given.have_changed():
            return None
        if run is None:
            if passage.captured.runs_itself(index):
                structure = passage.captured.structure_of(index)
                if not self.stack.reach(index + 1) or not self._is_given(
                    structure, passage.captured, index, args, kwargs
                ):
                    return None
                return self._itself(index, args, kwargs)
            run = passage.captured.at.get(index)
            if run is None or not self.stack.reach(run.end) or not self._fits(run, passage.captured, args, kwargs):
                return None
            self.has_replayed = True
            self.run, self.hidden = run, args[0]
            others = [self.given.tensors[place] for place in run.differentiated]
            output, *self.of_routers = self._replay(passage, run, others, args, kwargs)
            if self.stack.sharded is not None and not self.stack.sharded.is_in_place(run.first):
                self._give_up(_WHOLE)
                return output
            self.output = output
        elif not args or args[0] is not self.output_between or not self._is_given_again(args[1:], kwargs):
            return None
        call = run.layers[index - run.first].call
        if call.of_routers:
            count = len(call.of_routers)
            collected.add_of_routers(self.of_routers[:count])
            del self.of_routers[:count]
        others = call.others
        made = partial(self._made, passage, run, index, self.hidden, args[1:], kwargs)
        if index + 1 == run.end:
            output = self.output
            self.run = self.hidden = self.output = self.output_between = None
            return returned(output, others, self.given.tensors, partial(partial, made))
        self.output_between = Between.of(made)
        return returned(self.output_between, others, self.given.tensors, partial(partial, made))

    def _replay(self, passage: Passage, run: Run, others: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        sharded = self.stack.sharded
        if sharded is None:
            return Replay.apply(passage, run, args[0], *others, *run.parameters)
        of_routers: list[torch.Tensor] = []

        def replay(hidden: torch.Tensor) -> torch.Tensor:
            output, *more = Replay.apply(passage, run, hidden, *others, *run.parameters)
            of_routers.extend(more)
            return output

        return sharded.called(run.first, replay, args, kwargs), *of_routers

    def _made(self, passage: Passage, run: Run, last: int, hidden: Any, rest: Any, kwargs: Any, place: int = 0) -> Any:
        """The hidden states that the run's layers up to this one return, called themselves; or what the last of them
        returns at another place."""
        if self.given.have_changed() and not passage.is_over:
            # What they were given is where the run's graph has read it.
            rest, kwargs = rebuilt(run.call.structure, [place.tensor.clone() for place in passage.captured.others])
        with collected.nothing():  # a second time
            for index in range(run.first, last + 1):
                output = self._itself(index, (hidden, *rest), kwargs)
                hidden = hidden_of(output)
        return output[place] if place else hidden

    def _is_given_again(self, rest: Any, kwargs: Any) -> bool:
        """Whether these are the very arguments of the layer before."""
        rest_before, before = self._previous
        return (
            len(rest_before) == len(rest)
            and before.keys() == kwargs.keys()
            and all(map(is_, rest_before, rest))
            and all([before[name] is value for name, value in kwargs.items()])
        )

    def _fits(self, run: Run, captured: Captured, args: Any, kwargs: Any) -> bool:
        """Whether a run's first layer is called as it was when captured; tensors are then where its graph reads."""
        if not args or not isinstance(args[0], torch.Tensor):
            return False
        try:
            fits = captured.fits(run, args[0])
        except CannotCapture:
            return False
        return fits and self._is_given(run.call.structure, captured, run.first, args, kwargs)

    def _is_given(self, structure: Any, captured: Captured, index: int, args: Any, kwargs: Any) -> bool:
        """Whether this layer's arguments beside the hidden states are of this structure; tensors are then where graphs
        read."""
        rest = args[1:]
        if structure is not self._structure or not self._is_given_again(rest, kwargs):
            filled = len(self.given.tensors) if index else 0
            try:
                if self.given.structure([rest, kwargs]) != structure:
                    return False
            except CannotCapture:
                return False
            for place, tensor in enumerate(self.given.tensors[filled:], filled):
                if not captured.reads_the_same(place, tensor):
                    return False
                captured.others[place].fill(tensor, self.stack.tables.is_steady(tensor))
        self._structure, self._previous = structure, (rest, kwargs)
        return True

    # ---- at the first layer -------------------------------------------------------------------------------------

    def _decide(self, args: Any, kwargs: Any) -> None:
        stack = self.stack
        if stack.watch is not None and stack.watch.is_asked_for_more():
            return stack.tally.step_aside(HOOKED)
        try:
            key = self._key(args, kwargs)
        except CannotCapture as reason:
            return stack.tally.step_aside(str(reason))
        captured = stack.see(key)
        if captured is None:
            if not stack.reach(len(self.layers)):
                return stack.tally.step_aside(_CHANGED)
            noted = stack.notes.get(key)
            is_new = noted is None
            if noted is None:
                noted = self._foreseen(key)
            if noted is None:
                self.noting = self.noted = _Noting(key, args[0].device)
            else:
                captured = self._captured(key, noted, args[0].device, is_new)
            if captured is None:
                return stack.runs_beside(_tokens(key))
        passage = stack.begin(key, captured)
        if isinstance(passage, str):
            return stack.tally.step_aside(passage)
        self.passage = passage
        return None

    def _key(self, args: Any, kwargs: Any) -> Any:
        if not args or not isinstance(args[0], torch.Tensor):
            raise CannotCapture("layers that do not take the hidden states first")
        hidden = args[0]
        if None in self.checkpointing:
            raise CannotCapture("checkpointing by another function than PyTorch's, or with settings of its own")
        if any(self.checkpointing) and not hidden.requires_grad:
            for layer, on in zip(self.layers, self.checkpointing, strict=True):
                if on and conditions.function_of_checkpoint(layer).keywords.get("use_reentrant", True):
                    raise CannotCapture("reentrant checkpointing of hidden states that require no gradient")
        self._autocast = Autocast(hidden.device.type)
        stream = torch.cuda.current_stream(hidden.device).cuda_stream if hidden.is_cuda else 0
        key = (
            self.given.structure([args[1:], kwargs, self.beside]),
            signature(hidden),
            hidden.requires_grad,
            tuple(self.checkpointing),
            self._keeps_random,
            self._autocast.key(),
            conditions.settings(),
            stream,
            collected.asked(),
            self.asked if self.longer is None else self.longer.kind(self.asked),
        )
        if self.given.cache is not None and not self.stack.differentiates:
            raise CannotCapture("keys and values of a pass without gradients, which may be there to be read")
        self.first_given = len(self.given.tensors)
        sharded = self.stack.sharded
        if sharded is not None and sharded.changes_type([hidden, *self.given.tensors]):
            raise CannotCapture(_CAST)
        return self.stack.with_what_is_read(key, self.given.tensors)

    def _foreseen(self, key: Any) -> Note | None:
        """What would be noted of the first step of a kind: of one that has graphs and differs in sizes alone. Such a
        step need not run without graphs, whose activations would lie beside the graphs' memory."""
        stack = self.stack
        if not stack.may_foresee() or (self.mode == "auto" and not self._surely_pays(key)):
            return None
        for other in stack.captured:
            before = stack.notes.get(other)
            if isinstance(before, Note) and other[2:] == key[2:]:
                found = foreseen(before, other[0], key[0], key[1])
                if found is not None:
                    stack.note(key, found)
                    return found
        return None

    def _surely_pays(self, key: Any) -> bool:
        """Whether graphs do, by what was measured of this kind, or else of other sizes: with the tokens the device's
        time grows, and the host's does not."""
        ratios = self.stack.ratios
        if key in ratios:
            return pays(ratios[key])
        tokens = _tokens(key)
        alike = [ratio * max(1.0, tokens / _tokens(o)) for o, ratio in ratios.items() if o[2:] == key[2:]]
        return bool(alike) and pays(min(alike), beside_graphs=bool(self.stack.captured))

    def _captured(self, key: Any, noted: Note | str, device: torch.device, is_new: bool) -> Captured | None:
        """Graphs for a kind of step that has been noted, if it is time. is_new: none of it has run."""
        stack = self.stack
        if isinstance(noted, str):
            stack.tally.step_aside(noted)
            return None
        if self.mode == "auto" and not self._surely_pays(key):
            if key not in stack.ratios:
                measured = stack.pays.setdefault(key, Pays(device))
                if measured.wants_more():
                    self.measuring = measured
                    measured.begin()
                    return None
                ratio = measured.ratio()
                if ratio is None:
                    return None
                stack.ratios[key] = ratio
            if not pays(stack.ratios[key]):
                self.is_slower = True
                stack.do_not_pay(_tokens(key))
                stack.tally.step_aside("the device is not waiting for the host", is_usual=True)
                return None
        if not stack.has_room(key):
            stack.tally.step_aside(_CROWDED if stack.is_full() else _SHORT)
            return None
        assert stack.recorder is not None
        if stack.sharded is not None and not stack.sharded.settle(stack.recorder):
            stack.tally.step_aside(_AWAITED)
            return None
        stack.make_way(_tokens(key))
        try:
            captured = Captured(
                stack.recorder,
                stack.inner,
                noted,
                self._autocast,
                is_new,
                not stack.is_beside,
                self.given.tensors,
                stack.sharded,
            )
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            _log.debug("capturing layers failed", exc_info=True)
            self.noting = None
            if self.longer is not None:
                stack.never_longer()
            stack.note(key, f"capturing failed ({type(error).__name__}: {first})")
            stack.tally.step_aside(str(stack.notes[key]))
            return None
        stack.keep(key, captured)
        return captured


def _storage(tensor: Any) -> int:
    """Which memory it has; 0 where it is no tensor, or stands for one that nobody has looked at."""
    if type(tensor) is Between:
        tensor = tensor.made_once
    return tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) and has_values(tensor) else 0


def _tokens(key: Any) -> int:
    """That go through the layers in a step of this kind; one where there are none."""
    (shape, *_) = key[1]
    return max(1, int(shape[:-1].numel()))


class _Noting:
    """The first step of a kind: what each layer is called with, and whether it can be captured."""

    def __init__(self, key: Any, device: torch.device) -> None:
        self.key, self.device = key, device
        self.calls: list[Call] = []
        self.output: Any = None  # of the layer before
        self.given_out: dict[int, tuple[int, Any]] = {}  # by number: which layer's output, as others get to see it
        self.looked_at: set[int] = set()  # layers whose output others than the next one do something with
        self.asked_for_more: set[int] = set()  # layers of which somebody looks at what they return beside
        self.collected: list[tuple[int, torch.Tensor]] = []  # by hooks: outputs of these layers
        self.of_routers = 0  # so many logits had been, before the layer that is called
        self.given: Given | None = None
        self.random = conditions.random_state(device)
        self.of_host: Any = None  # the state of its generator, before the layer that is called
        self.before: list[tuple[Mapping[Any, Any], dict[Any, Any]]] = []  # what is called has been given, as it was

    def call(self, given: Given, checkpoints: bool, args: Any, kwargs: Any) -> None:
        if not args or not isinstance(args[0], torch.Tensor):
            raise CannotCapture("layers that do not take the hidden states first")
        hidden = args[0]
        self.given = given
        structure = given.structure([args[1:], kwargs])
        given.keep_cache(hidden.device)
        if self.calls and self.calls[-1].structure == structure:
            structure = self.calls[-1].structure  # one object, so that equality is seen at once
        chained = hidden is self.output
        self.before = [(each, dict(each)) for each in (*args[1:], *kwargs.values()) if isinstance(each, Mapping)]
        self.of_routers = len(collected.of_routers())
        self.of_host = conditions.host_random_state(self.device)
        self.calls.append(Call(structure, signature(hidden), hidden.requires_grad, chained, checkpoints))

    def returned(self, given: Given, output: Any, layer: Any, is_last: bool) -> Any:
        """By the layer, which was called last. What takes the place of it, by which others are seen to look at it."""
        self.output = hidden = hidden_of(output)
        index = len(self.calls) - 1
        if collected.has(hidden):
            self.collected.append((index, hidden))
        try:
            if self._has_left_something():
                raise CannotCapture("layers that leave something for others in a dictionary")
            if conditions.host_random_state(self.device) != self.of_host and conditions.host_decides(layer):
                raise CannotCapture("layers within which the host draws random numbers")
            others = others_of(output, given)
        except CannotCapture as reason:
            self.calls[-1] = replace(self.calls[-1], against=str(reason))
            return output
        leads = tuple([logits.requires_grad for logits in collected.of_routers()[self.of_routers :]])
        self.calls[-1] = replace(self.calls[-1], others=others, of_routers=leads)
        if not is_last:
            # Neither holds what is noted, which holds them.
            hidden = Between.of(partial(hidden_of, hidden), partial(self.looked_at.add, index))
        self.given_out[id(hidden)] = index, hidden
        if not has_own(others):
            return returned(hidden, others, given.tensors)
        made = lambda place: partial(output.__getitem__, place)  # noqa: E731
        return returned(hidden, others, given.tensors, made, partial(self.asked_for_more.add, index))

    def _has_left_something(self) -> bool:
        """In a dictionary that the layer was given, for later ones or whoever calls them."""
        return any(
            now.keys() != was.keys() or any(now[name] is not was[name] for name in was) for now, was in self.before
        )

    def left(self, result: Any) -> tuple[set[int], Any]:
        """The layers whose output is in what the backbone returns, or a part of one, as of what LED pads; and that with
        the outputs themselves."""
        leaves = tree_leaves(list(result.values()) if isinstance(result, Mapping) else result)
        left = {self.given_out[id(leaf)][0] for leaf in leaves if id(leaf) in self.given_out}
        left |= {index for index, _ in self.collected}
        own = {storage: index for index, hidden in self.given_out.values() if (storage := _storage(hidden))}
        left |= {own[storage] for leaf in leaves if (storage := _storage(leaf)) in own}
        if isinstance(result, Mapping):
            for name, value in result.items():
                if any(type(leaf) is Between for leaf in tree_leaves(value)):
                    result[name] = themselves(value)  # type: ignore[index]
        else:
            result = themselves(result)
        return left, result

    def ended(self, left: set[int], stack: Stack, keeps_random: bool = True) -> Note | str:
        """left: the layers whose output leaves. keeps_random: whether checkpointed ones draw the same numbers again."""
        if self.given is None:
            return "layers that are not called"
        drawn = conditions.random_state(self.device) != self.random
        if drawn and not keeps_random:
            return "random numbers (dropout) in checkpointed layers that are not to draw the same ones again"
        if self.given.have_changed():
            return _WRITTEN
        for index in self.asked_for_more:
            self.calls[index] = replace(self.calls[index], against="layers that return more than a tensor")
        against = [call.against for call in self.calls if call.against is not None]
        if 2 * len(against) > len(self.calls):
            return against[0]
        if stack.watch is None or not stack.watch.begin(everything=True):
            return "modules of the layers that keep something of a call"
        settings = conditions.of_backward(any(call.checkpoints for call in self.calls))
        others = [signature(tensor) for tensor in self.given.tensors]
        told = ((place, asked(tensor)) for place, tensor in enumerate(self.given.tensors))
        read = {place: chunks for place, chunks in told if chunks is not None}
        read_there = ((place, opened(tensor)) for place, tensor in enumerate(self.given.tensors))
        on_device = {place: longest for place, longest in read_there if longest is not None}
        ends = frozenset(self.looked_at - left)
        return Note(
            self.calls,
            others,
            drawn,
            settings,
            ends=ends,
            leaving=frozenset(left),
            read=read,
            open=on_device,
            differentiates=stack.differentiates,
        )


def begin(stack: Stack, layers: Sequence[Any], mode: Mode, asked: Any) -> Step | None:
    """None: this step runs without graphs."""
    reason = stack.cannot(layers)
    if reason is not None:
        stack.ran(without_graphs=True)
        if stack.recorder is not None or mode is True:
            stack.tally.step_aside(reason, is_usual=stack.recorder is None)
        return None
    return Step(stack, mode, asked)
