"""What of a model type the operators serve, and whether a step of it means what it means in Transformers."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from bastile.guards import stock_of
from bastile.models import loading
from bastile.models.forms import reading
from bastile.models.sites import ModelFile, calls, file_of, sites
from bastile.models.table import USUAL


@dataclass(frozen=True)
class Support:
    model_type: str
    places: dict[str, list[str]]  # operator -> the classes and functions that it serves
    stock: dict[str, dict[str, str]]  # operator -> code that looks like its, and why it stays as it is


def support(model_type: str) -> Support:
    """Of the type's own files, which are imported.

    Raises:
        ValueError: for what is no model type of the installed Transformers.
    """
    names = loading.import_type(model_type)
    if not names and model_type not in loading.known_types():
        raise ValueError(f"{model_type!r} is no model type of transformers {loading.transformers_version()}")
    return _told(model_type, map(file_of, names))


def parts_of_other_types(model_type: str) -> dict[str, str]:
    """The parts of a type's models whose code is another type's, by their names in its config: those that they have
    where a config says nothing of them, since one of images may have many a type's text."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(model_type)
    except Exception:  # some cannot be made of nothing
        return {}
    own = set(loading.import_type(model_type))
    found = {name: getattr(getattr(config, name, None), "model_type", "") for name in config.sub_configs}
    return {name: of for name, of in found.items() if of and not own & set(loading.import_type(of))}


def support_of(model: nn.Module) -> Support:
    """Of the code that this model has, from whichever files: of its text, its images, of checkpoints and users."""
    found = loading.classes_of(model)
    files = [file_of(name, classes) for name, classes in sorted(found.items(), key=lambda item: item[0])]
    config: Any = getattr(model, "config", None)
    used = {cls for classes in found.values() for cls in classes}
    return _told(str(getattr(config, "model_type", "")), files, used)


@reading()
def _told(model_type: str, files: Iterable[ModelFile], used: set[type] | None = None) -> Support:
    """used: these classes alone, and the functions that they call."""
    places: dict[str, list[str]] = {}
    stock: dict[str, dict[str, str]] = {}
    for file in files:
        for site in sites(file, USUAL):
            if used is None or not used.isdisjoint(site.instances):
                places.setdefault(site.operator, []).append(site.where)
        for operator in USUAL:
            for where, why in file.stock(operator).items():
                if where not in places.get(operator, ()) and (used is None or _is_used(where, file, used)):
                    stock.setdefault(operator, {})[where] = why
    return Support(model_type, {op: places[op] for op in USUAL if op in places}, stock)


def _is_used(where: str, file: ModelFile, used: set[type]) -> bool:
    """Whether a class, or what calls a function, is among those used."""
    name, _, method = where.partition(".")
    if method:
        return any(cls.__name__ == name for cls in used)
    callers = [cls for cls in file.own_classes() if calls(stock_of(vars(cls)["forward"]), name)]
    return not callers or not used.isdisjoint(callers)


def serves(model_type: str) -> bool:
    """Whether an operator serves a piece of this type: more than recomputation, which has nothing to do alone."""
    try:
        return bool(support(model_type).places.keys() - {"recompute"})
    except (ValueError, ImportError):
        return False


