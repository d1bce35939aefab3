"""Mixtures of experts without their padding where a loss of their routers' logits leaves it out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bastile.models import mask_flow
from bastile.models.forms import Source
from conftest import assert_same_up_to_rounding, gradients
from padded import MASKS
from test_masks_of_segments import model_of
from test_padding_free import any_type, of_kind, ran, seen

__all__ = ["any_type"]  # a fixture

ROUTED = ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"]


def routed(model_type: str) -> Any:
    model = model_of(model_type)
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.5
    return model


def routers_of(model: Any, given: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor]]:
    model.zero_grad()
    output = model(**given, output_router_logits=True)
    output.loss.backward()
    return output.loss.detach(), gradients(model), [logits.detach() for logits in output.router_logits]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("model_type", ROUTED)
def test_a_loss_of_routers_logits_leaves_out_padding(model_type: str, kind: str) -> None:
    model, given = routed(model_type), of_kind(kind)
    want, want_grads, want_logits = routers_of(model, given)
    assert abs(want - model(**given).loss) > 1e-3  # it has a part of its own
    seen(model)
    got, grads, logits = routers_of(model, given)
    assert ran()[0] == 1
    assert_same_up_to_rounding(got, want, model, "loss")
    for name, gradient in want_grads.items():
        assert_same_up_to_rounding(grads[name], gradient, model, name)
    rows = given["attention_mask"].flatten() != 0
    for one, other in zip(logits, want_logits, strict=True):
        assert one.shape == other.shape
        assert_same_up_to_rounding(one[rows], other[rows], model, "router")


@pytest.mark.parametrize(
    ("line", "leaves_out"),
    [
        ("loss = load_balancing_loss_func(outputs.router_logits, 4, 2, attention_mask)", True),
        ("loss = load_balancing_loss_func(outputs.router_logits, 4, 2)", False),
        ("loss = load_balancing_loss_func(outputs.router_logits, 4, 2, None)", False),
        ("attention_mask = None; loss = load_balancing_loss_func(outputs.router_logits, 4, 2, attention_mask)", False),
        ("loss = other(outputs.router_logits, 4, 2, attention_mask)", False),
    ],
)
def test_code_whose_loss_of_routers_logits_leaves_out_padding(line: str, leaves_out: bool) -> None:
    text = f"class Head:\n    def forward(self, attention_mask, outputs):\n        {line}\n        return loss\n"
    code = Source(text).method("Head", "forward")
    assert code is not None
    assert bool(mask_flow.masks_router(code)) is leaves_out


def test_a_loss_of_routers_logits_of_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding stays where it is not known to be left out."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    stock = modeling_qwen3_moe.load_balancing_loss_func
    assert mask_flow.is_balance(stock)
    monkeypatch.setattr(modeling_qwen3_moe, "load_balancing_loss_func", lambda *args: stock(*args[:3]))
    model, given = routed("qwen3_moe"), of_kind("right")
    want = routers_of(model, given)[0]
    seen(model)
    got = routers_of(model, given)[0]
    assert ran()[0] == 0
    assert_same_up_to_rounding(got, want, model, "loss")
