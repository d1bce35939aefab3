"""Log-probabilities and divergences from hidden states, with the head's weight as trainers have it: of another type
than the hidden states, sharded by FSDP2, partitioned by DeepSpeed's ZeRO-3."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from bastile.ops._valid_rows import ValidCount, gather, scatter
from bastile.ops.linear_divergence import Divergence, Kind, linear_divergence
from bastile.ops.linear_logprobs import NO_TARGET, LogProbs, linear_logprobs

_MOST_TEMPERATURES = 8
_TOP1 = LogProbs._fields.index("is_top1")


@dataclass(frozen=True)
class Temperatures:
    """A temperature a target, or one for all, as the host knows them: the different numbers, how many targets have
    each, and the places of the targets, those of the first number first."""

    numbers: list[float]
    counts: list[int]
    order: torch.Tensor

    @classmethod
    def of(cls, each: torch.Tensor) -> Temperatures:
        """The host waits for the device, once."""
        numbers, which, counts = each.detach().reshape(-1).cpu().unique(return_inverse=True, return_counts=True)
        return cls(numbers.tolist(), counts.tolist(), which.argsort(stable=True))

    def too_many(self) -> str | None:
        """Why so many are left to others; None: they are few."""
        few = len(self.numbers) <= _MOST_TEMPERATURES
        return None if few else f"it is called with more than {_MOST_TEMPERATURES} temperatures"


def log_probs_from_hidden(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor | Temperatures = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = -100,
    outputs: Sequence[str] = (),
    valid_rows: ValidCount | None = None,
) -> LogProbs:
    """bastile.ops.linear_logprobs.linear_logprobs for trainers: for each target its log-probability, and no logits.

    Args:
        hidden: [..., H], what the model's backbone returns, already shifted: row i predicts target i.
        weight: [V, H], the head's, of any type: it is multiplied in hidden's (under autocast in autocast's). A DTensor
            is gathered, and its gradient scattered again; so is one of DeepSpeed's ZeRO-3, for the forward and for the
            backward pass, in which every process must take part.
        target: [...] int64.
        bias: [V], as weight.
        temperature: divides the logits, last of all. A tensor has one element, or one a target: each number in it is a
            call of its own for its targets, and the host waits to learn of them.
        logit_scale: multiplies them, first of all.
        softcap: between the two; 0 or None: none.
        ignore_index: target of rows that count for nothing; None: all count, and nobody waits to learn how many.
        outputs: as for linear_logprobs, such as ("entropy",).
        valid_rows: the count of this very target, where it was begun before the backbone ran: nobody waits for it then.
            Not with temperatures of which there are several.

    Returns:
        LogProbs: log_probs and what `outputs` names, float32 in target's shape; the others are None.

    Raises:
        RuntimeError, ValueError, TypeError: as linear_logprobs.
    """
    options = {"bias": bias, "logit_scale": logit_scale, "softcap": softcap, "ignore_index": ignore_index}
    if isinstance(temperature, torch.Tensor):
        temperature = Temperatures.of(temperature)
    if isinstance(temperature, Temperatures):
        return _by_temperature(hidden, weight, target, temperature, {**options, "outputs": outputs})
    weights = _Weights(weight, bias)
    with weights.ready():
        weight, bias = weights.of(hidden)
        return linear_logprobs(
            hidden,
            weight,
            target,
            bias=bias,
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap,
            ignore_index=NO_TARGET if ignore_index is None else ignore_index,
            outputs=outputs,
            valid_rows=target.numel() if ignore_index is None else valid_rows,
        )


def _by_temperature(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: Temperatures, options: dict[str, Any]
) -> LogProbs:
    if len(temperature.numbers) == 1:
        return log_probs_from_hidden(hidden, weight, target, temperature=temperature.numbers[0], **options)
    if temperature.order.numel() != target.numel():
        raise ValueError(
            f"log_probs_from_hidden: temperature has {temperature.order.numel()} elements; one, or one for each of "
            f"{target.numel()} targets, is needed"
        )
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    sums: list[Any] = [None] * len(LogProbs._fields)
    places = temperature.order.to(hidden.device, non_blocking=True).split(temperature.counts)
    for number, chosen in zip(temperature.numbers, places, strict=True):
        found = log_probs_from_hidden(gather(rows, chosen), weight, targets[chosen], temperature=number, **options)
        for i, t in enumerate(found):
            if t is not None:
                spread = scatter(t, chosen, targets.numel())
                sums[i] = spread if sums[i] is None else sums[i] | spread if i == _TOP1 else sums[i] + spread
    log_probs, *others = [None if t is None else t.reshape(target.shape) for t in sums]
    return LogProbs(log_probs if log_probs is not None else hidden.new_zeros(target.shape), *others)


def divergence_from_hidden(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    kind: Kind = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    mask: torch.Tensor | None = None,
    outputs: Sequence[str] = (),
) -> Divergence:
    """bastile.ops.linear_divergence.linear_divergence for trainers: a student's divergence from a teacher for each row
    that the mask counts, and no logits of either.

    Args:
        hidden: [..., H], what the student's backbone returns.
        weight: [V, H], its head's, as `log_probs_from_hidden` takes it.
        teacher_hidden: [..., G], the teacher's. No gradient goes to it, nor to what else the teacher has.
        teacher_weight: [V, G], its head's, likewise.
        kind: "forward", "reverse" or "jsd".
        beta: the teacher's part of the mixture, for "jsd".
        temperature: divides the logits of both, last of all.
        bias: [V], as weight.
        teacher_bias: [V], as teacher_weight.
        logit_scale: multiplies the student's logits, first of all.
        softcap: between the two; 0 or None: none.
        teacher_logit_scale: as logit_scale, of the teacher's.
        teacher_softcap: as softcap, of the teacher's.
        mask: [...]; rows where it is 0 count for nothing.
        outputs: as for linear_divergence.

    Returns:
        Divergence: [...] float32, and the student's entropy or None.

    Raises:
        RuntimeError, ValueError, TypeError: as linear_divergence.
    """
    student, teacher = _Weights(weight, bias), _Weights(teacher_weight, teacher_bias)
    with _Weights(*student.all, *teacher.all).ready():
        weight, bias = student.of(hidden)
        teacher_weight, teacher_bias = teacher.of(teacher_hidden)
        return linear_divergence(
            hidden,
            weight,
            teacher_hidden.detach(),
            teacher_weight.detach(),
            kind=kind,
            beta=beta,
            temperature=temperature,
            bias=bias,
            teacher_bias=None if teacher_bias is None else teacher_bias.detach(),
            logit_scale=logit_scale,
            softcap=softcap,
            teacher_logit_scale=teacher_logit_scale,
            teacher_softcap=teacher_softcap,
            mask=mask,
            outputs=outputs,
        )


class _Weights:
    """Weights of heads, or None in their place, as plain tensors."""

    def __init__(self, *weights: torch.Tensor | None) -> None:
        self.all = [None if w is None else _whole(w) for w in weights]

    @contextmanager
    def ready(self) -> Iterator[None]:
        """A context in which they are whole, and in which autograd saves them so that they may go away again."""
        partitioned = [w for w in self.all if _is_partitioned(w)]
        with _gathered(partitioned), _saved_by_name(partitioned):
            yield

    def of(self, hidden: torch.Tensor) -> Any:
        """They, of the type in which this is multiplied."""
        return [None if w is None else w.to(_type(hidden, w)) for w in self.all]


def _type(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """To which the head is cast here; under autocast the operator casts by itself."""
    return weight.dtype if torch.is_autocast_enabled(hidden.device.type) else hidden.dtype


def _whole(weight: torch.Tensor) -> torch.Tensor:
    """As a plain tensor on each process, whose gradient goes back to the shards."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


# ---- DeepSpeed's ZeRO-3 ----------------------------------------------------------------------------------------------


def _is_partitioned(weight: Any) -> bool:
    """Whether ZeRO-3 may take this parameter's values away when its module's forward has ended."""
    return hasattr(weight, "ds_id")


def _gathered(weights: list[Any]) -> AbstractContextManager[Any]:
    """A context in which these are whole; nothing is done to those that are."""
    away = list({id(w): w for w in weights if w.ds_status.name != "AVAILABLE"}.values())
    return sys.modules["deepspeed"].zero.GatheredParameters(away) if away else nullcontext()


def _saved_by_name(weights: list[Any]) -> AbstractContextManager[Any]:
    """A context in which autograd saves these as the parameters that they are, and gathers them when it needs them."""
    if not weights:
        return nullcontext()

    def pack(saved: torch.Tensor) -> Any:
        return next((w for w in weights if saved is w or _is_all_of(saved, w)), saved)

    def unpack(packed: Any) -> torch.Tensor:
        if not any(packed is w for w in weights):
            return packed
        with _gathered([packed]):
            return packed.detach()  # which holds the memory that the parameter lets go of

    return saved_tensors_hooks(pack, unpack)


def _is_all_of(saved: torch.Tensor, weight: torch.Tensor) -> bool:
    return saved.data_ptr() == weight.data_ptr() and saved.shape == weight.shape and saved.dtype is weight.dtype
