"""The output head of a model: where it is, and whether its call may be put off."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from bastile.guards import function_of, gathers
from bastile.models.adapters import NotServed, adapted, has_adapter
from bastile.ops.lora import Adapted
from bastile.ops.vocabulary_parallel import is_parted

_PARALLEL = "transformers.distributed.tensor_parallel"


def output_heads(model: Any) -> list[nn.Module]:
    """The modules that make the model's logits, as Transformers' models name them: one, none, or a list of several."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        head = None
    if head is None:  # of code of someone's own, whose embedding has a name that Transformers does not know
        head = getattr(model, "lm_head", None)
    heads = [_in_use(each) for each in (head if isinstance(head, nn.ModuleList) else [head])]
    return [each for each in heads if isinstance(each, nn.Module)]


def _in_use(head: Any) -> Any:
    """PEFT's modules_to_save: the copy that is trained, in a wrapper that calls it."""
    copies, active = getattr(head, "modules_to_save", None), getattr(head, "active_adapters", None)
    if isinstance(copies, nn.ModuleDict) and active and not getattr(head, "disable_adapters", False):
        return copies[active[0]]
    return head


def why_not(head: nn.Module) -> str | None:
    """What the head does beside multiplying by its weight; None: nothing, so that its call can be put off. Of a head
    with an adapter `adapter_of` says it."""
    if has_adapter(head):
        beneath: Any = head.base_layer
        if hasattr(beneath, "weight") and hasattr(beneath, "bias"):
            return None
        return f"the output head has an adapter on a {type(beneath).__name__}"
    cls = type(head)
    sharded = len(cls.__bases__) == 2 and cls.__bases__[0].__name__ == "FSDPModule" and cls.__bases__[1] is nn.Linear
    if cls is not nn.Linear and not sharded:
        return f"the output head is a {cls.__name__}, not a plain nn.Linear"
    own = head.__dict__.get("forward")
    if own is not None and function_of(own) is not cls.forward and not is_parallel(head):
        return "the output head has a forward of its own"
    if head._backward_hooks or head._backward_pre_hooks or _has_any_global_hook():
        return "hooks look at the gradients of the output head, or at all modules"
    for hook in _forward_hooks(head):
        if not gathers(hook):
            return f"the output head has a hook, {getattr(hook, '__qualname__', type(hook).__name__)}"
    return None


def adapter_of(head: nn.Module, hidden: Any) -> Adapted | None:
    """The head and its adapter, if it has one that is in use.

    Raises:
        NotServed: where its call cannot be put off; says why."""
    if not has_adapter(head):
        return None
    found = adapted(head, hidden)
    if found.weight is None or found.dropout:
        raise NotServed("it is on a quantised weight, or has dropout")
    if found.weight.requires_grad or (found.bias is not None and found.bias.requires_grad):
        raise NotServed("the weight beneath is trained too")
    return found if found.a is not None else None


def is_parallel(head: nn.Module) -> bool:
    """Whether Transformers' tensor parallelism has parts of its weight on several devices, all of which get the same
    hidden states and give all logits: then a loss can be computed in parts, or the weight gathered in place of the
    logits."""
    own: Any = head.__dict__.get("forward")
    if getattr(own, "__module__", None) != _PARALLEL or not isinstance(head.weight, _dtensor()):
        return False
    kept = inspect.getclosurevars(own).nonlocals
    style: Any = kept.get("self")
    return (
        type(style).__name__ == "ColwiseParallel"
        and function_of(kept.get("original_forward")) is type(head).forward
        and style.use_local_output
        and style.input_layouts.is_replicate()
        and style.output_layouts.is_replicate()
    )


def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor


def weights_of(head: Any, parted: bool) -> tuple[Any, Any]:
    """Weight and bias. parted: those of a parallel head as they are, for the loss that a model with labels computes in
    training, by all processes; who reads its logits then needs all of them, too. Else they are gathered here, in the
    head's call, which every process makes: who reads logits later needs nobody else."""
    if not is_parallel(head) or (parted and is_parted(head.weight)):
        return head.weight, head.bias
    return whole(head.weight), whole(head.bias)


def whole(weight: Any) -> Any:
    """A DTensor gathered, whose gradient goes back to the parts; anything else itself."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def is_gathered(head: nn.Module) -> bool:
    """Whether its weight is whole within its own call alone."""
    return any(map(gathers, _forward_hooks(head)))


def _forward_hooks(head: nn.Module) -> list[Any]:
    return [*head._forward_pre_hooks.values(), *head._forward_hooks.values()]


def logits_type(head: nn.Linear, hidden: Any) -> Any:
    """The type of the head's logits outside of autocast, where hooks may convert what goes in and out."""
    policy = getattr(head, "_get_fsdp_state", lambda: None)()
    policy = getattr(policy, "_mp_policy", None)
    if policy is None:
        return head.weight.dtype if is_gathered(head) else hidden.dtype
    return policy.output_dtype or policy.param_dtype or hidden.dtype
