"""What is known of some code."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Form:
    #: norm, layer norm, gated norm, mlp, rotary, attention, attention with sinks, short convolution, gated delta rule,
    #: state space, fused state space, layer, experts, block of experts, router, experts of all tokens, linear, linear
    #: across, adapted linear, adapted parameter, 4-bit linear, 8-bit linear, head
    kind: str
    formula: str
    roles: tuple[str, ...]  # attributes of self
    fingerprints: tuple[str, ...]
    variant: Mapping[str, Any] = field(default_factory=dict)  # what the operator is told
    exact: bool = False  # attributes must have the roles' names
    #: Of code that calls modules one after another and says no more: role -> a pattern of its attribute's name.
    called: Mapping[str, str] = field(default_factory=dict)


def roles(names: str) -> tuple[str, ...]:
    return tuple(names.split())
