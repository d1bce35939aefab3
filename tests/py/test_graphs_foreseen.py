"""Kinds of steps that differ from one with graphs in sizes alone: captured before one of them has run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import bastile
from bastile.graphs import conditions
from bastile.graphs import foreseen as module
from bastile.graphs import stack as stacks
from bastile.graphs import step as steps
from bastile.graphs.arguments import signature
from bastile.graphs.captured import Captured
from bastile.graphs.lengths import VARIES
from bastile.graphs.recorder import RepeatingRecorder
from bastile.graphs.runs import Call, Note
from conftest import tiny_model
from graphing import DEVICE, ON_CUDA, allow_graphs, assert_alike, batch_of, counted
from test_gpt_oss import tiny_gpt_oss


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch)


def of(*sizes: tuple[int, int], mask: bool = True) -> Callable[[nn.Module, int], dict[str, torch.Tensor]]:
    return lambda model, step: batch_of(model, step, *sizes[step], mask=mask)


def trained(mode: Any, sizes: list[tuple[int, int]]) -> Any:
    """A model, with the graphs of these steps."""
    bastile.apply(cuda_graphs=mode)
    model = tiny_model().to(DEVICE)
    counted()
    for step, (rows, columns) in enumerate(sizes):
        model(**batch_of(model, step, rows, columns)).loss.backward()
        model.zero_grad()
    return model


def stack_of(model: Any) -> stacks.Stack:
    return stacks._stacks[model.model]


def captured_lengths(model: Any) -> list[int]:
    return sorted(key[1][0][1] for key in stack_of(model).captured)


ONE, LONGER, WIDER, SHORTER = (2, 9), (2, 14), (3, 9), (2, 5)
SIZES = [ONE, ONE, LONGER, WIDER, SHORTER, LONGER, ONE]


@pytest.mark.parametrize("mask", [True, False])
def test_only_the_first_step_of_all_runs_without_graphs(mask: bool) -> None:
    assert_alike(tiny_model(), len(SIZES) - 1, steps=len(SIZES), batches=of(*SIZES, mask=mask))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_random_numbers_are_those_of_steps_without_graphs(reentrant: bool, dropout: float) -> None:
    """Of what is run before it is captured none are left."""
    model = tiny_model(attention_dropout=dropout)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_alike(model, len(SIZES) - 1, steps=len(SIZES), batches=of(*SIZES))


def test_dropout_of_adapters() -> None:
    config = LoraConfig(target_modules="all-linear", r=2, lora_dropout=0.3, init_lora_weights=False)
    model = get_peft_model(tiny_model(), config).train()
    assert_alike(model, len(SIZES) - 1, steps=len(SIZES), batches=of(*SIZES))


def test_a_mask_that_only_later_layers_get() -> None:
    """It is as large as the first layer's."""
    model = tiny_gpt_oss(num_hidden_layers=4)
    assert len(set(model.config.layer_types)) == 2
    assert_alike(model, None if ON_CUDA else len(SIZES) - 1, steps=len(SIZES), batches=of(*SIZES))


