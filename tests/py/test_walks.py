"""What a Trainer walks over a model for in every step: the same as PyTorch's own, without its names."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

import bastile
from conftest import tiny_batch, tiny_model

STOCK = {name: vars(PreTrainedModel).get(name) for name in ("train", "parameters", "zero_grad")}


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """bastile.apply() in force; an entry for each time that PyTorch's own code goes through a module that has parts."""
    seen: list[str] = []
    for name in ("train", "named_modules"):
        original = getattr(nn.Module, name)

        def noted(self: nn.Module, *args: Any, name=name, original=original, **kwargs: Any) -> Any:
            if isinstance(self, PreTrainedModel):
                seen.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(nn.Module, name, noted)
    bastile.apply()
    yield seen
    bastile.reset()
    assert {name: vars(PreTrainedModel).get(name) for name in STOCK} == STOCK
    assert not {"parameters", "zero_grad"} & vars(PeftModel).keys()


def models() -> dict[str, Any]:
    tied = tiny_model(tie_word_embeddings=True)
    adapted = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear"))
    shared = tiny_model()
    shared.model.layers[1] = shared.model.layers[0]
    shared.nothing = None
    return {"plain": tiny_model(), "tied": tied, "adapted": adapted, "shared": shared}


@pytest.mark.parametrize("name", ["plain", "tied", "adapted", "shared"])
def test_parameters_are_those_of_pytorch_in_its_order(name, walks):
    model = models()[name]
    walks.clear()
    found = list(model.parameters())
    assert walks == []
    stock = list(nn.Module.parameters(model))
    assert len(found) == len(stock) > 9
    assert all(a is b for a, b in zip(found, stock, strict=True))
    assert list(model.parameters(recurse=False)) == []


def test_gradients_go(walks):
    for model in (tiny_model(), models()["adapted"]):
        model(**tiny_batch(model)).loss.backward()
        walks.clear()
        assert any(p.grad is not None for p in model.parameters())
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        assert walks == []
        model(**tiny_batch(model)).loss.backward()
        model.zero_grad(set_to_none=False)
        assert {float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None} == {0.0}
        walks.clear()


def test_gradients_of_parameters_of_its_own_go(walks):
    """Where a model names other parameters than its modules have."""
    model = tiny_model()
    model(**tiny_batch(model)).loss.backward()
    some = list(model.parameters())[:2]
    model.parameters = lambda recurse=True: iter(some)
    model.zero_grad()
    del model.parameters
    assert [p.grad is None for p in model.parameters()] == [True] * 2 + [False] * (len(list(model.parameters())) - 2)


