"""The gated MLP whose first two weights are one tensor, against float64 and against the function of two weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

import bastile
from bastile.models import mlp, small
from bastile.ops.gated_mlp import gated_mlp, gated_mlp_of_halves
from memory import Memory
from oracle import DTYPES, Case, assert_no_worse, assert_rounds_to, assert_same_bits, devices, random_tensor

NAMES = ("x", "gate_up", "down")


def stock(x, gate_up, down):
    """What Phi3MLP computes."""
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(up * silu(gate), down)


def inputs(shape, inner, dtype, device) -> dict[str, torch.Tensor]:
    width = shape[-1]
    return {
        "x": random_tensor(shape, dtype, device),
        "gate_up": random_tensor((2 * inner, width), dtype, device, scale=width**-0.5),
        "down": random_tensor((width, inner), dtype, device, scale=inner**-0.5),
    }


def run(function: Any, tensors: dict[str, torch.Tensor], dout: torch.Tensor, wanted=NAMES, retain: bool = False):
    """The output, and the gradients of what is wanted, of the last of two passes where the graph is kept for one."""
    given = {name: t.detach().clone().requires_grad_(name in wanted) for name, t in tensors.items()}
    out = function(*given.values())
    leaves = [given[name] for name in wanted]
    for _ in range(retain):
        torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return out.detach(), dict(zip(wanted, torch.autograd.grad(out, leaves, dout), strict=True))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
# Ordinary; one token; one dimension; odd widths: single-element accesses; no token; the narrowest row of halves.
@pytest.mark.parametrize(
    ("shape", "inner"), [((3, 5, 64), 96), ((1, 64), 96), ((64,), 24), ((7, 5), 33), ((2, 0, 16), 24), ((3, 130), 1)]
)
def test_matches_float64_as_well_as_stock(shape, inner, dtype, device):
    tokens = max(1, torch.Size(shape[:-1]).numel())
    assert_no_worse(Case(gated_mlp_of_halves, stock, stock, inputs(shape, inner, dtype, device), independent=tokens))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_it_is_the_function_of_two_weights(activation, up_first, device):
    tensors, dout = inputs((9, 64), 96, torch.float32, device), random_tensor((9, 64), torch.float32, device)

    def of_two(x, gate_up, down):
        first, second = gate_up.chunk(2)
        return gated_mlp(x, *((second, first) if up_first else (first, second)), down, activation)

    def of_one(*given):
        return gated_mlp_of_halves(*given, activation, up_first=up_first)

    (out, got), (want_out, want) = run(of_one, tensors, dout), run(of_two, tensors, dout)
    for ours, theirs in ((out, want_out), *((got[name], want[name]) for name in NAMES)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # a product's sum in another order


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("wanted", [("x",), ("gate_up",), ("down",), ("x", "down"), ("x", "gate_up")])
@pytest.mark.parametrize("retain", [False, True])
def test_frozen_parts_and_kept_graphs_change_no_bit(wanted, retain, device):
    tensors, dout = inputs((9, 64), 96, torch.bfloat16, device), random_tensor((9, 64), torch.bfloat16, device)
    every = run(gated_mlp_of_halves, tensors, dout)[1]
    for name, gradient in run(gated_mlp_of_halves, tensors, dout, wanted, retain)[1].items():
        assert_same_bits(gradient, every[name])


def test_nothing_puts_the_gradients_together():
    with Memory() as memory:
        tensors = inputs((9, 64), 96, torch.float32, "cpu")
        run(gated_mlp_of_halves, tensors, tensors["x"].clone())
    assert "bastile.swiglu_backward_inplace.default" in memory.calls
    assert not [call for call in memory.calls if call.startswith("aten.cat")]


@pytest.mark.parametrize("device", devices())
def test_autocast_casts_as_linear_layers_do(device):
    tensors, dout = inputs((9, 64), 96, torch.float32, device), random_tensor((9, 64), torch.bfloat16, device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        out, gradients = run(gated_mlp_of_halves, tensors, dout)
    assert out.dtype is torch.bfloat16
    low = {name: t.bfloat16() for name, t in tensors.items()}
    for name, want in run(gated_mlp_of_halves, low, dout)[1].items():
        if name == "x":
            assert_same_bits(gradients[name], want.float())
        else:
            assert_rounds_to(gradients[name], want.float(), torch.bfloat16)


@pytest.mark.parametrize("device", devices())
def test_what_it_refuses(device):
    x, gate_up, down = inputs((9, 64), 96, torch.float32, device).values()
    for given, message in (
        ((x[:, :63], gate_up, down), r"gate_up_weight has shape \[192, 64\]; \[2I, 63\]"),
        ((x, gate_up[:191], down), r"gate_up_weight has shape \[191, 64\]; \[2I, 64\]"),
        ((x[0, 0], gate_up, down), r"x has shape \[\]; \[..., H\]"),
        ((x, gate_up, down.t()), r"down_weight has shape \[96, 64\]; \[H, 96\]"),
    ):
        with pytest.raises(RuntimeError, match=f"gated_mlp_of_halves: {message} is needed"):
            gated_mlp_of_halves(*given)
    out = gated_mlp_of_halves(x.requires_grad_(), gate_up, down)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gated_mlp_of_halves cannot be differentiated twice"):
        gradient.sum().backward()
    double = [t.detach().double() for t in (x, gate_up, down)]
    torch.testing.assert_close(gated_mlp_of_halves(*double), stock(*double))


def test_compiles_without_a_break():
    tensors, dout = inputs((9, 64), 96, torch.float32, "cpu"), random_tensor((9, 64), torch.float32, "cpu")
    compiled = torch.compile(gated_mlp_of_halves, fullgraph=True, backend="aot_eager")
    (out, got), (want_out, want) = run(compiled, tensors, dout), run(gated_mlp_of_halves, tensors, dout)
    torch.testing.assert_close(out, want_out)
    for name in NAMES:
        torch.testing.assert_close(got[name], want[name])


@pytest.mark.parametrize("model_type", ["phi3", "glm4"])
def test_models_use_it(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def counted(*given: Any, **options: Any) -> torch.Tensor:
        ran.append(len(given))
        return gated_mlp_of_halves(*given, **options)

    monkeypatch.setattr(mlp, "gated_mlp_of_halves", counted)
    model = small.small_model(model_type)
    bastile.apply_to_model(model)
    small.step(model)
    assert len(ran) == 2
    layers: Any = model.model
    layers.layers[0].mlp.gate_up_proj.register_forward_hook(lambda *_: None)
    small.step(model)
    assert len(ran) == 3  # the layer with a hook is called as it was
