"""The output head and its loss in one: cross_entropy(hidden · weightᵀ + bias, target), a budget of logits at a time."""

from __future__ import annotations

import functools
import os
import sys
from contextlib import AbstractContextManager, nullcontext

import torch

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import Function, cast_as_linear, first_order_only, need_floats, on_gpu, served
from bastile.ops._room import room
from bastile.ops._valid_rows import ValidCount, gather, is_worthwhile, scatter, set_compaction, valid_first
from bastile.ops.cross_entropy import REDUCTION, Reduction, reference, scalar_tensor, scaled
from bastile.ops.vocabulary_parallel import VocabularyShard

__all__ = ["ValidCount", "fused_linear_cross_entropy", "set_compaction", "set_logits_memory"]

_forward = torch.ops.bastile.linear_cross_entropy_forward.default
_backward = torch.ops.bastile.linear_cross_entropy_backward.default

#: Logits that may exist at once on CUDA: at V = 151936 in bf16, 5741 tokens. Up to here, all logits of a call are made
#: in one piece, and both gradient products run in the backward pass; beyond, and of a frozen head, chunks are worked
#: off in the forward pass: of 4096 rows, or of 1024 to 2048, which cost next to no time, or as large as a setting
#: allows. On a GPU of less than 104 GiB it is a 64th of its memory, but no less than the second number: as the C
#: library has it (linear_cross_entropy_chunks.c).
DEFAULT_LOGITS_BYTES, LEAST_LOGITS_BYTES = 1664 << 20, 256 << 20

#: Rows of a chunk by default at most, of a frozen head's, and where no gradient is wanted.
CHUNK_ROWS, FROZEN_ROWS, FORWARD_ROWS = 4096, 2048, 1024
#: The fewest that a setting may ask for, and what products round rows to.
LEAST_ROWS, TILE = 64, 128

_logits_bytes: int | None = None


def set_logits_memory(mebibytes: float | None) -> None:
    """Sets how much memory the fused loss may use for logits, in MiB; None: the default (or BASTILE_LOGITS_MIB).

    On CUDA, calls whose logits fit keep them, and make their gradients in the backward pass; others, and those of a
    frozen head, go chunk by chunk, of as many rows as fit (by default of 4096, of a frozen head of 1024 to 2048, and of
    1024 where no gradient is wanted). The default is 1664 MiB, on a GPU of less than 104 GiB a 64th of its memory, and
    no less than 256 MiB. On CPU no call keeps them: a chunk has as many rows as fit (by default into 256 MiB, and an
    eighth of the rows, but at least 512; 256 in any case). What is too little for 64 rows counts as enough for 64.
    It holds for calls made from now on, in every thread.
    """
    global _logits_bytes
    if mebibytes is not None and mebibytes <= 0:
        raise ValueError(f"set_logits_memory: {mebibytes} MiB given; a positive number is needed")
    _logits_bytes = None if mebibytes is None else int(mebibytes * (1 << 20))


def chunk_bytes_now() -> int:
    """What was set, or 0."""
    if _logits_bytes is not None:
        return _logits_bytes
    setting = os.environ.get("BASTILE_LOGITS_MIB")
    if setting is not None:
        if not setting.replace(".", "", 1).isdigit() or float(setting) <= 0:
            raise ValueError(f"BASTILE_LOGITS_MIB is {setting!r}; a positive number of MiB is needed")
        return int(float(setting) * (1 << 20))
    return 0


