"""The short convolution before a recurrence, which Transformers has as a function of each such model's file: Mamba's,
the gated delta rule's, LFM2's. Where the package causal-conv1d is installed, Transformers calls that in its place, and
it stays; so does a kernel of the hub."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bastile.guards import mark_as_ours
from bastile.models.mixers import IDS
from bastile.models.packages import function_sites, runs_another
from bastile.models.sdpa import need_told
from bastile.models.sites import ModelFile, Site
from bastile.ops.causal_conv1d import causal_conv1d, refusal
from bastile.report import Tally

KIND = "short convolution"


def sites(file: ModelFile) -> Iterator[Site]:
    return function_sites(file, "causal_conv1d", KIND, lambda tally: partial(_convolve, tally))


def _convolve(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        ids = kwargs.get(IDS)
        why = runs_another(original) or refusal(hidden_states, weight, bias, activation)
        need_told(ids is not None and why is None)
        if why is not None:
            tally.step_aside(why)
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        tally.count()
        return causal_conv1d(hidden_states, weight, bias, activation, ids)

    return mark_as_ours(convolve)
