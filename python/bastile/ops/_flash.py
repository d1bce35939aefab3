"""PyTorch's fused attentions, called below `scaled_dot_product_attention`: what they give beside their result, the
logarithm of each row's sum of exponentials, is what attentions are put together of.

None of these has a name that PyTorch promises: `is_known` says whether they are those that are called here."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from bastile.ops._common import FLOATS, HALVES, has_values, in_transform

MOST_DIM = 256  # of a head, in PyTorch's flash attention on CUDA, which serves HALVES
OLDEST = (8, 0)  # compute capability, likewise

forward = torch.ops.aten._flash_attention_forward.default
backward = torch.ops.aten._flash_attention_backward.default
forward_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
backward_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
cudnn_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_SHAPES = "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
_WINDOW = "scale window_size_left window_size_right"
_RANDOM = "philox_seed philox_offset attn_bias"
#: Arguments by position and by name, and how many results.
_FLASH = (
    (forward, f"query key value {_SHAPES} return_debug_mask", _WINDOW, 5),
    (backward, f"grad_out query key value out logsumexp {_SHAPES} rng_state unused", _WINDOW, 3),
    (forward_on_cpu, "query key value dropout_p is_causal", "attn_mask scale", 2),
    (backward_on_cpu, "grad_out query key value out logsumexp dropout_p is_causal", "attn_mask scale", 3),
)
_CUDNN = (
    (
        cudnn_forward,
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask",
        "scale",
        9,
    ),
    (cudnn_backward, f"grad_out query key value out logsumexp {_RANDOM} {_SHAPES}", "scale", 3),
)


@functools.cache
def is_known() -> bool:
    """Whether this PyTorch's flash attention takes and gives what those of 2.11 and 2.13 do."""
    return are_called_so(_FLASH)


@functools.cache
def cudnn_is_known() -> bool:
    """Likewise its attention by cuDNN."""
    return are_called_so(_CUDNN)


def are_called_so(functions: tuple[tuple[Any, str, str, int], ...]) -> bool:
    for function, by_position, by_name, results in functions:
        arguments = function._schema.arguments
        names = " ".join(a.name for a in arguments if not a.kwarg_only)
        rest = {a.name for a in arguments if a.kwarg_only}
        if names != by_position or not rest.issuperset(by_name.split()) or len(function._schema.returns) != results:
            return False
    return True


def refusal(q: Tensor, k: Tensor, v: Tensor, *others: Tensor, any_width: bool = False) -> str | None:
    """Why an attention within sequences is not served; None where it is. others: further tensors that it takes.
    any_width: of heads on CUDA, and of values other than keys'."""
    tensors = (q, k, v, *others)
    if not is_known():
        return f"the flash attention of PyTorch {torch.__version__} takes other arguments than are known"
    if not has_values(*tensors) or in_transform(*tensors):
        return "its tensors are none of PyTorch's own, or within a transform"
    if (
        any(t.dim() != 4 for t in (q, k, v))
        or (k.shape[:3] != v.shape[:3] if any_width else k.shape != v.shape)
        or any(q.shape[i] != k.shape[i] for i in (0, 2, 3))
        or not k.shape[1]
        or q.shape[1] % k.shape[1]
    ):
        return "queries, keys and values are of other shapes than those of one sequence"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOATS or len({t.device for t in tensors}) != 1:
        return "queries, keys and values are of different types or devices"
    if q.device.type not in ("cpu", "cuda"):
        return f"there is no fused attention on {q.device.type}"
    width = max(q.shape[3], v.shape[3])
    if q.is_cuda and (q.dtype not in HALVES or (width > MOST_DIM and not any_width) or width % 8):
        return f"there is no fused attention on CUDA of {q.dtype} and heads of {width}"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < OLDEST:
        return "there is no fused attention on GPUs older than compute capability 8.0"
    return None


def window_of(window: int, causal: bool = True) -> dict[str, int]:
    """Arguments of flash attention on CUDA for a query that sees so many keys at most, itself among them. Without
    causal: to either side."""
    return {"window_size_left": window - 1, "window_size_right": 0 if causal else window - 1} if window else {}


def by_formula(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, total: Tensor, delta: Tensor, mask: Tensor, scale: float
) -> list[Tensor]:
    """Gradients of q, k and v in PyTorch's own operators, for several of y at once: vmap has no rule for those above.

    dy: of y, [B, S, heads, D]. total: [B, heads, S], the logarithm of each row's sum of exponentials. delta: likewise,
    sum(dy y). mask: [B or 1, 1, S, S], which keys a query sees."""
    times = q.shape[1] // k.shape[1]
    keys, values = [t.repeat_interleave(times, 1).float() for t in (k, v)]
    dy = dy.transpose(1, 2).float()
    p = torch.exp(q.float() @ keys.mT * scale - total[..., None]).masked_fill(~mask, 0.0)
    ds = p * (dy @ values.mT - delta[..., None]) * scale
    both = [t.reshape(t.shape[0], -1, times, *t.shape[2:]).sum(2) for t in (ds.mT @ q.float(), p.mT @ dy)]
    return [g.to(q.dtype) for g in (ds @ keys, *both)]
