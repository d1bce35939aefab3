"""NeMo-RL's log-probabilities from hidden states of Megatron models, whose vocabulary is parted among processes, as are
the positions of the hidden states: ChunkedDistributedHiddenStatesToLogprobs, known by its parameters, by
linear_logprobs. It is what NeMo-RL calls where its setting for fusing the linear layer with the loss is on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed

from bastile.integrations.functions import Defaults, Parameters, apply_site, given, why_not
from bastile.models.sites import ModelFile, Site
from bastile.ops.linear_logprobs import NO_TARGET, linear_logprobs
from bastile.ops.vocabulary_parallel import VocabularyShard
from bastile.report import Tally

_HIDDEN, _WEIGHT = "tensor_parallel_hidden_states", "output_weight_layer"
_RANGE = ("vocab_start_index", "vocab_end_index")
_KNOWN = ((_HIDDEN, "target", _WEIGHT, *_RANGE, "chunk_size", "tp_group", "inference_only"),)


def sites(file: ModelFile) -> Iterator[Site]:
    """What NeMo-RL's module has."""
    cls = file.scope.get("ChunkedDistributedHiddenStatesToLogprobs")
    if cls is not None:
        yield apply_site(file, cls, _KNOWN, _log_probs)


def _log_probs(tally: Tally, original: Any, parameters: Parameters, defaults: Defaults) -> Callable[..., Any]:
    """hidden [S / processes, B, H], targets [B, S] -> [B, S] float32; 0 for a target that is in no part."""

    def call(*args: Any, **kwargs: Any) -> Any:
        named = given(parameters, defaults, args, kwargs)
        hidden, weight, group, target = (named[name] for name in (_HIDDEN, _WEIGHT, "tp_group", "target"))
        start, end = (int(named[name]) for name in _RANGE)
        reason = why_not(hidden, weight)
        if reason is None and end - start != weight.shape[0]:
            reason = "its part of the vocabulary is padded"
        if reason is not None:
            tally.step_aside(reason)
            return original(*args, **kwargs)
        shard = VocabularyShard(start, (end - start) * distributed.get_world_size(group), group)
        there = (target >= 0) & (target < shard.vocabulary)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not named["inference_only"]):
            whole = _Gathered.apply(hidden, group).transpose(0, 1)
            found = linear_logprobs(
                whole,
                weight,
                torch.where(there, target, NO_TARGET),
                ignore_index=NO_TARGET,
                shard=shard,
                valid_rows=target.numel(),
            )
        tally.count()
        return found.log_probs

    return call


class _Gathered(torch.autograd.Function):
    """Parts of the positions put together, in the order of the processes. What comes back is of all of them, and the
    same in each."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.first, ctx.rows = distributed.get_rank(group) * part.shape[0], part.shape[0]
        whole = part.new_empty((distributed.get_world_size(group) * part.shape[0], *part.shape[1:]))
        distributed.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.first : ctx.first + ctx.rows].contiguous(), None
