"""The fused loss where the vocabulary is parted among processes (vocabulary_parallel.py): from linear_logprobs, whose
rows' loss is summed here. Where the logits do not fit the budget, and one number is wanted of all rows, their gradients
are made in the forward pass, a chunk of rows after the other, so that no product runs twice."""

from __future__ import annotations

import torch
from torch import distributed

from bastile.ops._common import Function, cast_as_linear, first_order_only, need_floats
from bastile.ops._valid_rows import ValidCount, gather
from bastile.ops.cross_entropy import Reduction, scalar_tensor, scaled
from bastile.ops.fused_linear_cross_entropy import (
    DEFAULT_LOGITS_BYTES,
    LEAST_ROWS,
    are_left_out,
    chunk_bytes_now,
    even_rows,
    float32_gradient,
    head_inputs,
    rows_that_fit,
    rows_to_compute,
)
from bastile.ops.linear_logprobs import LEFT_IN_FLOAT32, linear_logprobs, statistics
from bastile.ops.vocabulary_parallel import VocabularyShard, local_of, local_upstream

_OP = "fused_linear_cross_entropy"
_backward_kept = torch.ops.bastile.linear_logprobs_backward_kept.default
_CPU_BYTES = 256 << 20  # of a chunk's logits there, where no setting says how many


