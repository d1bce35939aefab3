"""Mamba-2's state space, which Transformers has as a function of each such model's file: the gated delta rule without
its delta. Where the package mamba_ssm is installed, Transformers calls that in its place, and it stays; so does a
kernel of the hub."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from bastile.guards import mark_as_ours
from bastile.models.delta_rule import WIDE, loses_float32
from bastile.models.packages import asks_for_another, function_sites
from bastile.models.sites import ModelFile, Site
from bastile.ops.gated_delta_rule import gated_delta_rule, refusal
from bastile.report import Tally

KIND = "state space"


def sites(file: ModelFile) -> Iterator[Site]:
    return function_sites(file, "mamba2_scan", KIND, lambda tally: partial(_scan, tally))


def _scan(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        why = asks_for_another(original, kwargs) or refusal(C, B, hidden_states, dt, dt, D, initial_states)
        if why is None and D is not None and D.shape != hidden_states.shape[2:3]:
            why = "its skip is not one number a head"
        why = why or loses_float32(hidden_states)
        if why is not None:
            tally.step_aside(why, why is WIDE)
            given = D, dt_bias, initial_states, dt_softplus, dt_limit, return_final_states
            return original(hidden_states, dt, A, B, C, chunk_size, *given, **kwargs)
        tally.count()
        # As Transformers makes it, in dt's own type.
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = functional.softplus(dt)
        dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()
        y, final = gated_delta_rule(
            C,
            B,
            hidden_states,
            A.float() * dt,
            dt,
            scale=1.0,
            skip=D,
            initial_state=None if initial_states is None else initial_states.transpose(-1, -2),
            output_final_state=return_final_states,
            additive=True,
            wide=True,
        )
        return y if final is None else (y, final.transpose(-1, -2))

    return mark_as_ours(scan)
