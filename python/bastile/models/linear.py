"""Linear layers of float32 under autocast, as `Trainer(bf16=True)` has them: PyTorch's own class, in training.

Of whatever model: without autocast, and for weights of 16 bits or frozen ones, a call is what it was."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C import _is_any_autocast_enabled
from torch.compiler import is_compiling

from bastile.graphs.host_time import counts
from bastile.guards import mark_as_ours, stock_of
from bastile.models.forms import is_known
from bastile.models.loading import LINEAR
from bastile.models.sites import ModelFile, Site
from bastile.ops.autocast_linear import autocast_linear
from bastile.report import Tally

#: Below so many multiplications outside of graphs the host's time counts: an H100 does three times as many, of which a
#: training step has need, in some 150 us, of which a node of autograd of our own takes the host the larger part.
_LEAST = 1 << 34

#: Of nn.Linear.forward's code.
_FINGERPRINTS = frozenset({"e98e11a7956e"})


def sites(file: ModelFile) -> Iterator[Site]:
    if file.name == LINEAR and is_known(stock_of(nn.Linear.forward), _FINGERPRINTS):
        yield file.forward_site("autocast_linear", nn.Linear, linear_forward)


def linear_forward(tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_any_autocast_enabled() or is_compiling() or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        weight = self.weight
        if len(args) != 1 or kwargs or weight.dtype is not torch.float32 or not weight.requires_grad:
            return original(self, *args, **kwargs)
        x = args[0]
        if counts(self, x) and x.numel() * weight.shape[0] < _LEAST:
            return original(self, x)
        tally.count()
        return autocast_linear(x, weight, self.bias)

    return mark_as_ours(forward)
