"""Two output heads, a student's and a teacher's, and how far the one's softmax is from the other's: for distillation, a
budget of logits at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import (
    Function,
    cast_as_linear,
    first_order_only,
    is_batched,
    is_last_pass,
    need_floats,
    on_gpu,
    served,
    times,
)
from bastile.ops._valid_rows import gather, scatter
from bastile.ops.fused_linear_cross_entropy import (
    chunk_bytes_now,
    float32_gradient,
    head_inputs,
    padded,
    rows_to_compute,
)
from bastile.ops.linear_logprobs import LEFT_IN_FLOAT32, wants_float32_dweight

__all__ = ["Divergence", "linear_divergence"]

_forward = torch.ops.bastile.linear_divergence_forward.default
_backward = torch.ops.bastile.linear_divergence_backward.default
_backward_kept = torch.ops.bastile.linear_divergence_backward_kept.default

Kind = Literal["forward", "reverse", "jsd"]
KINDS = {"forward": 0, "reverse": 1, "jsd": 2}
OUTPUTS = ("entropy",)
_OP = "linear_divergence"
#: Bytes that the student's logits' gradient may have by default to be kept for the backward pass: at V = 151936 in
#: bfloat16, 8834 tokens. A GiB of logits is beside it in the forward pass, and dweight in the backward pass.
DEFAULT_KEPT_BYTES = 2560 << 20
#: Rows of both logits that a budget which is set must have room for beside it.
_LEAST_ROWS = 256


class Divergence(NamedTuple):
    """What linear_divergence gives, each [...] float32; None: not asked for."""

    divergence: torch.Tensor
    entropy: torch.Tensor | None = None


def _gradient_fits(hidden: torch.Tensor, weight: torch.Tensor, chunk_bytes: int) -> bool:
    """Whether the student's logits' gradient may be kept."""
    rows, row = hidden.shape[0], padded(weight.shape[0])
    kept = rows * row * hidden.element_size()
    if not chunk_bytes:
        return kept <= DEFAULT_KEPT_BYTES
    return kept + 8 * min(_LEAST_ROWS, rows) * row <= chunk_bytes


def _is_same(grad: torch.Tensor) -> bool:
    """Whether an upstream gradient [T] can be seen to be one number for all rows."""
    if torch.compiler.is_compiling() or not grad.numel() or is_batched(grad):
        return False
    return grad.stride(0) == 0 or grad.numel() == 1


class _LinearDivergence(Function):
    """What is kept for the backward pass depends on what is wanted, and on what fits (on CUDA, but for float16, whose
    range a loss scale may need): see bst_linear_divergence_forward in bastile.h.

    `keep` the gradient of the student's logits, where the memory budget allows, and multiply in the backward pass; else
    make the gradients `now`, in float32: hidden's is so for any upstream gradient, the others' for one that is the same
    in all rows, as a sum or a mean has it. What that leaves is made in the backward pass, of both logits made again.
    rounded: as `float32_gradient` says."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, teacher, mask, options, wants_entropy, with_grad, rounded):
        want = [with_grad and needed for needed in ctx.needs_input_grad[:3]]
        wide, weight = (None, weight) if rounded is None else (weight, rounded)
        chunk_bytes = chunk_bytes_now()
        early = on_gpu(hidden) and hidden.dtype is not torch.float16 and not torch.compiler.is_compiling()
        keep = early and any(want[1:]) and _gradient_fits(hidden, weight, chunk_bytes)
        now = [w and early and not keep for w in want]
        ctx.options, ctx.want = (*options, chunk_bytes), want
        divergence, entropy, sums, dlogits, *made = _forward(
            hidden, weight, bias, *teacher, mask, *ctx.options, False, wants_entropy, any(want), keep, *now
        )
        ctx.set_materialize_grads(False)
        dhidden, dweight, dbias = [g if n else None for g, n in zip(made, now, strict=True)]
        ctx.save_for_backward(hidden, weight, bias, *teacher, mask, sums, wide, dhidden, dbias)
        ctx.dlogits, ctx.dweight = dlogits if keep else None, dweight
        if not wants_entropy:
            return divergence, None
        ctx.mark_non_differentiable(entropy)
        return divergence, entropy

    @staticmethod
    def backward(ctx, grad, _):
        if grad is None or not any(ctx.want):
            return (None,) * 9
        hidden, weight, bias, *rest, wide, dhidden, dbias = ctx.saved_tensors
        by_row, same, dlogits, dweight = grad.float(), _is_same(grad), ctx.dlogits, ctx.dweight
        if not same:
            dlogits = dweight = None
        if not same or is_last_pass(grad):  # the large ones go before others are made, and not with the graph
            ctx.dlogits = ctx.dweight = None
        gradients: list[Any] = [None, None, None]
        if dhidden is not None:
            gradients[0] = times(dhidden, by_row[:, None], hidden.dtype)
        if dweight is not None:
            gradients[1] = times(dweight, by_row[0], hidden.dtype if wide is None else wide.dtype)
        if same and dbias is not None:
            gradients[2] = times(dbias, by_row[0], hidden.dtype)
        left = [w and g is None for w, g in zip(ctx.want, gradients, strict=True)]
        exact = int(wants_float32_dweight()) if wide is None else LEFT_IN_FLOAT32
        options, made = (*ctx.options, exact, *left), gradients
        if any(left) and dlogits is not None:
            made = _backward_kept(hidden, weight, bias, by_row[:1], dlogits, *options)
        elif any(left):
            made = _backward(hidden, weight, bias, *rest, by_row.contiguous(), *options)
        gradients = [m if n else g for m, n, g in zip(made, left, gradients, strict=True)]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            sources = (grad, hidden, weight if wide is None else wide, bias)
            gradients = [first_order_only(_OP, g, *sources) for g in gradients]
        return (*gradients, None, None, None, None, None, None)


