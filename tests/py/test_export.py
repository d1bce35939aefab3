"""While a model is exported or traced, PyTorch's own code runs: the program needs no Bastile."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import bastile
import every_operator
from conftest import DENSE, tiny_batch, tiny_model
from every_operator import CALLS, H, T


class Calling(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.fixture
def made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators' other arguments: no generator may be used in a program."""
    made: dict[tuple[int, ...], torch.Tensor] = {}
    new = every_operator.random

    def random(*shape: int) -> torch.Tensor:
        if shape not in made:
            made[shape] = new(*shape)
        return made[shape]

    monkeypatch.setattr(every_operator, "random", random)


def foreign(program: torch.export.ExportedProgram) -> set[str]:
    calls = {node.target for node in program.graph.nodes if node.op == "call_function"}
    return {str(call) for call in calls if not str(call).startswith(("aten.", "<built-in"))}


@pytest.mark.parametrize("op", CALLS)
def test_operators_are_exported_as_pytorchs_own(op: str, made_once: None) -> None:
    x = torch.randn(T, H)
    want = CALLS[op](x)
    program = torch.export.export(Calling(CALLS[op]), (x,), strict=False)
    assert foreign(program) == set()
    torch.testing.assert_close(program.module()(x), want)


@pytest.mark.parametrize("op", CALLS)
def test_operators_are_traced_as_pytorchs_own(op: str, made_once: None) -> None:
    x = torch.randn(T, H).requires_grad_()
    want = CALLS[op](x)
    traced = torch.jit.trace(CALLS[op], (x,), check_trace=False)
    kinds = {node.kind() for node in traced.inlined_graph.nodes()}
    assert all(kind.startswith(("aten::", "prim::")) for kind in kinds)
    assert "prim::PythonOp" not in kinds
    torch.testing.assert_close(traced(x), want)


@pytest.mark.parametrize("training", [False, True], ids=["logits", "loss"])
@pytest.mark.parametrize("family", sorted(DENSE))
def test_patched_models_are_exported_as_stock_ones(family: str, training: bool) -> None:
    model = tiny_model(family, num_hidden_layers=1).train(training)
    model.config.use_cache = False  # a cache is no output of a program
    batch = {name: t for name, t in tiny_batch(model).items() if training or name != "labels"}
    with torch.no_grad():
        want = model(**batch)
        bastile.apply()
        program = torch.export.export(model, (), batch, strict=False)
        got = program.module()(**batch)
    assert foreign(program) <= {"wrap_with_set_grad_enabled"}  # Transformers' own
    torch.testing.assert_close(got.logits, want.logits)
    if training:
        torch.testing.assert_close(got.loss, want.loss)
