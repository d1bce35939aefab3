"""The call of a model for one token more, captured once and replayed for those that follow, of one text.

What it is given is the same each time but for tensors' values: the last tokens, their positions and the mask, which are
copied to where the graph reads them, and a cache that lies where it did. A model's first call for a token runs without
a graph: it compiles what is to be compiled, and chooses what is to be chosen. Of later texts the first one is captured
at once, if such calls were before; or is there, kept (kept_calls.py)."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bastile.graphs import conditions
from bastile.graphs.arguments import CannotCapture, Given, Place, rebuilt, signature
from bastile.graphs.autocast import Autocast
from bastile.graphs.kept_calls import Call, Calls
from bastile.graphs.recorder import Recorder, Replayed
from bastile.graphs.token_masks import LateMasks, late_masks_of
from bastile.models.sdpa import masks_as_biases
from bastile.report import Tally

#: Other kinds of calls than the one that is captured, before none is captured any more.
_MOST_CHANGES = 2
#: Kinds of calls that a model remembers to have captured.
_MOST_KNOWN = 64


class Shelf:
    """What a model has of one text for the next: a pool of memory, which a graph holds that is never replayed again. A
    new pool would send all of PyTorch's free memory back to the driver, and training asks for it again."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.graph: Replayed | None = None
        self.known: deque[Any] = deque(maxlen=_MOST_KNOWN)  # what has been captured before
        self.lock = threading.Lock()  # one text at a time: two would write over each other's memory
        self.calls = Calls(recorder)
        self.makes_masks = True  # within a graph; False where that has failed
        self.decoding: Decoding | None = None  # of the text that is generated

    @contextmanager
    def generates(self, decoding: Decoding) -> Iterator[None]:
        """Within, a text is generated."""
        self.decoding = decoding
        try:
            yield
        finally:
            self.decoding = None
            self.calls.end()


_shelves: weakref.WeakKeyDictionary[nn.Module, Shelf] = weakref.WeakKeyDictionary()


def shelf_of(model: nn.Module, device: torch.device) -> Shelf | None:
    """None: there are no graphs on this device."""
    found = _shelves.get(model)
    if found is None and (recorder := conditions.recorder_for(device)) is not None:
        found = _shelves.setdefault(model, Shelf(recorder))
    return found


def forget() -> None:
    _shelves.clear()


class Decoding:
    """The calls for one text.

    Args:
        model: what is called.
        cache: what it is given under this name (RoomyCache); each call is told to it.
        name: see cache.
        shelf: the model's.
        tally: counts replayed calls, and says why there are none.
    """

    def __init__(self, model: Any, cache: Any, name: str, shelf: Shelf, tally: Tally) -> None:
        self.model, self.cache, self.name, self.shelf, self.tally = model, cache, name, shelf, tally
        self.is_first, self.changes = True, 0
        # Where it is changed, it has other kernels.
        self.of_model = model.training, len(conditions.modules_within(model))
        self.gave_up = False
        self.structure: Any = None  # of the call that is captured; None: there is none
        self.places: list[Place] = []
        self.outputs: Any = None
        self.late: dict[str, LateMasks] = {}

    def __call__(self, **inputs: Any) -> Any:
        outputs = None if self.gave_up else self._replayed(inputs)
        if outputs is None:
            outputs = self.model(**_with_masks_of_now(inputs))
        self.is_first = False
        if self.cache.advance():
            self.structure = None
        return outputs

    def _replayed(self, inputs: dict[str, Any]) -> Any:
        """None: this call is for the model."""
        try:
            room = self.cache.room
            if inputs.get(self.name) is not self.cache:
                raise CannotCapture("the model was called without its cache")
            given, late = Given(), late_masks_of(inputs)
            self.late = late
            arguments = {**inputs, **{name: masks.structure() for name, masks in late.items()}}
            structure = given.structure({name: value for name, value in arguments.items() if name != self.name})
            kind = structure, room, self.of_model
            if self.is_first and kind not in self.shelf.known:
                return None
            if structure != self.structure:
                try:
                    self._look_up(structure, given.tensors)
                except (CannotCapture, RuntimeError):
                    if not late:
                        raise
                    self.shelf.makes_masks = False  # without them it may be captured
                    for masks in late.values():
                        masks.masks.are_late = False
                    return self._replayed(_with_masks_of_now(inputs))
                if kind not in self.shelf.known:
                    self.shelf.known.append(kind)
            for place, tensor in zip(self.places, given.tensors, strict=True):
                place.fill(tensor)
        except (CannotCapture, RuntimeError) as error:  # of CUDA, and for want of memory, too
            self.structure, self.outputs, self.gave_up = None, None, True
            self.shelf.known.clear()
            why = str(error).strip().partition("\n")[0]
            self.tally.step_aside(f"the call for one token cannot be captured: {why}")
            return None
        assert self.shelf.graph is not None
        self.shelf.graph.replay()
        self.tally.count()
        return self.outputs

    def _look_up(self, structure: Any, tensors: list[torch.Tensor]) -> None:
        """The call of this structure, captured now if it is not kept."""
        device, calls = tensors[0].device, self.shelf.calls
        makers = tuple((name, masks.masks.maker) for name, masks in self.late.items())
        autocast = Autocast(device.type).key()
        key = structure, self.cache.room, self.of_model, makers, autocast, conditions.settings()
        call = calls.find(key, self.model)
        if call is None:
            if self.structure is not None:
                self.changes += 1
                if self.changes > _MOST_CHANGES:
                    raise CannotCapture("arguments that change from token to token")
            call = self._capture(structure, tensors, key)
        self.structure, self.places, self.outputs = structure, call.places, call.outputs_with(self.cache)
        self.shelf.graph = call.graph

    def _capture(self, structure: Any, tensors: list[torch.Tensor], key: Any) -> Call:
        places = [Place(signature(tensor)) for tensor in tensors]
        arguments = rebuilt(structure, [place.tensor for place in places])
        returned: list[Any] = []
        device, shelf = tensors[0].device, self.shelf
        of_host, generator = conditions.host_random_state(device), torch.get_rng_state()

        def call() -> list[torch.Tensor | None]:
            now = shelf.decoding  # what stands for a graph on a CPU calls again, in another text, too
            assert now is not None
            with masks_as_biases():
                made = {name: masks.of(arguments[name]) for name, masks in now.late.items()}
                returned[:] = [now.model(**{**arguments, **made, now.name: now.cache})]
            return list(_tensors_of(returned[0], now.cache).values())

        with shelf.calls.captures(key, self.model, self.cache) as kept:
            with self.shelf.recorder.recording():
                # The one before holds the pool until this one does.
                graph, made = self.shelf.recorder.record(call)
                host_draws = conditions.host_random_state(device) != of_host
            if host_draws and conditions.host_decides(self.model):
                torch.set_rng_state(generator)
                raise CannotCapture("the host draws random numbers within it")
            outputs = copy.copy(returned[0])
            names = [name for name, value in outputs.items() if value is self.cache]
            for name, tensor in zip(_tensors_of(outputs, self.cache), made, strict=True):
                outputs[name] = tensor
            for name in names:
                outputs[name] = None
            found = Call(graph, places, outputs, names[0] if names else None)
            kept.append(found)
        return found


def _with_masks_of_now(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, **{name: masks.now() for name, masks in late_masks_of(inputs).items()}}


def _tensors_of(outputs: Any, cache: Any) -> dict[str, torch.Tensor]:
    """What a model returned that is not its cache."""
    found = {name: value for name, value in outputs.items() if value is not cache}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise CannotCapture(f"the model returns {name}")
    return found
