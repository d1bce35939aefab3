"""The forward of an attention whose queries and keys are normed head by head and then turned, both in one operator.

Of an attention whose whole code is known, everything but the attention function is written out here; of any other the
statements that norm and turn are found (models/rewrite.py), and all else is its own.

The first three projections of a known one are one operator where they are layers that models/adapters.py knows. All
others, the cache and the attention itself are called as the original calls them, so hooks and every attention
implementation stay in force."""

import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._C import _is_any_autocast_enabled

from bastile.graphs.caches import taken_from
from bastile.guards import is_ours
from bastile.models import rewrite
from bastile.models.adapters import linears, projected
from bastile.models.forms import Code
from bastile.models.norm import Norm, norm_of, norms_of
from bastile.models.rebind import as_keywords, parameter_names
from bastile.models.rotary import fits, is_usual, layout, tables
from bastile.models.sites import Found, ModelFile, Site
from bastile.ops._common import cast_type
from bastile.ops.qk_norm_rope import qk_norm_rope
from bastile.report import Tally

#: The arguments that the replacement reads. All others go to the attention function.
NEEDED = ("hidden_states", "position_embeddings", "attention_mask")
#: Attention functions that under autocast begin by casting queries and keys to its type, but for the first, which may
#: repeat keys for each query head before: then their gradients are summed in the type that they came in.
_CASTING = frozenset({"sdpa", "flash_attention_2", "flash_attention_3"})
_REPEATS = "sdpa"


def sites(file: ModelFile) -> Iterator[Site]:
    norms = tuple(norm for norm in norms_of(file) if norm.weight and norm.casting and not norm.is_of_one_type)
    rotaries = {
        found.name: found for found in file.functions("rotary") if is_usual(found) and not found.form.variant["casts"]
    }
    for found in file.forwards("attention"):
        where, rotary = f"{found.name}.forward", [rotaries[n] for n in found.code.rotary if n in rotaries]
        given = inspect.signature(found.function).parameters
        if not norms or len(rotary) != 1 or file.module is None:
            file.unknown[where] = "calls a norm or a rotary function whose code is not known"
        elif any(name not in given for name in NEEDED):
            file.unknown[where] = "has arguments of other names"
        else:
            build = partial(attention_forward, found, file.module, norms, rotary[0])
            yield from file.wrapped_sites("qk_norm_rope", found.owner, build)
    known = {found.owner for found in file.forwards("attention")}
    for cls in (each for each in file.own_classes() if norms and rotaries and each not in known):
        read = file.read(cls, rewrite.norm_rotaries, frozenset(rotaries))
        if read is not None:
            yield from file.wrapped_sites("qk_norm_rope", cls, partial(rewritten_forward, *read, norms, rotaries))


_NOT_ITS_OWN = (
    "the norms of queries and keys, or the rotary function, are not the class's own, differ or have no weight"
)


def rewritten_forward(
    code: Code,
    node: Any,
    norms: tuple[Norm, ...],
    rotaries: dict[str, Found],
    tally: Tally,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    """norms, rotaries: what the attention may call, as Transformers has them."""

    def norm_rotary(
        q_norm: Any,
        k_norm: Any,
        q: Any,
        k: Any,
        cos: Any,
        sin: Any,
        name: str,
        turn: Any,
        q_turned: bool,
        k_turned: bool,
    ) -> tuple[Any, Any]:
        """turned: whether heads and positions change places between the norm and the rotary function."""
        rotary, norm = rotaries[name], None
        if q_norm is not None and k_norm is not None and (turn is rotary.function or is_ours(turn)):
            norm = _same_norm(norms, q_norm, k_norm)
        if (
            norm is not None
            and q.dim() == k.dim() == 4
            and cos.dim() == 3
            and fits(rotary, q.shape[-1], cos)
            and norm.refuses(q_norm, q) is None
            and norm.refuses(k_norm, k) is None
        ):
            tally.count()
            weights = norm.weight_of(q_norm), norm.weight_of(k_norm)
            turned = tables(rotary, cos, sin)
            casting = norm.casting or "none"
            return qk_norm_rope(q, k, *weights, *turned, norm.eps_of(q_norm), casting=casting, **layout(rotary))
        if q_norm is not None or k_norm is not None:
            tally.step_aside(_NOT_ITS_OWN)
        return turn(_normed(q_norm, q, q_turned), _normed(k_norm, k, k_turned), cos, sin)

    helpers = {rewrite.NORM_ROTARY: norm_rotary, rewrite.PROJECTED: projected}
    return rewrite.rewritten(node, code, original, helpers)


def _normed(norm: Any, x: Any, is_turned: bool) -> Any:
    """The norm, if there is one, of what the attention gives it."""
    if norm is None:
        return x
    return norm(x.transpose(1, 2)).transpose(1, 2) if is_turned else norm(x)


def _same_norm(norms: tuple[Norm, ...], q_norm: nn.Module, k_norm: nn.Module) -> Norm | None:
    """What norms queries and keys alike, and nothing else does."""
    norm = norm_of(q_norm, norms)
    if norm is None or norm_of(k_norm, norms) is not norm or norm.eps_of(q_norm) != norm.eps_of(k_norm):
        return None
    has_weights = norm.weight_of(q_norm) is not None and norm.weight_of(k_norm) is not None
    return norm if has_weights else None


def _casts(implementation: str, q: torch.Tensor, repeats: bool) -> bool:
    """Whether the first thing that this attention function does is a cast of queries and keys to the type that q has.
    repeats: whether keys are fewer, and a mask is given."""
    if not _is_any_autocast_enabled() or implementation not in _CASTING or (repeats and implementation == _REPEATS):
        return False
    return cast_type(q) is q.dtype


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
    tells_cache_the_rest = "cache" in names  # newer ones what the attention function is told
    attributes, read_as = found.names, layout(rotary)
    q_name, k_name = attributes["q_norm"], attributes["k_norm"]
    has_window = "sliding_window" in attributes
    asks_interface = "get_interface" in inspect.unwrap(original).__code__.co_names

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = as_keywords(names, args, kwargs)
        norm = _same_norm(norms, getattr(self, q_name), getattr(self, k_name))
        turn = getattr(scope, rotary.name)
        if norm is None or not (turn is rotary.function or is_ours(turn)):
            tally.step_aside(_NOT_ITS_OWN)
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
        mask, cache = given.pop("attention_mask"), taken_from(given)
        heads = (*hidden.shape[:-1], -1, self.head_dim)

        projected = linears(hidden, (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = [each.view(heads).transpose(1, 2) for each in projected]
        q_norm, k_norm = getattr(self, q_name), getattr(self, k_name)
        implementation, functions = self.config._attn_implementation, scope.ALL_ATTENTION_FUNCTIONS
        # Rounded once, as the attention would: what it reads first is then half as long, and its gradient likewise.
        repeats = mask is not None and q.shape[1] != k.shape[1]
        is_cast = cache is None and _casts(implementation, q, repeats)
        q, k = qk_norm_rope(
            q,
            k,
            norm.weight_of(q_norm),
            norm.weight_of(k_norm),
            *tables(rotary, cos, sin),
            norm.eps_of(q_norm),
            casting=norm.casting or "none",
            **{**read_as, "keep_type": read_as["keep_type"] or is_cast},
        )

        told: tuple[Any, ...] = ()
        if tells_cache_positions:
            told = ({"sin": sin, "cos": cos, "cache_position": given.pop("cache_position", None)},)
        if cache is not None:
            more = {"kwargs": given} if tells_cache_the_rest else {}  # where a paged cache notes something
            k, v = cache.update(k, v, self.layer_idx, *told, **more)

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
