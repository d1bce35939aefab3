"""Data that is not aligned to its elements, as views of files and of foreign memory may be."""

import pytest
import torch

from bastile.ops.cross_entropy import cross_entropy
from bastile.ops.qk_norm_rope import qk_norm_rope
from bastile.ops.rms_norm import add_rms_norm, rms_norm
from every_operator import CALLS, H, T, heads, random, tables
from oracle import assert_same_bits


def unaligned(t: torch.Tensor) -> torch.Tensor:
    """The same numbers, one byte behind where they should begin."""
    memory = bytearray(t.numel() * t.element_size() + 1)
    moved = torch.frombuffer(memory, dtype=t.dtype, offset=1).view(t.shape).copy_(t)
    assert moved.data_ptr() % t.element_size()
    return moved


def strided(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t, t], dim=-1)[..., 0]


def assert_the_same(call, x: torch.Tensor, other: torch.Tensor) -> None:
    results = []
    for leaf in (x.requires_grad_(), other.requires_grad_()):
        y = call(leaf)
        upstream = random(*y.shape) if y.dim() else torch.tensor(0.5)
        upstream = upstream if leaf is x else unaligned(upstream)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, upstream)))
    for got, want in zip(results[1], results[0], strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_inputs_and_upstream_gradients(call):
    x = random(T, H)
    assert_the_same(call, x, unaligned(x))


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
