"""Mamba-2's state space in models: the operator of the gated delta rule without its delta, in the place of
Transformers' function, against float64 with that function as the yardstick."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import bastile
from bastile.models import state_space
from bastile.report import Tally
from oracle import Case, assert_no_worse, assert_no_worse_pooled, random_tensor
from replaced_function import Replaced, modeling

REPLACED = Replaced("mamba2_scan", "mamba2_chunk_scan")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    bastile.reset()


def stock_function() -> Any:
    function = getattr(modeling("mamba2"), REPLACED.name, None)
    if function is None:
        pytest.skip("Transformers has no function for it in this release")
    return inspect.unwrap(function)


def ours() -> Any:
    return state_space._scan(Tally("mamba2_scan", "a test"), stock_function())


def definition(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, state: Any) -> torch.Tensor:
    """A token at a time; y, with the last state behind it."""
    times = x.shape[2] // b.shape[2]
    b, c, rows = b.repeat_interleave(times, 2), c.repeat_interleave(times, 2), []
    for t in range(x.shape[1]):
        state = state * torch.exp(dt[:, t] * a)[..., None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None, :]
        rows.append((state * c[:, t, :, None, :]).sum(-1) + d[:, None] * x[:, t])
    return torch.cat([torch.stack(rows, 1).flatten(), state.flatten()])


def case(tokens: int, heads: int, groups: int, size: int, state: int, dtype: torch.dtype) -> Case:
    """Of numbers of this type but for the steps, which Transformers rounds before it begins: of float32."""
    inputs = {
        "x": random_tensor((2, tokens, heads, size), dtype, "cpu"),
        "dt": functional.softplus(random_tensor((2, tokens, heads), torch.float32, "cpu")),
        "a": -random_tensor((heads,), torch.float32, "cpu").exp(),
        "b": random_tensor((2, tokens, groups, state), dtype, "cpu"),
        "c": random_tensor((2, tokens, groups, state), dtype, "cpu"),
        "d": random_tensor((heads,), dtype, "cpu"),
        "state": random_tensor((2, heads, size, state), torch.float32, "cpu"),
    }

    def called(function: Any) -> Any:
        def flat(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, state: Any) -> torch.Tensor:
            y, last = function(x, dt, a, b, c, chunk_size=64, D=d, initial_states=state, return_final_states=True)
            return torch.cat([y.flatten(), last.flatten()])

        return flat

    return Case(ours=called(ours()), stock=called(stock_function()), exact=definition, inputs=inputs)


#: Tokens, heads, groups, the size of a head and of its state; each has its reason.
SHAPES = [
    (64, 4, 1, 64, 128),  # one chunk, heads of one group
    (130, 4, 2, 16, 32),  # a chunk's rest, two groups
    (1, 2, 2, 8, 16),  # one token
    (67, 3, 1, 7, 9),  # sizes that fill nothing
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_as_well_as_transformers(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    assert_no_worse(case(*shape, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rule(dtype: torch.dtype) -> None:
    assert_no_worse_pooled(lambda: case(200, 8, 2, 32, 64, dtype), draws=6)


#: With how often it runs in a step of the small model.
TYPES = {"mamba2": 2, "bamba": 1, "granitemoehybrid": 2, "nemotron_h": 1, "zamba2": 2, "falcon_h1": 2}


@pytest.mark.parametrize("model_type", TYPES)
def test_a_step_of_a_model(model_type: str) -> None:
    REPLACED.assert_a_step(model_type, TYPES[model_type])


@pytest.mark.parametrize("model_type", ["mamba2", "bamba"])
def test_generation_keeps_its_states(model_type: str) -> None:
    REPLACED.assert_same_generation(model_type, TYPES[model_type])


def arguments(dtype: torch.dtype = torch.float32, state: int = 8) -> tuple[torch.Tensor, ...]:
    x, dt = torch.randn(1, 5, 4, 6, dtype=dtype), torch.randn(1, 5, 4, dtype=dtype)
    b, c = (torch.randn(1, 5, 2, state, dtype=dtype) for _ in range(2))
    return x, dt, -torch.rand(4), b, c


def test_steps_are_made_as_transformers_makes_them() -> None:
    """Biased, positive, limited, each where it is asked for, in their own type; and a result of float32."""
    x, dt, a, b, c = arguments(torch.bfloat16)
    for more in (
        {},
        {"dt_softplus": True},
        {"dt_softplus": True, "dt_bias": torch.randn(4)},
        {"dt_softplus": True, "dt_limit": (0.2, 0.9)},
        {"dt_softplus": True, "D": torch.randn(4), "return_final_states": True},
    ):
        got, want = (f(x, dt.abs(), a, b, c, 4, **more) for f in (ours(), stock_function()))
        torch.testing.assert_close(got, want)


def test_what_steps_aside() -> None:
    """Packed sequences with states, states that no kernel holds, other types, one skip for all heads."""
    tally = Tally("mamba2_scan", "a test")
    scan, stock = state_space._scan(tally, stock_function()), stock_function()
    wide, usual = arguments(state=130), arguments()
    for given, more in (
        (wide, {}),
        (tuple(t.double() for t in usual), {}),
        (usual, {"D": torch.randn(1)}),
        (usual, {"seq_idx": torch.zeros(1, 5, dtype=torch.int32), "return_final_states": True}),
    ):
        torch.testing.assert_close(scan(*given, 4, **more), stock(*given, 4, **more), rtol=0, atol=0)
    assert not tally.ran


def test_a_package_in_force_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = types.FunctionType((lambda x, *_, **__: x).__code__, {"__name__": "mamba_ssm.ops.triton"})
    REPLACED.assert_a_package_stays("mamba2", monkeypatch, "mamba_ssm", theirs)


def test_a_kernel_of_the_hub_runs() -> None:
    class Function(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return stock_function()(*args, **kwargs)

    module, given = Function(), arguments()
    scan = state_space._scan(Tally("mamba2_scan", "a test"), module)
    torch.testing.assert_close(scan(*given, 4), stock_function()(*given, 4))
    module.forward = lambda *args, **kwargs: "theirs"  # type: ignore[assignment, method-assign]
    assert scan(*given, 4) == "theirs"


def test_compiled_as_models_call_it() -> None:
    scan, (x, dt, a, b, c) = ours(), arguments()

    def function(x: torch.Tensor) -> Any:
        return scan(x, dt, a, b, c, 4, dt_softplus=True, dt_limit=(0.0, math.inf), seq_idx=None).flatten(2)

    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))
