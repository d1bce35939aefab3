"""Passes that nobody differentiates: a reference's beside a policy's, with adapters switched off, and evaluations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import bastile
from bastile.graphs import stack as stacks
from conftest import older_than, tiny_model
from graphing import DEVICE, allow_graphs, batch_of, counted


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch)


def with_lora(model: nn.Module, dropout: float = 0.0, **more: Any) -> Any:
    torch.manual_seed(3)
    options = {"r": 4, "target_modules": "all-linear", "lora_dropout": dropout, "task_type": "CAUSAL_LM", **more}
    return get_peft_model(model, LoraConfig(**options)).train()  # type: ignore[arg-type]


def evaluated(model: nn.Module, graphs: bool, passes: int = 4, mode: bool = True, **more: Any) -> list[torch.Tensor]:
    """Logits, all of which are kept."""
    bastile.apply(cuda_graphs=graphs)
    counted()
    model = copy.deepcopy(model).to(DEVICE).train(mode)
    torch.manual_seed(5)
    with torch.no_grad():
        batches = [batch_of(model, step) for step in range(passes)]
        return [model(input_ids=batch["input_ids"], use_cache=False, **more).logits for batch in batches]


def assert_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
def test_the_bits_of_passes_without_graphs(mode: bool, checkpointing: str | None) -> None:
    model = tiny_model()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    want = evaluated(model, False, mode=mode)
    assert counted() == (0, {})
    got = evaluated(model, True, mode=mode)
    assert counted() == (3, {})  # the first is noted
    assert_bits(got, want)


def test_who_collects_results_keeps_them() -> None:
    model = tiny_model().to(DEVICE).eval()
    found = []
    for on in (False, True):
        bastile.apply(cuda_graphs=on)
        with torch.no_grad():
            found.append([model.model(batch_of(model, n)["input_ids"], use_cache=False)[0][:, 0] for n in range(5)])
    assert counted() == (4, {})
    assert_bits(found[1], found[0])


def test_random_numbers_are_those_that_would_be_drawn() -> None:
    model = with_lora(tiny_model(), dropout=0.3, init_lora_weights=False)
    want = evaluated(model, False)
    got = evaluated(model, True)
    assert counted() == (3, {})
    assert_bits(got, want)
    assert not torch.equal(got[0], evaluated(model.eval(), False, mode=False)[0])


def preference(model: Any, step: int, context: Callable[[], Any], between: bool) -> torch.Tensor:
    """A loss made of a policy's and a reference's log-probabilities, the reference's before or after the policy's."""
    batch = batch_of(model, step)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}

    def of_reference() -> torch.Tensor:
        with torch.no_grad(), context():
            return model(**given, use_cache=False).logits.log_softmax(-1)

    first = None if between else of_reference()
    policy = model(**given, use_cache=False).logits.log_softmax(-1)
    difference = policy - (of_reference() if first is None else first)
    return -nn.functional.logsigmoid(difference.mean((1, 2))).mean() + difference.square().mean()


def trained(model: Any, graphs: bool, between: bool, adapters: bool, steps: int = 5) -> tuple[list[torch.Tensor], int]:
    bastile.apply(cuda_graphs=graphs)
    model = copy.deepcopy(model).to(DEVICE)
    counted()
    torch.manual_seed(7)
    found = []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        loss = preference(model, step, model.disable_adapter if adapters else nullcontext, between)
        loss.backward()
        found += [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
        optimizer.step()
        optimizer.zero_grad()
    replayed, aside = counted()
    assert not aside
    return found, replayed


@pytest.mark.parametrize("adapters", [True, False], ids=["adapters off", "as it is"])
@pytest.mark.parametrize("between", [True, False], ids=["between", "before"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_reference_and_its_policy(checkpointing: bool, between: bool, adapters: bool) -> None:
    """The reference's pass leaves alone what the policy's keeps for its backward pass, and adapters that are switched
    off and on leave both their graphs."""
    model = with_lora(tiny_model())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()  # whose hook the embeddings' result is changed by without gradients too
    want, none = trained(model, False, between, adapters)
    got, replayed = trained(model, True, between, adapters)
    assert none == 0
    assert replayed == 2 * 4
    assert_bits(got, want)


def test_a_policy_that_has_not_moved_has_its_reference_s_numbers() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = with_lora(tiny_model(dtype=dtype))
        bastile.apply(cuda_graphs=False)
        batch = batch_of(model, 0)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            policy = model.to(DEVICE)(input_ids=batch["input_ids"]).logits
            with model.disable_adapter():
                reference = model(input_ids=batch["input_ids"]).logits
        assert torch.equal(policy, reference)


def test_each_state_of_the_layers_has_its_graphs_up_to_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_lora(tiny_model(), init_lora_weights=False).to(DEVICE)
    bastile.apply(cuda_graphs=True)
    counted()
    ids = batch_of(model, 0)["input_ids"]

    def logits(mode: bool, off: bool) -> torch.Tensor:
        with torch.no_grad(), model.disable_adapter() if off else nullcontext():
            return model.train(mode)(input_ids=ids, use_cache=False).logits

    states = [(mode, off) for mode in (True, False) for off in (False, True)]
    first = [logits(*state) for state in states]
    for _ in range(3):
        assert_bits([logits(*state) for state in states], first)
    assert counted() == (3 * len(states), {})
    (stack,) = [stack for stack in stacks._stacks.values() if stack.states]
    assert len(stack.states) == len(states)
    monkeypatch.setattr(stacks, "MOST_STATES", 4)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    assert_bits([logits(*states[0])], first[:1])
    assert len(stack.states) == len(states)


def test_states_that_differ_in_the_last_layers_alone() -> None:
    last = {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [8], "init_lora_weights": False}
    model = with_lora(tiny_model(num_hidden_layers=9), **last).to(DEVICE)
    ids = batch_of(model, 0)["input_ids"]

    def logits(off: bool) -> torch.Tensor:
        with torch.no_grad(), model.disable_adapter() if off else nullcontext():
            return model(input_ids=ids, use_cache=False).logits

    bastile.apply(cuda_graphs=False)
    want = [logits(False), logits(True)]
    bastile.apply(cuda_graphs=True)
    counted()
    for _ in range(6):
        assert_bits([logits(False), logits(True)], want)
    replayed, _ = counted()
    assert replayed >= 2 * 4
    (stack,) = [stack for stack in stacks._stacks.values() if stack.states]
    assert len(stack.states) == 2
    assert max(state.changes for state in stack.states) == 1


def test_who_wants_keys_and_values_gets_them() -> None:
    bastile.apply(cuda_graphs=True)
    model = tiny_model().to(DEVICE).eval()
    ids = batch_of(model, 0)["input_ids"]
    with torch.no_grad():
        for _ in range(3):
            prompt = model(input_ids=ids)
            assert prompt.past_key_values.get_seq_length() == ids.shape[1]
            model(input_ids=ids[:, :1], past_key_values=prompt.past_key_values)
    assert counted() == (0, {})


def test_in_inference_mode_no_graph_is_made() -> None:
    bastile.apply(cuda_graphs=True)
    model = tiny_model().to(DEVICE).eval()
    with torch.inference_mode():
        for _ in range(3):
            model(input_ids=batch_of(model, 0)["input_ids"], use_cache=False)
    assert counted() == (0, {})


@pytest.mark.skipif(older_than("5.2"), reason="whose masks are made anew for each length")
def test_lengths_that_vary_are_those_of_training() -> None:
    """What has been seen of them counts for both, so that both are padded alike."""
    model = with_lora(tiny_model()).to(DEVICE)
    found: dict[bool, list[torch.Tensor]] = {}
    for on in (False, True):
        bastile.apply(cuda_graphs=on)
        counted()
        found[on] = []
        for columns in [*range(20, 32), 21, 30, 25]:
            ids = torch.randint(3, 90, (2, columns), generator=torch.Generator().manual_seed(columns)).to(DEVICE)
            with torch.no_grad(), model.disable_adapter():
                reference = model(input_ids=ids, use_cache=False).logits
            policy = model(input_ids=ids, use_cache=False).logits
            (policy - reference).square().mean().backward()
            found[on] += [reference, policy.detach()]
    assert counted()[0] >= 8
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
