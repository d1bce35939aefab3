"""Attention within segments, as PyTorch's operators of it, against float64, on every device at hand, with PyTorch's
`scaled_dot_product_attention` of each segment as the yardstick. What models call is masked_attention, whose tests are
its own.

CUDA serves heads of multiples of 8 up to 256 in 16 bits, a CPU any."""

from __future__ import annotations

import math
import os
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import bastile.ops  # noqa: F401 - which registers the fakes
from oracle import (
    DTYPES,
    EMULATED,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_same_bits,
    devices,
    few_examples,
    random_tensor,
)

pytestmark = pytest.mark.skipif(
    EMULATED and os.environ.get("BASTILE_EMU_ARCH", "90") != "90", reason="there are kernels for Hopper alone"
)
FORWARD = torch.ops.bastile.segment_attention_forward.default
BACKWARD = torch.ops.bastile.segment_attention_backward.default
each_device = pytest.mark.parametrize("device", devices())
each_way = pytest.mark.parametrize("causal", [False, True])

#: Queries and keys of each segment.
Lengths = list[tuple[int, int]]
#: None of either, one, fewer and more keys than queries, more than a tile.
UNEVEN: Lengths = [(0, 0), (1, 1), (30, 7), (7, 30), (0, 9), (12, 0), (100, 100), (65, 140), (0, 0)]


def is_gpu(device: str) -> bool:
    return EMULATED or device != "cpu"


def skip_unserved(device: str, dtype: torch.dtype) -> None:
    if is_gpu(device) and dtype is torch.float32:
        pytest.skip("CUDA serves types of 16 bits")


def cuts_of(lengths: Lengths, device: str) -> Tensor:
    return torch.tensor([[0, *accumulate(each)] for each in zip(*lengths, strict=True)], dtype=torch.int32).to(device)


class Ours(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cuts, scale, causal, rows, window):
        y, lse = FORWARD(q, k, v, cuts, scale, causal, rows, window)
        ctx.save_for_backward(q, k, v, cuts, y, lse)
        ctx.options = scale, causal, rows, window
        return y

    @staticmethod
    def backward(ctx, dy):
        return *BACKWARD(dy, *ctx.saved_tensors, *ctx.options), *[None] * 5


