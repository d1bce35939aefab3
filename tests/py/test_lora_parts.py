"""The gated MLP with adapters in a checkpoint, and one that is told to remake what it would keep: gate's and up's
results are made in the backward pass, some rows at a time. Sizes are small here, so what would not pay for a part is
set to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bastile.ops import _adapted_mlp, lora
from bastile.ops.lora import Adapted, adapted_gated_mlp, adapted_linears
from bastile.ops.rms_norm import add_rms_norm
from memory import Memory, Peak, kept_by
from oracle import Case, assert_no_worse, assert_no_worse_pooled, assert_same_bits, devices, random_tensor
from test_lora import MIXES, POOLED, SCALE, Layer, make, peft_mlp, total_of, trained, under

WIDTH, INNER = 32, 96


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_adapted_mlp, "_LEAST_WORK", 1)
    monkeypatch.setattr(_adapted_mlp, "_ROWS", 4)


def checkpointed(x: torch.Tensor, *layers: Adapted) -> torch.Tensor:
    return checkpoint(adapted_gated_mlp, x, *layers, use_reentrant=False)


def remade(x: torch.Tensor, *layers: Adapted) -> torch.Tensor:
    return adapted_gated_mlp(x, *layers, remake=True)


#: The ways to parts.
WAYS = [checkpointed, remade]


def case_of(mix: Any, rows: int, device: str, way: Callable[..., torch.Tensor] = checkpointed) -> Case:
    """Adapters on frozen weights: x, A's and B's have gradients."""
    dtype, adapters, autocast = mix
    sizes = [Layer(WIDTH, INNER, 4, False), Layer(WIDTH, INNER, 3, False), Layer(INNER, WIDTH, 5, False)]
    inputs, constants = {"x": random_tensor((rows, WIDTH), dtype, device)}, {}
    for i, size in enumerate(sizes):
        weight, *adapter = size.inputs(f"{i} ", dtype, adapters, device).items()
        inputs |= dict(adapter)
        constants |= dict([weight])

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor, *tensors: torch.Tensor) -> Any:
            pairs, weights = tensors[:6], tensors[6:]
            given = zip(weights, pairs[::2], pairs[1::2], strict=True)
            return function(x, *[Adapted(weight, None, a, b, SCALE) for weight, a, b in given])

        return run

    cast = (torch.bfloat16 if dtype is torch.float32 else dtype) if autocast else None
    ours, stock = (under(cast, device, of(each)) for each in (way, peft_mlp))
    return Case(ours, stock, of(peft_mlp), inputs, constants, independent=rows)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("rows", [64, 61, 2])  # parts, of which the last may be a smaller one; less than a part
@pytest.mark.parametrize("way", WAYS)
def test_parts_match_float64_as_well_as_peft(way, rows, mix, device):
    assert_no_worse(case_of(mix, rows, device, way))


#: But for float32, where a library's products of a part's rows sum in other orders than those of all rows.
SIXTEEN_BITS = [(device, mix) for device, mix in POOLED if mix != (torch.float32, torch.float32, False)]


@pytest.mark.parametrize(("device", "mix"), SIXTEEN_BITS, ids=str)
def test_pooled_errors_of_parts(mix, device):
    assert_no_worse_pooled(lambda: case_of(mix, 256, device))


def layers_of(device: str, p: float = 0.0) -> list[Adapted]:
    return [*make(device, width=WIDTH, outputs=INNER, p=p), *make(device, count=1, width=INNER, outputs=WIDTH, p=p)]


def test_what_is_there_at_once_and_how_often_weights_are_made():
    """Of gate's and up's results, dy and the weights, which one by one are larger than all else: a third of each of the
    former at a time. Gate's and up's weights are made once for the backward pass, down's for each part."""
    layers, rows = layers_of("cpu"), 4096
    made: list[int] = []

    def quantised(layer: Adapted) -> Adapted:
        weight: Any = layer.weight

        def dequantise(dtype: torch.dtype) -> torch.Tensor:
            made.append(1)
            return weight.clone()

        return layer._replace(weight=None, dequantise=dequantise, outputs=weight.shape[0])

    given = [quantised(layer) for layer in layers]
    x = random_tensor((rows, WIDTH), torch.float32, "cpu").requires_grad_()
    out = checkpointed(x, *given)
    assert len(made) == 3
    with Peak() as peak:
        gradients = torch.autograd.grad(out.sum(), [x, *trained(layers)], torch.ones(()))
    assert len(made) == 3 + 2 + 3
    one, dx = rows * INNER * 4, rows * WIDTH * 4
    assert peak.most < one + 2 * dx  # thin numbers and weights are less than another dx
    wanted = torch.autograd.grad(adapted_gated_mlp(x, *layers).sum(), [x, *trained(layers)])
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_what_comes_behind_in_the_same_checkpoint(p, device):
    """Then the second run goes on, and the backward pass reads what that makes."""
    layers, x = layers_of(device, p), random_tensor((64, WIDTH), torch.float32, device).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return adapted_gated_mlp(x, *layers).sin() * 2

    found, products = [], []
    for again in (False, True):
        torch.manual_seed(3)
        y = checkpoint(block, x, use_reentrant=False) if again else block(x)
        with Memory() as memory:
            found.append([y.detach(), *torch.autograd.grad(total_of([y]), [x, *trained(layers)])])
        products.append(len([call for call in memory.calls if call.startswith(("aten.mm", "aten.addmm"))]))
    for ours, theirs in zip(*found, strict=True):
        assert_same_bits(ours, theirs)
    assert memory.calls.count("bastile.swiglu_forward.default") == 1
    # The forward pass's: two a layer, and the thin ones, with dropout three and else two. y's thin one is not kept.
    assert products[1] - products[0] == 2 * 3 + (3 if p else 2) + 1


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rows", [64, 61])
def test_remade_is_what_a_checkpoint_makes(rows, device):
    """To the bit, keeping neither gate's and up's results nor thin ones of y."""
    layers, x = layers_of(device), random_tensor((rows, WIDTH), torch.float32, device).requires_grad_()
    found = []
    for way in WAYS:
        out = way(x, *layers)
        found.append([out.detach(), *torch.autograd.grad(total_of([out]), [x, *trained(layers)])])
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)
    kept, remade_kept = (kept_by(lambda way=way: way(x, *layers)) for way in (adapted_gated_mlp, remade))
    thin = layers[2].a.shape[0]
    assert kept - remade_kept == rows * (2 * INNER + thin) * 4


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("way", WAYS)
def test_other_passes_over_such_a_graph(way, device):
    """Two in turn, several at once, and a second derivative, which is refused."""
    layers, x = layers_of(device), random_tensor((64, WIDTH), torch.float32, device).requires_grad_()
    wanted, out = [x, *trained(layers)], way(x, *layers)
    first = torch.autograd.grad(out.sum(), wanted, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(out.sum(), wanted, retain_graph=True), strict=True):
        assert_same_bits(one, other)
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="adapted_gated_mlp cannot be differentiated twice"):
        dx.sum().backward()
    out = way(x, *layers)
    upstream = random_tensor((2, *out.shape), torch.float32, device)
    each = [torch.autograd.grad(out, wanted, one, retain_graph=True) for one in upstream]
    at_once = torch.autograd.grad(out, wanted, upstream, is_grads_batched=True)
    for one, other in zip(at_once, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(other))


