"""Linear attention by the gated delta rule, which Transformers has as a function of each such model's file. Where the
package flash-linear-attention is installed, Transformers calls that in its place, and it stays; so does a kernel of the
hub."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bastile.guards import mark_as_ours, stock_of
from bastile.models.packages import asks_for_another, runs_instead
from bastile.models.rebind import with_global
from bastile.models.sites import ModelFile, Site, calls, exchanged, function_in
from bastile.ops.gated_delta_rule import gated_delta_rule, refusal
from bastile.report import Tally

KIND = "gated delta rule"
#: Of float32 PyTorch's products are closer to float64, unless they are allowed to be of fewer bits.
_WIDE = "its tensors are of float32, in which the original code is the more exact"


def sites(file: ModelFile) -> Iterator[Site]:
    for found in file.functions(KIND):
        name = found.name
        callers = tuple(cls for cls in file.own_classes() if calls(stock_of(vars(cls)["forward"]), name))
        if not callers:
            file.unknown[name] = "no module's forward calls it"
        elif (other := runs_instead(function_in(found.function))) is not None:
            file.unknown[name] = other
        else:
            build = partial(_attend, Tally.of("gated_delta_rule", f"{file.name}.{name}"))
            one_model = partial(exchanged, partial(_calling, name, build(found.function)))
            yield Site("gated_delta_rule", name, file.module, name, build, callers, one_model)


def _calling(name: str, attend: Any, forward: Any) -> Any:
    return with_global(forward, name, attend)


def _attend(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        why = asks_for_another(original, kwargs) or refusal(query, key, value, g, beta, initial_state)
        if why is None and query.is_cuda and query.dtype is torch.float32 and not _may_be_rounded():
            why = _WIDE
        if why is not None:
            tally.step_aside(why, why is _WIDE)
            return original(
                query,
                key,
                value,
                g,
                beta,
                chunk_size,
                initial_state,
                output_final_state,
                use_qk_l2norm_in_kernel,
                **kwargs,
            )
        tally.count()
        return gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            normalize=use_qk_l2norm_in_kernel,
        )

    return mark_as_ours(attend)


def _may_be_rounded() -> bool:
    """Whether products of float32 may take fewer bits of it."""
    return torch.backends.cuda.matmul.allow_tf32 or torch.get_float32_matmul_precision() != "highest"
