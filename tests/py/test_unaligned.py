"""Data that is not aligned to its elements, as views of files and of foreign memory may be."""

import pytest
import torch

from bastile.ops.cross_entropy import cross_entropy
from bastile.ops.qk_norm_rope import qk_norm_rope
from bastile.ops.rms_norm import add_rms_norm, rms_norm
from every_operator import CALLS, PRODUCTS, TERMS, H, T, heads, in_float64, random, tables
from oracle import assert_same_bits
from products import assert_near


def unaligned(t: torch.Tensor) -> torch.Tensor:
    """The same numbers, one byte behind where they should begin."""
    memory = bytearray(t.numel() * t.element_size() + 1)
    moved = torch.frombuffer(memory, dtype=t.dtype, offset=1).view(t.shape).copy_(t)
    assert moved.data_ptr() % t.element_size()
    return moved


def strided(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t, t], dim=-1)[..., 0]


def run(call, x: torch.Tensor, place=lambda t: t) -> tuple[torch.Tensor, ...]:
    """The output, and the gradient of x for an upstream gradient that is put into place."""
    y = call(x.requires_grad_())
    upstream = place(random(*y.shape) if y.dim() else torch.tensor(0.5))
    return y.detach(), *torch.autograd.grad(y, x, upstream)


def assert_the_same(call, x: torch.Tensor, other: torch.Tensor) -> None:
    for got, want in zip(run(call, other, unaligned), run(call, x), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("name", CALLS)
def test_inputs_and_upstream_gradients(name):
    x, call = random(T, H), CALLS[name]
    if name not in PRODUCTS:
        assert_the_same(call, x, unaligned(x))
        return
    with in_float64():
        exact = run(call, x.double())
    for results in (run(call, x), run(call, unaligned(x), unaligned)):
        for got, want in zip(results, exact, strict=True):
            assert_near(got, want, TERMS)


@pytest.mark.parametrize("moved", [unaligned, strided])
def test_weights_of_norms(moved):
    x, weight = random(T, H), random(H)
    for call in (
        lambda w: rms_norm(x, w),
        lambda w: torch.cat(add_rms_norm(x, x, w)),
        lambda w: torch.cat(qk_norm_rope(heads(x), heads(x), w, w, *tables())),
    ):
        assert_the_same(call, weight, moved(weight))


def test_logits_that_would_be_written_to_are_refused():
    logits = unaligned(random(T, H)).requires_grad_()
    with pytest.raises(RuntimeError, match="logits does not begin at a multiple of its elements' 4 bytes; copy it"):
        cross_entropy(logits.view_as(logits), torch.arange(T), inplace=True)
