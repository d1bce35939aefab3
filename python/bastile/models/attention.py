"""The forward of an attention whose queries and keys are normed head by head and then turned, both in one operator.

Its first three projections are one operator where they are layers that models/adapters.py knows. All others, the cache and
the attention itself are called as the original calls them, so hooks and every attention implementation stay in force."""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from bastile.guards import is_ours, runs
from bastile.models.adapters import linears
from bastile.models.rebind import parameter_names
from bastile.models.table import Family
from bastile.ops.qk_norm_rope import qk_norm_rope

#: What the original's code mentions, beside the names in the family's row.
READS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "head_dim",
    "layer_idx",
    "scaling",
    "sliding_window",
    "attention_dropout",
    "training",
    "config",
    "_attn_implementation",
    "ALL_ATTENTION_FUNCTIONS",
    "eager_attention_forward",
    "update",
)
#: What it may mention beside, and no more: so nothing that it computes is left out.
MAY_READ = ("get_interface", "shape", "view", "transpose", "reshape", "contiguous")

#: The arguments it may name. All others go to the attention function.
ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask", "past_key_values", "cache_position")
NEEDED = ARGUMENTS[:3]


def attention_forward(
    family: Family, scope: ModuleType, norm: Callable[..., Any], rotary: Any, original: Callable[..., Any]
) -> Callable[..., Any]:
    """scope: the family's module. norm, rotary: the norm's forward and the rotary function as Transformers has them."""
    names = parameter_names(original)
    tells_cache_positions = "cache_position" in names  # older releases tell the cache where to write
    casting, interleaved, eps = family.norm_casting, family.rotary_interleaved, family.norm_eps
    q_name, k_name = family.q_norm or "", family.k_norm or ""  # both are there, or it is not built
    asks_interface = "get_interface" in inspect.unwrap(original).__code__.co_names

    def attends_plainly(self: nn.Module, given: dict[str, Any]) -> bool:
        turn = getattr(scope, family.rotary_function)
        q_norm, k_norm = getattr(self, q_name), getattr(self, k_name)
        return (
            all(name in given for name in NEEDED)
            and given["hidden_states"].dim() == 3
            and isinstance(given["position_embeddings"], tuple)
            and given["position_embeddings"][0].dim() == 3
            and (turn is rotary or is_ours(turn))
            and runs(q_norm, norm)
            and runs(k_norm, norm)
            and getattr(q_norm, eps) == getattr(k_norm, eps)
        )

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or not attends_plainly(self, given):
            return original(self, *args, **kwargs)
        hidden, (cos, sin) = given.pop("hidden_states"), given.pop("position_embeddings")
        mask, cache = given.pop("attention_mask"), given.pop("past_key_values", None)
        heads = (*hidden.shape[:-1], -1, self.head_dim)

        projected = linears(hidden, (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = [each.view(heads).transpose(1, 2) for each in projected]
        q_norm, k_norm = getattr(self, q_name), getattr(self, k_name)
        q, k = qk_norm_rope(
            q, k, q_norm.weight, k_norm.weight, cos, sin, getattr(q_norm, eps), casting=casting, interleaved=interleaved
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
        output, weights = attend(
            self,
            q,
            k,
            v,
            mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **given,
        )
        return self.o_proj(output.reshape(*hidden.shape[:-1], -1).contiguous()), weights

    return forward
