"""Blocks of logits in PyTorch's allocator: as many as there have to be, and no more."""

from __future__ import annotations

import pytest
import torch

from bastile.ops import _room
from bastile.ops._room import make_room

ROW = 1 << 18  # bytes


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often memory went back to the driver. The tensors of these tests are on no GPU."""
    calls: list[None] = []
    monkeypatch.setattr(_room, "_most", {})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return calls


def rows(count: int) -> torch.Tensor:
    return torch.empty(count, 1)


def test_the_first_call_tidies_behind_itself(given_back: list[None]) -> None:
    assert make_room(rows(300), ROW, 2048) is True
    assert not given_back
    assert make_room(rows(300), ROW, 2048) is make_room(rows(512), ROW, 2048) is False
    assert not given_back


def test_a_larger_one_than_ever_finds_the_last_ones_block_gone(given_back: list[None]) -> None:
    make_room(rows(300), ROW, 2048)
    found = []
    for count in (513, 900, 100, 1024, 1025, 2048, 5000, 9000):
        assert make_room(rows(count), ROW, 2048) is False
        found.append(len(given_back))
    assert found == [1, 1, 1, 1, 2, 3, 3, 3]


def test_what_is_small_is_worth_no_wait(given_back: list[None]) -> None:
    assert make_room(rows(5000), (64 << 20) // 512, 512) is False
    assert make_room(rows(5000), (64 << 20) // 512 + 1, 512) is True


def test_nothing_is_done_while_a_graph_is_captured(given_back: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert make_room(rows(2048), ROW, 2048) is False
    assert not _room._most


def test_tensors_without_values(given_back: list[None]) -> None:
    class Other(torch.Tensor):
        pass

    assert make_room(rows(2048).as_subclass(Other), ROW, 2048) is False


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("trains", [True, False])
def test_lengths_that_grow_leave_no_blocks_behind(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from bastile.ops.fused_linear_cross_entropy import padded
    from bastile.ops.linear_logprobs import linear_logprobs

    monkeypatch.setattr(_room, "_most", {})
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
