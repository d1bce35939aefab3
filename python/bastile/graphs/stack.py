"""The layers of one backbone: which kinds of steps have been seen, what is captured, and whose the memory is."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from bastile.graphs import collected, conditions, host_time
from bastile.graphs.captured import Captured
from bastile.graphs.lengths import Lengths
from bastile.graphs.longer import Longer
from bastile.graphs.masked import Masks
from bastile.graphs.packed import Packs
from bastile.graphs.passage import Passage
from bastile.graphs.pays import Pays
from bastile.graphs.recorder import Recorder
from bastile.graphs.reserved import Reserved
from bastile.graphs.runs import Note, Run
from bastile.graphs.seq2seq import Decoders
from bastile.graphs.sharded import Sharded, sharded
from bastile.graphs.tables import Tables
from bastile.graphs.watch import Watch
from bastile.models.checkpoints import unwrapped
from bastile.models.chunks import lengths_of
from bastile.report import Tally

#: Kinds of steps with graphs, and those that have been seen once. Batches of all lengths between two of which one is
#: eight times the other are padded to twelve; what runs without graphs has its activations beside the graphs' memory.
MOST_CAPTURED = 16
_MOST_SEEN = 64
#: So often a kind must have been seen since the least recently used of those with graphs was, to take its place:
#: capturing costs as much time as some ten replays save, and where lengths are many, none of them comes often.
WORTH = 10
#: So many kinds one after the other are captured when they first come, with no graph that is used again meanwhile.
MOST_IN_VAIN = 8
#: So often the layers may change beneath their graphs within so many steps of each other: who exchanges parameters in
#: each step has no use for graphs.
_MOST_CHANGES = 4
_QUIET_STEPS = 16
#: Forward passes before one backward pass that have graphs: a question, a text that answers it, and some that do not.
MOST_BESIDE = 8

#: So many steps one after the other must have run without graphs until the host's time counts in these layers.
_IN_VAIN = 4

#: States of the layers in which passes that nobody differentiates have graphs: with adapters and without, in training
#: and in evaluation.
MOST_STATES = 4

#: Why a step runs without graphs.
HOOKED = "hooks in the layers, which a graph would not call"

_stacks: weakref.WeakKeyDictionary[nn.Module, Stack] = weakref.WeakKeyDictionary()


def stack_of(backbone: nn.Module, tally: Tally) -> Stack:
    """For the forward pass that begins: beside others that have not had their backward pass, one with memory of its
    own; likewise where nobody differentiates it, for each state that the layers are in."""
    found = _stacks.get(backbone)
    if found is None:
        found = _stacks[backbone] = Stack(tally)
    if not torch.is_grad_enabled():
        return found.undifferentiated()
    for _ in range(MOST_BESIDE - 1):
        if not found.is_waiting() or not found.may_have_one_beside:
            break
        if found.beside is None:
            found.beside = Stack(tally, found)
        found = found.beside
    return found


def may_pay(backbone: nn.Module, tokens: int) -> bool:
    """Whether graphs of so many tokens pay, as far as has been measured."""
    found = _stacks.get(backbone)
    return found is None or (found.never is None and found.lengths.may_pay(tokens))


def forget() -> None:
    """All that has been captured: the layers may do something else from now on."""
    for stack in list(_stacks.values()):
        host_time.say(stack.layers, True)
        for each in (*stack.and_beside(), *stack.states):
            each.retire()
            if each.sharded is not None:
                each.sharded.leave()
    _stacks.clear()


class Stack:
    def __init__(self, tally: Tally, beside: Stack | None = None, *, differentiates: bool = True) -> None:
        """beside: the same layers' for other passes. What is known of lengths holds for both; and what is known of a
        kind of step, where both are differentiated."""
        self.tally, self.differentiates = tally, differentiates
        self.notes: OrderedDict[Any, Note | str] = OrderedDict()  # by key; a str: why it cannot be captured
        self.read: dict[Any, Sequence[int]] = {}  # by key but its last part, of which given tensors the host reads some
        self.pays: dict[Any, Pays] = {}  # by key, what is being measured
        self.ratios: dict[Any, float] = {}  # by key, what came of it
        self.captured: OrderedDict[Any, Captured] = OrderedDict()
        self.steps = 0
        self._used: dict[Any, int] = {}  # by key of what is captured, in which step last
        self._seen: dict[Any, deque[int]] = {}  # by key of what is noted, in which steps lately
        self.watch: Watch | None = None
        self.layers: list[Any] = []
        self.inner: list[Any] = []  # the same, without wrappers that checkpoint them
        self.sharded: Sharded | None = None
        self.never: str | None = None  # why these layers are not captured
        self.changes = 0
        self.quiet = 0  # steps since the last change
        self.device: torch.device | None = None
        self.recorder: Recorder | None = None
        self._passage: Callable[[], Passage | None] = lambda: None
        self._last: Captured | None = None  # whose tensors may be held by others
        self._is_tidy = False
        self._reserved = Reserved()
        self._most_tokens = 0  # of what is in the pool
        self._in_vain = 0  # captures since a graph was used again
        self._short = 0, 0  # in which step, of how many tokens, graphs last were in the way of a larger one without
        self.lengths = Lengths()
        self.packs, self.masks, self.decoders = Packs(), Masks(), Decoders()
        self.tables = Tables()
        self.is_beside = beside is not None
        self.beside: Stack | None = None
        self.states: list[Stack] = []  # of passes that nobody differentiates, the latest last
        #: A pass that another one came after has had its backward pass then, and so will others.
        self.may_have_one_beside = self.is_beside
        if beside is not None:
            if differentiates:
                self.notes, self.read, self.ratios = beside.notes, beside.read, beside.ratios
            self.lengths, self.tables = beside.lengths, beside.tables
            self.packs, self.masks, self.decoders = beside.packs, beside.masks, beside.decoders
        self.has_graphs = True  # or may get some, as far as is known
        self.without = 0  # steps since there were graphs, or it was seen whether there could be
        self.is_wary = False  # some layers were found changed in the middle of a step
        self._differs_behind = False  # and were, or later ones than the first, once
        self._gradients = Run.lent  # how they are handed out: by who has held some while the next step began

    # ---- before a step ------------------------------------------------------------------------------------------

    def undifferentiated(self) -> Stack:
        """The one of these layers as they are now for a pass that nobody differentiates: who switches adapters off
        and on again between such passes has graphs for both, and they lie beside what a step in between keeps for its
        backward pass."""
        found = next((each for each in reversed(self.states) if each.never is not None or each.is_as_it_was()), None)
        if found is None and len(self.states) < MOST_STATES:
            found = Stack(self.tally, self, differentiates=False)
            found._differs_behind = any(each._differs_behind for each in self.states)
        elif found is None:
            found = self.states[0]
        self.states = [*[each for each in self.states if each is not found], found]
        return found

    def is_as_it_was(self) -> bool:
        """Whether its layers are as they were when it last looked at them all: the first ones, as long as states have
        differed there."""
        return self.watch is not None and self.watch.begin(everything=self._differs_behind)

    def cannot(self, layers: Sequence[Any]) -> str | None:
        """Why this step runs without graphs."""
        if len(layers) != len(self.layers) or not all(map(_is, layers, self.layers)) or self._has_moved():
            self._look_at(layers)
        if self.never is None:
            reason = conditions.against_this_step()
            if reason is None and self.sharded is not None:
                reason = self.sharded.against()
            if reason is not None:
                return reason
            # The others are looked at when their graphs are about to be launched.
            everything = self.is_wary or not self.captured or self.sharded is not None
            if self.watch is None or not self.watch.begin(everything):
                if self.watch is not None:
                    self.changes = self.changes + 1 if self.quiet < _QUIET_STEPS else 1
                    self.quiet = 0
                    self._differs_behind = True
                self._look_at(self.layers)
            self.quiet += 1
            self.is_wary = False
        if self.never is None and self.changes > _MOST_CHANGES:
            self.never = "the layers' parameters, modules or settings change again and again"
        if self.never is None and self.watch is not None and self.watch.has_hooks():
            return HOOKED
        return self.never

    def reach(self, end: int) -> bool:
        """A step that has begun needs the layers before this one to be as they were. Whether they are."""
        self.is_wary = self.watch is None or not self.watch.reach(end)
        self._differs_behind |= self.is_wary
        return not self.is_wary

    def _look_at(self, layers: Sequence[Any]) -> None:
        self.retire()
        if self.layers:  # what others beside have found out holds for these, when they are first looked at
            for table in (self.notes, self.read, self.pays, self.ratios, self._seen):
                table.clear()
        self.layers, self.inner = list(layers), list(map(unwrapped, layers))
        how_sharded = sharded(self.layers, self.inner)
        self.sharded = how_sharded if isinstance(how_sharded, Sharded) else None
        device = _device_of(layers)
        if device != self.device:
            self.device = device
            self.recorder = None if device is None else conditions.recorder_for(device)
        self.never = conditions.against_these_layers(layers, how_sharded)
        if device is None:
            self.never = "layers without parameters of their own, as nn.DataParallel's copies are"
        elif self.recorder is None:
            self.never = f"tensors on {device}, which has no CUDA graphs"
        if self.never is None:
            self.watch = Watch(layers, self._is_called)
        self._say(self.never is None)

    def _is_called(self, hook: Any) -> bool:
        return collected.collects(hook) or (self.sharded is not None and self.sharded.is_own(hook))

    def _say(self, has_graphs: bool) -> None:
        self.has_graphs, self.without = has_graphs, 0
        if self.differentiates and not self.is_beside:
            host_time.say(self.layers, has_graphs)

    def ran(self, without_graphs: bool) -> None:
        """A step has run, without graphs although these pay. What follows from several is followed from now on, but
        not where layers are checkpointed: the second run of a layer is to compute what the first one has."""
        self.without = self.without + 1 if without_graphs else 0
        if self.has_graphs and self.without >= _IN_VAIN and not any(map(conditions.checkpoints, self.layers)):
            self._say(False)

    def _has_moved(self) -> bool:
        return _device_of(self.layers) != self.device

    def retire(self) -> None:
        """The graphs go. A step that is still to have its backward pass keeps what it needs, and the pool is not used
        before it is done."""
        self.watch = None
        self._drop()

    @property
    def _ways(self) -> tuple[Packs, Masks, Decoders]:
        """To pad a step where its layers are called."""
        return self.packs, self.masks, self.decoders

    def longer(self, args: Any, kwargs: Any) -> Longer | None:
        """How a step whose first layer is called with these is padded there, if it is: see bastile.graphs.longer."""
        ways = self._ways
        each = [lengths for way in ways for lengths in way.all_lengths]
        varied = [lengths.vary for lengths in each]
        found = next((step for way in ways if (step := way.of(self.inner, args, kwargs)) is not None), None)
        if [lengths.vary for lengths in each] != varied:
            self.start_over()  # those beside, when they are full
        if found is None or not any(isinstance(note, Note) and found.suits(note) for note in self.notes.values()):
            return None
        return found

    def never_longer(self) -> None:
        """Steps that are padded there cannot be captured."""
        for way in self._ways:
            way.lengths.never = True

    def do_not_pay(self, tokens: int) -> None:
        """Graphs of so many tokens, nor of more."""
        for lengths in (self.lengths, *[way.lengths for way in self._ways]):
            lengths.do_not_pay(tokens)

    def start_over(self) -> None:
        """Kinds that there have been will hardly come again, and others will: their graphs go, and their memory."""
        self._drop()
        if self.recorder is not None:
            self.recorder.tidy()

    def make_way(self, tokens: int) -> None:
        """Before graphs are captured of a step with so many. If that is more than ever, and the pool cannot grow, what
        is in it goes, for hardly a piece would be large enough; the others are captured again when they come, in pieces
        of this one's. What a pool grows by is to be what eager steps have left."""
        assert self.recorder is not None
        if not self.has_graphs:
            self._say(True)
        if self.differentiates:
            self._reserved.before_graphs(self.recorder)
        if tokens > self._most_tokens:
            if self.recorder.grows:
                self.recorder.tidy()
            else:
                self._drop()
            self._most_tokens = tokens

    def _drop(self) -> None:
        self.captured.clear()
        self._used.clear()
        self._most_tokens = 0
        if self._last is not None and self._last.is_free() and not self._last.gradients.are_held():
            self._last = None

    # ---- a step -------------------------------------------------------------------------------------------------

    def is_waiting(self) -> bool:
        """Whether the last pass has not had its backward pass, and still can."""
        before = self._passage()
        if before is None or before.is_finished:
            return False
        before.when_finished = self._one_beside_pays
        return True

    def _one_beside_pays(self) -> None:
        self.may_have_one_beside = True

    def and_beside(self) -> Iterator[Stack]:
        stack: Stack | None = self
        while stack is not None:
            yield stack
            stack = stack.beside

    def begin(self, key: Any, captured: Captured) -> Passage | str:
        """The memory of the pool becomes this step's, of this kind; or why it cannot."""
        before = self._passage()
        if before is not None and not before.is_finished:
            return "a step before has not had its backward pass yet"
        if self._last is not None and not self._last.is_free():
            return "someone still holds hidden states of a step before"
        if self._last is not None and self._last.gradients.are_held():
            if self._last.gradients.become_copies():
                self._gradients = Run.copied_to_stay
            else:
                self._gradients = Run.copied
                self._move()
                return "someone holds gradients of a step before, beside the parameters"
        if before is not None:
            before.is_over = True
        gradients: Callable[[Run], Iterable[torch.Tensor | None]] = Run.copied
        if self.sharded is not None:
            gradients = self.sharded.gradients
        elif captured.lends_gradients:
            gradients = self._gradients
        assert self.recorder is not None
        if self.differentiates:  # others come in the middle of a step
            self._reserved.begin(self.recorder)
        passage = Passage(captured, gradients, partial(_give_up, weakref.ref(self), key))
        self._passage, self._last = weakref.ref(passage), captured
        captured.begin()
        return passage

    def _move(self) -> None:
        """What has been lent is left to those who hold it."""
        assert self.recorder is not None
        self.captured.clear()
        self._used.clear()
        self._last = None
        self.recorder.anew()

    def see(self, key: Any) -> Captured | None:
        """Another step of this kind; its graphs, if it has some."""
        self.steps += 1
        found = self.captured.get(key)
        if found is not None:
            self._in_vain = 0
            self.captured.move_to_end(key)
            self._used[key] = self.steps
        elif key in self.notes:
            self._seen.setdefault(key, deque(maxlen=WORTH)).append(self.steps)
        return found

    def with_what_is_read(self, key: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """The key of a step whose first layer is given these tensors. What the layers read of them on the host, which
        may wait for the device, is part of it: the lengths of sequences that stand one behind another."""
        return *key, tuple([lengths_of(tensors[place]) for place in self.read.get(key, ()) if place < len(tensors)])

    def reads(self, key: Any, note: Note, tensors: Sequence[torch.Tensor]) -> Any:
        """A step of this key, whose first layer was given these tensors, was noted. Its key from now on."""
        self.read[key[:-1]] = sorted(note.read)
        while len(self.read) > _MOST_SEEN:
            del self.read[next(iter(self.read))]
        return self.with_what_is_read(key[:-1], tensors)

    def is_full(self) -> bool:
        return len(self.captured) >= MOST_CAPTURED

    def may_foresee(self) -> bool:
        """Whether a kind may be captured when it first comes."""
        return not self.is_full() and self._in_vain < MOST_IN_VAIN

    def has_room(self, key: Any) -> bool:
        """For graphs of this kind."""
        since, _ = self._short
        if self.is_full():
            since = max(since, self._used[next(iter(self.captured))])
        elif not since:
            return True
        seen = self._seen.get(key)
        return seen is not None and len(seen) == WORTH and seen[0] > since

    def runs_beside(self, tokens: int) -> None:
        """A step of so many tokens runs without graphs. Where memory is short, those of smaller ones make room for it,
        and do not come again as long as such steps do."""
        assert self.recorder is not None
        _, least = self._short
        if self.captured and tokens > self._most_tokens and self.recorder.is_short_of_memory():
            self.start_over()
            self._short = self.steps, tokens
        elif least and tokens >= least:
            self._short = self.steps, least

    def keep(self, key: Any, captured: Captured) -> None:
        self.captured[key] = captured
        self._used[key] = self.steps
        self._in_vain += captured.is_foreseen
        while len(self.captured) > MOST_CAPTURED:
            del self._used[self.captured.popitem(last=False)[0]]

    def look_at_backward(self, key: Any, note: Note, output: torch.Tensor) -> None:
        """A step that ends with this output was noted. What shows when its backward pass begins is noted then."""
        if output.requires_grad:
            output.register_hook(partial(_look, weakref.ref(self), key, note, output.device.type))

    def tidy_behind_backward(self) -> None:
        """The first backward pass has begun. When it ends, what activations had goes back to the driver: else the
        states of the optimiser, which it makes next, lie in pieces of that, and the rest can never go back."""
        if not self._is_tidy and self.recorder is not None:
            self._is_tidy = True
            torch.autograd.Variable._execution_engine.queue_callback(self.recorder.tidy)

    def note(self, key: Any, what: Note | str) -> None:
        self.notes[key] = what
        self.notes.move_to_end(key)
        while len(self.notes) > _MOST_SEEN:
            first = self.notes.popitem(last=False)[0]
            for table in (self.pays, self.ratios, self._seen):
                table.pop(first, None)


def _device_of(layers: Sequence[Any]) -> torch.device | None:
    first = next(layers[0].parameters(), None) if layers else None
    return None if first is None else first.device


def _look(stack: Callable[[], Stack | None], key: Any, note: Note, device: str, _: torch.Tensor) -> None:
    found = stack()
    if found is not None and found.notes.get(key) is note:
        found.note(key, note.in_backward(device))
        found.tidy_behind_backward()


def _give_up(stack: Callable[[], Stack | None], key: Any, reason: str) -> None:
    """Steps of this kind run without graphs from now on."""
    found = stack()
    if found is not None and found.captured.pop(key, None) is not None:
        del found._used[key]
        found.note(key, reason)


def _is(one: Any, other: Any) -> bool:
    return one is other
