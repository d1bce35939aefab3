"""Hooks that change what a module computes, or its gradients."""

from torch import nn


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, inputs, output: output * 1.5)


def pre_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))


def gradient_hook(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda module, grads, outputs: tuple(3 * grad for grad in grads))


def gradient_pre_hook(module: nn.Module) -> None:
    module.register_full_backward_pre_hook(lambda module, outputs: tuple(3 * grad for grad in outputs))


HOOKS = [hook, pre_hook, gradient_hook, gradient_pre_hook]
