"""Losses of logits that have not been made, from the hidden states: by the fused loss. And what metrics ask of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from bastile.models.logits.pending import Compute, Formula, formula
from bastile.models.logits.said import note
from bastile.models.logits.tensor import Logits, followed
from bastile.ops._valid_rows import ValidCount
from bastile.ops.adapted_head import adapted_linear_cross_entropy
from bastile.ops.cross_entropy import REDUCTION
from bastile.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from bastile.ops.linear_divergence import Kind, linear_divergence
from bastile.ops.linear_logprobs import NO_TARGET, LogProbs, linear_logprobs
from bastile.ops.lora import adapted_linears
from bastile.ops.vocabulary_parallel import VocabularyShard, is_parted

_T = torch.Tensor
_PIECE = 1024  # rows, for which a product takes as long as for many


def fused(logits: Logits, found: Formula, target: torch.Tensor, **options: Any) -> torch.Tensor:
    """fused_linear_cross_entropy of these logits, whose rows target has one element each of. found: what was done to
    them."""

    def compute(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if found.added is not None:
            bias = found.added if bias is None else bias + found.added
        head = logits.pending.call.adapter
        if head is not None:
            options.pop("valid_rows", None)
            head = head._replace(bias=bias)
            cap, scale = found.softcap, found.scale
            return adapted_linear_cross_entropy(rows, head, target, softcap=cap, logit_scale=scale, **options)
        return fused_linear_cross_entropy(
            rows,
            weight,
            target,
            bias=bias,
            softcap=found.softcap,
            logit_scale=found.scale,
            **options,
            shard=_shard(weight),
        )

    loss = _computed(logits, compute, found.added is None and not options.get("label_smoothing"))
    note("ran", logits.pending.call.forward.model)
    return loss


def _formula(logits: Logits) -> Formula | None:
    pending = logits.pending
    found = formula(pending.steps, pending.call.dtype)
    if isinstance(found, Formula):
        return found
    note("stepped aside", pending.call.forward.model, found)
    return None


def _computed(logits: Logits, compute: Compute, takes_parts: bool = False) -> torch.Tensor:
    with torch.set_grad_enabled(torch.is_grad_enabled() and logits.requires_grad):
        return logits.pending.call.within(logits.part.rows, compute, takes_parts)


def _shard(weight: torch.Tensor) -> VocabularyShard | None:
    return VocabularyShard.of(weight) if is_parted(weight) else None


@followed(F.cross_entropy)
def _cross_entropy(
    logits: Logits,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if size_average is not None or reduce is not None or reduction not in REDUCTION or not _is_target(logits, target):
        return NotImplemented
    if weight is not None and (weight.shape != (logits.pending.vocabulary,) or weight.requires_grad):
        return NotImplemented
    found = _formula(logits)
    if found is None or found.is_log_softmax:
        return NotImplemented
    loss = fused(
        logits,
        found,
        target,
        class_weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        valid_rows=_count(logits, target, ignore_index),
    )
    return loss.to(_type_of_loss(logits))


@followed(F.nll_loss)
def _nll_loss(
    logits: Logits,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    found = formula(logits.pending.steps, logits.pending.call.dtype)
    if not isinstance(found, Formula) or not found.is_log_softmax or size_average is not None or reduce is not None:
        return NotImplemented
    if weight is not None or reduction not in REDUCTION or not _is_target(logits, target):
        return NotImplemented
    count = _count(logits, target, ignore_index)
    loss = fused(logits, found, target, ignore_index=ignore_index, reduction=reduction, valid_rows=count)
    return loss.to(_type_of_loss(logits))


def _count(logits: Logits, target: torch.Tensor, ignore_index: int) -> ValidCount | None:
    """Of a target that is all of the labels that the model was given."""
    count = logits.pending.call.forward.count
    return count if count is not None and count.is_of(target, ignore_index) else None


@followed(_T.gather, torch.gather)
def _gather(logits: Logits, dim: int, index: Any, **options: Any) -> Any:
    """Of log_softmax: the fused loss of each row. Of logits: a product of each row with one row of the weight."""
    found = formula(logits.pending.steps, logits.pending.call.dtype)
    if not isinstance(found, Formula) or options or logits.part.move is not None:
        return NotImplemented
    if dim % logits.dim() != logits.dim() - 1 or not isinstance(index, _T) or index.dtype is not torch.int64:
        return NotImplemented
    if index.shape != (*logits.shape[:-1], 1) or index.device != logits.device:
        return NotImplemented
    if found.is_log_softmax:
        return -_of_rows(logits, found, index.squeeze(-1)).to(logits.dtype).unsqueeze(-1)
    return _selected(logits, index)


def _of_rows(logits: Logits, found: Formula, classes: torch.Tensor) -> torch.Tensor:
    """The loss of each row, none of which is ignored: nobody needs to count them."""
    return fused(logits, found, classes, reduction="none", ignore_index=NO_TARGET, valid_rows=classes.numel())


def _selected(logits: Logits, index: torch.Tensor) -> torch.Tensor:
    """logits.gather(-1, index), with one index a row."""
    pending = logits.pending

    def compute(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        chosen = index.squeeze(-1)
        z = (rows.float() * F.embedding(chosen, weight).float()).sum(-1)
        head = pending.call.adapter
        if head is not None and head.a is not None and head.b is not None:
            thin = F.linear(rows, head.a.to(rows.dtype)).float()
            z = z + head.scale * (thin * F.embedding(chosen, head.b).float()).sum(-1)
        z = z if bias is None else z + bias[chosen].float()
        z = z.to(pending.call.dtype).unsqueeze(-1)
        for step in pending.steps:
            z = z + step.value[index] if step.kind == "add" else step.apply(z)
        return z

    return _computed(logits, compute)


@followed(_T.logsumexp, torch.logsumexp)
def _logsumexp(logits: Logits, dim: Any, keepdim: bool = False, **options: Any) -> Any:
    """The loss of each row for class 0, and that class's logit, which it lacks."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    found = formula(logits.pending.steps, logits.pending.call.dtype)
    if not isinstance(found, Formula) or found.is_log_softmax or options or logits.part.move is not None:
        return NotImplemented
    if not isinstance(dim, int) or dim % logits.dim() != logits.dim() - 1 or logits.dtype is not torch.float32:
        return NotImplemented
    first = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    of_first = _selected(logits, first.unsqueeze(-1))
    sums = _of_rows(logits, found, first).unsqueeze(-1) + of_first
    return sums if keepdim else sums.squeeze(-1)


