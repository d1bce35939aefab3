"""The implementations of whole models, each prepared in a process of its own, so that nothing has to be undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


class CannotRun(Exception):
    """This implementation is not here, or does not know the model; the message says which."""


def _nothing(model_type: str) -> list[str]:
    return []


def _liger(**chosen: bool) -> Callable[[str], list[str]]:
    def apply(model_type: str) -> list[str]:
        try:
            from liger_kernel import transformers as liger
        except ImportError as error:
            raise CannotRun(f"Liger-Kernel cannot be imported ({error}): pip install liger-kernel") from error
        name = f"apply_liger_kernel_to_{model_type}"
        patch = getattr(liger, name, None)
        if patch is None:
            raise CannotRun(f"this Liger-Kernel has no {name}")
        patch(**chosen)
        return [name, *(f"{key}={value}" for key, value in chosen.items())]

    return apply


def _bastile(model_type: str) -> list[str]:
    import bastile

    try:
        return bastile.apply(model_types=[model_type])
    except ValueError as error:
        raise CannotRun(f"Bastile does not know the model type {model_type}") from error


def _in_a_trainer(model_type: str) -> list[str]:
    raise CannotRun("it is measured in a trainer alone: give --trainer")


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


def _compile(model: nn.Module) -> Any:
    return torch.compile(model, dynamic=False)


def _compile_with_graphs(model: nn.Module) -> Any:
    return torch.compile(model, mode="reduce-overhead", dynamic=False)


def _compile_layers(model: Any) -> nn.Module:
    """Each decoder layer by itself, one compiled code for all, and the loss. The usual form for training."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    model.model.norm.compile(dynamic=False)
    model.loss_function = torch.compile(model.loss_function, dynamic=False)
    return model


@dataclass(frozen=True)
class Implementation:
    meaning: str
    title: str  #: in the documents' tables
    colour: str  #: in plots
    #: Before the model is built; returns what it put in. CannotRun where it cannot.
    patch: Callable[[str], list[str]] = _nothing
    #: After the model is built.
    wrap: Callable[[nn.Module], nn.Module] = _as_it_is
    environment: dict[str, str] = field(default_factory=dict)  #: what its process is started with


#: First what others are compared with, Bastile last.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "hf": Implementation("Transformers as it is", "Transformers", "#888888"),
    "compile": Implementation("torch.compile of the whole model", "torch.compile", "#e0a030", wrap=_compile),
    "compile-graphs": Implementation(
        "torch.compile of the whole model with CUDA graphs (reduce-overhead)",
        "torch.compile, CUDA graphs",
        "#b08040",
        wrap=_compile_with_graphs,
    ),
    "compile-layers": Implementation(
        "torch.compile of each layer, and of the loss", "torch.compile, each layer", "#c06020", wrap=_compile_layers
    ),
    "liger": Implementation("Liger-Kernel, everything it offers by default", "Liger-Kernel", "#7a5bb0", _liger()),
    "liger-nofused": Implementation(
        "Liger-Kernel with its cross-entropy in place of its fused linear one",
        "Liger-Kernel, loss not fused",
        "#a98fd0",
        _liger(fused_linear_cross_entropy=False, cross_entropy=True),
    ),
    "liger-cute": Implementation(
        "Liger-Kernel's CuTe operators",
        "Liger-Kernel (CuTe)",
        "#d060a0",
        _liger(),
        environment={"LIGER_KERNEL_IMPL": "cutedsl"},
    ),
    "unsloth": Implementation("Unsloth, with --trainer and --lora", "Unsloth", "#3fa0a0", _in_a_trainer),
    "bastile-compile": Implementation(
        "torch.compile of the whole patched model", "Bastile, compiled", "#3f7fbf", _bastile, _compile
    ),
    "bastile": Implementation("Bastile, everything", "**Bastile**", "#1b7f4d", _bastile),
}

#: Without --against; Bastile itself is always there.
ON_CUDA = ("hf", "compile", "compile-layers", "liger", "liger-nofused")
ON_CPU = ("hf",)
CURVES_ON_CUDA = ("hf", "compile", "liger")
#: In a trainer, which compiles by itself.
TRAINED = ("hf", "compile", "liger")
#: The compiler does not see through the hooks of sharded layers.
SHARDED = ("hf", "liger")
