"""A bias that a model adds to its logits, of another type than these."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import bastile
from bastile.models import small
from bastile.models.logits import follow
from conftest import gradients
from test_logits_models import SEQ2SEQ, SMALL


@pytest.mark.parametrize(("bias", "fuses"), [(0.0, True), (0.5, True), (0.3, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_of_float32_beside_logits_of_16_bits(dtype: torch.dtype, bias: float, fuses: bool) -> None:
    """BART's under autocast, which is zeros unless somebody has set it. Where 16 bits do not hold its numbers it would
    be rounded, and the logits are made."""
    config = AutoConfig.for_model("bart", **{**SMALL, **SEQ2SEQ, "dropout": 0.0})
    torch.manual_seed(0)
    model: Any = AutoModelForSeq2SeqLM.from_config(config).train()
    model.final_logits_bias[:, ::2] = bias
    ids = torch.arange(14).view(2, 7) + 3
    found = []
    for patched in (False, True):
        if patched:
            bastile.apply()
        bastile.report(reset=True)
        with torch.autocast("cpu", dtype):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    assert bastile.report().ran("fused_linear_cross_entropy") == fuses
    (want, want_gradients), (got, got_gradients) = found
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
    head = "model.shared.weight"
    difference = (got_gradients[head] - want_gradients[head]).norm()
    assert difference <= 0.02 * want_gradients[head].norm()
    with torch.autocast("cpu", dtype):
        logits = model(input_ids=ids, labels=ids).logits
    assert logits.dtype is torch.float32
    bastile.reset()
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(logits + 0, model(input_ids=ids, labels=ids).logits, rtol=0.02, atol=0.02)


def test_a_bias_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again when it has been written to."""
    asked = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda one, other: asked.append(one) or equal(one, other))
    before, bias = len(follow._held), torch.zeros(1, 5)
    for _ in range(3):
        assert follow._hold(torch.bfloat16, bias)
    assert len(asked) == 1
    bias[0, 1] = 0.3
    assert not follow._hold(torch.bfloat16, bias)
    assert len(asked) == 2
    del bias
    asked.clear()
    assert len(follow._held) == before


@pytest.mark.parametrize("reads", [False, True])
def test_a_bias_that_alone_is_trained(reads: bool) -> None:
    """As where PEFT trains all biases, and no adapter lies in front of the head."""
    torch.manual_seed(0)
    model: Any = AutoModelForMaskedLM.from_config(small.small_config("bert", initializer_range=0.2)).eval()
    model.requires_grad_(False)
    bias = model.cls.predictions.decoder.bias.requires_grad_()
    ids = torch.arange(14).view(2, 7) + 3

    def trained() -> tuple[torch.Tensor, torch.Tensor]:
        output = model(input_ids=ids, labels=ids)
        (output.loss + output.logits.square().mean() * reads).backward()
        gradient, bias.grad = bias.grad.clone(), None
        return output.loss.detach(), gradient

    want, want_gradient = trained()
    bastile.apply()
    got, gradient = trained()
    assert bastile.report().ran("fused_linear_cross_entropy") == 1
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradient, want_gradient)