@followed(_T.argmax, torch.argmax)
def _argmax(logits: Logits, dim: Any = None, keepdim: bool = False) -> Any:
    """The accuracy that trainers log: of a piece of the rows at a time."""
    if not isinstance(dim, int) or dim % logits.dim() != logits.dim() - 1 or logits.part.move is not None:
        return NotImplemented
    pending, head = logits.pending, logits.pending.call.adapter

    def compute(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        found = []
        for piece in rows.reshape(-1, rows.shape[-1]).split(_PIECE):
            z = F.linear(piece, weight, bias) if head is None else adapted_linears(piece, (head,))[0]
            for step in pending.steps:
                z = step.apply(z)
            found.append(z.argmax(-1))
        return torch.cat(found).view(rows.shape[:-1])

    with torch.no_grad():
        chosen = _computed(logits, compute)
    return chosen.unsqueeze(-1) if keepdim else chosen


@followed(_T.mean, torch.mean)
def _mean(logits: Logits, dim: int | None = None, **options: Any) -> Any:
    """Of all logits or of each row's, which trainers log: of the rows by the mean row of the head."""
    found = formula(logits.pending.steps, logits.pending.call.dtype)
    if options or not isinstance(found, Formula) or found.is_log_softmax or found.softcap is not None:
        return NotImplemented
    if dim is not None and (not isinstance(dim, int) or dim % logits.dim() != logits.dim() - 1):
        return NotImplemented
    if logits.part.move is not None:
        return NotImplemented
    head = logits.pending.call.adapter

    def compute(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32)
        x = rows.to(wide) if dim is not None else rows.reshape(-1, rows.shape[-1]).mean(0, dtype=wide)
        mean = weight.mean(0, dtype=wide)
        if head is not None and head.a is not None and head.b is not None:
            mean = mean + head.scale * (head.b.mean(0, dtype=wide)[:, None] * head.a.to(wide)).sum(0)
        z = (x * mean).sum(-1)
        for vector in (bias, found.added):
            z = z if vector is None else z + vector.mean(dtype=wide)
        return z * found.scale

    return _computed(logits, compute).to(logits.dtype)


def _is_target(logits: Logits, target: Any) -> bool:
    """Whether it has a class for each row."""
    if not isinstance(target, _T) or isinstance(target, Logits) or target.dtype not in (torch.int64, torch.uint8):
        return False
    shape = logits.part.rows.shape[:-1]
    is_flat = logits.dim() <= 2 or logits.part.move is not None
    return is_flat and target.shape == shape and target.device == logits.device


def _type_of_loss(logits: Logits) -> torch.dtype:
    return torch.float32 if torch.is_autocast_enabled(logits.device.type) else logits.dtype


def causal_loss(
    logits: Logits, targets: torch.Tensor, ignore_index: int, num_items: Any, count: ValidCount | None
) -> Any:
    """Transformers' loss of a causal language model, of logits [..., T, V] and the tokens that each is to predict."""
    if logits.part.move is not None or targets.shape != logits.shape[:-1] or targets.device != logits.device:
        return NotImplemented
    if logits.pending.is_written:  # a mask of classes, say
        return NotImplemented
    if torch.is_tensor(num_items):
        num_items = num_items.to(logits.device)
    found = _formula(logits)
    if found is None or found.is_log_softmax:
        return NotImplemented
    return fused(logits, found, targets, ignore_index=ignore_index, num_items=num_items, valid_rows=count)


def _as_hidden(logits: Logits, what: str) -> Formula | None:
    """What was done to logits that have not been made, of which `what` is to be made from the hidden states; None: it
    is made of logits."""
    pending = logits.pending
    if pending.made is not None or logits.part.move is not None:
        return None
    if pending.call.adapter is not None:
        note("stepped aside", pending.call.forward.model, f"{what} of a head with an adapter are made of logits")
        return None
    found = _formula(logits)
    return None if found is None or found.is_log_softmax else found


def log_probs_of(
    logits: Logits,
    target: torch.Tensor,
    temperature: float,
    ignore_index: int | None,
    outputs: tuple[str, ...],
    dtype: torch.dtype | None = None,
) -> Any:
    """LogProbs of logits / temperature that have not been made, with one target a row; ignore_index None: all count;
    outputs: of those that have gradients; dtype: of the results, None: the logits', under autocast float32.
    NotImplemented: where they have been made, or something was done to them that linear_logprobs does not know."""
    if isinstance(target, Logits) or target.shape != logits.shape[:-1]:
        return NotImplemented
    if target.dtype is not torch.int64 or target.device != logits.device:
        return NotImplemented
    found = _as_hidden(logits, "log-probabilities")
    if found is None or not temperature > 0:
        return NotImplemented

    def compute(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if found.added is not None:
            bias = found.added if bias is None else bias + found.added
        made = linear_logprobs(
            rows,
            weight,
            target,
            bias=bias,
            temperature=temperature,
            logit_scale=found.scale,
            softcap=found.softcap,
            ignore_index=NO_TARGET if ignore_index is None else ignore_index,
            outputs=outputs,
            valid_rows=target.numel() if ignore_index is None else None,
            shard=_shard(weight),
        )
        return torch.stack([made.log_probs, *(getattr(made, name) for name in outputs)])

    # Copies: who masks one in place would otherwise write to a view of all.
    made = _computed(logits, compute, found.added is None).to(dtype or _type_of_loss(logits))
    log_probs, *others = [t.clone() for t in made.unbind()]
    return LogProbs(log_probs, **dict(zip(outputs, others, strict=True)))


def divergence_of(
    logits: Logits, teacher: torch.Tensor, mask: torch.Tensor | None, kind: Kind, beta: float, temperature: float
) -> Any:
    """The divergence [...] of logits that have not been made from a teacher's, which are there; rows where mask is
    False: 0. NotImplemented as for log_probs_of."""
    if isinstance(teacher, Logits) or teacher.shape != logits.shape or teacher.device != logits.device:
        return NotImplemented
    found = _as_hidden(logits, "divergences")
    if found is None or not 1e-6 <= temperature <= 1e6:
        return NotImplemented

    def compute(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if found.added is not None:
            bias = found.added if bias is None else bias + found.added
        return linear_divergence(
            rows,
            weight,
            kind=kind,
            beta=beta,
            temperature=temperature,
            bias=bias,
            logit_scale=found.scale,
            softcap=found.softcap,
            teacher_logits=teacher.detach(),
            mask=mask,
        ).divergence

    return _computed(logits, compute).to(_type_of_loss(logits))
