"""Of batches without padding: as how many tokens they go through the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

from bastile.models import padding, padding_free, sdpa, side_by_side
from bastile.models.side_by_side import SideBySide
from conftest import tiny_model
from test_padding_free import any_type, seen  # noqa: F401  (the fixture is used by being here)


@drawn(st.integers(1, 1 << 20), st.sampled_from([8, 16]))
def test_few(count: int, steps: int) -> None:
    few = side_by_side.few(count, steps)
    assert count <= few <= max(count + 64, count * (1 + 2 / steps))
    assert side_by_side.few(few, steps) == few


@pytest.mark.parametrize("steps", [8, 16])
def test_few_between_two_powers_of_two(steps: int) -> None:
    assert len({side_by_side.few(count, steps) for count in range(4097, 8193)}) == steps // 2


@pytest.mark.parametrize(
    ("mode", "pays", "kinds"), [(True, False, 4), ("auto", True, 4), ("auto", False, 8), (False, True, 8)]
)
def test_fewer_where_each_has_graphs(mode: Any, pays: bool, kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3", max_position_embeddings=512)
    seen(model, cuda_graphs=mode)
    monkeypatch.setattr("bastile.models.graphs.may_pay", lambda backbone, tokens: pays)
    found, ids = set(), torch.ones(2, 256, dtype=torch.long)
    for count in range(1, 256, 4):
        mask = torch.ones_like(ids)
        mask[1, count:] = 0
        given = {"input_ids": ids, "attention_mask": mask}
        with padding.read_by(ids.masked_fill(mask == 0, -100)):
            unpadded = padding_free._batch(model.model, given, causal=True, takes_ours=sdpa.is_known_to_take_ours)
        assert isinstance(unpadded, SideBySide)
        found.add(unpadded.to)
    assert len(found - {512}) in (kinds - 1, kinds)


def test_rare_numbers_go_as_larger_ones() -> None:
    """That have come: until that has added eight times their own tokens."""
    numbers = side_by_side.Numbers()
    assert numbers.of(5120, 1e6) == 5120
    assert [numbers.of(4096, 1e6) for _ in range(34)] == [5120] * 32 + [4096] * 2
    assert numbers.of(3584, 4000) == 3584  # no more than the batch had
    assert numbers.of(3072, 1e6) == 3584  # the next larger one, of three
    assert numbers.of(2048, 1e6) == 3584
    assert [numbers.of(1920, 1e6) for _ in range(10)] == [3584] * 9 + [1920]
    assert numbers.of(768, 1e6) == 768  # the next one is more than twice as large
    assert numbers.of(6144, 1e6) == 6144
    assert [numbers.longest(length) for length in (100, 300, 17)] == [128, 512, 512]


@pytest.mark.parametrize(("said", "longest"), [(0, 8), (16, 16), (64, 18)])
def test_sequences_are_said_to_be_as_long_as_any_before(said: int, longest: int) -> None:
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 5, 8, 2]))[None]
    assert sdpa.Packed(ids, 30, said).segments(0, causal=False).longest == longest


def test_long_rows_are_taken_together_where_much_is_left_out() -> None:
    """Side by side their attention takes longer than by themselves."""
    for length, most in ((1000, 1.0), (2000, 0.9)):
        mask = torch.ones(4, length, dtype=torch.bool)
        mask[0, -(length // 3) :] = False  # a twelfth
        assert side_by_side.pays(side_by_side.few(int(mask.sum()) + 1), *mask.shape, True) == (most == 1.0)
        mask[1, -(length // 3) :] = False
        assert side_by_side.pays(side_by_side.few(int(mask.sum()) + 1), *mask.shape, True)
