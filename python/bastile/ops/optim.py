"""The optimiser's operators, over lists of tensors: what `bastile.optim` is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bastile._library import library  # noqa: F401  (registers the operators)

__all__ = ["AdamWLists", "adamw_", "grad_norm", "scale_"]

_ops = torch.ops.bastile


class AdamWLists(NamedTuple):
    """What a step of AdamW reads and writes: lists that go together by their place. The last three may be empty."""

    parameter: list[torch.Tensor]
    gradient: list[torch.Tensor]
    exp_avg: list[torch.Tensor]
    exp_avg_sq: list[torch.Tensor]
    step: list[torch.Tensor]
    master: list[torch.Tensor]
    exp_avg_scale: list[torch.Tensor]
    exp_avg_sq_scale: list[torch.Tensor]


def adamw_(
    lists: AdamWLists,
    *,
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    stochastic: bool = False,
    seed: int = 0,
    first_number: int = 0,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    clip: torch.Tensor | None = None,
) -> None:
    """One step of AdamW (Loshchilov and Hutter, 2019) for all tensors, in place, in one pass; computed in float32.

    Args:
        lists: all tensors of one device. parameter: float32, bfloat16 or float16; gradient: of its type and strides;
            exp_avg, exp_avg_sq: float32, bfloat16 or parameter's type, or uint8 [ceil(n / 256), 256] with float32
            [ceil(n / 256)] in exp_avg_scale and exp_avg_sq_scale; master: float32, what parameter is rounded of; step:
            one float32 each, which the call adds 1 to.
        lr: a number, or one float32 on the device. betas, eps, weight_decay, maximize: torch.optim.AdamW's.
        stochastic: bfloat16 is rounded by chance, so that the mean is right; a function of seed, step, first_number
            plus the tensor's place, and element. uint8 always is.
        grad_scale, found_inf: torch.amp.GradScaler's. clip: what gradients are multiplied with. One float32 each, on
            the device.

    Raises:
        RuntimeError: naming the argument, what was given and what is needed.
    """
    device_lr, number = (lr, 0.0) if isinstance(lr, torch.Tensor) else (None, lr)
    _ops.optim_adamw.default(
        *lists,
        device_lr,
        grad_scale,
        found_inf,
        clip,
        number,
        betas[0],
        betas[1],
        eps,
        weight_decay,
        maximize,
        stochastic,
        seed,
        first_number,
    )


def grad_norm(
    gradients: Sequence[torch.Tensor], max_norm: float = float("inf"), grad_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The 2-norm of all gradients together, divided by grad_scale, and what clips them: min(1, max_norm / (norm +
    1e-6)). One float32 each, on the gradients' device: nothing waits for them. Summed in a fixed order.

    Args:
        gradients: at least one; float32, bfloat16 or float16, without gaps, on one device.
        max_norm: 0 or above.
        grad_scale: one float32 on the device.
    """
    return _ops.optim_norm.default(gradients, grad_scale, max_norm)


def scale_(gradients: Sequence[torch.Tensor], coefficient: torch.Tensor) -> None:
    """Gradients times one float32 on their device, in place. Where that is 1 they are not read."""
    _ops.optim_scale.default(gradients, coefficient)
