"""Pools of graphs that grow at their end, and the setting of PyTorch's allocator that makes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import bastile
from bastile.graphs import recorder
from bastile.graphs.stack import _stacks
from bastile.ops import _growing as growing
from conftest import tiny_model
from graphing import DEVICE, ON_CUDA, batch_of, pretend_cuda

ON, OFF = "expandable_segments:True", "expandable_segments:False"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those in force, the latest last."""
    found = [""]
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: found[-1], raising=False)
    return found


@pytest.mark.parametrize("said", ["", "max_split_size_mb:128", "roundup_power2_divisions:[64:8,>:1]"])
def test_others_stay_in_force(said: str, settings: list[str]) -> None:
    settings.append(said)

    def within() -> None:
        with growing.growing(), growing.growing():
            assert settings[-1] == ",".join(filter(None, [said, ON]))
            raise KeyError

    with pytest.raises(KeyError):
        within()
    assert settings[-2:] == [",".join(filter(None, [said, OFF])), said]


@pytest.mark.parametrize("said", [ON, OFF])
def test_what_the_user_has_said_holds(said: str, settings: list[str]) -> None:
    settings.append(said)
    with growing.growing():
        pass
    assert settings == ["", said]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_releases_that_do_not_tell(name: str, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    monkeypatch.setenv(name, "max_split_size_mb:64")
    with growing.growing():
        assert settings[-1] == f"max_split_size_mb:64,{ON}"
    assert settings[-1] == "max_split_size_mb:64"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's own allocator, of a device that there need not be, whose answer is not kept."""
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    growing._can_grow.cache_clear()
    yield
    growing._can_grow.cache_clear()


@pytest.mark.parametrize(("expandable", "grows"), [([17], True), ([18], False), ([], False)])
def test_memory_that_was_asked_for_tells(
    expandable: list[int], grows: bool, asked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is at 16 and 17; what is at 18 is somebody else's."""
    addresses = iter([16, 17, 16])
    segments = [{"address": address, "is_expandable": address in expandable} for address in (16, 17, 18)]
    monkeypatch.setattr(growing, "_address_on", lambda stream: next(addresses))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert growing.can_grow(torch.device("cuda", 0)) is grows
    assert growing.can_grow(torch.device("cuda", 0)) is grows  # not asked again


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, ValueError])
def test_a_driver_or_a_release_that_cannot(
    error: type[Exception], asked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(stream: Any) -> int:
        raise error

    monkeypatch.setattr(growing, "_address_on", refuses)
    assert not growing.can_grow(torch.device("cuda", 0))


def test_another_allocator(asked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(growing, "_address_on", pytest.fail)
    assert not growing.can_grow(torch.device("cuda", 0))
    assert not growing.can_grow(torch.device("cpu"))


def test_it_is_not_asked_when_a_recorder_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be while somebody else captures a graph, in which no memory can be asked for."""
    pretend_cuda(monkeypatch)
    asked: list[torch.device] = []
    monkeypatch.setattr(recorder, "can_grow", lambda device: asked.append(device) or False)
    of = recorder.CudaRecorder(torch.device(DEVICE, 0))
    assert not asked
    with of.recording():
        of.record(lambda: [torch.ones(2, device=DEVICE)])
    assert asked == [torch.device(DEVICE, 0)]


@pytest.mark.skipif(not ON_CUDA, reason="PyTorch's allocator of a GPU")
def test_a_pool_of_larger_and_larger_graphs() -> None:
    """It takes what its largest needs, and all of them can be replayed."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert growing.can_grow(device)
    sizes = [48 << 20, 64 << 20, 96 << 20, 128 << 20]
    x = torch.arange(1024, device=device) % 7
    reserved, sums = {}, []
    for sequence in (sizes[-1:], sizes):
        of = recorder.CudaRecorder(device)
        torch.cuda.empty_cache()
        before, kept = of.reserved(), []
        for size in sequence:

            def work(times: int = size >> 10) -> list[torch.Tensor]:
                y = x.repeat(times)
                return [(y + y).sum()[None]]

            with of.recording():
                graph, [result] = of.record(work)
                kept.append((graph, of.borrowed(result), 2 * int(x.sum()) * (size >> 10)))
            del result
        torch.cuda.empty_cache()
        for graph, result, total in kept:
            graph.replay()
            sums.append((int(result), total))
        reserved[len(sequence)] = of.reserved() - before
        del kept, graph, result
    assert all(one == other for one, other in sums)
    assert reserved[4] <= 1.05 * reserved[1]


@pytest.mark.skipif(not ON_CUDA, reason="PyTorch's allocator of a GPU")
def test_a_model_whose_batches_grow() -> None:
    """Each kind is captured once, and what is set for it is so no longer."""
    bastile.apply(cuda_graphs=True)
    model = tiny_model(hidden_size=256, intermediate_size=1024).to(DEVICE)
    for step, columns in enumerate([64, 64, 96, 128, 192, 64, 96, 128, 192]):
        model(**batch_of(model, step, 8, columns)).loss.backward()
        model.zero_grad()
    [stack] = _stacks.values()
    assert len(stack.captured) == 4
    kinds = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
    assert kinds == {True, False}
    torch.cuda.empty_cache()
    kept = torch.empty(200 << 20, device=DEVICE, dtype=torch.uint8)
    [segment] = [
        s for s in torch.cuda.memory_snapshot() if s["address"] <= kept.data_ptr() < s["address"] + s["total_size"]
    ]
    assert not segment["is_expandable"]
