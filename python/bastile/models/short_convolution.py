"""The short convolution before a recurrence, which Transformers has as a function of each such model's file: Mamba's,
the gated delta rule's, LFM2's. Where the package causal-conv1d is installed, Transformers calls that in its place, and
it stays; so does a kernel of the hub."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bastile.guards import mark_as_ours, stock_of
from bastile.models.packages import asks_for_another, runs_instead
from bastile.models.rebind import with_global
from bastile.models.sites import ModelFile, Site, calls, exchanged, function_in
from bastile.ops.causal_conv1d import causal_conv1d, refusal
from bastile.report import Tally

KIND = "short convolution"


def sites(file: ModelFile) -> Iterator[Site]:
    for found in file.functions(KIND):
        name = found.name
        callers = tuple(cls for cls in file.own_classes() if calls(stock_of(vars(cls)["forward"]), name))
        if not callers:
            file.unknown[name] = "no module's forward calls it"
        elif (other := runs_instead(function_in(found.function))) is not None:
            file.unknown[name] = other
        else:
            build = partial(_convolve, Tally.of("causal_conv1d", f"{file.name}.{name}"))
            one_model = partial(exchanged, partial(_calling, name, build(found.function)))
            yield Site("causal_conv1d", name, file.module, name, build, callers, one_model)


def _calling(name: str, convolve: Any, forward: Any) -> Any:
    return with_global(forward, name, convolve)


def _convolve(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        why = asks_for_another(original, kwargs) or refusal(hidden_states, weight, bias, activation)
        if why is not None:
            tally.step_aside(why)
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        tally.count()
        return causal_conv1d(hidden_states, weight, bias, activation)

    return mark_as_ours(convolve)
