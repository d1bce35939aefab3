"""The forward of a decoder layer, in which each norm is one operator with what surrounds it.

The first norm's backward pass also adds the gradient that went past the norm; the second norm takes in the addition of
the residual before it. The last addition stays the layer's own: to give it to the next layer's norm, a layer would have
to return two tensors, and hooks, checkpointing and output_hidden_states would see the difference."""

import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bastile.models.checkpoints import runs_again, watched
from bastile.models.norm import Norm, norm_of, norms_of
from bastile.models.rebind import parameter_names
from bastile.models.sites import Found, ModelFile, Site
from bastile.ops.rms_norm import add_rms_norm
from bastile.report import Tally


def sites(file: ModelFile) -> Iterator[Site]:
    norms = tuple(norm for norm in norms_of(file) if not norm.is_of_one_type)
    for found in file.forwards("layer"):
        if not norms:
            file.unknown[f"{found.name}.forward"] = "has no norm whose code is known"
            return
        # The wrapper checkpoints the layer, and asks whether it is the class's own.
        site = file.wrapped_site("add_rms_norm", found.owner, partial(layer_forward, found, norms))
        if site is not None:
            yield site


def layer_forward(
    found: Found, norms: tuple[Norm, ...], tally: Tally, original: Callable[..., Any]
) -> Callable[..., Any]:
    """norms: those that the layer may hold, as Transformers has them."""
    attributes, is_tuple = found.names, found.form.variant["is_tuple"]
    input_norm, attention = attributes["input_norm"], attributes["attention"]
    attention_norm, mlp = attributes["attention_norm"], attributes["mlp"]
    after_attention, after_mlp = attributes.get("after_attention"), attributes.get("after_mlp")
    names = parameter_names(original)
    parameters = inspect.signature(original).parameters
    defaults = {name: parameters[name].default for name in names[1:]}

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        before, between = getattr(self, input_norm), getattr(self, attention_norm)
        first, second = norm_of(before, norms), norm_of(between, norms)
        if first is None or second is None:
            tally.step_aside("a norm of the layer has hooks, a forward of its own, or code that is not known")
            return original(self, *args, **kwargs)
        if len(args) > len(names) or names[0] not in given:
            return original(self, *args, **kwargs)
        tally.count()
        if runs_again(given[names[0]]):
            with watched(given[names[0]]):
                return run(self, before, between, first, second, given)
        return run(self, before, between, first, second, given)

    def run(self: Any, before: Any, between: Any, first: Norm, second: Norm, given: dict[str, Any]) -> Any:
        x, residual = _add_norm(first, before, given.pop(names[0]), None)
        x, _ = getattr(self, attention)(hidden_states=x, **given)
        if after_attention is not None:
            x = getattr(self, after_attention)(x)
        x, residual = _add_norm(second, between, x, residual)
        x = getattr(self, mlp)(x)
        if is_tuple:
            x = x[0]
        return residual + (x if after_mlp is None else getattr(self, after_mlp)(x))

    return forward


def _add_norm(norm: Norm, module: Any, x: Any, residual: Any) -> Any:
    return add_rms_norm(x, residual, norm.weight_of(module), getattr(module, norm.eps), casting=norm.casting)
