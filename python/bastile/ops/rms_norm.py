"""RMSNorm: y = x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.compiler import is_compiling

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)
from bastile.ops._common import Function, first_order_only, need_floats, served
from bastile.recompute import offer

__all__ = ["BastileRMSNorm", "add_rms_norm", "rms_norm", "rms_norm_add"]

Casting = Literal["llama", "gemma", "none"]
_Types = tuple[torch.dtype, torch.dtype]
_CASTING: dict[Casting, int] = {"llama": 0, "gemma": 1, "none": 2}

_forward = torch.ops.bastile.rms_norm_forward.default
_backward = torch.ops.bastile.rms_norm_backward.default
_add_forward = torch.ops.bastile.add_rms_norm_forward.default
_forward_add = torch.ops.bastile.rms_norm_add_forward.default
_add_backward = torch.ops.bastile.add_rms_norm_backward.default


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps, casting):
        y, rstd = _forward(x, weight, eps, casting)
        ctx.save_for_backward(x, weight, rstd)
        ctx.casting = casting
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        want_dx, want_dweight, _, _ = ctx.needs_input_grad
        dx, dweight = _backward(dy, x, weight, rstd, ctx.casting, want_dx, want_dweight)
        if torch.is_grad_enabled() and not is_compiling():
            dx = first_order_only("rms_norm", dx, dy, x, weight)
            dweight = first_order_only("rms_norm", dweight, dy, x, weight)
        return dx if want_dx else None, dweight if want_dweight else None, None, None


class _AddRMSNorm(Function):
    """y and the sum. Without a residual the sum is x: autograd returns it as a view, whose gradient comes here."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, casting):
        ctx.set_materialize_grads(False)
        ctx.types = None
        if residual is None:
            total = x
            y, rstd = _forward(x, weight, eps, casting)
        else:
            ctx.types, terms = of_two_types(x, residual)
            y, total, rstd = _add_forward(*terms, weight, eps, casting)
        ctx.save_for_backward(total, weight, rstd)
        ctx.casting = casting
        if not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    def backward(ctx, dy, dsum):
        want_dx, want_dresidual, want_dweight, _, _ = ctx.needs_input_grad
        dx, dweight = dsum, None  # where y went nowhere: what is left is the addition
        if dy is not None:
            total, weight, rstd = ctx.saved_tensors
            wanted = want_dx or want_dresidual, want_dweight
            if dsum is None:
                dx, dweight = _backward(dy, total, weight, rstd, ctx.casting, *wanted)
            else:
                dx, dweight = _add_backward(dy, dsum, total, weight, rstd, ctx.casting, *wanted)
            if torch.is_grad_enabled() and not is_compiling():
                dx = first_order_only("add_rms_norm", dx, dy, dsum, total, weight)
                dweight = first_order_only("add_rms_norm", dweight, dy, total, weight)
        return *gradients_of_terms(dx, ctx.types, ctx.needs_input_grad), dweight if want_dweight else None, None, None


def adds_as_torch(x: torch.Tensor, residual: torch.Tensor) -> bool:
    """Whether kernels give the sum of two such types as torch does: not of bfloat16 and float16, which is float32."""
    return x.dtype is residual.dtype or torch.float32 in (x.dtype, residual.dtype)


def of_two_types(x: torch.Tensor, residual: torch.Tensor) -> tuple[_Types | None, tuple[torch.Tensor, torch.Tensor]]:
    """The terms' types, None where they are of one, and the terms, the wider one first, which kernels call x."""
    if x.dtype is residual.dtype:
        return None, (x, residual)
    return (x.dtype, residual.dtype), (x, residual) if x.dtype is torch.float32 else (residual, x)


