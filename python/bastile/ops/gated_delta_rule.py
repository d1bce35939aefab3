"""Linear attention by the gated delta rule (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024), as Qwen3.5,
Qwen3-Next and OLMo-Hybrid have it."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import Function, first_order_only, has_values, in_transform, need_floats, served

__all__ = ["gated_delta_rule"]

_OP = "gated_delta_rule"
_forward = torch.ops.bastile.gated_delta_rule_forward.default
_backward = torch.ops.bastile.gated_delta_rule_backward.default
#: The widest heads of queries and keys, and of values.
MOST_KEY, MOST_VALUE = 128, 256
_EPS = 1e-6


class _GatedDeltaRule(Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, skip, initial, cu_seqlens, options, wants_final):
        y, final = _forward(q, k, v, g, beta, skip, initial, cu_seqlens, *options, wants_final)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, skip, initial, cu_seqlens)
        ctx.options = options
        return (y, final) if wants_final else y

    @staticmethod
    def backward(ctx, dy, dfinal=None):
        saved = ctx.saved_tensors
        _, _, v, *_, skip, initial, _ = saved
        if dy is None and dfinal is None:
            return (None,) * 10
        sources = dy, dfinal
        if dy is None:
            dy = torch.zeros(v.shape, dtype=torch.float32 if ctx.options[2] else v.dtype, device=v.device)
        dfinal = None if dfinal is None else dfinal.contiguous()
        wanted = [
            t is not None and needed for t, needed in zip((skip, initial), ctx.needs_input_grad[5:7], strict=True)
        ]
        grads = _backward(_with_rows(dy), dfinal, *saved, *ctx.options, *wanted)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grads = [first_order_only(_OP, grad, *sources, *saved) for grad in grads]
        grads = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)]
        return *grads, None, None, None


def _with_rows(t: Tensor) -> Tensor:
    """With its last dimension contiguous, as the operator takes it."""
    return t if t.stride(-1) == 1 or t.shape[-1] < 2 else t.contiguous()


def _original(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    skip: Tensor | None,
    initial: Tensor | None,
    scale: float,
    additive: bool,
    wide: bool,
    eps: float | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, a token at a time, in PyTorch's operators: in float32, or float64."""
    exact = torch.promote_types(q.dtype, torch.float32)
    dtype = exact if wide else q.dtype
    q, k, v, g, beta = [t.to(exact) for t in (q, k, v, g, beta)]
    if eps is not None:
        q, k = [t * torch.rsqrt(t.square().sum(-1, keepdim=True) + eps) for t in (q, k)]
    times = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(times, 2) * scale, k.repeat_interleave(times, 2)
    batch, tokens, heads, size = q.shape
    state = torch.zeros(batch, heads, size, v.shape[-1], dtype=exact, device=v.device)
    state = state + (0 if initial is None else initial)
    rows = []
    begins = None
    if cu_seqlens is not None:
        _need_boundaries(cu_seqlens, tokens)
        begins = torch.zeros(tokens + 1, dtype=torch.int32, device=v.device).index_fill(0, cu_seqlens.long(), 1).bool()
    for i in range(tokens):
        if begins is not None:
            state = torch.where(begins[i], torch.zeros_like(state), state)
        state = state * g[:, i].exp()[..., None, None]
        seen = 0 if additive else (state * k[:, i, ..., None]).sum(-2)
        left = (v[:, i] - seen) * beta[:, i, ..., None]
        state = state + k[:, i, ..., None] * left[..., None, :]
        rows.append((state * q[:, i, ..., None]).sum(-2))
    y = torch.stack(rows, 1) if rows else v
    y = y if skip is None else y + v * skip.to(exact)[:, None]
    return y.to(dtype), state


def _need_boundaries(cu_seqlens: Tensor, tokens: int) -> None:
    """Raises where these are no sequences of so many tokens, as the operator does on CPU."""
    if is_compiling() or in_transform(cu_seqlens) or not has_values(cu_seqlens):
        return
    boundaries = cu_seqlens.tolist()
    for end, needed, which in ((boundaries[0], 0, "begins"), (boundaries[-1], tokens, "ends")):
        if end != needed:
            raise ValueError(f"{_OP}: cu_seqlens {which} with {end}; {needed} is needed")
    for before, after in itertools.pairwise(boundaries):
        if after < before:
            raise ValueError(f"{_OP}: cu_seqlens has {after} behind {before}; numbers that do not fall are needed")


