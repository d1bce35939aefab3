"""The function that turns queries and keys by their positions."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bastile.guards import mark_as_ours, stock_of
from bastile.models.rebind import with_global
from bastile.models.sites import Found, ModelFile, Site, calls
from bastile.ops.rope import rope
from bastile.report import Tally


def sites(file: ModelFile) -> Iterator[Site]:
    for found in file.functions("rotary"):
        name = found.name
        callers = tuple(cls for cls in file.own_classes() if calls(stock_of(vars(cls)["forward"]), name))
        if not callers:
            file.unknown[name] = "no module's forward calls it"
            continue
        build = partial(rotary_function, found, Tally.of("rope", f"{file.name}.{name}"))
        replaced = partial(_with_rotary, name, build(found.function))
        yield Site("rope", name, file.module, name, build, callers, replaced)


def _with_rotary(name: str, rotary: Any, forward: Any) -> Any:
    """This attention's forward, or what has been built around it, calling another rotary function."""
    return with_global(forward, name, rotary)


def tables(found: Found, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables as the operators take them: an element for each number of a head that turns, or for each pair."""
    if found.form.variant["table"] == "first half, each twice":
        half = cos.shape[-1] // 2
        return cos[..., :half], sin[..., :half]
    return cos, sin


def layout(found: Found) -> dict[str, Any]:
    """How the operators are to read heads and tables."""
    variant = found.form.variant
    return {
        "interleaved": variant["interleaved"],
        "half_tables": variant["table"] != "whole",
        "keep_type": variant["casts"],
    }


def rotary_function(found: Found, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    read_as = layout(found)

    @functools.wraps(original)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        heads_first = kwargs == {"unsqueeze_dim": 1} or not kwargs  # q [B, heads, S, D]: the layout that rope takes
        if len(args) != 4 or not heads_first:
            tally.step_aside("it was not called with four tensors by position, or heads are not the second axis")
            return original(*args, **kwargs)
        q, k, cos, sin = args
        if q.dim() != 4 or cos.dim() != 3 or not fits(found, q.shape[-1], cos):
            tally.step_aside("heads are not of four axes, or tables are not of their width")
            return original(*args, **kwargs)
        tally.count()
        return rope(q, k, *tables(found, cos, sin), **read_as)

    return mark_as_ours(rotate)


def fits(found: Found, head_dim: int, cos: torch.Tensor) -> bool:
    """Whether the tables are as wide as the code needs them."""
    if found.form.variant["partial"]:
        return cos.shape[-1] <= head_dim
    return cos.shape[-1] * (2 if found.form.variant["table"] == "half" else 1) == head_dim
