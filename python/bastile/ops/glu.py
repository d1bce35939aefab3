"""Gated units: y = act(gate) · up (Shazeer, 2020), clamped as GPT-OSS has it, and the gated MLP built on them."""

from __future__ import annotations

import torch
from torch import nn

from bastile.ops._common import Function, first_order_only, need_floats, served
from bastile.ops._glu import ALPHA, Unit, unit_of
from bastile.ops._modules import plain_linear
from bastile.ops.gated_mlp import gated_mlp
from bastile.recompute import offer

__all__ = ["glu", "glu_mlp"]


class _GLU(Function):
    @staticmethod
    def forward(ctx, a, b, unit):
        ctx.save_for_backward(a, b)
        ctx.unit = unit
        return unit.forward(a, b)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        want_da, want_db, _ = ctx.needs_input_grad
        da, db = ctx.unit.backward(dy, a, b, want_da, want_db)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            da = first_order_only(ctx.unit.op, da, dy, a, b)
            db = first_order_only(ctx.unit.op, db, dy, a, b)
        return da if want_da else None, db if want_db else None, None


def apply_unit(unit: Unit, a: torch.Tensor, b: torch.Tensor, names: tuple[str, str]) -> torch.Tensor:
    """The unit's y of a and b, with gradients; `names` is what its function calls the two."""
    if not served(a, b) or a.dtype != b.dtype:
        need_floats(unit.op, **dict(zip(names, (a, b), strict=True)))
        if a.shape != b.shape:
            raise ValueError(
                f"{unit.op}: {names[1]} has shape {list(b.shape)}; {list(a.shape)}, that of {names[0]}, is needed"
            )
        return unit.original(a, b)
    y = _GLU.apply(a, b, unit)
    offer(unit.forward, (a, b), y)
    return y


class _GLUJoined(Function):
    @staticmethod
    def forward(ctx, h, unit):
        ctx.save_for_backward(h)
        ctx.unit = unit
        return unit.forward_joined(h)

    @staticmethod
    def backward(ctx, dy):
        (h,) = ctx.saved_tensors
        dh = ctx.unit.backward_joined(dy, h)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            dh = first_order_only(ctx.unit.op, dh, dy, h)
        return dh, None


def _apply_joined(unit: Unit, h: torch.Tensor) -> torch.Tensor:
    need_floats(unit.op, gate=h)
    if h.dim() == 0 or h.shape[-1] % 2:
        raise ValueError(f"{unit.op}: gate has shape {list(h.shape)}; without up [..., 2I] is needed")
    if not served(h):
        return unit.original_joined(h)
    y = _GLUJoined.apply(h, unit)
    offer(unit.forward_joined, (h,), y)
    return y


def glu(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    interleaved: bool = False,
    alpha: float = ALPHA,
    limit: float | None = None,
) -> torch.Tensor:
    """act(gate) * up, in float32 and rounded once, of a gate of at most `limit` and up between -limit and limit.
    "swiglu_oai", GPT-OSS's unit, is (up + 1) * gate * sigmoid(alpha * gate).

    Args:
        gate: [..., I]; float32, bfloat16 or float16, any strides: it may be a slice of a wider tensor. Without up: both
            in one tensor [..., 2I], whose gradient is then one tensor too.
        up: as gate, or None. Other types than gate's run the original torch code.
        activation: "silu", "gelu_tanh", "gelu", "relu", "relu2", its square, or "swiglu_oai".
        interleaved: of one tensor: whether gate and up are its even and its odd columns, not its halves.
        alpha: of the sigmoid, for "swiglu_oai".
        limit: of the clamps; float("inf") for none. None: 7 for "swiglu_oai", none for others.

    Returns:
        [..., I], contiguous. Gradients flow to both; nothing but these two is kept for them.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    unit = unit_of("glu", activation, interleaved, alpha, limit)
    if up is None:
        return _apply_joined(unit, gate)
    if interleaved:
        raise ValueError("glu: interleaved is True; False is needed with up, or None in its place")
    return apply_unit(unit, gate, up, ("gate", "up"))


def glu_mlp(x: torch.Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, activation: str = "silu") -> torch.Tensor:
    """down(glu(gate(x), up(x), activation)): by `gated_mlp` where the three do nothing but multiply by their weights.
    All others are called as modules, so adapters, quantised weights and hooks on them stay in force."""
    if plain_linear(gate) and plain_linear(up) and plain_linear(down):
        return gated_mlp(x, gate.weight, up.weight, down.weight, activation)
    return down(glu(gate(x), up(x), activation))
