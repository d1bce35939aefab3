"""torch.func's transforms, and tensors that leaked out of one: there the original code runs, gradients included."""

import pytest
import torch

from every_operator import CALLS, H, T, random


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_gradients_by_a_transform(call):
    x = random(T, H).requires_grad_()
    (want,) = torch.autograd.grad(call(x).square().sum(), x)
    got = torch.func.grad(lambda x: call(x).square().sum())(x.detach())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_tensor_that_leaked_out_of_a_transform_passes_gradients_on(call):
    x = random(T, H).requires_grad_()
    (want,) = torch.autograd.grad(call(x).square().sum(), x)
    leaked = []
    torch.func.grad(lambda x: (leaked.append(x), x.sum())[1])(x)
    (got,) = torch.autograd.grad(call(leaked[0]).square().sum(), x)
    torch.testing.assert_close(got, want)
