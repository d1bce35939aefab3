"""Putting the operators into models, and taking them out again.

Process-wide: `apply` replaces methods on Transformers' classes, and the rotary function in their module, so models
built before and after are served alike. One model: `apply_to_model` gives its modules methods of their own. A call of
either states what is in force afterwards, and changes nothing of a model type unless all of it can be done; `reset`
puts back the very objects that were there. What others have kept of a replacement runs the original once it is out."""

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from bastile.guards import is_ours, mark_as_ours, stand_in_for, stock_of
from bastile.models.lookup import Unfit, described, families
from bastile.models.resolve import Site, sites
from bastile.models.table import FAMILIES, OPERATORS, Family
from bastile.own_methods import give, given_to, reaches, runs_stock


@dataclass
class _Applied:
    site: Site
    original: Any
    replacement: Any = None
    is_in_force: bool = True

    def put(self) -> None:
        self.replacement = _while_in_force(self)
        setattr(self.site.owner, self.site.attribute, self.replacement)

    def take_out(self) -> None:
        self.is_in_force = False
        if getattr(self.site.owner, self.site.attribute) is self.replacement:
            setattr(self.site.owner, self.site.attribute, self.original)

    def others(self) -> Any:
        """What other code has put in its place, or around it; None where it is as it was put."""
        found = getattr(self.site.owner, self.site.attribute)
        if found is not self.replacement:
            return found
        return self.site.instances.forward if self.site.wrapper not in (None, self.site.instances.forward) else None

    def is_called(self) -> bool:
        """Whether calls still come to it, directly or through what others have wrapped around it."""
        site = self.site
        return _leads_to(getattr(site.owner, site.attribute), self.replacement) and (
            site.wrapper is None or _leads_to(site.instances.forward, site.wrapper)
        )


def _leads_to(function: Any, inner: Any) -> bool:
    while function is not None and function is not inner:
        function = getattr(function, "__wrapped__", None)
    return function is not None


