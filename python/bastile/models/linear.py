"""Linear layers of float32 under autocast, as `Trainer(bf16=True)` has them: PyTorch's own class, in training. Of
whatever model: without autocast, and for weights of 16 bits or frozen ones, a call is what it was.

And the forward of attentions in which queries, keys and values of one input are one node (bastile.ops.projections).
Where they call a rotary function, it is models/rotary.py's."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C import _is_any_autocast_enabled
from torch.compiler import is_compiling

from bastile.graphs.host_time import LEAST, counts
from bastile.guards import is_ours, mark_as_ours, stock_of
from bastile.models import rewrite, rewrite_chunks
from bastile.models.adapters import linears, share_a_node
from bastile.models.forms import Code, is_known
from bastile.models.loading import LINEAR, is_torchs
from bastile.models.sites import ModelFile, Site
from bastile.ops._narrow import is_narrowed
from bastile.ops.autocast_linear import autocast_linear
from bastile.report import Tally

_OPERATOR, _ATTENTION = "autocast_linear", "Attention"
#: Of nn.Linear.forward's code.
_FINGERPRINTS = frozenset({"e98e11a7956e"})


def sites(file: ModelFile) -> Iterator[Site]:
    if file.name == LINEAR and is_known(stock_of(nn.Linear.forward), _FINGERPRINTS):
        yield file.forward_site(_OPERATOR, nn.Linear, linear_forward)
    if is_torchs(file.name):
        return
    for cls in file.own_classes():
        read = file.read(cls, rewrite.attended) if _ATTENTION in cls.__name__ else None
        if read is not None and not read[0].rotary:
            yield from file.wrapped_sites(_OPERATOR, cls, partial(projecting, *read, together))


def together(tally: Tally, x: Any, *modules: nn.Module) -> Any:
    """Each module's result; by one node where all are layers that it serves, with adapters if PEFT's layers are."""
    if share_a_node(x, modules):
        for _ in modules:
            tally.count()
        return linears(x, modules)
    adapted = [module for module in modules if hasattr(module, "lora_A")]
    if adapted and isinstance(x, torch.Tensor) and all([is_ours(type(module).forward) for module in adapted]):
        return linears(x, modules)
    return [module(x) for module in modules]


def projecting(code: Code, node: Any, called: Any, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    """The code's function with modules of one input called at once, as `node` has them. called: what calls them."""
    helpers = {rewrite.PROJECTED: partial(called, tally)}
    if code.made_by(rewrite_chunks.chunks) is None:
        return rewrite.rewritten(node, code, original, helpers)
    # models/chunked_attention.py rewrites the same function.
    return rewrite.with_others(node, code, original, helpers, partial(rewrite.projections_in, code))


def _in_float32(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """A layer whose weight is kept in bfloat16: see bastile.models.frozen_bf16."""
    return nn.functional.linear(input, self.weight.float(), self.bias)


def linear_forward(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_any_autocast_enabled():
            call = _in_float32 if not is_compiling() and is_narrowed(self) else original
            return call(self, *args, **kwargs)
        if is_compiling() or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        weight = self.weight
        if len(args) != 1 or kwargs or weight.dtype is not torch.float32 or not weight.requires_grad:
            return original(self, *args, **kwargs)
        x = args[0]
        if counts(self, x) and x.numel() * weight.shape[0] < LEAST:
            return original(self, x)
        tally.count()
        return autocast_linear(x, weight, self.bias)

    return mark_as_ours(forward)
