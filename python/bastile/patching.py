"""Putting the operators into models, and taking them out again.

Process-wide: `apply` replaces methods on classes whose code has a known form, and rotary functions in their modules, in
what is imported now and in what will be, so models built before and after are served alike. One model: `apply_to_model`
gives its modules methods of their own. A call of either states what is in force afterwards; `reset` puts back the very
objects that were there. What others have kept of a replacement runs the original once it is out."""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Any

from torch import nn

from bastile.graphs import decoding, stack
from bastile.in_force import FILES, Plan, carry_out, reasons_for, take_out
from bastile.models import graphs, loading
from bastile.models.forms import reading
from bastile.models.sites import ModelFile, Site, file_of, sites
from bastile.models.table import OF_BACKBONES, OPERATORS
from bastile.offload import mover
from bastile.own_methods import give, given_to, reaches, runs_stock
from bastile.report import noting

#: Whose classes are PEFT's, PyTorch's and trainers': no type needs a place for them.
_OF_ANY_TYPE = frozenset({"lora_linear", "autocast_linear", "layer_norm", "adamw", "frozen_bf16"})

_lock = threading.RLock()
_everywhere: tuple[str, ...] = ()  # the operators of every type but those that follow
_types: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {}  # type -> its operators, and its modules' titles
_models: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # those that apply_to_model has patched


def _forget() -> None:
    """What was made for the patches that were in force until now."""
    stack.forget()
    decoding.forget()
    mover.forget()


