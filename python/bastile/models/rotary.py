"""The function that turns queries and keys by their positions, and the forward of attentions that call it, in which
queries, keys and values of one input are one node (bastile.ops.projections). Where norms come before it, both are
models/attention.py's."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bastile.guards import mark_as_ours, stock_of
from bastile.models import rewrite
from bastile.models.adapters import projected
from bastile.models.linear import projecting
from bastile.models.rebind import with_global
from bastile.models.sites import Found, ModelFile, Site, calls, exchanged
from bastile.ops.rope import rope
from bastile.report import Tally

#: What a rotary function may be told by keyword: which axis of q and k is that of heads.
_AXIS = "unsqueeze_dim"


def sites(file: ModelFile) -> Iterator[Site]:
    attentions: dict[type, list[str]] = {}  # with the rotary functions that they call
    for found in file.functions("rotary"):
        name = found.name
        callers = tuple(cls for cls in file.own_classes() if calls(stock_of(vars(cls)["forward"]), name))
        if not callers:
            file.unknown[name] = "no module's forward calls it"
            continue
        build = partial(rotary_function, found, Tally.of("rope", f"{file.name}.{name}"))
        replaced = partial(_with_rotary, name, build(found.function))
        yield Site("rope", name, file.module, name, build, callers, replaced)
        for cls in callers:
            attentions.setdefault(cls, []).append(name)
    for cls, rotaries in attentions.items():
        read = file.read(cls, rewrite.projections)
        if read is not None and read[0].made_by(rewrite.norm_rotaries, frozenset(rotaries)) is None:
            yield from file.wrapped_sites("rope", cls, partial(projecting, *read, _projected))


def _projected(_: Tally, x: Any, *modules: Any) -> Any:
    return projected(x, *modules)


def _with_rotary(name: str, rotary: Any, forward: Any) -> Any:
    """This attention's forward, or what has been built around it, calling another rotary function."""
    return exchanged(lambda inner: with_global(inner, name, rotary), forward)


def tables(found: Found, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables as the operators take them: an element for each number of a head that turns, or for each pair."""
    if found.form.variant["table"] == "first half, each twice":
        half = cos.shape[-1] // 2
        cos, sin = cos[..., :half], sin[..., :half]
    return cos, -sin if found.form.variant["is_backward"] else sin


def layout(found: Found) -> dict[str, Any]:
    """How the operators are to read heads and tables."""
    variant = found.form.variant
    return {
        "layout": variant["layout"],
        "half_tables": variant["table"] != "whole",
        "keep_type": variant["casts"],
    }


def is_usual(found: Found) -> bool:
    """Whether it takes queries, keys and two tables, heads first."""
    return found.form.variant["arguments"] == "q k cos sin" and found.form.variant["heads"] == 1


def rotary_function(found: Found, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    read_as = layout(found)
    names = found.form.variant["arguments"].split()

    @functools.wraps(original)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        heads = kwargs.get(_AXIS, found.form.variant["heads"])
        if len(args) != len(names) or kwargs.keys() - {_AXIS}:
            tally.step_aside("it was not called with its tensors by position")
            return original(*args, **kwargs)
        given = dict(zip(names, args, strict=True))
        cos, sin = _cos_and_sin(given)
        q = given["q"] if "q" in given else given["x"]
        k = given.get("k")
        is_alone = heads == -2 and q.dim() == 3  # one sequence: [positions, heads, dim]
        if is_alone:
            cos, sin, q, k = cos[None], sin[None], q[None], None if k is None else k[None]
        if q.dim() != 4 or cos.dim() != 3 or heads not in (1, 2, -2) or not fits(found, q.shape[-1], cos):
            tally.step_aside("heads are not of four axes, or tables are not of their width")
            return original(*args, **kwargs)
        tally.count()
        still, q = _last(found, q, cos)
        both: tuple[torch.Tensor, ...] = (q,) if k is None else (q, k)
        both = tuple(t.transpose(1, 2) for t in both) if heads != 1 else both
        first, second = both if len(both) == 2 else (both[0], both[0].new_empty(q.shape[0], 0, *both[0].shape[2:]))
        turned = rope(first, second, *tables(found, cos, sin), **read_as)[: len(both)]
        turned = tuple(t.transpose(1, 2) for t in turned) if heads != 1 else turned
        turned = tuple(t[0] for t in turned) if is_alone else turned
        if still is not None:
            return torch.cat((still[0] if is_alone else still, turned[0]), -1)
        return turned if k is not None else turned[0]

    return mark_as_ours(rotate)


def _cos_and_sin(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    if "freqs" not in given:
        return given["cos"], given["sin"]
    parts = torch.view_as_real(given["freqs"])
    return parts[..., 0], parts[..., 1]


def _last(found: Found, x: torch.Tensor, cos: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """What of x stays and what turns, where that is the end of each head."""
    if found.form.variant["partial"] != "last":
        return None, x
    many = x.shape[-1] - _width(found, cos)
    return x[..., :many], x[..., many:]


def _width(found: Found, cos: torch.Tensor) -> int:
    """Of what turns."""
    return cos.shape[-1] * (2 if found.form.variant["table"] == "half" else 1)


def fits(found: Found, head_dim: int, cos: torch.Tensor) -> bool:
    """Whether the tables are as wide as the code needs them."""
    width = _width(found, cos)
    return width <= head_dim if found.form.variant["partial"] else width == head_dim
