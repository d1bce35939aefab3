"""From a row of the table to the places in the installed Transformers where each operator goes.

Everything that the replacements rely on is looked for here, before anything is changed: a release that moved a class,
an argument or an attribute is reported by name, not met in the middle of a training run."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bastile.models.lookup import Lookup
from bastile.models.rebind import with_global, with_wrapped, wrapped_cell
from bastile.models.table import Family

Replace = Callable[[Any], Callable[..., Any]]  # from an original to what takes its place


@dataclass(frozen=True)
class Site:
    """One operator's place in one family."""

    name: str  # "rms_norm_qwen3"
    where: str  # "Qwen3RMSNorm.forward"
    owner: Any  # what holds the original for the whole process: a class, a module, or the cell of a wrapper
    attribute: str
    build: Replace  # from the original in `owner`
    instances: type  # the modules that get a method of their own when one model alone is patched
    build_method: Replace  # from their forward to that method
    wrapper: Any = None  # the class's own forward, where `owner` is a cell of it


def sites(family: Family, operators: Iterable[str], stock: Callable[[Any], Any]) -> list[Site]:
    """The places of these operators in this family; Unfit names the first piece that is not there.

    stock: from a function that Bastile has put somewhere to the one it replaced; any other to itself."""
    return [_FINDERS[operator](Lookup(family, operator, stock)) for operator in operators]


def _forward_of(look: Lookup, class_name: str, build: Replace, reads: Iterable[str]) -> Site:
    """A place that is a class's forward, which mentions what its replacement reads."""
    where = f"{class_name}.forward"
    look.need_names(where, look.forward(class_name), reads)
    owner = look.get(class_name)
    return Site(f"{look.operator}_{look.family.model_type}", where, owner, "forward", build, owner, build)


def _wrapped_forward_of(look: Lookup, class_name: str, build: Replace, reads: Iterable[str]) -> Site:
    """As _forward_of. Where Transformers wraps that forward, the wrapper stays where it is and what it calls is
    exchanged: whoever has kept the class's own forward, or asks whether this is it, is served too."""
    site, forward = _forward_of(look, class_name, build, reads), look.forward(class_name)
    if not hasattr(forward, "__wrapped__"):
        return site
    cell = wrapped_cell(forward)
    if cell is None:
        raise look.missing(f"the function that {site.where} wraps")
    inner = look.stock(cell.cell_contents)
    return replace(
        site,
        owner=cell,
        attribute="cell_contents",
        build_method=lambda wrapper: with_wrapped(wrapper, build(inner)),
        wrapper=forward,
    )


def _replacements(look: Lookup, name: str) -> Any:
    """A module of bastile.models that imports from Transformers."""
    import importlib

    try:
        return importlib.import_module(f"bastile.models.{name}")
    except ImportError as error:
        raise look.missing(str(error)) from error


def _know_norm(look: Lookup) -> list[str]:
    """That the family's norm is what the operators compute; what it reads."""
    reads = ["weight", look.family.norm_eps]
    where, forward = f"{look.family.norm_class}.forward", look.forward(look.family.norm_class)
    look.need_names(where, forward, reads)
    look.know_all(where, forward, [*reads, *_replacements(look, "layers").NORM_MAY_READ], ["hidden_states"])
    return reads


def _rms_norm(look: Lookup) -> Site:
    build = partial(_replacements(look, "layers").norm_forward, look.family)
    return _forward_of(look, look.family.norm_class, build, _know_norm(look))


def _swiglu(look: Lookup) -> Site:
    family = look.family
    build = partial(_replacements(look, "layers").mlp_forward, family)
    reads = [family.gate, family.up, family.down, family.activation]
    site = _forward_of(look, family.mlp_class, build, reads)
    look.know_all(site.where, look.forward(family.mlp_class), reads, ["x"])
    return site


def _know_rotary(look: Lookup) -> Any:
    """The family's rotary function, which computes what the operators compute."""
    name, layers = look.family.rotary_function, _replacements(look, "layers")
    rotary = look.get(name)
    look.need_parameters(name, rotary, layers.ROTARY_ARGUMENTS)
    if inspect.isfunction(rotary):  # with Hugging Face's `kernels` it is a module that calls the function
        look.know_all(name, rotary, layers.ROTARY_MAY_READ, [*layers.ROTARY_ARGUMENTS, "position_ids"])
    return rotary