def _marks_what_is_named(function: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """The function learns which operators its caller has named: what is asked for by name must be possible."""
    order = [name for name in function.__annotations__ if name not in ("model_types", "return")]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> list[str]:
        given = {**dict(zip(order, args, strict=False)), **kwargs}
        token = _named.set(frozenset(name for name in OPERATORS if given.get(name) is True))
        try:
            with reading():
                return function(*args, **kwargs)
        finally:
            _named.reset(token)
            _forget()

    return call


_named: ContextVar[frozenset[str]] = ContextVar("bastile_named", default=frozenset())


@_marks_what_is_named
def apply(
    rms_norm: bool = True,
    swiglu: bool = True,
    rope: bool = True,
    fused_linear_cross_entropy: bool = True,
    qk_norm_rope: bool = True,
    add_rms_norm: bool = True,
    moe_experts: bool = True,
    sink_attention: bool = True,
    masked_attention: bool = True,
    causal_conv1d: bool = True,
    gated_delta_rule: bool = True,
    mamba2_scan: bool = True,
    lora_linear: bool = True,
    autocast_linear: bool = True,
    layer_norm: bool = True,
    gated_rms_norm: bool = True,
    chunked_attention: bool = True,
    adamw: bool = True,
    frozen_bf16: bool = True,
    recompute: bool = True,
    offload_checkpoints: bool = False,
    cuda_graphs: graphs.Mode = "auto",
    padding_free: bool = True,
    model_types: Iterable[str] | None = None,
) -> list[str]:
    """Puts the chosen operators into every model of the given types (None: all) in this process, and takes the others
    out of them: what it is given is what is in force afterwards. Other types stay as they are.

    What a model computes is known by its code, not by its type: an operator goes where the code has a form that it
    serves, in models that are imported now or later, of users too; all other code stays as it is. `bastile support`
    tells what that means for a type, bastile.report() what ran. An operator that fuses others needs them: without
    `rms_norm` there is no `add_rms_norm` or `qk_norm_rope`, without `rope` no `qk_norm_rope`. docs/models.md says what
    falls back to the original, and when.

    Args:
        rms_norm: RMSNorm.
        swiglu: the gated activation of the MLP, or the whole MLP where it is one of plain matrices or has no gate.
        rope: the rotary embedding; in an attention that calls it, queries, keys and values of one input as one node.
        fused_linear_cross_entropy: the loss from the last hidden states; the output's logits are made when they are
            read. With model_types None in every model class of Transformers, of whatever type.
        qk_norm_rope: where queries and keys are normed head by head, that norm and the rotary embedding in one pass.
        add_rms_norm: the residual's addition and the norm after it in one pass.
        moe_experts: the experts of a mixture of experts: tokens sorted by expert, biases, gate and weighted sum fused.
        sink_attention: attention whose softmax has sinks (GPT-OSS's), by PyTorch's flash attention in place of
            Transformers' eager code (docs/sink_attention.md).
        masked_attention: Transformers' sdpa attention of causal language models and encoders where a batch has padding,
            sequences side by side or a window: by PyTorch's attention without a mask, which computes what is seen alone
            (docs/masked_attention.md).
        causal_conv1d: the short convolution of Mamba, the gated delta rule and LFM2, with its activation in one pass
            (docs/causal_conv1d.md); where the package causal-conv1d is installed, Transformers' call of that stays.
        gated_delta_rule: linear attention of Qwen3.5, Qwen3-Next and OLMo-Hybrid, over chunks
            (docs/gated_delta_rule.md); where the package flash-linear-attention is installed, Transformers' call of
            that stays.
        mamba2_scan: Mamba-2's state space (Granite 4, Nemotron-H, Bamba, Zamba2), over chunks
            (docs/gated_delta_rule.md); where the package mamba_ssm is installed, Transformers' call of that stays.
        lora_linear: linear layers with PEFT's LoRA adapters, alone, as queries, keys and values, and as gate, up and
            down, each as one function, and adapters on experts' matrices (docs/lora.md). PEFT's classes are of no
            type: they are served if any type is to have it.
        autocast_linear: with model_types None, nn.Linear of trained float32 weights under autocast to 16 bits, as
            Trainer(bf16=True) has it: the products of its backward pass write float32 (docs/autocast_linear.md). In
            training, of any model, for the class is PyTorch's. In attentions without a rotary function queries, keys
            and values of one input as one node, in any type and with adapters.
        layer_norm: LayerNorm, in training; with model_types None that of PyTorch's own class too, which is of no type.
        gated_rms_norm: the RMSNorm with a gate of linear attention (Qwen3-Next) and of Mamba-2.
        chunked_attention: the attention of vision and audio towers (Qwen-VL, GLM-V) by Transformers' sdpa or eager
            function, called once for all images, frames or windows of one size in place of once for each, whose sizes
            are asked for once a step in place of three times a layer.
        adamw: where a Trainer of Transformers, or of TRL's, makes torch's AdamW, its default, bastile.optim.AdamW takes
            its place, with the same state_dict, and clips as it reads the gradients (docs/optim.md).
        frozen_bf16: where a Trainer trains adapters under autocast to bfloat16, frozen weights of float32 that bfloat16
            holds exactly, as those of most checkpoints, are kept in it until it ends (docs/memory.md). So are those of
            TRL's reference models and teachers. It needs `autocast_linear`.
        recompute: drop the outputs of norms and of SwiGLU that the backward pass would read, and make them again there,
            bit by bit the same, but for what adapters of the last layer's MLP get, which is summed up in another order
            (docs/memory.md); for batches from bastile.set_recompute's number of tokens on.
        offload_checkpoints: with gradient checkpointing, keep the inputs of layers in the host's page-locked memory
            from the forward to the backward pass (docs/memory.md); not done where it is not asked for.
        cuda_graphs: the layers of a training step, forward and backward, as CUDA graphs from a shape's second
            appearance on (docs/graphs.md); "auto": where the device would wait for the host. Where text is generated by
            Transformers' own loop, the calls for one token each, of models of all types.
        padding_free: batches without their padding, where labels, or the head's code, say that nobody reads what layers
            make of it: tokens of all rows go through the layers side by side (docs/padding_free.md).
        model_types: such as ["qwen3"], or "qwen3", whose code is imported then; None: all.

    Returns:
        The names now in force: those of operators, such as "rms_norm"; for given types with the type, such as
        "rms_norm_qwen3", and only of what has a place there.

    Raises:
        TypeError: where an operator's argument is neither True nor False, nor "auto" for cuda_graphs.
        ValueError: for a model type that Transformers does not know.
        RuntimeError: where an operator that is asked for by its name, as in apply(rope=True), cannot be put into a type
            that is given, or without types into any that is imported and has such code, since the code is not known or
            other code has replaced it; where Transformers is too old. Nothing is changed then.
    """
    global _everywhere
    chosen = _chosen("apply", locals())
    loading.transformers_version()
    if model_types is None:
        with _lock:
            _serve_loaded(chosen)
            graphs.set_everywhere(cuda_graphs)
            _everywhere = tuple(chosen)
            _types.clear()
            _watch_if_needed()
            return [name for name in chosen if not _is_lost(name)]
    given = list(dict.fromkeys([model_types] if isinstance(model_types, str) else model_types))
    # Imported before the lock is taken: who imports a model file waits for it.
    modules = {model_type: _modules_of(model_type, "apply") for model_type in given}
    with _lock:
        plans = [Plan.of(name, chosen) for names in modules.values() for name in names]
        _need(plans, _named.get() & set(chosen) - _OF_ANY_TYPE, ", ".join(given))
        carry_out(plans, "apply")
        graphs.set_everywhere(cuda_graphs)
        for model_type, names in modules.items():
            titles = frozenset(FILES[name].title for name in names)
            # Two names of types may be one file's: the later one says what is in force there.
            for other in [other for other, (_, theirs) in _types.items() if theirs == titles and other != model_type]:
                del _types[other]
            _types[model_type] = tuple(chosen), titles
        adapters = [name for name in loading.model_files() if loading.is_of_any_type(name)]
        carry_out([Plan.of(name, _wanted_in(name)) for name in adapters], "apply")
        _watch_if_needed()
        return [name for model_type in given for name in _names_of(model_type)]


@_marks_what_is_named
def apply_to_model(
    model: nn.Module,
    rms_norm: bool = True,
    swiglu: bool = True,
    rope: bool = True,
    fused_linear_cross_entropy: bool = True,
    qk_norm_rope: bool = True,
    add_rms_norm: bool = True,
    moe_experts: bool = True,
    sink_attention: bool = True,
    masked_attention: bool = True,
    causal_conv1d: bool = True,
    gated_delta_rule: bool = True,
    mamba2_scan: bool = True,
    lora_linear: bool = True,
    layer_norm: bool = True,
    gated_rms_norm: bool = True,
    chunked_attention: bool = True,
    recompute: bool = True,
    offload_checkpoints: bool = False,
    cuda_graphs: graphs.Mode = "auto",
    padding_free: bool = True,
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
        sink_attention: as for `apply`.
        masked_attention: as for `apply`.
        causal_conv1d: as for `apply`.
        gated_delta_rule: as for `apply`.
        mamba2_scan: as for `apply`.
        lora_linear: as for `apply`.
        layer_norm: as for `apply`.
        gated_rms_norm: as for `apply`.
        chunked_attention: as for `apply`.
        recompute: as for `apply`.
        offload_checkpoints: as for `apply`.
        cuda_graphs: as for `apply`.
        padding_free: as for `apply`.

    Returns:
        The names of what was put in; an operator whose module the model lacks (a model without a language-model head
        has no loss) or overrides with code of its own is not among them.

    Raises:
        TypeError: where an operator's argument is neither True nor False, nor "auto" for cuda_graphs.
        ValueError: for a model in which there is nothing to replace.
        RuntimeError: where an operator that is asked for by its name cannot be put into the model, since its code is
            not known or other code has replaced it. Nothing is changed then.
    """
    chosen = _chosen("apply_to_model", locals())
    loading.transformers_version()
    core = _unwrapped(model)
    files = [file_of(name, classes) for name, classes in loading.classes_of(core).items()]
    found = _in_order_of_operators([site for file in files for site in sites(file, chosen)])
    wanted = {module: tuple(s for s in found if runs_stock(module, s)) for module in core.modules()}
    operators = {site.operator for fitting in wanted.values() for site in fitting}
    for operator in (name for name in chosen if name in _named.get()):
        reasons = reasons_for(files, operator)
        if operator not in operators or any(reason in file.replaced.values() for file in files for reason in reasons):
            raise _cannot("apply_to_model", operator, _model_type(core) or type(core).__name__, reasons)
    if chosen and not operators:
        raise ValueError(
            f"apply_to_model: no module of {type(core).__name__}, which has the model type {_model_type(core)!r}, runs "
            f"code that bastile knows, so there is nothing to replace"
        )
    methods: dict[Any, Any] = {}
    for module, fitting in wanted.items():
        if fitting or given_to(module):
            give(module, fitting, methods)
        if any(site.operator == "cuda_graphs" for site in fitting):
            graphs.of_models[module] = cuda_graphs
    if operators:
        _models.add(core)
    else:
        _models.discard(core)
    return _named_for(core, operators)


@reading()
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
    wanted = None if names is None else _parsed(names)
    with _lock:
        done: list[str] = []
        if model is None:
            done += _reset_process(wanted)
        own: dict[str, set[str]] = {}
        for core in list(_models) if model is None else [_unwrapped(model)]:
            own.setdefault(_model_type(core) or "", set()).update(_reset_model(core, wanted))
        for model_type in sorted(own):
            done += [name for name in _typed(model_type, own[model_type]) if name not in done]
        _forget()
        return done


def get_patched_ops(model: nn.Module | None = None) -> list[str]:
    """The names in force in the whole process: "rms_norm" for all types but those that follow by name, as in
    "rms_norm_qwen3". Given a model, what is in force in it, with its type: what one of its modules runs, from `apply`
    or from `apply_to_model`."""
    with _lock:
        if model is None:
            return [
                *(name for name in _everywhere if not _is_lost(name)),
                *(name for model_type in _types for name in _names_of(model_type)),
            ]
        core = _unwrapped(model)
        modules = list(core.modules())
        entries = [e for file in FILES.values() for several in file.applied.values() for e in several if e.is_called()]
        operators = {e.site.operator for e in entries if any(reaches(module, e.site) for module in modules)}
        operators.update(site.operator for module in modules for site in given_to(module))
        return _named_for(core, operators)


# ---- what is wanted --------------------------------------------------------------------------------------------------


def _chosen(function: str, arguments: dict[str, Any]) -> list[str]:
    """The operators whose arguments are True, but for those that need one that is not."""
    for operator in OPERATORS:
        value, auto = arguments.get(operator, False), ', or "auto",' if operator == "cuda_graphs" else ""
        if not isinstance(value, bool) and not (auto and value == "auto"):
            raise TypeError(
                f"{function}: {operator} is {value!r}; True or False{auto} is needed. Types of models are "
                f'given by keyword: apply(model_types=["qwen3"])'
            )
    return [
        name
        for name, operator in OPERATORS.items()
        if arguments.get(name, False) and all(arguments[needed] for needed in operator.needs)
    ]


def _modules_of(model_type: str, function: str) -> list[str]:
    """The modules of a type, imported."""
    try:
        names = loading.import_type(model_type)
    except ImportError as error:
        raise RuntimeError(
            f"transformers {loading.transformers_version()} lacks module {error.name} for {model_type}; nothing was "
            f"patched. Another release of bastile or of transformers helps"
        ) from error
    if not names:
        near = ", ".join(get_close_matches(model_type, loading.known_types(), 3, 0))
        raise ValueError(
            f"{function}: model type {model_type!r} is not supported; supported are: the types of transformers "
            f"{loading.transformers_version()}, such as {near}"
        )
    return names


def _wanted_in(title: str) -> tuple[str, ...]:
    """The operators that are to be in force in the modules of this title."""
    if loading.is_torchs(title):
        return _everywhere
    if loading.is_of_any_type(title):
        chosen = {*_everywhere, *(name for operators, _ in _types.values() for name in operators)}
        return tuple(name for name in OPERATORS if name in chosen)
    return next((operators for operators, titles in _types.values() if title in titles), _everywhere)


# ---- files -----------------------------------------------------------------------------------------------------------


def _serve_loaded(chosen: list[str]) -> None:
    """All that is imported."""
    names: dict[str, Iterable[type]] = dict.fromkeys([*FILES, *loading.model_files()], ())
    names.update(loading.other_classes())
    plans = [Plan.of(name, chosen, more) for name, more in names.items()]
    for operator in (name for name in chosen if name in _named.get()):
        if not any(plan.serves(operator) for plan in plans):
            # Every model file has a backbone, and other packages import files that nobody asked for, as PEFT does
            # Bloom's: one whose code is not known says nothing of the user's model, which may be imported later.
            reasons = reasons_for([plan.file for plan in plans], operator, unknown=operator not in OF_BACKBONES)
            if reasons:
                raise _cannot("apply", operator, "any model that is imported", reasons)
    carry_out(plans, "apply")


def _look(name: str, classes: Iterable[type]) -> None:
    """At a module that has just been imported, or whose classes a new model has."""
    with _lock, reading():
        plan = Plan.of(name, _wanted_in(ModelFile(name, None).title), classes)
        carry_out([plan], "apply")


@noting
def _what_nobody_knows() -> str | None:
    """Of a user's own code, or a checkpoint's; of Transformers' types `bastile support` tells, and of a release that is
    newer than any that was tried this does, too."""
    told = {
        f"{name}.{where} {why} ({operator})": name
        for name, entry in FILES.items()
        for operator in _wanted_in(entry.title)
        if name in sys.modules and operator not in OF_BACKBONES
        for where, why in entry.unknown.get(operator, {}).items()
        if not any(applied.site.where == where for applied in entry.applied.get(operator, ()))
    }
    if not told:
        return None
    said = f"stays as it is: {'; '.join(told)}"
    if any(map(loading.is_untried, told.values())):
        said += (
            f". Transformers {loading.transformers_version()} is newer than {loading.NEWEST}, the last that this "
            f"Bastile was tried with, where some of this may have been served: another release of Bastile helps"
        )
    return said


_watch = loading.Watch(_look)


def _watch_if_needed() -> None:
    if _everywhere or any(operators for operators, _ in _types.values()):
        _watch.start()
    else:
        _watch.stop()


# ---- what cannot be served -------------------------------------------------------------------------------------------


def _need(plans: list[Plan], operators: Collection[str], where: str) -> None:
    """That each of these operators has a place in types that are given by name, and others have not taken it."""
    files = [plan.file for plan in plans]
    for operator in (name for name in OPERATORS if name in operators):
        reasons = reasons_for(files, operator)
        others = [reason for file in files for reason in file.replaced.values()]
        if not any(plan.serves(operator) for plan in plans) or any(reason in others for reason in reasons):
            raise _cannot("apply", operator, where, reasons)


def _cannot(function: str, operator: str, where: str, reasons: list[str]) -> RuntimeError:
    why = "; ".join(reasons) or "it has no code that looks like it"
    return RuntimeError(
        f"{function}: transformers {loading.transformers_version()} has no place for bastile's {operator} in {where}: "
        f"{why}; nothing was patched. Undoing what others have done, another release of bastile or of transformers, or "
        f"leaving this operator out with {operator}=False, helps"
    )


# ---- taking out ------------------------------------------------------------------------------------------------------


def _parsed(names: Iterable[str]) -> list[tuple[str, str, str | None]]:
    """Each name, the operator that it names, and the type, where there is one."""
    return [_parse(name) for name in ([names] if isinstance(names, str) else names)]


def _parse(name: str) -> tuple[str, str, str | None]:
    if name in OPERATORS:
        return name, name, None
    for operator in sorted(OPERATORS, key=len, reverse=True):
        model_type = name.removeprefix(f"{operator}_")
        if model_type == name:
            continue
        own = any(_model_type(core) == model_type for core in _models)
        if own or (model_type in _types and operator in _places(model_type)):
            return name, operator, model_type
        try:
            modules = loading.import_type(model_type)
        except ImportError:
            modules = []
        if any(Plan.of(module, [operator]).serves(operator) for module in modules):
            return name, operator, model_type
    known = ", ".join([*OPERATORS, *(f"{operator}_{kind}" for kind in _types for operator in _places(kind))])
    raise ValueError(f"reset: unknown patch {name!r}; known are: {known}, and with each type what has a place in it")


def _reset_process(wanted: list[tuple[str, str, str | None]] | None) -> list[str]:
    """Takes these out of classes and modules; the names of what was in force."""
    global _everywhere
    done: list[str] = []
    if wanted is None:
        done = [*_everywhere, *(name for kind in _types for name in _typed(kind, set(_places(kind))))]
        _everywhere = ()
        _types.clear()
    for name, operator, model_type in wanted or ():
        if model_type is None:
            if any(entry.has(operator) for entry in FILES.values()) or operator in _everywhere:
                done.append(name)
            _everywhere = tuple(op for op in _everywhere if op != operator)
            for each, (operators, titles) in _types.items():
                _types[each] = tuple(op for op in operators if op != operator), titles
            continue
        if model_type not in _types:
            _types[model_type] = _everywhere, frozenset(map(_title, loading.import_type(model_type)))
        operators, titles = _types[model_type]
        if operator in operators:
            done.append(name)
            _types[model_type] = tuple(op for op in operators if op != operator), titles
    for entry in FILES.values():
        staying = _wanted_in(entry.title)
        take_out(entry, [op for op in entry.applied if op not in staying], "reset")
    _watch_if_needed()
    return done


def _title(name: str) -> str:
    return ModelFile(name, None).title


def _reset_model(core: nn.Module, wanted: list[tuple[str, str, str | None]] | None) -> set[str]:
    """Takes these out of a model; the operators that were there."""
    out = None if wanted is None else {op for _, op, kind in wanted if kind in (None, _model_type(core))}
    methods: dict[Any, Any] = {}
    done: set[str] = set()
    for module in core.modules():
        given = given_to(module)
        staying = tuple(site for site in given if out is not None and site.operator not in out)
        if len(staying) < len(given):
            give(module, staying, methods)
            done.update(site.operator for site in given if site not in staying)
    if not any(given_to(module) for module in core.modules()):
        _models.discard(core)
    return done


# ---- names -----------------------------------------------------------------------------------------------------------


def _is_lost(operator: str) -> bool:
    """Whether an operator has had places, and others have replaced it in all of them."""
    places = [file for file in FILES.values() if operator in file.applied]
    return bool(places) and not any(file.has(operator) for file in places)


def _places(model_type: str) -> list[str]:
    """The operators that have a place in this type, which is one of _types."""
    _, titles = _types[model_type]
    files = [file for file in FILES.values() if file.title in titles]
    return [operator for operator in OPERATORS if any(operator in file.applied for file in files)]


def _names_of(model_type: str) -> list[str]:
    """What is in force in a type that is one of _types."""
    operators, titles = _types[model_type]
    files = [file for file in FILES.values() if file.title in titles]
    return _typed(model_type, {op for op in operators if any(file.has(op) for file in files)})


def _typed(model_type: str, operators: set[str]) -> list[str]:
    return [f"{name}_{model_type}" if model_type else name for name in OPERATORS if name in operators]


def _named_for(core: nn.Module, operators: set[str]) -> list[str]:
    return _typed(_model_type(core) or "", operators)


def _in_order_of_operators(found: list[Site]) -> list[Site]:
    order = list(OPERATORS)
    return sorted(found, key=lambda site: order.index(site.operator))


def _model_type(model: Any) -> str | None:
    return getattr(getattr(model, "config", None), "model_type", None)


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
