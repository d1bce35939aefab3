"""The cross-entropy of an output head with a low-rank adapter: of its logits only some rows exist at once."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from bastile.ops.cross_entropy import REDUCTION, Reduction, cross_entropy
from bastile.ops.fused_linear_cross_entropy import chunk_bytes_now
from bastile.ops.lora import Adapted, adapted_linears

__all__ = ["adapted_linear_cross_entropy"]

#: Logits that exist at once, where nothing is set: at V = 151936 in bfloat16 some 880 rows.
_USUAL_BYTES = 256 << 20
_FEWEST_ROWS = 64


def adapted_linear_cross_entropy(
    hidden: torch.Tensor,
    head: Adapted,
    target: torch.Tensor,
    *,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | float | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> torch.Tensor:
    """torch.nn.functional.cross_entropy of the logits that `adapted_linears` makes of hidden, a part of the rows at a
    time (`set_logits_memory` says how many). The backward pass makes them again.

    Args:
        hidden: [..., H]; float32, bfloat16 or float16.
        head: weight [V, H], bias and adapter; without dropout, weight and bias without gradients, which the parts would
            round one by one.
        target: [...] int64. This and the rest as for `fused_linear_cross_entropy`.

    Returns:
        float32 scalar, or [...] for "none". Gradients flow to hidden and to the adapter.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    if head.dropout:
        raise ValueError(
            f"adapted_linear_cross_entropy: head.dropout is {head.dropout}; 0 is needed, as logits are made twice"
        )
    for name, tensor in (("weight", head.weight), ("bias", head.bias)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"adapted_linear_cross_entropy: head.{name} requires a gradient, which is not computed; a frozen one "
                "is needed"
            )
    if reduction not in REDUCTION:
        names = ", ".join(map(repr, REDUCTION))
        raise ValueError(f"adapted_linear_cross_entropy: reduction is {reduction!r}; one of {names} is needed")
    if num_items is not None and reduction == "none":
        raise ValueError("adapted_linear_cross_entropy: num_items divides a sum; reduction 'none' has none")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"adapted_linear_cross_entropy: target has shape {list(target.shape)}; {list(hidden.shape[:-1])}, that of "
            "hidden without its last dimension, is needed"
        )
    # The parts' gradients are added up in float32.
    head = head._replace(a=None if head.a is None else head.a.float(), b=None if head.b is None else head.b.float())
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    of_piece = partial(
        _piece,
        weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
    )
    width = hidden.element_size() * (1 if head.b is None else head.b.shape[0])
    size = max(_FEWEST_ROWS, (chunk_bytes_now() or _USUAL_BYTES) // max(width, 1))
    found = [
        checkpoint(of_piece, *piece, head, use_reentrant=False, preserve_rng_state=False)
        for piece in zip(rows.split(size), labels.split(size), strict=True)
    ]
    each = torch.cat(found)
    if reduction == "none":
        return each.view(target.shape)
    total = each.sum()
    if num_items is not None:
        return total / num_items
    return total if reduction == "sum" else total / _count(labels, ignore_index, class_weight)


def _piece(rows: torch.Tensor, labels: torch.Tensor, head: Adapted, **options: object) -> torch.Tensor:
    """The loss of each row."""
    (logits,) = adapted_linears(rows, (head,))
    return cross_entropy(logits, labels, reduction="none", **options)  # type: ignore[arg-type]


def _count(labels: torch.Tensor, ignore_index: int, class_weight: torch.Tensor | None) -> torch.Tensor:
    """What "mean" divides by."""
    counts = labels != ignore_index
    if class_weight is None:
        return counts.sum()
    return (class_weight.float()[labels.masked_fill(~counts, 0)] * counts).sum()
