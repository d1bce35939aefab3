"""Mixtures of experts whose routers' logits are asked for, as TRL asks for them: results of the graphs, in place of
what hooks in the layers would collect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import bastile
from bastile.models import small
from conftest import gradients
from graphing import DEVICE, ON_CUDA, allow_graphs, assert_alike, batch_of, counted

pytest.importorskip("transformers.utils.output_capturing", reason="older Transformers collects otherwise")

#: Llama 4's routers return their logits second; GPT-OSS has a unit and a function of attention of its own; Qwen3-Next
#: has layers with a state.
TYPES = ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "llama4_text", "qwen3_next"]


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    allow_graphs(monkeypatch)
    kept.clear()
    yield
    bastile.reset()


def made(model_type: str, **values: Any) -> Any:
    if model_type not in small.causal_types():
        pytest.skip(f"this Transformers has no {model_type}")
    model = small.small_model(model_type, **values).train()
    # Experts in float32 wait for a GPU's numbers.
    return model.to(DEVICE, torch.bfloat16 if ON_CUDA else torch.float32)


#: What routers returned in each forward pass, and as it was then.
kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = []


class Balanced(nn.Module):
    """Whose loss is of its routers' logits too."""

    def __init__(self, model: Any, of_hidden: float = 1.0, wanted: slice = slice(None)) -> None:
        super().__init__()
        self.model, self.of_hidden, self.wanted = model, of_hidden, wanted
        self.config = model.config
        self.asks = True

    def forward(self, **batch: torch.Tensor) -> Any:
        given = {name: value for name, value in batch.items() if name != "labels"}
        out = self.model.model(**given, output_router_logits=self.asks)
        found = (out.router_logits if self.asks else None) or ()
        kept.append([(logits, logits.detach().clone()) for logits in found])
        parts = [out.last_hidden_state.float().square().mean() * self.of_hidden] if self.of_hidden else []
        parts += [place * logits.float().softmax(-1).square().mean() for place, logits in enumerate(found, 1)][
            self.wanted
        ]
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=torch.stack(parts).sum())


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("model_type", TYPES)
def test_routers_logits_are_results_of_graphs(model_type: str, reentrant: bool | None) -> None:
    model = Balanced(made(model_type))
    if reentrant is not None:
        model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.model.enable_input_require_grads()
    got = assert_alike(model, 3, batches=batch_of)
    assert not got.aside


def test_layers_without_experts_between() -> None:
    model = Balanced(made("qwen3_moe", num_hidden_layers=5, mlp_only_layers=[1, 4]))
    assert not assert_alike(model, 3, batches=batch_of).aside
    assert {len(each) for each in kept} == {3}


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("wanted", [slice(0, 0), slice(1, 2)], ids=["none", "the second"])
def test_logits_that_the_loss_is_not_of(wanted: slice, checkpoints: bool) -> None:
    model = Balanced(made("qwen3_moe"), wanted=wanted)
    if checkpoints:
        model.model.gradient_checkpointing_enable()
    assert not assert_alike(model, 3, batches=batch_of).aside


@pytest.mark.parametrize("last", [True, False])
def test_a_loss_of_routers_alone(last: bool) -> None:
    """Of the last layer's or of all but that, and not of the hidden states: what then has no gradient gets zeros."""
    count = 3
    wanted = slice(count - 1, count) if last else slice(0, count - 1)
    model = Balanced(made("qwen3_moe", num_hidden_layers=count), of_hidden=0.0, wanted=wanted)
    bastile.apply(cuda_graphs=False)
    model(**batch_of(model, 3)).loss.backward()
    want = gradients(model)
    bastile.apply(cuda_graphs=True)
    counted()
    for step in range(4):
        model.zero_grad()
        model(**batch_of(model, step)).loss.backward()
    assert counted() == (3, {})
    got = gradients(model)
    assert want.keys() < got.keys()
    for name, gradient in got.items():
        assert torch.equal(gradient, want.get(name, torch.zeros_like(gradient))), name


def test_losses_of_other_parts_in_turn() -> None:
    """Of one kind of steps: what the last one had a gradient for, this one may have none for."""
    model = Balanced(made("qwen3_moe"))
    parts = [(1.0, slice(None)), (0.0, slice(0, 1)), (1.0, slice(0, 0)), (1.0, slice(1, 2))]

    def trained(graphs: bool) -> list[dict[str, torch.Tensor]]:
        bastile.apply(cuda_graphs=graphs)
        found = []
        for step in range(8):
            model.of_hidden, model.wanted = parts[step % 4]
            model.zero_grad()
            model(**batch_of(model, step)).loss.backward()
            found.append(gradients(model))
        return found

    want = trained(False)
    counted()
    got = trained(True)
    assert counted() == (7, {})
    for one, other in zip(got, want, strict=True):
        for name, gradient in one.items():
            assert torch.equal(gradient, other.get(name, torch.zeros_like(gradient))), name


def test_logits_stay_as_they_are() -> None:
    """They are their holder's, whatever the next step writes."""
    bastile.apply(cuda_graphs=True)
    model = Balanced(made("qwen3_moe"))
    for step in range(4):
        model(**batch_of(model, step)).loss.backward()
    assert counted()[0] == 3
    for logits, as_it_was in [pair for each in kept for pair in each]:
        assert type(logits) is torch.Tensor
        assert torch.equal(logits, as_it_was)


def test_a_pass_that_nobody_differentiates() -> None:
    model = Balanced(made("qwen3_moe"))
    bastile.apply(cuda_graphs=False)
    with torch.no_grad():
        want = [model(**batch_of(model, step)).loss for step in range(4)]
        bastile.apply(cuda_graphs=True)
        counted()
        got = [model(**batch_of(model, step)).loss for step in range(4)]
    assert counted() == (3, {})
    assert torch.equal(torch.stack(got), torch.stack(want))
    for one, other in zip(kept[:4], kept[4:], strict=True):
        for (logits, _), (again, _) in zip(one, other, strict=True):
            assert torch.equal(logits, again)
            assert not again.requires_grad


def test_asked_for_in_some_steps() -> None:
    """Is another kind of step; the hooks that stay behind do nothing."""
    model = Balanced(made("qwen3_moe"))
    which = [lambda model, asks=asks: setattr(model, "asks", asks) for asks in (False, True)]
    got = assert_alike(model, 4, batches=batch_of, steps=6, before=which * 3)
    assert not got.aside


def test_several_passes_before_one_backward_pass() -> None:
    class Twice(Balanced):
        def forward(self, **batch: torch.Tensor) -> Any:
            first, second = super().forward(**batch).loss, super().forward(**batch).loss
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=first + 2 * second)

    got = assert_alike(Twice(made("qwen3_moe")), None, batches=batch_of, steps=6)
    assert got.replayed >= 8


def test_sizes_that_are_foreseen() -> None:
    """A kind that differs in sizes alone has its graphs from the first step on, with logits of its own size."""
    model = Balanced(made("qwen3_moe"))

    def batches(model: Any, step: int) -> Any:
        return batch_of(model, step, columns=7 + step if step > 1 else 7)

    assert not assert_alike(model, 4, batches=batches, steps=5).aside


def test_adapters() -> None:
    """Frozen layers before the first adapter have no gradients, nor have their routers' logits."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], layers_to_transform=[2], r=2, init_lora_weights=False)
    base = made("qwen3_moe", num_hidden_layers=4)
    get_peft_model(base, config)
    model = Balanced(base.train())
    assert not assert_alike(model, 3, batches=batch_of).aside
    assert [logits.requires_grad for logits, _ in kept[-1]] == [False, False, True, True]