@pytest.mark.parametrize("device", devices())
def test_a_norm_s_result_is_made_again(device, monkeypatch):
    """A layer's first norm, and the layers that read it: what they keep of it is what it is made of, which is there."""
    layers, width = make(device, width=WIDTH, outputs=INNER), random_tensor((WIDTH,), torch.float32, device)
    x = random_tensor((64, WIDTH), torch.float32, device).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        y, total = add_rms_norm(x, None, width)
        first, second = adapted_linears(y, layers)
        return (first * second).sum() + total.sum()

    found, norms = [], []
    for least in (1 << 40, 0):
        monkeypatch.setattr(lora, "_MADE_AGAIN", least)
        out = checkpoint(block, x, use_reentrant=False)
        with Peak() as calls:
            found.append(torch.autograd.grad(out, [x, *trained(layers)]))
        norms.append(calls.calls.count("bastile.rms_norm_forward.default"))
    for kept, made in zip(*found, strict=True):
        assert_same_bits(kept, made)
    assert norms == [1, 2]


@pytest.mark.parametrize("device", devices())
def test_with_dropout_there_are_no_parts(device):
    """A mask is a function of an element's number among all."""
    layers, x = layers_of(device, 0.3), random_tensor((64, WIDTH), torch.float32, device).requires_grad_()
    found = []
    for function in (adapted_gated_mlp, *WAYS):
        torch.manual_seed(3)
        found.append(torch.autograd.grad(total_of([function(x, *layers)]), [x, *trained(layers)]))
    for ours, *others in zip(*found, strict=True):
        for theirs in others:
            assert_same_bits(ours, theirs)
