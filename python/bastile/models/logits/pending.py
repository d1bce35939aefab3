"""A call of an output head that has been put off, and what was done to its logits since."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import is_
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from bastile.models.logits.head import is_gathered, weights_of, whole
from bastile.ops._valid_rows import ValidCount
from bastile.ops.lora import Adapted, adapted_linears
from bastile.ops.vocabulary_parallel import is_parted

Compute = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]

_CHANGED = (
    "bastile: these logits were not read before {} changed in place, as by an optimizer's step, and cannot be made "
    "any more. Read them before that (outputs.logits + 0), or switch logits on demand off: "
    "bastile.apply(fused_linear_cross_entropy=False)"
)
_GONE = (
    "bastile: these logits were not read before the output head's weight was sharded again, and cannot be made any "
    "more. Read them within the model's forward, or switch logits on demand off: "
    "bastile.apply(fused_linear_cross_entropy=False)"
)


@dataclass(frozen=True)
class Step:
    """Something done to logits row by row, after the head and before they were made."""

    kind: Literal["cast", "scale", "tanh", "add", "log_softmax"]
    apply: Callable[[torch.Tensor], torch.Tensor]  # as the model did it, but never in place
    value: Any = None  # the type, factor or vector


@dataclass
class Forward:
    """A model's forward, while it runs and afterwards."""

    model: str  # its class
    has_labels: bool = False
    unshard: Callable[[], Any] | None = None  # gathers the weights that the model's forward had
    is_open: bool = True
    count: ValidCount | None = None  # of its labels, from before the backbone: nobody waits for it behind that


class Call:
    """head(hidden), put off: weight, bias, adapter and autocast as they were. dtype: what the head would return."""

    def __init__(
        self,
        head: nn.Linear,
        hidden: torch.Tensor,
        forward: Forward,
        dtype: torch.dtype,
        adapter: Adapted | None = None,
    ) -> None:
        device = hidden.device.type
        self.adapter = adapter
        self.forward, self.dtype = forward, dtype
        self.head, self.hidden = head, hidden
        self.weight, self.bias = weights_of(head, parted=forward.has_labels and torch.is_grad_enabled())
        self.is_parted = is_parted(self.weight)
        self.is_gathered = is_gathered(head)
        # Of shardings, which only want to know when. torch's handles refer to this weakly, and to no plain dictionary.
        self.hooks: OrderedDict[int, Callable[[torch.Tensor], Any]] = OrderedDict()
        read = (hidden, self.weight, self.bias) if adapter is None else (hidden, *adapter.tensors)
        self.with_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in read)
        self.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        # A sharded weight is another tensor whenever it is gathered.
        watched = (hidden,) if self.is_gathered else read
        self.versions = [(t, t._version) for t in watched if t is not None]

    def watch(self, tensor: torch.Tensor) -> None:
        """What is made of the call is made of this too, which is not to change before."""
        self.versions.append((tensor, tensor._version))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Weight and bias, or those of its adapter too."""
        found = (self.weight, self.bias) if self.adapter is None else self.adapter.tensors
        return [t for t in found if t is not None]

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """What the head's call returns for these rows of hidden states."""
        with self._as_it_was():
            if self.adapter is not None:
                return adapted_linears(rows, (self.adapter,))[0]
            if self.is_gathered or self.head.weight is self.weight:
                return type(self.head)._call_impl(self.head, rows)
            return F.linear(rows, whole(self.weight), whole(self.bias))  # the module has other parameters by now

    def within(self, rows: torch.Tensor, compute: Compute, takes_parts: bool = False) -> torch.Tensor:
        """compute(rows, weight, bias), where the weight is whole: in the head's call, if that gathers it. takes_parts:
        it knows what to do with the parts of a parallel head."""
        with self._as_it_was():
            if not self.is_gathered:
                weight, bias = self.weight, self.bias
                if self.is_parted and not takes_parts:
                    weight, bias = whole(weight), whole(bias)
                return self.announce(compute(rows, weight, bias))
            head, results = self.head, []

            def forward(x: torch.Tensor) -> torch.Tensor:
                results.append(compute(x, head.weight, head.bias))
                return results[0]

            head.__dict__["forward"] = forward
            try:
                output = type(head)._call_impl(head, rows)
            finally:
                del head.__dict__["forward"]
            # A hook for mixed precision takes it for logits, and rounds it.
            return self.announce(output if output.dtype is results[0].dtype else results[0])

    def _is_gone(self) -> bool:
        return self.weight.numel() > 0 and self.weight.untyped_storage().size() == 0

    def announce(self, made: torch.Tensor) -> torch.Tensor:
        """Has the hooks run before the gradient of what was made of the logits goes on to the head."""
        if made.requires_grad and self.hooks:
            made.register_hook(self._run_hooks)
        return made

    def _run_hooks(self, gradient: torch.Tensor) -> None:
        for hook in list(self.hooks.values()):
            hook(gradient)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        for tensor, version in self.versions:
            if tensor._version != version:
                raise RuntimeError(_CHANGED.format("the hidden states" if tensor is self.hidden else "the output head"))
        if not self.is_gathered and self._is_gone():
            if self.forward.unshard is not None:
                self.forward.unshard()
            if self._is_gone():
                raise RuntimeError(_GONE)
        device, dtype, enabled = self.autocast
        same = enabled == torch.is_autocast_enabled(device) and (
            not enabled or dtype == torch.get_autocast_dtype(device)
        )
        with nullcontext() if same else torch.autocast(device, dtype, enabled):
            yield


