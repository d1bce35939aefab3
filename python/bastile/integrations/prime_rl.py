"""prime-rl's log-probabilities and entropy from hidden states, which its fused output head asks for, by
linear_logprobs: _SequenceChunkedLogProbEntropyFn, known by its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bastile.integrations.functions import Defaults, Parameters, apply_site, given, why_not
from bastile.integrations.hidden import Temperatures, log_probs_from_hidden
from bastile.models.sites import ModelFile, Site
from bastile.report import Tally

_KNOWN = (("hidden", "weight", "labels", "inv_temperature", "chunk_size"),)


def sites(file: ModelFile) -> Iterator[Site]:
    """What prime-rl's module has."""
    cls = file.scope.get("_SequenceChunkedLogProbEntropyFn")
    if cls is not None:
        yield apply_site(file, cls, _KNOWN, _log_probs)


def _log_probs(tally: Tally, original: Any, parameters: Parameters, defaults: Defaults) -> Callable[..., Any]:
    """(log-probabilities, entropy), both float32 [N], of one over a temperature a token."""

    def call(*args: Any, **kwargs: Any) -> Any:
        named = given(parameters, defaults, args, kwargs)
        hidden, weight, temperature = named["hidden"], named["weight"], None
        reason = why_not(hidden, weight)
        if reason is None:
            temperature = Temperatures.of(1 / named["inv_temperature"])
            reason = temperature.too_many()
        if reason is not None:
            tally.step_aside(reason)
            return original(*args, **kwargs)
        assert temperature is not None
        found = log_probs_from_hidden(
            hidden, weight, named["labels"], temperature=temperature, ignore_index=None, outputs=("entropy",)
        )
        tally.count()
        return found.log_probs, found.entropy

    return call
