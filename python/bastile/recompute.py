"""Outputs that autograd keeps only to read again are dropped, and made again when the backward pass asks for them.

A linear layer keeps its input for its weight's gradient. Where that input is the output of one of our operators, and
the operator keeps its own inputs anyway, those are enough: the same kernel on the same inputs gives the same bits.

While `recomputing()` is active in a thread, its saved-tensor hooks see every tensor that autograd keeps. Operators tell
what they made with `offer`: the forward operator and its inputs. Of a tensor that is such an output, seen as any view
of the whole, only its shape and the recipe are kept. Several layers may keep one output (the projections of queries,
keys and values): it is made once for all of them, as long as they ask for it one after the other.

Autograd does not compare version counters where hooks are in force, so these hooks do."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from bastile.ops._late import in_checkpoint

#: Each tensor that autograd keeps costs the host a few microseconds here, which a GPU with little to do would wait
#: for, and the kernels that make it again half a per cent of a step. Below so many tokens memory is not short either:
#: of Qwen3-8B the peak of a step at 2048 tokens is the same, at 4096 it is 4 % higher without.
DEFAULT_MIN_TOKENS = 6144

_min_tokens: int | None = None

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_hooks_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


def set_recompute(min_tokens: int | None) -> None:
    """Sets from how many tokens a batch on (sequences times length) patched models recompute activations; None: the
    default (or BASTILE_RECOMPUTE_TOKENS). It holds for forward passes that begin from now on, in every thread.

    Raises:
        ValueError: for a negative number.
    """
    global _min_tokens
    if min_tokens is not None and min_tokens < 0:
        raise ValueError(f"set_recompute: min_tokens is {min_tokens}; a number of tokens, 0 or more, is needed")
    _min_tokens = min_tokens


def min_tokens() -> int:
    """From how many tokens on recomputation is worth its host time."""
    if _min_tokens is not None:
        return _min_tokens
    setting = os.environ.get("BASTILE_RECOMPUTE_TOKENS")
    if setting is None:
        return DEFAULT_MIN_TOKENS
    if not setting.isdecimal():
        raise ValueError(f"BASTILE_RECOMPUTE_TOKENS is {setting!r}; a number of tokens, 0 or more, is needed")
    return int(setting)


class _Call:
    """A call of a forward operator that can be repeated."""

    __slots__ = ("forward", "inputs", "stream", "uses")

    def __init__(self, forward: Callable[..., Any], inputs: tuple[Any, ...], stream: int | None):
        self.forward = forward
        self.inputs = inputs  # tensors as they are packed, everything else as it is
        self.stream = stream
        self.uses = 0  # how many saved tensors were dropped in favour of it

    def can_be_kept(self) -> bool:
        """Whether the inputs are still there. A weight that is sharded alone, apart from the layer it is in, is freed
        when its module has run, and is not back when others want the output."""
        return self.uses > 0 or not any(_is_freed(i[0]) for i in self.inputs if isinstance(i, tuple))

    def repeat(self) -> tuple[torch.Tensor, ...]:
        inputs = [_input(i) if isinstance(i, (tuple, _Dropped)) else i for i in self.inputs]
        with torch.no_grad():
            outputs = self.forward(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)


class _Dropped:
    """A saved tensor that is made again: which output of which call, and how it was seen."""

    __slots__ = ("call", "position", "shape", "stride")

    def __init__(self, call: _Call, position: int, tensor: torch.Tensor):
        self.call = call
        self.position = position
        self.shape = tensor.shape
        self.stride = tensor.stride()
        call.uses += 1

    def made_again(self) -> torch.Tensor:
        output = _thread.last.outputs_of(self.call)[self.position]
        return output.as_strided(self.shape, self.stride, output.storage_offset())


class _Offer:
    """An output that lives, and may be dropped where it is saved."""

    __slots__ = ("call", "output", "position", "version")

    def __init__(self, output: torch.Tensor, call: _Call, position: int):
        # An address alone may by now be another tensor's.
        self.output = weakref.ref(output)
        self.version = output._version
        self.call = call
        self.position = position

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor, which begins at the offer's address, holds the output's elements and no others."""
        output = self.output()
        return (
            output is not None
            and output.data_ptr() == tensor.data_ptr()
            and output._version == self.version
            and tensor.dtype is output.dtype
            and tensor.numel() == output.numel()
            and _is_dense(tensor)
            and _stream(tensor) == self.call.stream
            and self.call.can_be_kept()
        )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements, in some order, fill a piece of memory."""
    if tensor.is_contiguous():
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps) == tensor.numel()


def _is_freed(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel()) and tensor.untyped_storage().size() == 0


def _stream(tensor: torch.Tensor) -> int | None:
    """The stream that work on this tensor is queued on."""
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else None


class _Last:
    """The outputs made last in one thread, until all who saved them have read them or another call's are wanted."""

    __slots__ = ("call", "left", "outputs", "stream", "task", "versions")

    def __init__(self) -> None:
        self.task: int = -1
        self.forget()

    def forget(self) -> None:
        self.call: _Call | None = None
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.left = 0

    def outputs_of(self, call: _Call) -> tuple[torch.Tensor, ...]:
        task = torch._C._current_graph_task_id()
        if self.call is call and self.task == task and self._untouched():
            outputs = self.outputs
            self.left -= 1
            if self.left == 0:
                self.forget()
            return outputs
        self.forget()
        outputs = call.repeat()
        if call.uses > 1 and task != -1:  # -1: someone looks at the graph outside a backward pass
            if self.task != task:
                self.task = task
                # A backward pass that needs only a part of the graph leaves readers out.
                torch.autograd.Variable._execution_engine.queue_callback(self.forget)
            self.call, self.outputs, self.left = call, outputs, call.uses - 1
            self.versions = [output._version for output in outputs]
            self.stream = _stream(outputs[0])
        return outputs

    def _untouched(self) -> bool:
        return self.stream == _stream(self.outputs[0]) and all(
            output._version == version for output, version in zip(self.outputs, self.versions, strict=True)
        )


