"""Putting the operators into models, and taking them out again.

Process-wide: `apply` replaces methods on Transformers' classes, and the rotary function in their module, so models
built before and after are served alike. One model: `apply_to_model` gives its modules methods of their own. Either
changes nothing unless all of it can be done; `reset` puts back the very objects that were there."""

import threading
import types
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from bastile.guards import function_of
from bastile.models.lookup import families
from bastile.models.resolve import Site, sites
from bastile.models.table import FAMILIES, OPERATORS


@dataclass(frozen=True)
class _Applied:
    site: Site
    original: Any
    replacement: Any


@dataclass(frozen=True)
class _Given:
    """What marks a method that apply_to_model gave to a module."""

    function: Any  # the method's own, since functools.wraps copies the mark to whatever someone wraps around it
    sites: tuple[Site, ...]


_lock = threading.RLock()
_applied: dict[str, _Applied] = {}  # process-wide, by name
_models: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # those that apply_to_model has patched
_MARK = "_bastile_given"
_REPLICATE = "_replicate_for_data_parallel"  # what DataParallel calls on each module


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
    """Puts the chosen operators into every model of the given types (None: all supported) in this process.

    A family that has no place for an operator does without it. A second call changes nothing. docs/models.md says what
    falls back to the original, and when.

    Args:
        rms_norm: RMSNorm.
        swiglu: the gated activation of the MLP, or the whole MLP where it is one of plain matrices.
        rope: the rotary embedding.
        fused_linear_cross_entropy: in training, the loss from the last hidden states; the output's logits are None.
        qk_norm_rope: where queries and keys are normed head by head, that norm and the rotary embedding in one pass.
        add_rms_norm: the residual's addition and the norm after it in one pass.
        moe_experts: the experts of a mixture of experts: tokens sorted by expert, biases, gate and weighted sum fused.
        recompute: drop the outputs of norms and of SwiGLU that the backward pass would read, and make them again there,
            bit by bit the same (docs/memory.md); for batches from bastile.set_recompute's number of tokens on.
        model_types: such as ["qwen3"]; None: all that are supported.

    Returns:
        The names now in force for this choice, such as "rms_norm_qwen3".

    Raises:
        ValueError: for a model type that is not supported.
        RuntimeError: where the installed Transformers lacks a piece that an operator needs. Nothing is patched then.
    """
    chosen = _chosen(locals())
    with _lock:
        rows = families(model_types)
        wanted = [
            site
            for family in rows
            for site in sites(
                family,
                [op for op in family.operators if op in chosen and f"{op}_{family.model_type}" not in _applied],
                _stock,
            )
        ]
        for site in wanted:
            original = getattr(site.owner, site.attribute)
            replacement = site.build(original)
            setattr(site.owner, site.attribute, replacement)
            _applied[site.name] = _Applied(site, original, replacement)
        return [name for family in rows for name in family.patches(chosen)]


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
    """Puts the chosen operators, those of `apply`, into this model only. PEFT, torch.compile, DDP and FSDP wrappers are
    looked through.

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
        ValueError: for a model of a type that is not supported, or in which there is nothing to replace.
        RuntimeError: where the installed Transformers lacks a piece that an operator needs. Nothing is patched then.
    """
    chosen = _chosen(locals())
    core = _unwrapped(model)
    family = FAMILIES.get(getattr(getattr(core, "config", None), "model_type", None))
    if family is None:
        model_type = getattr(getattr(core, "config", None), "model_type", None)
        raise ValueError(
            f"apply_to_model: {type(core).__name__} has the model type {model_type!r}, which is not supported; "
            f"supported are: {', '.join(sorted(FAMILIES))}"
        )
    with _lock:
        found = sites(family, [op for op in family.operators if op in chosen], _stock)
        wanted: dict[nn.Module, list[Site]] = {}
        for module in core.modules():
            fitting = [site for site in found if _is_stock(module, site)]
            if fitting:
                wanted[module] = fitting
        if chosen and not wanted:
            raise ValueError(
                f"apply_to_model: no module of {type(core).__name__} runs Transformers' own {family.model_type} code, "
                f"so there is nothing to replace"
            )
        methods: dict[Any, Any] = {}
        for module, fitting in wanted.items():
            new = {site.name: site for site in (*_given(module), *fitting)}
            _give(module, tuple(new[name] for name in family.patches() if name in new), methods)
        if wanted:
            _models.add(core)
        return _in_order({site.name for fitting in wanted.values() for site in fitting})


