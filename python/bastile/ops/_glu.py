"""Gated units, y = act(a) * b or of GPT-OSS, and activations alone, by the operators from C, and in plain torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)

_ops = torch.ops.bastile

#: Functions of the gate alone, in the order of src/core/activation.h, in plain torch.
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


OAI = "swiglu_oai"
#: a sigmoid(1.702 a), GPT-OSS's activation, alone.
QUICK_GELU = "quick_gelu"
#: All units, in the order of src/core/activation.h: of the last one up is one more.
UNITS = (*ACTIVATIONS, OAI)
ALPHA = 1.702
#: From 2.14 on no gradient of torch.clamp passes at a limit itself.
OPEN_LIMIT = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)


class Unit:
    """A gated unit with its activation and limit; b is up, and None for an Activation. `op`: what errors begin with."""

    def __init__(
        self, op: str, activation: str, interleaved: bool = False, alpha: float = ALPHA, limit: float | None = None
    ):
        if activation not in UNITS:
            names = ", ".join(f'"{name}"' for name in UNITS)
            raise ValueError(f"{op}: activation is {activation!r}; one of {names} is needed")
        if limit is None:
            limit = 7.0 if activation == OAI else math.inf
        if not limit > 0:
            raise ValueError(f"{op}: limit is {limit}; more than 0 is needed")
        self.op = op
        self.activation = activation
        self.interleaved = bool(interleaved)
        self.alpha, self.limit = float(alpha), float(limit)
        code = UNITS.index(activation)
        #: As operators of gate and up in two tensors are told.
        self.apart = code, self.alpha, self.limit, OPEN_LIMIT
        #: As operators of gate and up in one tensor are told.
        self.joined = code, self.interleaved, self.alpha, self.limit, OPEN_LIMIT

    def forward(self, a: torch.Tensor, b: Any) -> torch.Tensor:
        return _ops.glu_forward.default(*self.apart, a, b)

    def backward(
        self, dy: torch.Tensor, a: torch.Tensor, b: Any, want_da: bool, want_db: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _ops.glu_backward.default(*self.apart, dy, a, b, want_da, want_db)

    def backward_with_y(
        self, dy: torch.Tensor, a: torch.Tensor, b: Any, want_da: bool, want_db: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The forward pass's output, too."""
        return _ops.glu_backward_with_y.default(*self.apart, dy, a, b, want_da, want_db)

    def backward_inplace(
        self, dy: torch.Tensor, a: torch.Tensor, b: Any, want_da: bool, want_db: bool, want_y: bool
    ) -> None:
        """da over a, db over b, that output over dy."""
        _ops.glu_backward_inplace.default(*self.apart, dy, a, b, want_da, want_db, want_y)

    def forward_joined(self, h: torch.Tensor) -> torch.Tensor:
        return _ops.glu_joined_forward.default(*self.joined, h)

    def backward_joined(self, dy: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return _ops.glu_joined_backward.default(*self.joined, dy, h)

    def original(self, a: torch.Tensor, b: Any) -> torch.Tensor:
        """In plain torch."""
        if self.limit < math.inf:
            a, b = a.clamp(max=self.limit), b.clamp(-self.limit, self.limit)
        if self.activation == OAI:
            return (b + 1) * (a * torch.sigmoid(a * self.alpha))
        return ACTIVATIONS[self.activation](a) * b

    def original_joined(self, h: torch.Tensor) -> torch.Tensor:
        return self.original(*((h[..., ::2], h[..., 1::2]) if self.interleaved else h.chunk(2, dim=-1)))


class _SwiGLU(Unit):
    """The usual one, for it is made at most calls: its operators are called without arguments that say so, and by no
    function of ours."""

    activation, interleaved, alpha, limit = "silu", False, ALPHA, math.inf
    apart = 0, ALPHA, math.inf, OPEN_LIMIT
    joined = 0, False, ALPHA, math.inf, OPEN_LIMIT

    def __init__(self, op: str):
        self.op = op

    forward = staticmethod(_ops.swiglu_forward.default)
    backward = staticmethod(_ops.swiglu_backward.default)
    backward_with_y = staticmethod(_ops.swiglu_backward_with_y.default)
    backward_inplace = staticmethod(_ops.swiglu_backward_inplace.default)


class Activation(Unit):
    """y = act(a), as a unit whose b is None."""

    def __init__(self, op: str, activation: str):
        if activation not in ACTIVATIONS and activation != QUICK_GELU:
            names = ", ".join(f'"{name}"' for name in (*ACTIVATIONS, QUICK_GELU))
            raise ValueError(f"{op}: activation is {activation!r}; one of {names} is needed")
        super().__init__(op, OAI if activation == QUICK_GELU else activation, limit=math.inf)
        self.told = self.apart[:2]

    def forward(self, a: torch.Tensor, b: Any = None) -> torch.Tensor:
        return _ops.activation_forward.default(*self.told, a)

    def backward(self, dy: torch.Tensor, a: torch.Tensor, b: Any, want_da: bool, want_db: bool) -> tuple[Any, Any]:
        return _ops.activation_backward.default(*self.told, dy, a, want_da), None

    def backward_with_y(
        self, dy: torch.Tensor, a: torch.Tensor, b: Any, want_da: bool, want_db: bool
    ) -> tuple[Any, Any, torch.Tensor]:
        da, y = _ops.activation_backward_with_y.default(*self.told, dy, a, want_da)
        return da, None, y

    def backward_inplace(
        self, dy: torch.Tensor, a: torch.Tensor, b: Any, want_da: bool, want_db: bool, want_y: bool
    ) -> None:
        _ops.activation_backward_inplace.default(*self.told, dy, a, want_da, want_y)

    def original(self, a: torch.Tensor, b: Any = None) -> torch.Tensor:
        return a * torch.sigmoid(a * self.alpha) if self.activation == OAI else ACTIVATIONS[self.activation](a)


def unit_of(
    op: str, activation: str, interleaved: bool = False, alpha: float = ALPHA, limit: float | None = None
) -> Unit:
    if activation == "silu" and limit is None and not interleaved:
        return _SwiGLU(op)
    return Unit(op, activation, interleaved, alpha, limit)
