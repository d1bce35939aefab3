"""What adapters add to the results of layers with few rows: against float64, no further from it than PEFT's code in the
same types, on every device at hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bastile.ops.low_rank import low_rank_add
from oracle import DTYPES, EMULATED, LUCK, assert_same_bits, devices, far_apart, few_examples, random_tensor

#: Types of x and of the adapters.
TYPES = [(dtype, factor) for dtype in DTYPES for factor in dict.fromkeys((torch.float32, dtype))]
SCALES = (0.75, -1.5, 2.0)


class Layers:
    """The tensors of one call, of layers of so many columns and ranks each, in rows with a gap."""

    def __init__(self, rows, width, columns, ranks, types, device, gap=0):
        dtype, factor = types
        self.x = random_tensor((rows, width + gap), dtype, device)[:, :width]
        self.y = [random_tensor((rows, n + gap), dtype, device)[:, :n] for n in columns]
        a = [random_tensor((r, width), factor, device, scale=max(width, 1) ** -0.5) for r in ranks]
        b = [
            random_tensor((n, r), factor, device, scale=max(r, 1) ** -0.5) for n, r in zip(columns, ranks, strict=True)
        ]
        self.adapters, self.scales = list(zip(a, b, strict=True)), SCALES[: len(columns)]

    def ours(self):
        results = [y.clone() for y in self.y]
        low_rank_add(self.x, results, self.adapters, self.scales)
        return results

    def exact(self):
        x = self.x.double()
        return [
            y.double() + s * (x @ a.double().t() @ b.double().t())
            for y, (a, b), s in zip(self.y, self.adapters, self.scales, strict=True)
        ]

    def peft(self):
        """As PEFT's layers do without autocast, whose sum then has x's type again."""
        results = []
        for y, (a, b), s in zip(self.y, self.adapters, self.scales, strict=True):
            linear = torch.nn.functional.linear
            results.append((y + linear(linear(self.x.to(a.dtype), a), b) * s).to(y.dtype))
        return results


def squares(found, exact):
    return sum((got.double() - want).square().sum().item() for got, want in zip(found, exact, strict=True))


def assert_no_further(layers, draws=1):
    """Their errors, pooled, are no larger than PEFT's, but for the luck of so many numbers. What float32's last places
    make of sums in another order is no error where PEFT's sums happen to be exact."""
    ours = theirs = size = count = 0.0
    for _ in range(draws):
        call = layers()
        found, exact = call.ours(), call.exact()
        ours, theirs = ours + squares(found, exact), theirs + squares(call.peft(), exact)
        size += sum(want.square().sum().item() for want in exact)
        count += sum(want.numel() for want in exact)
        assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in call.y]
    floor = (0 if draws > 1 else 4) * torch.finfo(torch.float32).eps
    assert ours**0.5 <= theirs**0.5 * math.exp(LUCK / max(count, 1) ** 0.5) + floor * size**0.5


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 16])
def test_errors_are_no_larger_than_pefts(rows, types, device):
    """A block of attention: queries, keys and values."""
    width, columns = (128, (64, 16, 16)) if EMULATED else (2048, (2048, 512, 512))
    draws = 4 if EMULATED else 32 // rows
    assert_no_further(lambda: Layers(rows, width, columns, (16,) * 3, types, device), draws)


# Rows of each number that a kernel is made for, between and beyond; one to three layers; rows and sizes that are
# aligned and that are not; ranks that differ, and more of them than are read at a time; nothing.
SHAPES = [
    (1, 64, (40,), (16,), 0),
    (2, 520, (72, 24), (8, 16), 8),
    (3, 136, (40, 8, 16), (4, 16, 64), 0),
    (7, 33, (17, 40), (5, 16), 3),
    (8, 264, (130, 1, 9), (64, 32, 1), 16),
    (37, 40, (24,), (136,), 0),
    (70, 72, (39, 16), (133, 8), 1),
    (1, 1, (1,), (1,), 0),
    (0, 40, (16,), (8,), 0),
    (4, 0, (16, 8), (8, 8), 0),
    (4, 40, (0, 16, 0), (8, 8, 8), 8),
    (4, 40, (16, 8, 16), (0, 8, 0), 0),
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape(shape, types, device):
    rows, width, columns, ranks, gap = shape
    assert_no_further(lambda: Layers(rows, width, columns, ranks, types, device, gap))


@few_examples
@given(
    st.integers(0, 40),
    st.integers(0, 300),
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), min_size=1, max_size=3),
    st.sampled_from(TYPES),
    st.integers(0, 8),
)
def test_drawn_shapes(rows, width, layers, types, gap):
    columns, ranks = zip(*layers, strict=True)
    assert_no_further(lambda: Layers(rows, width, columns, ranks, types, devices()[-1], gap))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_results_side_by_side(types, device):
    """In the columns of one tensor, as one product of several layers leaves them; what is beside is as it was."""
    call = Layers(5, 72, (40, 24, 16), (8, 16, 8), types, device)
    together = torch.full((5, 96), 7.0, dtype=types[0], device=device)
    parts = together[:, 8:88].split([40, 24, 16], 1)
    for part, y in zip(parts, call.y, strict=True):
        part.copy_(y)
    low_rank_add(call.x, parts, call.adapters, call.scales)
    for part, want in zip(parts, call.ours(), strict=True):
        assert torch.equal(part, want)
    assert (together[:, :8] == 7).all()
    assert (together[:, 88:] == 7).all()


