"""The forward of a model's backbone, which records less than autograd asks for: see bastile.recompute."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from bastile.guards import stock_of
from bastile.models.adapters import has_run
from bastile.models.rebind import as_keywords, parameter_names
from bastile.models.sdpa import making
from bastile.models.sites import ModelFile, Site, calls
from bastile.recompute import min_tokens, recomputing
from bastile.report import Tally


def sites(file: ModelFile) -> Iterator[Site]:
    """Whatever such a forward computes it still computes: the original runs within, and records less."""
    for cls in backbones(file):
        yield file.forward_site("recompute", cls, backbone_forward)


def backbones(file: ModelFile) -> Iterator[type]:
    """The classes whose forward takes tokens through layers."""
    for cls in file.own_classes():
        forward = stock_of(vars(cls)["forward"])
        names = parameter_names(forward) if inspect.isfunction(inspect.unwrap(forward)) else ()
        if {"input_ids", "inputs_embeds"}.issubset(names) and calls(forward, "layers"):
            yield cls
        elif cls.__name__.endswith("Model"):
            # Whatever its code: what runs the layers need not be known.
            file.unknown[f"{cls.__name__}.forward"] = "does not itself take input_ids or inputs_embeds through layers"


def backbone_forward(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    names = parameter_names(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        has_run(self)
        given = as_keywords(names, args, kwargs)
        is_small = _tokens(given) < min_tokens()
        if is_small or _is_partitioned(self):
            why = "so few tokens that it would save little memory" if is_small else "its weights are ZeRO-3's"
            tally.step_aside(why, is_usual=True)
            return original(self, *args, **kwargs)
        tally.count()
        with recomputing(_last_of(self)):
            return original(self, *args, **kwargs)

    return forward


def _last_of(model: nn.Module) -> Iterable[nn.Module]:
    """The modules of its last layer."""
    layers = model._modules.get("layers")
    return layers[-1].modules() if isinstance(layers, nn.ModuleList) and len(layers) > 1 else ()


def _tokens(given: dict[str, Any]) -> int:
    if making.packed is not None:  # as it came: what leaves out padding is to take no more memory than what does not
        return making.packed.tokens
    ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    if torch.is_tensor(ids):
        return ids.numel()
    return embeddings.shape[:-1].numel() if torch.is_tensor(embeddings) else 0


def _is_partitioned(model: nn.Module) -> bool:
    """Whether ZeRO-3 has the weights: a norm's is whole only while the norm itself runs, too late for what its output
    is recomputed for."""
    return hasattr(next(model.parameters(), None), "ds_id")
