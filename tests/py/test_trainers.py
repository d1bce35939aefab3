"""Trainers other than TRL (test_trl.py): what each is given, against the signatures that they publish."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bastile
from bastile.integrations import hidden as hidden_module
from oracle import random_tensor
from processes import alone

CLASSES = 61
DOCUMENT = Path(__file__).parents[2] / "docs" / "trainers.md"


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
    # A temperature a token: as stock has it of as many calls; a few of them are served, many are stock's.
    temperatures = torch.tensor([0.7, 1.3])[torch.arange(18) % 2].reshape(2, 9, 1)
    mixed = cls.apply(hidden, weight, targets, temperatures)
    cls.apply(hidden, weight, targets, torch.rand(2, 9, 1) + 0.1)
    [line] = [line for line in bastile.report() if line.operator == "linear_logprobs" and line.aside]
    assert line.aside == {"it is called with more than 8 temperatures": 1}
    assert line.ran == 4
    bastile.reset()
    assert "apply" not in vars(cls)
    torch.testing.assert_close(mixed, cls.apply(hidden, weight, targets, temperatures))


class _SequenceChunkedLogProbEntropyFn(torch.autograd.Function):
    """As prime-rl's output head has it."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, inv_temperature, chunk_size):
        log_p = ((hidden @ weight.T).float() * inv_temperature[:, None]).log_softmax(-1)
        return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def test_prime_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = _SequenceChunkedLogProbEntropyFn
    hidden, weight = random_tensor((9, 16), torch.float32, "cpu"), random_tensor((CLASSES, 16), torch.float32, "cpu")
    targets, inverse = torch.randint(CLASSES, (9,)), 1 / torch.tensor([0.5, 1.0, 1.0, 0.5, 1, 1, 1, 1, 2.0])
    stock = cls.apply(hidden, weight, targets, inverse, 512)
    a_module("prime_rl.trainer.models.layers.lm_head", monkeypatch, _SequenceChunkedLogProbEntropyFn=cls)
    bastile.report(reset=True)
    bastile.apply()
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    ours = cls.apply(*leaves, targets, inverse, 512)
    torch.testing.assert_close(ours, stock)
    log_p = (torch.nn.functional.linear(*leaves) * inverse[:, None]).log_softmax(-1)
    wanted = torch.autograd.grad(log_p.gather(-1, targets[:, None]).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(ours[0].sum(), leaves), wanted, rtol=1e-5, atol=1e-5)
    assert bastile.report().ran("linear_logprobs") == 1
    bastile.reset()
    assert "apply" not in vars(cls)


