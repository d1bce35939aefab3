"""Linear attention by the gated delta rule, which Transformers has as a function of each such model's file. Where the
package flash-linear-attention is installed, Transformers calls that in its place, and it stays; so does a kernel of the
hub. Packed sequences are kept apart, as that package does and the function itself cannot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bastile.guards import mark_as_ours
from bastile.models.packages import cuts_of, function_sites, runs_another
from bastile.models.sdpa import need_told
from bastile.models.sites import ModelFile, Site
from bastile.ops.gated_delta_rule import gated_delta_rule, refusal
from bastile.report import Tally

KIND = "gated delta rule"
#: Of float32 PyTorch's products are closer to float64, unless they are allowed to be of fewer bits.
WIDE = "its tensors are of float32, in which the original code is the more exact"


def sites(file: ModelFile) -> Iterator[Site]:
    return function_sites(file, "gated_delta_rule", KIND, lambda tally: partial(_attend, tally))


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
        cuts = cuts_of(kwargs)
        why = runs_another(original) or refusal(query, key, value, g, beta, None, initial_state)
        why = why or against(query, cuts, initial_state, output_final_state)
        need_told(cuts is not None and why is None)
        if why is not None:
            tally.step_aside(why, why is WIDE)
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
            cu_seqlens=cuts,
        )

    return mark_as_ours(attend)


def against(x: torch.Tensor, cuts: torch.Tensor | None, initial: torch.Tensor | None, wants_final: bool) -> str | None:
    """Why the original is to run, in rows of one sequence each, or in a packed one, whose sequences it cannot keep
    apart; None where it need not."""
    if cuts is None:
        return _loses_float32(x)
    if len(x) != 1:
        return "sequences are packed in several rows"
    return "packed sequences have states" if initial is not None or wants_final else None


def _loses_float32(t: torch.Tensor) -> str | None:
    """Why the original is to compute with a tensor of float32; None where it need not."""
    if not t.is_cuda or t.dtype is not torch.float32:
        return None
    # Not allow_tf32, which raises once TrainingArguments(tf32=True) has set it the new way.
    return None if torch.backends.cuda.matmul.fp32_precision == "tf32" else WIDE
