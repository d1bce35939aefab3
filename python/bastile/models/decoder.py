"""The forward of a decoder layer, or of any module that adds and norms, in which each norm is one operator with what
surrounds it.

A norm of a sum takes in the addition; of a norm whose input goes on beside it, the backward pass adds the gradient that
went past it. The last addition stays the layer's own: to give it to the next layer's norm, a layer would have to return
two tensors, and hooks, checkpointing and output_hidden_states would see the difference. A norm whose result is added,
as behind OLMo 2's attention, takes in that addition."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling

from bastile.models import rewrite
from bastile.models.checkpoints import is_checkpointed, runs_again, watched
from bastile.models.forms import Code
from bastile.models.norm import Norm, norm_of, norms_of, pays_with_sum, torch_norms
from bastile.models.sites import ModelFile, Site
from bastile.ops import _rounding
from bastile.ops.norm import add_layer_norm, layer_norm
from bastile.ops.rms_norm import add_rms_norm, rms_norm_add
from bastile.report import Tally


def sites(file: ModelFile) -> Iterator[Site]:
    norms = norms_of(file)
    classes = list(file.own_classes())
    names = {cls.__name__ for cls in classes} | file.replaced.keys()
    if norms == torch_norms() and any(name.endswith("Norm") for name in names):
        return  # its norms are its own, and of code that is not known, or another package's
    for cls in classes:
        read = file.read(cls, rewrite.add_norms)
        if read is not None:
            # The wrapper checkpoints the layer, and asks whether it is the class's own.
            yield from file.wrapped_sites("add_rms_norm", cls, partial(layer_forward, *read, norms))


_TOUCHED = "a norm of the layer has hooks, a forward of its own, or code that is not known"


def layer_forward(
    code: Code, node: Any, norms: tuple[Norm, ...], tally: Tally, original: Callable[..., Any]
) -> Callable[..., Any]:
    """norms: those that the layer may hold, as Transformers has them."""

    def add_norm(module: Any, x: Any, residual: Any) -> tuple[Any, Any]:
        """The norm of the sum, and the sum."""
        norm = norm_of(module, norms)
        if norm is None:
            tally.step_aside(_TOUCHED)
        elif (residual is None or _are_alike(x, residual)) and pays_with_sum(norm, module, x):
            why = norm.refuses(module, x, residual)
            if why is None:
                tally.count()
                return _at_once(norm, module, x, residual)
            tally.step_aside(why)
        total = x if residual is None else x + residual
        return module(total), total

    def norm_add(module: Any, x: Any, residual: Any) -> Any:
        """The sum of the residual and the norm."""
        norm = norm_of(module, norms)
        if norm is None:
            tally.step_aside(_TOUCHED)
        elif norm.casting is not None and _are_alike(x, residual):
            why = norm.refuses(module, x)
            if why is None:
                tally.count()
                return rms_norm_add(x, residual, norm.weight_of(module), norm.eps_of(module), casting=norm.casting)
            tally.step_aside(why)
        return residual + module(x)

    helpers = {rewrite.ADD_NORM: add_norm, rewrite.NORM_ADD: norm_add}
    at_once = rewrite.rewritten(node, code, original, helpers)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return at_once(self, *args, **kwargs)
        x = args[0] if args else None
        if isinstance(x, torch.Tensor) and runs_again(x) and is_checkpointed(self):
            with watched(x), _running(self):
                return at_once(self, *args, **kwargs)
        with _running(self):
            return at_once(self, *args, **kwargs)

    return forward


_nothing = nullcontext()


def _running(layer: Any) -> AbstractContextManager[None]:
    return _rounding.together(layer) if _rounding.in_use else _nothing


def _are_alike(x: Any, residual: Any) -> bool:
    return isinstance(x, torch.Tensor) and isinstance(residual, torch.Tensor) and x.shape == residual.shape


def _at_once(norm: Norm, module: Any, x: Any, residual: Any) -> tuple[Any, Any]:
    weight, eps = norm.weight_of(module), norm.eps_of(module)
    if norm.casting is not None:
        return add_rms_norm(x, residual, weight, eps, casting=norm.casting)
    given = weight, norm.bias_of(module), eps
    if residual is None:
        return layer_norm(x, *given, float32_output=norm.autocasts(x)), x
    return add_layer_norm(x, residual, *given, float32_output=norm.autocasts(x))
