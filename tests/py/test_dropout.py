"""Dropout whose mask is made again of a seed: to the bit what plain torch code makes of it, and distributed as torch's,
on every device at hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from bastile.ops.dropout import drop, drop_and_add, drop_in_place, drop_into, dropout, factors
from oracle import DTYPES, EMULATED, assert_same_bits, devices, few_examples, random_tensor

SEED = (0x123456789ABCDEF, -0x7654321FEDCBA98)


def seed_on(device: str) -> torch.Tensor:
    return torch.tensor(SEED, device=device)


def exact(x: torch.Tensor, p: float, addend: torch.Tensor | None = None) -> torch.Tensor:
    """One product, and perhaps a sum, in float32, rounded to x's type."""
    y = x.float() * factors(x.float(), p, seed_on(x.device.type))
    return (y if addend is None else y + addend.float()).to(x.dtype)


# Whole vectors; an odd number; one element; more than a block of threads takes; none; one dimension.
SHAPES = [(4, 256), (5, 33), (1, 1), (9, 3, 1025), (0, 64), (7,)]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits(shape, p, dtype, device):
    """Over new memory, in the place of x, and added to what is there."""
    x, there, seed = random_tensor(shape, dtype, device), random_tensor(shape, dtype, device), seed_on(device)
    assert_same_bits(drop(x, seed, p), exact(x, p))
    assert_same_bits(dropout(x, p, seed=seed), exact(x, p))
    want = exact(x, p, there)
    assert_same_bits(drop_and_add(x, seed, there, p), want)
    drop_into(x, seed, there, p)
    assert_same_bits(there, want)
    want = exact(x, p)
    drop_in_place(x, seed, p)
    assert_same_bits(x, want)


@few_examples
@given(
    rows=st.integers(0, 40),
    columns=st.integers(1, 80),
    gap=st.integers(0, 9),
    at=st.integers(0, 8),
    turned=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from(devices()),
)
def test_any_layout(rows, columns, gap, at, turned, dtype, device):
    """The mask goes by an element's number, wherever that lies."""
    wide = random_tensor((2, rows, at + columns + gap), dtype, device)
    x = wide[..., at : at + columns]
    x = x.transpose(0, 1) if turned else x
    assert_same_bits(drop(x, seed_on(device), 0.3), exact(x, 0.3))
    assert_same_bits(drop(x.transpose(0, 2), seed_on(device), 0.3), exact(x.transpose(0, 2), 0.3))


@pytest.mark.parametrize("device", devices())
def test_distribution(device):
    """What stays is divided by 1 - p, to the bit; the share of it is binomial, overall, a row and a column; and two
    elements, side by side or of two draws, are independent."""
    p, tokens, size = 0.3, 4096, 64
    torch.manual_seed(11)
    x = torch.ones(tokens, size, device=device)
    one, other = dropout(x, p), dropout(x, p)
    kept, again = one != 0, other != 0
    assert torch.equal(one[kept], torch.full_like(one[kept], 1 / (1 - p)))
    q, spread = 1 - p, (p * (1 - p)) ** 0.5
    assert abs(kept.double().mean().item() - q) < 5 * spread / (tokens * size) ** 0.5
    for dim, count in ((0, tokens), (1, size)):
        assert (kept.double().mean(dim) - q).abs().max().item() < 6 * spread / count**0.5
    centred, centred_again = kept.double() - q, again.double() - q
    for first, second in (
        (centred[:, 1:], centred[:, :-1]),
        (centred[:, 4:], centred[:, :-4]),  # of the next counter
        (centred[1:], centred[:-1]),
        (centred, centred_again),
    ):
        assert abs((first * second).mean().item()) < 5 * spread**2 / first.numel() ** 0.5


