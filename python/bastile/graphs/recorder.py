"""What records a function's work so that it can be repeated: a CUDA graph, or on a CPU the function itself.

What a recorded function writes lies at the same place each time. That place belongs to the recording while a step uses
it, and to the next recording afterwards: all that a model's recordings need lies in one pool, as large as the largest
of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch

from bastile.ops._growing import can_grow, growing

uses_of_storage: Callable[[int], int] = torch._C._storage_Use_Count


class Replayed(Protocol):
    def replay(self) -> None: ...


class Recorder(Protocol):
    """Of one model's recordings."""

    @property
    def grows(self) -> bool:
        """Whether a larger recording than any before makes the pool longer, instead of adding to it. Not asked while
        somebody else records."""

    def recording(self, before: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """What is recorded within belongs together, and may use memory that recordings before it use. before: is called
        first, where nothing is recorded yet."""

    def record(
        self, function: Callable[[], Sequence[torch.Tensor | None]]
    ) -> tuple[Replayed, list[torch.Tensor | None]]:
        """The function's work, and what it returns: tensors into which each replay writes anew. Within the same
        `recording()`, memory of a tensor that is no longer held may become another's."""

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, not held: for after the recording."""

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """A step begins that will write into these."""

    def anew(self) -> None:
        """What is recorded from now on uses no memory of what has been recorded."""

    def tidy(self) -> None:
        """Memory that is free goes back to the driver."""

    def reserved(self) -> int:
        """Bytes that PyTorch's allocator has of the driver now."""

    def most_reserved(self) -> int:
        """The most that it has had."""

    def is_short_of_memory(self) -> bool:
        """Whether the driver has little left to give."""

    def spare(self) -> int:
        """Bytes that may be kept from one step to the next for speed alone."""


#: By device, those of recorders that are gone: what cuBLAS has for them, 64 MiB on an H200, it keeps for good.
_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


class CudaRecorder:
    """Graphs of one device, in one memory pool of PyTorch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Its own: cuBLAS keeps a workspace for each stream, where the first capture has put it, in this pool.
        left = _streams.setdefault(device, [])
        self.stream = left.pop() if left else torch.cuda.Stream(device)
        weakref.finalize(self, left.append, self.stream).atexit = False
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.anew()

    @property
    def grows(self) -> bool:
        return can_grow(self.device)

    def anew(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self._in_pool: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def tidy(self) -> None:
        torch.cuda.empty_cache()

    def reserved(self) -> int:
        return self._reserved("current")

    def most_reserved(self) -> int:
        return self._reserved("peak")

    def _reserved(self, figure: str) -> int:
        try:  # torch.cuda.memory_reserved would name every figure that there is first, in each step
            return int(torch.cuda.memory_stats_as_nested_dict(self.device)["reserved_bytes"]["all"][figure])
        except RuntimeError:  # an allocator in the place of PyTorch's need not count
            return 0

    def is_short_of_memory(self) -> bool:
        free, total = torch.cuda.mem_get_info(self.device)
        return free < total // 8

    def spare(self) -> int:
        """A sixteenth of what PyTorch has had, or a part of the device's that nobody will miss."""
        _, total = torch.cuda.mem_get_info(self.device)
        return 0 if self.is_short_of_memory() else max(self.most_reserved() // 16, total // 512)

    @contextmanager
    def recording(self, before: Callable[[], None] | None = None) -> Any:
        self.graphs = []
        is_new = not self._in_pool
        if is_new:  # with the last of its graphs a pool is gone, and its handle is no longer valid
            self.anew()
        torch.cuda.synchronize(self.device)
        if before is not None:
            with torch.cuda.stream(self.stream):
                before()
            torch.cuda.synchronize(self.device)
        # What eager steps have left is needed here, not there. A pool that is there has room for what is smaller.
        if is_new or self.is_short_of_memory():
            self.tidy()
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            self.graphs = []  # who uses them holds them; a capture that failed leaves its memory to eager steps
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def record(
        self, function: Callable[[], Sequence[torch.Tensor | None]]
    ) -> tuple[Replayed, list[torch.Tensor | None]]:
        graph = torch.cuda.CUDAGraph()
        try:
            with growing() if self.grows else nullcontext():
                # Of this thread alone: others pin memory and ask events meanwhile.
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                outputs = list(function())
                graph.capture_end()
        except BaseException:
            with suppress(RuntimeError):  # what went wrong has ended it
                graph.capture_end()
            _leave_capture(self.device)
            raise
        self.graphs.append(graph)
        self._in_pool.add(graph)
        return graph, outputs

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor
        memory = torch.as_tensor(_Memory(storage, self.graphs), device=tensor.device)
        return _seen_as(tensor, memory.untyped_storage())

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        pass


def _leave_capture(device: torch.device) -> None:
    """A capture that failed leaves PyTorch's generator in it, and the next dropout would raise an error; one that
    succeeds takes it out."""
    graph = torch.cuda.CUDAGraph()
    with suppress(RuntimeError):
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=device)  # PyTorch warns of a graph without work
        graph.capture_end()


def _seen_as(tensor: torch.Tensor, memory: torch.UntypedStorage) -> torch.Tensor:
    """This memory as the tensor sees its own."""
    seen = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return seen.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Memory:
    """Bytes that are there as long as the graphs of a pool are: who sees them as a tensor holds this, and so them."""

    def __init__(self, storage: torch.UntypedStorage, graphs: list[torch.cuda.CUDAGraph]) -> None:
        self.graphs = graphs
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 2,
        }


class Repeated:
    """A function that is called again, and its results put where the first ones were."""

    def __init__(self, function: Callable[[], Sequence[torch.Tensor | None]]) -> None:
        self.function = function
        memory: dict[int, torch.UntypedStorage] = {}  # what shares some goes on to
        self.outputs = [None if t is None else self._moved(t, memory) for t in function()]

    @staticmethod
    def _moved(tensor: torch.Tensor, memory: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in memory:
            memory[storage.data_ptr()] = storage.clone()
        return _seen_as(tensor, memory[storage.data_ptr()])

    def replay(self) -> None:
        for place, made in zip(self.outputs, self.function(), strict=True):
            if place is not None and made is not None:
                place.copy_(made.detach())


class RepeatingRecorder:
    """For tests where there is no GPU: everything around the graphs is as it is there."""

    grows = True

    def anew(self) -> None:
        pass

    def tidy(self) -> None:
        pass

    def reserved(self) -> int:
        return 0

    def most_reserved(self) -> int:
        return 0

    def is_short_of_memory(self) -> bool:
        return False

    def spare(self) -> int:
        return 0

    @contextmanager
    def recording(self, before: Callable[[], None] | None = None) -> Any:
        state = torch.get_rng_state()
        try:
            if before is not None:
                before()
            yield
        finally:
            torch.set_rng_state(state)

    def record(
        self, function: Callable[[], Sequence[torch.Tensor | None]]
    ) -> tuple[Replayed, list[torch.Tensor | None]]:
        repeated = Repeated(function)
        return repeated, repeated.outputs

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        memory = torch.from_numpy(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        return _seen_as(tensor, memory.untyped_storage())

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """On a GPU this memory is by now full of what the last step left there."""
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
