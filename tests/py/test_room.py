"""Blocks of logits in PyTorch's allocator: as many as there have to be, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bastile.ops import _room
from bastile.ops._room import room

ROW = 1 << 18  # bytes


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What did around calls, where memory cannot grow. The tensors of these tests are on no GPU."""
    events: list[str] = []

    @contextmanager
    def growing() -> Iterator[None]:
        events.append("grows")
        yield
        events.append("grows no more")

    monkeypatch.setattr(_room, "_most", {})
    monkeypatch.setattr(_room, "can_grow", lambda device: False)
    monkeypatch.setattr(_room, "growing", growing)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("tidied"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return events


def rows(count: int) -> torch.Tensor:
    return torch.empty(count, 1)


def call(events: list[str], *given: Any, **more: Any) -> list[str]:
    events.clear()
    with room(*given, **more):
        events.append("call")
    return [*events]


def test_the_first_call_tidies_behind_itself(happened: list[str]) -> None:
    assert call(happened, rows(300), ROW, 2048) == ["call", "tidied"]
    assert call(happened, rows(300), ROW, 2048) == call(happened, rows(512), ROW, 2048) == ["call"]


def test_a_larger_one_than_ever_finds_the_last_ones_block_gone(happened: list[str]) -> None:
    call(happened, rows(300), ROW, 2048)
    found = [len(call(happened, rows(n), ROW, 2048)) for n in (513, 900, 100, 1024, 1025, 2048, 5000, 9000)]
    assert found == [2, 1, 1, 1, 2, 2, 1, 1]
    assert call(happened, rows(9000), ROW, 4096) == ["tidied", "call"]


def test_what_is_small_is_worth_no_wait(happened: list[str]) -> None:
    assert call(happened, rows(5000), (64 << 20) // 512, 512) == ["call"]
    assert call(happened, rows(5000), (64 << 20) // 512 + 1, 512) == ["call", "tidied"]


def test_logits_that_are_kept_are_larger_in_each_call(happened: list[str]) -> None:
    assert call(happened, rows(3000), ROW, 3000, is_kept=True) == ["call"]
    assert not _room._most


@pytest.mark.parametrize("is_kept", [False, True])
def test_where_memory_can_grow(is_kept: bool, happened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_room, "can_grow", lambda device: True)
    for count in (300, 2000):
        found = call(happened, rows(count), ROW, 2048, is_kept=is_kept)
        assert found == ["grows", "call", "grows no more"]
    assert call(happened, rows(5000), (64 << 20) // 512, 512, is_kept=is_kept) == ["call"]


def test_nothing_is_done_while_a_graph_is_captured(happened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert call(happened, rows(2048), ROW, 2048) == ["call"]
    assert not _room._most


def test_tensors_without_values(happened: list[str]) -> None:
    class Other(torch.Tensor):
        pass

    assert call(happened, rows(2048).as_subclass(Other), ROW, 2048) == ["call"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_lengths_that_grow_leave_no_blocks_behind(trains: bool, grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from bastile.ops.fused_linear_cross_entropy import padded
    from bastile.ops.linear_logprobs import linear_logprobs

    monkeypatch.setattr(_room, "_most", {})
    if not grows:
        monkeypatch.setattr(_room, "can_grow", lambda device: False)
    vocabulary, width = 100_003, 64
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for count in (300, 700, 1100, 1600, 2500, 400, 1700):
        hidden = torch.randn(count, width, device="cuda", dtype=torch.bfloat16, requires_grad=trains)
        target = torch.randint(0, vocabulary, (count,), device="cuda")
        with torch.set_grad_enabled(trains):
            loss = linear_logprobs(hidden, weight, target).log_probs.sum()
        if trains:
            loss.backward()
    most = (2048 if trains else 1024) * padded(vocabulary) * 2
    assert torch.cuda.memory_reserved() - before < most + (112 << 20)  # workspaces of cuBLAS's, and what is small
