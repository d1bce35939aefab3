"""Leaving ignored rows out of the fused loss: which rows count, gathered ahead of the products, scattered after them.

The sizes of products are the host's to know. On CPU it counts the labels. On CUDA the count travels to pinned memory
behind an event, and `ValidCount.rows()` waits for that: nothing, where the count was asked for long enough before, as
the patched models do ahead of their backbone."""

from __future__ import annotations

import torch

from bastile.ops._common import has_values, is_set

#: Below so many tokens the products take less time than counting and gathering.
MIN_TOKENS = {"cuda": 2048, "cpu": 256}
#: Rows are gathered in multiples of this; the last ones are ignored rows then. Products run faster on round sizes.
_MULTIPLE = {"cuda": 256, "cpu": 16}
#: Only where it saves a tenth of the products.
_LARGEST_PART = 0.9

_enabled: bool | None = None


def set_compaction(enabled: bool | None) -> None:
    """Whether the fused loss leaves ignored rows out of its products; None: as BASTILE_COMPACT says (0: no), else yes.

    It holds for calls made from now on, in every thread. Off, no call ever waits for the device.
    """
    global _enabled
    _enabled = enabled


def _is_enabled() -> bool:
    if _enabled is not None:
        return _enabled
    return is_set("BASTILE_COMPACT", True)


class _Mailbox:
    """A pinned number that a device writes, and the event that says it did."""

    def __init__(self) -> None:
        with torch.inference_mode(False):  # it outlives the mode in which it is made, and is written to again
            self.number = torch.empty((), dtype=torch.int64, pin_memory=True)
        self.written = torch.cuda.Event()


_idle: dict[int, list[_Mailbox]] = {}  # by device; events belong to one


class ValidCount:
    """How many targets are not ignored. Counting begins at once; `rows()` has the number, and waits if it must.

    It counts for this target alone, or another view of all of it, as long as nobody changes it in place."""

    def __init__(self, target: torch.Tensor, ignore_index: int = -100):
        self._target, self._ignore_index, self._version = target, ignore_index, version(target)
        count = (target != ignore_index).sum()
        self._count: torch.Tensor | int = count
        self._mailbox: _Mailbox | None = None
        if count.is_cuda:
            device = count.get_device()
            try:
                self._mailbox = _idle.setdefault(device, []).pop()
            except IndexError:
                self._mailbox = _Mailbox()
            self._mailbox.number.copy_(count, non_blocking=True)
            self._mailbox.written.record(torch.cuda.current_stream(device))

    def is_of(self, target: torch.Tensor, ignore_index: int) -> bool:
        """Whether it is these targets that were counted, as they are now."""
        mine = self._target
        return (
            ignore_index == self._ignore_index
            and version(target) == self._version
            and target.dtype is mine.dtype
            and target.data_ptr() == mine.data_ptr()
            and target.numel() == mine.numel()
            and ((target.is_contiguous() and mine.is_contiguous()) or _layout(target) == _layout(mine))
        )

    def rows(self) -> int:
        if isinstance(self._count, int):
            return self._count
        if self._mailbox is None:
            self._count = int(self._count)
            return self._count
        mailbox, device = self._mailbox, self._count.get_device()
        mailbox.written.synchronize()
        self._count, self._mailbox = int(mailbox.number), None
        _idle[device].append(mailbox)
        return self._count


def version(t: torch.Tensor) -> int:
    """Grows when someone changes it in place."""
    return 0 if t.is_inference() else t._version


def _layout(t: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return t.shape, t.stride()


def is_worthwhile(tokens: int, like: torch.Tensor) -> bool:
    """Whether ignored rows may be left out at this size, among tensors like this one, now. A graph that is being
    captured will be replayed with other labels, and cannot wait for a count; fake tensors have nothing to count."""
    device = like.device
    return (
        not torch.compiler.is_compiling()
        and has_values(like)
        and tokens >= MIN_TOKENS.get(device.type, tokens + 1)
        and _is_enabled()
        and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def valid_first(target: torch.Tensor, ignore_index: int, count: int) -> torch.Tensor | None:
    """The rows to compute: the first `count` that are not ignored, in order, and ignored ones up to a round number.
    None: all of them, for that is hardly more."""
    tokens, multiple = target.numel(), _MULTIPLE[target.device.type]
    rows = -(-max(count, 1) // multiple) * multiple
    if rows > _LARGEST_PART * tokens:
        return None
    return torch.argsort(target == ignore_index, stable=True)[:rows]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, order):
        ctx.save_for_backward(order)
        ctx.count = rows.shape[0]
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, gradient):
        (order,) = ctx.saved_tensors
        return _spread(gradient, order, ctx.count), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, order, count):
        ctx.save_for_backward(order)
        return _spread(rows, order, count)

    @staticmethod
    def backward(ctx, gradient):
        (order,) = ctx.saved_tensors
        if gradient.dim() == 1 and gradient.stride(0) == 0:  # the same for all, and seen to be
            return gradient[: order.shape[0]], None, None
        return gradient.index_select(0, order), None, None


def _spread(rows: torch.Tensor, order: torch.Tensor, count: int) -> torch.Tensor:
    return rows.new_zeros((count, *rows.shape[1:])).index_copy_(0, order, rows)


def gather(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """rows[order], of distinct rows: the gradient is copied back, not added up."""
    return _Gather.apply(rows, order)


def scatter(rows: torch.Tensor, order: torch.Tensor, count: int) -> torch.Tensor:
    """Zeros, but for rows[i] at order[i]."""
    return _Scatter.apply(rows, order, count)
