"""How often bastile.apply() reads the files of models, and what the tests keep of what it has found in them."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import bastile
import found_before
from bastile import in_force
from bastile.guards import stock_of
from bastile.models import forms, sites
from bastile.models.rebind import parameter_names
from bastile.models.rewrite import rewriting_of
from conftest import modeling


@pytest.fixture
def as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is kept. The files that are read."""
    read: list[str] = []

    class Sources(dict[str, Any]):
        def __setitem__(self, file: str, source: Any) -> None:
            read.append(file)
            assert not gc.isenabled(), "looking for garbage takes longer than reading"
            super().__setitem__(file, source)

    monkeypatch.setattr(forms, "_sources", Sources())
    monkeypatch.setattr(forms, "forget_sources", lambda: forms._sources.clear())
    monkeypatch.setattr(in_force, "sites", sites.sites)
    forms.is_known.cache_clear()
    return read


def test_each_file_is_read_once_and_freed(as_users_have_it: list[str]) -> None:
    """Also those of which methods of several classes are looked at, as modeling_utils and trainer."""
    modeling("qwen3")
    bastile.apply()
    assert len(as_users_have_it) == len(set(as_users_have_it)) > 2
    assert not forms._sources
    assert gc.isenabled()


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("as_users_have_it", "without_garbage_collection")
def test_who_has_turned_garbage_collection_off_finds_it_off() -> None:
    def fails() -> None:
        with forms.reading():
            forms.code_of(test_each_file_is_read_once_and_freed)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not gc.isenabled()
    assert not forms._sources


def test_what_is_made_again_is_not_what_was_compiled() -> None:
    """torch.compile keeps by the code object what it has compiled, and what it has seen of the helpers."""
    cls = modeling("qwen3").Qwen3DecoderLayer
    made = []
    for _ in range(2):
        bastile.apply()
        found = [rewriting_of(cell.cell_contents) for cell in _cells_below(cls.forward)]
        made += [each.made for each in found if each is not None][:1]
        bastile.reset()
    assert len(made) == 2
    assert made[0].__code__ == made[1].__code__
    assert made[0].__code__ is not made[1].__code__


def _cells_below(function: object) -> Iterator[object]:
    for cell in getattr(function, "__closure__", None) or ():
        yield cell
        if callable(cell.cell_contents) and cell.cell_contents is not stock_of(function):
            yield from _cells_below(cell.cell_contents)


@pytest.mark.parametrize("function", [nn.Linear.forward, nn.Module.register_buffer, nn.MultiheadAttention.forward])
def test_names_of_parameters(function: object) -> None:
    """As inspect.signature has them, of a function that others have wrapped, too."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    want = [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds][1:]

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> None:
        pass

    assert parameter_names(function) == parameter_names(wrapper) == tuple(want)
    assert parameter_names(functools.partial(function)) == tuple(want)


# ---- what the tests keep ---------------------------------------------------------------------------------------------


def test_a_file_is_looked_at_again_where_anything_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def counting(file: sites.ModelFile, operators: list[str]) -> list[sites.Site]:
        looked.append(file.name)
        return sites.sites(file, operators)

    def looked_again() -> bool:
        looked.clear()
        bastile.apply(model_types="qwen3")
        bastile.reset()
        return module.__name__ in looked

    module = modeling("qwen3")
    monkeypatch.setattr(found_before, "sites", counting)
    looked_again()
    assert not looked_again()

    def forward(self: nn.Module, x: object) -> object:
        return x

    with monkeypatch.context() as context:
        context.setattr(module.Qwen3MLP, "forward", forward)
        assert looked_again()
    assert looked_again()
    before = module.Qwen3MLP.forward.__code__
    with monkeypatch.context() as context:
        context.setattr(module.Qwen3MLP.forward, "__code__", before.replace(co_name="other"))
        assert looked_again()
    with monkeypatch.context() as context:
        context.setattr(nn.Module, "something", 1, raising=False)  # of a base
        assert looked_again()
    looked_again()
    assert not looked_again()
