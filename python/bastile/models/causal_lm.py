"""The forward of a causal language model whose loss needs no logits.

With labels, in training, the output's `logits` is None and its `loss` comes from the last hidden states and the head's
weight at once. Every other call, and every model whose head or loss someone has changed, runs the original forward."""

import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.loss import loss_utils
from transformers.modeling_outputs import CausalLMOutputWithPast

from bastile.guards import untouched
from bastile.models.rebind import parameter_names
from bastile.models.router_loss import ask_for_router_logits, with_router_loss
from bastile.models.sites import Found, ModelFile, Site
from bastile.ops._common import served
from bastile.ops._valid_rows import ValidCount, is_worthwhile
from bastile.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from bastile.report import Tally

_LOSS, _CROSS_ENTROPY = loss_utils.ForCausalLMLoss, loss_utils.fixed_cross_entropy


def sites(file: ModelFile) -> Iterator[Site]:
    for found in file.forwards("head"):
        given = inspect.signature(found.function).parameters
        if not {"labels", "logits_to_keep"}.issubset(given):
            file.unknown[f"{found.name}.forward"] = "has arguments of other names"
            continue
        # The wrapper makes tuples of outputs, and Accelerate keeps it in a model that it prepares for mixed precision.
        site = file.wrapped_site("fused_linear_cross_entropy", found.owner, partial(causal_lm_forward, found))
        if site is not None:
            yield site


def causal_lm_forward(found: Found, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    names = parameter_names(original)
    backbone, head, router_loss = found.names["model"], found.names["lm_head"], found.form.variant["router_loss"]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        lm_head = getattr(self, head)
        if len(given) < len(args) + len(kwargs):  # more than it has parameters, or one of them twice
            return original(self, *args, **kwargs)
        if not _wants_only_the_loss(self, given):
            tally.step_aside("logits are wanted, or another loss: evaluation, no labels, a part of the logits", True)
            return original(self, *args, **kwargs)
        if not _is_plain_head(lm_head, self.config.vocab_size):
            tally.step_aside("the head is not weight and bias alone")
            return original(self, *args, **kwargs)
        tally.count()
        targets = _targets(given.pop("labels"), given).to(lm_head.weight.device)
        # Counted ahead of the backbone, so that nobody waits for the count when the loss asks for it.
        counted = is_worthwhile(targets.numel(), lm_head.weight)
        valid_rows = ValidCount(targets, given.get("ignore_index", -100)) if counted else None
        given.pop("logits_to_keep", None)
        routed = router_loss and ask_for_router_logits(self, given)
        outputs = getattr(self, backbone)(**given, return_dict=True)
        loss = _loss(outputs.last_hidden_state, lm_head, targets, given, valid_rows)
        if router_loss:
            return with_router_loss(self, original, outputs, loss, given.get("attention_mask"), routed)
        return CausalLMOutputWithPast(
            loss=loss,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    return forward


def _wants_only_the_loss(model: nn.Module, given: dict[str, Any]) -> bool:
    """Evaluation keeps its logits, since metrics read them; a chosen subset of logits is the original's business, and
    so is a loss function of the user's own."""
    keep, num_items = given.get("logits_to_keep", 0), given.get("num_items_in_batch")
    return (
        model.training
        and given.get("labels") is not None
        and isinstance(keep, int)
        and keep == 0
        and model.loss_function is _LOSS
        and loss_utils.fixed_cross_entropy is _CROSS_ENTROPY  # which that one calls
        # DataParallel hands each replica a vector, which makes the original's loss a vector too.
        and (not torch.is_tensor(num_items) or num_items.dim() == 0)
    )


def _is_plain_head(head: nn.Module, vocabulary: int) -> bool:
    """Whether the head is weight and bias and nothing more. It is not where it carries an adapter, is quantised,
    offloaded, hooked, or sharded so that its weight is whole only inside its own call (ZeRO-3, FSDP: by hooks)."""
    if type(head) is not nn.Linear or not untouched(head):
        return False
    weight, bias = head.weight, head.bias
    return (
        served(weight)
        and weight.shape[0] == vocabulary
        and (bias is None or (served(bias) and bias.dtype == weight.dtype))
    )


def _targets(labels: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Token i predicts label i + 1; the last one predicts nothing."""
    shifted = given.get("shift_labels")
    return F.pad(labels, (0, 1), value=given.get("ignore_index", -100))[..., 1:] if shifted is None else shifted


def _loss(
    hidden: torch.Tensor,
    head: nn.Linear,
    targets: torch.Tensor,
    given: dict[str, Any],
    valid_rows: ValidCount | None,
) -> torch.Tensor:
    """What ForCausalLMLoss returns for the head's logits, with the keyword arguments that it reads."""
    num_items = given.get("num_items_in_batch")
    if torch.is_tensor(num_items):
        num_items = num_items.to(hidden.device)
    return fused_linear_cross_entropy(
        hidden,
        head.weight,
        targets,
        bias=head.bias,
        ignore_index=given.get("ignore_index", -100),
        num_items=num_items,
        valid_rows=valid_rows,
    )
