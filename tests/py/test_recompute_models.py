"""Models that recompute: the gradients of those that do not, to the bit, from less memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.multiprocessing.reductions import StorageWeakRef

import bastile
from bastile.models import backbone
from bastile.ops import _adapted_mlp
from conftest import gradients, tiny_batch, tiny_model
from memory import Memory, kept_by
from oracle import assert_same_bits, devices


@pytest.fixture(autouse=True)
def at_every_size() -> Iterator[None]:
    bastile.set_recompute(0)
    yield
    bastile.set_recompute(None)


def with_and_without(run: Callable[[], Any]) -> tuple[Any, Any]:
    bastile.set_recompute(10**9)
    without = run()
    bastile.set_recompute(0)
    return without, run()


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_s_gradients_are_the_same_bits(dtype: torch.dtype, adapted: bool, checkpointing: bool | None) -> None:
    model: Any = tiny_model(dtype=dtype)
    batch = tiny_batch(model)
    bastile.apply()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    if adapted:
        model.enable_input_require_grads()
        targets = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(target_modules=targets, r=4, init_lora_weights=False))

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        output = model(**batch, use_cache=False)
        output.loss.backward()
        return output.loss.detach(), gradients(model)

    (want_loss, want), (loss, got) = with_and_without(run)
    assert_same_bits(loss, want_loss)
    assert want.keys() == got.keys()
    for name in want:
        assert_same_bits(got[name], want[name])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_a_model_keeps_so_much_less(adapted: bool, device: str) -> None:
    """In each layer two outputs of norms; with adapters these are what the adapters keep, and one of SwiGLU, which an
    MLP without them keeps in no case."""
    model: Any = tiny_model().to(device)
    batch = {name: value.to(device) for name, value in tiny_batch(model).items()}
    bastile.apply(qk_norm_rope=False)
    if adapted:
        model.enable_input_require_grads()
        targets = ["q_proj", "k_proj", "gate_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(target_modules=targets, r=4))
    without, with_recomputation = with_and_without(lambda: kept_by(lambda: model(**batch).loss))
    dropped = 2 * 32  # with adapters, too: the MLP of layers with adapters is one node, which keeps no activation
    assert without - with_recomputation == 2 * dropped * batch["input_ids"].numel() * 4


@pytest.mark.parametrize("device", devices())
def test_the_last_layer_s_mlp_with_adapters_is_made_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gate's and up's results are not there while the head's loss is made; the losses are the same bits."""
    monkeypatch.setattr(_adapted_mlp, "_LEAST_WORK", 1)
    monkeypatch.setattr(_adapted_mlp, "_ROWS", 4)
    model: Any = tiny_model().to(device)
    batch = {name: value.to(device) for name, value in tiny_batch(model).items()}
    bastile.apply()
    lora = LoraConfig(target_modules="all-linear", r=4, lora_alpha=4, init_lora_weights=False)
    model = get_peft_model(model, lora)

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        output = model(**batch)
        output.loss.backward()
        return output.loss.detach(), gradients(model)

    (want_loss, want), (loss, got) = with_and_without(run)
    assert_same_bits(loss, want_loss)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5)
    kept = []
    for chosen in (frozenset, lambda layers: layers[-1].modules()):
        monkeypatch.setattr(backbone, "_last_of", lambda model, chosen=chosen: chosen(getattr(model, "layers", ())))
        kept.append(kept_by(lambda: model(**batch).loss))
    gate_and_up, thin = 2 * 48, 4
    assert kept[0] - kept[1] == (gate_and_up + thin) * batch["input_ids"].numel() * 4


def test_attention_keeps_no_rotated_queries_and_keys() -> None:
    """With as many heads of keys as of queries, and no cache of keys, attention keeps them as they are."""
    model = tiny_model(num_key_value_heads=4)
    batch = tiny_batch(model)
    bastile.apply()
    without, with_recomputation = with_and_without(lambda: kept_by(lambda: model(**batch, use_cache=False).loss))
    assert without - with_recomputation == 2 * (2 * 32 + 2 * 4 * 16) * batch["input_ids"].numel() * 4


def test_what_outputs_are_made_from_goes_with_the_backward_pass() -> None:
    """When the first layer's gradients come, nothing that the last layer kept is left."""
    model: Any = tiny_model()
    batch = tiny_batch(model)
    bastile.apply()
    kept: list[StorageWeakRef] = []
    left: list[bool] = []

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
        kept.append(StorageWeakRef(output.untyped_storage()))

    def look(weight: torch.Tensor) -> None:
        left.append(kept[-1].expired())

    model.model.layers[-1].mlp.gate_proj.register_forward_hook(keep)
    model.model.layers[0].mlp.gate_proj.weight.register_post_accumulate_grad_hook(look)
    with_and_without(lambda: model(**batch, use_cache=False).loss.backward())
    assert left == [True, True]


def test_gradients_under_autocast() -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    bastile.apply()

    def run() -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        return gradients(model)

    want, got = with_and_without(run)
    for name in want:
        assert_same_bits(got[name], want[name])


def test_only_from_so_many_tokens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    bastile.apply()

    def kept() -> int:
        return kept_by(lambda: model(**batch).loss)

    assert batch["input_ids"].numel() == 22
    bastile.set_recompute(23)
    everything = kept()
    bastile.set_recompute(22)
    assert kept() < everything
    bastile.set_recompute(None)
    assert kept() == everything  # 6144 unless told otherwise
    monkeypatch.setenv("BASTILE_RECOMPUTE_TOKENS", "22")
    assert kept() < everything
    embeddings = model.model.embed_tokens(batch.pop("input_ids")).detach()
    batch["inputs_embeds"] = embeddings
    less = kept()
    monkeypatch.setenv("BASTILE_RECOMPUTE_TOKENS", "23")
    assert kept() > less
    bastile.reset("recompute_qwen3")
    monkeypatch.setenv("BASTILE_RECOMPUTE_TOKENS", "0")
    assert kept() > less
    monkeypatch.setenv("BASTILE_RECOMPUTE_TOKENS", "few")
    bastile.apply()
    with pytest.raises(ValueError, match="BASTILE_RECOMPUTE_TOKENS is 'few'"):
        model(**batch)
    with pytest.raises(ValueError, match="min_tokens is -1"):
        bastile.set_recompute(-1)


def test_weights_that_zero_3_partitions_are_left_alone() -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    bastile.apply()
    less = kept_by(lambda: model(**batch).loss)
    next(model.model.parameters()).ds_id = 0
    assert kept_by(lambda: model(**batch).loss) > less


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_train_alike(whole: bool) -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    bastile.apply()
    model(**batch).loss.backward()
    want = gradients(model)
    if whole:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        compiled = model
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    compiled(**batch, use_cache=False).loss.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-4, atol=1e-6)


def test_nothing_survives_a_step() -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    bastile.apply()
    with Memory() as memory:
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)
    gc.collect()
    for parameter in model.parameters():  # seen through their transposes
        memory.storages.pop(parameter.untyped_storage()._cdata, None)
    assert memory.kept() == 0
