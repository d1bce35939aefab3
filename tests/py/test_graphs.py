"""Decoder layers as graphs: whatever is trained, the bits are those of training without them."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments

import bastile
from bastile.graphs import conditions
from bastile.graphs import stack as stacks
from bastile.graphs import step as steps
from bastile.graphs.captured import Captured
from bastile.graphs.pays import Pays, pays
from bastile.ops import _adapted_mlp
from bastile.ops import lora as of_lora
from conftest import tiny_model
from graphing import DEVICE, ON_CUDA, allow_graphs, assert_alike, batch_of, counted, train
from processes import alone
from test_gpt_oss import tiny_gpt_oss


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch)


def lora(model: Any, **more: Any) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False, **more)
    return get_peft_model(model, config).train()


def checkpointed(model: Any, reentrant: bool) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_losses_and_weights_are_those_without_graphs(family: str) -> None:
    """The first step is seen, the second captured and replayed, as are all that follow. The model makes a cache for
    itself, since nobody says use_cache=False."""
    assert_alike(tiny_model(family, num_hidden_layers=3), 3)


def test_layers_of_two_kinds_of_masks() -> None:
    """Full and sliding: the second layer is given a mask that the first one was not."""
    assert_alike(tiny_gpt_oss(num_hidden_layers=4), None if ON_CUDA else 3)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_accumulated(set_to_none: bool) -> None:
    """.grad is a graph's memory after the first batch, which the second one's graph writes over."""
    assert_alike(tiny_model(), 11, accumulate=3, set_to_none=set_to_none)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_stays_and_is_captured(reentrant: bool) -> None:
    model = checkpointed(tiny_model(num_hidden_layers=3), reentrant)
    assert_alike(model, 7, accumulate=2)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_reentrant_checkpointing_without_gradients_of_its_inputs() -> None:
    """PyTorch then computes no gradients of what is in the layers, and warns."""
    model = tiny_model()
    model.model.embed_tokens.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.disable_input_require_grads()
    with pytest.warns(UserWarning, match="None of the inputs"):
        got = assert_alike(model, 0)
    assert "reentrant checkpointing of hidden states that require no gradient" in got.aside


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_adapters_of_a_frozen_model(reentrant: bool | None) -> None:
    model = lora(tiny_model(num_hidden_layers=3))
    assert_alike(model if reentrant is None else checkpointed(model, reentrant), 7, accumulate=2)


@pytest.mark.parametrize("trained", ["adapters", "all"])
def test_checkpointed_layers_in_a_graph(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few, whose gradients are copied, where these need memory; as many as of others where adapters alone train."""
    found: list[tuple[list[int], bool]] = []
    record = Captured._record

    def noted(self: Any) -> None:
        found.append(([len(run.layers) for run in self.runs], self.lends_gradients))
        record(self)

    monkeypatch.setattr(Captured, "_record", noted)
    model = tiny_model(num_hidden_layers=8)
    if trained == "adapters":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], r=1)).train()
    assert_alike(checkpointed(model, False), 7, accumulate=2)
    assert found[0] == (([7, 1], True) if trained == "adapters" else ([3, 3, 2], False))


def test_adapters_of_checkpointed_layers_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What large models do: the MLP's backward pass in parts, adapters of another type than the layers', rounded for a
    whole layer at once, and the first norm's result made again."""
    monkeypatch.setattr(_adapted_mlp, "_LEAST_WORK", 1)
    monkeypatch.setattr(_adapted_mlp, "_ROWS", 4)
    monkeypatch.setattr(of_lora, "_MADE_AGAIN", 0)
    model = checkpointed(lora(tiny_model(num_hidden_layers=3)), False)
    assert_alike(model, 7, accumulate=2, around=lambda: torch.autocast(DEVICE, torch.bfloat16))


def test_the_lower_layers_are_frozen() -> None:
    model = tiny_model(num_hidden_layers=3)
    for module in (model.model.embed_tokens, *model.model.layers[:2]):
        module.requires_grad_(False)
    assert_alike(model, 3)


def test_autocast_of_float32_weights() -> None:
    assert_alike(tiny_model(), 3, around=lambda: torch.autocast(DEVICE, torch.bfloat16))