@pytest.mark.parametrize("device", devices())
def test_the_generator_s_seed_tells_the_mask(device):
    x = torch.ones(64, 64, device=device)
    torch.manual_seed(3)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(dropout(x, 0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("shape", [(33, 17), ()])
def test_the_gradient_of_the_sum_is_the_mask(shape, device):
    """Made again: the seed alone is kept."""
    x = torch.ones(shape, device=device, requires_grad=True)
    y = dropout(x, 0.4)
    (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(dx, y)
    if shape:
        assert [t.numel() for t in y.grad_fn.saved_tensors] == [2]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_draw_the_same(reentrant, device):
    x, found = random_tensor((33, 17), torch.float32, device).requires_grad_(), []
    twice = lambda x: dropout(dropout(x, 0.3).sin(), 0.2)  # noqa: E731
    for again in (False, True):
        torch.manual_seed(3)
        y = checkpoint(twice, x, use_reentrant=reentrant) if again else twice(x)
        y.square().sum().backward()
        found.append((y.detach(), x.grad, torch.rand(2, device=device)))
        x.grad = None
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("device", devices())
def test_compiled_without_a_graph_break(device, backend):
    """Draws anew in each call, and both passes have one mask."""
    x = torch.ones(32, 16, device=device, requires_grad=True)
    compiled = torch.compile(lambda x: dropout(x * 1.0, 0.4), fullgraph=True, backend=backend)
    masks = []
    for _ in range(2):
        y = compiled(x)
        masks.append(y.detach())
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y)
    assert not torch.equal(*masks)
    assert 0.4 < (masks[0] != 0).double().mean().item() < 0.8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA graphs")
def test_each_replay_of_a_graph_draws_anew():
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    for _ in range(2):  # compiled, and the allocator warm
        torch.autograd.grad(dropout(x, 0.5).sum(), x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dropout(x, 0.5)
        (dx,) = torch.autograd.grad(y.sum(), x)
    found = []
    for seed in (5, 5, None):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        assert torch.equal(y, dx)
        found.append(y.detach().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


@pytest.mark.skipif(not torch.cuda.is_available() or EMULATED, reason="needs a GPU's memory")
def test_more_than_32_bits_of_elements():
    """Without gaps, and rows with gaps."""
    wide = torch.ones(2**19 + 1, 2**12 + 8, device="cuda", dtype=torch.bfloat16)
    for x in (wide.flatten()[: 2**31 + 2**12], wide[:, : 2**12]):
        end = drop(x, seed_on("cuda"), 0.5).flatten()[-(2**12) :].float().cpu()
        assert_same_bits(end, factors_of(torch.arange(2**31, 2**31 + 2**12), 0.5))


def factors_of(number: torch.Tensor, p: float) -> torch.Tensor:
    """By integers of any length, element by element."""
    found = []
    for e in number.tolist():
        w = [e // 4 & 0xFFFFFFFF, e // 4 >> 32, SEED[1] & 0xFFFFFFFF, SEED[1] >> 32 & 0xFFFFFFFF]
        k = [SEED[0] & 0xFFFFFFFF, SEED[0] >> 32 & 0xFFFFFFFF]
        for _ in range(7):
            a, b = 0xD2511F53 * w[0], 0xCD9E8D57 * w[2]
            w = [b >> 32 ^ w[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ w[3] ^ k[1], a & 0xFFFFFFFF]
            k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
        found.append(0.0 if w[e % 4] < p * 2**32 else 1 / (1 - p))
    return torch.tensor(found)


def test_plain_torch_code_is_the_formula():
    assert_same_bits(factors(torch.ones(41), 0.3, seed_on("cpu")), factors_of(torch.arange(41), 0.3))


def test_other_types_run_the_original():
    x = random_tensor((33, 17), torch.float64, "cpu")
    assert torch.equal(dropout(x, 0.3, seed=seed_on("cpu")), x * factors(x, 0.3, seed_on("cpu")))
    torch.manual_seed(2)
    ours = dropout(x, 0.3)
    torch.manual_seed(2)
    assert torch.equal(ours, torch.nn.functional.dropout(x, 0.3))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"p": 1.5}, "dropout: p is 1.5; a probability, 0 to 1, is needed"),
        ({"p": float("nan")}, "dropout: p is nan"),
        ({"seed": torch.zeros(3, dtype=torch.int64)}, r"dropout: seed has shape \[3\]"),
        ({"seed": torch.zeros(2)}, "dropout: seed has elements of type float32"),
        ({"x": torch.ones(3, dtype=torch.int64)}, "dropout: x is torch.int64; a floating-point type is needed"),
    ],
)
def test_bad_input_is_named(arguments, sentence):
    with pytest.raises((RuntimeError, TypeError, ValueError), match=sentence):
        dropout(**{"x": torch.ones(3, 4), **arguments})
