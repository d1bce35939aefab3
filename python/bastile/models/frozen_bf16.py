"""Frozen weights of float32 that bfloat16 holds exactly, kept in it while a Trainer trains under autocast to it.

Who names a model and nothing else has it loaded in float32 by TRL, though nearly all checkpoints are of bfloat16. With
adapters its weights stay what they are, and autocast rounds them for each product, in each pass, to what the checkpoint
had. Kept as that, they take half of the memory and are read as they are. No bit of a result changes, and behind the
training they are float32 again, with the bits that they had.

A weight that anything but its layer's own call may read stays: see `_layers`. Outside autocast a layer multiplies by
its weight in float32, made for that call (bastile.models.linear); before adapters are merged into a weight it is
float32 again. What an embedding has read becomes float32. The weight of an output head, which losses read,
Transformers', TRL's and ours, they read in autocast's type or as float32."""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from bastile.guards import is_ours, mark_as_ours
from bastile.models.adapters import has_adapter
from bastile.models.optimizer import TRAINER
from bastile.models.readers import asks_for_types, files_of, files_of_models, may_read_ends, reads
from bastile.models.sites import ModelFile, Site
from bastile.ops._modules import plain_linear
from bastile.ops._narrow import Weighted, is_lookup, is_narrowed, narrow, widen
from bastile.ops._room import give_back
from bastile.report import Tally

#: Of a trainer, where it has models that it does not train.
_REFERENCES = ("ref_model", "teacher_model")
_BEGIN = "on_train_begin"  # of its callbacks: the models are prepared, and no step has been
_DEVICES = frozenset({"cpu", "cuda"})
_AT_ONCE = 1 << 24  # numbers: 80 MiB where they are looked at
_LAYERS, _TUNERS, _UNLOAD = "peft.tuners.lora.layer", "peft.tuners.tuners_utils", "_unload_and_optionally_merge"

_log = logging.getLogger("bastile")


def sites(file: ModelFile) -> Iterator[Site]:
    cls = file.scope.get("Trainer")
    if file.name == TRAINER and isinstance(cls, type) and "train" in vars(cls):
        made = partial(_train, Tally.of("frozen_bf16", f"{TRAINER}.Trainer"))
        yield Site("frozen_bf16", "Trainer.train", cls, "train", made, (), made)
    for found in file.forwards("adapted linear"):
        if "merge" in vars(found.owner):
            yield Site("frozen_bf16", f"{found.name}.merge", found.owner, "merge", _merge, (), _merge)
    tuner = getattr(sys.modules.get(_TUNERS), "BaseTuner", None) if file.name == _LAYERS else None
    if hasattr(tuner, _UNLOAD):
        yield Site("frozen_bf16", f"BaseTuner.{_UNLOAD}", tuner, _UNLOAD, _unload, (), _unload)


def _merge(original: Any) -> Any:
    """Of PEFT's layers: adds to the weight of the layer beneath."""

    @functools.wraps(original)
    def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
        layer = self._modules.get("base_layer")
        if isinstance(layer, nn.Linear):
            widen(layer)
        return original(self, *args, **kwargs)

    return mark_as_ours(merge)


def _unload(original: Any) -> Any:
    """Of PEFT's models: hands out the model beneath."""

    @functools.wraps(original)
    def unload(self: Any, *args: Any, **kwargs: Any) -> Any:
        for module in self.model.modules():
            widen(module)
        return original(self, *args, **kwargs)

    return mark_as_ours(unload)


def _train(tally: Tally, original: Any) -> Any:
    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        handler = self.callback_handler
        reason = _why_not(self)
        if reason is not None or _BEGIN in vars(handler):
            tally.step_aside(reason or "its callbacks are called by other code", is_usual=True)
            return original(self, *args, **kwargs)
        narrowed: list[Weighted] = []

        def begin(*given: Any, **named: Any) -> Any:
            narrowed.extend(_narrowed(self))
            if narrowed:
                give_back()  # pieces as large as weights are, which no step asks for
            return getattr(type(handler), _BEGIN)(handler, *given, **named)

        setattr(handler, _BEGIN, begin)
        try:
            return original(self, *args, **kwargs)
        finally:
            if vars(handler).get(_BEGIN) is begin:
                delattr(handler, _BEGIN)
            if narrowed:
                tally.count()
            _end(narrowed)

    return train


def _why_not(trainer: Any) -> str | None:
    args = trainer.args
    if trainer.accelerator.mixed_precision != "bf16":
        return "it does not train under autocast to bfloat16"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return "FSDP or DeepSpeed has the weights"
    if args.bf16_full_eval or args.fp16_full_eval:
        return "evaluation casts the whole model"
    if args.torch_compile:
        return "torch.compile compiles the model"
    return None if is_ours(nn.Linear.forward) else "nn.Linear runs code of others"


def _narrowed(trainer: Any) -> Iterator[Weighted]:
    """Each layer whose weight is now in bfloat16."""
    are_seen = any(map(may_read_ends, (trainer, *trainer.callback_handler.callbacks)))
    for model, is_frozen in _models_of(trainer):
        for layer in _layers(model, is_frozen):
            if _is_exact(layer.weight):
                narrow(layer)
                yield layer
        for layers in () if are_seen else _ends(model, is_frozen):
            if _is_exact(layers[0].weight):
                for end in layers:
                    narrow(end)
                    yield end


_IsFrozen = Callable[[nn.Parameter], bool]


