"""PEFT's adapters on a base that torchao has quantised, after bastile.apply(): part of make test-trl."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import bastile
from test_peft import LAYERS, SIZES, assert_as_stock, ran, with_lora  # noqa: F401  (a fixture)

quantization = pytest.importorskip("torchao.quantization")


def model(config: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    quantization.quantize_(made.model, config)
    return with_lora(made, **options)


@pytest.mark.parametrize("granularity", ["row", "group"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_step(ran, granularity, dropout):  # noqa: F811
    options = {} if granularity == "row" else {"granularity": quantization.PerGroup(8)}
    assert_as_stock(model(quantization.Int8WeightOnlyConfig(**options), lora_dropout=dropout))
    assert ran == {"adapted_linears": 2 * LAYERS, "adapted_gated_mlp": LAYERS}


def test_rounded_inputs_run_as_stock(ran):  # noqa: F811
    """Its other way rounds the input of a layer too: a product of whole weights is something else."""
    rounding = model(quantization.Int8DynamicActivationInt8WeightConfig())
    tokens = torch.arange(24).view(2, 12)
    rounding(input_ids=tokens, labels=tokens).loss.backward()
    assert not ran
    assert "scales or rounds its input" in str(bastile.report())
