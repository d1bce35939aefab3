"""Models that score sequences or tokens, of whose hidden states little is read: stock's numbers, without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bastile
from bastile.models import small
from conftest import assert_same_up_to_rounding, gradients
from oracle import devices
from padded import MASKS
from test_padding_free import any_type, ran  # noqa: F401


def judge(kind: str, tokens: bool = False, **more: Any) -> Any:
    """A small model that scores sequences, or tokens."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    torch.manual_seed(0)
    config = small.small_config(kind)
    config.num_labels, config.pad_token_id = 3, 0
    auto = AutoModelForTokenClassification if tokens else AutoModelForSequenceClassification
    model = auto.from_config(config).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def copied(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch that has not been seen before, as each of a loop's."""
    return {name: tensor.clone() for name, tensor in given.items()}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("tokens", [False, True])
def test_scores(tokens: bool, kind: str, device: str) -> None:
    """Each sequence's by the last token, in training and evaluation; each token's where it has a label."""
    model = judge("qwen3", tokens).to(device)
    model = model.bfloat16() if device == "cuda" else model
    ids = torch.arange(3 * 17).view(3, 17) * 7 % 90 + 3
    given = {"input_ids": ids.masked_fill(MASKS[kind] == 0, 0), "attention_mask": MASKS[kind]}
    labels = torch.tensor([2, 0, 1])
    given["labels"] = (ids % 3).masked_fill(MASKS[kind].cumsum(1) <= 1, -100) if tokens else labels
    if tokens:
        given["labels"] = given["labels"].masked_fill(MASKS[kind] == 0, -100)
    given = {name: tensor.to(device) for name, tensor in given.items()}

    def results() -> list[torch.Tensor]:
        model.zero_grad()
        output = model(**copied(given))
        output.loss.backward()
        read = MASKS[kind].to(device) != 0 if tokens else slice(None)
        return [output.loss.detach(), output.logits.detach()[read], *gradients(model).values()]

    want = results()
    bastile.apply()
    results()
    ran()
    for got, expected in zip(results(), want, strict=True):
        if device == "cpu":  # on a GPU they are of 16 bits; what is computed is judged elsewhere
            assert_same_up_to_rounding(got, expected, model, "a result")
    assert ran()[0] == 1
    model.eval()
    with torch.no_grad():
        model(**copied(given))
    assert ran()[0] == (not tokens)


def test_what_scores_something_else_keeps_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of a user's own, and sequences whose last token is padding by the mask."""
    model, ids = judge("qwen3"), torch.arange(3 * 17).view(3, 17) * 7 % 90 + 3
    bastile.apply()
    given = {"input_ids": ids, "attention_mask": MASKS["right"], "labels": torch.tensor([2, 0, 1])}
    for _ in range(3):  # no token is the one for padding: the last one is read
        model(**given)
    assert ran()[0] == 0
    bastile.reset()
    stock = type(model).forward
    given["input_ids"] = ids.masked_fill(MASKS["right"] == 0, 0)
    cls = next(each for each in type(model).__mro__ if "forward" in vars(each))
    monkeypatch.setattr(cls, "forward", lambda self, **more: stock(self, **more))
    bastile.apply()
    for _ in range(3):
        model(**given)
    assert ran()[0] == 0
