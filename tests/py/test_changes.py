"""Changes of a model's dictionaries that CPython tells of: all that are made are counted, and no others; what is
remembered by them is forgotten. From Python 3.12 on; below it, the tests of what is remembered see to looks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bastile.graphs.calls import called_instead
from bastile.graphs.watch import Watch
from bastile.models import changes
from bastile.models.structure import modules_of, parameters_of, picked, recalled, state_of
from conftest import tiny_model

pytestmark = pytest.mark.skipif(not changes.can_watch, reason="this Python does not tell of changes")

NOTHING = "nothing"


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), nn.Linear(2, 2))


def scope_of(module: nn.Module) -> dict[str, Any]:
    return vars(module)


def own_method(module: Any) -> None:
    module.train = lambda mode=True: None


def called_for_a_moment(module: Any) -> None:
    with called_instead([module], [lambda x: x]):
        assert module(3) == 3


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a parameter": ("tables", lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(2, 2)))),
    "a parameter that goes": ("tables", lambda m: setattr(m[0], "bias", None)),
    "behind PyTorch's back": ("tables", lambda m: m[0]._parameters.update(more=None)),
    "a child": ("tables", lambda m: m[1].update({"c": nn.Linear(1, 1)})),
    "a child that goes": ("tables", lambda m: m[1].pop("a")),
    "all children": ("tables", lambda m: m[1]._modules.clear()),
    "another table": ("tables", lambda m: setattr(m[1], "_modules", {})),
    "a mode": ("modes", lambda m: m[0].eval()),
    "a method": ("modes", lambda m: own_method(m[0])),
    "a setting": ("attributes", lambda m: setattr(m[0], "in_features", 3)),
    "a setting that goes": ("attributes", lambda m: delattr(m[0], "in_features")),
    "a new setting": ("attributes", lambda m: scope_of(m[0]).update({"more": 3})),
    "an adapter": ("attributes", lambda m: setattr(m[0], "_active_adapter", "other")),
    "how it is called": ("attributes", lambda m: m[0].compile(backend="eager")),
    "what is put back": (NOTHING, lambda m: called_for_a_moment(m[0])),
    "notes of others": (NOTHING, lambda m: setattr(m[0], "_require_grads_hooks", [])),
    "a parameter's values": (NOTHING, lambda m: m[0].weight.data.zero_()),
    "a parameter's memory": (NOTHING, lambda m: setattr(m[0].weight, "data", torch.zeros(3, 3))),
    "looks": (NOTHING, lambda m: (list(m.modules()), list(m.parameters()), m.zero_grad(), m(m[0].weight))),
}


def counts() -> dict[str, int]:
    tables, modes, attributes = changes.of_scopes()
    return {"tables": tables, "modes": modes, "attributes": attributes}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_counted_as_what_it_is(name: str) -> None:
    kind, change = CHANGES[name]
    model = made()
    model[1] = nn.Linear(2, 2) if name == "looks" else model[1]
    modules = list(model.modules())
    changes.watch_tables([table for module in modules for table in (module._modules, module._parameters)])
    changes.watch_scopes(modules)
    before = counts()
    change(model)
    assert {name for name, count in counts().items() if count != before[name]} == {kind} - {NOTHING}


def test_what_is_not_watched_does_not_count() -> None:
    model = made()
    before = counts()
    model[0].weight = nn.Parameter(torch.zeros(1))
    model.eval()
    del model
    assert counts() == before


def test_a_model_that_goes_is_counted() -> None:
    """Another one's dictionaries may then lie where its were."""
    model = made()
    changes.watch_scopes(model.modules())
    before = counts()
    del model
    gc.collect()
    assert all(count > before[name] for name, count in counts().items())


def test_hooks_that_come_and_go() -> None:
    model = made()
    hooks = changes.Hooks([module._forward_hooks for module in model.modules()])
    assert hooks.filled() == []
    before = counts()
    handle = model[2].register_forward_hook(lambda *_: None)
    assert hooks.filled() == [model[2]._forward_hooks]
    handle.remove()
    assert hooks.filled() == []
    assert counts() == before


# ---- what is remembered ----------------------------------------------------------------------------------------------

RUNS: list[int] = []


def counted_parameters(modules: list[Any]) -> list[Any]:
    RUNS.append(1)
    return parameters_of(modules)


