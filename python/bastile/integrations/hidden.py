"""Log-probabilities from hidden states, with the head's weight as trainers have it: of another type than the hidden
states, sharded by FSDP2, partitioned by DeepSpeed's ZeRO-3."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from bastile.ops.linear_logprobs import LogProbs, linear_logprobs


def log_probs_from_hidden(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    outputs: Sequence[str] = (),
) -> LogProbs:
    """bastile.ops.linear_logprobs.linear_logprobs for trainers: for each target its log-probability, and no logits.

    Args:
        hidden: [..., H], what the model's backbone returns, already shifted: row i predicts target i.
        weight: [V, H], the head's, of any type: it is multiplied in hidden's (under autocast in autocast's). A DTensor
            is gathered, and its gradient scattered again; so is one of DeepSpeed's ZeRO-3, for the forward and for the
            backward pass, in which every process must take part.
        target: [...] int64.
        bias: [V], as weight.
        temperature: divides the logits, last of all.
        logit_scale: multiplies them, first of all.
        softcap: between the two; 0 or None: none.
        ignore_index: target of rows that count for nothing.
        outputs: as for linear_logprobs, such as ("entropy",).

    Returns:
        LogProbs: log_probs and what `outputs` names, float32 in target's shape; the others are None.

    Raises:
        RuntimeError, ValueError, TypeError: as linear_logprobs.
    """
    weight, bias = _whole(weight), None if bias is None else _whole(bias)
    partitioned = [t for t in (weight, bias) if _is_partitioned(t)]
    with _gathered([t for t in partitioned if t is not None]), _saved_by_name(partitioned):
        dtype = _type(hidden)
        return linear_logprobs(
            hidden,
            weight.to(dtype),
            target,
            bias=None if bias is None else bias.to(dtype),
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap,
            ignore_index=ignore_index,
            outputs=outputs,
        )


def _type(hidden: torch.Tensor) -> torch.dtype:
    """In which the head multiplies; under autocast the operator casts by itself, gradients to the weight's own type."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


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
