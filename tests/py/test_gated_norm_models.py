"""Norms with a gate in models: which of their classes the operator serves, with what their code computes, and when the
original runs."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import bastile
from bastile.models import small
from oracle import Case, assert_no_worse, random_tensor

#: Model type, class, what it is built with, attributes that are set then: each form of code.
CLASSES = {
    "behind": ("qwen3_next", "Qwen3NextRMSNormGated", (64,), {}),
    "behind, sigmoid": ("kimi_linear", "KimiLinearRMSNormGated", (64,), {}),
    "sigmoid by its attribute": ("qwen3_next", "Qwen3NextRMSNormGated", (64,), {"activation": "sigmoid"}),
    "before": ("mamba2", "MambaRMSNormGated", (64, 64), {}),
    "before, in groups": ("zamba2", "Zamba2RMSNormGated", (64, 16), {}),
    "of a module's choice, before": ("falcon_h1", "FalconH1RMSNormGated", (64, 1e-5, 1, False), {}),
    "of a module's choice, behind, in groups": ("falcon_h1", "FalconH1RMSNormGated", (64, 1e-5, 4, True), {}),
}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.ERROR, "bastile")
    yield
    bastile.reset()


def modeling(model_type: str) -> Any:
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def built(name: str) -> nn.Module:
    model_type, cls, arguments, attributes = CLASSES[name]
    try:
        module = getattr(modeling(model_type), cls)(*arguments)
    except (ImportError, AttributeError, TypeError):
        pytest.skip("not in this release of Transformers")
    for key, value in attributes.items():
        setattr(module, key, value)
    nn.init.uniform_(module.weight, 0.5, 1.5)
    return module


def exact(module: Any, name: str) -> Any:
    """The definition, of float64 throughout."""
    arguments = CLASSES[name][2]
    first = "before" in name
    width = {"before, in groups": 16, "of a module's choice, behind, in groups": 16}.get(name, arguments[0])
    act = torch.sigmoid if "sigmoid" in name else nn.functional.silu

    def run(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        u = (x * act(gate) if first else x).unflatten(-1, (-1, width))
        n = (u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)).flatten(-2) * weight
        return n if first else n * act(gate)

    return run


def ran() -> int:
    return bastile.report().ran("gated_rms_norm")


@pytest.mark.parametrize(
    ("dtype", "gate_type", "weight_type"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),  # as under autocast
        (torch.float32, torch.bfloat16, torch.float32),  # where the state is kept in float32
        (torch.float16, torch.float16, torch.float16),
    ],
)
@pytest.mark.parametrize("name", CLASSES)
def test_each_class_computes_what_it_did(name, dtype, gate_type, weight_type):
    module = built(name).to(weight_type)
    x, gate = random_tensor((2, 24, 64), dtype, "cpu", scale=2.0), random_tensor((2, 24, 64), gate_type, "cpu")

    def call(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, {"weight": weight}, (x, gate))

    stock = type(module).forward
    before = ran()

    def ours(*tensors: torch.Tensor) -> torch.Tensor:
        bastile.apply()
        assert type(module).forward is not stock
        try:
            return call(*tensors)
        finally:
            bastile.reset()
            assert type(module).forward is stock

    assert_no_worse(
        Case(ours, call, exact(module, name), {"x": x, "gate": gate, "weight": module.weight.detach().clone()})
    )
    assert ran() == before + 1


@pytest.mark.parametrize("name", CLASSES)
def test_what_the_operator_does_not_serve_runs_the_original(name):
    module = built(name)
    x, gate = torch.randn(3, 5, 64), torch.randn(3, 5, 64)
    calls = [lambda: module(x, gate[:, :1]), lambda: module(x, gate=gate), lambda: module(x.double(), gate)]
    if "before" in name:
        calls.append(lambda: module(x, None))

    def results() -> list[Any]:
        found = []
        for call in calls:
            with torch.no_grad():
                found.append(call())
        return found

    want = results()
    bastile.apply()
    before = ran()
    for got, expected in zip(results(), want, strict=True):
        assert torch.equal(got, expected)
    assert ran() == before
    module(x, gate)
    assert ran() == before + 1


def test_a_module_that_says_otherwise_runs_the_original():
    bastile.apply()
    before, x = ran(), torch.randn(2, 3, 64)
    module = built("behind")
    module.activation = "gelu"
    module(x, x)
    grouped = built("before, in groups")
    grouped.group_size = 24  # which is no divisor: the original's error
    with pytest.raises(RuntimeError):
        grouped(x, x)
    several = built("of a module's choice, behind, in groups")
    several.n_groups = 3
    with pytest.raises(RuntimeError):
        several(x, x)
    assert ran() == before
    asides = [line.aside for line in bastile.report() if line.operator == "gated_rms_norm"]
    reasons = {reason for aside in asides for reason in aside}
    assert {"its activation is neither silu nor sigmoid", "its groups are not of one size"} <= reasons


def test_an_own_forward_is_left_alone():
    """As Hugging Face's package kernels gives to modules."""
    module = built("behind")
    module.forward = lambda x, gate: x
    bastile.apply()
    x = torch.randn(2, 64)
    assert module(x, x) is x


def test_it_can_be_left_out_and_put_into_one_model():
    module = modeling("qwen3_next").Qwen3NextRMSNormGated
    stock = module.forward
    assert "gated_rms_norm_qwen3_next" in bastile.apply(model_types="qwen3_next")
    assert module.forward is not stock
    bastile.apply(gated_rms_norm=False, model_types="qwen3_next")
    assert module.forward is stock
    bastile.reset()
    model = small.small_model("qwen3_next")
    assert "gated_rms_norm_qwen3_next" in bastile.apply_to_model(model)
    assert module.forward is stock
    before = ran()
    small.step(model)
    assert ran() > before
    bastile.reset(model=model)
    before = ran()
    small.step(model)
    assert ran() == before
