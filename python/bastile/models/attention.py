"""The forward of an attention whose queries and keys are normed head by head and then turned, both in one operator.

Its first three projections are one operator where they are layers that models/adapters.py knows. All others, the cache
and the attention itself are called as the original calls them, so hooks and every attention implementation stay in
force."""

import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from bastile.guards import is_ours
from bastile.models.adapters import linears
from bastile.models.norm import Norm, norm_of, norms_of
from bastile.models.rebind import parameter_names
from bastile.models.rotary import fits, layout, tables
from bastile.models.sites import Found, ModelFile, Site
from bastile.ops.qk_norm_rope import qk_norm_rope
from bastile.report import Tally

#: The arguments that the replacement reads. All others go to the attention function.
NEEDED = ("hidden_states", "position_embeddings", "attention_mask")


def sites(file: ModelFile) -> Iterator[Site]:
    norms = tuple(norm for norm in norms_of(file) if norm.weight is not None and not norm.is_of_one_type)
    rotaries = {found.name: found for found in file.functions("rotary") if not found.form.variant["casts"]}
    for found in file.forwards("attention"):
        where, rotary = f"{found.name}.forward", [rotaries[n] for n in found.code.rotary if n in rotaries]
        given = inspect.signature(found.function).parameters
        if not norms or len(rotary) != 1 or file.module is None:
            file.unknown[where] = "calls a norm or a rotary function whose code is not known"
        elif any(name not in given for name in NEEDED):
            file.unknown[where] = "has arguments of other names"
        else:
            build = partial(attention_forward, found, file.module, norms, rotary[0])
            yield file.forward_site("qk_norm_rope", found.owner, build)


def attention_forward(
    found: Found,
    scope: ModuleType,
    norms: tuple[Norm, ...],
    rotary: Found,
    tally: Tally,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    """scope: the module of the attention's class. norms, rotary: what it may call, as Transformers has them."""
    names = parameter_names(original)
    tells_cache_positions = "cache_position" in names  # older releases tell the cache where to write
    attributes, read_as = found.names, layout(rotary)
    q_name, k_name = attributes["q_norm"], attributes["k_norm"]
    has_window = "sliding_window" in attributes
    asks_interface = "get_interface" in inspect.unwrap(original).__code__.co_names

    def norm_of_heads(self: nn.Module) -> Norm | None:
        """What norms queries and keys alike, and nothing else does."""
        q_norm, k_norm = getattr(self, q_name), getattr(self, k_name)
        norm = norm_of(q_norm, norms)
        if norm is None or norm_of(k_norm, norms) is not norm or getattr(q_norm, norm.eps) != getattr(k_norm, norm.eps):
            return None
        return norm

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        norm, turn = norm_of_heads(self), getattr(scope, rotary.name)
        if norm is None or not (turn is rotary.function or is_ours(turn)):
            tally.step_aside(
                "the norms of queries and keys, or the rotary function, are not the class's own, or differ"
            )
            return original(self, *args, **kwargs)
        if (
            len(args) > len(names)
            or not _are_plain(given)
            or not fits(rotary, self.head_dim, given["position_embeddings"][0])
        ):
            tally.step_aside("its arguments are not those of a decoder's attention")
            return original(self, *args, **kwargs)
        tally.count()
        hidden, (cos, sin) = given.pop("hidden_states"), given.pop("position_embeddings")
        mask, cache = given.pop("attention_mask"), given.pop("past_key_values", None)
        heads = (*hidden.shape[:-1], -1, self.head_dim)

        projected = linears(hidden, (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = [each.view(heads).transpose(1, 2) for each in projected]
        q_norm, k_norm = getattr(self, q_name), getattr(self, k_name)
        q, k = qk_norm_rope(
            q,
            k,
            norm.weight_of(q_norm),
            norm.weight_of(k_norm),
            *tables(rotary, cos, sin),
            getattr(q_norm, norm.eps),
            casting=norm.casting,
            **read_as,
        )

        told: tuple[Any, ...] = ()
        if tells_cache_positions:
            told = ({"sin": sin, "cos": cos, "cache_position": given.pop("cache_position", None)},)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, *told)

        implementation, functions = self.config._attn_implementation, scope.ALL_ATTENTION_FUNCTIONS
        attend = scope.eager_attention_forward
        if asks_interface:
            attend = functions.get_interface(implementation, attend)
        elif implementation != "eager":
            attend = functions[implementation]
        if has_window:
            given["sliding_window"] = self.sliding_window
        output, weights = attend(
            self,
            q,
            k,
            v,
            mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **given,
        )
        return self.o_proj(output.reshape(*hidden.shape[:-1], -1).contiguous()), weights

    return forward


def _are_plain(given: dict[str, Any]) -> bool:
    return (
        all(name in given for name in NEEDED)
        and given["hidden_states"].dim() == 3
        and isinstance(given["position_embeddings"], tuple)
        and given["position_embeddings"][0].dim() == 3
    )
