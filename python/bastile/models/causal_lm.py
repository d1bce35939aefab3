"""The forward of a model with an output head, whose loss needs no logits: with logits on demand, bastile.models.logits.

While torch.compile traces it, which knows no tensors without memory, the calls of the head in the forward's own code
are put off instead. The output's `logits` is None then, where nothing has read them."""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from bastile.graphs.lengths import ROUTER, asks_for
from bastile.guards import stock_of
from bastile.integrations import nemo_rl, prime_rl, trl, verl
from bastile.models import mask_flow, rewrite
from bastile.models.loading import is_of_losses
from bastile.models.logits import serving_forward, traced
from bastile.models.padding import is_of_loss, read_by
from bastile.models.rebind import as_keywords, parameter_names
from bastile.models.sites import ModelFile, Site, calls, own_forward
from bastile.report import Tally

_TRAINERS: dict[str, Any] = {"trl": trl, "verl": verl, "nemo_rl": nemo_rl, "prime_rl": prime_rl}

#: Classes with an output head take this, or labels and have a head, as their names or their code say.
_KEEPS, _USUAL_LOSS = "logits_to_keep", "ForCausalLMLoss"
_IS_CAUSAL = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHead(Model)?)$")
_IS_MASKED = re.compile(r"ForMaskedLM$")
_LOSSES = ("CrossEntropyLoss", "cross_entropy", "loss_function")


def sites(file: ModelFile) -> Iterator[Site]:
    """Every model with an output head: logits on demand need to know nothing of its code. And what trainers call."""
    if is_of_losses(file.name):
        yield from _TRAINERS[file.name.partition(".")[0]].sites(file)
        return
    for cls in file.own_classes():
        given = parameter_names(stock_of(vars(cls)["forward"]))
        is_causal = _KEEPS in given or ("labels" in given and any(_IS_CAUSAL.search(c.__name__) for c in cls.__mro__))
        if not is_causal and not ("labels" in given and _has_head(cls)):
            continue
        read = file.read(cls, rewrite.head_calls) if "labels" in given else None
        where = f"{cls.__name__}.forward"
        file.unknown.pop(where, None)
        if where in file.replaced:
            continue
        # The wrapper makes tuples of outputs, and Accelerate keeps it in a model that it prepares for mixed precision.
        masks_router = bool(file.read(cls, mask_flow.masks_router)) and mask_flow.is_balance(
            file.scope.get(mask_flow.BALANCE)
        )
        build = partial(model_forward, read, is_causal, masks_router)
        yield from file.wrapped_sites("fused_linear_cross_entropy", cls, build)


def _has_head(cls: type) -> bool:
    """Whether a class that is not a causal language model's has an output head, one that it names to Transformers or
    one of the usual name, and a loss that is a cross entropy."""
    derived = [each for each in cls.__mro__ if "forward" in vars(each) and each is not nn.Module]
    if not any(calls(function, name) for each in derived for function in _code_of(each) for name in _LOSSES):
        return False
    names_one = next((each for each in cls.__mro__ if "get_output_embeddings" in vars(each)), None)
    if names_one in derived or any(_IS_MASKED.search(each.__name__) for each in derived):
        return True
    forward, init = _code_of(cls)
    return calls(init, "lm_head") and calls(forward, "CrossEntropyLoss")


def _code_of(cls: type) -> tuple[Any, Any]:
    return own_forward(cls), cls.__init__  # type: ignore[misc]


def model_forward(
    read: tuple[Any, Any] | None, is_causal: bool, masks_router: bool, tally: Tally, original: Callable[..., Any]
) -> Callable[..., Any]:
    """read: the original's code, and its copy in which calls of the head can be put off; None: they cannot. is_causal:
    its labels are those of the tokens that come next. masks_router: its loss of router logits leaves out padding."""
    eager = in_graph = serving_forward(original)
    if read is not None:
        code, node = read
        in_graph = rewrite.rewritten(node, code, original, {rewrite.TRACED: traced})
    names, hands_on = parameter_names(original), _hands_on_what_it_does_not_know(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hands_on and not getattr(self.config, "return_dict", True):
            kwargs.setdefault("return_dict", True)  # to the backbone, whose output the original reads by name
        given = as_keywords(names, args, kwargs)
        if not torch.compiler.is_compiling():
            if not is_causal:  # which rows are read its code says: models/encoder_heads.py
                return eager(self, *args, **kwargs)
            is_known = masks_router or not _wants_router(self, given)
            with read_by(_labels(self, given) if is_known else None, are_next=True):
                return eager(self, *args, **kwargs)
        if read is None:
            return eager(self, *args, **kwargs)
        # Evaluation keeps its logits, since metrics read them.
        if not self.training or given.get("labels") is None or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        return traced.without_logits(in_graph(self, *args, **kwargs))

    return forward


def _wants_router(model: Any, given: dict[str, Any]) -> bool:
    """Whether there may be a loss of all of a router's logits, which reads padding's too."""
    config = getattr(model, "config", None)
    of_text = getattr(config, "get_text_config", lambda: config)()
    return asks_for(ROUTER, given, config) or asks_for(ROUTER, given, of_text)


def _labels(model: Any, given: dict[str, Any]) -> Any:
    """Those by which a model's loss leaves rows out; None where it is not the usual loss."""
    labels = given.get("labels")
    if labels is None or not is_of_loss(model, given, _USUAL_LOSS):
        return None
    return given.get("shift_labels", labels)


def _hands_on_what_it_does_not_know(forward: Callable[..., Any]) -> bool:
    """And `return_dict` is among that: what stands around this forward makes tuples of outputs."""
    parameters = inspect.signature(forward).parameters
    return "return_dict" not in parameters and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
