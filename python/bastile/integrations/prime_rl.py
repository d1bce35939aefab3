"""prime-rl's log-probabilities and entropy from hidden states, which its fused output head asks for, by
linear_logprobs: _SequenceChunkedLogProbEntropyFn, known by its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bastile.integrations.functions import NONE, Defaults, Parameters, apply_site, given, why_not
from bastile.integrations.hidden import log_probs_from_hidden, too_many
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
        hidden, weight, inverse = (named[name] for name in ("hidden", "weight", "inv_temperature"))
        reason = why_not(hidden, weight) or too_many(inverse)
        if reason is not None:
            tally.step_aside(reason)
            return original(*args, **kwargs)
        found = log_probs_from_hidden(
            hidden, weight, named["labels"], temperature=1 / inverse, ignore_index=NONE, outputs=("entropy",)
        )
        tally.count()
        return found.log_probs, found.entropy

    return call
