"""What of a model type the operators serve, and whether a step of it means what it means in Transformers."""

from __future__ import annotations

from dataclasses import dataclass, field

from bastile.models import loading
from bastile.models.sites import file_of, sites
from bastile.models.table import OPERATORS


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
    places: dict[str, list[str]] = {}
    stock: dict[str, dict[str, str]] = {}
    for name in names:
        file = file_of(name)
        for site in sites(file, OPERATORS):
            places.setdefault(site.operator, []).append(site.where)
        for operator in OPERATORS:
            for where, why in file.stock(operator).items():
                if where not in places.get(operator, ()):
                    stock.setdefault(operator, {})[where] = why
    return Support(model_type, {op: places[op] for op in OPERATORS if op in places}, stock)


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

    #: Two orders of float32 sums, through two layers.
    ALLOWED_LOSS, ALLOWED_GRADIENT = 1e-5, 1e-3

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter whose gradient differs most."""
        return max(self.gradients.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def passed(self) -> bool:
        return self.loss <= self.ALLOWED_LOSS and self.worst[1] <= self.ALLOWED_GRADIENT


def check(model_type: str) -> Check:
    """Builds the type small and compares a step with all operators with one without."""
    import bastile
    from bastile.models import small

    model = small.small_model(model_type)
    small.step(model)  # the first may change a model: BigBird takes another attention for short sequences
    stock, want = small.step(model)
    bastile.report(reset=True)
    try:
        bastile.apply_to_model(model)
    except ValueError:  # there is nothing to replace
        return Check(model_type, 0.0, {})
    try:
        patched, got = small.step(model)
    finally:
        bastile.reset(model=model)
    told = bastile.report()
    ran = {operator: told.ran(operator) for operator in OPERATORS if told.ran(operator)}
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
    return Check(model_type, float("inf") if loss != loss else loss, gradients, ran, aside)
