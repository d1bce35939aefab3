"""Operators that cost the host more than the kernels whose place they take: where there are no graphs, they run where
the GPU would be the slower one."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bastile
from bastile.graphs import host_time
from bastile.graphs.host_time import counts
from bastile.graphs.stack import _IN_VAIN
from bastile.models import linear, norm
from graphing import DEVICE, allow_graphs
from test_graphs_stacks import SMALL, built, of_classes

OPERATORS = ("autocast_linear", "layer_norm", "add_rms_norm")
X = torch.ones(1)


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """A CPU's tensors count as a GPU's, and norms of the sizes here are between the two bounds."""
    allow_graphs(monkeypatch)
    for module in (host_time, norm):
        monkeypatch.setattr(module, "on_gpu", lambda _: True)
    monkeypatch.setattr(host_time, "state", host_time._State())
    monkeypatch.setattr(norm, "_ELEMENTS", 22 * 4 + 1)
    monkeypatch.setattr(norm, "_ELEMENTS_CAST", 22 * 4 + 1)
    yield
    bastile.reset()


def ran(model, batch):
    """How often each operator has, of a training step under autocast."""
    bastile.report(reset=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    found = bastile.report(reset=True)
    return [found.ran(operator) for operator in OPERATORS]


def small():
    return built("BertForSequenceClassification", **SMALL)


LAYERS = 3
ALL = [6 * LAYERS + 2, 1, 2 * LAYERS]  # beside the layers' the pooler, the classifier and the embeddings' norm
AROUND = [2, 1, 0]


def hooked():
    model = small()
    for layer in model.bert.encoder.layer:
        layer.register_forward_hook(lambda module, args, output: None)
    return model


@pytest.mark.parametrize("mode", [True, False])
def test_where_graphs_may_be_and_where_they_are_off(mode):
    """Everything, so that numbers are the same."""
    bastile.apply(cuda_graphs=mode)
    model = small()
    assert ran(model, of_classes(model, 0)) == ALL
    assert not any(counts(module, X) for layer in model.bert.encoder.layer for module in layer.modules())


def test_many_calls_within_a_stack(monkeypatch):
    """Say nothing, whether it has graphs yet or none."""
    monkeypatch.setattr(host_time, "_MANY", 5)
    bastile.apply(cuda_graphs=True)
    model = small()
    assert ran(model, of_classes(model, 0)) == ALL


def test_layers_that_turn_out_to_have_no_graphs():
    """A few steps later the host's time counts there, as long as that is so."""
    bastile.apply(cuda_graphs=True)
    model = hooked()
    found = [ran(model, of_classes(model, step)) for step in range(_IN_VAIN + 1)]
    assert found == [ALL] * (_IN_VAIN - 1) + [AROUND] * 2
    for layer in model.bert.encoder.layer:
        layer._forward_hooks.clear()
    assert ran(model, of_classes(model, 0)) == AROUND  # noted
    ran(model, of_classes(model, 0))  # captured
    assert not counts(model.bert.encoder.layer[0], X)


def test_layers_that_can_have_none(monkeypatch):
    """From the first step on."""
    from bastile.graphs import conditions

    monkeypatch.setattr(conditions, "recorder_for", lambda device: None)
    bastile.apply(cuda_graphs=True)
    model = small()
    assert ran(model, of_classes(model, 0)) == AROUND


def test_large_calls(monkeypatch):
    bastile.apply(cuda_graphs=True)
    model = hooked()
    for step in range(_IN_VAIN):
        ran(model, of_classes(model, step))
    for module in (linear, host_time):
        monkeypatch.setattr(module, "LEAST", 22 * 32 * 48)
    assert ran(model, of_classes(model, 0)) == [2 + 2 * LAYERS, 1, 0]
    for module in (linear, host_time):
        monkeypatch.setattr(module, "LEAST", 22 * 32 * 48 + 1)
    assert ran(model, of_classes(model, 0)) == AROUND
    monkeypatch.setattr(norm, "_WHERE_IT_COUNTS", 7)
    assert ran(model, of_classes(model, 0)) == [2, 1, 2 * LAYERS]


def test_checkpointed_layers_stay_as_they_were():
    """What a layer computes the second time is what it has computed: nothing changes between."""
    bastile.apply(cuda_graphs=True)
    model = hooked()
    model.gradient_checkpointing_enable()
    found = [ran(model, of_classes(model, step)) for step in range(_IN_VAIN + 2)]
    assert all(each == found[0] for each in found)
    assert found[0][0] > ALL[0]


def test_a_step_whose_device_is_slower_keeps_them(monkeypatch):
    """No graphs, for they would not pay: the host is not waited for either."""
    from bastile.graphs import step

    monkeypatch.setattr(step, "pays", lambda ratio: False)
    monkeypatch.setattr(step.Pays, "ratio", lambda self: 0.1)
    monkeypatch.setattr(step.Pays, "wants_more", lambda self: False)
    bastile.apply(cuda_graphs="auto")
    model = small()
    assert [ran(model, of_classes(model, step)) for step in range(_IN_VAIN + 3)] == [ALL] * (_IN_VAIN + 3)


def albert():
    values = {**SMALL, "num_hidden_layers": 12, "embedding_size": 16, "hidden_dropout_prob": 0.0}
    return built("AlbertForSequenceClassification", **values)


def test_models_without_a_stack(monkeypatch):
    """ALBERT's one layer stands for twelve. After so many calls that would have to have been of some layers."""
    bastile.apply()
    model = albert()
    each = ran(model, of_classes(model, 0))
    assert each[0] == 6 * 12 + 3
    monkeypatch.setattr(host_time, "_MANY", host_time.state.calls)
    assert ran(model, of_classes(model, 0)) == [0, 0, 0]
    other = small()
    ran(other, of_classes(other, 0))
    assert ran(model, of_classes(model, 0))[0] > 0  # until there have been as many again


@pytest.mark.parametrize("reentrant", [True, False])
def test_models_without_a_stack_that_are_checkpointed(monkeypatch, reentrant):
    """By whomever: what changed from a layer's first run to its second would be an error of PyTorch's."""
    bastile.apply()
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]).to(DEVICE)

    def step():
        bastile.report(reset=True)
        x = torch.ones(2, 8, device=DEVICE, requires_grad=True)
        with torch.autocast(DEVICE, torch.bfloat16):
            y = layers(x) if is_first and reentrant else checkpoint(layers, x, use_reentrant=reentrant)
        y.float().sum().backward()
        return bastile.report(reset=True).ran("autocast_linear")

    is_first = True
    first = step()
    is_first = False
    monkeypatch.setattr(host_time, "_MANY", host_time.state.calls + 3)
    found = [step() for _ in range(3)]
    assert found == [first] * 3 if not reentrant else found[-1] == 0


def test_modules_that_are_gone_are_forgotten():
    layers = [nn.Linear(2, 2) for _ in range(3)]
    host_time.say(layers, False)
    assert len(host_time.state.without) == 3
    host_time.say(layers[:1], True)
    assert not counts(layers[0], X)
    assert counts(layers[1], X)
    del layers
    gc.collect()
    assert not host_time.state.without


def test_reset_forgets_them():
    bastile.apply(cuda_graphs=True)
    model = hooked()
    for step in range(_IN_VAIN):
        ran(model, of_classes(model, step))
    layer = model.bert.encoder.layer[0]
    assert counts(layer, X)
    bastile.apply(cuda_graphs=False)
    assert not counts(layer, X)
    assert ran(model, of_classes(model, 0)) == ALL
