"""Trainers other than TRL (test_trl.py): what each is given, against the signatures that they publish."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest
import torch

import bastile
from oracle import random_tensor

CLASSES = 61


def a_module(name: str, monkeypatch: pytest.MonkeyPatch, **members: Any) -> types.ModuleType:
    """A module by this name, and its packages, for the time of a test."""
    module = types.ModuleType(name)
    parts = name.split(".")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, name, module)
    for member, value in members.items():
        value.__module__ = name
        setattr(module, member, value)
    return module


class FusedLinearForPPOFunction(torch.autograd.Function):
    """As verl 0.9.1 has it."""

    @staticmethod
    def forward(ctx, hidden_states, vocab_weights, input_ids, temperature=1.0, chunk_size=512):
        log_p = ((hidden_states @ vocab_weights.T).float() / temperature).log_softmax(-1)
        chosen = log_p.gather(-1, input_ids[..., None])[..., 0]
        return chosen.to(hidden_states.dtype), -(log_p.exp() * log_p).sum(-1).to(hidden_states.dtype)


def test_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """[B, T, H] and [T, H], what follows the hidden states' type, and gradients, which this stock lacks."""
    cls = FusedLinearForPPOFunction
    a_module("verl.utils.experimental.torch_functional", monkeypatch, FusedLinearForPPOFunction=cls)
    hidden, weight = random_tensor((2, 9, 16), torch.float32, "cpu"), random_tensor((CLASSES, 16), torch.float32, "cpu")
    targets = torch.randint(CLASSES, (2, 9))
    stock = [cls.apply(*inputs) for inputs in ((hidden, weight, targets, 0.7, 512), (hidden[0], weight, targets[0]))]
    bastile.report(reset=True)
    bastile.apply()
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    ours = [cls.apply(*leaves, targets, 0.7, 512), cls.apply(hidden[0], weight, targets[0])]
    assert bastile.report().ran("linear_logprobs") == 2
    torch.testing.assert_close(ours, stock)
    log_p = torch.nn.functional.linear(*leaves).div(0.7).log_softmax(-1)
    wanted = torch.autograd.grad(log_p.gather(-1, targets[..., None]).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(ours[0][0].sum(), leaves), wanted, rtol=1e-5, atol=1e-5)
    assert cls.apply(hidden.bfloat16(), weight.bfloat16(), targets)[1].dtype is torch.bfloat16
    cls.apply(hidden, weight, targets, torch.full((2, 9, 1), 0.7))
    [line] = [line for line in bastile.report() if line.operator == "linear_logprobs" and line.aside]
    assert line.aside == {"it is called with a temperature that is no number": 1}
    assert line.ran == 3
    bastile.reset()
    assert "apply" not in vars(cls)


def test_axolotl(monkeypatch: pytest.MonkeyPatch) -> None:
    class BasePlugin:
        def pre_model_load(self, cfg: Any) -> None:
            raise NotImplementedError

    a_module("axolotl.integrations.base", monkeypatch, BasePlugin=BasePlugin)
    monkeypatch.delitem(sys.modules, "bastile.integrations.axolotl", raising=False)
    plugin = importlib.import_module("bastile.integrations.axolotl").BastilePlugin()
    assert bastile.get_patched_ops() == []
    plugin.pre_model_load({})
    assert "rms_norm" in bastile.get_patched_ops()
    sys.modules.pop("bastile.integrations.axolotl")


def test_a_module_whose_import_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As verl does by external_lib."""
    monkeypatch.delitem(sys.modules, "bastile.integrations.everywhere", raising=False)
    importlib.import_module("bastile.integrations.everywhere")
    assert "fused_linear_cross_entropy" in bastile.get_patched_ops()