def by_segment(lengths: Lengths, causal: bool, attend, window: int = 0):
    """A function of q, k, v as a call of `attend` for each segment, of the queries that see keys: q [heads, L, D], k
    and v repeated for them, and which keys each sees, or None where it is all. With a window no segment has fewer keys
    than queries."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        each = q.shape[1] // max(k.shape[1], 1)
        k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
        parts, row, key = [], 0, 0
        for queries, keys in lengths:
            blind = queries if not keys else max(queries - keys, 0) if causal else 0
            if blind:  # zeros that hang on q
                parts.append(q[row : row + blind] * 0.0)
            if blind < queries:
                seen = None
                if causal or window:
                    key_at = torch.arange(keys, device=q.device) - (keys - queries)
                    before = torch.arange(blind, queries, device=q.device)[:, None] - key_at
                    seen = (before >= 0 if causal else before > -window) & (before < (window or math.inf))
                of_q, of_k, of_v = q[row + blind : row + queries], k[key : key + keys], v[key : key + keys]
                parts.append(attend(*(t.transpose(0, 1) for t in (of_q, of_k, of_v)), seen).transpose(0, 1))
            row, key = row + queries, key + keys
        # What no query sees takes part, for it has gradients of zero.
        return torch.cat([*parts, q[:0]]) + 0.0 * (k.sum() + v.sum())

    return function


def definition(scale: float):
    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        scores = scale * (q @ k.mT)
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)
        return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v

    return attend


def stock(scale: float):
    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        of_torch, is_triangle = torch.nn.functional.scaled_dot_product_attention, q.shape[1] == k.shape[1]
        is_triangle = is_triangle and seen is not None and torch.equal(seen, seen.tril()) and bool(seen[:, 0].all())
        how = {"is_causal": True} if is_triangle else {"attn_mask": seen}
        return of_torch(q[None], k[None], v[None], scale=scale, **how)[0]

    return attend


def inputs(lengths: Lengths, heads: int, groups: int, dim: int, dtype, device: str, layout: str = "packed"):
    """As projections leave them, as one matrix of all three, or with heads first."""
    tokens = [sum(each) for each in zip(*lengths, strict=True)]
    shapes = {"q": (tokens[0], heads, dim), "k": (tokens[1], groups, dim), "v": (tokens[1], groups, dim)}
    of = {name: random_tensor(shape, dtype, device) for name, shape in shapes.items()}
    if layout == "heads first":
        return {name: t.transpose(0, 1).contiguous().transpose(0, 1) for name, t in of.items()}
    if layout == "apart":  # 16 bytes and more from one head to the next
        return {name: torch.cat([t, t.new_full((*t.shape[:2], 8), math.nan)], -1)[..., :dim] for name, t in of.items()}
    return of


def case(
    lengths: Lengths, tensors: dict[str, Tensor], causal: bool, scale: float = 0.0, window: int = 0, even: bool = False
) -> Case:
    """even: that all are as long is said in the place of cuts."""
    cuts, dim = None if even else cuts_of(lengths, str(tensors["q"].device)), tensors["q"].shape[-1]
    factor, rows = scale or dim**-0.5, len(lengths) if even else 0
    return Case(
        ours=lambda q, k, v: Ours.apply(q, k, v, cuts, scale, causal, rows, window),
        stock=by_segment(lengths, causal, stock(factor), window),
        exact=by_segment(lengths, causal, definition(factor), window),
        inputs=tensors,
        # Where a query sees few keys, the gradient of its scores is a small difference of numbers of about sqrt(dim).
        terms={name: 4 * factor * dim**0.5 for name in ("dq", "dk")},
        # An error of a query's y, or of its sum, is one of all of its gradient.
        independent=max(1, tensors["q"].shape[0] * tensors["q"].shape[1]),
    )


@each_device
@each_way
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_worse_than_pytorchs(device, causal, dtype):
    """Sequences of a batch, more than a tile each, with heads that share keys."""
    skip_unserved(device, dtype)
    lengths = [(80, 80), (33, 33)] if EMULATED else [(200, 200), (33, 33), (1, 1), (310, 310)]
    heads, groups = (2, 1) if EMULATED else (4, 2)
    draws = 2 if EMULATED else 6
    assert_no_worse_pooled(
        lambda: case(lengths, inputs(lengths, heads, groups, 64, dtype, device), causal), draws=draws
    )


@each_device
@each_way
@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_of_all_kinds(device, causal, dtype):
    skip_unserved(device, dtype)
    lengths = UNEVEN[:6] if EMULATED else UNEVEN
    for dim, layout in ((64, "packed"), (128, "heads first"), (64, "apart")):
        assert_no_worse(case(lengths, inputs(lengths, 4, 2, dim, dtype, device, layout), causal, scale=0.2))


@pytest.mark.skipif(EMULATED, reason="heads of other sizes, which CUDA does not serve")
@few_examples
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=5),
    groups=st.integers(1, 3),
    each=st.integers(1, 3),
    dim=st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["packed", "heads first", "apart"]),
    causal=st.booleans(),
    scale=st.sampled_from([0.0, 0.5]),
)
def test_any_shape_on_a_cpu(lengths, groups, each, dim, dtype, layout, causal, scale):
    tensors = inputs(lengths, groups * each, groups, dim, dtype, "cpu", layout)
    assert_no_worse(case(lengths, tensors, causal, scale))


@each_device
@each_way
def test_what_sees_nothing_is_zero(device, causal):
    """Queries without keys, and keys without queries."""
    dtype = torch.bfloat16
    tensors = inputs(UNEVEN, 2, 1, 64, dtype, device)
    cuts = cuts_of(UNEVEN, device)
    y, lse = FORWARD(*tensors.values(), cuts, 0.0, causal, 0, 0)
    grads = BACKWARD(torch.ones_like(y), *tensors.values(), cuts, y, lse, 0.0, causal, 0, 0)
    blind, unseen = torch.zeros(y.shape[0], dtype=torch.bool), torch.zeros(len(tensors["k"]), dtype=torch.bool)
    for (row, to), (key, end), (queries, keys) in zip(*map(pairwise, cuts.tolist()), UNEVEN, strict=True):
        blind[row:to] = torch.arange(queries) < (queries - keys if causal else 0 if keys else queries)
        unseen[key:end] = not queries
    assert torch.equal((lse == math.inf).cpu(), blind.expand(2, -1))
    for t, nothing in ((y, blind), (grads[0], blind), (grads[1], unseen), (grads[2], unseen)):
        assert nothing.any()
        assert not t.cpu()[nothing].any()
    assert y.cpu()[~blind].any(-1).all()


@each_device
@each_way
def test_the_sum_of_exponentials(device, causal):
    lengths, dim = [(40, 40), (20, 70)], 64
    tensors = inputs(lengths, 2, 1, dim, torch.bfloat16, device)
    _, lse = FORWARD(*tensors.values(), cuts_of(lengths, device), 0.0, causal, 0, 0)
    sums = []
    by_segment(lengths, causal, lambda q, k, v, seen: (sums.append(of_sums(q, k, seen)), q)[1])(
        *(t.double() for t in tensors.values())
    )
    torch.testing.assert_close(lse.double(), torch.cat(sums, 1), rtol=1e-6, atol=1e-5)


def of_sums(q: Tensor, k: Tensor, seen: Tensor | None) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (scores if seen is None else scores.masked_fill(~seen, -math.inf)).logsumexp(-1)


@pytest.mark.skipif(EMULATED, reason="of threads on a CPU")
@each_way
def test_the_same_bits_from_any_number_of_threads(causal):
    lengths = [(150, 150), (0, 0), (90, 70)]
    tensors, before = inputs(lengths, 6, 2, 40, torch.float32, "cpu"), torch.get_num_threads()
    cuts, results = cuts_of(lengths, "cpu"), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            y, lse = FORWARD(*tensors.values(), cuts, 0.0, causal, 0, 0)
            results.append([y, lse, *BACKWARD(tensors["q"], *tensors.values(), cuts, y, lse, 0.0, causal, 0, 0)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same_bits(a, b)


@each_device
@each_way
@pytest.mark.parametrize(
    ("queries", "keys", "window"), [(150, 150, 16), (150, 150, 70), (300, 300, 140), (40, 200, 30)]
)
def test_windows(device, causal, queries, keys, window):
    """Within a tile and of several, beside more keys than queries; of rows that are all as long."""
    if EMULATED and queries > 150:
        pytest.skip("long on an emulated chip")
    lengths = [(queries, keys)] * 2
    tensors = inputs(lengths, 4, 2, 64, torch.bfloat16, device)
    for even in (False, True):
        of = case(lengths, tensors, causal, 0.0, window, even)
        assert_no_worse_pooled(lambda: of, draws=1)  # noqa: B023


@each_device
@pytest.mark.parametrize("dim", [40, 72, 96, 160])
def test_heads_of_other_widths(device, dim):
    """Which kernels compute as more columns."""
    lengths = [(70, 70), (33, 60)]
    assert_no_worse_pooled(
        lambda: case(lengths, inputs(lengths, 4, 2, dim, torch.bfloat16, device, "apart"), True), draws=2
    )


@each_device
def test_nothing_at_all(device):
    for queries, keys, heads in ((0, 5, 4), (5, 0, 4), (0, 0, 4), (5, 5, 0)):
        q, k = (torch.ones(n, h, 64, dtype=torch.bfloat16, device=device) for n, h in ((queries, heads), (keys, 2)))
        cuts = cuts_of([(queries, keys)], device)
        y, lse = FORWARD(q, k, k, cuts, 0.0, True, 0, 0)
        grads = BACKWARD(y, q, k, k, cuts, y, lse, 0.0, True, 0, 0)
        assert [t.shape for t in (y, lse, *grads)] == [q.shape, (heads, queries), q.shape, k.shape, k.shape]
        assert (lse == math.inf).all()
        assert not any(t.any() for t in (y, *grads))


@each_device
@each_way
def test_described_to_pytorch(device, causal):
    """Schema, fakes and what torch.compile makes of both."""
    lengths = [(9, 9), (3, 8)]
    q, k, v = inputs(lengths, 4, 2, 64, torch.bfloat16, device, "heads first").values()
    cuts = cuts_of(lengths, device)
    torch.library.opcheck(FORWARD, (q, k, v, cuts, 0.0, causal, 0, 0))
    y, lse = FORWARD(q, k, v, cuts, 0.0, causal, 0, 0)
    assert y.is_contiguous()
    assert lse.dtype is torch.float32
    torch.library.opcheck(BACKWARD, (torch.ones_like(y), q, k, v, cuts, y, lse, 0.0, causal, 0, 0))


@pytest.mark.skipif(EMULATED, reason="inductor's code, for a CPU's operators")
def test_compiled_without_a_break():
    lengths = [(9, 9), (3, 8)]
    q, k, v = inputs(lengths, 4, 2, 16, torch.float32, "cpu").values()
    cuts = cuts_of(lengths, "cpu")

    def both(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        y, lse = FORWARD(2 * q, k, v, cuts, 0.0, True, 0, 0)
        return [y, *BACKWARD(y, 2 * q, k, v, cuts, y, lse, 0.0, True, 0, 0)]

    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    for a, b in zip(compiled(q, k, v), both(q, k, v), strict=True):
        assert_same_bits(a, b)


@pytest.mark.skipif(EMULATED, reason="on CUDA nothing looks at values")
@pytest.mark.parametrize(
    ("cuts", "said"),
    [
        ([[1, 5], [0, 5]], r"cuts\[0\] begins with 1; 0 is needed"),
        ([[0, 5], [0, 4]], r"cuts\[1\] ends with 4; 5 is needed"),
        ([[0, 4, 3, 5], [0, 5, 5, 5]], r"cuts\[0\] has 3 behind 4; numbers that do not fall are needed"),
        ([[0], [5]], r"cuts has rows of 1 elements; two or more, 0 first, are needed"),
    ],
)
def test_cuts_that_are_wrong(cuts, said):
    q = torch.ones(5, 1, 8)
    with pytest.raises(RuntimeError, match=f"segment_attention_forward: {said}"):
        FORWARD(q, q, q, torch.tensor(cuts, dtype=torch.int32), 0.0, False, 0, 0)
