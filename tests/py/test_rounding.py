"""Adapters of a layer that are rounded with those of its first node."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from bastile.ops import _rounding
from bastile.ops._rounding import rounded, together
from memory import Memory
from oracle import assert_same_bits, devices, random_tensor

RANKS, WIDTH = [3, 2], 16
COPIES = "aten._foreach_copy_.default"


def adapters(device: str, count: int) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    def draw(*shape: int) -> nn.Parameter:
        return nn.Parameter(random_tensor(shape, torch.float32, device))

    return [([draw(r, WIDTH) for r in RANKS], [draw(24, r) for r in RANKS]) for _ in range(count)]


def asked(nodes, dtype=torch.bfloat16, layer=None) -> tuple[list[list[torch.Tensor]], int]:
    """What each gets, and in how many launches."""
    with Memory() as memory:
        if layer is None:
            found = [rounded(a, b, dtype) for a, b in nodes]
        else:
            with together(layer):
                found = [rounded(a, b, dtype) for a, b in nodes]
    return found, memory.calls.count(COPIES)


def assert_right(found, nodes, dtype=torch.bfloat16) -> None:
    for results, (a, b) in zip(found, nodes, strict=True):
        for got, want in zip(results, [torch.cat(a), *b], strict=True):
            assert not got.requires_grad
            assert_same_bits(got, want.detach().to(dtype))


@pytest.mark.parametrize("device", devices())
def test_a_layer_that_ran_before_takes_one_launch(device):
    nodes, layer = adapters(device, 4), nn.Identity()
    for launches in (4, 1, 1):
        found, made = asked(nodes, layer=layer)
        assert_right(found, nodes)
        assert made == launches
        for t in (*nodes[0][0], *nodes[3][1]):  # an optimiser's step
            with torch.no_grad():
                t.mul_(1.5)
    stand_ins = [tuple([[nn.Parameter(t.detach()) for t in each] for each in node]) for node in nodes]
    found, made = asked(stand_ins, layer=layer)
    assert_right(found, nodes)
    assert made == 1
    turned = [nodes[0], *nodes[:0:-1]]
    found, made = asked(turned, layer=layer)
    assert_right(found, turned)
    assert made == 1
    assert asked(nodes)[1] == 4  # outside of a layer
    assert asked(nodes[2:], torch.float16, layer)[1] == 2
    found, made = asked(nodes[2:], torch.float16, layer)
    assert_right(found, nodes[2:], torch.float16)
    assert made == 1


@pytest.mark.parametrize("device", devices())
def test_what_changes_while_the_layer_runs_is_rounded_again(device):
    nodes, layer = adapters(device, 3), nn.Identity()
    asked(nodes, layer=layer)
    with together(layer):
        found = [rounded(*nodes[0], torch.bfloat16)]
        with torch.no_grad():
            nodes[1][0][1].add_(1)
        found += [rounded(*each, torch.bfloat16) for each in nodes[1:]]
    assert_right(found, nodes)


@pytest.mark.parametrize("device", devices())
def test_other_adapters_freed_ones_and_runs_that_end_early(device):
    nodes, layer = adapters(device, 3), nn.Identity()
    asked(nodes, layer=layer)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), together(layer):
        rounded(*nodes[0], torch.bfloat16)[0].mm(nodes[0][0][0])
    assert _rounding._thread.run is None
    assert asked(nodes, layer=layer)[1] == 1  # it is remembered still
    memory = nodes[2][1][0].untyped_storage()
    kept, size = nodes[2][1][0].detach().clone(), memory.nbytes()
    memory.resize_(0)  # as sharding does with what is not needed yet
    with together(layer):
        found = [rounded(*each, torch.bfloat16) for each in nodes[:2]]
        memory.resize_(size)
        with torch.no_grad():
            nodes[2][1][0].copy_(kept)
        found.append(rounded(*nodes[2], torch.bfloat16))
    assert_right(found, nodes)
    nodes[0] = adapters(device, 1)[0]
    gc.collect()
    for launches in (3, 1):
        found, made = asked(nodes, layer=layer)
        assert_right(found, nodes)
        assert made <= launches
