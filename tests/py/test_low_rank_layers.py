"""Linear layers of one input in a call for one token: against float64 and PyTorch's own, the calls that have them, and
those that do not. Where there is no GPU the operator runs on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bastile.ops import low_rank
from bastile.ops.gated_mlp import gated_mlp
from bastile.ops.lora import Adapted, adapted_linears
from bastile.ops.low_rank import layers_into, one_token_layers
from bastile.ops.projections import projections
from oracle import devices, few_examples, random_tensor


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts launches."""
    launches: list[int] = []

    def into(*given: Any) -> None:
        launches.append(1)
        layers_into(*given)

    monkeypatch.setattr(low_rank, "on_gpu", lambda t: True)
    monkeypatch.setattr(low_rank, "layers_into", into)
    return launches


def error(y: torch.Tensor, right: torch.Tensor) -> float:
    return float((y.double() - right).square().mean().sqrt())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 20, 32, 33])
@pytest.mark.parametrize(
    ("width", "columns"), [(64, (48,)), (1024, (256, 64, 64)), (1000, (40, 24)), (37, (5, 9)), (520, (16,) * 5)]
)
@torch.no_grad()
def test_errors_are_no_larger_than_pytorchs(
    rows: int, width: int, columns: tuple[int, ...], dtype: torch.dtype, device: str, as_on_a_gpu: list[int]
) -> None:
    x = random_tensor((rows, 1, width), dtype, device)
    weights = [random_tensor((n, width), dtype, device) for n in columns]
    biases = [random_tensor((n,), dtype, device) if n % 16 else None for n in columns]
    found = one_token_layers(x, weights, biases)
    if rows > 32 or width % 8:
        assert found is None
        return
    assert found is not None
    assert len(as_on_a_gpu) == -(-len(columns) // 3)
    for y, weight, bias in zip(found, weights, biases, strict=True):
        own = None if bias is None else bias.double()
        right = torch.nn.functional.linear(x.double(), weight.double(), own)
        its = torch.nn.functional.linear(x, weight, bias)
        assert y.shape == its.shape
        # A product of its own rounds a bias to add to it; elsewhere both round once, and sum in another order.
        of_its_own = bias is not None and device == "cpu"
        assert error(y, right) <= (1.6 if of_its_own else 1.05) * error(its, right) + 1e-9
    again = one_token_layers(x, weights, biases)
    assert again is not None
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@few_examples
@given(st.integers(1, 32), st.integers(1, 40), st.lists(st.integers(1, 70), min_size=1, max_size=4), st.booleans())
@torch.no_grad()
def test_drawn_shapes(rows: int, eighths: int, columns: list[int], gap: bool) -> None:
    for device in devices():
        x = random_tensor((rows, 1, 8 * eighths), torch.bfloat16, device)
        weights = [random_tensor((n, 8 * eighths + 8 * gap), torch.bfloat16, device)[:, : 8 * eighths] for n in columns]
        found = one_token_layers(x, weights, [None] * len(columns))
        assert found is not None
        for y, weight in zip(found, weights, strict=True):
            right = x.double() @ weight.double().t()
            assert bool(((y.double() - right).abs() <= 2**-8 * right.abs() + 1e-4 * eighths).all())


@torch.no_grad()
def test_calls_that_have_it(as_on_a_gpu: list[int]) -> None:
    x = random_tensor((4, 1, 64), torch.bfloat16, "cpu")
    weights = [random_tensor((n, 64), torch.bfloat16, "cpu") for n in (32, 16, 16)]
    found = projections(x, *weights)
    assert len(as_on_a_gpu) == 1
    for y, weight in zip(found, weights, strict=True):
        torch.testing.assert_close(y, x @ weight.t(), rtol=1e-2, atol=1e-2)
    gate, up = (random_tensor((96, 64), torch.bfloat16, "cpu") for _ in range(2))
    down = random_tensor((64, 96), torch.bfloat16, "cpu")
    y = gated_mlp(x, gate, up, down)
    assert len(as_on_a_gpu) == 3

    def stock(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    right = stock(*[t.double() for t in (x, gate, up, down)])
    assert error(y, right) <= 1.1 * error(stock(x, gate, up, down), right)


def test_layers_with_adapters(as_on_a_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from bastile.ops import _adapted

    monkeypatch.setattr(_adapted, "on_gpu", lambda t: True)
    x = random_tensor((4, 1, 64), torch.bfloat16, "cpu")
    layers = [
        Adapted(
            random_tensor((n, 64), torch.bfloat16, "cpu"),
            None,
            random_tensor((8, 64), torch.float32, "cpu"),
            random_tensor((n, 8), torch.float32, "cpu"),
            0.5,
            0.0,
        )
        for n in (32, 16)
    ]
    with torch.no_grad():
        found = adapted_linears(x, layers)
    assert len(as_on_a_gpu) == 1
    for y, (weight, _, a, b, *_rest) in zip(found, layers, strict=True):
        right = x.double() @ weight.double().t() + 0.5 * (x.double() @ a.double().t() @ b.double().t())
        assert bool(((y.double() - right).abs() <= 2**-7 * right.abs() + 0.15).all())


@few_examples
@given(
    st.integers(1, 32),
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 40)), min_size=1, max_size=4),
    st.booleans(),
)
@torch.no_grad()
def test_adapters_of_drawn_shapes(rows: int, eighths: int, layers: list[tuple[int, int]], wide: bool) -> None:
    """What they add is float32's, beside y's one or two roundings."""
    factor = torch.float32 if wide else torch.bfloat16
    for device in devices():
        x = random_tensor((rows, 1, 8 * eighths), torch.bfloat16, device)
        weights = [random_tensor((n, 8 * eighths), torch.bfloat16, device) for n, _ in layers]
        adapters = [
            (random_tensor((rank, 8 * eighths), factor, device), random_tensor((n, rank), factor, device), 0.5)
            if rank
            else None
            for n, rank in layers
        ]
        found = one_token_layers(x, weights, [None] * len(layers), adapters)
        assert found is not None
        for y, weight, adapter in zip(found, weights, adapters, strict=True):
            before = right = x.double() @ weight.double().t()
            size = torch.zeros_like(right)
            if adapter is not None:
                a, b, scale = (t.double() if isinstance(t, torch.Tensor) else t for t in adapter)
                right = before + scale * (x.double() @ a.t() @ b.t())
                size = 2**-8 * before.abs() + 1e-5 * scale * (x.double().abs() @ a.abs().t() @ b.abs().t())
            assert bool(((y.double() - right).abs() <= 2**-8 * right.abs() + size + 1e-4 * eighths).all())


