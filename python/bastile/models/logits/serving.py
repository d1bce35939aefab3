"""For the time of a model's forward, its output head's call is put off.

What is put there is an attribute of one module, and is gone when the forward returns: copies, pickles and replicas of
a model know nothing of it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from bastile.models.adapters import NotServed
from bastile.models.logits import follow, parts, stacked  # noqa: F401  (they enter what is followed)
from bastile.models.logits.head import adapter_of, is_gathered, is_parallel, logits_type, output_heads, why_not
from bastile.models.logits.losses import causal_loss
from bastile.models.logits.pending import Call, Forward
from bastile.models.logits.said import note
from bastile.models.logits.tensor import Logits, put_off
from bastile.models.rebind import as_keywords, parameter_names
from bastile.models.sites import calls
from bastile.ops._common import served
from bastile.ops._valid_rows import ValidCount, is_worthwhile, version
from bastile.ops.vocabulary_parallel import local_of

_CALL = "_call_impl"  # what Module.__call__ calls: hooks and forward
_LOSS_FUNCTION = "_loss_function"  # where a model of Transformers keeps one that was given to it
_NO_FORWARD = Forward("a head served alone", has_labels=False, is_open=False)
_now = threading.local()


def serve(head: nn.Module) -> Callable[[], None]:
    """Puts the calls of this head off from now on; returns what undoes it.

    A head that is more than a weight and a bias (head.why_not) is left as it is, which is said once."""
    if _CALL in head.__dict__:  # a model within a model, both of which have it
        return lambda: None
    why = why_not(head)
    if why is not None:
        note("stepped aside", _forward().model, why)
        return lambda: None
    method = head.__dict__[_CALL] = MethodType(_call_impl, head)

    def undo() -> None:
        if head.__dict__.get(_CALL) is method:
            del head.__dict__[_CALL]

    return undo


def _call_impl(head: nn.Linear, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and not kwargs and _can_wait(head, args[0]):
        hidden = args[0]
        try:
            adapter = adapter_of(head, hidden)
        except NotServed as why:
            note("stepped aside", _forward().model, f"the output head has an adapter: {why}")
            return type(head)._call_impl(head, hidden)
        return put_off(Call(head, hidden, _forward(), _type(head, hidden), adapter))
    return type(head)._call_impl(head, *args, **kwargs)


def _forward() -> Forward:
    return getattr(_now, "forward", _NO_FORWARD)


def _heads_served() -> int:
    """Models with a head whose forward has run, in this thread."""
    return getattr(_now, "served", 0)


def _can_wait(head: nn.Linear, hidden: Any) -> bool:
    if torch.compiler.is_compiling() or not isinstance(hidden, torch.Tensor) or hidden.dim() == 0:
        return False
    if torch.is_inference_mode_enabled() or why_not(head) is not None or _is_checkpointed():
        return False
    if is_gathered(head):
        # Shardings expect the call within the model's forward, where there is a loss to call for it.
        if not _forward().has_labels:
            note("stepped aside", _forward().model, "the output head is sharded, and the model has no labels")
        return _forward().has_labels and served(hidden)
    weight, bias = head.weight, head.bias
    weights = () if is_parallel(head) else (weight, bias)
    if not served(hidden, *weights) or hidden.shape[-1] != weight.shape[-1] or hidden.device != weight.device:
        return False
    types = {t.dtype for t in (hidden, weight, bias) if t is not None}
    return len(types) == 1 or torch.is_autocast_enabled(hidden.device.type)


def _is_checkpointed() -> bool:
    """Whether this runs again in the backward pass, where no model's forward is around it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def _type(head: nn.Linear, hidden: torch.Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return logits_type(head, hidden)


@contextmanager
def served_model(model: Any, given: dict[str, Any], asks_for_loss: bool = True) -> Iterator[None]:
    """A context for a model's forward that is called with these arguments. asks_for_loss: its code has the model's
    `loss_function`; else its labels go to a loss as they are, if they go to one."""
    labels = given.get("labels")
    wanted = _is_wanted(model, labels)
    heads = output_heads(model) if wanted else []
    if not heads:
        before, is_alone = _heads_served(), _forward() is _NO_FORWARD
        yield
        # Nor has a model within it any, or one around it, which may hand its labels on.
        if wanted and labels is not None and is_alone and _heads_served() == before:
            note("stepped aside", type(model).__name__, "its output head is not to be found: get_output_embeddings()")
        return
    _now.served = _heads_served() + 1
    outer = _forward()
    forward = _now.forward = Forward(type(model).__name__, labels is not None, getattr(model, "unshard", None))
    undo = [serve(head) for head in heads]
    if len(heads) == 1 and _CALL in heads[0].__dict__:
        serve_loss = _serve_loss(model, heads[0].weight, given) if asks_for_loss else None  # type: ignore[arg-type]
        if serve_loss is None:
            forward.count = _counted(labels, heads[0].weight)  # type: ignore[arg-type]
        else:
            undo.append(serve_loss)
    try:
        yield
    finally:
        for take_out in undo:
            take_out()
        _now.forward, forward.is_open = outer, False


