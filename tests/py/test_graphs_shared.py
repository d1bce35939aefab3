"""Layers that leave keys and values for later ones, as Gemma 4's: those run themselves, all others are graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bastile.graphs import captured
from bastile.models import small
from conftest import older_than
from graphing import DEVICE, allow_graphs, assert_alike, counted
from test_graphs_lengths import PADDED, assert_close, trained

pytestmark = [
    pytest.mark.skipif("gemma4_text" not in small.causal_types(), reason="this Transformers has no Gemma 4"),
    pytest.mark.skipif(older_than("5.6"), reason="another way of sharing"),
]

KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
NO_EXPERTS = {"enable_moe_block": False}  # which in float32 wait for a GPU's numbers, and so have no graphs
SHARED = {**NO_EXPERTS, "num_hidden_layers": 8, "num_kv_shared_layers": 4, "layer_types": KINDS * 2}
#: Gemma 4 E4B's: to each layer a tensor of its own.
WITH_INPUTS = {**SHARED, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch)


def made(**values: Any) -> Any:
    return small.small_model("gemma4_text", **values).to(DEVICE).train()


def batches(model: Any, step: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(5, 60, (2, 17), generator=drawn)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}


@pytest.mark.parametrize("values", [SHARED, WITH_INPUTS], ids=["shared", "with inputs"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_keys_and_values_of_other_layers(
    values: dict[str, Any], reentrant: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients come back to the layer that made them from graphs that read them, and go on to graphs."""
    model = made(**values)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    layers: set[int] = set()
    runs_of = captured.runs_of

    def recording(*args: Any) -> Any:
        runs = runs_of(*args)
        layers.update(layer for run in runs for layer in range(run.first, run.end))
        return runs

    monkeypatch.setattr(captured, "runs_of", recording)
    got = assert_alike(model, 4, steps=5, batches=batches)
    assert not got.aside
    assert layers == {0, 1, 4, 5, 6, 7}  # the last of each kind before the fifth leave theirs


def test_nobody_reads_them() -> None:
    """Gemma 4 31B's and 26B's layers share nothing, and the last of each kind leave theirs all the same."""
    got = assert_alike(made(**{**SHARED, "num_kv_shared_layers": 0}), 4, steps=5, batches=batches)
    assert not got.aside


def test_too_few_others() -> None:
    got = assert_alike(made(**NO_EXPERTS), 0, batches=batches)
    assert set(got.aside) == {"layers that leave something for others in a dictionary"}


def of_images() -> Any:
    """Which hands its text model what that would make of the tokens, and the labels."""
    import transformers

    config = small.small_config("gemma4")
    for name, value in WITH_INPUTS.items():
        setattr(config.text_config, name, value)
    torch.manual_seed(0)
    return transformers.Gemma4ForConditionalGeneration(config).to(DEVICE).train()


@pytest.mark.parametrize("model", [lambda: made(**WITH_INPUTS), of_images], ids=["text", "images"])
def test_many_lengths(model: Callable[[], Any]) -> None:
    model = model().double()  # in float32 its own rounding is as large as what is allowed here
    want = trained(model, False, "right", use_cache=False)
    got = trained(model, True, "right", use_cache=False)
    assert_close(got, want)
    assert counted()[0] >= PADDED - 2