def test_calls_that_do_not(as_on_a_gpu: list[int]) -> None:
    """Those with gradients, of several tokens, or of none, of other types, under autocast to another, while compiling,
    in a transform; weights that are no matrices of rows."""
    x, weight = random_tensor((4, 1, 64), torch.bfloat16, "cpu"), random_tensor((32, 64), torch.bfloat16, "cpu")

    def is_served(x: Any, *weights: Any) -> bool:
        return one_token_layers(x, weights, [None] * len(weights)) is not None

    assert not is_served(x, weight)
    with torch.no_grad():
        assert is_served(x, weight)
        wide = torch.empty(16, 12288, dtype=torch.bfloat16)
        assert not is_served(torch.empty(4, 1, 12288, dtype=torch.bfloat16), wide)
        large = torch.empty(24576, 512, dtype=torch.bfloat16)
        assert is_served(torch.zeros(16, 1, 512, dtype=torch.bfloat16), large)
        assert not is_served(torch.zeros(17, 1, 512, dtype=torch.bfloat16), large)
        assert is_served(torch.zeros(17, 1, 64, dtype=torch.bfloat16), weight)
        for other in (x.view(1, 4, 64), x.view(4, 64), x[:0], x.float(), torch.cat([x] * 9)):
            assert not is_served(other, weight)
        for other in (None, weight.float(), weight.t().contiguous().t(), weight[:1].expand(32, 64)):
            assert not is_served(x, weight, other)
        with torch.autocast("cpu", torch.bfloat16):
            assert is_served(x, weight)
        with torch.autocast("cpu", torch.float16):
            assert not is_served(x, weight)
        assert torch.vmap(lambda each: torch.tensor(is_served(each[:, None], weight)))(x).sum() == 0
