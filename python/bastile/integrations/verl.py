"""verl's log-probabilities and entropy from hidden states, which its models ask for with use_fused_kernels and the
backend "torch", by linear_logprobs: FusedLinearForPPOFunction, known by its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bastile.integrations.functions import Defaults, Parameters, apply_site, given, why_not
from bastile.integrations.hidden import Temperatures, log_probs_from_hidden
from bastile.models.sites import ModelFile, Site
from bastile.report import Tally

_KNOWN = (("hidden_states", "vocab_weights", "input_ids", "temperature", "chunk_size"),)


def sites(file: ModelFile) -> Iterator[Site]:
    """What verl's module has."""
    cls = file.scope.get("FusedLinearForPPOFunction")
    if cls is not None:
        yield apply_site(file, cls, _KNOWN, _log_probs)


def _log_probs(tally: Tally, original: Any, parameters: Parameters, defaults: Defaults) -> Callable[..., Any]:
    """(log-probabilities, entropy), both of the hidden states' type."""

    def call(*args: Any, **kwargs: Any) -> Any:
        named = given(parameters, defaults, args, kwargs)
        hidden, weight, temperature = (named[name] for name in ("hidden_states", "vocab_weights", "temperature"))
        reason = why_not(hidden, weight)
        if reason is None and isinstance(temperature, torch.Tensor):
            temperature = Temperatures.of(temperature)
            reason = temperature.too_many()
        if reason is not None:
            tally.step_aside(reason)
            return original(*args, **kwargs)
        found = log_probs_from_hidden(
            hidden, weight, named["input_ids"], temperature=temperature, ignore_index=None, outputs=("entropy",)
        )
        tally.count()
        assert found.entropy is not None
        return found.log_probs.to(hidden.dtype), found.entropy.to(hidden.dtype)

    return call