class _Thread(threading.local):
    offers: dict[int, _Offer] | None = None  # by address; None: not active
    last_layer: frozenset[Any] = frozenset()  # its modules
    pack: Callable[[torch.Tensor], Any] | None = None

    def __init__(self) -> None:
        self.last = _Last()


_thread = _Thread()


#: A saved tensor that stays, and its version when it was saved.
_Kept = tuple[torch.Tensor, int]


def _packing(offers: dict[int, _Offer]) -> Callable[[torch.Tensor], _Kept | _Dropped]:
    find = offers.get

    def pack(tensor: torch.Tensor) -> _Kept | _Dropped:
        try:
            found = find(tensor.data_ptr()) if offers else None
        except RuntimeError:  # sparse tensors and some subclasses have no address
            found = None
        if found is not None and found.covers(tensor):
            return _Dropped(found.call, found.position, tensor)
        # Were a node to hold its own output, with that output's way back to the node, neither would ever be freed.
        # Leaves have no such way, and stay themselves, for sharding may exchange what lies behind a parameter.
        return (tensor if tensor.is_leaf else tensor.detach()), tensor._version

    return pack


#: Of hooks that keep every tensor as it is.
_keep = _packing({})


def _unpack(packed: _Kept | _Dropped) -> torch.Tensor:
    if isinstance(packed, _Dropped):
        return packed.made_again()
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            f"bastile: a {tensor.dtype} tensor of shape {list(tensor.shape)} that the backward pass needs has been "
            f"modified by an inplace operation: it was saved at version {version} and is at version {tensor._version}"
        )
    return tensor


def _input(packed: _Kept | _Dropped) -> torch.Tensor:
    tensor = _unpack(packed).detach()
    if _is_freed(tensor):
        raise RuntimeError(
            f"bastile: a tensor of shape {list(tensor.shape)} from which an activation is to be recomputed has been "
            "freed since; use bastile.apply(recompute=False)"
        )
    return tensor


