"""Putting the operators into models, and taking them out again.

Process-wide: `apply` replaces methods on Transformers' classes, and the rotary function in their module, so models
built before and after are served alike. One model: `apply_to_model` gives its modules methods of their own. Either
changes nothing unless all of it can be done; `reset` puts back the very objects that were there."""

import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from bastile.models.resolve import Site, families, sites
from bastile.models.table import FAMILIES, OPERATORS


@dataclass(frozen=True)
class _Applied:
    site: Site
    original: Any
    replacement: Any


_lock = threading.RLock()
_applied: dict[str, _Applied] = {}  # process-wide, by name
_models: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # those that apply_to_model has patched
_MARK = "_bastile_patch"  # on the methods given to modules: the patch's name


def apply(
    rms_norm: bool = True,
    swiglu: bool = True,
    rope: bool = True,
    fused_linear_cross_entropy: bool = True,
    recompute: bool = True,
    model_types: Iterable[str] | None = None,
) -> list[str]:
    """Puts the chosen operators into every model of the given types (None: all supported) in this process.

    recompute: drop the outputs of norms and of SwiGLU that the backward pass would read, and make them again there, bit
    by bit the same (docs/memory.md); for batches from bastile.set_recompute's number of tokens on.

    Returns the names now in force for this choice, such as "rms_norm_qwen3"; a second call changes nothing."""
    chosen = _chosen(rms_norm, swiglu, rope, fused_linear_cross_entropy, recompute)
    with _lock:
        rows = families(model_types)
        wanted = [
            site
            for family in rows
            for site in sites(family, [op for op in chosen if f"{op}_{family.model_type}" not in _applied])
        ]
        for site in wanted:
            original = vars(site.owner)[site.attribute]
            replacement = site.build(original)
            setattr(site.owner, site.attribute, replacement)
            _applied[site.name] = _Applied(site, original, replacement)
        return [f"{op}_{family.model_type}" for family in rows for op in chosen]


def apply_to_model(
    model: nn.Module,
    rms_norm: bool = True,
    swiglu: bool = True,
    rope: bool = True,
    fused_linear_cross_entropy: bool = True,
    recompute: bool = True,
) -> list[str]:
    """Puts the chosen operators, those of `apply`, into this model only. PEFT, torch.compile, DDP and FSDP wrappers are
    looked through.

    Returns the names of what was put in; an operator whose module the model lacks (a model without a language-model
    head has no loss) or overrides with code of its own is not among them."""
    core = _unwrapped(model)
    model_type = getattr(getattr(core, "config", None), "model_type", None)
    if model_type not in FAMILIES:
        raise ValueError(
            f"apply_to_model: {type(core).__name__} has the model type {model_type!r}, which is not supported; "
            f"supported are: {', '.join(sorted(FAMILIES))}"
        )
    chosen = _chosen(rms_norm, swiglu, rope, fused_linear_cross_entropy, recompute)
    with _lock:
        names = []
        for site in sites(FAMILIES[model_type], chosen):
            modules = [module for module in core.modules() if _is_stock(module, site)]
            if not modules:
                continue
            method = site.build_method(_original(site))
            setattr(method, _MARK, site.name)
            for module in modules:
                setattr(module, _slot(module), types.MethodType(method, module))
            names.append(site.name)
        if chosen and not names:
            raise ValueError(
                f"apply_to_model: no module of {type(core).__name__} runs Transformers' own {model_type} code, so "
                f"there is nothing to replace"
            )
        if names:
            _models.add(core)
        return names


def reset(names: Iterable[str] | None = None, model: nn.Module | None = None) -> list[str]:
    """Puts back the original code and returns the names of what was taken out.

    names: only these patches (None: all). model: only what apply_to_model put into it; without it, everything that
    apply put into classes and apply_to_model into any model."""
    wanted = None if names is None else frozenset([names] if isinstance(names, str) else names)
    if wanted is not None:
        known = {f"{op}_{model_type}" for model_type in FAMILIES for op in OPERATORS}
        if wanted - known:
            raise ValueError(
                f"reset: unknown patch {sorted(wanted - known)[0]!r}; known are: {', '.join(sorted(known))}"
            )
    with _lock:
        done = set()
        if model is None:
            leaving = [entry for name, entry in _applied.items() if wanted is None or name in wanted]
            for entry in leaving:
                if vars(entry.site.owner)[entry.site.attribute] is not entry.replacement:
                    raise RuntimeError(
                        f"reset: other code has replaced {entry.site.owner.__name__}.{entry.site.attribute} since "
                        f"bastile.apply(); undo that first. Nothing was reset"
                    )
            for entry in leaving:
                setattr(entry.site.owner, entry.site.attribute, entry.original)
                del _applied[entry.site.name]
                done.add(entry.site.name)
        for core in list(_models) if model is None else [_unwrapped(model)]:
            for module, slot, name in list(_own_methods(core)):
                if wanted is None or name in wanted:
                    _take_out(module, slot)
                    done.add(name)
            if next(_own_methods(core), None) is None:
                _models.discard(core)
        return _in_order(done)


def get_patched_ops(model: nn.Module | None = None) -> list[str]:
    """The names in force in the whole process; given a model, also those put into it alone."""
    with _lock:
        names = set(_applied)
        if model is not None:
            core = _unwrapped(model)
            model_type = getattr(getattr(core, "config", None), "model_type", None)
            names &= {f"{op}_{model_type}" for op in OPERATORS}
            names.update(name for _, _, name in _own_methods(core))
        return _in_order(names)


def _chosen(*flags: bool) -> list[str]:
    return [operator for operator, flag in zip(OPERATORS, flags, strict=True) if flag]


def _in_order(names: set[str]) -> list[str]:
    return [f"{op}_{model_type}" for model_type in FAMILIES for op in OPERATORS if f"{op}_{model_type}" in names]


def _original(site: Site) -> Any:
    entry = _applied.get(site.name)
    return vars(site.owner)[site.attribute] if entry is None else entry.original


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
    if not isinstance(module, site.instances) or type(module).forward is not site.instances.forward:
        return False
    own = vars(module).get(_slot(module))
    function = getattr(own, "__func__", None)
    # A hook of Accelerate's may hold the method that the class had before apply.
    known = [type(module).forward, *(entry.original for entry in _applied.values())]
    return own is None or hasattr(function, _MARK) or any(function is other for other in known)


def _own_methods(core: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Every method that apply_to_model gave to a module of this model: the module, where, the patch's name. Read from
    the modules themselves, so that copies of a patched model can be reset too."""
    for module in core.modules():
        slot = _slot(module)
        name = getattr(getattr(vars(module).get(slot), "__func__", None), _MARK, None)
        if name is not None:
            yield module, slot, name


def _take_out(module: nn.Module, slot: str) -> None:
    if slot == "forward":
        delattr(module, slot)
    else:
        setattr(module, slot, types.MethodType(type(module).forward, module))