def _is_wanted(model: Any, labels: Any) -> bool:
    """In training, and for every loss. Generation gets its logits at once."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return labels is not None or (torch.is_grad_enabled() and model.training)


def _counted(labels: Any, weight: torch.Tensor) -> ValidCount | None:
    """How many labels count of those that a model hands to its loss as they are. On a GPU nobody waits for that number
    when it is asked before the backbone runs."""
    weight = local_of(weight)
    if not torch.is_tensor(labels) or labels.dtype is not torch.int64 or labels.device != weight.device:
        return None
    return ValidCount(labels) if is_worthwhile(labels.numel(), weight) else None


def _serve_loss(model: Any, weight: torch.Tensor, given: dict[str, Any]) -> Callable[[], None] | None:
    """Lets the loss of a causal language model, if it is one, have what is known before the backbone runs: how many
    labels count. It divides by the number of items itself, too."""
    from transformers.loss import loss_utils
    from transformers.modeling_utils import PreTrainedModel

    labels, shifted = given.get("labels"), given.get("shift_labels")
    stock: Any = loss_utils.ForCausalLMLoss
    if not torch.is_tensor(labels) or _LOSS_FUNCTION in model.__dict__ or labels.dim() != 2:
        return None
    if stock is not _STOCK or loss_utils.fixed_cross_entropy is not _STOCK_CROSS_ENTROPY:
        return None
    # What `model.loss_function` is, which warns where a model that never asks for it has no type of loss.
    if getattr(type(model), "loss_function", None) is not PreTrainedModel.loss_function:
        return None
    if loss_utils.LOSS_MAPPING.get(str(getattr(model, "loss_type", None)), stock) is not stock:
        return None
    ignore_index = given.get("ignore_index", -100)

    def of_this_step() -> torch.Tensor:
        found = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shifted is None else shifted
        return found.to(weight.device)

    # Where nobody counts them they are made behind the backbone, when the device is busy with it.
    tokens = (labels if shifted is None else shifted).numel()
    early = of_this_step() if is_worthwhile(tokens, local_of(weight)) else None
    count = None if early is None else ValidCount(early, ignore_index)
    versions = [(t, version(t)) for t in (labels, shifted) if t is not None]

    @functools.wraps(stock)
    def loss_function(logits: Any, labels: Any, vocab_size: int, *args: Any, **kwargs: Any) -> Any:
        items = kwargs.get("num_items_in_batch")
        if (
            isinstance(logits, Logits)
            and not args
            and labels is given["labels"]
            and kwargs.get("shift_labels") is shifted
            and all(version(t) == then for t, then in versions)
            and kwargs.get("ignore_index", -100) == ignore_index
            and vocab_size == logits.shape[-1]
            and (not torch.is_tensor(items) or items.dim() == 0)  # DataParallel: a number for each replica
        ):
            targets = of_this_step() if early is None else early
            loss = causal_loss(logits, targets, ignore_index, items, count)
            if loss is not NotImplemented:
                return loss
        return stock(logits, labels, vocab_size, *args, **kwargs)

    model.__dict__[_LOSS_FUNCTION] = loss_function

    def undo() -> None:
        if model.__dict__.get(_LOSS_FUNCTION) is loss_function:
            del model.__dict__[_LOSS_FUNCTION]

    return undo


def _stock_losses() -> tuple[Any, Any]:
    try:
        from transformers.loss import loss_utils
    except ImportError:
        return None, None
    return loss_utils.ForCausalLMLoss, loss_utils.fixed_cross_entropy


_STOCK, _STOCK_CROSS_ENTROPY = _stock_losses()


def serving_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward during which its head is served.

    skip_logits=True, which some trainers pass, leaves the output's logits None where there is a loss."""
    names = parameter_names(original)
    says_itself = "skip_logits" in inspect.signature(original).parameters
    asks_for_loss = calls(original, "loss_function")

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        skip = None if says_itself else kwargs.pop("skip_logits", None)
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        given = as_keywords(names, args, kwargs)
        with served_model(self, given, asks_for_loss):
            output = original(self, *args, **kwargs)
        if skip and hasattr(output, "logits") and getattr(output, "loss", None) is not None:
            return dataclasses.replace(output, logits=None)
        return output

    return forward
