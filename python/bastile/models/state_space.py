"""Mamba-2's state space, which Transformers has as a function of each such model's file: the gated delta rule without
its delta. Where the package mamba_ssm is installed, Transformers calls that in its place, and it stays; so does a
kernel of the hub. Packed sequences are kept apart, as that package does and the function itself cannot."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from bastile.guards import mark_as_ours
from bastile.models.delta_rule import WIDE, against
from bastile.models.packages import cuts_of, function_sites, runs_another
from bastile.models.sdpa import need_told
from bastile.models.sites import ModelFile, Site
from bastile.ops.gated_delta_rule import gated_delta_rule, refusal
from bastile.report import Tally

KIND, FUSED = "state space", "fused state space"


def sites(file: ModelFile) -> Iterator[Site]:
    found = list(function_sites(file, "mamba2_scan", KIND, lambda tally: partial(_scan, tally)))
    yield from found
    if found:
        yield from function_sites(file, "mamba2_scan", FUSED, lambda _: _is_none)


def _is_none(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of what that package computes in one kernel and nothing else does: around the function, which says so, stands one
    that refuses packed sequences."""

    @functools.wraps(original)
    def fused(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if runs_another(original) else None

    return mark_as_ours(fused)


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
        cuts = cuts_of(kwargs)
        why = runs_another(original) or refusal(C, B, hidden_states, dt, dt, D, initial_states)
        if why is None and D is not None and D.shape != hidden_states.shape[2:3]:
            why = "its skip is not one number a head"
        why = why or against(hidden_states, cuts, initial_states, return_final_states)
        need_told(cuts is not None and why is None)
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
            cu_seqlens=cuts,
        )
        return y if final is None else (y, final.transpose(-1, -2))

    return mark_as_ours(scan)
