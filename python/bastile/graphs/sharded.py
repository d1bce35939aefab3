"""Layers whose weights FSDP2 shards, as graphs.

FSDP2 gathers a layer's weights in front of its call and lets go of them behind it, in memory that lies elsewhere each
time; a graph reads where it read before. Here gathered weights lie in memory that stays: one layer's at a time, for one
layer alone has them between its hooks, and so they take no more of it than FSDP2 does. It fills that memory as ever, by
its hooks around the layer's call, and each layer is a graph of its own, replayed within them: what is sent, when, and
what becomes of gradients is FSDP2's. Where a process replays a layer and another one computes it, both send the same.

A layer's weights never move while autograd has views of them for a backward pass, which reads where they were.

Layers that FSDP2 shards in another way than one unit each, whose weights are let go of behind the layer, in both
passes, run without graphs."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bastile.graphs.recorder import Recorder, uses_of_storage
from bastile.models.changes import unseen
from bastile.models.structure import each, parameters_of

if TYPE_CHECKING:
    from bastile.graphs.runs import Run

_API = "torch.distributed.fsdp"
_FORWARD = "forward"
_KNOWN = "_bastile_sharded"  # on a stack's first group: all that go through these layers share it
#: Why such layers have no graphs.
_UNITS = "weights that FSDP shards otherwise than by units of one layer each"
_STAY = "weights that FSDP does not let go of behind each layer"
_OTHERWISE = "weights that FSDP gathers in a way of its own: from the host's memory, or by a tensor class"
_UNKNOWN = "an FSDP whose code is not known"
_WHOLE = "weights of sharded layers that are whole when a step begins"
_MOVED = "weights of sharded layers that were gathered elsewhere"
_TOGETHER = (
    "bastile: the weights of two sharded layers are whole at a time, and a backward pass is to compute with those of "
    "both; bastile.apply(cuda_graphs=False) gives each memory of its own"
)


@dataclass(frozen=True)
class Gathered:
    """A layer's weights as they are within its hooks, by the numbers of those that its modules have outside; and their
    memory, by the numbers of these."""

    parameters: Mapping[int, nn.Parameter]
    memory: Mapping[int, torch.Tensor]


class _Memory:
    """Where the weights of one layer at a time lie."""

    def __init__(self, sizes: tuple[Any, ...], device: torch.device) -> None:
        self.sizes = sizes
        self.tensors = [torch.empty(count, dtype=dtype, device=device) for count, dtype in sizes]
        self.holder: Callable[[], Any] = lambda: None  # the group whose weights were put there last


class Sharded:
    """The weights of a stack's layers, one group of FSDP2's each."""

    def __init__(self, units: Sequence[Any], groups: Sequence[Any], states: set[int]) -> None:
        """units: the layers, or wrappers around them, whichever FSDP2's hooks are on. states: numbers of what FSDP2 has
        for either."""
        self._units, self._groups, self._states = units, groups, states
        self._memory: dict[int, _Memory] = {}  # by group
        self._recorder: Any = None

    def is_of(self, units: Sequence[Any], groups: Sequence[Any]) -> bool:
        return list(map(id, self._units)) == list(map(id, units)) and self._groups == groups

    def against(self) -> str | None:
        """Why a step that begins runs without graphs."""
        for group in self._groups:
            if not group.is_sharded:
                return _WHOLE
            if not _lets_go(group):
                return _STAY
        for group in self._groups:
            memory = self._memory.get(id(group))
            if memory is not None and not _is_in(group, memory):
                if _sizes(group) != memory.sizes or _is_awaited(group):
                    return _MOVED
                _put(group, memory, self._recorder)
        return None

    def is_own(self, hook: Any) -> bool:
        """Whether FSDP2 has put it there, around one of the layers: where the weights are, and it is called around the
        layer's graph, too; or where there are none, and it does nothing."""
        return id(getattr(hook, "__self__", None)) in self._states

    def changes_type(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether its hooks cast what a layer is given, or returns: the hidden states first."""
        floats = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        policies = [group.mp_policy for group in self._groups]
        into = {policy.param_dtype for policy in policies if policy.cast_forward_inputs and policy.param_dtype}
        back = {policy.output_dtype for policy in policies if policy.output_dtype}
        return bool(into | back) and len(floats | into | back) > 1

    # ---- memory -------------------------------------------------------------------------------------------------

    def settle(self, recorder: Recorder) -> bool:
        """From now on gathered weights lie where they stay. False: some have never been gathered, or a backward pass
        that is to come reads them where they were."""
        others = [group for group in self._groups if id(group) not in self._memory]
        if not all(hasattr(p, "_unsharded_param") for group in others for p in group.fsdp_params):
            return False
        if any(map(_is_awaited, others)):
            return False
        self._recorder = recorder
        shared = {memory.sizes: memory for memory in self._memory.values()}
        for group in others:
            sizes = _sizes(group)
            if sizes not in shared:
                shared[sizes] = _Memory(sizes, group.device)
            self._memory[id(group)] = shared[sizes]
            _put(group, shared[sizes], recorder)
        return True

    def leave(self) -> None:
        """Gathered weights lie where FSDP2 puts them, again; but those that a backward pass is still to read."""
        for group in self._groups:
            if id(group) in self._memory and not _is_awaited(group):
                del self._memory[id(group)]
                _leave(group)

    def gathered(self, index: int) -> Gathered:
        group = self._groups[index]
        for p in group.fsdp_params:
            p._unsharded_param.requires_grad_(p.sharded_param.requires_grad)
        pairs = list(zip(group.fsdp_params, self._memory[id(group)].tensors, strict=True))
        return Gathered(
            {id(p.sharded_param): p._unsharded_param for p, _ in pairs},
            {id(p._unsharded_param): _as_weight(p, tensor) for p, tensor in pairs},
        )

    def is_in_place(self, index: int) -> bool:
        group = self._groups[index]
        memory = self._memory.get(id(group))
        return memory is not None and _is_in(group, memory)

    # ---- a step -------------------------------------------------------------------------------------------------

    def called(self, index: int, replay: Callable[[torch.Tensor], torch.Tensor], args: Any, kwargs: Any) -> Any:
        """Calls a layer, and so FSDP2's hooks around it, with this in the place of its forward, if its weights are in
        their place within."""
        unit = self._units[index]
        scope, before, plain = vars(unit), vars(unit).get(_FORWARD), unit.forward

        def forward(hidden: torch.Tensor, *rest: Any, **more: Any) -> Any:
            return replay(hidden) if self.is_in_place(index) else plain(hidden, *rest, **more)

        with unseen:
            scope[_FORWARD] = forward
        try:
            return unit._call_impl(*args, **kwargs)
        finally:
            with unseen:
                if before is None:
                    del scope[_FORWARD]
                else:
                    scope[_FORWARD] = before

    def gradients(self, run: Run) -> Iterable[torch.Tensor | None]:
        """Those of a layer's weights: copies, for the next layer's graph writes where they were made, and before FSDP2
        sends them if they are to be added to those of another pass."""
        if not self.is_in_place(run.first):
            raise RuntimeError(_TOGETHER)
        return run.copied()


def sharded(wrapped: Sequence[Any], layers: Sequence[Any]) -> Sharded | str | None:
    """wrapped: the layers within what checkpoints them, if something does. None: FSDP2 has to do with none of these
    layers. A string: why they can have no graphs."""
    kind = getattr(sys.modules.get(_API), "FSDPModule", None)
    both = [each for pair in zip(wrapped, layers, strict=True) for each in dict.fromkeys(pair)]
    if kind is None or not any(isinstance(each, kind) for each in both):
        return None
    groups = []
    try:
        units = [each for each in both if isinstance(each, kind) and _groups_of(each)]
        if len(units) != len(layers) or not all(map(_is_either, units, wrapped, layers)):
            return _UNITS
        for unit in units:
            group = _group_of(unit)
            if isinstance(group, str):
                return group
            groups.append(group)
    except AttributeError:
        return _UNKNOWN
    known = getattr(groups[0], _KNOWN, None)
    if known is None or not known.is_of(units, groups):
        states = {id(each._get_fsdp_state()) for each in both if isinstance(each, kind)}
        known = Sharded(units, groups, states)
        setattr(groups[0], _KNOWN, known)
    return known


def _is_either(unit: Any, outer: Any, inner: Any) -> bool:
    return unit is outer or unit is inner


def _groups_of(unit: Any) -> list[Any]:
    """Of its weights."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _group_of(unit: Any) -> Any:
    """Its group of weights; or why it has no graphs."""
    groups = _groups_of(unit)
    if len(groups) != 1 or tuple(unit._get_fsdp_state()._modules) != (unit,):
        return _UNITS
    group = groups[0]
    own = {id(there) for p in group.fsdp_params for there in (p.sharded_param, getattr(p, "_unsharded_param", None))}
    if any(id(p) not in own for p in parameters_of(list(each(unit)))):
        return _UNITS
    if not _lets_go(group):
        return _STAY
    usual = type(group.offload_policy).__name__ == "OffloadPolicy" and not any(map(_is_unusual, group.fsdp_params))
    return group if usual else _OTHERWISE


def _lets_go(group: Any) -> bool:
    return bool(
        group._reshard_after_forward
        and not group._use_post_forward_mesh
        and group.reshard_after_backward
        and group.unshard_in_backward
    )


def _is_unusual(p: Any) -> bool:
    local = p._sharded_local_tensor
    return p.is_dtensor or p.offload_to_cpu or hasattr(local, "fsdp_pre_all_gather") or type(local) is not torch.Tensor


def _sizes(group: Any) -> tuple[Any, ...]:
    return tuple((p.all_gather_outputs[0].numel(), p.all_gather_outputs[0].dtype) for p in group.fsdp_params)


def _is_in(group: Any, memory: _Memory) -> bool:
    each = zip(group.fsdp_params, memory.tensors, strict=True)
    return all([p.all_gather_outputs[0].data_ptr() == there.data_ptr() for p, there in each])


def _is_awaited(group: Any) -> bool:
    """Whether autograd has views of its weights."""
    storages = [p.all_gather_outputs[0].untyped_storage() for p in group.fsdp_params]
    return any([uses_of_storage(storage._cdata) > _own_uses() for storage in storages])


@functools.cache
def _own_uses() -> int:
    """Of a gathered weight's memory: by the tensor that FSDP2 fills, the parameter, and whoever asks."""
    filled = torch.empty(1)
    parameter = nn.Parameter(torch.as_strided(filled, (1,), (1,), 0))
    storage = filled.untyped_storage()
    uses = uses_of_storage(storage._cdata)
    del parameter
    return uses


def _as_weight(p: Any, tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(tensor, p._orig_size, p._contiguous_orig_stride, 0)


def _move(group: Any, tensors: Sequence[torch.Tensor]) -> None:
    for p, tensor in zip(group.fsdp_params, tensors, strict=True):
        p.all_gather_outputs = [tensor]
        p._unsharded_param.data = _as_weight(p, tensor)


def _put(group: Any, memory: _Memory, recorder: Recorder) -> None:
    """FSDP2 fills this memory as long as no other layer's weights are in use there, and does not free it. To each group
    it is memory of its own, by which is known whose weights autograd has views of."""
    _move(group, list(map(recorder.borrowed, memory.tensors)))

    def wait_for_unshard() -> Any:
        if group._all_gather_result is not None:
            holder = memory.holder()
            is_taken = holder is not None and holder is not group and holder.is_unsharded and _is_in(holder, memory)
            if is_taken and not _is_awaited(group):
                _leave(group)
            elif is_taken and _is_awaited(holder):
                raise RuntimeError(_TOGETHER)
            else:
                if is_taken:
                    _leave(holder)
                memory.holder = weakref.ref(group)
        return type(group).wait_for_unshard(group)

    group.wait_for_unshard = wait_for_unshard
    for p in group.fsdp_params:
        p.free_unsharded_param = _nothing


def _leave(group: Any) -> None:
    was_whole = group.is_unsharded
    before = [p.all_gather_outputs[0] for p in group.fsdp_params]
    _move(group, [tensor.clone() if was_whole else torch.empty_like(tensor) for tensor in before])
    vars(group).pop("wait_for_unshard", None)
    for p in group.fsdp_params:
        vars(p).pop("free_unsharded_param", None)
        if not was_whole:
            p.free_unsharded_param()


def _nothing() -> None:
    pass
