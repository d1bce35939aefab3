"""Gated units: y = act(a) * b by the operators from C, and in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)

_ops = torch.ops.bastile

#: In the order of src/core/activation.h, in plain torch.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
    "relu2": lambda g: functional.relu(g).square(),
}

#: Transformers' names of activations -> those here.
ACTIVATION_OF_CONFIG = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class Unit:
    """A gated unit with its activation. `op`: what errors begin with."""

    def __init__(self, op: str, activation: str):
        if activation not in ACTIVATIONS:
            names = ", ".join(f'"{name}"' for name in ACTIVATIONS)
            raise ValueError(f"{op}: activation is {activation!r}; one of {names} is needed")
        self.op = op
        self._activate = ACTIVATIONS[activation]
        self._code = list(ACTIVATIONS).index(activation)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _ops.glu_forward.default(self._code, a, b)

    def backward(
        self, dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, want_da: bool, want_db: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _ops.glu_backward.default(self._code, dy, a, b, want_da, want_db)

    def backward_with_y(
        self, dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, want_da: bool, want_db: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The forward pass's output, too."""
        return _ops.glu_backward_with_y.default(self._code, dy, a, b, want_da, want_db)

    def backward_inplace(
        self, dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, want_da: bool, want_db: bool, want_y: bool
    ) -> None:
        """da over a, db over b, that output over dy."""
        _ops.glu_backward_inplace.default(self._code, dy, a, b, want_da, want_db, want_y)

    def original(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self._activate(a) * b


class _SwiGLU(Unit):
    """The usual one: its operators are called without an argument that says so, and by no function of ours."""

    forward = staticmethod(_ops.swiglu_forward.default)
    backward = staticmethod(_ops.swiglu_backward.default)
    backward_with_y = staticmethod(_ops.swiglu_backward_with_y.default)
    backward_inplace = staticmethod(_ops.swiglu_backward_inplace.default)


def unit_of(op: str, activation: str) -> Unit:
    return _SwiGLU(op, activation) if activation == "silu" else Unit(op, activation)
