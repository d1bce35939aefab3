"""Walks over a model's modules: the parameters that PyTorch yields, and no mode set that is set already."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, Trainer, TrainingArguments

import bastile
from conftest import tiny_batch, tiny_model

CLASSES: Any = (PreTrainedModel, PeftModel, DistributedDataParallel)


def adapted() -> Any:
    return get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))


class Named(nn.Module):
    """Shows one of its two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.shown, self.hidden = nn.Linear(2, 2), nn.Linear(3, 3)

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        yield prefix, self
        yield from self.shown.named_modules(memo, prefix + ".shown", remove_duplicate)


def shared() -> Any:
    """Modules and parameters that stand in several places, none, and one with names of its own."""
    model = tiny_model(tie_word_embeddings=True)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.model.layers[1].register_module("nothing", None)
    model.model.layers[0].self_attn.q_proj.register_parameter("nothing", None)
    model.model.layers[0].more = Named()
    return model


@pytest.mark.parametrize("build", [tiny_model, adapted, shared])
def test_the_parameters_that_pytorch_yields(build: Any) -> None:
    model = build()
    want = [id(p) for p in nn.Module.parameters(model)]
    bastile.apply()
    assert "parameters" in vars(PreTrainedModel)
    assert type(model).parameters is not nn.Module.parameters
    assert [id(p) for p in model.parameters()] == want
    assert [id(p) for p in model.parameters(recurse=False)] == []
    found = model.parameters()
    assert id(next(found)) == want[0]


def test_a_model_that_names_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    bastile.apply()
    model = tiny_model()
    monkeypatch.setattr(type(model), "named_parameters", lambda self, *args, **kwargs: iter([("one", self.one)]))
    model.one = nn.Parameter(torch.zeros(1))
    assert [id(p) for p in model.parameters()] == [id(model.one)]


@pytest.fixture
def set_modes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The modes that PyTorch has given to modules."""
    seen: list[bool] = []
    stock = nn.Module.__setattr__

    def noted(self: nn.Module, name: str, value: Any) -> None:
        if name == "training":
            seen.append(value)
        stock(self, name, value)

    monkeypatch.setattr(nn.Module, "__setattr__", noted)
    return seen


@pytest.mark.parametrize("build", [tiny_model, adapted])
def test_no_mode_is_set_that_is_set_already(build: Any, set_modes: list[bool]) -> None:
    bastile.apply()
    model = build()
    count = len(list(model.modules()))
    model.eval()
    set_modes.clear()
    assert model.train() is model
    assert len(set_modes) >= count
    set_modes.clear()
    assert model.train() is model
    assert model.train(True) is model
    assert set_modes == []
    layers = [module for name, module in model.named_modules() if name.endswith("down_proj")]
    layers[0].eval()
    model.train()
    assert layers[0].training
    assert all(module.training for module in model.modules())
    with pytest.raises(ValueError, match="boolean"):
        model.train(1)


class Frozen(nn.Linear):
    def train(self, mode: bool = True) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return super().train(False)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_module_that_decides_on_its_mode(is_own: bool) -> None:
    bastile.apply()
    model = tiny_model()
    frozen = Frozen(2, 2)
    if is_own:  # by an attribute, and always in the mode that is asked for
        calls: list[bool] = []
        frozen = nn.Linear(2, 2)
        frozen.train = lambda mode=True: calls.append(mode)  # type: ignore[method-assign, assignment, return-value]
    model.model.layers[0].more = frozen
    model.train()
    model.train()
    assert calls == [True, True] if is_own else (frozen.calls, frozen.training) == (2, False)


def test_a_trainer_walks_once(tmp_path: Any, set_modes: list[bool]) -> None:
    bastile.apply(cuda_graphs=False)
    model = tiny_model()
    rows = [{name: row[0] for name, row in tiny_batch(model, 1, 8, seed=i).items()} for i in range(4)]
    arguments = TrainingArguments(str(tmp_path), max_steps=4, report_to="none", save_strategy="no", disable_tqdm=True)
    Trainer(model, arguments, train_dataset=rows).train()
    assert set_modes.count(True) <= 2 * len(list(model.modules()))


def test_reset_puts_back_what_was_there() -> None:
    before = [{name: vars(cls).get(name) for name in ("train", "parameters")} for cls in CLASSES]
    bastile.apply()
    bastile.apply()
    assert all(vars(cls)["parameters"] is not None for cls in CLASSES)
    theirs = lambda self, recurse=True: iter(())  # noqa: E731
    PeftModel.parameters = theirs
    bastile.reset()
    assert PeftModel.parameters is theirs
    del PeftModel.parameters
    assert [{name: vars(cls).get(name) for name in ("train", "parameters")} for cls in CLASSES] == before
