"""Masks of a call for one token: made within its graph where Transformers' own code alone would see them, else as ever.
Where there is no GPU, what stands for a graph calls the model again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from bastile.graphs import token_masks
from bastile.models import generation, small
from conftest import older_than
from graphing import allow_graphs
from texts import TOKENS, adapted, assert_text_of_stock, generated, small_one

#: In releases before that, `generate` leaves the cache to the model, and nothing is captured.
pytestmark = pytest.mark.skipif(older_than("5.1"), reason="text is generated as ever")


@pytest.fixture(autouse=True)
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch)


@pytest.fixture
def masks_outside(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each call whose masks are made by the host, of those whose graph might make them."""
    made: list[None] = []
    now = token_masks.LateMasks.now
    monkeypatch.setattr(token_masks.LateMasks, "now", lambda self: (made.append(None), now(self))[1])
    return made


#: Their loop gives models a mask of two dimensions, or makes masks elsewhere.
of_late_masks = pytest.mark.skipif(older_than("5.17"), reason="masks are made in the model")


@of_late_masks
@pytest.mark.parametrize(
    "made",
    [lambda: small_one("llama"), lambda: small_one("gemma3_text"), lambda: small_one("gpt2"), adapted],
    ids=["llama", "gemma3_text", "gpt2", "adapters"],
)
def test_masks_are_made_within_the_graph(made: Callable[[], Any], masks_outside: list[None]) -> None:
    """But a model's first one."""
    model = made()
    assert_text_of_stock(model)
    assert len(masks_outside) == 1
    generated(model)
    assert len(masks_outside) == 1


@of_late_masks
def test_masks_that_no_graph_can_make(masks_outside: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    def of(self: Any, structure: Any) -> Any:
        raise RuntimeError("the device is asked")

    monkeypatch.setattr(token_masks.LateMasks, "of", of)
    model = small_one("qwen3")
    assert_text_of_stock(model)
    assert len(masks_outside) == 2
    generated(model)  # as ever
    assert len(masks_outside) == 2


@pytest.mark.parametrize("family", ["phi3", "qwen3"])
def test_masks_that_others_make_or_see(family: str, masks_outside: list[None]) -> None:
    """A model's own code, or the user's."""
    if family not in small.causal_types():
        pytest.skip(f"this Transformers has no {family}")
    model = small_one(family)
    calls: list[None] = []
    if family == "qwen3":
        make: Any = getattr(sys.modules[generation.FILE], "create_masks_for_generate", None)
        if make is None:
            pytest.skip("masks are made elsewhere")
        model.create_masks_for_generate = lambda **kwargs: (calls.append(None), make(**kwargs))[1]
    assert_text_of_stock(model)
    assert not masks_outside
    assert len(calls) == (TOKENS - 1 if family == "qwen3" else 0)