def test_dropout_draws_the_same_numbers() -> None:
    assert_alike(tiny_model(attention_dropout=0.2), 3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_in_checkpointed_layers(reentrant: bool) -> None:
    """Their second run draws what the first one drew, each step and each layer something else; and what is drawn
    behind them, here by the head, is what it would be."""
    model = checkpointed(tiny_model(num_hidden_layers=3, attention_dropout=0.2), reentrant)
    model.lm_head = nn.Sequential(model.lm_head, nn.Dropout(0.1))
    assert_alike(model, 7, accumulate=2)


def test_checkpointed_layers_that_draw_other_numbers_in_their_second_run() -> None:
    model = tiny_model(attention_dropout=0.2)
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    got = assert_alike(model, 0)
    [reason] = got.aside
    assert reason.startswith("random numbers (dropout) in checkpointed layers")


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_dropout_of_adapters(reentrant: bool | None) -> None:
    """PEFT's usual fine-tuning."""
    model = lora(tiny_model(num_hidden_layers=3), lora_dropout=0.3)
    assert_alike(model if reentrant is None else checkpointed(model, reentrant), 7, accumulate=2)


def test_recomputed_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """bastile.recompute's hooks are in force while the layers are captured, and in the backward pass."""
    monkeypatch.setenv("BASTILE_RECOMPUTE_TOKENS", "0")
    assert_alike(tiny_model(num_hidden_layers=3), 3)


def test_shapes_and_masks_of_several_kinds() -> None:
    """Each is seen once without graphs, and what lies in the pool is another's in the next step."""
    kinds = [(2, 11, True), (1, 11, True), (2, 7, False), (2, 11, False)]

    def batches(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
        rows, columns, mask = kinds[step * 7 % 4 if step > 4 else step % 4]
        return batch_of(model, step, rows, columns, mask)

    assert_alike(tiny_model(), 12, steps=8, accumulate=2, batches=batches)


def test_the_least_recently_used_shape_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MOST_CAPTURED", 2)
    monkeypatch.setattr(stacks, "WORTH", 1)
    lengths = [5, 5, 6, 6, 7, 7, 5, 7, 6]

    def batches(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
        return batch_of(model, step, 2, lengths[step])

    # 6 is foreseen; 7 finds no room, is noted, and takes that of 5, which takes that of 6 when it comes again.
    assert_alike(tiny_model(), 7, steps=9, batches=batches)
    for stack in stacks._stacks.values():
        assert len(stack.captured) <= 2


def test_a_shape_must_come_often_to_take_another_s_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three lengths in turn two stay captured. One that comes alone takes the other's place in time."""
    monkeypatch.setattr(stacks, "MOST_CAPTURED", 2)
    made: list[int] = []
    monkeypatch.setattr(steps, "Captured", lambda *given: made.append(1) or Captured(*given))
    lengths = [*[5, 6, 7] * 5, *[8] * 13]

    def batches(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
        return batch_of(model, step, 2, lengths[step])

    # Each is noted; then 5 and 6 have graphs in four steps, and 7 finds no room. 8 is noted, and has been seen ten
    # times when it gets some.
    got = assert_alike(tiny_model(), 2 * 4 + 3, steps=len(lengths), batches=batches)
    assert len(made) == 3
    assert [(reason[:24], n) for reason, n in got.aside.items()] == [("more kinds of steps than", 4 + 9)]


def test_graphs_make_room_for_larger_steps_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short; and come again when such steps do not."""
    model = tiny_model().to(DEVICE)
    recorder = type(conditions.recorder_for(next(model.parameters()).device))
    monkeypatch.setattr(recorder, "is_short_of_memory", lambda self: True)
    monkeypatch.setattr("bastile.graphs.pays.Pays.ratio", lambda self: 0.1 if stack_of().steps < 5 else 5.0)
    bastile.apply(cuda_graphs="auto")

    def stack_of() -> Any:
        [stack] = stacks._stacks.values()
        return stack

    def step(length: int) -> int:
        model(**batch_of(model, length, 2, length)).loss.backward()
        model.zero_grad()
        return len(stack_of().captured)

    assert [step(5) for _ in range(5)] == [0, 0, 0, 1, 1]
    assert step(5 * 40) == 0
    assert [step(length) for length in [5, 200, 5, 5, 200] * 3] == [0] * 15
    assert [step(5) for _ in range(stacks.WORTH)] == [0] * (stacks.WORTH - 1) + [1]
    assert counted()[1] == {
        "larger steps, which have no graphs, need the memory that graphs would have": 9 + stacks.WORTH - 1,
        "the device is not waiting for the host": 4,
    }


@pytest.mark.parametrize("kinds", [4, 20])
def test_a_thousand_steps_leak_nothing(kinds: int) -> None:
    """Fewer kinds of steps than graphs are kept for, and more."""
    bastile.apply(cuda_graphs=True)
    model = tiny_model().to(DEVICE)
    before = _tensors_after(model, kinds, 60)
    reserved = torch.cuda.memory_reserved() if ON_CUDA else 0
    assert _tensors_after(model, kinds, 1000 if ON_CUDA else 60) <= before + 2  # the last loss
    if ON_CUDA:
        assert torch.cuda.memory_reserved() <= reserved
    weak = weakref.ref(model.model.layers[0])
    del model
    gc.collect()
    assert weak() is None
    assert not stacks._stacks


def _tensors_after(model: Any, kinds: int, steps: int) -> int:
    for step in range(steps):
        model(**batch_of(model, step, 1, 4 + step % kinds)).loss.backward()
        model.zero_grad()
    gc.collect()
    return sum(type(item) is torch.Tensor for item in gc.get_objects())


def test_evaluation_and_text_between_steps() -> None:
    def evaluate(model: Any) -> None:
        model.eval()
        with torch.no_grad():
            model(**batch_of(model, 99))
            model.generate(batch_of(model, 99)["input_ids"][:, :3], max_new_tokens=3, do_sample=False)
        model.train()

    assert_alike(tiny_model(), 5, steps=6, before=[evaluate] * 6)


def test_two_models_at_once() -> None:
    """Two forward passes, then both backward passes: each model has memory of its own."""

    def both(graphs: bool) -> list[torch.Tensor]:
        bastile.apply(cuda_graphs=graphs)
        models = [tiny_model(seed=seed).to(DEVICE) for seed in (0, 1)]
        for step in range(3):
            losses = [model(**batch_of(model, step)).loss for model in models]
            sum(losses).backward()
        return [p.grad.clone() for model in models for p in model.parameters()]

    counted()
    want, got = both(False), both(True)
    assert counted()[0] == 4
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_graphs_by_name_before_any_model_is_imported() -> None:
    """PEFT, which the Trainer imports, imports Bloom, whose backbone is not known."""
    lines = "from peft import PeftModel", "import bastile", "print(bastile.apply(cuda_graphs=True, recompute=True))"
    found = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert "'cuda_graphs'" in found.stdout


def test_one_model_alone_has_graphs() -> None:
    counted()
    models = [tiny_model(seed=seed).to(DEVICE) for seed in (0, 1, 2)]
    bastile.apply(cuda_graphs=False)
    assert "cuda_graphs_qwen3" in bastile.apply_to_model(models[0], cuda_graphs=True)
    assert "cuda_graphs_qwen3" not in bastile.apply_to_model(models[1], cuda_graphs=False)
    for model in models:
        for step in range(3):
            model(**batch_of(model, step)).loss.backward()
    assert counted() == (2, {})
    bastile.reset(model=models[0])
    for step in range(3):
        models[0](**batch_of(models[0], step)).loss.backward()
    assert counted() == (0, {})


def test_gradients_outlive_the_graphs() -> None:
    """Those of the last step lie in the graphs' memory when bastile.reset() lets it go."""
    grads = []
    for graphs in (False, True):
        bastile.apply(cuda_graphs=graphs)
        model = tiny_model().to(DEVICE)
        for step in range(3):
            model.zero_grad()
            model(**batch_of(model, step)).loss.backward()
        bastile.reset()
        gc.collect()
        if graphs:
            for step in range(2):  # in the same memory, were it not the gradients'
                tiny_model()(**batch_of(model, step)) if not ON_CUDA else torch.empty(1 << 20, device=DEVICE).fill_(1)
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_trainer(checkpointing: bool, tmp_path: Any) -> None:
    found = []
    for graphs in (False, True):
        bastile.apply(cuda_graphs=graphs)
        counted()
        model = tiny_model()
        data = [{name: t[0] for name, t in batch_of(model, i, 2, 11).items()} for i in range(16)]
        data = [{name: t.cpu() for name, t in each.items()} for each in data]
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, report_to=[],
            save_strategy="no", bf16=True, gradient_checkpointing=checkpointing, use_cpu=not ON_CUDA, logging_steps=1,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        found.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
        found.append([p.detach().cpu() for p in model.parameters()])
        replayed, aside = counted()
        assert replayed == (7 if graphs else 0), aside
    assert found[0] == found[2]
    assert all(torch.equal(one, other) for one, other in zip(found[1], found[3], strict=True))


def test_gradients_reach_distributed_data_parallel() -> None:
    with alone("nccl" if ON_CUDA else "gloo"):
        found = []
        for graphs in (False, True):
            bastile.apply(cuda_graphs=graphs)
            model = nn.parallel.DistributedDataParallel(tiny_model().to(DEVICE), gradient_as_bucket_view=graphs)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(4):
                with model.no_sync():
                    model(**batch_of(model, 2 * step)).loss.backward()
                model(**batch_of(model, 2 * step + 1)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([p.detach().clone() for p in model.parameters()])
        assert counted()[0] == 7
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_auto_measures_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step is noted, two are measured; the verdict may take longer to arrive."""
    ratios = iter([None, 0.5])
    monkeypatch.setattr("bastile.graphs.pays.Pays.ratio", lambda self: next(ratios))
    model = tiny_model()
    assert train(model, "auto", steps=7).replayed == 3  # type: ignore[arg-type]
    monkeypatch.setattr("bastile.graphs.pays.Pays.ratio", lambda self: 2.0)
    run = train(model, "auto", steps=5)  # type: ignore[arg-type]
    assert (run.replayed, run.aside) == (0, {"the device is not waiting for the host": 2})


@pytest.mark.parametrize(("has_begun", "ratio"), [(True, 0.5), (False, math.inf)])
def test_who_waits_for_room_in_the_queue_is_not_slow(
    has_begun: bool, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps for which nobody waits fill the queue of launches, and then the host takes as long as the device. It is
    seen by this: the device has not come to a forward pass when the host is through with it."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.seconds: float | None = None

        def record(self) -> None:
            self.seconds = 0.0

        def query(self) -> bool:
            return has_begun or measured.ratio_is_asked

        def elapsed_time(self, end: Event) -> float:
            return 0.5 * 1e3 * measured._seconds

    class Measured(Pays):
        ratio_is_asked = False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    measured = Measured(torch.device("cuda"))
    measured.begin()
    measured.end()
    measured.ratio_is_asked = True
    assert measured.ratio() == pytest.approx(ratio)
    assert pays(ratio) == has_begun


@pytest.mark.parametrize(
    ("done", "ratio"), [([True] * 3, 1.0), ([True, True, False], 1.0), ([True, False, False], 2.0)]
)
def test_a_device_that_waits_in_the_backward_pass_alone(
    done: list[bool], ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the loss is read between the passes, and the host has more to do for each layer in the second one."""
    answers = iter(done)

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.is_of_forward = enable_timing

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return self.is_of_forward or next(answers)

        def elapsed_time(self, end: Event) -> float:
            return 2e3 * measured._seconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    measured = Pays(torch.device("cuda"))
    measured.begin()
    hidden = torch.ones(2, requires_grad=True)
    for _ in range(4):
        hidden = hidden * 2.0
        measured.show(hidden)
    measured.end()
    assert measured.ratio() == pytest.approx(2.0)  # and it is not known yet what the backward pass is like
    hidden.sum().backward()
    assert measured.ratio() == pytest.approx(ratio)
    measured.begin()
    measured.end()
    assert measured.ratio() == pytest.approx(2.0)  # another step


@pytest.mark.skipif(not ON_CUDA, reason="needs a queue of launches")
def test_a_device_that_is_behind_gets_no_graphs() -> None:
    """However many launches are queued: here so many that the host waits for room in each step."""
    bastile.apply(cuda_graphs="auto")
    model = tiny_model(num_hidden_layers=4).to(DEVICE)
    batch, work = batch_of(model, 0, mask=False), torch.randn(2048, 2048, device=DEVICE)
    for _ in range(8):
        for _ in range(300):
            torch.mm(work, work)
        model(**batch).loss.backward()
    assert counted()[0] == 0
    torch.cuda.synchronize()