def gradients_of_terms(
    dsum: torch.Tensor | None, types: _Types | None, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradient of a sum as that of each of its terms that wants one, in the term's type."""
    if dsum is None or types is None:
        return dsum if wanted[0] else None, dsum if wanted[1] else None
    return dsum.to(types[0]) if wanted[0] else None, dsum.to(types[1]) if wanted[1] else None


class _RMSNormAdd(Function):
    """The residual's gradient is the result's."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, casting):
        y, rstd = _forward_add(x, weight, residual, eps, casting)
        ctx.save_for_backward(x, weight, rstd)
        ctx.casting = casting
        return y

    @staticmethod
    def backward(ctx, dy):
        want_dx, want_dresidual, want_dweight, _, _ = ctx.needs_input_grad
        dx = dweight = None
        if want_dx or want_dweight:
            x, weight, rstd = ctx.saved_tensors
            dx, dweight = _backward(dy, x, weight, rstd, ctx.casting, want_dx, want_dweight)
            if torch.is_grad_enabled() and not is_compiling():
                dx = first_order_only("rms_norm_add", dx, dy, x, weight)
                dweight = first_order_only("rms_norm_add", dweight, dy, x, weight)
        gradients = (dx, want_dx), (dy, want_dresidual), (dweight, want_dweight)
        return *[gradient if want else None for gradient, want in gradients], None, None


def _reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: Casting) -> torch.Tensor:
    """The definition in plain torch, for devices and types without kernels."""
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if casting == "llama":
        return weight * normed.to(x.dtype)
    return (normed * (weight.float() + (casting == "gemma"))).to(x.dtype)


def check_weight(op: str, name: str, weight: torch.Tensor | None, x: torch.Tensor) -> None:
    """Raises for a weight that the plain torch code would broadcast. For the branch that runs it: kernels check."""
    need_floats(op, **{name: weight})
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: {name} has shape {list(weight.shape)}; {list(x.shape[-1:])}, the last dimension of what it "
            "multiplies, is needed"
        )


def _unknown_casting(op: str, casting: object) -> ValueError:
    return ValueError(f"{op}: casting is {casting!r}; one of {', '.join(map(repr, _CASTING))} is needed")


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, *, casting: Casting = "llama"
) -> torch.Tensor:
    """RMSNorm over the last dimension.

    Args:
        x: [..., H], 1 <= H <= 65536; float32, bfloat16 or float16, any strides.
        weight: [H], or None for ones (zeros for "gemma").
        eps: added to the mean of squares.
        casting: where the float32 result is rounded to x's type. "llama" (Llama, Qwen, Mistral): before the product
            with the weight, whose result has the promoted type; "gemma": after the product with 1 + weight; "none":
            after the product with weight, as torch.nn.functional.rms_norm does.

    Returns:
        [..., H], contiguous. Gradients flow to x and weight; dweight is summed in float32 in a fixed order.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    code = _CASTING.get(casting)
    if code is None:
        raise _unknown_casting("rms_norm", casting)
    if not served(x, weight):
        need_floats("rms_norm", x=x)
        check_weight("rms_norm", "weight", weight, x)
        return _reference(x, weight, eps, casting)
    y = _RMSNorm.apply(x, weight, eps, code)
    offer(_forward, (x, weight, eps, code), y)
    return y


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The addition of a residual and the RMSNorm of the sum, in one pass; backward too.

    Args:
        x: [..., H], 1 <= H <= 65536; float32, bfloat16 or float16, any strides.
        residual: of x's shape. Where one of the two is float32, the other may be of any type; torch adds bfloat16 and
            float16. None: the sum is x itself, and what is fused
            is the backward pass alone, where the gradient that reaches the sum from elsewhere meets that of the norm.
        weight: [H], or None for ones (zeros for "gemma").
        eps: added to the mean of squares.
        casting: see `rms_norm`.

    Returns:
        y and sum, both [..., H]: sum = x + residual, rounded to the type that torch gives it, and y = rms_norm(sum,
        weight). Gradients flow to x, residual and weight, from y, from sum or from both. The backward pass needs the
        sum: changing it in place is an error then. Without a residual, the sum shares x's memory.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    code = _CASTING.get(casting)
    if code is None:
        raise _unknown_casting("add_rms_norm", casting)
    if not served(x, residual, weight):
        need_floats("add_rms_norm", x=x, residual=residual)
        check_weight("add_rms_norm", "weight", weight, x)
        if residual is not None and residual.shape != x.shape:
            raise ValueError(
                f"add_rms_norm: residual has shape {list(residual.shape)}; {list(x.shape)}, that of x, is needed"
            )
        total = x if residual is None else x + residual
        return _reference(total, weight, eps, casting), total
    if residual is not None and not adds_as_torch(x, residual):
        x, residual = x + residual, None
    if residual is None and not x.requires_grad:  # no gradient will meet another
        y, total = _RMSNorm.apply(x, weight, eps, code), x
    else:
        y, total = _AddRMSNorm.apply(x, residual, weight, eps, code)
    if residual is None or (not is_compiling() and _is_aligned(x) and _is_aligned(residual)):
        offer(_forward, (total, weight, eps, code), y, inputs_stay=True)
    return y, total


def rms_norm_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
) -> torch.Tensor:
    """residual + rms_norm(x), in one pass: as layers have it that norm what a block returns.

    Args:
        x: [..., H], 1 <= H <= 65536; float32, bfloat16 or float16, any strides.
        residual: of x's shape. Where its type is not that of the norm's result, torch adds the two.
        weight: [H], or None for ones (zeros for "gemma").
        eps: added to the mean of squares.
        casting: see `rms_norm`.

    Returns:
        [..., H], contiguous: rounded once behind the addition, where the two steps round twice. Gradients flow to x,
        residual and weight.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was given and what is needed.
    """
    code = _CASTING.get(casting)
    if code is None:
        raise _unknown_casting("rms_norm_add", casting)
    need_floats("rms_norm_add", x=x, residual=residual)
    if residual.shape != x.shape:
        raise ValueError(
            f"rms_norm_add: residual has shape {list(residual.shape)}; {list(x.shape)}, that of x, is needed"
        )
    promotes = casting == "llama" and weight is not None and weight.dtype != x.dtype
    if not served(x, residual, weight) or residual.dtype != (torch.float32 if promotes else x.dtype):
        return residual + rms_norm(x, weight, eps, casting=casting)
    return _RMSNormAdd.apply(x, residual, weight, eps, code)


