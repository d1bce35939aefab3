"""An output head whose weight is parted over its rows, the vocabulary, among the processes of a group: each computes
its part of the logits of all tokens, and what a row needs of the others' is exchanged, some numbers a token.

The operators know nothing of it. A target in another process' part is the first row of one's own to them, and counts as
none: its upstream gradient goes to the row's logsumexp, which has the same gradient but for the target's own term."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import distributed

from bastile._library import powers_of_two

__all__ = ["VocabularyShard"]

_LN2 = math.log(2)
#: The targets of rows that do not count, whatever ignore_index is: a part's own numbers may include that.
IGNORED = -100


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of the output head's weight [V, H] this process has: those from `start` on. All processes of the group
    have parts, at least a row each, in the order of their ranks, and call with the same hidden states and targets.

    Attributes:
        start: the first of this process' rows.
        vocabulary: V, of all processes.
        group: the processes; None: all.
    """

    start: int
    vocabulary: int
    group: Any = None

    @classmethod
    def even(cls, vocabulary: int, group: Any = None) -> VocabularyShard:
        """As torch.chunk parts the rows: equal parts, of which the last may be smaller."""
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        each = -(-vocabulary // size)
        if each * (size - 1) >= vocabulary:
            raise ValueError(
                f"VocabularyShard: vocabulary is {vocabulary}, of which parts of {each} leave some of {size} processes "
                "nothing; at least a row each is needed"
            )
        return cls(rank * each, vocabulary, group)

    @classmethod
    def of(cls, weight: torch.Tensor) -> VocabularyShard:
        """That of a DTensor [V, H] which is Shard(0) on one dimension of its mesh, and Replicate on any others."""
        if not is_parted(weight):
            placements = getattr(weight, "placements", None)
            raise ValueError(
                f"VocabularyShard: weight is a {type(weight).__name__} with placements {placements}; a DTensor with "
                "one Shard(0), and Replicate else, is needed"
            )
        parted: Any = weight
        (dim,) = [i for i, p in enumerate(parted.placements) if not p.is_replicate()]
        return cls.even(weight.shape[0], parted.device_mesh.get_group(dim))


def local_of(t: Any) -> Any:
    """This process' part of a DTensor, through which gradients go; anything else itself."""
    return t.to_local() if hasattr(t, "to_local") else t


def is_parted(weight: Any) -> bool:
    """Whether it is a DTensor of which VocabularyShard.of knows the parts."""
    placements = getattr(weight, "placements", None)
    if placements is None or not hasattr(weight, "to_local"):
        return False
    from torch.distributed.tensor import Shard

    parts = [p for p in placements if not p.is_replicate()]
    return len(parts) == 1 and type(parts[0]) is Shard and parts[0].dim == 0


class Targets(NamedTuple):
    """[T] each: the targets within this process' part, and the first row where they lie in another's; whether they are
    its own; whether they count; and whether they lie behind its part."""

    local: torch.Tensor
    own: torch.Tensor
    counts: torch.Tensor
    behind: torch.Tensor


def local_targets(op: str, target: torch.Tensor, ignore_index: int, shard: VocabularyShard, rows: int) -> Targets:
    """Of targets [T] of the whole vocabulary, for a part of so many rows. One out of range is an error on CPU."""
    counts, place = target != ignore_index, target - shard.start
    outside = counts & ((target < 0) | (target >= shard.vocabulary))
    if not target.is_cuda and not torch.compiler.is_compiling() and bool(outside.any()):
        at = int(outside.nonzero()[0])
        raise RuntimeError(
            f"{op}: target[{at}] is {int(target[at])}; 0 to {shard.vocabulary - 1}, or ignore_index ({ignore_index}), "
            "is needed"
        )
    own = counts & (place >= 0) & (place < rows)
    # Out of range stays so, for the kernels to say: NaN.
    local = torch.where(own, place, torch.where(counts, torch.where(outside, -1, 0), IGNORED))
    return Targets(local, own, counts, place >= rows)


class Statistics(NamedTuple):
    """What a process found of its part of each row, [T] each, and with the others' the same of whole rows; None: not
    asked for. pairs [T, 2], as bst_linear_logprobs_forward has them: once joined such that with a target of this
    process' own, or the one in its stead, they are the whole row's."""

    log_probs: torch.Tensor
    pairs: torch.Tensor
    entropy: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None


def joined(part: Statistics, targets: Targets, shard: VocabularyShard, like: torch.Tensor, rows: int) -> Statistics:
    """Statistics of whole rows from those of this process' `rows` rows of the weight, and the other processes'. like:
    the hidden states, whose type and device say in what units a pair is. Two exchanges: the largest of numbers, and the
    sum of a few. In float64: a sure token's probability keeps the digits that it has.

    With own = exp(z_t - m) of the target's z_t and others = sum of exp(z_j - m) over the rest, both relative to a
    process' largest z: log p = -log1p(others / own), so own = others / expm1(-log p)."""
    own, counts = targets.own, targets.counts
    reference, others = part.pairs.unbind(1)
    others, log_p = others.double(), part.log_probs.double()
    mine = torch.where(log_p < 0, others / torch.expm1(-log_p), 1.0)
    total = others + mine
    top = reference.contiguous()
    top = top.clone() if top is reference else top
    distributed.all_reduce(top, distributed.ReduceOp.MAX, group=shard.group)
    step = (reference.double() - top.double()) * (_LN2 if powers_of_two(like) else 1.0)
    scale = step.exp()
    mine, share = mine * scale, total * scale
    sums = [torch.where(own, others * scale, share), torch.where(own, mine, 0.0)]
    sums.append(torch.where(own, log_p + total.log() + step, 0.0))  # z_t - top
    if part.entropy is not None:  # of parts q_r of a whole, H = sum of q_r (H_r - log q_r)
        sums.append(share * part.entropy.double() - torch.xlogy(share, share))
    if part.log_sum_sq_probs is not None:
        sums.append(share.square() * part.log_sum_sq_probs.double().exp())
    if part.mean_logits is not None:
        sums.append(part.mean_logits.double() * rows)
    if part.is_top1 is not None:  # who keeps it from being the first of the largest
        is_top = reference == top
        sums.append((torch.where(own, ~(part.is_top1 & is_top), is_top & targets.behind)).double())
    exchanged = torch.stack(sums)
    distributed.all_reduce(exchanged, group=shard.group)
    beside, at_target, above, *more = exchanged.unbind()
    whole = beside + at_target
    log_whole = whole.log()
    log_p = torch.where(beside < at_target, -torch.log1p(beside / at_target), above - log_whole)
    pairs = torch.stack([top, torch.where(own, beside, (whole - mine).clamp_min(0)).float()], 1)

    def shown(values: torch.Tensor) -> torch.Tensor:
        return torch.where(counts, values, 0.0).float()

    rest = iter(more)
    return Statistics(
        shown(torch.where(targets.local == -1, float("nan"), log_p)),
        pairs,
        None if part.entropy is None else shown(next(rest) / whole + log_whole),
        None if part.lse is None else shown(top.double() * (_LN2 if powers_of_two(like) else 1.0) + log_whole),
        None if part.log_sum_sq_probs is None else shown(next(rest).log() - 2 * log_whole),
        None if part.mean_logits is None else shown(next(rest) / shard.vocabulary),
        None if part.is_top1 is None else (next(rest) == 0) & counts,
    )


def local_upstream(upstream: Sequence[torch.Tensor | None], own: torch.Tensor) -> list[torch.Tensor | None]:
    """The upstream gradients of log_probs, entropy and lse, for a part: where the target is another's, that of
    log_probs goes to lse."""
    by_log_p, by_entropy, by_lse = upstream
    if by_log_p is None:
        return [by_log_p, by_entropy, by_lse]
    moved = torch.where(own, 0.0, -by_log_p)
    return [torch.where(own, by_log_p, 0.0), by_entropy, moved if by_lse is None else by_lse + moved]


def summed(t: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
    """The sum over all processes, in place."""
    distributed.all_reduce(t, group=shard.group)
    return t