def _while_in_force(entry: _Applied) -> Any:
    """The replacement, and the original once the patch is taken out: hooks and wrappers of other packages keep the
    method that a class had when they came, and call it ever after."""
    original, replacement = entry.original, entry.site.build(entry.original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if entry.is_in_force:
            return replacement(*args, **kwargs)
        return original(*args, **kwargs)

    stand_in_for(original, call)
    return mark_as_ours(call) if is_ours(replacement) else call


_LOSS = "fused_linear_cross_entropy"
_lock = threading.RLock()
_everywhere: Any = None  # logits on demand in the classes that are in no family
_applied: dict[str, _Applied] = {}  # process-wide, by name
_models: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # those that apply_to_model has patched


def apply(
    rms_norm: bool = True,
    swiglu: bool = True,
    rope: bool = True,
    fused_linear_cross_entropy: bool = True,
    qk_norm_rope: bool = True,
    add_rms_norm: bool = True,
    moe_experts: bool = True,
    recompute: bool = True,
    model_types: Iterable[str] | None = None,
) -> list[str]:
    """Puts the chosen operators into every model of the given types (None: all supported) in this process, and takes
    the others out of them: what it is given is what is in force afterwards. Other types stay as they are.

    A family that has no place for an operator does without it. An operator that fuses others needs them: without
    `rms_norm` there is no `add_rms_norm` or `qk_norm_rope`, without `rope` no `qk_norm_rope`. docs/models.md says what
    falls back to the original, and when.

    Args:
        rms_norm: RMSNorm.
        swiglu: the gated activation of the MLP, or the whole MLP where it is one of plain matrices.
        rope: the rotary embedding.
        fused_linear_cross_entropy: the loss from the last hidden states; the output's logits are made when they are
            read. With model_types None in every model class of Transformers, of whatever type.
        qk_norm_rope: where queries and keys are normed head by head, that norm and the rotary embedding in one pass.
        add_rms_norm: the residual's addition and the norm after it in one pass.
        moe_experts: the experts of a mixture of experts: tokens sorted by expert, biases, gate and weighted sum fused.
        recompute: drop the outputs of norms and of SwiGLU that the backward pass would read, and make them again there,
            bit by bit the same (docs/memory.md); for batches from bastile.set_recompute's number of tokens on.
        model_types: such as ["qwen3"], or "qwen3"; None: all that are supported. A type in which something is missing
            or has been replaced by others stays as it is then, with a warning that names it, and the others are served.

    Returns:
        The names now in force in these types, such as "rms_norm_qwen3".

    Raises:
        TypeError: where an operator's argument is neither True nor False.
        ValueError: for a model type that is not supported.
        RuntimeError: where a type that is asked for by name, or every type, lacks a piece that an operator needs, since
            the installed Transformers has it otherwise or other code has replaced it. Nothing is changed then.
    """
    chosen = _chosen("apply", locals())
    with _lock:
        rows = families(model_types)
        wanted: list[Site] = []
        unfit: dict[str, Unfit] = {}
        for family in rows:
            missing = [op for op in family.operators if op in chosen and not _is_in_force(f"{op}_{family.model_type}")]
            try:
                wanted += sites(family, missing, stock_of)
            except Unfit as error:
                if model_types is not None or len(unfit) + 1 == len(rows):
                    raise
                unfit[family.model_type] = error
        served = [family for family in rows if family.model_type not in unfit]
        staying = {name for family in served for name in family.patches(chosen)}
        leaving = {name for family in served for name in family.patches()} - staying
        _take_out([entry for name, entry in _applied.items() if name in leaving], "apply")
        for site in wanted:
            if site.name in _applied:  # which others have replaced, and undone in their way
                _applied[site.name].is_in_force = False
            entry = _Applied(site, stock_of(getattr(site.owner, site.attribute)))
            entry.put()
            _applied[site.name] = entry
        if model_types is None:
            _serve_other_classes(_LOSS in chosen)
        for model_type, lack in unfit.items():
            warnings.warn(
                f"bastile.apply: {lack.reason}; {model_type} models stay as they are, others are served. {lack.advice}",
                RuntimeWarning,
                stacklevel=2,
            )
        return [name for family in rows for name in family.patches() if _is_in_force(name)]


def apply_to_model(
    model: nn.Module,
    rms_norm: bool = True,
    swiglu: bool = True,
    rope: bool = True,
    fused_linear_cross_entropy: bool = True,
    qk_norm_rope: bool = True,
    add_rms_norm: bool = True,
    moe_experts: bool = True,
    recompute: bool = True,
) -> list[str]:
    """Puts the chosen operators, those of `apply`, into this model only, and takes the others out of it that an earlier
    call put there; what `apply` has put into classes stays. The wrappers of PEFT, torch.compile, DDP, FSDP, DeepSpeed
    and of Accelerate's mixed precision are looked through.

    A pickle of the model, and so a spawned process and what `torch.save(model)` writes, is of the model without them:
    it can be loaded where Bastile is not installed. Call this again after loading. `copy.deepcopy` keeps them.

    Args:
        model: a model of Transformers, wrapped or not.
        rms_norm: this and the following are as for `apply`.
        swiglu: as for `apply`.
        rope: as for `apply`.
        fused_linear_cross_entropy: as for `apply`.
        qk_norm_rope: as for `apply`.
        add_rms_norm: as for `apply`.
        moe_experts: as for `apply`.
        recompute: as for `apply`.

    Returns:
        The names of what was put in; an operator whose module the model lacks (a model without a language-model head
        has no loss) or overrides with code of its own is not among them.

    Raises:
        TypeError: where an operator's argument is neither True nor False.
        ValueError: for a model of a type that is not supported, or in which there is nothing to replace.
        RuntimeError: where the model's type lacks a piece that an operator needs, since the installed Transformers has
            it otherwise or other code has replaced it. Nothing is changed then.
    """
    chosen = _chosen("apply_to_model", locals())
    core = _unwrapped(model)
    family = _family(core)
    if family is None:
        raise ValueError(
            f"apply_to_model: {type(core).__name__} has the model type {_model_type(core)!r}, which is not supported; "
            f"supported are: {', '.join(sorted(FAMILIES))}"
        )
    with _lock:
        found = sites(family, [op for op in family.operators if op in chosen], stock_of)
        wanted = {module: tuple(s for s in found if runs_stock(module, s)) for module in core.modules()}
        names = {site.name for fitting in wanted.values() for site in fitting}
        if chosen and not names:
            raise ValueError(
                f"apply_to_model: no module of {type(core).__name__} runs Transformers' own {family.model_type} code, "
                f"so there is nothing to replace"
            )
        methods: dict[Any, Any] = {}
        for module, fitting in wanted.items():
            if fitting or given_to(module):
                give(module, fitting, methods)
        if names:
            _models.add(core)
        else:
            _models.discard(core)
        return _in_order(names)


def reset(names: Iterable[str] | None = None, model: nn.Module | None = None) -> list[str]:
    """Puts back the original code.

    Where others have replaced or wrapped a patch since, theirs stays, with a warning that names it. What they call of
    Bastile's, if anything, runs the original from then on.

    Args:
        names: only these patches, and not those that fuse them with others; None: all.
        model: only what apply_to_model put into it; None: everything that apply put into classes and apply_to_model
            into any model.

    Returns:
        The names of what was taken out.

    Raises:
        ValueError: for a name that no patch has.
    """
    wanted = None if names is None else frozenset([names] if isinstance(names, str) else names)
    if wanted is not None:
        known = {name for family in FAMILIES.values() for name in family.patches()}
        if wanted - known:
            raise ValueError(
                f"reset: unknown patch {sorted(wanted - known)[0]!r}; known are: {', '.join(sorted(known))}"
            )
    with _lock:
        done: set[str] = set()
        if model is None:
            leaving = [entry for name, entry in _applied.items() if wanted is None or name in wanted]
            done.update(entry.site.name for entry in leaving)
            _take_out(leaving, "reset")
            if wanted is None:
                _serve_other_classes(False)
        for core in list(_models) if model is None else [_unwrapped(model)]:
            methods: dict[Any, Any] = {}
            for module in core.modules():
                given = given_to(module)
                staying = tuple(site for site in given if wanted is not None and site.name not in wanted)
                if len(staying) < len(given):
                    give(module, staying, methods)
                    done.update(site.name for site in given if site not in staying)
            if not any(given_to(module) for module in core.modules()):
                _models.discard(core)
        return _in_order(done)


def get_patched_ops(model: nn.Module | None = None) -> list[str]:
    """The names in force in the whole process; given a model, what is in force in it: those that one of its modules
    runs, from `apply` or from `apply_to_model`."""
    with _lock:
        names = {name for name in _applied if _is_in_force(name)}
        if model is not None:
            core = _unwrapped(model)
            family = _family(core)
            names.intersection_update(family.patches() if family else ())
            modules = list(core.modules())
            names = {name for name in names if any(reaches(module, _applied[name].site) for module in modules)}
            names.update(site.name for module in modules for site in given_to(module))
        return _in_order(names)


def _chosen(function: str, arguments: dict[str, Any]) -> list[str]:
    """The operators whose arguments are True, but for those that need one that is not."""
    for operator in OPERATORS:
        if not isinstance(arguments[operator], bool):
            raise TypeError(
                f"{function}: {operator} is {arguments[operator]!r}; True or False is needed. Types of models are "
                f'given by keyword: apply(model_types=["qwen3"])'
            )
    return [
        name
        for name, operator in OPERATORS.items()
        if arguments[name] and all(arguments[needed] for needed in operator.needs)
    ]


def _serve_other_classes(wanted: bool) -> None:
    """Logits on demand, which need to know nothing of a model, in all that no family describes."""
    global _everywhere
    if _everywhere is not None and not wanted:
        _everywhere.undo()
        _everywhere = None
    elif _everywhere is None and wanted:
        from bastile.models.logits.everywhere import Everywhere

        modules = [(sys.modules.get(family.module), family.causal_lm_class) for family in FAMILIES.values()]
        _everywhere = Everywhere(but=[getattr(module, name) for module, name in modules if hasattr(module, name)])


def _is_in_force(name: str) -> bool:
    return name in _applied and _applied[name].is_called()


def _take_out(entries: list[_Applied], function: str) -> None:
    """Puts the originals back, wherever nobody has put something else since."""
    for entry in entries:
        others = entry.others()
        entry.take_out()
        del _applied[entry.site.name]
        if others is not None:
            warnings.warn(
                f"bastile.{function}: other code has replaced {entry.site.where} since bastile.apply(): "
                f"{described(others)} stays there. {entry.site.name} is no longer in force all the same",
                RuntimeWarning,
                stacklevel=3,
            )


def _in_order(names: set[str]) -> list[str]:
    return [name for family in FAMILIES.values() for name in family.patches() if name in names]


def _model_type(model: Any) -> str | None:
    return getattr(getattr(model, "config", None), "model_type", None)


def _family(model: Any) -> Family | None:
    return FAMILIES.get(_model_type(model))


def _unwrapped(model: nn.Module) -> nn.Module:
    """The Transformers model inside torch.compile's, PEFT's and the data-parallel wrappers, DeepSpeed's engine among
    them, which has a config of its own."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif _model_type(model) is None and isinstance(getattr(model, "module", None), nn.Module):
            model = model.module
        else:
            return model