def test_what_is_found_is_remembered_until_something_changes() -> None:
    model, other = made(), made()
    RUNS.clear()
    assert recalled(model, counted_parameters) is None
    first = picked(model, counted_parameters)
    state = state_of(model)
    assert first is not None
    assert state is not None
    for _ in range(3):
        again = picked(model, counted_parameters)
        assert again is not None
        assert all(a is b for a, b in zip(first, again, strict=True))
    model[0].eval()
    model[0].in_features = 5
    assert recalled(model, counted_parameters) is not None
    assert state_of(model) is state
    assert RUNS == [1]
    picked(other, counted_parameters)
    other[0].bias = None  # another model's: looked at, and nothing was
    assert state_of(model) is None
    assert recalled(model, counted_parameters) is None
    assert modules_of(model) == list(model.modules())
    assert state_of(model) not in (None, state)
    second = picked(model, counted_parameters)
    assert second is not None
    assert len(second) == len(first)
    picked(model, parameters_of)
    model[0].weight = nn.Parameter(torch.zeros(1))
    for pick in (counted_parameters, parameters_of):
        third = picked(model, pick)
        assert third is not None
        assert third[0] is model[0].weight


@pytest.mark.parametrize("table", ["_modules", "_parameters"])
def test_another_table_of_the_model_itself_is_seen(table: str) -> None:
    model = made()
    picked(model, parameters_of)
    before = getattr(model, table)  # which lives on
    setattr(model, table, dict(before))
    assert state_of(model) is None
    found = modules_of(model)
    assert found == list(model.modules())
    getattr(model, table)["late"] = nn.Linear(1, 1) if table == "_modules" else nn.Parameter(torch.zeros(1))
    assert state_of(model) is None
    assert picked(model, parameters_of) == list(model.parameters())


def test_nothing_is_kept_alive() -> None:
    model = made()
    picked(model, parameters_of)
    gone = weakref.ref(model[0]), weakref.ref(model[0].weight)
    del model[0]
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    whole = weakref.ref(model)
    del model
    gc.collect()
    assert whole() is None


# ---- layers of graphs ------------------------------------------------------------------------------------------------


def of_a_dictionary(layer: Any) -> None:
    layer.mlp.table["a"] = 2


def of_a_list(layer: Any) -> None:
    layer.mlp.list.append(2)


def of_a_nested_list(layer: Any) -> None:
    layer.mlp.nested["a"].append(2)


def switched_off(layer: Any) -> None:
    with changes.unseen:
        layer.mlp._disable_adapters = True


SEEN: dict[str, Callable[[Any], Any]] = {
    "a dictionary of settings": of_a_dictionary,
    "a list": of_a_list,
    "a list in a dictionary": of_a_nested_list,
    "an adapter that is switched off": lambda layer: setattr(layer.mlp, "_disable_adapters", True),
    "an adapter that Bastile switches off": switched_off,
    "a setting": lambda layer: setattr(layer.mlp, "number", 2),
    "a mode": lambda layer: layer.mlp.eval(),
    "a buffer": lambda layer: layer.mlp.register_buffer("late", torch.zeros(1)),
    "memory": lambda layer: setattr(layer.mlp.up_proj.weight, "data", torch.zeros(1)),
    "what wants gradients": lambda layer: layer.mlp.up_proj.weight.requires_grad_(False),
    "what is called in its place": lambda layer: layer.mlp.compile(backend="eager"),
    "a class": lambda layer: setattr(layer.mlp, "__class__", nn.Module),
}


@pytest.mark.parametrize("name", SEEN)
def test_layers_that_change_are_seen_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = tiny_model().train().model.layers
    mlp: Any = layers[1].mlp
    mlp.table, mlp.list, mlp.nested, mlp.number, mlp._disable_adapters = {"a": 1}, [1], {"a": [1]}, 1, False
    watch = Watch(layers)
    looks: list[int] = []
    part = type(watch._parts[0])
    monkeypatch.setattr(part, "_holds", lambda self, original=part._holds: looks.append(1) or original(self))
    for _ in range(3):
        assert watch.begin(everything=True)
    assert looks == []
    SEEN[name](layers[1])
    assert not watch.begin(everything=True)


def test_layers_are_looked_at_once_when_others_change(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, other = tiny_model().model.layers, tiny_model().model.layers
    watch, _ = Watch(layers), Watch(other)
    looks: list[int] = []
    part = type(watch._parts[0])
    monkeypatch.setattr(part, "_holds", lambda self, original=part._holds: looks.append(1) or original(self))
    other[0].mlp.number = 3
    for _ in range(3):
        assert watch.begin(everything=True)
    assert looks == [1]
