"""The optimiser that a Trainer makes: bastile.optim.AdamW where that would be torch.optim.AdamW, its default.

The Trainer makes its own first; ours takes over its groups. It has the same state_dict, so checkpoints go both ways.
What the Trainer calls to clip gradients then finds the norm in one launch, and the step multiplies as it reads; where
somebody may look at gradients in between they are clipped in place."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torchs

from bastile.models.sites import ModelFile, Site
from bastile.report import Tally

TRAINER = "transformers.trainer"
#: Ways of running in which Accelerate leaves parameters whole and the optimiser to itself. FSDP2, beside them, hands
#: the optimiser its shards.
_WHOLE = frozenset({"NO", "MULTI_GPU", "MULTI_CPU"})
#: Of a callback: what is called between clipping and the end of the step.
_BETWEEN = ("on_pre_optimizer_step", "on_optimizer_step")


def sites(file: ModelFile) -> Iterator[Site]:
    cls = file.scope.get("Trainer")
    if file.name == TRAINER and isinstance(cls, type) and "create_optimizer" in vars(cls):
        made = partial(_create_optimizer, Tally.of("adamw", f"{TRAINER}.Trainer"))
        yield Site("adamw", "Trainer.create_optimizer", cls, "create_optimizer", made, (), made)


def _create_optimizer(tally: Tally, original: Any) -> Any:
    @functools.wraps(original)
    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.optimizer
        found = original(self, *args, **kwargs)
        if before is not None or type(self.optimizer) is not torch.optim.AdamW:
            return found  # somebody else's, or one that was asked for
        reason = _why_not(self, self.optimizer)
        if reason is not None:
            tally.step_aside(reason, is_usual=True)
            return found
        from bastile.optim import AdamW
        from bastile.optim.clip import clip_in_step

        self.optimizer = AdamW(self.optimizer.param_groups, **_defaults(self.optimizer))
        clip_in_step(self, unless=partial(_is_watched, self))
        tally.count()
        return self.optimizer

    return create_optimizer


def _why_not(trainer: Any, optimizer: torch.optim.Optimizer) -> str | None:
    kind = trainer.accelerator.distributed_type.name
    shards = getattr(trainer.accelerator, "is_fsdp2", False)
    if kind not in _WHOLE and not shards:
        return f"{kind} has a say in the optimiser"
    from bastile.ops._common import FLOATS
    from bastile.optim.adamw import TORCHS_ALONE, serves

    if any(group.get(name) for group in optimizer.param_groups for name in TORCHS_ALONE):
        return f"{' or '.join(TORCHS_ALONE)}, which torch's AdamW alone has"
    for group in optimizer.param_groups:
        for p in group["params"]:
            # Processes that FSDP2 sends their weights later have them on no device yet; all must choose alike.
            is_to_come = shards and p.is_meta and p.dtype in FLOATS
            if not (is_to_come or (type(p) is nn.Parameter and serves(p))):
                return f"a parameter is a {type(p).__name__} of {p.dtype} on {p.device.type}"
    return "it has hooks" if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks else None


def _defaults(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = ("lr", "betas", "eps", "weight_decay", "maximize", "foreach", "capturable", "fused")
    return {name: optimizer.defaults[name] for name in names if name in optimizer.defaults}


def _is_watched(trainer: Any) -> bool:
    """Whether somebody may look at gradients between clipping and the end of the step."""
    from transformers import TrainerCallback

    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # of Accelerate's around it
    hooks = (
        torchs._global_optimizer_pre_hooks,
        torchs._global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
    return any(hooks) or any(
        getattr(type(callback), name) is not getattr(TrainerCallback, name)
        for callback in trainer.callback_handler.callbacks
        for name in _BETWEEN
    )