def flags(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_train_walks_where_something_changes(walks):
    model = models()["adapted"].train()
    walks.clear()
    assert model.train() is model
    assert walks == []
    for part in (model.base_model.model, model.base_model.model.model.layers[1].mlp):
        part.eval()
        assert not all(flags(model))
        model.train()
        assert all(flags(model))
    model.eval()
    assert not any(flags(model))
    walks.clear()
    model.eval()
    assert walks == []
    model.train()
    assert "train" in walks
    with pytest.raises(ValueError, match="expected to be boolean"):
        model.base_model.model.train(1)


class Frozen(nn.Linear):
    """Stays in evaluation, as batch norms of detectors do."""

    calls = 0

    def train(self, mode: bool = True) -> Any:
        Frozen.calls += 1
        return super().train(mode)


class Names(nn.Linear):
    """Has other parameters than are in it."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return iter(())


def test_methods_of_a_module_s_own_are_called(walks):
    model = tiny_model().train()
    model.model.layers[0].mlp.up_proj = Frozen(4, 4)
    model.train()
    assert Frozen.calls == 1
    model.model.layers[0].mlp.up_proj = Names(4, 4)
    found = {id(p) for p in model.parameters()}
    assert id(model.model.layers[0].mlp.up_proj.weight) not in found
    called = []
    model.model.layers[0].mlp.train = lambda mode=True: called.append(mode)
    model.train()
    assert called == [True]


def test_kernels_of_the_hub_see_it(walks):
    """Transformers asks for them in train() where they are in use."""
    model = tiny_model().train()
    model._use_kernels = True
    walks.clear()
    with warnings.catch_warnings(), suppress(ValueError):  # of 5.0, where there are none
        warnings.simplefilter("ignore")
        model.train()
    assert "train" in walks


def test_compiled_models_call_it(walks):
    model = tiny_model()

    @torch.compile(backend="eager")
    def count(x: torch.Tensor) -> Any:
        return x + len(list(model.parameters()))

    assert count(torch.zeros(())).item() == len(list(model.parameters()))


def test_around_data_parallel(walks, monkeypatch: pytest.MonkeyPatch):
    """Accelerate asks the wrapper. It needs no processes for this: only what it holds."""
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = models()["adapted"]
    walks.clear()
    found = list(wrapped.parameters())
    assert walks == []
    assert all(a is b for a, b in zip(found, nn.Module.parameters(wrapped), strict=True))
    bastile.reset()
    assert "parameters" not in vars(DistributedDataParallel)


def test_what_moves_between_modules_is_seen(walks):
    """Each walk is remembered: another order, another module in the same place, one that is gone."""
    model = models()["plain"]
    layers, first = model.model.layers, model.model.layers[0]

    def assert_as_stock() -> None:
        found, stock = list(model.parameters()), list(nn.Module.parameters(model))
        assert len(found) == len(stock)
        assert all(a is b for a, b in zip(found, stock, strict=True))

    assert_as_stock()
    layers[0], layers[1] = layers[1], layers[0]
    assert_as_stock()
    del layers[1]
    assert_as_stock()
    first.mlp.up_proj._modules["inner"] = nn.Linear(2, 2)
    layers.append(first)
    assert_as_stock()
    moved = first.mlp.up_proj._modules.pop("inner")
    first.mlp.down_proj._modules["inner"] = moved
    assert_as_stock()
    first.mlp.register_parameter("late", nn.Parameter(torch.zeros(1)))
    assert_as_stock()


@pytest.mark.parametrize("name", ["plain", "tied", "adapted", "shared"])
def test_modules_are_those_of_pytorch_in_its_order(name, walks):
    model = models()[name]
    inner = model if isinstance(model, PreTrainedModel) else model.base_model.model
    inner.model.layers[0].mlp.up_proj._modules["names"] = Names(4, 4)
    stock = list(nn.Module.named_modules(model))
    inner.model.layers[0].mlp.up_proj._modules.pop("names")
    assert [title for title, _ in stock if title.endswith("names")] == []
    for more in ({}, {"remove_duplicate": False}, {"prefix": "outer"}):
        stock = list(nn.Module.named_modules(model, **more))
        walks.clear()
        found = list(model.named_modules(**more))
        assert walks == []
        assert len(found) == len(stock) > 9
        assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(found, stock, strict=True))
    given = {inner.model.norm, inner.model.layers[0]}
    assert [t for t, _ in model.named_modules(set(given))] == [t for t, _ in nn.Module.named_modules(model, set(given))]
    walks.clear()
    found = list(model.modules())
    assert walks == []
    assert all(a is b for a, b in zip(found, nn.Module.modules(model), strict=True))


class Parts(nn.Linear):
    """Has more to show than it holds."""

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        yield from super().named_modules(memo, prefix, remove_duplicate)
        yield f"{prefix}.hidden", self.hidden

    hidden = nn.Identity()


def test_a_module_that_shows_its_parts_itself_does_so(walks):
    model = tiny_model()
    model.model.layers[0].mlp.up_proj = Parts(4, 4)
    stock = list(nn.Module.named_modules(model))
    assert stock == list(model.named_modules())
    assert ("model.layers.0.mlp.up_proj.hidden", Parts.hidden) in stock
    assert Parts.hidden in list(model.modules())


def test_a_walk_sees_what_changes_while_it_walks(walks):
    """Many an adapter is put in so: what takes a module's place further on is what is found there."""

    def replaced(walk: Any) -> list[str]:
        model, found = tiny_model(), []
        for title, module in walk(model):
            found.append(f"{title} {type(module).__name__}")
            if title == "model.layers.0.self_attn":
                model.model.layers[0].mlp = nn.Sequential(nn.Identity(), nn.Dropout())
        return found

    got = replaced(lambda model: model.named_modules())
    assert got == replaced(nn.Module.named_modules)
    assert "model.layers.0.mlp.1 Dropout" in got
