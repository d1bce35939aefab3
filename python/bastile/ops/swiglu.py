"""SwiGLU: y = silu(a) · b (Shazeer, 2020), and the gated MLP built on it: `glu` with the usual activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bastile.ops._glu import unit_of
from bastile.ops.glu import apply_unit, glu_mlp

__all__ = ["BastileSwiGLUMLP", "swiglu", "swiglu_mlp"]

_SWIGLU = unit_of("swiglu", "silu")


def swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """silu(a) * b, in float32 and rounded once.

    Args:
        a: [..., I], the gate; float32, bfloat16 or float16, any strides: it may be a slice of a wider tensor.
        b: as a. Other types than a's run the original torch code.

    Returns:
        [..., I], contiguous. Gradients flow to a and b; nothing but these two is kept for them.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    return apply_unit(_SWIGLU, a, b, ("a", "b"))


def swiglu_mlp(x: torch.Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> torch.Tensor:
    """`glu_mlp` with the usual activation: down(swiglu(gate(x), up(x)))."""
    return glu_mlp(x, gate, up, down)


_SILU_NAMES = ("silu", "swish")


class BastileSwiGLUMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), with the parameters' names of Llama's and Qwen's MLP.

    Args:
        config: with hidden_size, intermediate_size and hidden_act ("silu"); mlp_bias where there is one.
    """

    def __init__(self, config: Any):
        super().__init__()
        if config.hidden_act not in _SILU_NAMES:
            raise ValueError(f'BastileSwiGLUMLP: config.hidden_act is {config.hidden_act!r}; "silu" is needed')
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    @classmethod
    def from_module(cls, module: nn.Module) -> BastileSwiGLUMLP:
        """One that shares the projections of an existing MLP module with gate_proj, up_proj, down_proj and act_fn."""
        for name in ("gate_proj", "up_proj", "down_proj", "act_fn", "config"):
            if not hasattr(module, name):
                raise ValueError(f"BastileSwiGLUMLP.from_module: {type(module).__name__} has no {name}")
        with torch.device("meta"):
            new = cls(module.config)
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(new, name, getattr(module, name))
        new.train(module.training)
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu_mlp(x, self.gate_proj, self.up_proj, self.down_proj)
