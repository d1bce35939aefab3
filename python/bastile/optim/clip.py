"""Clipping gradients by their norm, in place or within a step of the optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from bastile.ops._common import PLAIN, served
from bastile.ops.optim import grad_norm, scale_
from bastile.optim.moments import local

if TYPE_CHECKING:
    from bastile.optim.adamw import AdamW

__all__ = ["clip_grad_norm_", "clip_in_step"]

_is_contiguous = torch.Tensor.is_contiguous


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    optimizer: AdamW | None = None,
) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_, in one pass over the gradients where they need no clipping, and in two else.

    The norm is one float32, where torch's has the gradients' type: of bfloat16 gradients that is three digits, and the
    scale has no more. Other norms than 2, and gradients that no kernel serves (sharded, sparse, float64, on several
    devices), go to torch's function.

    Args:
        parameters, max_norm, norm_type, error_if_nonfinite, foreach: torch's.
        optimizer: a bastile.optim.AdamW of exactly these parameters. The gradients then stay as they are: its next
            step() multiplies them with the scale as it reads them, and nothing passes over them in between. Whoever
            reads them before sees them unclipped. With other parameters they are clipped at once.

    Returns:
        The norm before clipping, on the gradients' device.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [g for p in given if (g := p.grad) is not None]
    if optimizer is not None and float(norm_type) == 2.0 and optimizer.has_exactly(given):
        norm = _clip_next_step(optimizer, gradients, max_norm)
        need_finite(norm, norm_type, error_if_nonfinite)
        return norm
    if float(norm_type) != 2.0 or not _served(gradients):
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    norm, coefficient = grad_norm(gradients, max_norm)
    need_finite(norm, norm_type, error_if_nonfinite)
    scale_(gradients, coefficient)
    return norm


def _clip_next_step(optimizer: AdamW, gradients: list[torch.Tensor], max_norm: float) -> torch.Tensor:
    norm, coefficient = total_norm(gradients, max_norm)
    optimizer.clip_next_step(coefficient)
    return norm


def need_finite(norm: torch.Tensor, norm_type: float, wanted: bool) -> None:
    if wanted and not torch.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


#: What tells whether kernels serve a tensor, so that one of each kind stands for all.
_kind_of = attrgetter("__class__", "dtype", "device", "layout")


def _served(gradients: list[torch.Tensor]) -> bool:
    kinds = dict(zip(map(_kind_of, gradients), gradients, strict=True))
    return (
        len({g.device for g in kinds.values()}) == 1
        and all(type(g) in PLAIN for g in kinds.values())
        and served(*kinds.values())
        and (all(map(_is_contiguous, gradients)) or all(map(is_dense, gradients)))
    )


def _is_sharded(gradients: list[torch.Tensor]) -> bool:
    return any(hasattr(g, "to_local") for g in gradients)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill their memory, each once."""
    if tensor.is_contiguous():
        return True
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != reach:
            return False
        reach *= size
    return True


def total_norm(
    gradients: list[torch.Tensor], max_norm: float, grad_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of all gradients and the coefficient that clips them, wherever they lie: shards of one mesh are summed
    up over it, devices of this process on the first gradient's."""
    if _served(gradients):
        return grad_norm(gradients, max_norm, grad_scale)
    if not gradients:
        return torch.zeros(()), torch.ones(())
    device = gradients[0].device
    groups: dict[Any, list[Any]] = {}
    for g in gradients:
        groups.setdefault((g.device, getattr(g, "device_mesh", None), getattr(g, "placements", None)), []).append(g)
    squares = []
    for (_, mesh, placements), group in groups.items():
        mine = [dense(g.to_local() if mesh is not None else g) for g in group]
        square = grad_norm(mine)[0].double().square()
        for dimension, placement in enumerate(placements or ()):
            if placement.is_partial():
                raise RuntimeError(
                    "clip_grad_norm_: a gradient is a DTensor of partial sums; reduce it (redistribute) first"
                )
            if not placement.is_replicate():
                torch.distributed.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square.to(device))
    norm = torch.stack(squares).sum().sqrt()
    if grad_scale is not None:
        norm = norm / grad_scale.to(device)
    return norm.float(), (max_norm / (norm + 1e-6)).clamp(max=1.0).float()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Itself, or a copy without gaps."""
    return tensor if is_dense(tensor) else tensor.contiguous()


def clip_in_step(trainer: Any, *, unless: Callable[[], bool] | None = None) -> None:
    """Clips within the optimiser's step in a Transformers or TRL trainer, or with an `accelerate.Accelerator`: what
    they call to clip gradients leaves them as they are, and their bastile.optim.AdamW clips as it reads them. The norm
    is reported as before. A callback that looks at gradients between the two sees them unclipped.

        trainer = Trainer(..., optimizer_cls_and_kwargs=(bastile.optim.AdamW, {"lr": 1e-5}))
        bastile.optim.clip_in_step(trainer)

    Args:
        trainer: has an `accelerator`, or is one. Where that runs another optimiser, DeepSpeed or FSDP 1, and for other
            norms than 2, it clips as before.
        unless: asked each time; where it is true gradients are clipped at once, in place.
    """
    accelerator = getattr(trainer, "accelerator", trainer)
    before = accelerator.clip_grad_norm_

    def clip(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2) -> Any:
        given = list(parameters)
        optimizer = _optimizer_of(accelerator)
        if optimizer is None or float(norm_type) != 2.0 or not optimizer.has_exactly(given):
            return before(given, max_norm, norm_type)
        accelerator.unscale_gradients()
        at_once = unless is not None and unless()
        gradients = [g for p in given if (g := p.grad) is not None]
        if at_once and not _is_sharded(gradients):
            return clip_grad_norm_(given, max_norm)
        with torch.no_grad():
            if not at_once:
                return _clip_next_step(optimizer, gradients, max_norm)
            # As if within the step: all processes exchange the same, whether or not each has somebody who looks.
            norm, coefficient = total_norm(gradients, max_norm)
            for g in map(local, gradients):
                g.mul_(coefficient.to(g.device))
            return norm

    accelerator.clip_grad_norm_ = clip


def _optimizer_of(accelerator: Any) -> AdamW | None:
    """The accelerator's optimiser, if it has one alone, and that is ours, in a way of running that leaves it to it."""
    from bastile.optim.adamw import AdamW

    kind = accelerator.distributed_type.name
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU") and not getattr(accelerator, "is_fsdp2", False):
        return None
    optimizers = [getattr(o, "optimizer", o) for o in accelerator._optimizers]
    return optimizers[0] if len(optimizers) == 1 and isinstance(optimizers[0], AdamW) else None
