"""The forward of a norm over the last axis, with a mean or without."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from bastile.graphs.host_time import counts
from bastile.guards import mark_as_ours, runs
from bastile.models.sites import Found, ModelFile, Site, file_of
from bastile.ops._common import on_gpu
from bastile.ops.norm import layer_norm
from bastile.ops.rms_norm import Casting, rms_norm
from bastile.report import Tally

#: Where PyTorch's own norms are, which models of any type may have.
TORCH = "torch.nn.modules.normalization"


@dataclass(frozen=True)
class Norm:
    """A class of norms: what it computes, and the names of its attributes."""

    found: Found
    casting: Casting | None  # None: it takes away the mean, and is rounded once
    eps: str | None
    weight: str | None  # None: it has none
    bias: str | None = None
    has_weight: str | None = None  # an attribute that says whether the weight counts
    fixed_eps: float = 0.0  # where no attribute says it
    is_of_one_type: bool = False  # input and weight must be, else it rounds elsewhere
    is_torchs: bool = False  # of PyTorch's functions, which autocast on CUDA gives float32

    @classmethod
    def of(cls, found: Found) -> "Norm":
        names = found.names
        attributes = {name: names.get(name) for name in ("eps", "weight", "bias", "has_weight")}
        return cls(found, **{"casting": None, **attributes, **found.form.variant})

    def weight_of(self, module: Any) -> Any:
        """Its weight; None where it has none."""
        if self.weight is None or (self.has_weight is not None and not getattr(module, self.has_weight)):
            return None
        return getattr(module, self.weight)

    def eps_of(self, module: Any) -> float:
        eps = self.fixed_eps if self.eps is None else getattr(module, self.eps)
        return torch.finfo(torch.float32).eps if eps is None else eps

    def autocasts(self, x: torch.Tensor) -> bool:
        """Whether autocast makes float32 of all that is given, and of what is returned: that of CUDA, not of CPUs."""
        return self.is_torchs and on_gpu(x) and torch.is_autocast_enabled(x.device.type)

    def refuses(self, module: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> str | None:
        """Why the operator does not compute what the code does for this input, or this sum; None where it does."""
        weight, bias = self.weight_of(module), self.bias_of(module)
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        shape = getattr(module, "normalized_shape", x.shape[-1:]) if self.is_torchs else x.shape[-1:]
        if tuple(shape) != tuple(x.shape[-1:]) or (weight is not None and weight.shape != x.shape[-1:]):
            return "its weight has another shape than the input's last axis"
        own = dtype if weight is None else weight.dtype
        if self.is_of_one_type and own != dtype and not self._mixes(own, x):
            return "its weight and its input are of different types"
        if bias is not None and bias.dtype != own:
            return "its weight and its bias are of different types"
        if self.casting is not None and dtype != torch.float32 and self.autocasts(x):
            return "autocast decides on its type"  # as the release of PyTorch has it
        if not self.found.is_kept_by(module):
            return "a subclass computes something else"
        return None

    def _mixes(self, weight: torch.dtype, x: torch.Tensor) -> bool:
        """Whether under autocast PyTorch's LayerNorm takes such a weight with an input of another type: any where all
        is cast, and else, as on CPUs, float32."""
        if self.casting is not None or not torch.is_autocast_enabled(x.device.type):
            return False
        return weight == torch.float32 or self.autocasts(x)

    def run(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        weight, eps = self.weight_of(module), self.eps_of(module)
        if self.casting is None:
            return layer_norm(x, weight, self.bias_of(module), eps, float32_output=self.autocasts(x))
        return rms_norm(x, weight, eps, casting=self.casting)

    def bias_of(self, module: Any) -> Any:
        return None if self.bias is None else getattr(module, self.bias)


def sites(file: ModelFile) -> Iterator[Site]:
    for found in file.forwards("norm"):
        yield file.forward_site("rms_norm", found.owner, partial(norm_forward, Norm.of(found)))


def norms_of(file: ModelFile) -> tuple[Norm, ...]:
    """Every norm that the file's layers may hold."""
    return tuple(Norm.of(found) for kind in ("norm", "layer norm") for found in file.modules_of(kind)) + torch_norms()


@functools.cache
def torch_norms() -> tuple[Norm, ...]:
    """PyTorch's own."""
    file = file_of(TORCH)
    return tuple(Norm.of(found) for kind in ("norm", "layer norm") for found in file.modules_of(kind))


def norm_of(module: nn.Module, norms: Iterable[Norm]) -> Norm | None:
    """Which of these norms this module is, where calling it runs that norm's code and nothing else: then its weight
    says what it computes."""
    for norm in norms:
        owner = norm.found.owner
        if isinstance(module, owner) and type(module).forward is owner.forward:
            return norm if runs(module, norm.found.function) and norm.found.is_kept_by(module) else None
    return None


#: Below so many elements PyTorch's own norms stay on CUDA: forward and backward of 2048 x 768 take an H200 19.3 us and
#: with ours 17.9, of 8192 x 768 64 and 31, but the host 37 us more, for which so small a model may be waiting.
_ELEMENTS = 1 << 21

#: The same where autocast would cast 16 bits to float32, and their gradient back, in passes of their own. Of an element
#: 14 bytes are then moved in place of 32, without autocast 10 in place of 14: so many save 9 MB, as those above do,
#: and the host has some 20 of the 37 us back, for it launches two kernels less, and of weights in 16 bits more.
_ELEMENTS_CAST = 1 << 19

#: So many times as many where it is known that the host's time counts: so many save the GPU as much as they cost it.
_WHERE_IT_COUNTS = 8


def pays(norm: Norm, module: nn.Module, x: torch.Tensor) -> bool:
    """Whether to take the place of one of PyTorch's own norms, which are one kernel forward already."""
    if not torch.is_grad_enabled() or is_compiling():
        return False
    if not on_gpu(x):
        return True
    return x.numel() >= _least(norm, x) * (_WHERE_IT_COUNTS if counts(module, x) else 1)


def pays_with_sum(norm: Norm, module: nn.Module, x: torch.Tensor) -> bool:
    """As pays, where the norm takes in an addition, or its backward pass one: but where the host's time counts."""
    asked = norm.is_torchs and norm.casting is None and torch.is_grad_enabled() and not is_compiling()
    return not asked or x.numel() >= _least(norm, x) * _WHERE_IT_COUNTS or not counts(module, x)


def _least(norm: Norm, x: torch.Tensor) -> int:
    return _ELEMENTS_CAST if x.dtype.itemsize == 2 and norm.autocasts(x) else _ELEMENTS


def norm_forward(norm: Norm, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            tally.step_aside("it was not called with one tensor by position")
            return original(self, *args, **kwargs)
        if norm.is_torchs and not pays(norm, self, args[0]):
            return original(self, *args)
        why = norm.refuses(self, args[0])
        if why is not None:
            tally.step_aside(why)
            return original(self, *args)
        tally.count()
        return norm.run(self, args[0])

    return mark_as_ours(forward)
