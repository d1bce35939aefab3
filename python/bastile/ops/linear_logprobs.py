"""The output head and what trainers want of its softmax: each target's log-probability, with entropy and statistics on
demand, a budget of logits at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import Function, first_order_only, is_last_pass, is_set, on_gpu, times
from bastile.ops._valid_rows import ValidCount, gather, scatter
from bastile.ops.fused_linear_cross_entropy import (
    are_left_out,
    check_valid_rows,
    chunk_bytes_now,
    float32_gradient,
    head_inputs,
    kept_rows,
    room_for,
    rows_to_compute,
)
from bastile.ops.vocabulary_parallel import (
    IGNORED,
    Statistics,
    VocabularyShard,
    joined,
    local_of,
    local_targets,
    local_upstream,
    summed,
)

__all__ = ["LogProbs", "linear_logprobs", "set_float32_dweight"]

_forward = torch.ops.bastile.linear_logprobs_forward.default
_backward = torch.ops.bastile.linear_logprobs_backward.default
_backward_kept = torch.ops.bastile.linear_logprobs_backward_kept.default

#: What `outputs` may name, in the order of LogProbs.
OUTPUTS = ("entropy", "lse", "log_sum_sq_probs", "mean_logits", "is_top1")

#: An ignore_index that no target is: for targets that all count, every one of which is checked.
NO_TARGET = -(1 << 31)

LEFT_IN_FLOAT32 = 2  # an answer of the operator's to how dweight is summed, beside no and yes

_float32_dweight: bool | None = None


def set_float32_dweight(enabled: bool | None) -> None:
    """Whether linear_logprobs sums dweight over chunks in float32 and rounds it once, whatever that costs; None: as
    BASTILE_FLOAT32_DWEIGHT says (1: yes), else where it is cheap: always on CPU, on CUDA from the ninth chunk on.

    What fits the budget of logits is one chunk, which rounds once either way. It holds for backward passes from now on,
    in every thread.
    """
    global _float32_dweight
    _float32_dweight = enabled


def wants_float32_dweight() -> bool:
    """What was set."""
    if _float32_dweight is not None:
        return _float32_dweight
    return is_set("BASTILE_FLOAT32_DWEIGHT", False)


class LogProbs(NamedTuple):
    """What linear_logprobs gives, each [...] float32 (is_top1: bool); None: not asked for."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None


class Computed(NamedTuple):
    """Statistics of rows, and what the operator's backward needs of the call beside its inputs: the targets, the logits
    or the jacobian where they are kept, whether targets are this process' own where there is a shard, and the
    options."""

    found: Statistics
    target: torch.Tensor
    logits: torch.Tensor | None
    jacobian: torch.Tensor | None
    own: torch.Tensor | None
    options: tuple[Any, ...]


def statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    options: tuple[Any, ...],
    wanted: Sequence[bool],
    chunk_bytes: int,
    save: bool,
    kept: int,
    shard: VocabularyShard | None,
    with_jacobian: bool = False,
) -> Computed:
    """The operator's forward; with a shard joined with the other processes'. kept: of how many rows, the last ones, the
    logits are."""
    own = None
    if shard is not None:
        targets = local_targets("linear_logprobs", target, options[0], shard, weight.shape[0])
        target, own, options, save = targets.local, targets.own, (IGNORED, *options[1:]), True
    made = _forward(hidden, weight, target, bias, *options, chunk_bytes, kept, save, *wanted, kept > 0, with_jacobian)
    log_probs, pairs, *others, is_top1, logits, jacobian = made
    asked = [t if w else None for t, w in zip((*others, is_top1 != 0), wanted, strict=True)]
    found = Statistics(log_probs, pairs, *asked)
    if shard is not None:
        found = joined(found, targets, shard, hidden, weight.shape[0])
    return Computed(found, target, logits if kept else None, jacobian if with_jacobian else None, own, options)


class _Seen:
    """What of this process' backward passes a forward pass cannot know."""

    others = False  # entropy or lse of a frozen head had a gradient


_seen = _Seen()


