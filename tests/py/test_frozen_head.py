"""A head that is frozen keeps no logits for the backward pass, whether they would fit the budget or not: by the loss
with a mean and by log-probabilities. On CPUs as if they were GPUs, which alone keep any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bastile.ops import fused_linear_cross_entropy as losses
from bastile.ops import linear_logprobs as rows
from memory import kept_by
from oracle import devices

TOKENS, VOCABULARY, WIDTH = 48, 1000, 16


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_seen", rows._Seen())
    for module in (losses, rows):
        monkeypatch.setattr(module, "on_gpu", lambda t: True)


def tensors(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, device=device, dtype=dtype)
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,), device=device)


def mean(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return losses.fused_linear_cross_entropy(hidden, weight, target)


def of_each(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -rows.linear_logprobs(hidden, weight, target, outputs=("entropy",)).log_probs.mean()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", [mean, of_each])
def test_no_logits_are_kept(loss: Callable[..., torch.Tensor], dtype: torch.dtype, device: str) -> None:
    """But of float16, where a loss scale comes with the upstream gradient."""
    hidden, weight, target = tensors(device, dtype)
    of_logits = TOKENS * VOCABULARY * dtype.itemsize
    trained = weight.clone().requires_grad_()
    assert kept_by(lambda: loss(hidden, trained, target)) >= of_logits
    assert (kept_by(lambda: loss(hidden, weight, target)) >= of_logits) is (dtype is torch.float16)
    found = [torch.autograd.grad(loss(hidden, head, target), hidden)[0].double() for head in (weight, trained)]
    exact = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().T, target)
    (want,) = torch.autograd.grad(exact, hidden)
    errors = [(each - want.double()).norm() / want.double().norm() for each in found]
    assert errors[0] <= 1.1 * errors[1] + 1e-6


@pytest.mark.parametrize("device", devices())
def test_logits_are_kept_once_entropy_had_a_gradient(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time they are made again."""
    ran: list[str] = []
    for name in ("_backward", "_backward_kept"):
        stock: Any = getattr(rows, name)
        monkeypatch.setattr(rows, name, lambda *a, stock=stock, name=name: (ran.append(name), stock(*a))[1])
    hidden, weight, target = tensors(device, torch.float32)
    found = []
    for _ in range(2):
        made = rows.linear_logprobs(hidden, weight, target, outputs=("entropy",))
        found.append(torch.autograd.grad(made.entropy.mean() - made.log_probs.mean(), hidden)[0])
        torch.autograd.grad(of_each(hidden, weight, target), hidden)
    assert ran == ["_backward", "_backward_kept", "_backward_kept", "_backward_kept"]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