def _softmax_of(logits: torch.Tensor, temperature: float, logit_scale: float, softcap: float) -> torch.Tensor:
    """log p in float32 (or float64)."""
    z = (logits if logits.dtype is torch.float64 else logits.float()) * logit_scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    return torch.log_softmax(z / temperature, -1)


def reference(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    kind: Kind,
    beta: float,
    temperature: float,
    *maps: float,
) -> Divergence:
    """The formulas in plain torch, of logits [T, V] of both; maps: logit_scale, softcap and the teacher's."""
    log_p = _softmax_of(logits, temperature, *maps[:2])
    log_q = _softmax_of(teacher_logits, temperature, *maps[2:]).to(log_p.dtype)

    def to(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """KL(a || b) of logarithms: 0 where a has nothing."""
        return torch.where(a == -torch.inf, 0.0, a.exp() * (a - b)).sum(-1)

    if kind == "jsd":
        weights = torch.tensor([1 - beta, beta], dtype=torch.float64).log().to(log_p)
        log_m = torch.logaddexp(log_p + weights[0], log_q + weights[1])
        found = beta * to(log_q, log_m) + (1 - beta) * to(log_p, log_m)
    else:
        found = to(log_q, log_p) if kind == "forward" else to(log_p, log_q)
    return Divergence(found, -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(-1).detach())


def _spread(logits: torch.Tensor, indices: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return logits.new_full((logits.shape[0], vocabulary), -torch.inf).scatter_(1, indices, logits)


def _rows_of(name: str, t: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
    """[..., n] as [tokens, n]."""
    if t is None:
        return None
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{_OP}: {name} is a {type(t).__name__}; a tensor is needed")
    if t.dim() == 0 or t.numel() != tokens * t.shape[-1]:
        raise ValueError(f"{_OP}: {name} has shape {list(t.shape)}; a row for each of hidden's {tokens} rows is needed")
    return t.reshape(tokens, t.shape[-1])


def _need_frozen(**teacher: torch.Tensor | None) -> None:
    for name, t in teacher.items():
        if isinstance(t, torch.Tensor) and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{_OP}: {name} requires a gradient, and the teacher has none; {name}.detach() is needed")


def _need_options(kind: str, beta: float, temperature: float, outputs: Sequence[str]) -> None:
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise ValueError(f"{_OP}: outputs names {unknown[0]!r}; none or {', '.join(OUTPUTS)} are needed")
    if kind not in KINDS:
        raise ValueError(f"{_OP}: kind is {kind!r}; one of {', '.join(map(repr, KINDS))} is needed")
    if kind == "jsd" and not 0 < beta < 1:
        raise ValueError(f"{_OP}: beta is {beta}; for kind 'jsd' a number between 0 and 1 is needed")
    if not 1e-6 <= temperature <= 1e6:
        raise ValueError(f"{_OP}: temperature is {temperature}; a number from 1e-6 to 1e6 is needed")


def linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor | None = None,
    teacher_weight: torch.Tensor | None = None,
    *,
    kind: Kind = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = 0.0,
    teacher_logits: torch.Tensor | None = None,
    teacher_indices: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    outputs: Sequence[str] = (),
) -> Divergence:
    """How far the student's p = softmax(z), z = softcap · tanh(s / softcap) / temperature and
    s = logit_scale · (hidden · weightᵀ + bias), is from the teacher's q, made likewise of what the teacher has:
    KL(q ‖ p) ("forward"), KL(p ‖ q) ("reverse"), or beta · KL(q ‖ m) + (1 - beta) · KL(p ‖ m) with the mixture
    m = beta · q + (1 - beta) · p ("jsd", the generalised Jensen-Shannon divergence of Agarwal et al., "On-Policy
    Distillation of Language Models", 2024). Of neither's logits more exist at once than a memory budget allows
    (`bastile.ops.fused_linear_cross_entropy.set_logits_memory`). They are float32, whatever the inputs' type.

    Args:
        hidden: [..., H], the student's, float32, bfloat16 or float16.
        weight: [V, H], its head's, of hidden's type (under autocast both are cast as a linear layer casts them; the
            gradient of a float32 weight is left in float32).
        teacher_hidden: [..., G], the teacher's, of any of these types and any width.
        teacher_weight: [V, G], its head's, of that type. The teacher is frozen: nothing of it may require a gradient.
        kind: "forward", "reverse" or "jsd".
        beta: the teacher's part of the mixture, between 0 and 1; for "jsd" alone.
        temperature: divides the logits of both, last of all; from 1e-6 to 1e6.
        bias: [V] of hidden's type.
        teacher_bias: [V] of teacher_hidden's type.
        logit_scale: multiplies the student's logits, first of all.
        softcap: between the two; 0 or None: none.
        teacher_logit_scale: as logit_scale, of the teacher's.
        teacher_softcap: as softcap, of the teacher's.
        teacher_logits: [..., V] of any float type, in place of teacher_hidden and teacher_weight; with
            teacher_indices [..., K], the logits (or log-probabilities) of these classes, which have all of the
            teacher's probability then.
        teacher_indices: [..., K] int64, without repetition in a row.
        mask: [...], bool or numbers: rows where it is 0 give 0 and have no gradient. They are left out of the products
            as `bastile.ops.fused_linear_cross_entropy.set_compaction` says.
        outputs: ("entropy",): the student's, -Σ p log p, without a gradient.

    Returns:
        Divergence: [...] float32, and the entropy likewise or None. Gradients flow to whichever of hidden, weight and
        bias require them. On CUDA they take two products less where the upstream gradient is the same for all rows, as
        that of a sum or mean over them is: leave rows out by `mask` rather than by a product.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed. An index out of
            range is an error on CPU; on CUDA it gives a NaN, for checking would wait for the device.
    """
    _need_options(kind, beta, temperature, outputs)
    _need_frozen(
        teacher_hidden=teacher_hidden, teacher_weight=teacher_weight, teacher_bias=teacher_bias,
        teacher_logits=teacher_logits,
    )  # fmt: skip
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise TypeError(f"{_OP}: mask is a {type(mask).__name__}; a tensor is needed")
    shape = hidden.shape[:-1]
    counts = None if mask is None else (mask != 0).reshape(-1).to(torch.uint8)
    rows = hidden.reshape(-1) if hidden.dim() == 0 else hidden.reshape(-1, hidden.shape[-1])[:, :1].reshape(-1)
    own_weight = weight
    flat, weight, bias, is_served = head_inputs(_OP, hidden, weight, rows if counts is None else counts, bias)
    tokens = flat.shape[0]
    teacher = [_rows_of("teacher_hidden", teacher_hidden, tokens), teacher_weight, teacher_bias]
    if teacher_hidden is not None:
        need_floats(_OP, teacher_hidden=teacher_hidden, teacher_weight=teacher_weight, teacher_bias=teacher_bias)
        rows_of_teacher, *rest = teacher
        assert rows_of_teacher is not None
        teacher = list(cast_as_linear(rows_of_teacher, *rest))
    given = [_rows_of("teacher_logits", teacher_logits, tokens), _rows_of("teacher_indices", teacher_indices, tokens)]
    maps = (logit_scale, softcap or 0.0, teacher_logit_scale, teacher_softcap or 0.0)
    if not (is_served and served(*teacher, given[0])):
        found = _in_torch(flat, weight, bias, teacher, given, counts, kind, beta, temperature, maps)
        entropy = found.entropy
    else:
        chosen = None if counts is None else rows_to_compute(_OP, flat, counts, 0, None)
        computed, among = flat, counts
        if chosen is not None:
            assert counts is not None
            computed, among = gather(flat, chosen), counts.index_select(0, chosen)
            teacher[0], *given = [None if t is None else t.index_select(0, chosen) for t in (teacher[0], *given)]
        weight, rounded = float32_gradient(own_weight, weight)
        contiguous = [None if t is None else t.contiguous() for t in (*teacher, *given)]
        made: Any = _LinearDivergence.apply(
            computed.contiguous(), weight, bias, contiguous, among,
            (KINDS[kind], beta, temperature, *maps), "entropy" in outputs, torch.is_grad_enabled(), rounded,
        )  # fmt: skip
        if chosen is not None:
            made = [None if t is None else scatter(t, chosen, tokens) for t in made]
        found, entropy = Divergence(made[0]), made[1]
    if "entropy" not in outputs or entropy is None:
        return Divergence(found.divergence.reshape(shape))
    return Divergence(found.divergence.reshape(shape), entropy.reshape(shape))


def _in_torch(
    flat: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    teacher: list[Any],
    given: list[Any],
    counts: torch.Tensor | None,
    *options: Any,
) -> Divergence:
    """For what no kernel serves."""
    logits, indices = given
    if (teacher[0] is None) == (logits is None):
        raise ValueError(f"{_OP}: one of teacher_hidden, with teacher_weight, and teacher_logits is needed")
    if logits is None:
        logits = torch.nn.functional.linear(*teacher)
    elif indices is not None:
        logits = _spread(logits, indices, weight.shape[0])
    *most, maps = options
    found = reference(torch.nn.functional.linear(flat, weight, bias), logits, *most, *maps)
    if counts is None:
        return found
    left_out = counts == 0
    return Divergence(*[t.masked_fill(left_out, 0.0) for t in found if t is not None])
