"""The forward of a causal language model whose loss needs no logits.

It is the original, with logits on demand: bastile.models.logits. While torch.compile traces it, which knows no tensors
without memory, a training step with labels is written out here instead: the output's `logits` is None then, and its
`loss` comes from the last hidden states and the head's weight at once."""

import functools
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.loss import loss_utils
from transformers.modeling_outputs import CausalLMOutputWithPast

from bastile.guards import stock_of, untouched
from bastile.integrations import nemo_rl, prime_rl, trl, verl
from bastile.models.loading import is_of_losses
from bastile.models.logits import serving_forward
from bastile.models.rebind import parameter_names
from bastile.models.router_loss import ask_for_router_logits, with_router_loss
from bastile.models.sites import Found, ModelFile, Site
from bastile.ops._common import served
from bastile.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from bastile.report import Tally

_TRAINERS: dict[str, Any] = {"trl": trl, "verl": verl, "nemo_rl": nemo_rl, "prime_rl": prime_rl}
_LOSS, _CROSS_ENTROPY = loss_utils.ForCausalLMLoss, loss_utils.fixed_cross_entropy


#: Classes with an output head take this, or labels, and are called so or derived from such.
_KEEPS = "logits_to_keep"
_HAS_HEAD = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHead(Model)?)$")


def sites(file: ModelFile) -> Iterator[Site]:
    """Every model with an output head: logits on demand need to know nothing of its code. And what trainers call."""
    if is_of_losses(file.name):
        yield from _TRAINERS[file.name.partition(".")[0]].sites(file)
        return
    for cls in file.own_classes():
        forward = stock_of(vars(cls)["forward"])
        given = parameter_names(forward)
        if _KEEPS not in given and not ("labels" in given and any(_HAS_HEAD.search(c.__name__) for c in cls.__mro__)):
            continue
        found = file.known(cls)
        build: Any = on_demand
        if found is not None and found.form.kind == "head" and {"labels", _KEEPS}.issubset(given):
            build = partial(causal_lm_forward, found)
        where = f"{cls.__name__}.forward"
        file.unknown.pop(where, None)
        if where in file.replaced:
            continue
        # The wrapper makes tuples of outputs, and Accelerate keeps it in a model that it prepares for mixed precision.
        site = file.wrapped_site("fused_linear_cross_entropy", cls, build)
        if site is not None:
            yield site


def on_demand(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    """Of code that is not known: all that needs none of it."""
    return serving_forward(original)


def causal_lm_forward(found: Found, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    names = parameter_names(original)
    backbone, head, router_loss = found.names["model"], found.names["lm_head"], found.form.variant["router_loss"]
    eager = serving_forward(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            if not getattr(self.config, "return_dict", True):
                kwargs.setdefault("return_dict", True)  # to the backbone, whose output the original reads by name
            return eager(self, *args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        lm_head = getattr(self, head)
        if len(given) < len(args) + len(kwargs):  # more than it has parameters, or one of them twice
            return original(self, *args, **kwargs)
        if not _wants_only_the_loss(self, given) or not _is_plain_head(lm_head, self.config.vocab_size):
            return original(self, *args, **kwargs)
        targets = _targets(given.pop("labels"), given).to(lm_head.weight.device)
        given.pop("logits_to_keep", None)
        routed = router_loss and ask_for_router_logits(self, given)
        outputs = getattr(self, backbone)(**given, return_dict=True)
        loss = _loss(outputs.last_hidden_state, lm_head, targets, given)
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


def _loss(hidden: torch.Tensor, head: nn.Linear, targets: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
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
    )