def _checked_boundaries(q: Tensor, cu_seqlens: Any, is_with_states: bool) -> Tensor:
    """As the operator takes them, which says what it says of those that it gets in these words."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{_OP}: cu_seqlens is a {type(cu_seqlens).__name__}; a tensor is needed")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{_OP}: cu_seqlens is {cu_seqlens.dtype}; torch.int32 or torch.int64 is needed")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{_OP}: cu_seqlens has shape {list(cu_seqlens.shape)}; one dimension of two elements or more is needed"
        )
    if q.shape[0] != 1:
        raise ValueError(f"{_OP}: cu_seqlens is given and q has {q.shape[0]} rows; one, of all sequences, is needed")
    if is_with_states:
        raise ValueError(f"{_OP}: cu_seqlens is given with initial_state or output_final_state; neither is supported")
    return cu_seqlens.to(torch.int32).contiguous()


def refusal(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, skip: Tensor | None, initial: Tensor | None
) -> str | None:
    """Why these are not served; None where they are, or where the operator says what is wrong with them."""
    if not served(q, k, v, g, beta, skip, initial) or not q.dtype == k.dtype == v.dtype:
        return "its tensors are of a kind that no kernel serves"
    key, value = q.shape[-1], v.shape[-1]
    if key > MOST_KEY or value > MOST_VALUE:
        return f"its heads have {key} and {value} elements; at most {MOST_KEY} and {MOST_VALUE} are served"
    if q.is_cuda and _shared_memory_of(q.device) < _least_shared_memory(q.dtype, key):
        return f"this GPU has too little shared memory for heads of {key} elements of {q.dtype}"
    return None


@functools.cache
def _shared_memory_of(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def _least_shared_memory(dtype: torch.dtype, key: int) -> int:
    """What gated_delta_rule_cuda.c takes with the narrowest slices of values."""
    planes, padded, chunk, slices = 3 if dtype is torch.float32 else 2, -(-key // 16) * 16, 64, 16
    rows = [(chunk, padded), (padded, slices), (padded, slices), (chunk, chunk), *[(chunk, slices)] * 3]
    return 5120 + sum(planes * count * (2 * columns + 16) for count, columns in rows)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    skip: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    additive: bool = False,
    wide: bool = False,
    normalize: bool = False,
    eps: float = _EPS,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A head's state S [K, V] changes with each token, and y is what the token's query reads of it:

        S := exp(g) S,   S := S + beta k (v - S^T k)^T,   y = scale S^T q + skip v

    or, where `additive` says so, S := S + beta k v^T, which is the state space of Mamba-2 (Dao and Gu, 2024); in
    float32, with q and k first divided by sqrt(their squares' sum + eps) where `normalize` says so. It is computed over
    chunks of 64 tokens, within which all is products of matrices.

    Args:
        q: [B, T, H, K], K at most 128: float32, bfloat16 or float16. It may be a slice of a wider tensor, as all may.
        k: as q.
        v: [B, T, N, V], V at most 256, of q's type. N is a multiple of H: head n has the q and k of n // (N // H).
        g: [B, T, N], of any float type: the logarithm of a decay, 0 or below.
        beta: [B, T, N], of any float type.
        scale: None: 1 / sqrt(K).
        skip: [N], of any float type. None: zeros.
        initial_state: [B, N, K, V] float32: S before the first token. None: zeros.
        output_final_state: whether S behind the last token is wanted.
        additive: whether what a key finds in the state stays there.
        wide: whether y is float32, whatever q is.
        normalize: whether q and k are made rows of length 1.
        eps: for that.
        cu_seqlens: [S + 1], int32 (int64 is converted): where the sequences of one packed row begin and end. B is 1,
            sequence n has the tokens from cu_seqlens[n] to below cu_seqlens[n + 1], and sees only them: results are
            those of a call of its own. The first number is 0, none is below the one before it, the last one is T; equal
            neighbours are a sequence without tokens. On CUDA nothing looks whether the values are so, and others make
            results that mean nothing. Not with `initial_state` or `output_final_state`.

    Returns:
        y, [B, T, N, V] of q's type or float32, contiguous, and S behind the last token, float32, or None. Gradients
        flow to all tensors, and from both results; what is kept for them is the arguments. A second differentiation is
        an error.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    is_served = refusal(q, k, v, g, beta, skip, initial_state) is None
    if not is_served:
        need_floats(_OP, q=q, k=k, v=v, g=g, beta=beta, skip=skip, initial_state=initial_state)
    if cu_seqlens is not None:
        cu_seqlens = _checked_boundaries(q, cu_seqlens, initial_state is not None or output_final_state)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not is_served:
        of_length_one = eps if normalize else None
        y, final = _original(q, k, v, g, beta, skip, initial_state, scale, additive, wide, of_length_one, cu_seqlens)
        return y, final if output_final_state else None
    rows = [_with_rows(t) for t in (q, k, v, g, beta)]
    initial: Any = None if initial_state is None else initial_state.float().contiguous()
    skip = None if skip is None else skip.contiguous()
    options = scale, additive, wide, normalize, eps
    result = _GatedDeltaRule.apply(*rows, skip, initial, cu_seqlens, options, output_final_state)
    return result if output_final_state else (result, None)
