"""Logits on demand in model code of someone's own: heads with other names, logits that are written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedModel

import bastile
from conftest import gradients, tiny_batch, tiny_model
from test_logits_models import V, assert_same


@pytest.mark.parametrize(("head", "is_found"), [("lm_head", True), ("score", False)])
def test_a_head_that_transformers_does_not_find(head: str, is_found: bool) -> None:
    """Of code whose embedding has a name of its own. A head that nobody can name stays stock, and that is said."""

    class OwnLMHeadModel(PreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.tokens = nn.Embedding(V, 16)
            setattr(self, head, nn.Linear(16, V))
            self.post_init()

        def forward(self, input_ids: Any, labels: Any) -> Any:
            return F.cross_entropy(getattr(self, head)(self.tokens(input_ids)).flatten(0, 1), labels.flatten())

    model = OwnLMHeadModel(AutoConfig.for_model("llama")).train()
    ids = torch.randint(V, (2, 9))
    want = model(ids, ids)
    bastile.report(reset=True)
    bastile.apply()
    torch.testing.assert_close(model(ids, ids), want)
    (line,) = bastile.report()
    assert line.ran == int(is_found)
    assert bool(line.aside) != is_found
    assert is_found or "its output head is not to be found" in next(iter(line.aside))


@pytest.mark.parametrize("how", ["setitem", "index_fill_", "add_ of a view"])
@pytest.mark.parametrize("kind", ["training", "evaluation", "compiled"])
def test_classes_that_are_masked_in_place(how: str, kind: str) -> None:
    """As Chameleon masks those of images: then the loss is of what was written."""

    class MaskedForCausalLM(LlamaForCausalLM):
        def forward(self, input_ids: Any, labels: Any) -> Any:  # type: ignore[override]
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            if how == "setitem":
                logits[:, :, [5, 6, 7]] = -1e4
            elif how == "index_fill_":
                logits.index_fill_(-1, torch.tensor([5, 6, 7]), -1e4)
            else:
                logits.transpose(0, 1)[:3].add_(torch.linspace(0, 3, V))
            return self.loss_function(logits=logits, labels=labels, vocab_size=V)

    model = MaskedForCausalLM(tiny_model("llama").config).train(kind != "evaluation")
    batch = tiny_batch(model)

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = model(batch["input_ids"], labels=batch["labels"])
        loss.backward()
        return loss.detach(), gradients(model)

    want, want_gradients = run()
    bastile.apply()
    if kind == "compiled":
        torch._dynamo.reset()
        model.compile(fullgraph=True, backend="aot_eager")
    got, got_gradients = run()
    torch.testing.assert_close(got, want)
    for name, gradient in want_gradients.items():
        assert_same(got_gradients[name], gradient, name)
