"""Frozen weights of float32 that bfloat16 holds exactly, kept in it while a Trainer trains under autocast to it.

Who names a model and nothing else has it loaded in float32 by TRL, though nearly all checkpoints are of bfloat16. With
adapters its weights stay what they are, and autocast rounds them for each product, in each pass, to what the checkpoint
had. Kept as that, they take half of the memory and are read as they are. No bit of a result changes, and behind the
training they are float32 again, with the bits that they had.

A weight that anything but its layer's own call may read stays: see `_layers`. Outside autocast a layer multiplies by
its weight in float32, made for that call (bastile.models.linear); before adapters are merged into a weight it is
float32 again."""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import re
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
from bastile.models.sites import ModelFile, Site
from bastile.ops._modules import is_narrowed, narrow, plain_linear, widen
from bastile.report import Tally

#: Of a trainer, where it has models that it does not train.
_REFERENCES = ("ref_model", "teacher_model")
_BEGIN = "on_train_begin"  # of its callbacks: the models are prepared, and no step has been
_DEVICES = frozenset({"cpu", "cuda"})

_log = logging.getLogger("bastile")


def sites(file: ModelFile) -> Iterator[Site]:
    cls = file.scope.get("Trainer")
    if file.name == TRAINER and isinstance(cls, type) and "train" in vars(cls):
        made = partial(_train, Tally.of("frozen_bf16", f"{TRAINER}.Trainer"))
        yield Site("frozen_bf16", "Trainer.train", cls, "train", made, (), made)
    for found in file.forwards("adapted linear"):
        if "merge" in vars(found.owner):
            yield Site("frozen_bf16", f"{found.name}.merge", found.owner, "merge", _merge, (), _merge)


def _merge(original: Any) -> Any:
    """Of PEFT's layers: adds to the weight of the layer beneath."""

    @functools.wraps(original)
    def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
        layer = self._modules.get("base_layer")
        if isinstance(layer, nn.Linear):
            widen(layer)
        return original(self, *args, **kwargs)

    return mark_as_ours(merge)


def _train(tally: Tally, original: Any) -> Any:
    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        handler = self.callback_handler
        reason = _why_not(self)
        if reason is not None or _BEGIN in vars(handler):
            tally.step_aside(reason or "its callbacks are called by other code", is_usual=True)
            return original(self, *args, **kwargs)
        narrowed: list[nn.Linear] = []

        def begin(*given: Any, **named: Any) -> Any:
            narrowed.extend(_narrowed(self))
            if narrowed:
                _give_back()
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


def _narrowed(trainer: Any) -> Iterator[nn.Linear]:
    """Each layer whose weight is now in bfloat16."""
    for model, is_frozen in _models_of(trainer):
        for layer in _layers(model, is_frozen):
            if _narrow_exactly(layer):
                yield layer


def _give_back() -> None:
    """Memory in pieces as large as weights are, which no step asks for; or as activations are, which no weight does."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


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
    parameters = Counter(id(p) for module in modules for p in module._parameters.values())
    children = Counter(id(child) for module in modules for child in module._modules.values())
    heads = {id(_head_of(module)) for module in modules if hasattr(module, "get_output_embeddings")}
    # PEFT's modules hand on what they are around, its weight too: a layer with adapters is seen from without.
    for owner in (module for module in modules if not type(module).__module__.startswith("peft.")):
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
            if not _is_read(kind, name):
                yield layer


def _head_of(model: Any) -> Any:
    """Losses read its weight."""
    try:
        return model.get_output_embeddings()
    except Exception:  # of users' models, which need not have one
        return None


def _is_whole(layer: nn.Linear) -> bool:
    """Whether its weight is float32, plain, and in memory of its own."""
    weight = layer._parameters.get("weight")
    return (
        plain_linear(layer, with_bias=True)
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


def _is_read(owner: type, name: str) -> bool:
    """Whether code beside a class that has a layer by this name reads that layer's weight, or may."""
    if issubclass(owner, (nn.ModuleList, nn.ModuleDict)):
        return True  # layers by number
    files = {kind.__module__ for kind in owner.__mro__ if not kind.__module__.startswith(("torch.", "builtins"))}
    return any((read := _read_in(file)) is None or name in read for file in files)


@functools.lru_cache(maxsize=256)
def _read_in(file: str) -> frozenset[str] | None:
    """What a file's code calls the layers whose weights it reads, but for what gives models their first weights; None:
    it cannot be seen."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[file]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return None
    return frozenset(_owners_of_weights(tree))


def _owners_of_weights(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef(name="_init_weights"):
                continue
            case ast.Attribute(attr="weight" | "parameters", value=ast.Name(id=name) | ast.Attribute(attr=name)):
                yield name
            case ast.Constant(value=str(text)):
                yield from re.findall(r"(\w+)\.weight\b", text)
        yield from _owners_of_weights(node)


def _narrow_exactly(layer: nn.Linear) -> bool:
    """Unless that would lose a bit."""
    if bool((layer.weight.data.view(torch.int32) & 0xFFFF).any()):  # what float32 has and bfloat16 has not
        return False
    narrow(layer)
    return True


def _end(narrowed: list[nn.Linear]) -> None:
    if narrowed:
        _give_back()
    try:
        for layer in narrowed:
            widen(layer)
    except torch.OutOfMemoryError:
        _log.warning(
            "frozen_bf16: there is no memory for %d weights in float32; they stay in bfloat16, which has the same "
            "numbers, and need bastile.apply() to be in force",
            sum(map(is_narrowed, narrowed)),
        )
