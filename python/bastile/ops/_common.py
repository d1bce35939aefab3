"""What the operators' autograd functions share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

#: Element types the kernels serve; anything else runs the original torch code.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DEVICES = ("cpu", "cuda")
#: Tensors whose operations are PyTorch's own.
PLAIN = (torch.Tensor, torch.nn.Parameter)

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class Function(torch.autograd.Function):
    """An autograd function that is never called `in_transform`. Its `apply` does not look for transforms again, which
    takes torch's 1.7 of the 8 us of a call."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.apply = super(torch.autograd.Function, cls).apply


def served(*tensors: torch.Tensor | None) -> bool:
    """Whether Bastile's kernels run on these tensors: float32, bfloat16 or float16, on CPU or CUDA, with strides.

    Mixed devices count as served: the operator then names the tensor that is in the wrong place. Tensors under vmap or
    another functorch transform, and subclasses such as DTensor, are not served.
    """
    for t in tensors:
        if t is None:
            continue
        if not (t.is_cpu or t.is_cuda) or t.dtype not in FLOATS or t.layout is not torch.strided:
            return False
        if type(t) not in PLAIN and not torch.compiler.is_compiling() and not _is_fake(t):
            return False
    return not in_transform(*tensors)


def _is_fake(t: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(t, FakeTensor)


def in_transform(*tensors: torch.Tensor | None) -> bool:
    """Whether this runs under vmap or another functorch transform, or one of the tensors has leaked out of one."""
    if torch.compiler.is_compiling():
        return False
    for t in tensors:
        if t is not None and _is_wrapped(t):
            return True
    return torch._C._functorch.peek_interpreter_stack() is not None


def cast_as_linear(x: torch.Tensor, *weights: torch.Tensor | None) -> tuple[Any, ...]:
    """These as a linear layer casts them: under autocast to its type."""
    device = x.device.type
    if device not in _DEVICES or not torch.is_autocast_enabled(device):
        return x, *weights
    dtype = torch.get_autocast_dtype(device)
    return tuple([None if t is None else t.to(dtype) for t in (x, *weights)])


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context in which autocast is off."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def is_last_pass() -> bool:
    """For a backward pass: whether the graph goes with it, so that nobody reads again what was kept for it. Not asked
    while compiling: the compiler plans the memory."""
    return not torch.compiler.is_compiling() and not torch._C._autograd._get_current_graph_task_keep_graph()


def release_on_last_pass(ctx) -> bool:
    """As is_last_pass. In a last pass autograd lets go of the saved tensors, which it would otherwise hold until the
    backward function returns: call it once they have been read."""
    last = is_last_pass()
    if last:
        ctx.maybe_clear_saved_tensors()
    return last


class _Tie(torch.autograd.Function):
    """Makes a gradient depend on what it was computed from, so that a second backward pass reaches the error above."""

    @staticmethod
    def forward(ctx, op, gradient, *sources):
        ctx.op = op
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"bastile: {ctx.op} cannot be differentiated twice; call bastile.reset() and use the original code where "
            "second derivatives are needed"
        )


def first_order_only(op: str, gradient: torch.Tensor | None, *sources: torch.Tensor | None) -> torch.Tensor | None:
    """For a backward pass under `create_graph=True`: the gradient, tied to its sources by a node that raises.

    Without sources the gradient is tied to nothing in particular, and raises all the same.
    """
    if gradient is None:
        return None
    tied = [s for s in sources if s is not None] or [torch.empty(0, requires_grad=True)]
    return _Tie.apply(op, gradient, *tied)