@contextmanager
def recomputing(last: Iterable[Any] = ()) -> Iterator[None]:
    """Within, autograd does not keep what operators offer. Nothing changes where nothing is recorded, under
    torch.compile and torch.func, and where other saved-tensor hooks are in force (activation checkpointing or
    offloading): these have the tensors for themselves. last: the modules of the layer that runs last, whose backward
    pass comes first."""
    if not torch.is_grad_enabled() or not _hooks_allowed() or _top_hooks(False) is not None:
        yield
        return
    offers: dict[int, _Offer] = {}
    pack = _packing(offers)
    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        _thread.offers, _thread.pack, _thread.last_layer = offers, pack, frozenset(last)
        try:
            yield
        finally:
            _thread.offers = _thread.pack = None
            _thread.last_layer = frozenset()
            # Every saved tensor holds `pack` until its node is done: the inputs of all calls must not hang on that.
            offers.clear()


def is_of_last_layer(module: Any) -> bool:
    """Whether this module is of the layer after which a model's output head has what it takes for a loss: most of a
    step's memory is in use then. What that layer keeps is read soon after, and costs all others nothing to be made
    again."""
    return not is_compiling() and module in _thread.last_layer and is_recomputing()


def is_recomputing() -> bool:
    """Whether the saved-tensor hooks that are in force in this thread are those of `recomputing()`."""
    hooks = _top_hooks(False)
    return hooks is not None and hooks[0] is _thread.pack


def hooks_below() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """What saved-tensor hooks of ours call for tensors that they leave alone: the hooks of `recomputing()` where these
    are in force, such as keep each tensor where none are; None where those of others are, or none are allowed."""
    if not _hooks_allowed():
        return None
    hooks = _top_hooks(False)
    if hooks is None:
        return _keep, _unpack
    return hooks if hooks[0] is _thread.pack else None


class Again(NamedTuple):
    """How a tensor is had again, bit by bit: the first result of forward of these inputs, where each None in `others`
    is the next of the tensors."""

    forward: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    others: tuple[Any, ...]
    version: int  # of the tensor

    def without_tensors(self) -> Again:
        return self._replace(tensors=())

    def made(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        left = iter(tensors)
        outputs = self.forward(*[next(left) if other is None else other for other in self.others])
        return outputs[0] if isinstance(outputs, tuple) else outputs


_AGAIN = "_bastile_again"  # of a tensor, what is noted of it


def _note(forward: Callable[..., Any], inputs: tuple[Any, ...], output: torch.Tensor | None) -> None:
    if output is None or any([each is None for each in inputs]):
        return
    tensors = tuple([each.detach() for each in inputs if isinstance(each, torch.Tensor)])
    others = tuple([None if isinstance(each, torch.Tensor) else each for each in inputs])
    setattr(output, _AGAIN, Again(forward, tensors, others, output._version))


def again(tensor: torch.Tensor) -> Again | None:
    """How this tensor is had again, where an operator has offered it within a checkpoint."""
    found = vars(tensor).get(_AGAIN)
    return found if found is not None and found.version == tensor._version else None


def offer(
    forward: Callable[..., Any],
    inputs: tuple[Any, ...],
    *outputs: torch.Tensor | None,
    is_inner: bool = False,
    inputs_stay: bool = False,
) -> None:
    """For operators, after a call: `outputs` can be had again as the first results of forward(*inputs), bit by bit and
    in the same memory layout (None: not this one).

    An operator offers only what follows from the tensors that it keeps for its own backward pass. `forward` gets the
    inputs detached and runs without autograd. An output that requires no gradient is passed over: then the operator
    keeps nothing. is_inner: within a node's forward, where nothing requires one, of what that node keeps. inputs_stay:
    whether they are there for as long as the outputs anyway: within a checkpoint a node may ask for them then, by
    `again`."""
    if is_compiling():
        return
    hooks = _top_hooks(False)
    if hooks is None:
        return
    pack, offers = _thread.pack, _thread.offers
    if pack is None or offers is None or hooks[0] is not pack:
        if inputs_stay and in_checkpoint():
            _note(forward, inputs, outputs[0])
        return
    call = None
    for position, output in enumerate(outputs):
        if output is None or not (is_inner or output.requires_grad) or not output.numel() or not _is_dense(output):
            continue
        if type(output) is FakeTensor:  # which has no address: what a step would do, it does now
            with torch.no_grad():
                forward(*inputs)
            return
        if call is None:
            kept = tuple([pack(i) if isinstance(i, torch.Tensor) else i for i in inputs])
            call = _Call(forward, kept, _stream(output))
        offers[output.data_ptr()] = _Offer(output, call, position)