def _rope(look: Lookup) -> Site:
    family = look.family
    name, where = family.rotary_function, f"{family.attention_class}.forward"
    rotary, attention = _know_rotary(look), look.get(family.attention_class)
    look.need_names(where, look.forward(family.attention_class), [name], unwrap=False)
    build = partial(_replacements(look, "layers").rotary_function, family)
    return Site(
        f"{look.operator}_{family.model_type}",
        name,
        look.module,
        name,
        build,
        attention,
        lambda forward: with_global(forward, name, build(rotary)),
    )


def _fused_linear_cross_entropy(look: Lookup) -> Site:
    causal_lm = _replacements(look, "causal_lm")
    family = look.family
    name = family.causal_lm_class
    look.need_parameters(f"{name}.forward", look.forward(name), ["labels", "logits_to_keep"])
    build = partial(causal_lm.causal_lm_forward, family)
    reads, may_read, arguments = (
        [family.backbone, family.head, "loss_function"],
        causal_lm.MAY_READ,
        causal_lm.ARGUMENTS,
    )
    if family.router_loss:
        router_loss = _replacements(look, "router_loss")
        reads += router_loss.READS
        may_read, arguments = may_read + router_loss.MAY_READ, arguments + router_loss.ARGUMENTS
    # The wrapper makes tuples of outputs, and Accelerate keeps it in a model that it prepares for mixed precision.
    site = _wrapped_forward_of(look, name, build, reads)
    look.know_all(site.where, look.forward(name), [*reads, *may_read], arguments)
    return site


def _qk_norm_rope(look: Lookup) -> Site:
    attention = _replacements(look, "attention")
    family = look.family
    norm, rotary, forward = (
        look.forward(family.norm_class),
        _know_rotary(look),
        look.forward(family.attention_class),
    )
    where = f"{family.attention_class}.forward"
    _know_norm(look)
    look.need_parameters(where, forward, attention.NEEDED)
    reads = [*attention.READS, family.q_norm, family.k_norm, family.rotary_function]
    look.know_all(where, forward, [*reads, *attention.MAY_READ], attention.ARGUMENTS)
    build = partial(attention.attention_forward, family, look.module, norm, rotary)
    return _forward_of(look, family.attention_class, build, reads)


def _add_rms_norm(look: Lookup) -> Site:
    decoder = _replacements(look, "decoder")
    family = look.family
    norm, forward = look.forward(family.norm_class), look.forward(family.layer_class)
    where = f"{family.layer_class}.forward"
    _know_norm(look)
    look.need_parameters(where, forward, decoder.ARGUMENTS[:1])
    look.know_all(where, forward, decoder.READS, decoder.ARGUMENTS)
    build = partial(decoder.layer_forward, family, norm)
    # The wrapper checkpoints the layer, and asks whether it is the class's own.
    return _wrapped_forward_of(look, family.layer_class, build, decoder.READS)


def _moe_experts(look: Lookup) -> Site:
    experts = _replacements(look, "experts")
    name = look.family.experts_class
    gate = getattr(look.get(name), experts.GATE, None)
    if gate is None:
        raise look.missing(f"{name}.{experts.GATE}")
    look.know_all(f"{name}.{experts.GATE}", gate, experts.GATE_READS, ["gate_up"])
    look.need_parameters(f"{name}.forward", look.forward(name), experts.ARGUMENTS)
    build = partial(experts.experts_forward, look.family, gate)
    reads = [*experts.PARAMETERS, experts.GATE, "num_experts"]
    site = _forward_of(look, name, build, reads)
    look.know_all(site.where, look.forward(name), [*reads, *experts.MAY_READ], experts.ARGUMENTS)
    return site


def _recompute(look: Lookup) -> Site:
    name = look.family.backbone_class
    look.need_parameters(f"{name}.forward", look.forward(name), ["input_ids", "inputs_embeds"])
    build = partial(_replacements(look, "backbone").backbone_forward, look.family)
    return _forward_of(look, name, build, ["layers"])


_FINDERS: dict[str, Callable[[Lookup], Site]] = {
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
    "rope": _rope,
    "fused_linear_cross_entropy": _fused_linear_cross_entropy,
    "qk_norm_rope": _qk_norm_rope,
    "add_rms_norm": _add_rms_norm,
    "moe_experts": _moe_experts,
    "recompute": _recompute,
}
