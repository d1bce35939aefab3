"""The loss of a mixture of experts that asks its router to spread the tokens, as Transformers adds it."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

#: What the forward of such a model reads for it, what it may mention beside, and its argument.
READS = ("load_balancing_loss_func", "num_experts", "num_experts_per_tok", "router_aux_loss_coef")
MAY_READ = ("output_router_logits", "router_logits", "to", "device", "MoeCausalLMOutputWithPast")
ARGUMENTS = ("output_router_logits",)


def ask_for_router_logits(model: Any, given: dict[str, Any]) -> bool:
    """Settles whether the backbone is to return its router's logits, and says so to it."""
    asked = given.get("output_router_logits")
    given["output_router_logits"] = model.config.output_router_logits if asked is None else asked
    return given["output_router_logits"]


def with_router_loss(
    model: Any, original: Callable[..., Any], outputs: Any, loss: torch.Tensor, mask: Any, wanted: bool
) -> MoeCausalLMOutputWithPast:
    """The output whose loss includes the router's, where that is wanted.

    original: the model's forward, among whose globals is the function for it."""
    auxiliary = None
    if wanted:
        balance = inspect.unwrap(original).__globals__["load_balancing_loss_func"]
        auxiliary = balance(outputs.router_logits, model.num_experts, model.num_experts_per_tok, mask)
        loss = loss + model.router_aux_loss_coef * auxiliary.to(loss.device)
    return MoeCausalLMOutputWithPast(
        loss=loss,
        aux_loss=auxiliary,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        router_logits=outputs.router_logits,
    )
