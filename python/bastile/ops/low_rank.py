"""What the gradient of an adapter's second product leaves, in one pass over it."""

from __future__ import annotations

import torch

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import need_floats, served

__all__ = ["low_rank_backward"]

#: Of dy, thin, b and scale; of dy, thin, b, where g is to be, and scale, returning db alone.
backward = torch.ops.bastile.low_rank_backward.default
backward_into = torch.ops.bastile.low_rank_backward_into.default
#: y = x weight^T + scale thin b^T of x, weight, thin, b, where y is to be, and scale (bst_low_rank_linear).
linear_into = torch.ops.bastile.low_rank_linear.default
#: A gated unit's backward pass with the adapters around it, bst_low_rank_glu_backward: of the unit (Unit.apart), gate's
#: and up's scales, dy, gate, up, thin, their b, g_down and a_down or None, where g is to be, and whether y, da_down and
#: thin_down are wanted; dgate over gate, dup over up, y over dy; returning db_gate, db_up, da_down, thin_down.
glu_backward = torch.ops.bastile.low_rank_glu_backward.default


def low_rank_backward(
    dy: torch.Tensor, thin: torch.Tensor, b: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The backward pass of y = scale thin b^T: g = scale dy b and db = scale dy^T thin.

    Args:
        dy: [T, N]; float32, bfloat16 or float16, its last dimension contiguous.
        thin: [T, R], of dy's type, its last dimension contiguous.
        b: [N, R], of dy's type.
        scale: a finite number.

    Returns:
        g [T, R], the gradient of thin, of dy's type, and db [N, R], that of b, in float32: sums are in float32, g is
        rounded once. On CUDA, in 16 bits, R of 8, 16, 24 or 32 and N of a multiple of 8, dy is read once; else these
        are two matrix products. Other types or devices and subclasses of tensors run plain torch code.

    Raises:
        RuntimeError, TypeError, ValueError: naming the argument, what was given and what is needed.
    """
    if served(dy, thin, b):
        return backward(dy, thin, b.contiguous(), scale)
    need_floats("low_rank_backward", dy=dy, thin=thin, b=b)
    return scale * (dy @ b), scale * (dy.t() @ thin)