def warmed_up(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Places of the layers that run before a kind of steps is captured which is longer than another one."""
    found: list[int] = []
    original = Captured._called

    def called(self: Captured, layer: Any, *args: Any) -> Any:
        found.append(list(model.model.layers).index(layer.module))
        return original(self, layer, *args)

    def warm_up(self: Captured) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Captured, "_called", called)
            before(self)

    before = Captured._warm_up
    monkeypatch.setattr(Captured, "_warm_up", warm_up)
    bastile.apply(cuda_graphs=True)
    for step, size in enumerate([ONE, ONE, LONGER]):
        model(**batch_of(model, step, *size)).loss.backward()
    return found


def test_one_of_those_that_are_alike_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the last one."""
    assert warmed_up(tiny_model(num_hidden_layers=5).to(DEVICE), monkeypatch) == [0, 4]


def test_layers_that_are_called_in_another_way_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every second one the attention sees a window."""
    kinds = ["sliding_attention", "full_attention"] * 3
    model = tiny_model(num_hidden_layers=6, layer_types=kinds, use_sliding_window=True, sliding_window=4)
    assert warmed_up(model.to(DEVICE), monkeypatch) == [0, 1, 5]


@pytest.mark.parametrize("change", ["type", "trained", "lies", "setting"])
def test_a_layer_that_is_unlike_the_others_is_warmed_up(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(num_hidden_layers=6).to(DEVICE)
    layer = model.model.layers[3]
    weight = layer.mlp.up_proj.weight
    if change == "type":
        layer.mlp.act_fn = nn.GELU()
    elif change == "trained":
        weight.requires_grad_(False)
    elif change == "lies":
        weight.data = torch.empty(weight.numel() + 1, device=DEVICE)[1:].view_as(weight).copy_(weight.detach())
    else:
        layer.input_layernorm.variance_epsilon *= 2
    assert warmed_up(model, monkeypatch) == [0, 3, 5]


def test_another_mask_is_another_kind() -> None:
    # The first with a mask is noted, and the first without: the rest is replayed.
    sizes = [ONE, ONE, LONGER]

    def masked_first(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
        return batch_of(model, step, *sizes[step % 3], mask=step < 3)

    assert_alike(tiny_model(), 4, steps=6, batches=masked_first)


def test_auto_goes_by_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens wait for the host if more do, and more as long as the device's time is in proportion; beside graphs
    of others, where steps without graphs take memory of their own, till that is twice as long."""
    monkeypatch.setattr("bastile.graphs.pays.Pays.ratio", lambda self: 0.7)
    sizes = [(2, 8)] * 5 + [(2, 5), (2, 13), (2, 26)]  # noted, measured twice, captured, replayed; fewer; 1.14; 2.28
    model = trained("auto", sizes)
    assert counted()[0] == 5
    assert captured_lengths(model) == [5, 8, 13, 26]
    assert [*stack_of(model).ratios.values()] == [0.7]
    trained("auto", [*sizes, (2, 27)])  # 2.36
    assert counted()[0] == 5
    assert captured_lengths(trained("auto", [*sizes, *[(2, 27)] * 4])) == [5, 8, 13, 26, 27]  # measured: 0.7
    monkeypatch.setattr("bastile.graphs.pays.Pays.ratio", lambda self: 1.5)
    assert captured_lengths(trained("auto", [(2, 8)] * 5 + [(2, 10)] * 2)) == []  # beside none
    counted()
    assert steps._tokens((None, sign(2, 7, 4))) == 14
    assert steps._tokens((None, sign(2, 0, 4))) == 1  # which others are divided by


def test_more_than_graphs_are_kept_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MOST_CAPTURED", 2)
    sizes = [ONE, ONE, LONGER, WIDER, SHORTER]
    assert assert_alike(tiny_model(), 2, steps=5, batches=of(*sizes)).aside == {}


def test_lengths_of_which_none_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And which may not be padded: at some time capturing them in advance ends."""
    monkeypatch.setattr(stacks, "MOST_IN_VAIN", 3)
    monkeypatch.setattr("bastile.models.graphs.is_causal", lambda *_: False)
    sizes = [(2, n) for n in (5, 5, 6, 7, 8, 9, 10, 11, 8, 12)]  # 8 is used again
    model = trained(True, sizes)
    assert counted()[0] == 4 + 1 + 1
    assert captured_lengths(model) == [5, 6, 7, 8, 12]


def unlike(structure: Any) -> Any:
    """With other truth values."""
    if isinstance(structure, tuple):
        return (bool, not structure[1]) if structure[:1] == (bool,) else tuple(map(unlike, structure))
    return structure


def test_what_turns_out_otherwise_runs_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the layer on that is called in another way, and later steps of that kind altogether."""

    def wrong(*given: Any) -> Note | None:
        found = module.foreseen(*given)
        assert found is not None
        *others, last = found.calls
        return replace(found, calls=[*others, replace(last, structure=unlike(last.structure))])

    monkeypatch.setattr(steps, "foreseen", wrong)
    sizes = [ONE, ONE, SHORTER, SHORTER, ONE]
    got = assert_alike(tiny_model(), 2, steps=5, batches=of(*sizes))
    assert got.aside == {"a layer got other arguments than when it was captured": 2}
    assert captured_lengths(trained(True, sizes)) == [9]


def test_what_has_turned_out_right_is_a_kind_like_others() -> None:
    """What a later step does otherwise is that step's matter."""
    model = trained(True, [ONE, ONE, SHORTER])
    assert captured_lengths(model) == [5, 9]
    assert not any(captured.is_foreseen for captured in stack_of(model).captured.values())


@pytest.mark.skipif(ON_CUDA, reason="a CPU's generator is looked at; a GPU's shows in what is drawn, above")
def test_running_layers_before_they_are_captured_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the recorder does with the generator."""
    states: list[torch.Tensor] = []

    class Recorder(RepeatingRecorder):
        def record(self, function: Any) -> Any:
            states.append(torch.get_rng_state())
            return super().record(function)

    monkeypatch.setattr(conditions, "recorder_for", lambda device: Recorder())
    bastile.apply(cuda_graphs=True)
    model = tiny_model(attention_dropout=0.2)
    for step, sizes in enumerate([ONE, ONE, SHORTER]):
        torch.manual_seed(step)
        states.clear()
        model(**batch_of(model, step, *sizes)).loss.backward()
    assert torch.equal(states[0], torch.manual_seed(2).get_state())


def test_graphs_of_lengths_that_will_not_come_again_go() -> None:
    """When batches begin to be padded."""
    lengths = [40, 40, *range(5, 5 + VARIES - 2)]
    model = trained(True, [(2, n) for n in lengths])
    assert captured_lengths(model) == sorted(set(lengths))
    model = trained(True, [(2, n) for n in [*lengths, 19, 18]])
    assert captured_lengths(model) == [32]


def test_a_longer_kind_than_ever_has_the_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shorter goes, and is captured again in the longer one's place, where a pool cannot grow."""
    monkeypatch.setattr("bastile.graphs.recorder.can_grow", lambda device: False)
    monkeypatch.setattr(RepeatingRecorder, "grows", False)
    sizes = [(2, n) for n in (9, 9, 5, 14, 9, 12, 14)]
    assert_alike(tiny_model(), 6, steps=7, batches=of(*sizes))
    assert captured_lengths(trained(True, sizes[:3])) == [5, 9]
    assert captured_lengths(trained(True, sizes[:4])) == [14]
    assert captured_lengths(trained(True, sizes)) == [9, 12, 14]


def test_nothing_goes_from_a_pool_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What eager steps have left goes back to the driver first."""
    tidied: list[int] = []
    monkeypatch.setattr(RepeatingRecorder, "tidy", lambda self: tidied.append(1))
    sizes = [(2, n) for n in (9, 9, 5, 14, 9, 12, 14)]
    assert_alike(tiny_model(), 6, steps=7, batches=of(*sizes))
    tidied.clear()
    assert captured_lengths(trained(True, sizes[:4])) == [5, 9, 14]
    assert ON_CUDA or len(tidied) == 3  # behind the first backward pass, before 9 and 14
    assert captured_lengths(trained(True, sizes)) == [5, 9, 12, 14]


# ---- one note made of another ----------------------------------------------------------------------------------------


def given(*values: Any) -> Any:
    places = iter(range(9))
    return tuple, tuple(
        [(torch.Tensor, next(places), sign(*v), False) if type(v) is list else (type(v), v) for v in values]
    )


def sign(*shape: int) -> Any:
    return signature(torch.empty(shape))


def noted(first: Any, second: Any, *others: Any) -> Note:
    calls = [Call(structure, sign(2, 8, 4), True, True, False) for structure in (first, second, first)]
    return Note(calls, [sign(*each) for each in others], False, ())


def test_sizes_are_exchanged() -> None:
    first = given([2, 8], 5)
    second = tuple, ((torch.Tensor, 1, sign(2, 8), False),)
    found = module.foreseen(noted(first, second, [2, 8], [2, 8]), first, given([2, 6], 5), sign(2, 6, 4))
    assert found is not None
    assert found.others == [sign(2, 6)] * 2
    assert [call.hidden for call in found.calls] == [sign(2, 6, 4)] * 3
    assert found.calls[0].structure == given([2, 6], 5)
    assert found.calls[0].structure is found.calls[2].structure
    assert found.calls[1].structure == (tuple, ((torch.Tensor, 1, sign(2, 6), False),))


DIFFERS = {
    "a constant": given([2, 6], 6),
    "its type": given([2, 6], 5.0),
    "one more": given([2, 6], 5, 5),
    "a tensor for a constant": given([2, 6], [5]),
    "dimensions": given([2, 6, 1], 5),
}


@pytest.mark.parametrize("name", DIFFERS)
def test_what_differs_in_more(name: str) -> None:
    first = given([2, 8], 5)
    assert module.foreseen(noted(first, first, [2, 8]), first, DIFFERS[name], sign(2, 6, 4)) is None


def test_a_later_tensor_that_is_like_none_or_like_two() -> None:
    first, later = given([2, 8]), (tuple, ((torch.Tensor, 1, sign(2, 7), False),))
    assert module.foreseen(noted(first, later, [2, 8], [2, 7]), first, given([2, 6]), sign(2, 6, 4)) is None
    first, later = given([8], [8]), (tuple, ((torch.Tensor, 2, sign(8), False),))
    assert module.foreseen(noted(first, later, [8], [8], [8]), first, given([6], [6]), sign(2, 6, 4)) is not None
    assert module.foreseen(noted(first, later, [8], [8], [8]), first, given([6], [7]), sign(2, 6, 4)) is None


def test_hidden_states_of_another_size_on_the_way() -> None:
    first = given([2, 8])
    note = noted(first, first, [2, 8])
    note.calls[1] = replace(note.calls[1], hidden=sign(2, 4, 4))
    assert module.foreseen(note, first, given([2, 6]), sign(2, 6, 4)) is None
