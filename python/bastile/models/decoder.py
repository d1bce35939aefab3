"""The forward of a decoder layer, in which each norm is one operator with what surrounds it.

The first norm's backward pass also adds the gradient that went past the norm; the second norm takes in the addition of
the residual before it. The last addition stays the layer's own: to give it to the next layer's norm, a layer would have
to return two tensors, and hooks, checkpointing and output_hidden_states would see the difference."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from bastile.guards import runs
from bastile.models.rebind import parameter_names
from bastile.models.table import Family
from bastile.ops.rms_norm import add_rms_norm

INPUT_NORM, ATTENTION, ATTENTION_NORM, MLP = "input_layernorm", "self_attn", "post_attention_layernorm", "mlp"

#: All that the original's code may mention, so that nothing it computes is left out.
READS = (INPUT_NORM, ATTENTION, ATTENTION_NORM, MLP)

#: The arguments it may name. All but the first go to the attention by the same names.
ARGUMENTS = (
    "hidden_states",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "cache_position",
    "position_embeddings",
)


def layer_forward(family: Family, norm: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """norm: the forward of the family's norm as Transformers has it."""
    eps, casting, is_tuple = family.norm_eps, family.norm_casting, family.layer_mlp_is_tuple
    names = parameter_names(original)
    parameters = inspect.signature(original).parameters
    defaults = {name: parameters[name].default for name in names[1:]}

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        before, between = getattr(self, INPUT_NORM), getattr(self, ATTENTION_NORM)
        if len(args) > len(names) or names[0] not in given or not runs(before, norm) or not runs(between, norm):
            return original(self, *args, **kwargs)
        x, residual = add_rms_norm(given.pop(names[0]), None, before.weight, getattr(before, eps), casting=casting)
        x, _ = getattr(self, ATTENTION)(hidden_states=x, **given)
        x, residual = add_rms_norm(x, residual, between.weight, getattr(between, eps), casting=casting)
        x = getattr(self, MLP)(x)
        return residual + (x[0] if is_tuple else x)

    return forward
