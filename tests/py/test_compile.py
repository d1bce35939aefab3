"""torch.compile of patched models: one graph, the same losses, one compilation for all lengths."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import bastile
from conftest import DENSE, assert_same_up_to_rounding, calls_of_a_step, gradients, inductor, tiny_batch, tiny_model
from families import FAMILIES
from oracle import devices

families = pytest.mark.parametrize("family", sorted(DENSE))
everywhere = pytest.mark.parametrize(("family", "whole_process"), [("llama", True), ("qwen3", False)])


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch.compiler.reset()


def put(model: PreTrainedModel, whole_process: bool) -> None:
    bastile.apply() if whole_process else bastile.apply_to_model(model)


@everywhere
def test_compiled_models_run_the_operators_and_follow_a_reset(
    family: str, whole_process: bool, calls: dict[str, int]
) -> None:
    model = tiny_model(family)
    batch = tiny_batch(model)
    want = model(**batch).loss
    put(model, whole_process)
    compiled = torch.compile(model, backend="eager")
    output = compiled(**batch)
    torch.testing.assert_close(output.loss, want)
    assert output.logits is None
    assert calls == calls_of_a_step(family)
    for operator in FAMILIES[family].operators[-3:-1]:  # those in layers and attentions, and Llama's loss
        calls.clear()
        bastile.reset([f"{operator}_{family}"])
        torch.testing.assert_close(compiled(**batch).loss, want)
        assert operator not in calls
        assert calls["rms_norm"] >= 1  # it was traced again
    bastile.reset()
    assert compiled(**batch).logits is not None


@everywhere
def test_compiled_models_are_one_graph_and_compile_once(family: str, whole_process: bool) -> None:
    model = tiny_model(family)
    batch = tiny_batch(model)
    put(model, whole_process)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    want = compiled(**batch).loss
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(**batch).loss, want)


def test_a_patched_and_a_stock_model_in_one_graph_keep_their_own_code(calls: dict[str, int]) -> None:
    patched, stock = tiny_model(), tiny_model()
    ids = tiny_batch(patched)["input_ids"]
    for chosen in ({"qk_norm_rope": False}, {}):  # the rotary function is a global, the rest are methods
        bastile.reset()
        torch.compiler.reset()
        bastile.apply_to_model(patched, **chosen)
        calls.clear()
        patched(ids)
        want = dict(calls)
        for models in ((patched, stock), (stock, patched)):
            calls.clear()
            torch.compile(lambda models=models: [model(ids).logits for model in models], backend="eager")()
            assert calls == want


# aot_eager runs what inductor would compile, joint graph and partitions included, without its minutes of compilation.
@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "aot_eager"), *[(device, "inductor") for device in devices() if device == "cuda"]],
)
@families
def test_training_at_several_lengths(family: str, device: str, backend: str) -> None:
    """Steps of an optimizer; the second length makes lengths dynamic, and no other compiles anything."""
    lengths = (11, 17, 23, 8, 17, 31)

    def losses(model: PreTrainedModel, run: Any) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        found = []
        for index, length in enumerate(lengths):
            batch = {name: value.to(device) for name, value in tiny_batch(model, 2, length, seed=length).items()}
            stance = "fail_on_recompile" if run is not model and index > 1 else "default"
            with torch.compiler.set_stance(stance):
                loss = run(**batch).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    stock = tiny_model(family).to(device)
    want = losses(stock, stock)
    model = tiny_model(family).to(device)
    bastile.apply()
    for got, expected in zip(losses(model, torch.compile(model, fullgraph=True, backend=backend)), want, strict=True):
        assert_same_up_to_rounding(got, expected, model, "loss")
    assert want[4] < want[1]  # the same batch: it has learnt


@inductor
def test_inductor_on_a_cpu_gives_the_same_gradients() -> None:
    model = tiny_model(num_hidden_layers=1)
    batch = tiny_batch(model)
    loss = model(**batch).loss
    loss.backward()
    want = gradients(model)
    bastile.apply()
    compiled = torch.compile(model, fullgraph=True)
    got = compiled(**batch).loss
    got.backward()
    assert_same_up_to_rounding(got, loss, model, "loss")
    for name, gradient in gradients(model).items():
        assert_same_up_to_rounding(gradient, want[name], model, name)


@families
def test_checkpointed_layers_are_compiled(family: str) -> None:
    model = tiny_model(family)
    batch = tiny_batch(model)
    model(**batch).loss.backward()
    want = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    bastile.apply()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(**batch, use_cache=False).loss.backward()
    for name, gradient in gradients(model).items():
        assert_same_up_to_rounding(gradient, want[name], model, name)