class _LinearLogProbs(Function):
    """On CUDA the logits of as many rows as the memory budget holds, the last ones, are kept for the backward pass,
    where their gradient takes their place; others are made again: see bst_linear_logprobs_forward in bastile.h.
    Where hidden alone has a gradient, as with a frozen head, none are: each row's `jacobian`, the gradient of its
    log-probability, is made in the forward pass, and multiplied by the upstream one (but for float16, whose range a
    loss scale may need). If entropy or lse turn out to have gradients, that was for nothing, and from then on logits
    are kept where all fit. With a shard, what is computed is of its part of the vocabulary, and is joined with the
    other processes'. rounded: as `float32_gradient` says."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, options, wanted, with_grad, shard, rounded):
        want = [with_grad and needed for needed in ctx.needs_input_grad[:3]]
        wide, weight = (None, weight) if rounded is None else (weight, rounded)
        chunk_bytes = chunk_bytes_now()
        # A compiled program plans its memory, and has no place for logits that are written over.
        kept, eager = 0, any(want) and not torch.compiler.is_compiling()
        if eager and on_gpu(hidden):
            kept = kept_rows(hidden, weight, chunk_bytes)
        with_jacobian = (
            eager
            and want == [True, False, False]
            and (kept < hidden.shape[0] or not _seen.others)
            and shard is None
            and hidden.dtype is not torch.float16
        )
        if with_jacobian:
            kept = 0
        with room_for(hidden, weight, chunk_bytes, [with_jacobian, False, False], kept):
            part = statistics(
                hidden, weight, bias, target, options, wanted, chunk_bytes, any(want), kept, shard, with_jacobian
            )
        found, target, logits, jacobian, own, options = part
        log_probs, pairs, *others, top1 = found
        ctx.options, ctx.chunk_bytes, ctx.want = options, chunk_bytes, want
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t in (*others[2:], top1) if t is not None])
        ctx.save_for_backward(hidden, weight, target, bias, pairs, others[0], own, wide, jacobian)
        ctx.logits, ctx.kept, ctx.shard = logits, kept, shard
        return log_probs, *others, top1

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy, grad_lse, *_):
        upstream = [None if g is None else g.float().contiguous() for g in (grad_log_probs, grad_entropy, grad_lse)]
        given = [g for g in upstream if g is not None]
        if not given or not any(ctx.want):
            return (None,) * 9
        hidden, weight, target, bias, pairs, entropy, own, wide, jacobian = ctx.saved_tensors
        if ctx.shard is not None:
            upstream = local_upstream(upstream, own)
        logits, exact = ctx.logits, int(wants_float32_dweight()) if wide is None else LEFT_IN_FLOAT32
        options, rest = (*ctx.options, ctx.chunk_bytes), (exact, *ctx.want)
        of_log_probs_alone = len(given) == 1 and given[0] is upstream[0]
        if jacobian is not None and not of_log_probs_alone:
            _seen.others = True
        if jacobian is not None and of_log_probs_alone:
            made = times(jacobian, given[0][:, None], hidden.dtype), None, None
        elif logits is not None and is_last_pass(given[0]):
            ctx.logits = None  # used up
            made = _backward_kept(
                *upstream, hidden, weight, target, bias, pairs, entropy, logits, *options, ctx.kept, *rest
            )
        else:
            made = _backward(*upstream, hidden, weight, target, bias, pairs, entropy, *options, 0, *rest)
        gradients = [g if w else None for g, w in zip(made, ctx.want, strict=True)]
        if ctx.shard is not None and ctx.want[0]:
            gradients[0] = summed(gradients[0], ctx.shard)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            sources = (*given, hidden, weight if wide is None else wide, bias)
            gradients = [first_order_only("linear_logprobs", g, *sources) for g in gradients]
        return (*gradients, None, None, None, None, None, None)


def reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float,
    ignore_index: int,
    outputs: Sequence[str],
) -> LogProbs:
    """The formulas in plain torch, over float32 (or float64) logits [T, V]; differentiable as autograd has it."""
    z = logits if logits.dtype is torch.float64 else logits.float()
    z = z * logit_scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    z = z / temperature
    counts = target != ignore_index
    at = target.masked_fill(~counts, 0)[:, None]
    log_p = torch.log_softmax(z, -1)
    found: dict[str, torch.Tensor] = {}
    if "entropy" in outputs:
        found["entropy"] = -(log_p.exp() * log_p.clamp_min(-1e4)).sum(-1)
    if "lse" in outputs:
        found["lse"] = torch.logsumexp(z, -1)
    if "log_sum_sq_probs" in outputs:
        found["log_sum_sq_probs"] = torch.logsumexp(2 * log_p.detach(), -1)
    if "mean_logits" in outputs:
        found["mean_logits"] = z.detach().mean(-1)
    found = {name: t.masked_fill(~counts, 0.0) for name, t in found.items()}
    if "is_top1" in outputs:
        found["is_top1"] = (z.argmax(-1) == at[:, 0]) & counts
    return LogProbs(log_p.gather(1, at)[:, 0].masked_fill(~counts, 0.0), **found)


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
    valid_rows: int | ValidCount | None = None,
    shard: VocabularyShard | None = None,
) -> LogProbs:
    """The log-probability of each target under softmax(z), with z = softcap · tanh(s / softcap) / temperature and
    s = logit_scale · (hidden · weightᵀ + bias), of whose logits no more exist at once than a memory budget allows
    (`bastile.ops.fused_linear_cross_entropy.set_logits_memory`). Rows that do not count are left out of the products as
    that module's `set_compaction` says.

    Args:
        hidden: [..., H], float32, bfloat16 or float16.
        weight: [V, H], the head's, of hidden's type (under autocast both are cast as a linear layer casts them; a
            float32 weight's gradient is summed in float32 and left so).
        target: [...] int64, shaped as hidden without its last dimension.
        bias: [V] of hidden's type.
        temperature: divides the logits, last of all; from 1e-6 to 1e6.
        logit_scale: multiplies them, first of all.
        softcap: between the two; 0 or None: none.
        ignore_index: target of rows that count for nothing: they give 0 (False) and have no gradient.
        outputs: which else are wanted: "entropy", "lse" (logsumexp of z), "log_sum_sq_probs" (the log of the sum of the
            squared probabilities), "mean_logits" (the mean of z), "is_top1" (whether the target is the first of the
            largest).
        valid_rows: no fewer than there are targets other than ignore_index, or a `ValidCount` of this very target, as
            `fused_linear_cross_entropy` has it: nobody waits for a count then. Too small a number is an error on CPU;
            on CUDA log_probs are NaN where a row that counts was left out.
        shard: the vocabulary is parted among processes, all of which call this with the same hidden states and
            targets: weight and bias are this process' part, as a DTensor or the part alone. Results are the same on
            each, as is hidden's gradient, which is summed over them.

    Returns:
        LogProbs: log_probs and what `outputs` names, each [...] float32 (is_top1 bool); the others are None. Gradients
        flow from log_probs, entropy and lse to whichever of hidden, weight and bias require them.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed. A target out of
            range is an error on CPU; on CUDA it gives a NaN and no gradient, for checking would wait for the device.
    """
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise ValueError(f"linear_logprobs: outputs names {unknown[0]!r}; some of {', '.join(OUTPUTS)} are needed")
    if not 1e-6 <= temperature <= 1e6:
        raise ValueError(f"linear_logprobs: temperature is {temperature}; a number from 1e-6 to 1e6 is needed")
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"linear_logprobs: target is a {type(target).__name__}; a tensor is needed")
    check_valid_rows("linear_logprobs", valid_rows)
    labels = target.reshape(-1)
    if shard is not None:
        weight, bias = local_of(weight), local_of(bias)
    own_weight = weight
    flat, weight, bias, is_served = head_inputs("linear_logprobs", hidden, weight, labels, bias)
    options = (temperature, logit_scale, softcap or 0.0)
    found: Any
    if not is_served:
        if shard is not None:
            raise TypeError(
                f"linear_logprobs: hidden is {hidden.dtype} on {hidden.device.type}; float32, bfloat16 or float16 on "
                "CPU or CUDA is needed for a vocabulary that is parted"
            )
        found = reference(torch.nn.functional.linear(flat, weight, bias), labels, *options, ignore_index, outputs)
    else:
        chosen = rows_to_compute("linear_logprobs", flat, target, ignore_index, valid_rows)
        rows, kept = flat, labels
        if chosen is not None:
            rows, kept = gather(flat, chosen), labels.index_select(0, chosen)
        weight, rounded = float32_gradient(own_weight, weight)
        found = _LinearLogProbs.apply(
            rows.contiguous(), weight, bias, kept, (ignore_index, *options),
            tuple([name in outputs for name in OUTPUTS]), torch.is_grad_enabled(), shard, rounded,
        )  # fmt: skip
        if chosen is not None:
            found = [None if t is None else scatter(t, chosen, flat.shape[0]) for t in found]
            if isinstance(valid_rows, int) and hidden.is_cuda:
                found[0] = found[0].masked_fill(are_left_out(labels, ignore_index, chosen), float("nan"))
    log_probs, *others = [None if t is None else t.reshape(target.shape) for t in found]
    assert log_probs is not None
    return LogProbs(log_probs, *others)
