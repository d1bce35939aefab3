"""What the operators' autograd functions share."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

#: Element types the kernels serve; anything else runs the original torch code.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = FLOATS[1:]
_DEVICES = ("cpu", "cuda")
_WITH_VALUES = (torch.Tensor, torch.nn.Parameter)
#: Tensors whose operations are PyTorch's own: those that stand for one when shapes alone are wanted too.
PLAIN = (*_WITH_VALUES, FakeTensor)

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_interpreter = torch._C._functorch.peek_interpreter_stack
_is_traced_to_script = torch._C._is_tracing
_STRIDED = torch.strided


class Function(torch.autograd.Function):
    """An autograd function that is never called `in_transform`. Its `apply` does not look for transforms again, which
    takes torch's 1.7 of the 8 us of a call."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.apply = super(torch.autograd.Function, cls).apply  # type: ignore[method-assign, misc]


def served(*tensors: torch.Tensor | None) -> bool:
    """Whether Bastile's kernels run on these tensors: float32, bfloat16 or float16, on CPU or CUDA, with strides.

    Mixed devices count as served: the operator then names the tensor that is in the wrong place. Subclasses such as
    DTensor are not served, nor is anything `in_transform`, nor what is no tensor. What then runs PyTorch's own code
    asks `need_floats` first.
    """
    for t in tensors:
        if t is None:
            continue
        if type(t) not in PLAIN and not (is_compiling() and isinstance(t, torch.Tensor)):
            return False
        if not (t.is_cpu or t.is_cuda) or t.dtype not in FLOATS or t.layout is not _STRIDED:
            return False
    return not in_transform(*tensors)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether this GPU has the tensor cores that some kernels are for alone."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def has_values(*tensors: torch.Tensor) -> bool:
    """Whether these are plain and hold numbers, which a fake tensor does not."""
    return all([type(t) in _WITH_VALUES for t in tensors])


_fakes_stand_for_cuda = False


@contextmanager
def fakes_on_gpu(are_there: bool) -> Iterator[None]:
    """Whether fake tensors within stand for a GPU's, wherever they are said to be: PyTorch has none for a GPU that is
    not there."""
    global _fakes_stand_for_cuda
    before, _fakes_stand_for_cuda = _fakes_stand_for_cuda, are_there
    try:
        yield
    finally:
        _fakes_stand_for_cuda = before


def on_gpu(t: torch.Tensor) -> bool:
    return t.is_cuda or (_fakes_stand_for_cuda and type(t) is FakeTensor)


def is_warming_up(t: torch.Tensor) -> bool:
    """Whether this stands for a GPU's while kernels are compiled ahead (warmup.py): for which, the library knows."""
    return _fakes_stand_for_cuda and type(t) is FakeTensor and not is_compiling()


def in_transform(*tensors: torch.Tensor | None) -> bool:
    """Whether PyTorch's own code is wanted here: under vmap or another functorch transform, or on a tensor that has
    leaked out of one; in forward mode; and while a model is exported or traced, so that the result runs without
    Bastile."""
    if is_compiling():
        # In some releases of PyTorch is_exporting() is true of all that is compiled.
        return torch.compiler._is_exporting_flag
    for t in tensors:
        if t is not None and _is_wrapped(t):
            return True
    return _interpreter() is not None or _is_traced_to_script() or forward_ad._current_level >= 0


def need_floats(op: str, **tensors: torch.Tensor | None) -> None:
    """Raises for what is no tensor of real numbers. For the branch that runs PyTorch's code, which would truncate
    integers and drop imaginary parts: the kernels' own checks are theirs."""
    for name, t in tensors.items():
        if t is None:
            continue
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{op}: {name} is a {type(t).__name__}; a tensor is needed")
        if not t.is_floating_point():
            raise TypeError(f"{op}: {name} is {t.dtype}; a floating-point type is needed")


def is_set(variable: str, usual: bool) -> bool:
    """An environment variable that is 0 or 1."""
    setting = os.environ.get(variable, str(int(usual)))
    if setting not in ("0", "1"):
        raise ValueError(f"{variable} is {setting!r}; 0 or 1 is needed")
    return setting == "1"


def no_view(y: torch.Tensor) -> torch.Tensor:
    """The same memory, for autograd no view of another tensor: what an autograd function returns may be written to by
    whoever gets it only then."""
    return torch.unsafe_chunk(y, 1)[0] if y._is_view() else y


def cast_type(x: torch.Tensor) -> torch.dtype | None:
    """The type to which autocast casts what a linear layer multiplies; None where it is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def cast_as_linear(x: torch.Tensor, *weights: torch.Tensor | None) -> tuple[Any, ...]:
    """These as a linear layer casts them: under autocast to its type."""
    dtype = cast_type(x) if x.device.type in _DEVICES else None
    if dtype is None:
        return x, *weights
    return tuple([None if t is None else t.to(dtype) for t in (x, *weights)])


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context in which autocast is off."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def is_batched(gradient: torch.Tensor) -> bool:
    """For a backward pass: whether vmap computes several gradients at once (is_grads_batched). Nothing that has one
    value for all of them can be written over then."""
    return not is_compiling() and (_is_batched(gradient) or _interpreter() is not None)


def is_last_pass(gradient: torch.Tensor) -> bool:
    """For a backward pass, which begins with this gradient: whether the graph goes with it, so that what was kept for
    it may be written over. Not asked while compiling: the compiler plans the memory."""
    return (
        not is_compiling() and not torch._C._autograd._get_current_graph_task_keep_graph() and not is_batched(gradient)
    )


def release_on_last_pass(ctx: Any, gradient: torch.Tensor) -> bool:
    """As is_last_pass. In a last pass autograd lets go of the saved tensors, which it would otherwise hold until the
    backward function returns: call it once they have been read."""
    last = is_last_pass(gradient)
    if last:
        ctx.maybe_clear_saved_tensors()
    return last


def _second_derivative(op: str) -> RuntimeError:
    return RuntimeError(
        f"bastile: {op} cannot be differentiated twice; call bastile.reset() and use the original code where second "
        "derivatives are needed"
    )


class _Tie(torch.autograd.Function):
    """Makes a gradient depend on what it was computed from, so that a second backward pass reaches the error."""

    @staticmethod
    def forward(ctx, op, gradient, *sources):
        ctx.op = op
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise _second_derivative(ctx.op)


def first_order_only(op: str, gradient: torch.Tensor | None, *sources: torch.Tensor | None) -> torch.Tensor | None:
    """For a backward pass under `create_graph=True`: the gradient, tied to its sources by a node that raises.

    The sources must lead to everything that the gradient depends on: from another tensor, autograd would not find the
    node, and leave this path out of a derivative in silence. An output of the operator that was saved leads to all of
    its inputs. Batched gradients raise at once: the node would be lost with the batch.
    """
    if gradient is None:
        return None
    if is_batched(gradient):
        raise _second_derivative(op)
    return _Tie.apply(op, gradient, *[s for s in sources if s is not None])


def times(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """For a backward pass: gradient · factor, of float32 and rounded once; in the gradient's own memory where it fits
    and no other pass needs it."""
    if is_batched(factor):
        return (gradient * factor).to(dtype)
    with torch.no_grad():
        free = dtype is gradient.dtype and is_last_pass(factor)
        return torch.mul(gradient, factor, out=gradient if free else torch.empty_like(gradient, dtype=dtype))