def _is_aligned(t: torch.Tensor) -> bool:
    """Whether kernels read it in the widest pieces that its rows allow, as they do the sum, which is a tensor of its
    own. From other pieces a norm is summed in another order, and could not be had again from the sum to the bit."""
    offset = t.storage_offset()
    return t.is_contiguous() and (not offset or offset * t.element_size() % 16 == 0)


class BastileRMSNorm(nn.Module):
    """RMSNorm with a weight of ones at first (zeros for "gemma"), in place of a model's own.

    Args:
        hidden_size: H, the size of the last dimension; None: without a weight.
        eps: added to the mean of squares; None: what torch.nn.RMSNorm adds then, the smallest difference from 1 in
            float32, or for float64 in float64.
        casting: see `rms_norm`.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int | None,
        eps: float | None = 1e-6,
        *,
        casting: Casting = "llama",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if hidden_size is None:
            self.register_parameter("weight", None)
        else:
            initial = torch.zeros if casting == "gemma" else torch.ones
            self.weight = nn.Parameter(initial(hidden_size, device=device, dtype=dtype))
        self.variance_epsilon = eps
        self.casting: Casting = casting

    @classmethod
    def from_module(cls, module: nn.Module, *, casting: Casting | None = None) -> BastileRMSNorm:
        """One that shares the weight of an existing RMSNorm module (of Transformers or torch).

        Args:
            module: with a weight [H] or None, and eps or variance_epsilon.
            casting: see `rms_norm`; None: what the module computes, which is found by calling its class's forward on a
                few small numbers.

        Raises:
            ValueError: for a module that computes something else, or lacks one of these.
        """
        op, name = "BastileRMSNorm.from_module", type(module).__name__
        known: Casting | None = None
        if type(module).forward is nn.RMSNorm.forward:
            known = "none"
        elif isinstance(module, cls):
            known = module.casting
        eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if eps is None and known is None:
            raise ValueError(f"{op}: {name} has neither variance_epsilon nor eps")
        weight = getattr(module, "weight", None)
        shape = tuple(getattr(module, "normalized_shape", ()) if weight is None else weight.shape)
        if len(shape) > 1 or (weight is not None and not shape):
            raise ValueError(f"{op}: {name} has a weight of shape {list(shape)}; one dimension is needed")
        casting = casting or known or _casting_of(module, eps)
        if casting is None:
            raise ValueError(
                f"{op}: {name} computes none of {', '.join(map(repr, _CASTING))}; a module that does, or casting=..., "
                "is needed"
            )
        new = cls(None, eps, casting=casting)
        new.weight = weight
        new.train(module.training)
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps = self.variance_epsilon
        if eps is None:
            eps = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps
        return rms_norm(x, self.weight, eps, casting=self.casting)

    def extra_repr(self) -> str:
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, casting={self.casting!r}"


#: The part of elements that may be rounded the other way where the same norm is summed in another order. Two castings
#: differ in a fifth of them and more.
_ROUNDED_OTHERWISE = 0.02


@torch.no_grad()
def _casting_of(module: nn.Module, eps: float) -> Casting | None:
    """What the class's forward computes, of bfloat16 and with weights of both types that a model may have; None: what
    no casting gives."""
    own = module._parameters.get("weight")
    if len([*module.parameters(), *module.buffers()]) != (own is not None):
        return None  # a bias, say, which might be zero today
    size = (0 if own is None else own.numel()) or 64  # a weight whose shards are elsewhere has no elements
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 + 4096 // size, size, generator=generator)
    x[::2] *= eps**0.5  # eps counts in half of the rows, and must be the one that is added
    x = x.bfloat16()
    fitting = set(_CASTING)
    for dtype in (torch.bfloat16, torch.float32):
        weight = None if own is None else torch.rand(size, generator=generator).add(0.5).to(dtype)
        probe = copy.copy(module)
        probe._parameters = {"weight": None if weight is None else nn.Parameter(weight)}
        try:
            with torch.autocast("cpu", enabled=False):
                got = type(module).forward(probe, x)
        except Exception:  # whatever else it wants, it is no function of one tensor
            return None
        fitting = {c for c in fitting if _is_near(got, _reference(x, weight, eps, c))}
    # Without a weight "none" and "llama" are the same.
    return next((c for c in _CASTING if c in fitting), None)


def _is_near(got: object, want: torch.Tensor) -> bool:
    return (
        isinstance(got, torch.Tensor)
        and got.dtype is want.dtype
        and got.shape == want.shape
        and bool((got != want).float().mean() <= _ROUNDED_OTHERWISE)
    )
