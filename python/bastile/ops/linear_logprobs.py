"""The output head and what trainers want of its softmax: each target's log-probability, with entropy and statistics on
demand, a chunk of logits at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bastile.ops._common import cast_as_linear, first_order_only, need_floats

__all__ = ["LogProbs", "linear_logprobs"]

#: What `outputs` may name.
OUTPUTS = ("entropy", "lse", "log_sum_sq_probs", "mean_logits", "is_top1")
_CHUNK_ROWS = 1024


class LogProbs(NamedTuple):
    """What linear_logprobs gives, each [...] float32 (is_top1: bool); None: not asked for."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None


def _logits(hidden, weight, bias, temperature, logit_scale, softcap):
    z = torch.nn.functional.linear(hidden, weight, bias).float() * logit_scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def _statistics(z: torch.Tensor, target: torch.Tensor, ignore_index: int, outputs: Sequence[str]) -> list[Any]:
    """In the order of LogProbs."""
    counts = target != ignore_index
    at = target.masked_fill(~counts, 0)[:, None]
    lse, log_p = torch.logsumexp(z, -1), torch.log_softmax(z, -1)
    found: list[Any] = [log_p.gather(1, at)[:, 0], None, lse if "lse" in outputs else None, None, None, None]
    if "entropy" in outputs:
        found[1] = -(log_p.exp() * log_p.clamp_min(torch.finfo(z.dtype).min)).sum(-1)
    with torch.no_grad():
        if "log_sum_sq_probs" in outputs:
            found[3] = torch.logsumexp(2 * log_p, -1)
        if "mean_logits" in outputs:
            found[4] = z.mean(-1)
        if "is_top1" in outputs:
            found[5] = (z.argmax(-1) == at[:, 0]) & counts
    return [t if t is None or t.dtype is torch.bool else t.masked_fill(~counts, 0.0) for t in found]


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, options, ignore_index, outputs):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.options, ctx.ignore_index, ctx.outputs = options, ignore_index, outputs
        rows = [
            _statistics(_logits(h, weight, bias, *options), t, ignore_index, outputs)
            for h, t in zip(hidden.split(_CHUNK_ROWS), target.split(_CHUNK_ROWS), strict=True)
        ]
        found = [None if parts[0] is None else torch.cat(parts) for parts in zip(*rows, strict=True)]
        ctx.mark_non_differentiable(*(t for t in found[3:] if t is not None))
        return tuple(found)

    @staticmethod
    def backward(ctx, *upstream):
        hidden, weight, bias, target = ctx.saved_tensors
        want = ctx.needs_input_grad[:3]
        sums = [torch.zeros_like(t, dtype=torch.float32) if w else None
                for t, w in zip((hidden, weight, bias), want, strict=True)]  # fmt: skip
        if all(g is None for g in upstream[:3]):
            return (None,) * 7
        for begin in range(0, hidden.shape[0], _CHUNK_ROWS):
            rows = slice(begin, begin + _CHUNK_ROWS)
            with torch.enable_grad():
                h = hidden[rows].detach().requires_grad_(want[0])
                w = weight.detach().requires_grad_(want[1])
                b = None if bias is None else bias.detach().requires_grad_(want[2])
                found = _statistics(_logits(h, w, b, *ctx.options), target[rows], ctx.ignore_index, ctx.outputs)
                total = sum(
                    (t * g[rows]).sum() for t, g in zip(found[:3], upstream, strict=False)
                    if t is not None and g is not None
                )  # fmt: skip
            wanted = [t for t, needed in zip((h, w, b), want, strict=True) if needed]
            made = iter(torch.autograd.grad(total, wanted))
            for i, needed in enumerate(want):
                if needed:
                    (sums[0][rows] if i == 0 else sums[i]).add_(next(made))
        gradients = [None if s is None else s.to(t.dtype) for s, t in zip(sums, (hidden, weight, bias), strict=True)]
        if torch.is_grad_enabled():
            given = [g for g in upstream[:3] if g is not None]
            gradients = [first_order_only("linear_logprobs", g, hidden, weight, *given) for g in gradients]
        return (*gradients, None, None, None, None)


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    ignore_index: int = -100,
    outputs: Sequence[str] = (),
) -> LogProbs:
    """The log-probability of each target under softmax(z), z = softcap · tanh(logit_scale · (hidden · weightᵀ + bias) /
    softcap) / temperature, of whose logits only a chunk of rows exists at once.

    Args:
        hidden: [..., H], float32, bfloat16 or float16.
        weight: [V, H], the head's, of hidden's type (under autocast both are cast as a linear layer casts them).
        target: [...] int64, shaped as hidden without its last dimension.
        bias: [V] of hidden's type.
        temperature: divides the logits, last of all.
        logit_scale: multiplies them, first of all.
        softcap: between the two; 0 or None: none.
        ignore_index: target of rows that count for nothing: they give 0 (False) and have no gradient.
        outputs: which else are wanted: "entropy", "lse" (logsumexp of z), "log_sum_sq_probs" (the log of the sum of the
            squared probabilities), "mean_logits" (the mean of z), "is_top1" (whether the target is the first of the
            largest).

    Returns:
        LogProbs: log_probs and what `outputs` names, each [...] float32 (is_top1 bool); the others are None. Gradients
        flow from log_probs, entropy and lse to whichever of hidden, weight and bias require them.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed. A target out of
            range is an error on CPU.
    """
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise ValueError(f"linear_logprobs: outputs names {unknown[0]!r}; some of {', '.join(OUTPUTS)} are needed")
    if not temperature > 0:
        raise ValueError(f"linear_logprobs: temperature is {temperature}; a positive number is needed")
    need_floats("linear_logprobs", hidden=hidden, weight=weight, bias=bias)
    hidden, weight, bias = cast_as_linear(hidden, weight, bias)
    options = (temperature, logit_scale, softcap or 0.0)
    found = _LinearLogProbs.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, target.reshape(-1), options, ignore_index, tuple(outputs)
    )
    log_probs, *others = [None if t is None else t.reshape(target.shape) for t in found]
    assert log_probs is not None
    return LogProbs(log_probs, *others)
