"""The forward of a model with an output head, whose loss needs no logits: with logits on demand, bastile.models.logits.

While torch.compile traces it, which knows no tensors without memory, the calls of the head in the forward's own code
are put off instead. The output's `logits` is None then, where nothing has read them."""

import functools
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bastile.guards import stock_of
from bastile.integrations import nemo_rl, prime_rl, trl, verl
from bastile.models import rewrite
from bastile.models.loading import is_of_losses
from bastile.models.logits import serving_forward, traced
from bastile.models.rebind import parameter_names
from bastile.models.sites import ModelFile, Site
from bastile.report import Tally

_TRAINERS: dict[str, Any] = {"trl": trl, "verl": verl, "nemo_rl": nemo_rl, "prime_rl": prime_rl}

#: Classes with an output head take this, or labels, and are called so or derived from such.
_KEEPS = "logits_to_keep"
_HAS_HEAD = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHead(Model)?)$")


def sites(file: ModelFile) -> Iterator[Site]:
    """Every model with an output head: logits on demand need to know nothing of its code. And what trainers call."""
    if is_of_losses(file.name):
        yield from _TRAINERS[file.name.partition(".")[0]].sites(file)
        return
    for cls in file.own_classes():
        given = parameter_names(stock_of(vars(cls)["forward"]))
        if _KEEPS not in given and not ("labels" in given and any(_HAS_HEAD.search(c.__name__) for c in cls.__mro__)):
            continue
        read = file.read(cls, rewrite.head_calls) if "labels" in given else None
        where = f"{cls.__name__}.forward"
        file.unknown.pop(where, None)
        if where in file.replaced:
            continue
        # The wrapper makes tuples of outputs, and Accelerate keeps it in a model that it prepares for mixed precision.
        site = file.wrapped_site("fused_linear_cross_entropy", cls, partial(model_forward, read))
        if site is not None:
            yield site


def model_forward(read: tuple[Any, Any] | None, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    """read: the original's code, and its copy in which calls of the head can be put off; None: they cannot."""
    eager = serving_forward(original)
    if read is None:
        return eager
    code, node = read
    in_graph = rewrite.rewritten(node, code, original, {rewrite.TRACED: traced})
    names = parameter_names(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return eager(self, *args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        # Evaluation keeps its logits, since metrics read them.
        if not self.training or given.get("labels") is None or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        return traced.without_logits(in_graph(self, *args, **kwargs))

    return forward
