"""Fused attentions, PyTorch's and Bastile's, of whole rows and of segments of a batch's tokens: each forward, with what
its backward pass takes, and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bastile.ops import _flash as flash
from bastile.ops import _varlen as varlen
from bastile.ops._efficient import Wide
from bastile.ops._segments import within

#: What PyTorch's choice of an attention calls cuDNN's, and flash attention.
_CUDNN: int = torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value
_FLASH: int = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value

#: Of causal rows, from so many products of queries with keys and columns on, Bastile's kernels take less time than
#: cuDNN's (bench/NOTES.md). Below, host time is more than what there is to gain.
LEAST_WORK = 4e9
#: Up to so many columns of a head, the longest rows of which that holds: cuDNN makes weights once in its backward pass,
#: Bastile twice.
LONGEST = {64: 4096, 128: 8192}


@dataclass(frozen=True)
class Rows:
    """Attention of each row, causal or not. q, k and v are [B, heads, S, D], y and dy [B, S, heads, D], lse
    [B, heads, S]. Weights are dropped with the probability of `dropout`, on CUDA."""

    causal: bool
    window: int
    scale: float
    dropout: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
        """y, lse, and what else the backward pass takes."""
        if q.is_cuda and _are_wide(q):
            return self._of_wide(q).forward(*_behind(q, k, v))
        is_own = self._is_varlen_s(q)
        if q.is_cuda and (not is_own or _are_long(q)) and self._is_cudnn_s(q, k, v):
            y, lse, *more, _ = flash.cudnn_forward(q, k, v, None, True, 0.0, True, False, scale=self.scale)
            return y.transpose(1, 2), lse, more
        if is_own:
            own, keys, values = tokens(q, k, v)
            y, lse = varlen.forward(own, keys, values, None, *self._of_varlen(q))
            return y.unflatten(0, (q.shape[0], -1)), lse, []
        if not q.is_cuda:
            given = q, *_repeated(q, k, v), 0.0, self._is_causal
            y, lse = flash.forward_on_cpu(*given, attn_mask=self._bias(q), scale=self.scale)
            return y.transpose(1, 2), lse, []
        y, lse, *random, _ = flash.forward(*_behind(q, k, v), *self._shapes(q), False, **self._how)
        return y, lse, random

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, more: list[Any]
    ) -> list[Tensor]:
        """Gradients of q, k and v, as these are."""
        if q.is_cuda and _are_wide(q):
            behind = _behind(q, k, v)
            return _behind(*self._of_wide(q).backward(dy, behind[0], behind[1], behind[2], y, lse, more))
        if len(more) > 2:  # cuDNN's
            *cuts, seed, offset = more
            read = dy.transpose(1, 2), q, k, v, y.transpose(1, 2), lse
            return list(flash.cudnn_backward(*read, seed, offset, None, *cuts, 0.0, True, scale=self.scale))
        if self._is_varlen_s(q):
            own, keys, values = tokens(q, k, v)
            upstream, out = dy.flatten(0, 1), y.flatten(0, 1)
            grads = varlen.backward(upstream, own, keys, values, None, out, lse, *self._of_varlen(q))
            return [g.unflatten(0, (q.shape[0], -1)).transpose(1, 2) for g in grads]
        if not q.is_cuda:
            given = dy.transpose(1, 2), q, *_repeated(q, k, v), y.transpose(1, 2), lse, 0.0, self._is_causal
            dq, *both = flash.backward_on_cpu(*given, attn_mask=self._bias(q), scale=self.scale)
            return [dq, *[_summed(t, k.shape[1]) for t in both]]
        grads = flash.backward(dy, *_behind(q, k, v), y, lse, *self._shapes(q), *more, **self._how)
        return [g.transpose(1, 2) for g in grads]

    def unfused_on_cpu(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """y by PyTorch's differentiable operators, which drop weights."""
        return _unfused(self.dropout, self._is_causal, self.scale, self._bias(q), q, *_repeated(q, k, v))

    def _of_wide(self, q: Tensor) -> Wide:
        return Wide(None, q.shape[2], self.causal, self.scale)

    def _shapes(self, q: Tensor) -> list[Any]:
        """What flash attention takes between tensors and how they are used: no cuts, lengths, the rest."""
        return [None, None, q.shape[2], q.shape[2], self.dropout, self.causal]

    @property
    def _how(self) -> dict[str, Any]:
        return {"scale": self.scale, **flash.window_of(self.window, self.causal)}

    @property
    def _is_causal(self) -> bool:
        return self.causal and not self.window  # which a bias says too

    def _bias(self, q: Tensor) -> Tensor | None:
        return _bias(q, self.window, self.causal)

    def _is_cudnn_s(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether it is causal, and PyTorch would take its attention."""
        is_its = self._is_causal and not self.dropout and flash.cudnn_is_known()
        return is_its and _choice(q, k, v, self.scale) == _CUDNN

    def _is_varlen_s(self, q: Tensor) -> bool:
        return varlen.serves(q, q.shape[0], self.dropout)

    def _of_varlen(self, q: Tensor) -> tuple[bool, float, int, int]:
        return self.causal, self.scale, self.window, q.shape[0]


@dataclass(frozen=True)
class Pieces:
    """Attention of each segment of tokens, likewise. q, k, v, y and dy are [T, heads, D], lse [heads, T]. Queries
    without keys have zeros."""

    cuts: Tensor  # [2, N], between segments of queries and of keys
    causal: bool
    longest: int
    window: int
    scale: float
    dropout: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
        if q.is_cuda and _are_wide(q):
            y, lse, more = self._of_wide.forward(q[None], k[None], v[None])
            return y[0], lse, more
        if self._is_varlen_s(q):
            return *varlen.forward(q, k, v, self.cuts, self.causal, self.scale, self.window), []
        if q.is_cuda:
            y, lse, *random, _ = flash.forward(q, k, v, *self._shapes, False, **self._how)
            return y, lse, random
        y, lse = torch.zeros_like(q), q.new_full(q.shape[1::-1], math.inf, dtype=torch.float32)
        for at, _, own in self._each(q, k, v):
            part, sums = flash.forward_on_cpu(*own, 0.0, self._is_causal, **self._how_on_cpu(own[0]))
            y[at], lse[:, at] = part[0].transpose(0, 1), sums[0].to(lse.dtype)
        return y, lse, []

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, more: list[Any]
    ) -> list[Tensor]:
        if q.is_cuda and _are_wide(q):
            dy, q, k, v, y = [t[None] for t in (dy, q, k, v, y)]
            return [g[0] for g in self._of_wide.backward(dy, q, k, v, y, lse, more)]
        if self._is_varlen_s(q):
            return varlen.backward(dy, q, k, v, self.cuts, y, lse, self.causal, self.scale, self.window)
        if q.is_cuda:
            return list(flash.backward(dy, q, k, v, y, lse, *self._shapes, *more, **self._how))
        grads = [torch.zeros_like(t) for t in (q, k, v)]
        for at, read, own in self._each(q, k, v):
            upstream, out = [t[at].transpose(0, 1)[None] for t in (dy, y)]
            given = upstream, *own, out, lse[:, at][None], 0.0, self._is_causal
            dq, *both = flash.backward_on_cpu(*given, **self._how_on_cpu(own[0]))
            grads[0][at] = dq[0].transpose(0, 1)
            for grad, part in zip(grads[1:], both, strict=True):
                grad[read] = _summed(part, k.shape[1])[0].transpose(0, 1)
        return grads

    def unfused_on_cpu(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As of `Rows`."""
        parts, end = [], 0
        for at, _, own in self._each(q, k, v):
            parts += [v.new_zeros(at.start - end, q.shape[1], v.shape[2])]
            parts += [
                _unfused(self.dropout, self._is_causal, self.scale, _bias(own[0], self.window, self.causal), *own)[0]
            ]
            end = at.stop
        return torch.cat([*parts, v.new_zeros(len(q) - end, q.shape[1], v.shape[2])])

    def _is_varlen_s(self, q: Tensor) -> bool:
        return varlen.serves(q, self.cuts.shape[1] - 1, self.dropout)

    @property
    def _of_wide(self) -> Wide:
        return Wide(self.cuts, self.longest, self.causal, self.scale)

    @property
    def _shapes(self) -> list[Any]:
        return [*self.cuts, self.longest, self.longest, self.dropout, self.causal]

    @property
    def _how(self) -> dict[str, Any]:
        return {"scale": self.scale, **flash.window_of(self.window, self.causal)}

    @property
    def _is_causal(self) -> bool:
        return self.causal and not self.window  # which a bias says too

    def _how_on_cpu(self, q: Tensor) -> dict[str, Any]:
        return {"attn_mask": _bias(q, self.window, self.causal), "scale": self.scale}

    def _each(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, slice, list[Tensor]]]:
        """On a CPU, of each segment that has queries and keys: where these are, and they, [1, heads, tokens, D]."""
        queries, keys = self.cuts.tolist()
        for i in range(len(queries) - 1):
            at, read = slice(*queries[i : i + 2]), slice(*keys[i : i + 2])
            if at.start < at.stop and read.start < read.stop:
                own, *both = [t.transpose(0, 1)[None] for t in (q[at], k[read], v[read])]
                yield at, read, [own, *_repeated(own, *both)]


