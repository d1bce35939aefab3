"""The forward of a norm over the last axis."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bastile.guards import mark_as_ours, runs
from bastile.models.sites import Found, ModelFile, Site
from bastile.ops.rms_norm import Casting, rms_norm
from bastile.report import Tally


@dataclass(frozen=True)
class Norm:
    """A class of norms: what it computes, and the names of its attributes."""

    found: Found
    casting: Casting
    eps: str
    weight: str | None  # None: it has none
    has_weight: str | None = None  # an attribute that says whether the weight counts
    is_of_one_type: bool = False  # input and weight must be, else it rounds elsewhere

    @classmethod
    def of(cls, found: Found) -> "Norm":
        names = found.names
        return cls(
            found,
            eps=names["eps"],
            weight=names.get("weight"),
            has_weight=names.get("has_weight"),
            **found.form.variant,
        )

    def weight_of(self, module: Any) -> Any:
        """Its weight; None where it has none."""
        if self.weight is None or (self.has_weight is not None and not getattr(module, self.has_weight)):
            return None
        return getattr(module, self.weight)

    def serves(self, x: torch.Tensor, weight: torch.Tensor | None) -> bool:
        """Whether the operator computes what the code does for this input."""
        return weight is None or (weight.shape == x.shape[-1:] and (not self.is_of_one_type or weight.dtype == x.dtype))


def sites(file: ModelFile) -> Iterator[Site]:
    for found in file.forwards("norm"):
        yield file.forward_site("rms_norm", found.owner, partial(norm_forward, Norm.of(found)))


def norms_of(file: ModelFile) -> tuple[Norm, ...]:
    """Every norm that the file's layers may hold."""
    return tuple(Norm.of(found) for found in file.modules_of("norm"))


def norm_of(module: nn.Module, norms: Iterable[Norm]) -> Norm | None:
    """Which of these norms this module is, where calling it runs that norm's code and nothing else: then its weight
    says what it computes."""
    for norm in norms:
        owner = norm.found.owner
        if isinstance(module, owner) and type(module).forward is owner.forward:
            return norm if runs(module, norm.found.function) and norm.found.is_kept_by(module) else None
    return None


def norm_forward(norm: Norm, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    eps, found = norm.eps, norm.found

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            tally.step_aside("it was not called with one tensor by position")
            return original(self, *args, **kwargs)
        x, weight = args[0], norm.weight_of(self)
        if not norm.serves(x, weight) or not found.is_kept_by(self):
            tally.step_aside("its weight has another shape or type than that code is known with")
            return original(self, x)
        tally.count()
        return rms_norm(x, weight, getattr(self, eps), casting=norm.casting)

    return mark_as_ours(forward)