def usual_bytes(device: torch.device) -> int:
    """What no setting says, on this GPU."""
    memory = _memory_of(device.index) if device.type == "cuda" and torch.cuda.is_available() else sys.maxsize
    return min(DEFAULT_LOGITS_BYTES, max(LEAST_LOGITS_BYTES, memory // 64))


@functools.cache
def _memory_of(index: int | None) -> int:
    return int(torch.cuda.get_device_properties(index).total_memory)


def padded(vocabulary: int) -> int:
    """Columns of the logits in memory: rows that begin at 16-byte boundaries keep the products on their fast path."""
    return (vocabulary + 7) // 8 * 8


def rows_that_fit(hidden: torch.Tensor, vocabulary: int, budget: int) -> int:
    """How many rows of logits, of hidden's type, fit so many bytes."""
    return budget // (padded(vocabulary) * hidden.element_size())


def even_rows(rows: int, most: int) -> int:
    """Rows of a chunk: at most `most`, in no more chunks than that needs, and whole tiles where they can be."""
    even = -(-rows // -(-rows // most))
    whole = -(-even // TILE) * TILE
    return whole if whole <= most else even


def logits_fit(hidden: torch.Tensor, weight: torch.Tensor, chunk_bytes: int) -> bool:
    """Whether the logits of hidden [T, H] fit a budget on CUDA; 0: the default."""
    return hidden.shape[0] <= rows_that_fit(hidden, weight.shape[0], chunk_bytes or usual_bytes(hidden.device))


def kept_rows(hidden: torch.Tensor, weight: torch.Tensor, chunk_bytes: int) -> int:
    """Of how many of the last rows of hidden [T, H] the logits are kept for a backward pass on CUDA: all that fit the
    budget, else a chunk, which then takes no memory that the chunks do not take."""
    rows, eighth = hidden.shape[0], -(-hidden.shape[0] // 8)
    most = rows_that_fit(hidden, weight.shape[0], chunk_bytes or usual_bytes(hidden.device))
    if rows <= most:
        return rows
    if not chunk_bytes:  # an eighth, for more chunks than eight are summed in float32
        most = max(most, min(eighth, rows_that_fit(hidden, weight.shape[0], DEFAULT_LOGITS_BYTES)))
        most = min(most, max(CHUNK_ROWS, eighth))
    return min(rows, max(most // TILE * TILE or most, LEAST_ROWS))


def room_for(
    hidden: torch.Tensor, weight: torch.Tensor, chunk_bytes: int, want: list[bool], kept: int = 0
) -> AbstractContextManager[None]:
    """Around a call on CUDA: see `room`. want: gradients of hidden, weight and bias that it makes. kept: so many rows'
    logits are kept."""
    if not hidden.is_cuda or torch.compiler.is_compiling():
        return nullcontext()
    row_bytes = padded(weight.shape[0]) * hidden.element_size()
    if kept:
        return room(hidden, row_bytes, kept, is_kept=True)
    most = rows_that_fit(hidden, weight.shape[0], chunk_bytes or usual_bytes(hidden.device))
    if not chunk_bytes:
        most = min(most, CHUNK_ROWS if any(want[1:]) else FROZEN_ROWS if want[0] else FORWARD_ROWS)
    return room(hidden, row_bytes, most)


class _LinearCrossEntropy(Function):
    """Where the gradients are made depends on what fits: see bst_linear_cross_entropy_forward in bastile.h.

    `keep` all the logits' gradients and multiply in the backward pass (CUDA, within the memory budget, but where hidden
    alone has a gradient, for which nothing need be kept); else make the gradients `now`, in the forward pass; else
    (per-token losses, and float16, whose range a loss scale may need) make the logits `again` in the backward pass.
    rounded: as `float32_gradient` says.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, class_weight, num_items, options, with_grad, rounded):
        reduced = options[1] != REDUCTION["none"]
        want = [with_grad and needed for needed in ctx.needs_input_grad[:3]]
        chunk_bytes = chunk_bytes_now()
        is_wide = rounded is not None
        weight = rounded if is_wide else weight
        again = not reduced or hidden.dtype is torch.float16
        fits = logits_fit(hidden, weight, chunk_bytes)
        needs_logits = any(want[1:]) or (want[0] and again)
        keep = needs_logits and reduced and on_gpu(hidden) and fits
        now = [w and not again and not keep for w in want]
        with room_for(hidden, weight, chunk_bytes, now, kept=hidden.shape[0] if keep else 0):
            loss, lse, dlogits, dhidden, dweight, dbias = _forward(
                hidden, weight, target, bias, class_weight, num_items, *options, chunk_bytes, is_wide, keep, *now
            )
        ctx.options, ctx.want = (*options, chunk_bytes, is_wide), want
        ctx.now = any(now)
        # lse is an output for first_order_only, which needs a way back to hidden and weight where these are not kept;
        # the loss itself is its readers', who may change it in place.
        ctx.set_materialize_grads(False)
        if ctx.now:
            ctx.save_for_backward(lse, dhidden, dweight, dbias)
        else:
            dlogits = dlogits if keep else None
            ctx.save_for_backward(lse, hidden, weight, target, bias, class_weight, num_items, dlogits)
        return loss, lse

    @staticmethod
    def backward(ctx, grad_loss, _):
        if grad_loss is None:  # whoever read the loss has no gradient for it
            return (None,) * 9
        grad_loss = grad_loss.float()
        lse, *saved = ctx.saved_tensors
        if ctx.now:
            gradients = [scaled(g, grad_loss) if w else None for g, w in zip(saved, ctx.want, strict=True)]
        else:
            hidden, weight, target, bias, class_weight, num_items, dlogits = saved
            gradients = _backward(
                grad_loss.contiguous(), hidden, weight, target, bias, class_weight, num_items, lse, dlogits,
                *ctx.options, *ctx.want,
            )  # fmt: skip
            gradients = [g if w else None for g, w in zip(gradients, ctx.want, strict=True)]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            gradients = [first_order_only("fused_linear_cross_entropy", g, grad_loss, lse) for g in gradients]
        return (*gradients, None, None, None, None, None, None)


def rows_to_compute(
    op: str, hidden: torch.Tensor, target: torch.Tensor, ignore_index: int, valid_rows: int | ValidCount | None
) -> torch.Tensor | None:
    """The rows of hidden [T, H] that go into the products; None: all."""
    tokens = hidden.shape[0]
    if target.numel() != tokens or target.device != hidden.device or not is_worthwhile(tokens, hidden):
        return None
    if isinstance(valid_rows, ValidCount) and not valid_rows.is_of(target, ignore_index):
        raise ValueError(
            f"{op}: valid_rows was counted from another tensor than target, with another "
            f"ignore_index than {ignore_index}, or before target changed; a ValidCount of this very target is needed"
        )
    if not isinstance(valid_rows, int):
        valid_rows = (valid_rows or ValidCount(target, ignore_index)).rows()
    elif hidden.device.type == "cpu" and valid_rows < (there := ValidCount(target, ignore_index).rows()):
        raise ValueError(f"{op}: valid_rows is {valid_rows}, but {there} targets are not ignore_index")
    return valid_first(target.reshape(-1), ignore_index, valid_rows)


def check_valid_rows(op: str, valid_rows: object) -> None:
    if isinstance(valid_rows, int) and valid_rows < 0:
        raise ValueError(f"{op}: valid_rows is {valid_rows}; a number of rows is needed")
    if not (valid_rows is None or isinstance(valid_rows, (int, ValidCount))):
        raise TypeError(f"{op}: valid_rows is a {type(valid_rows).__name__}; an int or a ValidCount is needed")


def are_left_out(labels: torch.Tensor, ignore_index: int, chosen: torch.Tensor) -> torch.Tensor:
    """Whether more rows count than were chosen, as a bool on the device."""
    return (labels != ignore_index).sum() > chosen.shape[0]


def head_inputs(
    op: str, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, bool]:
    """hidden as rows [T, H], all three as a linear layer casts them, and whether the kernels run; where they do not,
    what they would refuse is refused. target [T]."""
    is_served = served(hidden, weight, bias)
    if not is_served:
        need_floats(op, hidden=hidden, weight=weight, bias=bias)
    hidden, weight, bias = cast_as_linear(hidden, weight, bias)
    if hidden.dim() == 0:
        raise ValueError(f"{op}: hidden is a scalar; [..., H] is needed")
    flat = hidden.reshape(-1, hidden.shape[-1])
    is_served = is_served or served(hidden, weight, bias)  # autocast may have made it so
    if not is_served:
        _check_head(op, flat, weight, target, bias)
    return flat, weight, bias, is_served


def float32_gradient(own: torch.Tensor, cast: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Under autocast: a float32 weight itself, whose gradient is left in float32 and not rounded to autocast's type,
    and what the products take of it. Else what they take, and None."""
    cast = cast.contiguous()
    is_wide = own is not cast and own.dtype is torch.float32 and cast.dtype is not torch.float32
    return (own, cast.detach()) if is_wide else (cast, None)


def _check_head(
    op: str, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """For the branch that runs PyTorch's code: the kernels check for themselves. hidden [T, H], target [T]."""

    def fault(name: str, given: object, needed: str) -> ValueError:
        return ValueError(f"{op}: {name} {given}; {needed} is needed")

    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise fault("weight has shape", list(weight.shape), f"[V, H], here [V, {hidden.shape[1]}],")
    if target.shape[0] != hidden.shape[0]:
        raise fault("target has", f"{target.shape[0]} elements", f"one for each of hidden's {hidden.shape[0]} rows")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise fault("bias has shape", list(bias.shape), f"[V], here [{weight.shape[0]}],")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != hidden.dtype:
            raise fault(f"{name} is", t.dtype, f"{hidden.dtype}, the type of hidden,")


def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | float | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    valid_rows: int | ValidCount | None = None,
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """torch.nn.functional.cross_entropy of the logits hidden · weightᵀ + bias, of which no more exist at once than a
    memory budget allows (see `set_logits_memory`).

    Args:
        hidden: [..., H], float32, bfloat16 or float16.
        weight: [V, H], the head's, of hidden's type (under autocast both are cast as a linear layer casts them; a
            float32 weight's gradient is left in float32).
        target: [...] int64 (or uint8), shaped as hidden without its last dimension.
        bias: [V] of hidden's type.
        class_weight: [V], a factor of each class's loss.
        ignore_index: target of rows that count for nothing.
        reduction: "mean" divides as torch.nn.functional.cross_entropy does, "sum" adds up, "none" returns [...].
        num_items: divides the sum instead, for "mean" and "sum": the number of tokens of all accumulated batches.
            A number, or a tensor on hidden's device (the host does not wait for it).
        label_smoothing: in [0, 1].
        softcap: logits become softcap · tanh(logits / softcap).
        logit_scale: multiplies the logits before that.
        lse_square_scale: adds lse_square_scale · logsumexp² to each row's loss (z-loss).
        valid_rows: no fewer than there are targets other than ignore_index: only so many rows are computed then. A
            number, or a `ValidCount` of this very target that was begun earlier; None: it is counted here, which on
            CUDA waits for the device, from 2048 tokens on (`set_compaction(False)`: never). Too small a number is an
            error on CPU, from 256 tokens on; on CUDA the loss is NaN where a row that counts was left out. Below
            these sizes all rows are computed, whatever the number.
        shard: the vocabulary is parted among processes, all of which call this with the same hidden states and targets:
            weight and bias are this process' part, as a DTensor or the part alone; class_weight is whole. The loss is
            the same on each, as is hidden's gradient, which is summed over them. Without label_smoothing alone.

    Returns:
        float32 scalar, or [...] for "none". Gradients flow to whichever of hidden, weight and bias require them.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed. A target out of
            range is an error on CPU; on CUDA it gives a NaN loss and a zero gradient row, for checking would wait for
            the device.
    """
    code = REDUCTION.get(reduction)
    if code is None:
        names = ", ".join(map(repr, REDUCTION))
        raise ValueError(f"fused_linear_cross_entropy: reduction is {reduction!r}; one of {names} is needed")
    if num_items is not None and reduction == "none":
        raise ValueError("fused_linear_cross_entropy: num_items divides a sum; reduction 'none' has none")
    if getattr(target, "dtype", None) is torch.uint8:  # as torch's loss has it: 156 is a class, not -100
        target = target.long()
    check_valid_rows("fused_linear_cross_entropy", valid_rows)
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"fused_linear_cross_entropy: target is a {type(target).__name__}; a tensor is needed")
    if shard is not None:
        from bastile.ops._sharded_loss import sharded_loss  # which needs this module

        return sharded_loss(
            hidden, weight, target, shard, class_weight, num_items, reduction, label_smoothing, lse_square_scale,
            bias=bias, ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, valid_rows=valid_rows,
        )  # fmt: skip
    labels, own_weight = target.reshape(-1), weight
    flat, weight, bias, is_served = head_inputs("fused_linear_cross_entropy", hidden, weight, labels, bias)
    options = (ignore_index, code, label_smoothing, softcap or 0.0, logit_scale, lse_square_scale)
    if not is_served:
        logits = torch.nn.functional.linear(flat, weight, bias)
        loss = reference(logits, labels, class_weight, num_items, ignore_index, reduction, *options[2:])
    else:
        if class_weight is not None:
            need_floats("fused_linear_cross_entropy", class_weight=class_weight)
            class_weight = class_weight.detach().float()
        chosen = rows_to_compute("fused_linear_cross_entropy", flat, target, ignore_index, valid_rows)
        rows, kept = flat, labels
        if chosen is not None:
            rows, kept = gather(flat, chosen), labels.index_select(0, chosen)
        weight, rounded = float32_gradient(own_weight, weight)
        loss, _ = _LinearCrossEntropy.apply(
            rows.contiguous(), weight, bias, kept, class_weight,
            scalar_tensor(num_items, hidden.device), options, torch.is_grad_enabled(), rounded,
        )  # fmt: skip
        if chosen is not None:
            if reduction == "none":
                loss = scatter(loss, chosen, flat.shape[0])
            if isinstance(valid_rows, int) and hidden.is_cuda:
                loss = loss.masked_fill(are_left_out(labels, ignore_index, chosen), float("nan"))
    return loss.reshape(target.shape) if reduction == "none" else loss