@pytest.mark.parametrize("device", devices())
def test_the_same_bits_again_and_in_any_company(device):
    """A row's sums do not depend on the rows beside it, and a layer's not on others of its rank."""
    call = Layers(11, 520, (72, 40), (16, 16), (torch.bfloat16, torch.float32), device)
    first = call.ours()
    assert all(map(torch.equal, first, call.ours()))
    for row in (0, 10):
        alone = [y[row : row + 1].clone() for y in call.y]
        low_rank_add(call.x[row : row + 1], alone, call.adapters, call.scales)
        assert all(torch.equal(y[row : row + 1], one) for y, one in zip(first, alone, strict=True))
    second = call.y[1].clone()
    low_rank_add(call.x, [second], call.adapters[1:], call.scales[1:])
    assert torch.equal(second, first[1])


@pytest.mark.parametrize("spread", ["x", "y"])
def test_offsets_have_64_bits(spread):
    call = Layers(3, 40, (24, 16), (8, 4), (torch.bfloat16, torch.float32), "cpu")
    x, results = call.x, [y.clone() for y in call.y]
    if spread == "x":
        x = far_apart(x)
    else:
        results = [far_apart(y) for y in results]
    low_rank_add(x, results, call.adapters, call.scales)
    for far, near in zip(results, call.ours(), strict=True):
        assert_same_bits(far, near)


def test_what_autograd_may_know():
    call = Layers(3, 40, (24,), (8,), (torch.bfloat16, torch.float32), "cpu")
    y, version = call.y[0], call.y[0]._version
    low_rank_add(call.x, [y], call.adapters, call.scales)
    assert y._version > version  # what was kept for a backward pass is not what it was
    a = call.adapters[0][0].requires_grad_()
    before = y.clone()
    with pytest.raises(RuntimeError, match="low_rank_add: a_0 requires a gradient"):
        low_rank_add(call.x, [y], call.adapters, call.scales)
    assert torch.equal(y, before)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            results = call.ours()
        assert not torch.equal(results[0], before)
    assert a.grad is None


def test_what_is_refused():
    call = Layers(3, 40, (24, 16), (8, 4), (torch.bfloat16, torch.float32), "cpu")
    before = [y.clone() for y in call.y]
    with pytest.raises(ValueError, match="low_rank_add: 2 results, 2 adapters and 1 scales are given"):
        low_rank_add(call.x, call.y, call.adapters, [1.0])
    with pytest.raises(ValueError, match=r"low_rank_add: 4 results, .* at most 3"):
        low_rank_add(call.x, call.y * 2, call.adapters * 2, [1.0] * 4)
    with pytest.raises(RuntimeError, match="low_rank_add: y_0 and y_1 share memory"):
        low_rank_add(call.x, call.y[:1] * 2, call.adapters[:1] * 2, [1.0] * 2)
    with pytest.raises(RuntimeError, match="low_rank_add: a_1 has shape"):
        low_rank_add(call.x, call.y, [call.adapters[0], (call.x.float()[:, :39], call.adapters[1][1])], [1.0] * 2)
    with pytest.raises(
        RuntimeError, match="low_rank_add: a_0 is float16; bfloat16 is needed, the type of x, or float32"
    ):
        low_rank_add(call.x, call.y, [(a.half(), b.half()) for a, b in call.adapters], call.scales)
    assert all(map(torch.equal, before, call.y))
    low_rank_add(call.x, [], [], [])


def test_what_no_kernel_serves():
    """float64, which is computed in itself, and transforms."""
    for x_type, factor in ((torch.float64, torch.float64), (torch.float64, torch.float32)):
        call = Layers(3, 40, (24, 16), (8, 4), (x_type, factor), "cpu")
        for got, want in zip(call.ours(), call.exact(), strict=True):
            torch.testing.assert_close(got, want)
    call = Layers(3, 40, (24,), (8,), (torch.bfloat16, torch.float32), "cpu")
    a, b = call.adapters[0]

    def one(x, y):
        y = y.clone()
        low_rank_add(x[None], [y[None]], [(a, b)], call.scales)
        return y

    torch.testing.assert_close(torch.func.vmap(one)(call.x, call.y[0]), call.ours()[0])


def test_compiled():
    call = Layers(3, 40, (24, 16), (8, 4), (torch.bfloat16, torch.float32), "cpu")

    def added(x, results, adapters):
        results = [y * 1 for y in results]
        low_rank_add(x, results, adapters, SCALES[:2])
        return results

    compiled = torch.compile(added, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(call.x, call.y, call.adapters), call.ours()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured():
    call = Layers(4, 4096, (4096, 1024, 1024), (16,) * 3, (torch.bfloat16, torch.float32), "cuda")
    want, results = call.ours(), [y.clone() for y in call.y]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        low_rank_add(call.x, results, call.adapters, call.scales)
    for _ in range(3):
        for y, given_y in zip(results, call.y, strict=True):
            y.copy_(given_y)
        graph.replay()
        assert all(map(torch.equal, results, want))
