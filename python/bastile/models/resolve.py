"""From a row of the table to the objects it names in the installed Transformers.

Everything that the replacements rely on is looked for here, before anything is changed: a release that moved a class,
an argument or an attribute is reported by name, not met in the middle of a training run."""

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from bastile.models.table import FAMILIES, Family


@dataclass(frozen=True)
class Site:
    """One operator's place in one family."""

    name: str  # "rms_norm_qwen3"
    owner: type | ModuleType  # where the process-wide replacement goes
    attribute: str
    build: Callable[[Any], Callable[..., Any]]  # from the original
    instances: type  # the modules that get a method of their own when one model alone is patched
    build_method: Callable[[Any], Callable[..., Any]]  # from the original of `owner` to that method


def families(model_types: Iterable[str] | None) -> list[Family]:
    """The rows asked for; None: all that the installed Transformers is new enough for."""
    if model_types is None:
        version = _transformers_version()
        from packaging.version import Version  # comes with Transformers

        installed = Version(version)
        rows = [family for family in FAMILIES.values() if Version(family.since) <= installed]
        if not rows:
            oldest = min((family.since for family in FAMILIES.values()), key=Version)
            raise RuntimeError(f"bastile needs transformers >= {oldest}; installed is {installed}")
        return rows
    if isinstance(model_types, str):
        model_types = [model_types]
    rows = []
    for model_type in model_types:
        if model_type not in FAMILIES:
            raise ValueError(
                f"model type {model_type!r} is not supported; supported are: {', '.join(sorted(FAMILIES))}"
            )
        rows.append(FAMILIES[model_type])
    return rows


def sites(family: Family, operators: Iterable[str]) -> list[Site]:
    """The places of these operators in this family; RuntimeError names the first piece that is not there."""
    lookup = _Lookup(family)
    try:
        from bastile.models import backbone, causal_lm, layers
    except ImportError as error:
        raise lookup.missing(str(error)) from error
    wanted = frozenset(operators)
    found = []

    def add_class(operator: str, class_name: str, build: Callable[[Family, Any], Callable[..., Any]], reads: list[str]):
        owner = lookup.get(class_name)
        if "forward" not in vars(owner):
            raise lookup.missing(f"{class_name}.forward")
        lookup.need_names(f"{class_name}.forward", owner.forward, reads)
        found.append(
            Site(
                f"{operator}_{family.model_type}",
                owner,
                "forward",
                lambda original: build(family, original),
                owner,
                lambda original: build(family, original),
            )
        )

    if "rms_norm" in wanted:
        add_class("rms_norm", family.norm_class, layers.norm_forward, ["weight", family.norm_eps])
    if "swiglu" in wanted:
        reads = [family.gate, family.up, family.down, family.activation]
        add_class("swiglu", family.mlp_class, layers.mlp_forward, reads)
    if "rope" in wanted:
        name = family.rotary_function
        rotary, attention = lookup.get(name), lookup.get(family.attention_class)
        lookup.need_parameters(name, rotary, ["q", "k", "cos", "sin", "unsqueeze_dim"])
        lookup.need_names(f"{family.attention_class}.forward", attention.forward, [name], unwrap=False)

        def build_attention(original: Any) -> Callable[..., Any]:
            return layers.with_global(attention.forward, name, layers.rotary_function(family, original))

        found.append(
            Site(
                f"rope_{family.model_type}",
                lookup.module,
                name,
                lambda original: layers.rotary_function(family, original),
                attention,
                build_attention,
            )
        )
    if "fused_linear_cross_entropy" in wanted:
        owner = lookup.get(family.causal_lm_class)
        lookup.need_parameters(f"{family.causal_lm_class}.forward", owner.forward, ["labels", "logits_to_keep"])
        reads = [family.backbone, family.head, "loss_function"]
        add_class("fused_linear_cross_entropy", family.causal_lm_class, causal_lm.causal_lm_forward, reads)
    if "recompute" in wanted:
        name = family.backbone_class or family.causal_lm_class.removesuffix("ForCausalLM") + "Model"
        lookup.need_parameters(f"{name}.forward", lookup.get(name).forward, ["input_ids", "inputs_embeds"])
        add_class("recompute", name, backbone.backbone_forward, ["layers"])
    return found


class _Lookup:
    """Finds a family's pieces, and says which release lacks which."""

    def __init__(self, family: Family) -> None:
        self.family = family
        try:
            self.module = importlib.import_module(family.module)
        except ModuleNotFoundError as error:
            raise self.missing(f"module {family.module}") from error

    def get(self, name: str) -> Any:
        if not hasattr(self.module, name):
            raise self.missing(f"{self.family.module}.{name}")
        return getattr(self.module, name)

    def need_parameters(self, what: str, function: Any, names: Iterable[str]) -> None:
        parameters = inspect.signature(function).parameters
        for name in names:
            if name not in parameters:
                raise self.missing(f"argument {name!r} of {what}")

    def need_names(self, what: str, function: Any, names: Iterable[str], unwrap: bool = True) -> None:
        """That the original's own code mentions these attributes or globals, which the replacement uses too."""
        code = inspect.unwrap(function).__code__ if unwrap else function.__code__
        for name in names:
            if name not in code.co_names:
                raise self.missing(f"the use of {name!r} in {what}")

    def missing(self, piece: str) -> RuntimeError:
        return RuntimeError(
            f"transformers {_transformers_version()} lacks {piece}, which bastile needs for {self.family.model_type} "
            f"(tested from transformers {self.family.since} on); nothing was patched. Another release of bastile or of "
            f"transformers, or leaving this operator out of the call, helps"
        )


def _transformers_version() -> str:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("patching models needs Hugging Face Transformers: pip install transformers") from error
    return transformers.__version__
