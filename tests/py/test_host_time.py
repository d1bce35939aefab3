"""Operators that cost the host more than the kernels whose place they take: where graphs launch them, they always run;
elsewhere where the GPU would be the slower one."""

import gc

import pytest
import torch
import transformers
from torch import nn

import bastile
from bastile.graphs import host_time
from bastile.graphs.stack import _IN_VAIN
from bastile.models import linear, norm
from graphing import ON_CUDA, allow_graphs
from test_graphs_stacks import SMALL, built, of_classes

OPERATORS = ("autocast_linear", "layer_norm", "add_rms_norm")


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """A CPU's tensors count as a GPU's."""
    allow_graphs(monkeypatch)
    monkeypatch.setattr(host_time, "on_gpu", lambda _: True)
    yield
    bastile.reset()


def ran(model, batch, backward=True):
    """How often each operator has, of a training step under autocast."""
    bastile.report(reset=True)
    device = batch["input_ids"].device.type
    with torch.autocast(device, torch.bfloat16):
        loss = model(**batch).loss
    if backward:
        loss.backward()
    found = bastile.report(reset=True)
    return [found.ran(operator) for operator in OPERATORS]


def small(**more):
    return built("BertForSequenceClassification", **SMALL, **more)


def test_where_graphs_may_be():
    """From the first step on; what is not among the layers, the pooler and the classifier, is as it was."""
    bastile.apply(cuda_graphs=True)
    model = small()
    layers, first = model.bert.encoder.layer, ran(model, of_classes(model, 0))
    assert first == [6 * len(layers), 0, 2 * len(layers)]
    assert all(host_time.is_free(module, torch.ones(1)) for layer in layers for module in layer.modules())
    assert not host_time.is_free(model.classifier, torch.ones(1))


def without_graphs():
    bastile.apply(cuda_graphs=True)
    model = small()
    for layer in model.bert.encoder.layer:
        layer.register_forward_hook(lambda module, args, output: None)
    for step in range(_IN_VAIN):
        ran(model, of_classes(model, step))
    return model


def test_where_there_are_none():
    """Nothing, until a call is large."""
    model = without_graphs()
    assert ran(model, of_classes(model, 0)) == [0, 0, 0]


def test_where_graphs_are_off():
    """Everything, so that numbers are those of graphs."""
    bastile.apply(cuda_graphs=False)
    model = small()
    layers = len(model.bert.encoder.layer)
    assert ran(model, of_classes(model, 0)) == [6 * layers + 2, 1, 2 * layers]
    bastile.reset()
    bastile.apply_to_model(model, cuda_graphs=False)
    assert ran(model, of_classes(model, 0)) == [0, 1, 2 * layers]
    bastile.apply_to_model(model)
    for layer in model.bert.encoder.layer:
        layer.register_forward_hook(lambda module, args, output: None)
    for step in range(_IN_VAIN):
        ran(model, of_classes(model, step))
    assert ran(model, of_classes(model, 0)) == [0, 0, 0]


def test_large_calls(monkeypatch):
    monkeypatch.setattr(linear, "_LEAST", 22 * 32 * 48)
    monkeypatch.setattr(norm, "_ELEMENTS", 22 * 32)
    monkeypatch.setattr(norm, "_ELEMENTS_CAST", 22 * 32)
    model = without_graphs()
    layers = len(model.bert.encoder.layer)  # in each of which two linear layers are that wide
    assert ran(model, of_classes(model, 0)) == [2 * layers, 1, 2 * layers]
    monkeypatch.setattr(linear, "_LEAST", 22 * 32 * 48 + 1)
    monkeypatch.setattr(norm, "_ELEMENTS", 22 * 32 + 1)
    monkeypatch.setattr(norm, "_ELEMENTS_CAST", 22 * 32 + 1)
    assert ran(model, of_classes(model, 0)) == [0, 0, 0]


def test_layers_that_turn_out_to_have_no_graphs():
    """A few steps later the host's time counts; where hooks are gone and graphs come after all, no longer."""
    bastile.apply(cuda_graphs=True)
    model = small()
    handle = model.bert.encoder.layer[1].register_forward_hook(lambda module, args, output: None)
    found = [ran(model, of_classes(model, 0)) for _ in range(_IN_VAIN + 2)]
    assert [each[0] > 0 for each in found] == [True] * (_IN_VAIN - 1) + [False] * 3
    handle.remove()
    found = [ran(model, of_classes(model, 0)) for _ in range(3)]
    assert found[0][0] == 0  # noted
    assert host_time.is_free(model.bert.encoder.layer[0], torch.ones(1))


def test_checkpointed_layers_stay_as_they_were():
    """What a layer computes the second time is what it has computed: nothing changes between."""
    bastile.apply(cuda_graphs=True)
    model = small()
    model.gradient_checkpointing_enable()
    model.bert.encoder.layer[1].register_forward_hook(lambda module, args, output: None)
    found = [ran(model, of_classes(model, 0)) for _ in range(_IN_VAIN + 2)]
    assert all(each == found[0] for each in found)
    assert found[0][0]


def test_a_step_whose_device_is_slower_keeps_them(monkeypatch):
    """No graphs, for they would not pay: the host is not waited for either."""
    from bastile.graphs import step

    monkeypatch.setattr(step, "pays", lambda ratio: False)
    monkeypatch.setattr(step.Pays, "ratio", lambda self: 0.1)
    monkeypatch.setattr(step.Pays, "wants_more", lambda self: False)
    bastile.apply(cuda_graphs="auto")
    model = small()
    found = [ran(model, of_classes(model, 0)) for _ in range(_IN_VAIN + 3)]
    assert all(each == found[0] for each in found)
    assert found[0][0]


def test_modules_that_are_gone_are_forgotten():
    before = len(host_time._in_graphs)
    layers = [nn.Linear(2, 2) for _ in range(3)]
    host_time.say(layers, True)
    assert len(host_time._in_graphs) == before + 3
    host_time.say(layers[:1], False)
    assert not host_time.is_free(layers[0], torch.ones(1))
    assert host_time.is_free(layers[1], torch.ones(1))
    del layers
    gc.collect()
    assert len(host_time._in_graphs) == before


def test_reset_forgets_them():
    bastile.apply(cuda_graphs=True)
    model = small()
    ran(model, of_classes(model, 0))
    layer = model.bert.encoder.layer[0]
    assert host_time.is_free(layer, torch.ones(1))
    bastile.apply(cuda_graphs=False)
    assert host_time.is_free(layer, torch.ones(1))
    bastile.apply(cuda_graphs=True)
    assert not host_time.is_free(layer, torch.ones(1))


@pytest.mark.skipif(not ON_CUDA, reason="needs a GPU")
def test_albert_is_as_fast_as_stock_s():
    """Whose one layer stands for twelve: no graphs, and no operator of ours that would cost the host time."""
    config = transformers.AlbertConfig(
        hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=97, embedding_size=32
    )
    model = transformers.AlbertForSequenceClassification(config).cuda().train()
    bastile.apply()
    assert ran(model, of_classes(model, 0)) == [0, 0, 0]
