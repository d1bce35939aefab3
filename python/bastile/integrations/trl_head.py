"""TRL's head on its models, `model(..., fused_lm_head=True)`, without a wait for the device.

TRL picks the rows that count by their mask, and the host waits for all that it has launched, to learn how many they
are: in every pass, so that in a step of DPO the GPU has nothing to do while adapters are switched off, the
reference's pass is prepared, and its own result is waited for. Here labels are counted ahead of the backbone, and the
rows that count are taken behind it by a number that has long been there. What is computed, and what is returned, is
TRL's."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from bastile.guards import in_force, stock_of
from bastile.integrations.functions import Defaults, Parameters, given
from bastile.integrations.hidden import log_probs_from_hidden
from bastile.models.forms import is_known
from bastile.models.mask_flow import BALANCE, is_balance
from bastile.models.padding import IGNORED, assumed
from bastile.ops._valid_rows import ValidCount, is_worthwhile
from bastile.report import Tally

NAME = "add_fused_lm_head"
#: Its parameters, from TRL 1.15 on.
KNOWN = (("model", "temperature", "cast_lm_head_to_fp32", "outputs"),)
#: Of its code, in TRL 1.15 and 1.16.
_FINGERPRINTS = frozenset({"287872b23128", "57c86146a7a0"})
_DEVICES = ("cpu", "cuda")
_STATISTICS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def head(tally: Tally, original: Any, parameters: Parameters, defaults: Defaults) -> Callable[..., Any]:
    """In the place of TRL's function, which gives a model its forward."""
    stock = stock_of(original)
    if not is_known(stock, _FINGERPRINTS):
        return original  # what it calls is served, and waits
    home = sys.modules[stock.__module__]

    @functools.wraps(original)
    def add_fused_lm_head(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        model = given(parameters, defaults, args, kwargs)["model"]
        added = vars(model).get("forward")
        if isinstance(added, MethodType):
            now = functools.partial(_is_in_force, home, add_fused_lm_head)
            model.forward = MethodType(_forward(tally, added.__func__, now), model)

    return add_fused_lm_head


def _is_in_force(home: Any, ours: Any) -> bool:
    """Whether TRL's function is replaced where it is defined. Each trainer's module that had imported it before has one
    of its own, of the same code."""
    return getattr(in_force(getattr(home, NAME)), "__code__", None) is ours.__code__


def _forward(tally: Tally, added: Any, is_in_force: Callable[[], bool]) -> Callable[..., Any]:
    """added: what TRL's function has made, whose own variables say what is to be computed."""
    told = inspect.getclosurevars(added).nonlocals
    config, result = told["text_config"], added.__globals__["FusedCausalLMOutput"]
    options = {
        "temperature": told["temperature"],
        "logit_scale": told["logit_scale"],
        "softcap": told["final_logit_softcapping"],
        "outputs": [name for name in _STATISTICS if name in told["outputs"]],
    }

    @functools.wraps(added)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Any = None,
        shift_labels: Any = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        wants_router = kwargs.get("output_router_logits", getattr(config, "output_router_logits", False))
        is_more = told["cast_lm_head_to_fp32"] or wants_router
        is_ours = fused_lm_head and is_in_force() and not torch.compiler.is_compiling()
        head = self.get_output_embeddings() if is_ours and not is_more else None
        if head is None or head.weight.device.type not in _DEVICES:
            more = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            whole = functools.partial(added, self, *args, fused_lm_head=fused_lm_head, **more, **kwargs)
            if not is_ours or (wants_router and not _masks_router()):
                return whole()
            return assumed(self, kwargs.get("attention_mask"), _targets(labels, shift_labels), whole)
        is_shifted = shift_labels is not None
        target = _targets(labels, shift_labels).to(head.weight.device).contiguous()
        count = ValidCount(target, IGNORED) if is_worthwhile(target.numel(), target) else None

        def run() -> torch.Tensor:
            return getattr(self, told["backbone_attr"])(*args, **{**kwargs, "use_cache": False}).last_hidden_state

        states = assumed(self, kwargs.get("attention_mask"), target, run)
        head = self.get_output_embeddings()  # FSDP may have exchanged its weight meanwhile
        found = log_probs_from_hidden(
            states.to(head.weight.device),
            head.weight,
            target,
            bias=head.bias,
            ignore_index=IGNORED,
            valid_rows=count,
            **options,
        )
        tally.count()
        of_rows = {name: getattr(found, name) for name in ("log_probs", *_STATISTICS)}
        mask = target != IGNORED
        if not is_shifted:
            mask = mask[:, :-1]
            of_rows = {name: None if each is None else each[:, :-1] for name, each in of_rows.items()}
        of_rows = {name: _no_view(each) for name, each in of_rows.items()}
        divisor = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return result(loss=-of_rows["log_probs"].sum() / divisor, label_mask=mask, **of_rows)

    return forward


def _no_view(of_rows: torch.Tensor | None) -> torch.Tensor | None:
    """Where it has a gradient: FSDP2 warns of what a model returns that is one."""
    return of_rows.clone() if of_rows is not None and of_rows.requires_grad and of_rows._is_view() else of_rows


def _targets(labels: Any, shift_labels: Any) -> torch.Tensor:
    """Of each row, the last one's none, so that hidden states are taken as they lie."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED) if shift_labels is None else shift_labels


def _masks_router() -> bool:
    """Whether the loss that TRL makes of a router's logits, Mixtral's, leaves out those of padding."""
    return is_balance(getattr(importlib.import_module("transformers.models.mixtral.modeling_mixtral"), BALANCE, None))