@dataclass(frozen=True)
class Check:
    """One step of a small model, stock and patched, in float32."""

    model_type: str
    loss: float  # the relative difference
    gradients: dict[str, float] = field(
        repr=False
    )  # of each parameter: the largest difference over the largest element
    ran: dict[str, int] = field(default_factory=dict)  # operator -> calls
    aside: dict[str, str] = field(default_factory=dict)  # operator -> why it stepped aside
    #: Its norms, rotary functions, gated MLPs and experts that ran in the stock step -> whether no original code of
    #: theirs ran in the patched one.
    pieces: dict[str, bool] = field(default_factory=dict)

    logits: float = 0.0  # the largest difference of those of the output over the largest of them

    #: Two orders of float32 sums, through two layers.
    ALLOWED_LOSS, ALLOWED_LOGITS, ALLOWED_GRADIENT = 1e-5, 2e-5, 1e-3

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter whose gradient differs most."""
        return max(self.gradients.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def passed(self) -> bool:
        is_near = self.loss <= self.ALLOWED_LOSS and self.logits <= self.ALLOWED_LOGITS
        return is_near and self.worst[1] <= self.ALLOWED_GRADIENT


def check(model_type: str) -> Check:
    """Builds the type small and compares a step with all operators with one without."""
    from bastile.models import small

    return check_model(small.small_model(model_type))


def check_model(model: Any) -> Check:
    """As `check`, of a small model in training, whose gradients are cleared."""
    import bastile
    from bastile.models import small

    model_type = model.config.model_type
    small.step(model)  # the first may change a model: BigBird takes another attention for short sequences
    pieces = _pieces_of(model)
    experts = {type(m).__name__ for m in model.modules() if _EXPERTS.search(type(m).__name__)}
    with _called(pieces) as has:
        stock, want, stock_output = small.step_with_output(model)
    bastile.report(reset=True)
    try:
        bastile.apply_to_model(model)
    except ValueError:  # there is nothing to replace
        return Check(model_type, 0.0, {}, pieces=dict.fromkeys(has, False))
    try:
        with _called(pieces) as left:
            patched, got, output = small.step_with_output(model)
        told = bastile.report()
        logits = _difference(output, stock_output)
    finally:
        bastile.reset(model=model)
    ran = {operator: told.ran(operator) for operator in USUAL if told.ran(operator)}
    aside = {line.operator: why for line in told for why in line.aside if line.operator not in ran}
    # Where a gradient is small against all others, it is their rounding that is seen.
    largest = max((float(g.abs().max()) for g in want.values()), default=0.0)
    gradients = {
        name: float((got[name] - g).abs().max()) / max(float(g.abs().max()), 1e-2 * largest, 1e-9)
        if name in got
        else float("inf")
        for name, g in want.items()
    }
    # NaN compares as neither smaller nor larger: it is the worst.
    gradients = {name: float("inf") if value != value else value for name, value in gradients.items()}
    loss = float((patched - stock).abs() / stock.abs().clamp_min(1e-6))
    served = {name: name not in left for name in sorted(has)}
    # Transformers' own wrapper chooses what computes experts: their code is not what runs, served or not.
    are_served = "moe_experts" in ran and not any(line.aside for line in told if line.operator == "moe_experts")
    served.update(dict.fromkeys(sorted(experts), are_served))
    return Check(model_type, float("inf") if loss != loss else loss, gradients, ran, aside, served, logits)


@torch.no_grad()
def _difference(output: Any, stock: Any) -> float:
    """Of the logits that two outputs have, or have not."""
    got, want = (getattr(each, "logits", None) for each in (output, stock))
    if got is None or want is None or got.shape != want.shape or got.dtype is not want.dtype:
        return 0.0 if got is want else float("inf")
    difference = float((got - want).abs().max() / want.abs().max().clamp_min(1e-9))
    return float("inf") if difference != difference else difference


# ---- what a model's pieces are, whether Bastile knows them or not: by their names -----------------------------------

_NORM = re.compile(r"(?<!Batch)(?<!Group)(?<!Spatial)(?<!Attention)Norm(Gated)?$")
_EXPERTS = re.compile(r"Experts$")
_MLP = re.compile(r"(MLP|FeedForward|FFN?)$", re.IGNORECASE)
_ROTARY = re.compile(r"^apply_.*rotary")


def _pieces_of(model: nn.Module) -> dict[CodeType, str]:
    """The code of the forwards of its norms and gated MLPs, and of its rotary functions -> their names."""
    found: dict[CodeType, str] = {}
    for cls in {type(module) for module in model.modules()}:
        code = _code_of(cls.forward)
        if code is not None and (
            _NORM.search(cls.__name__) or (_MLP.search(cls.__name__) and _gates(cls.__name__, code))
        ):
            found[code] = cls.__name__
        for scope in (vars(sys.modules[cls.__module__]), vars(cls)):
            for name, item in scope.items():
                code = _code_of(getattr(item, "__func__", item)) if _ROTARY.search(name) else None
                if code is not None:
                    found[code] = name
    return found


def _code_of(function: Any) -> CodeType | None:
    return getattr(inspect.unwrap(stock_of(function)), "__code__", None) if callable(function) else None


def _gates(name: str, code: CodeType) -> bool:
    return any("gat" in each.lower() for each in (name, *code.co_names, *code.co_varnames))


@contextmanager
def _called(pieces: dict[CodeType, str]) -> Iterator[set[str]]:
    """Those whose code runs meanwhile."""
    found: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in pieces:
            found.add(pieces[frame.f_code])

    before: Callable[..., Any] | None = sys.getprofile()
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(before)
