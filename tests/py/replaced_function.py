"""What holds of every operator that takes the place of a function of Transformers' files: linear attention, state
spaces, short convolutions."""

from __future__ import annotations

import types
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch

import bastile
from bastile.models import small
from bastile.models.table import OPERATORS


def modeling(model_type: str) -> types.ModuleType:
    base = model_type.removesuffix("_text")
    return import_module(f"transformers.models.{base}.modeling_{base}")


def assert_same_step(got: Any, want: Any) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


@dataclass(frozen=True)
class Replaced:
    operator: str
    name: str  # of the function

    def hybrid(self, model_type: str) -> Any:
        """A small model of this type, whose function the installed release has under its name."""
        if model_type not in small.causal_types() or not hasattr(modeling(model_type), self.name):
            pytest.skip("Transformers has no function for it in this release")
        return small.small_model(model_type)

    def ran(self) -> int:
        return bastile.report(reset=True).ran(self.operator)

    def assert_a_step(self, model_type: str, times: int) -> None:
        """With this operator alone, in one model and in all: the loss and gradients of stock, before, with it, and
        after; so often it runs."""
        model = self.hybrid(model_type)
        module = modeling(model_type)
        stock, function = small.step(model), getattr(module, self.name)
        alone = {name: name == self.operator for name in OPERATORS}
        of_no_model = [name for name, row in OPERATORS.items() if not row.of_a_model]
        for name in of_no_model:
            alone.pop(name)
        self.ran()
        bastile.apply_to_model(model, **alone)
        assert getattr(module, self.name) is function, "of one model"
        one = small.step(model)
        assert self.ran() == times
        bastile.reset(model=model)
        assert small.step(model)[0] == stock[0]
        assert self.ran() == 0
        alone |= dict.fromkeys(of_no_model, False)
        assert bastile.apply(**alone, model_types=model_type) == [f"{self.operator}_{model_type}"]
        assert getattr(module, self.name) is not function
        everywhere = small.step(model)
        assert self.ran() == times
        bastile.reset()
        assert getattr(module, self.name) is function
        assert small.step(model)[0] == stock[0]
        for got in (one, everywhere):
            assert_same_step(got, stock)

    def assert_same_generation(self, model_type: str, times: int, prompt: int = 7) -> None:
        """The prompt by the kernel, with the state that it leaves; single tokens by the function for those, which
        stays."""
        model = self.hybrid(model_type).eval()
        ids = torch.randint(3, 90, (2, prompt), generator=torch.Generator().manual_seed(1))

        def generated() -> Any:
            return model.generate(input_ids=ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=True)

        want = generated()
        self.ran()
        bastile.apply_to_model(model)
        assert torch.equal(generated(), want)
        assert self.ran() == times

    def assert_a_package_stays(
        self, model_type: str, monkeypatch: pytest.MonkeyPatch, package: str, theirs: types.FunctionType
    ) -> None:
        """Where Transformers' wrapper calls `theirs`, of a module of the package, the operator has no place."""
        self.hybrid(model_type)
        module = modeling(model_type)
        monkeypatch.setattr(module, self.name, wrapper := _rewrapped(getattr(module, self.name), theirs))
        with pytest.raises(RuntimeError, match=f"the package {package} runs in its place"):
            bastile.apply(**{self.operator: True}, model_types=model_type)
        assert f"{self.operator}_{model_type}" not in bastile.apply(model_types=model_type)
        assert getattr(module, self.name) is wrapper

    def function_and_ours(self, model_type: str) -> tuple[Any, Any]:
        module = modeling(model_type)
        if not hasattr(module, self.name):
            pytest.skip("Transformers has no function for it in this release")
        stock = getattr(module, self.name)
        bastile.apply(model_types=model_type)
        return stock, getattr(module, self.name)


def _rewrapped(wrapper: Any, implementation: types.FunctionType) -> Any:
    """Transformers' wrapper with something else to call, as where a package is installed."""
    if not hasattr(wrapper, "__wrapped__"):
        pytest.skip("Transformers has no wrapper for it in this release")
    names = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
    names["implementation"] = types.CellType(implementation)
    names["is_new_implementation"] = types.CellType(True)
    cells = tuple(names[n] for n in wrapper.__code__.co_freevars)
    copy: Any = types.FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, None, cells)
    copy.__wrapped__, copy.__module__ = wrapper.__wrapped__, wrapper.__module__
    return copy
