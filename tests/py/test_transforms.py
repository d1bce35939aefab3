"""torch.func's transforms, and tensors that leaked out of one: there the original code runs, gradients included."""

import pytest
import torch

from every_operator import CALLS, PRODUCTS, TERMS, H, T, in_float64, random
from products import assert_near


def gradient(name: str, x: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(CALLS[name](x).square().sum(), leaf)[0]


def assert_same(name: str, got: torch.Tensor, x: torch.Tensor) -> None:
    """The gradient that the operator gives."""
    want = gradient(name, x, x)
    if name not in PRODUCTS:
        torch.testing.assert_close(got, want)
        return
    with in_float64():
        double = x.detach().double().requires_grad_()
        exact = gradient(name, double, double)
    assert_near(got, exact, TERMS)
    assert_near(want, exact, TERMS)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_by_a_transform(name):
    x = random(T, H).requires_grad_()
    assert_same(name, torch.func.grad(lambda x: CALLS[name](x).square().sum())(x.detach()), x)


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_that_leaked_out_of_a_transform_passes_gradients_on(name):
    x = random(T, H).requires_grad_()
    leaked = []
    torch.func.grad(lambda x: (leaked.append(x), x.sum())[1])(x)
    assert_same(name, gradient(name, leaked[0], x), x)
