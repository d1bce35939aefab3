"""Attention of one query a row, as of a token of a text that is generated (bst_token_attention): on GPUs in 16 bits.
PyTorch's has a block for each head and row, however many keys there are, and takes three times what they take to be
read."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from bastile.ops import _fakes  # noqa: F401  (registers the operator, with its fake)
from bastile.ops._common import HALVES, PLAIN, in_transform, on_gpu

_attend = torch.ops.bastile.token_attention.default
#: The widest heads that the kernel has; those that PyTorch's takes less time for where none share keys: of 12 such
#: heads of 64, 1024 keys and 8 rows 13 us, ours 16.
_WIDEST, _NARROW = 256, 64


def _is_aligned(t: torch.Tensor) -> bool:
    """Whether its rows are read 16 bytes at a time."""
    strides, sizes = t.stride(), t.shape
    apart = [stride for stride, size in zip(strides[:-1], sizes[:-1], strict=True) if size > 1]
    return strides[-1] == 1 and t.data_ptr() % 16 == 0 and all([stride % 8 == 0 for stride in apart])


def serves_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> bool:
    """Whether `token_attention` is for these. q: [B, H, 1, D]; k, v: [B, G, S, D], H being a multiple of G; bias:
    [B or 1, 1, 1, S], all of one type."""
    return (
        on_gpu(q)
        and q.dtype in HALVES
        and q.dtype is k.dtype is v.dtype is bias.dtype
        and q.shape[3] == k.shape[3] == v.shape[3] <= _WIDEST
        and q.shape[3] % 8 == 0
        and (q.shape[1] > k.shape[1] or q.shape[3] > _NARROW)
        and k.shape[:3] == v.shape[:3]
        and all([_is_aligned(t) for t in (q, k, v)])
        and bias.stride(3) == 1
        and all([type(t) in PLAIN for t in (q, k, v, bias)])
        and not torch.is_grad_enabled()
        and not is_compiling()
        and not in_transform(q, k, v, bias)
    )


def token_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale q k^T + bias) v, [B, 1, H, D]; scale None: 1 / sqrt(D). Shapes as for `serves_token`."""
    biases = bias[:, 0, 0].expand(q.shape[0], -1)
    return _attend(q[:, :, 0], k, v, biases, scale or 0.0).unsqueeze(1)