class Pending:
    """Logits that several tensors may be views of: a call, the steps taken since, and the values once made.

    rows: the hidden states behind them. A step in place appends to `steps`, and all views see it. before: those of
    which these are all, and a step further."""

    def __init__(
        self, call: Call, rows: torch.Tensor, steps: list[Step], dtype: torch.dtype, before: Pending | None = None
    ) -> None:
        self.call, self.rows, self.steps, self.dtype = call, rows, steps, dtype
        self._before = None if before is None else weakref.ref(before)
        self.made: torch.Tensor | None = None
        self.stack: weakref.ref[Any] | None = None  # whose memory these are a part of: stacked.py
        self._version = 0  # of these
        self.made_in_pieces = 0  # rows
        self._shown: list[weakref.ref[torch.Tensor]] = []

    def show(self, view: torch.Tensor) -> None:
        """Notes a tensor that shows these logits or a part of them."""
        self._shown = [other for other in self._shown if other() is not None]
        self._shown.append(weakref.ref(view))

    def is_shown_by_alone(self, view: torch.Tensor) -> bool:
        """Whether nobody has another tensor of the same memory any more."""
        return all(other() is None or other() is view for other in self._shown)

    @property
    def vocabulary(self) -> int:
        head = self.call.head
        return head.out_features if self.call.is_gathered else self.call.weight.shape[0]

    def compute(self, rows: torch.Tensor) -> torch.Tensor:
        z = self.call.product(rows)
        for step in self.steps:
            z = step.apply(z)
        return z.to(self.dtype)

    def make(self) -> torch.Tensor:
        if self.made is None:
            stack = None if self.stack is None else self.stack()
            if stack is not None:
                stack.make()  # gives these theirs
            else:
                self.take(self.made_alone())
        assert self.made is not None
        return self.made

    def made_alone(self) -> torch.Tensor:
        with torch.set_grad_enabled(self.call.with_grad):
            before = None if self._before is None else self._before()
            if before is not None and before.is_made_of(self.steps[:-1]):
                return self.steps[-1].apply(before.make()).to(self.dtype)
            return self.call.announce(self.compute(self.rows))

    def is_made_of(self, steps: list[Step]) -> bool:
        """Whether the values are there, as these steps made them."""
        same = len(self.steps) == len(steps) and all(map(is_, self.steps, steps))
        return self.made is not None and not self.is_written and same

    def take(self, made: torch.Tensor) -> None:
        """These are the values."""
        self.made, self._version = made, made._version

    @property
    def is_written(self) -> bool:
        """Whether the values are others than they were when they were made."""
        return self.made is not None and self.made._version != self._version

    def may_make(self, rows: int) -> bool:
        """Whether so many rows are to be made by themselves: as long as all such pieces, but for one, are no more work
        than the whole. Each reads all of the weight, so the smallest counts as much as 64 rows."""
        self.made_in_pieces += max(rows, 64)
        return self.made_in_pieces <= self.rows.shape[:-1].numel() + 64


@dataclass(frozen=True)
class Formula:
    """Steps as the fused loss knows them: softcap · tanh(scale · z / softcap) of z with `added` added to it."""

    scale: float = 1.0
    softcap: float | None = None
    added: torch.Tensor | None = None
    is_log_softmax: bool = False


def formula(steps: list[Step], dtype: torch.dtype) -> Formula | str:
    """These steps, the first on logits of dtype, as a formula; or which of them has no place in it."""
    scale, cap, added, is_log_softmax = 1.0, None, None, False
    for step in steps:
        kind = step.kind
        if is_log_softmax:
            return f"{kind} after log_softmax"
        if kind == "cast":
            if step.value.itemsize < dtype.itemsize:
                return f"logits in {dtype} were rounded to {step.value}"
            dtype = step.value
        elif kind == "scale":
            factor = step.value
            scale, cap = (scale * factor, None) if cap is None else (scale, cap * factor)
        elif kind == "tanh" and cap is None:
            cap = 1.0
        elif kind == "add" and cap is None and scale == 1.0 and added is None:
            added = step.value
        elif kind == "log_softmax":
            is_log_softmax = True
        else:
            return f"{kind} after other steps"
    if cap is not None and cap <= 0:
        return "a softcap that is not positive"
    return Formula(scale if cap is None else scale * cap, cap, added, is_log_softmax)
