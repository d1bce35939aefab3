"""Dropout whose mask is a function of a seed, so that it is not kept (Srivastava et al., "Dropout", 2014)."""

from __future__ import annotations

import math

import torch
from torch.compiler import is_compiling

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import Function, first_order_only, need_floats, served
from bastile.ops._random import seeds

__all__ = ["dropout"]

#: Of x, seed and p, and in the place of x; of x, seed, a tensor that it is added to, and p, and in that one's place.
drop = torch.ops.bastile.dropout.default
drop_in_place = torch.ops.bastile.dropout_inplace.default
drop_and_add = torch.ops.bastile.dropout_add.default
drop_into = torch.ops.bastile.dropout_add_inplace.default


class _Dropout(Function):
    """Keeps the seed."""

    @staticmethod
    def forward(ctx, x, seed, p):
        ctx.save_for_backward(seed)
        ctx.p = p
        return drop(x, seed, p)

    @staticmethod
    def backward(ctx, dy):
        (seed,) = ctx.saved_tensors
        dx = drop(dy, seed, ctx.p)
        if torch.is_grad_enabled() and not is_compiling():
            dx = first_order_only("dropout", dx, dy)
        return dx, None, None


def dropout(x: torch.Tensor, p: float = 0.5, *, seed: torch.Tensor | None = None) -> torch.Tensor:
    """x where an element stays, divided by 1 - p, and 0 where it is lost, with probability p.

    Args:
        x: [...]; float32, bfloat16 or float16.
        p: 0 to 1.
        seed: two int64 on x's device, of which the mask is a function; None: drawn from torch's generator.

    Returns:
        Like x. The gradient has the same mask, made again of the seed: 16 bytes are kept. The mask is a function of
        seed, p and an element's number, row by row: the same on every device, in every type, and for any strides. Other
        types or devices and subclasses of tensors run plain torch code, whose mask without a seed is torch's own.

    Raises:
        RuntimeError, TypeError, ValueError: naming the argument, what was given and what is needed.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p is {p}; a probability, 0 to 1, is needed")
    if not served(x):
        need_floats("dropout", x=x)
        return torch.nn.functional.dropout(x, p) if seed is None else x * factors(x, p, seed)
    if x.dim() == 0:
        return dropout(x.view(1), p, seed=seed).view(())
    if seed is None:
        seed = seeds(x.device, 1)[0]
    return _Dropout.apply(x, seed, p)


def factors(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    """What x is multiplied with, by plain torch code. Integers of 64 bits wrap as those without a sign do."""
    low, count = 0xFFFFFFFF, math.prod(x.shape)
    key, offset = seed.unbind(0)
    counter = torch.arange((count + 3) // 4, device=x.device)
    words = [counter & low, counter >> 32, (offset & low).expand_as(counter), (offset >> 32 & low).expand_as(counter)]
    k0, k1 = key & low, key >> 32 & low
    for _ in range(7):
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [(b >> 32 & low) ^ words[1] ^ k0, b & low, (a >> 32 & low) ^ words[3] ^ k1, a & low]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    is_kept = torch.stack(words, 1).flatten()[:count].view(x.shape) >= min(math.floor(p * 2**32 + 0.5), 2**32 - 1)
    return is_kept.to(x.dtype) * (1 / (1 - p) if p < 1 else 0.0)