def _models_of(trainer: Any) -> Iterator[tuple[nn.Module, _IsFrozen]]:
    """Models of which weights may be frozen, and what tells it. One that is trained without adapters is left alone, for
    it is saved as it is."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    is_adapted = kind is not None and isinstance(trainer.model, kind)
    if is_adapted or getattr(trainer.model, "_hf_peft_config_loaded", False):  # Transformers' own add_adapter
        yield trainer.model, _asks_for_no_gradient
    if getattr(trainer.args, "sync_ref_model", False):
        return  # a part of the policy's weights is added to the reference's as they lie
    groups = () if trainer.optimizer is None else trainer.optimizer.param_groups
    trained = frozenset(id(p) for group in groups for p in group["params"])
    for name in _REFERENCES:
        model = getattr(trainer, name, None)
        if isinstance(model, nn.Module) and model is not trainer.model:
            yield model, lambda p: id(p) not in trained and p.grad is None


def _asks_for_no_gradient(p: nn.Parameter) -> bool:
    return not p.requires_grad


def _layers(model: nn.Module, is_frozen: _IsFrozen) -> Iterator[nn.Linear]:
    """The layers of a model whose weights nobody reads but their own call."""
    modules = list(model.modules())
    parameters, children = _counted(modules)
    heads = set(map(id, _asked_of(modules, "get_output_embeddings")))
    # PEFT's modules hand on what they are around, its weight too: a layer with adapters is seen from without.
    for owner in (module for module in modules if not _is_pefts(module)):
        for name, child in owner._modules.items():
            if child is None or children[id(child)] != 1 or id(child) in heads:
                continue
            layer = _layer_of(child) if has_adapter(child) else child
            if type(layer) is not nn.Linear or children[id(layer)] != 1:
                continue
            weight: Any = layer._parameters.get("weight")
            if not _is_whole(layer) or parameters[id(weight)] != 1 or not is_frozen(weight):
                continue
            kind: Any = type(owner)
            if not issubclass(kind, (nn.ModuleList, nn.ModuleDict)) and not reads(files_of(kind), {name}):
                yield layer  # else by number, or by this name


def _ends(model: nn.Module, is_frozen: _IsFrozen) -> Iterator[list[Weighted]]:
    """The embeddings of a model and its output heads, each alone or with what shares its weight. No code of the model
    reads that weight, nor goes by the type of a model's first weight, which an embedding's is."""
    modules = list(model.modules())
    paths: dict[int, list[list[str]]] = {}  # all ways to a module
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path.split("."))
    of_peft = {id(child) for module in modules if _is_pefts(module) for child in module._modules.values()}
    files = {file for kind in {type(m) for m in modules if not _is_pefts(m)} for file in files_of_models(kind)}
    found: dict[int, list[Any]] = {}  # by weight
    for end in dict.fromkeys((*filter(is_lookup, modules), *_asked_of(modules, "get_output_embeddings"))):
        if id(end) in paths and id(end) not in of_peft and (is_lookup(end) or type(end) is nn.Linear):
            found.setdefault(id(end.weight), []).append(end)
    parameters, _ = _counted(modules)
    for weight, ends in found.items():
        if parameters[weight] != len(ends) or not all(map(_is_whole, ends)) or not is_frozen(ends[0].weight):
            continue
        names = {path[-1] for end in ends for path in paths[id(end)]}
        ways = {name for end in ends if is_lookup(end) for path in paths[id(end)] for name in path}
        if not reads(files, names) and not (ways and asks_for_types(files, {"self", *ways})):
            yield ends


def _is_pefts(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.")


def _counted(modules: list[nn.Module]) -> tuple[Counter[int], Counter[int]]:
    """How many modules have a parameter, and a child, of this id."""
    parameters = Counter(id(p) for module in modules for p in module._parameters.values())
    return parameters, Counter(id(child) for module in modules for child in module._modules.values())


def _asked_of(modules: list[nn.Module], method: str) -> Iterator[Any]:
    for module in modules:
        if hasattr(module, method):
            try:
                yield getattr(module, method)()
            except Exception:  # of users' models, which need not have one
                continue


def _is_whole(layer: Any) -> bool:
    """Whether its weight is float32, plain, in memory of its own, and all that its call reads of."""
    weight = layer._parameters.get("weight")
    return (
        (is_lookup(layer) or plain_linear(layer, with_bias=True))
        and weight is not None
        and type(weight.data) is torch.Tensor
        and weight.dtype is torch.float32
        and weight.device.type in _DEVICES
        and weight.untyped_storage().nbytes() == weight.nbytes > 0
    )


def _layer_of(adapted: Any) -> nn.Linear | None:
    """What one of PEFT's layers is around, if it reads it as a layer alone, or merges into it."""
    layer = adapted._modules.get("base_layer")
    is_usual = not (adapted.merged or adapted.lora_variant) and is_ours(type(adapted).merge)
    return layer if is_usual and type(layer) is nn.Linear else None


def _is_exact(weight: torch.Tensor) -> bool:
    """Whether bfloat16 loses no bit of it."""
    pieces = weight.data.view(torch.int32).view(-1).split(_AT_ONCE)
    return not any(bool((piece & 0xFFFF).any()) for piece in pieces)


def _end(narrowed: list[Weighted]) -> None:
    since = _AT_ONCE  # numbers that became float32 since memory went back: pieces of half their size fit none of them
    try:
        for layer in narrowed:
            if since >= _AT_ONCE:
                give_back()
                since = 0
            widen(layer)
            since += layer.weight.numel()
    except torch.OutOfMemoryError:
        _log.warning(
            "frozen_bf16: there is no memory for %d weights in float32; they stay in bfloat16, which has the same "
            "numbers, and need bastile.apply() to be in force",
            sum(map(is_narrowed, narrowed)),
        )