def _chunk_rows(tokens: int, hidden: torch.Tensor, shard: VocabularyShard) -> int:
    """Rows of a chunk whose logits, of hidden's type, fit the budget, of which all have about as many; 64 always fit.
    The same number in all processes, whatever their own part is: each chunk is an exchange."""
    part = -(-shard.vocabulary // distributed.get_world_size(shard.group))
    budget = chunk_bytes_now() or (DEFAULT_LOGITS_BYTES if hidden.is_cuda else _CPU_BYTES)
    return even_rows(max(tokens, 1), max(LEAST_ROWS, rows_that_fit(hidden, part, budget)))


class _SumInChunks(Function):
    """-sum of factors · log p, [] float32. Its gradients are made with it, for an upstream gradient of one. rounded: as
    `float32_gradient` says."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, factors, options, shard, chunk, rounded):
        want, exact = ctx.needs_input_grad[:3], 0 if rounded is None else LEFT_IN_FLOAT32
        weight = weight if rounded is None else rounded
        losses, pieces, exchanges, sums = [], [], [], [None, None]
        for first in range(0, hidden.shape[0], chunk):
            rows = slice(first, first + chunk)
            part = hidden[rows]
            made = statistics(part, weight, bias, target[rows], options, (False,) * 5, 0, True, part.shape[0], shard)
            losses.append(made.found.log_probs * factors[rows])
            by_log_p, _, by_lse = local_upstream((-factors[rows], None, None), made.own)
            dhidden, *others = _backward_kept(
                by_log_p, None, by_lse, part, weight, made.target, bias, made.found.pairs, None, made.logits,
                *made.options, 0, part.shape[0], exact, *want,
            )  # fmt: skip
            if want[0]:  # while the next chunk is multiplied
                pieces.append(dhidden)
                exchanges.append(distributed.all_reduce(dhidden, group=shard.group, async_op=True))
            for i, part in enumerate(others):
                if want[i + 1]:
                    sums[i] = part if sums[i] is None else sums[i].add_(part)
        for exchange in exchanges:
            exchange.wait()
        dhidden = torch.cat(pieces) if want[0] else None
        loss = -torch.cat(losses).sum() if losses else hidden.new_zeros((), dtype=torch.float32)
        ctx.save_for_backward(loss, dhidden, *sums)
        return loss.clone(), loss  # the second for first_order_only: the first is its readers' to change

    @staticmethod
    def backward(ctx, grad_loss, _):
        loss, *saved = ctx.saved_tensors
        gradients = [None if g is None else scaled(g, grad_loss) for g in saved]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            gradients = [first_order_only("fused_linear_cross_entropy", g, grad_loss, loss) for g in gradients]
        return (*gradients, None, None, None, None, None, None)


def sharded_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    shard: VocabularyShard,
    class_weight: torch.Tensor | None,
    num_items: int | float | torch.Tensor | None,
    reduction: Reduction,
    label_smoothing: float,
    lse_square_scale: float,
    *,
    bias: torch.Tensor | None,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    valid_rows: int | ValidCount | None,
) -> torch.Tensor:
    """fused_linear_cross_entropy of a weight that is parted, whose arguments these are."""
    if label_smoothing:
        raise ValueError(
            f"{_OP}: label_smoothing is {label_smoothing} with a shard; 0 is needed, or a weight that is whole"
        )
    factors, tokens = _factors(target, ignore_index, class_weight, shard), target.numel()
    weight, bias = local_of(weight), local_of(bias)
    divides = reduction == "mean" and num_items is None
    items = scalar_tensor(num_items, hidden.device)
    divisor = factors.sum() if divides else 1.0 if items is None else items.reshape(())
    need_floats(_OP, hidden=hidden, weight=weight, bias=bias)
    (like,) = cast_as_linear(hidden.reshape(-1)[:0])  # of the type in which it is multiplied
    chunk = _chunk_rows(tokens, like, shard)
    if (
        torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
        and tokens
        and reduction != "none"
        and not lse_square_scale
        and like.dtype is not torch.float16  # whose range a loss scale may need
        and not torch.compiler.is_compiling()
        and not (like.is_cuda and tokens <= chunk)
    ):
        flat, cast, cast_bias, is_served = head_inputs(_OP, hidden, weight, target.reshape(-1), bias)
        if is_served:
            chosen = rows_to_compute(_OP, flat, target, ignore_index, valid_rows)
            rows, labels, by_row = flat, target.reshape(-1), factors.reshape(-1)
            if chosen is not None:
                rows, labels, by_row = gather(flat, chosen), labels[chosen], by_row[chosen]
            options = (ignore_index, 1.0, logit_scale, softcap or 0.0)
            cast, rounded = float32_gradient(weight, cast)
            total, _ = _SumInChunks.apply(
                rows.contiguous(), cast, cast_bias, labels, by_row / divisor, options, shard, chunk, rounded
            )
            if isinstance(valid_rows, int) and flat.is_cuda and chosen is not None:
                left_out = are_left_out(target.reshape(-1), ignore_index, chosen)
                total = total.masked_fill(left_out, float("nan"))
            return total
    found = linear_logprobs(
        hidden, weight, target, bias=bias, ignore_index=ignore_index, softcap=softcap,
        logit_scale=logit_scale, outputs=("lse",) if lse_square_scale else (), valid_rows=valid_rows, shard=shard,
    )  # fmt: skip
    loss = (-found.log_probs).reshape(target.shape) * factors
    squares = None if found.lse is None else lse_square_scale * found.lse.square().reshape(target.shape)
    if reduction == "none":
        return loss if squares is None else loss + squares
    total = loss.sum() / divisor
    if squares is not None:
        total = total + squares.sum() / ((target != ignore_index).sum() if divides else divisor)
    return total


def _factors(
    target: torch.Tensor, ignore_index: int, class_weight: torch.Tensor | None, shard: VocabularyShard
) -> torch.Tensor:
    """What each row's loss is multiplied by."""
    counts = target != ignore_index
    if class_weight is None:
        return counts.float()
    need_floats(_OP, class_weight=class_weight)
    if class_weight.shape != (shard.vocabulary,):
        raise ValueError(
            f"{_OP}: class_weight has shape {list(class_weight.shape)}; [V], here [{shard.vocabulary}], is needed, "
            "the whole vocabulary's"
        )
    inside = counts & (target >= 0) & (target < shard.vocabulary)  # others are an error, or NaN, elsewhere
    return torch.where(inside, class_weight.detach().float()[torch.where(inside, target, 0)], counts.float())