def reset(names: Iterable[str] | None = None, model: nn.Module | None = None) -> list[str]:
    """Puts back the original code.

    Args:
        names: only these patches; None: all.
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
        done = set()
        if model is None:
            leaving = [entry for name, entry in _applied.items() if wanted is None or name in wanted]
            for entry in leaving:
                if getattr(entry.site.owner, entry.site.attribute) is not entry.replacement:
                    raise RuntimeError(
                        f"reset: other code has replaced {entry.site.where} since bastile.apply(); undo that first. "
                        f"Nothing was reset"
                    )
            for entry in leaving:
                setattr(entry.site.owner, entry.site.attribute, entry.original)
                del _applied[entry.site.name]
                done.add(entry.site.name)
        for core in list(_models) if model is None else [_unwrapped(model)]:
            methods: dict[Any, Any] = {}
            for module in core.modules():
                given = _given(module)
                staying = tuple(site for site in given if wanted is not None and site.name not in wanted)
                if len(staying) < len(given):
                    _give(module, staying, methods)
                    done.update(site.name for site in given if site not in staying)
            if not any(_given(module) for module in core.modules()):
                _models.discard(core)
        return _in_order(done)


def get_patched_ops(model: nn.Module | None = None) -> list[str]:
    """The names in force in the whole process; given a model, also those put into it alone."""
    with _lock:
        names = set(_applied)
        if model is not None:
            core = _unwrapped(model)
            family = FAMILIES.get(getattr(getattr(core, "config", None), "model_type", None))
            names.intersection_update(family.patches() if family else ())
            names.update(site.name for module in core.modules() for site in _given(module))
        return _in_order(names)


def _chosen(arguments: dict[str, Any]) -> list[str]:
    return [operator for operator in OPERATORS if arguments[operator]]


def _in_order(names: set[str]) -> list[str]:
    return [name for family in FAMILIES.values() for name in family.patches() if name in names]


def _stock(function: Any) -> Any:
    """What apply has replaced by this; anything else is itself."""
    return next((entry.original for entry in _applied.values() if entry.replacement is function), function)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The Transformers model inside torch.compile's, PEFT's and the data-parallel wrappers."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif not hasattr(model, "config") and isinstance(getattr(model, "module", None), nn.Module):
            model = model.module
        else:
            return model


def _slot(module: nn.Module) -> str:
    """Where the module keeps the method that does its work: Accelerate's hooks move it to _old_forward."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def _is_stock(module: nn.Module, site: Site) -> bool:
    """Whether this module runs the class's own forward: no subclass and no one else has given it another."""
    if not isinstance(module, site.instances) or not _is_same(type(module).forward, site.instances.forward):
        return False
    own = vars(module).get(_slot(module))
    # A hook of Accelerate's may hold the method that the class had before apply.
    return own is None or bool(_given(module)) or _stock(type(module).forward) is _stock(function_of(own))


def _is_same(forward: Any, stock: Any) -> bool:
    """Whether a class runs another's forward. It does too where both are the same wrapper of Transformers' and one
    wraps the other: a layer's forward, in the class that FSDP makes of the layer's class."""
    while forward is not stock:
        if getattr(forward, "__code__", None) is not getattr(stock, "__code__", 0) or not hasattr(
            forward, "__wrapped__"
        ):
            return False
        forward = forward.__wrapped__
    return True


def _given(module: nn.Module) -> tuple[Site, ...]:
    """The sites whose method apply_to_model gave to this module. Read from the module itself, so that copies of a
    patched model can be reset too."""
    function = function_of(vars(module).get(_slot(module)))
    mark = getattr(function, _MARK, None)
    return mark.sites if mark is not None and mark.function is function else ()


def _give(module: nn.Module, given: tuple[Site, ...], methods: dict[Any, Any]) -> None:
    """Makes the module's own method out of its class's, replaced at one site after the other; without sites the module
    goes back to its class's. methods: those made already, which modules share."""
    slot = _slot(module)
    if not given:
        if slot == "forward":
            delattr(module, slot)
        else:
            setattr(module, slot, types.MethodType(type(module).forward, module))
        vars(module).pop(_REPLICATE, None)
        return
    key = type(module), tuple(site.name for site in given)
    if key not in methods:
        method = _stock(type(module).forward)
        for site in given:
            method = site.build_method(method)
        setattr(method, _MARK, _Given(method, given))
        methods[key] = method
    setattr(module, slot, types.MethodType(methods[key], module))
    setattr(module, _REPLICATE, types.MethodType(_replicate_for_data_parallel, module))


def _replicate_for_data_parallel(self: nn.Module) -> Any:
    """A replica gets all that the module has, and would run the module's own method, on the weights of another device.
    It has the name of Module's method, by which a pickled one is found again."""
    replica: Any = getattr(type(self), _REPLICATE)(self)
    function = function_of(vars(self).get(_slot(self)))
    if function is not None:  # else someone has put something else there since
        setattr(replica, _slot(self), types.MethodType(function, replica))
    return replica