class WhatWaits(TorchDispatchMode):
    """Counts operations for whose result, or its size, the host waits on a GPU."""

    WAIT = ("aten::_unique2", "aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select", "aten::equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in self.WAIT:
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("cls", "module", "invert"),
    [
        (FusedLinearForPPOFunction, "verl.utils.experimental.torch_functional", False),
        (_SequenceChunkedLogProbEntropyFn, "prime_rl.trainer.models.layers.lm_head", True),
    ],
)
def test_the_host_waits_once_for_temperatures_and_for_nothing_else(
    cls: Any, module: str, invert: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To learn which there are: in one list, by which everything else is done. That every target counts is known."""
    calls = Mock(wraps=hidden_module.linear_logprobs)
    monkeypatch.setattr(hidden_module, "linear_logprobs", calls)
    a_module(module, monkeypatch, **{cls.__name__: cls})
    hidden, weight = random_tensor((9, 16), torch.float32, "cpu"), random_tensor((CLASSES, 16), torch.float32, "cpu")
    targets, temperatures = torch.randint(CLASSES, (9,)), torch.tensor([0.5, 1.0, 2.0]).repeat(3)
    given = 1 / temperatures if invert else temperatures
    stock = cls.apply(hidden, weight, targets, 1 / temperatures if invert else temperatures[:, None], 512)
    bastile.apply()
    with WhatWaits() as waits:
        ours = cls.apply(hidden, weight, targets, given, 512)
    bastile.reset()
    torch.testing.assert_close(ours, stock)
    assert waits.found == ["aten::_unique2"]
    assert [call.kwargs["valid_rows"] for call in calls.mock_calls] == [3, 3, 3]


class ChunkedDistributedHiddenStatesToLogprobs(torch.autograd.Function):
    """As NeMo-RL has it, for one process."""

    @staticmethod
    def forward(
        ctx, tensor_parallel_hidden_states, target, output_weight_layer, vocab_start_index, vocab_end_index, chunk_size,
        tp_group, inference_only=False,
    ):  # fmt: skip
        log_p = (tensor_parallel_hidden_states @ output_weight_layer.T).float().transpose(0, 1).log_softmax(-1)
        return log_p.gather(-1, target[..., None])[..., 0]


def test_nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = ChunkedDistributedHiddenStatesToLogprobs
    a_module("nemo_rl.distributed.model_utils", monkeypatch, ChunkedDistributedHiddenStatesToLogprobs=cls)
    hidden = random_tensor((7, 2, 16), torch.float32, "cpu")  # positions first
    weight, targets = random_tensor((CLASSES, 16), torch.float32, "cpu"), torch.randint(CLASSES, (2, 7))
    stock = cls.apply(hidden, targets, weight, 0, CLASSES, 4, None)
    with alone():
        bastile.report(reset=True)
        bastile.apply()
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        ours = cls.apply(leaves[0], targets, leaves[1], 0, CLASSES, 4, None, False)
        torch.testing.assert_close(ours, stock)
        log_p = torch.nn.functional.linear(*leaves).transpose(0, 1).log_softmax(-1)
        wanted = torch.autograd.grad(log_p.gather(-1, targets[..., None]).sum(), leaves)
        torch.testing.assert_close(torch.autograd.grad(ours.sum(), leaves), wanted, rtol=1e-5, atol=1e-5)
        assert not cls.apply(leaves[0], targets, leaves[1], 0, CLASSES, 4, None, True).requires_grad
        assert bastile.report().ran("linear_logprobs") == 2
        cls.apply(hidden, targets, weight, 0, CLASSES - 1, 4, None)
        [line] = [line for line in bastile.report() if line.operator == "linear_logprobs" and line.aside]
        assert line.aside == {"its part of the vocabulary is padded": 1}
    bastile.reset()
    assert "apply" not in vars(cls)


def test_torchtune(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the class that its recipes call: set_model_output, then forward. A part of torchtune's own is kept."""

    class Theirs(torch.nn.Module):
        def __init__(self, ignore_index: int = -100):
            super().__init__()
            self.linear_projection, self.ignore_index = None, ignore_index

        def set_model_output(self, model: Any) -> None:
            model.skip_output_layer = True
            self.linear_projection = model.output

        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            assert self.linear_projection is not None
            logits = self.linear_projection(outputs).flatten(0, 1)
            total = torch.nn.functional.cross_entropy(logits.float(), targets.flatten(), reduction="sum")
            return total / max(1, int((targets != -100).sum()))

    a_module("torchtune.modules.loss", monkeypatch, LinearCrossEntropyLoss=Theirs)
    sys.modules["torchtune.modules"].loss = sys.modules["torchtune.modules.loss"]  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "bastile.integrations.torchtune", raising=False)
    ours = importlib.import_module("bastile.integrations.torchtune").LinearCrossEntropyLoss()
    sys.modules.pop("bastile.integrations.torchtune")
    model = types.SimpleNamespace(output=torch.nn.Linear(16, CLASSES, bias=False))
    ours.set_model_output(model)
    theirs = Theirs()
    theirs.set_model_output(model)
    hidden, targets = random_tensor((2, 9, 16), torch.float32, "cpu").requires_grad_(), torch.randint(CLASSES, (2, 9))
    targets[0, 3:] = -100
    bastile.report(reset=True)
    for labels in (targets, torch.full_like(targets, -100)):
        found = [loss(hidden, labels) for loss in (ours, theirs)]
        torch.testing.assert_close(*found)
        gradients = [torch.autograd.grad(loss, (hidden, model.output.weight)) for loss in found]
        torch.testing.assert_close(*gradients)
    assert bastile.report().ran("fused_linear_cross_entropy") == 2
    ours.linear_projection = theirs.linear_projection = torch.nn.Sequential(model.output)  # tied to an embedding, say
    torch.testing.assert_close(ours(hidden, targets), theirs(hidden, targets))
    assert bastile.report().ran("fused_linear_cross_entropy") == 2


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


def test_llama_factory_and_ms_swift(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The lines of docs/trainers.md: with the function that LLaMA-Factory has, and as a file that ms-swift imports."""
    [lines] = re.findall(r"(?m)^    import bastile; .*\n(?:    .*\n)+", DOCUMENT.read_text())
    patched = []

    def run_exp(args: Any = None, callbacks: Any = None) -> None:
        patched.extend(bastile.get_patched_ops())

    a_module("llamafactory.train.tuner", monkeypatch, run_exp=run_exp)
    exec(textwrap.dedent(lines), {})
    assert "fused_linear_cross_entropy" in patched
    bastile.reset()
    (tmp_path / "bastile_plugin.py").write_text("import bastile\nbastile.apply()\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("bastile_plugin")
    sys.modules.pop("bastile_plugin")
    assert "fused_linear_cross_entropy" in bastile.get_patched_ops()