def are_faster_here(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether causal rows without padding, [B, heads, S, D], are attended to faster by Bastile's kernels than by what
    PyTorch would take."""
    if not is_much(q) or not varlen.serves(q, q.shape[0], 0.0):
        return False
    choice = _choice(q, k, v, q.shape[-1] ** -0.5)
    return choice == _FLASH or (choice == _CUDNN and not _are_long(q))


def is_much(q: Tensor) -> bool:
    """Whether it is enough work to be worth the question who does it."""
    return q.numel() * q.shape[2] >= LEAST_WORK


def _are_long(q: Tensor) -> bool:
    return any(q.shape[3] <= columns and q.shape[2] > tokens for columns, tokens in LONGEST.items())


def _choice(q: Tensor, k: Tensor, v: Tensor, scale: float) -> int:
    """What PyTorch would attend to causal rows by."""
    grouped = q.shape[1] != k.shape[1]
    return torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=scale, enable_gqa=grouped)


def _are_wide(q: Tensor) -> bool:
    """Heads on CUDA, for flash attention."""
    return q.shape[-1] > flash.MOST_DIM


def tokens(*heads_first: Tensor) -> list[Tensor]:
    """[B, heads, S, D] as [B S, heads, D]."""
    return [t.transpose(1, 2).flatten(0, 1) for t in heads_first]


def _behind(*heads_first: Tensor) -> list[Tensor]:
    """With heads behind positions, as flash attention takes them."""
    return [t.transpose(1, 2) for t in heads_first]


def _repeated(q: Tensor, *both: Tensor) -> list[Tensor]:
    """For a CPU's flash attention, whose keys and values are of each head."""
    return [t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in both]


def _summed(grad: Tensor, groups: int) -> Tensor:
    return grad.unflatten(1, (groups, -1)).sum(2)


def _bias(q: Tensor, window: int, causal: bool) -> Tensor | None:
    """What is added to scores for a window, which a CPU's flash attention does not know."""
    if not window:
        return None
    at = torch.arange(q.shape[2], device=q.device)
    before = at[:, None] - at[None, :]
    return torch.zeros_like(before, dtype=q.dtype).masked_fill_(~within(before, window, causal), -math.inf)


def _unfused(
    dropout: float, causal: bool, scale: float, bias: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """[B, S, heads, D]."""
    y = nn.functional.scaled_dot_product_attention(q, k, v, bias, dropout, causal, scale=scale)
    return y.transpose(1, 2)
