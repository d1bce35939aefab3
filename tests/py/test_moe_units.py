"""The experts of any unit and layout against float64; the error of Transformers' loop over them is the yardstick."""

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from bastile.ops._glu import ACTIVATIONS, UNITS
from bastile.ops.moe import moe_experts
from oracle import (
    DTYPES,
    EMULATED,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_same_bits,
    devices,
    random_tensor,
)
from test_moe import routing

#: Transformers' name of each, as experts' configurations have it.
ACTS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu": "relu", "relu2": "relu2"}


def stock(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    indices: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:
    """Mixtral's loop over the experts, the code of 54 types."""
    module: Any = SimpleNamespace(
        num_experts=gate_up.shape[0], gate_up_proj=gate_up, down_proj=down, act_fn=ACT2FN[ACTS[activation]]
    )
    return MixtralExperts.forward.__wrapped__(module, hidden, indices, weights)


def ours(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    indices: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Of weights that are stored as linear layers' are, [E, 2I, H] and [E, H, I]."""
    turned = gate_up.transpose(1, 2), None, down.transpose(1, 2), None
    return moe_experts(hidden, indices, weights, *turned, **options)


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    tokens, choices, experts, width, inner = shape
    return {
        "hidden": random_tensor((tokens, width), dtype, device),
        "weights": random_tensor((tokens, choices), torch.float32, device).softmax(1).to(dtype),
        "gate_up": random_tensor((experts, 2 * inner, width), dtype, device, scale=2 / width**0.5),
        "down": random_tensor((experts, width, inner), dtype, device, scale=1 / inner**0.5),
    }


def case(shape: tuple[int, ...], dtype: torch.dtype, device: str, activation: str = "silu", **more: Any) -> Case:
    tensors, indices = inputs(shape, dtype, device), routing(*shape[:3], device)
    return Case(
        ours=partial(ours, activation=activation),
        stock=partial(stock, activation=activation),
        exact=partial(stock, activation=activation),
        inputs=tensors,
        constants={"indices": indices},
        independent=max(1, indices.numel() * shape[4] // 8),  # as in test_moe.py
        **more,
    )


# [T, K, E, H, I]. Each has its reason.
SHAPES = [
    (40, 2, 5, 32, 48),  # ordinary
    (9, 4, 4, 33, 7),  # odd sizes: ups begin where no access of two does
    (70, 3, 5, 24, 44),  # several blocks; ups begin at a multiple of 4, not of 8
    (20, 8, 64, 16, 16),  # as many experts a token as Qwen3 has, most of them with few rows
    (6, 2, 3, 8, 2100),  # more than a block's threads, and than a tile on CPU
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_as_well_as_stock(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    assert_no_worse(case(shape, dtype, device, extra_roundings={"dweights": 1}))  # of dy, where stock rounds y


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, dtype: torch.dtype, device: str) -> None:
    assert_no_worse(case(SHAPES[0], dtype, device, activation, extra_roundings={"dweights": 1}))


@pytest.mark.skipif(EMULATED, reason="many numbers")
@pytest.mark.parametrize("device", devices())
def test_the_mean_error_is_stocks_at_most(device: str) -> None:
    """By the rule without a floor, on numbers that leave little to luck. But for dweights: see docs/moe.md."""
    assert_no_worse_pooled(
        lambda: case((512, 4, 8, 64, 96), torch.bfloat16, device), ("output 0", "dhidden", "dgate_up", "ddown")
    )


def plain(hidden, weights, gate_up, down, indices, unit, limit):
    """float64, from the definition."""
    out = torch.zeros_like(hidden)
    for token, choice in itertools.product(range(indices.shape[0]), range(indices.shape[1])):
        expert = indices[token, choice]
        g, u = (gate_up[expert] @ hidden[token]).chunk(2)
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        y = (u + 1) * g * torch.sigmoid(1.5 * g) if unit == "swiglu_oai" else ACTIVATIONS[unit](g) * u
        out = out.index_add(0, torch.tensor([token]), (weights[token, choice] * (down[expert] @ y))[None])
    return out


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("interleaved", "limit"), [(False, 1.0), (True, 1.0), (True, float("inf"))])
@pytest.mark.parametrize("unit", UNITS)
def test_units_layouts_and_limits(unit: str, interleaved: bool, limit: float, device: str) -> None:
    """In float64's company: the shortest way to all combinations. Weights in either storage give gradients in it."""
    shape = (7, 2, 3, 16, 8)
    given, indices = inputs(shape, torch.float32, "cpu"), routing(*shape[:3], "cpu")
    exact = {name: t.double().requires_grad_() for name, t in given.items()}
    upstream = random_tensor((7, 16), torch.float32, "cpu")
    want = plain(**exact, indices=indices, unit=unit, limit=limit)
    gradients = torch.autograd.grad(want, list(exact.values()), upstream.double())

    def placed(gate_up: torch.Tensor) -> torch.Tensor:
        """Halves to pairs, where these are wanted."""
        return gate_up.unflatten(1, (2, 8)).transpose(1, 2).flatten(1, 2) if interleaved else gate_up

    results = []
    for turned in (True, False):
        leaves = {name: t.clone().to(device) for name, t in given.items()}
        leaves["gate_up"] = placed(leaves["gate_up"])
        for name in ("gate_up", "down"):
            leaves[name] = leaves[name].contiguous() if turned else leaves[name].transpose(1, 2).contiguous()
        for leaf in leaves.values():
            leaf.requires_grad_()
        hidden, weights, gate_up, down = leaves.values()
        as_read = [t.transpose(1, 2) if turned else t for t in (gate_up, down)]
        out = moe_experts(
            hidden, indices.to(device), weights, as_read[0], None, as_read[1], None,
            activation=unit, interleaved=interleaved, alpha=1.5, limit=limit,
        )  # fmt: skip
        out.backward(upstream.to(device))
        assert all(leaf.grad.stride() == leaf.stride() for leaf in leaves.values())
        d_gate_up, d_down = (t.grad if turned else t.grad.transpose(1, 2) for t in (gate_up, down))
        results.append((out.detach(), hidden.grad, weights.grad, d_gate_up, d_down))
    expected = [want.detach(), *gradients]
    expected[3] = placed(expected[3])
    for result in results:
        for got, exactly in zip(result, expected, strict=True):
            assert (got.cpu().double() - exactly).abs().max() <= 1e-5 * exactly.abs().max()


@pytest.mark.parametrize("device", devices())
def test_weights_are_never_copied(device: str) -> None:
    """Turned weights and their gradients: their storage holds no more than they do, and no step of the backward pass
    makes another of their size."""
    shape = (5, 1, 4, 64, 96)
    leaves = {name: t.requires_grad_() for name, t in inputs(shape, torch.bfloat16, device).items()}
    handed = []
    for name in ("gate_up", "down"):
        leaves[name].register_hook(lambda gradient: handed.append(gradient.data_ptr()))
    ours(**leaves, indices=routing(*shape[:3], device), activation="silu").sum().backward()
    for name in ("gate_up", "down"):
        assert leaves[name].grad.data_ptr() in handed
        assert leaves[name].grad.untyped_storage().nbytes() == leaves[name].nbytes


@pytest.mark.parametrize("device", devices())
def test_defaults_are_those_of_the_unit(device: str) -> None:
    shape = (7, 2, 3, 16, 8)
    t, indices = inputs(shape, torch.float32, device), routing(*shape[:3], device)
    for unit, said in (
        ("swiglu_oai", {"interleaved": True, "alpha": 1.702, "limit": 7.0}),
        ("silu", {"interleaved": False, "limit": float("inf")}),
    ):
        assert_same_bits(
            ours(**t, indices=indices, activation=unit), ours(**t, indices=indices, activation=unit, **said)
        )
    assert_same_bits(ours(**t, indices=indices), ours(**t, indices=indices, activation="swiglu_oai"))


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_at_a_limit(dtype: torch.dtype, device: str, is_open: bool) -> None:
    """They are those of the unit alone."""
    h = (random_tensor((6, 16), torch.float32, device).mul(2).round() / 2).to(dtype)
    dy = random_tensor((6, 8), dtype, device)
    ends = torch.tensor([6], dtype=torch.int32, device=device)
    order, weights = torch.arange(6, dtype=torch.int32, device=device), torch.ones(6, 1, dtype=dtype, device=device)
    unit = 0, True, 0.0, 1.0, is_open  # silu, interleaved, alpha, limit
    dh, *_ = torch.ops.bastile.moe_glu_backward(
        dy, h, None, ends, order, weights, None, *unit, True, False, False, False
    )
    alone = torch.ops.bastile.glu_joined_backward(*unit, dy, h)
    passes = (h.abs() < 1 if is_open else h.abs() <= 1) | (h < 0) & (torch.arange(16, device=device) % 2 == 0)
    assert (h == 1).any()
    assert not dh[~passes].any()
    torch.testing.assert_close(dh, alone)


def test_bad_options_are_named() -> None:
    shape = (7, 2, 3, 16, 8)
    t, indices = inputs(shape, torch.float32, "cpu"), routing(*shape[:3], "cpu")
    with pytest.raises(ValueError, match=r'activation is .swish.; one of "silu", .* "swiglu_oai" is needed'):
        ours(**t, indices=indices, activation="swish")
    with pytest.raises(ValueError, match=r"limit is -1; more than 0 is needed"):
        ours(**t, indices=indices, activation="silu", limit=-1)
    with pytest.raises(RuntimeError, match=r"activation is 6; 0 \(silu\), .* or 5 \(swiglu_oai\)"):
        torch.ops.bastile.moe_glu_forward(
            t["hidden"], None, torch.tensor([7], dtype=torch.int32), 6, False, 1.0, 1.0, False
        )
