"""The report's note on gradient checkpointing that memory does not need, where something stands in for a GPU's
allocator."""

from __future__ import annotations

import pytest

import bastile
from bastile.models import checkpoints
from bastile.models.checkpoints import _Seen
from conftest import tiny_batch, tiny_model

GIB = 1 << 30


@pytest.fixture
def memory(monkeypatch) -> dict[str, int]:
    """Each layer that runs a second time keeps 3 GiB; `peak` and `available` as a test says."""
    figures = {"allocated": 0, "peak": 10 * GIB, "available": 80 * GIB}

    def allocated(device) -> int:
        figures["allocated"] += 3 * GIB
        return figures["allocated"]

    monkeypatch.setattr(checkpoints, "_seen", _Seen())
    monkeypatch.setattr(checkpoints, "_allocated", allocated)
    monkeypatch.setattr(checkpoints, "_room", lambda device: (figures["peak"], figures["available"]))
    monkeypatch.setattr(checkpoints, "runs_again", lambda x: checkpoints._graph_task() >= 0)
    monkeypatch.setattr("bastile.models.decoder.runs_again", lambda x: checkpoints._graph_task() >= 0)
    bastile.apply()
    yield figures
    bastile.reset()


def notes(checkpointing: bool, reentrant: bool = False) -> tuple[str, ...]:
    model = tiny_model(num_hidden_layers=4).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    for _ in range(2):
        model(**tiny_batch(model)).loss.backward()
    return bastile.report().notes


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_is_said_with_what_it_costs(memory, reentrant):
    (note,) = notes(True, reentrant)
    assert "a second forward pass of 4 layers" in note
    assert "some 19 of the 80 GiB" in note
    assert "takes 10" in note
    assert f"note: {note}" in str(bastile.report())
    assert memory["allocated"] == 6 * GIB  # it was asked for around one layer, and never again


def test_inputs_in_the_hosts_memory_would_be_there(memory, monkeypatch):
    monkeypatch.setattr(checkpoints, "bytes_held", lambda: 9 * GIB)
    (note,) = notes(True)
    assert "some 28 of the 80 GiB" in note


def test_where_memory_needs_it_nothing_is_said(memory):
    memory["available"] = 20 * GIB
    assert notes(True) == ()


def test_without_checkpointing_nothing_is_said(memory):
    assert notes(False) == ()
    assert memory["allocated"] == 0
