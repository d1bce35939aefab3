"""PEFT's adapters on a base of bitsandbytes' layers, after bastile.apply(): real PEFT and bitsandbytes."""

from __future__ import annotations

import gc
import json
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import bastile
from bastile.models import adapters
from command import save_model
from oracle import assert_same_bits, random_tensor
from test_peft import LAYERS, SIZES, assert_as_stock, ran, with_lora  # noqa: F401  (a fixture)

bitsandbytes = pytest.importorskip("bitsandbytes")

#: Rows are multiples of a block of 64, as in models: for others bitsandbytes' kernel for CPU is wrong.
WIDE = SIZES | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
#: Products with a quantised weight in a step: each there and back, but for three whose input nobody differentiates.
PRODUCTS = 14 * LAYERS - 3
#: Weights of one input are made at once: those of queries, keys and values, o, gate and up, down.
LAUNCHES = 8 * LAYERS - 1


def quantised(make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """A model with these in place of its linear layers, but the head."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**WIDE))
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Linear and name != "lm_head":
                setattr(module, name, make(layer))
    return model


def four_bits(kind: str = "nf4", nested: bool = True, **options: Any) -> nn.Module:
    def make(layer: nn.Linear) -> nn.Module:
        made = bitsandbytes.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=False, compress_statistics=nested, quant_type=kind
        )
        made.weight = bitsandbytes.nn.Params4bit(
            layer.weight.data, compress_statistics=nested, quant_type=kind, module=made
        )
        return made.to("cpu")

    model = quantised(make)
    model.is_loaded_in_4bit = True  # which PEFT asks for
    return with_lora(model, **options)


def eight_bits(**options: Any) -> nn.Module:
    def make(layer: nn.Linear) -> nn.Module:
        made = bitsandbytes.nn.Linear8bitLt(
            layer.in_features, layer.out_features, bias=False, has_fp16_weights=False, threshold=6.0
        )
        made.weight = bitsandbytes.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
        return made.to("cpu")

    model = quantised(make)
    model.is_loaded_in_8bit = True
    return with_lora(model, **options)


@pytest.fixture
def made(monkeypatch) -> Counter:
    """How often our operator was called, and how many weights it made."""
    counts: Counter = Counter()
    one, group = adapters.dequantize_4bit, adapters.Group

    def counted_one(*args: Any, **kwargs: Any) -> torch.Tensor:
        counts.update(calls=1, weights=1)
        return one(*args, **kwargs)

    class Counted(group):
        def __call__(self, dtype: torch.dtype) -> Any:
            counts.update(calls=1, weights=len(self._weights))
            return super().__call__(dtype)

    monkeypatch.setattr(adapters, "dequantize_4bit", counted_one)
    monkeypatch.setattr(adapters, "Group", Counted)
    return counts


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(("kind", "nested"), [("nf4", True), ("nf4", False), ("fp4", True)])
def test_a_step(ran, made, kind, nested, dropout):  # noqa: F811
    model = four_bits(kind, nested, lora_dropout=dropout)
    assert_as_stock(model)
    assert ran == {"adapted_linears": 2 * LAYERS, "adapted_gated_mlp": LAYERS}
    assert made == {"weights": PRODUCTS, "calls": LAUNCHES}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_step_on_eight_bits(ran, dropout):  # noqa: F811
    """Twice: before and after bitsandbytes' own forward has taken the weight over."""
    model = eight_bits(lora_dropout=dropout)
    assert_as_stock(model)
    assert ran == {"adapted_linears": 2 * LAYERS, "adapted_gated_mlp": LAYERS}
    bastile.apply()
    assert_as_stock(model)
    assert ran["adapted_gated_mlp"] == 2 * LAYERS


@pytest.mark.parametrize("targets", [["o_proj"], ["up_proj", "down_proj"], ["v_proj"]])
@pytest.mark.parametrize("make", [four_bits, eight_bits])
def test_adapters_on_some_layers(ran, make, targets):  # noqa: F811
    """So that queries, keys and values, say, are quantised and nothing else."""
    assert_as_stock(make(target_modules=targets))
    assert ran["adapted_linears"] > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(ran, reentrant):  # noqa: F811
    model = four_bits()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_as_stock(model)
    assert ran["adapted_gated_mlp"] == 2 * LAYERS


def layer_of(model: nn.Module) -> Any:
    return model.base_model.model.model.layers[0].mlp.up_proj


def test_the_weight_is_the_one_that_the_layer_has_now(ran):  # noqa: F811
    """Quantised anew, or moved: what was read before is not used."""
    model = four_bits()
    layer, x = layer_of(model), random_tensor((3, 64), torch.float32, "cpu").requires_grad_()
    first = layer(x)
    other = layer_of(four_bits("fp4")).base_layer
    layer.base_layer.weight = other.weight
    second = layer(x)
    layer.base_layer.weight.quant_state.absmax = other.weight.quant_state.absmax.flip(0)
    third = layer(x)
    bastile.reset()
    torch.testing.assert_close(third, layer(x))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_bytes_stored_as_another_type(ran, made, storage):  # noqa: F811
    """As for FSDP, which shards weights of one type."""
    layer = bitsandbytes.nn.Linear4bit(64, 128, bias=False, quant_type="nf4", quant_storage=storage).to("cpu")
    x = random_tensor((3, 64), torch.float32, "cpu")
    found = adapters.linears(x, (layer,))[0]
    assert made["weights"] == 1
    torch.testing.assert_close(found, layer(x))


def test_weights_of_16_bits_in_a_product_of_float32():
    """bitsandbytes rounds to the type that was quantised, and so do we."""
    layer = bitsandbytes.nn.Linear4bit(64, 128, bias=False, quant_type="nf4")
    layer.weight = bitsandbytes.nn.Params4bit(layer.weight.data.bfloat16(), quant_type="nf4", module=layer)
    layer = layer.to("cpu")
    given = adapters.adapted(layer, torch.ones(1, 64))
    want = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert want.dtype is torch.bfloat16
    assert_same_bits(given.dequantise(torch.float32), want.float())


def test_packed_for_inference_runs_as_stock(ran):  # noqa: F811
    layer = layer_of(four_bits())
    layer.base_layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(adapters.NotServed, match="packed for inference"):
        adapters.adapted(layer, torch.ones(1, 64))


def test_nothing_is_kept_of_a_model_that_is_gone():
    gc.collect()  # models of earlier tests
    before = len(adapters._FOUR_BITS)
    layer = bitsandbytes.nn.Linear4bit(64, 128, bias=False, quant_type="nf4").to("cpu")
    layer.weight.module = layer  # as loading a model leaves it
    adapters.linears(torch.ones(1, 64), (layer,))
    assert len(adapters._FOUR_BITS) == before + 1
    del layer
    gc.collect()
    assert len(adapters._FOUR_BITS) == before


def test_compiled_without_a_graph_break(ran):  # noqa: F811
    layer, x = layer_of(four_bits()), random_tensor((3, 64), torch.float32, "cpu").requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    text = Path(json.__file__).read_text()
    model = save_model(tmp_path / "model", text, hidden_size=64, intermediate_size=128)
    (tmp_path / "text.txt").write_text(text)
    program = Path(__file__).parents[2] / "examples" / "qlora.py"
    options = ["--model", model, "--text", tmp_path / "text.txt", "--save", tmp_path / "adapters"]
    monkeypatch.setattr(sys, "argv", [str(program), *map(str, options), "--steps", "2", "--sequence", "32"])
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        bastile.reset()
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
    assert "peft.tuners.lora.bnb.Linear4bit" in capsys.readouterr().out
