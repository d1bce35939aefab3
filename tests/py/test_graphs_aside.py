"""Whatever a graph would get wrong is noticed, runs without graphs or is captured anew, and keeps its bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, Gemma3TextConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import bastile
from bastile.graphs import runs
from bastile.graphs import stack as stacks
from bastile.graphs.caches import Empty
from bastile.graphs.watch import PART
from conftest import gradients, tiny_model
from graphing import (
    DEVICE,
    KEPT,
    ON_CUDA,
    allow_graphs,
    assert_alike,
    assert_stock_gradients,
    batch_of,
    counted,
    loss_of,
    model_with_graphs,
)
from hooks import HOOKS
from processes import alone

LENT = "someone holds gradients of a step before, beside the parameters"
OPEN = "a step before has not had its backward pass yet"


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch)


def nothing(model: Any) -> None:
    pass


# ---- the layers change before the fourth of six steps: the fourth sees that, later ones are captured anew ------------


def swaps_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def replaces_a_parameter(model: Any) -> None:
    projection = model.model.layers[1].mlp.down_proj
    projection.weight = nn.Parameter(projection.weight.detach() * 2)


def freezes_a_parameter(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)


def replaces_a_module(model: Any) -> None:
    layers = model.model.layers
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp


def replaces_a_layer(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def changes_a_setting(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 1.5


def puts_a_module_into_evaluation(model: Any) -> None:
    model.model.layers[0].self_attn.eval()


def attends_in_another_way(model: Any) -> None:
    model.set_attn_implementation("eager")


def moves_away_and_back(model: Any) -> None:
    model.to(torch.float64).to(torch.float32)


def transposes_data(model: Any) -> None:
    """The same memory, seen in another order: of a square weight neither size nor address changes."""
    projection = model.model.layers[0].self_attn.k_proj
    projection.weight.data = projection.weight.data.t()


class _Doubles(Qwen3MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def becomes_another_class(model: Any) -> None:
    model.model.layers[1].mlp.__class__ = _Doubles


CHANGES = [
    swaps_data, replaces_a_parameter, freezes_a_parameter, replaces_a_module, replaces_a_layer, changes_a_setting,
    puts_a_module_into_evaluation, attends_in_another_way, moves_away_and_back, transposes_data, becomes_another_class,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_change(change: Callable[[Any], None]) -> None:
    assert_alike(tiny_model(attention_dropout=0.1), 4, steps=6, before=[*[nothing] * 3, change])


LATE = [
    swaps_data, replaces_a_parameter, freezes_a_parameter, replaces_a_module, changes_a_setting,
    puts_a_module_into_evaluation, transposes_data, becomes_another_class,
]  # fmt: skip


@pytest.mark.parametrize("change", LATE)
def test_last_layers_that_change(change: Callable[[Any], None]) -> None:
    """They are looked at when the first layers' graphs have been launched: that step goes on without."""

    def late(model: Any) -> None:
        change(_Last(model.model.layers[-2:]))

    model = tiny_model(num_hidden_layers=PART + 2, attention_dropout=0.1)
    got = assert_alike(model, 3, steps=6, before=[*[nothing] * 3, late])
    assert got.aside == {"layers that have changed": 1}


class _Last:
    """A model of these layers alone."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.model = SimpleNamespace(layers=layers)
        self.parameters = layers.parameters


def test_last_layers_that_change_before_a_step_of_another_kind() -> None:
    def batches(model: Any, step: int) -> dict[str, torch.Tensor]:
        return batch_of(model, step, mask=step != 3)

    def late(model: Any) -> None:
        changes_a_setting(_Last(model.model.layers[-2:]))

    got = assert_alike(
        tiny_model(num_hidden_layers=PART + 2), 3, steps=6, before=[*[nothing] * 3, late], batches=batches
    )
    assert got.aside == {"layers that have changed": 1}


def test_a_layer_that_torch_compiles_between_steps() -> None:
    def compiled(model: Any) -> None:
        model.model.layers[-1].compile(backend="eager")

    model = tiny_model(num_hidden_layers=PART + 2)
    got = assert_alike(model, 2, steps=6, before=[*[nothing] * 3, compiled])
    assert got.aside == {"layers that torch.compile has compiled": 3}


def test_frozen_weights_that_are_narrowed() -> None:
    """Neither their addresses nor their strides change."""

    def freeze(model: Any) -> None:
        model.model.layers[1].mlp.requires_grad_(False)

    def narrow(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        for weight in (mlp.gate_proj.weight, mlp.up_proj.weight):
            weight.data = weight.data[:-2]
        mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :-2]

    assert_alike(tiny_model(), 4, steps=6, before=[freeze, nothing, nothing, narrow])


class _Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * (1 if self.times is None else self.times)


@pytest.mark.parametrize("times", [(None, 3), (2, 3)])
def test_a_whole_number_that_changes(times: tuple[int | None, int]) -> None:
    """As a window or a number of experts is one: no size."""
    model = tiny_model()
    model.model.layers[0].mlp.act_fn = _Times()
    set_to = lambda value: lambda model: setattr(model.model.layers[0].mlp.act_fn, "times", value)  # noqa: E731
    assert_alike(model, 4, steps=6, before=[set_to(times[0]), nothing, nothing, set_to(times[1])])


def test_a_class_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Any) -> None:
        now = Qwen3MLP.forward
        monkeypatch.setattr(Qwen3MLP, "forward", lambda self, x: now(self, x) * 2)

    want_and_got = []
    for graphs in (False, True):
        with monkeypatch.context():
            bastile.apply(cuda_graphs=graphs)
            model = tiny_model().to(DEVICE)
            for step in range(6):
                if step == 3:
                    change(model)
                model(**batch_of(model, step)).loss.backward()
            monkeypatch.undo()
            allow_graphs(monkeypatch)
            want_and_got.append(gradients(model))
    assert counted()[0] == 4
    assert all(torch.equal(want_and_got[0][name], gradient) for name, gradient in want_and_got[1].items())


def test_layers_that_change_in_every_step() -> None:
    got = assert_alike(tiny_model(), 0, steps=8, before=[swaps_data] * 8)
    assert got.aside == {"the layers' parameters, modules or settings change again and again": 3}


# ---- from the fourth of six steps on graphs cannot serve ------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", ["model.layers.1", "model.layers.0.mlp.up_proj"])
def test_hooks(hook: Callable[[nn.Module], None], name: str) -> None:
    change = [*[nothing] * 3, lambda model: hook(model.get_submodule(name))]
    got = assert_alike(tiny_model(), 2, steps=6, before=change)
    assert got.aside == {"hooks in the layers, which a graph would not call": 3}


def test_a_forward_of_its_own() -> None:
    def change(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        stock = mlp.forward
        mlp.forward = lambda x: stock(x) * 2

    got = assert_alike(tiny_model(), 2, steps=6, before=[*[nothing] * 3, change])
    assert got.aside == {"a module of the layers that has a forward of its own": 3}


def _compiles(model: Any) -> None:
    layer = model.model.layers[1]
    layer._compiled_call_impl = layer._call_impl  # as Module.compile sets it


def _checkpoints_otherwise(model: Any) -> None:
    for layer in model.model.layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, lambda layer, *args: layer(*args)


class _Own(nn.Parameter):
    pass


def _has_a_class_of_its_own(model: Any) -> None:
    projection = model.model.layers[1].mlp.up_proj
    projection.weight = _Own(projection.weight.detach())


def _stands_twice(model: Any) -> None:
    model.config.use_cache = False  # it would be filled twice
    model.model.layers[1] = model.model.layers[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_compiles, "layers that torch.compile has compiled"),
        (_checkpoints_otherwise, "checkpointing by another function than PyTorch's, or with settings of its own"),
        (_has_a_class_of_its_own, "trained parameters of a tensor class of their own"),
        (_stands_twice, "no layers, or one that stands there twice"),
    ],
)
def test_what_is_never_captured(change: Callable[[Any], None], reason: str) -> None:
    got = assert_alike(tiny_model(), 2, steps=6, before=[*[nothing] * 3, change])
    assert got.aside == {reason: 3}


def test_copies_of_data_parallel() -> None:
    """They are made for each step, and hold other tensors in place of parameters."""
    bastile.apply(cuda_graphs=True)
    model = tiny_model().to(DEVICE)
    for module in model.model.layers.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                delattr(module, name)
                setattr(module, name, parameter * 1)
    counted()
    for _ in range(3):
        assert torch.isfinite(loss_of(model))
    assert counted() == (0, {"layers without parameters of their own, as nn.DataParallel's copies are": 3})


def test_sharded_parameters() -> None:
    from torch.distributed.fsdp import fully_shard

    with alone("nccl" if ON_CUDA else "gloo"):
        bastile.apply(cuda_graphs=True)
        model = tiny_model().to(DEVICE)
        for layer in model.model.layers:
            fully_shard(layer.mlp)
        fully_shard(model)
        counted()
        for step in range(3):
            model(**batch_of(model, step)).loss.backward()
        assert counted() == (0, {"sharded parameters (FSDP or tensor parallelism)": 3})
        model = tiny_model().to(DEVICE)
        for part in [part for layer in model.model.layers for part in (layer.mlp, layer)]:
            fully_shard(part)
        fully_shard(model)
        for step in range(3):
            model(**batch_of(model, step)).loss.backward()
        assert counted() == (0, {"weights that FSDP shards otherwise than by units of one layer each": 3})
    model = tiny_model().to(DEVICE)
    model.model.layers[0].mlp.up_proj.weight.ds_id = 0  # as ZeRO-3 marks what it has taken away
    loss_of(model).backward()
    assert counted() == (0, {"sharded parameters (FSDP or DeepSpeed)": 1})


def test_a_module_that_keeps_something() -> None:
    def change(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        mlp.register_module("act_fn", _Keeps())

    got = assert_alike(tiny_model(), 2, steps=6, before=[*[nothing] * 3, change])
    assert got.aside == {"modules of the layers that keep something of a call": 3}


class _Keeps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("kept", x.detach().mean(), persistent=False)
        return torch.nn.functional.silu(x)


# ---- what others hold ------------------------------------------------------------------------------------------------


def test_two_forward_passes_before_their_backward_passes() -> None:
    model = model_with_graphs()
    first, second = loss_of(model, 0), loss_of(model, 1)
    second.backward()
    first.backward()
    assert counted() == (1, {OPEN: 1})
    loss_of(model, 2).backward()
    assert counted() == (1, {})
    assert_stock_gradients(model, 1, 0, 2)


def test_a_forward_pass_without_a_backward_pass() -> None:
    model = model_with_graphs()
    loss = loss_of(model)
    loss_of(model)
    assert counted() == (1, {OPEN: 1})
    del loss
    loss_of(model).backward()
    assert counted() == (1, {})
    assert_stock_gradients(model, 0)


def test_gradients_that_someone_keeps() -> None:
    """The step that finds them held runs without graphs, and from then on they are copies. A parameter's .grad is
    nobody's but the parameter's."""
    model = model_with_graphs()
    parameters = list(model.parameters())
    held, want = [], []
    for turn in range(3):
        loss_of(model, turn).backward()
        found = list(torch.autograd.grad(loss_of(model, 3), parameters))
        held += [*(p.grad for p in parameters), *found]
        want = [*want, *(gradient.clone() for gradient in held[len(want) :])]
        model.zero_grad()
    assert counted() == (5, {LENT: 1})
    assert all(torch.equal(one, other) for one, other in zip(held, want, strict=True))


def test_a_view_of_a_gradient_that_someone_keeps() -> None:
    """Were the .grad moved, it would no longer be the view's memory."""
    model = model_with_graphs()
    loss_of(model).backward()
    parameter = model.model.layers[0].mlp.up_proj.weight
    view = parameter.grad.view(-1)
    loss_of(model, 1).backward()
    assert counted() == (1, {LENT: 1})
    assert view.data_ptr() == parameter.grad.data_ptr()
    assert_stock_gradients(model, 0, 1)


def test_a_gradient_of_two_parameters() -> None:
    """Each has memory of its own, as autograd sees to it: what is written to one must not reach the other, nor the
    gradient of the hidden states."""
    model = tiny_model(num_hidden_layers=1).to(DEVICE)
    layer = model.model.layers[0].mlp.down_proj
    layer.__class__ = type("Shifted", (type(layer),), {"forward": shifted})
    layer.one, layer.other = (nn.Parameter(torch.zeros(2, 11, layer.out_features, device=DEVICE)) for _ in range(2))

    def doubled(model: Any) -> None:
        model.model.layers[0].mlp.down_proj.one.register_post_accumulate_grad_hook(double)

    assert_alike(model, 3, steps=4, before=[doubled])


def double(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def shifted(self: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, self.weight, self.bias) + self.one + self.other


def test_hidden_states_that_someone_keeps() -> None:
    """What the last layer returns stays as it is till the next step, which sees that it is held."""
    model = model_with_graphs()
    held: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: held.append(inputs[0]))
    loss = loss_of(model)
    before = held[0].clone()
    loss.backward()
    loss_of(model).backward()
    assert counted() == (1, {KEPT: 1})
    assert torch.equal(held[0], before)


def test_hidden_states_between_runs_that_someone_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass writes there: an error is what is left."""
    monkeypatch.setattr(runs, "MOST_LAYERS", 2)
    model = model_with_graphs(num_hidden_layers=4)
    loss = loss_of(model)
    [graphs] = next(iter(stacks._stacks.values())).captured.values()
    held = graphs.runs[0].output.lend()
    with pytest.raises(RuntimeError, match=r"hidden states between captured layers.*have been kept"):
        loss.backward()
    del held


def test_hidden_states_that_are_asked_for() -> None:
    model = model_with_graphs()
    for step in range(3):
        output = model(**batch_of(model, step), output_hidden_states=True)
        assert all(torch.isfinite(states).all() for states in output.hidden_states)
        output.loss.backward()
    assert_stock_gradients(model, 0, 1, 2)


# ---- and else --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["left out", "read", "changed"])
def test_what_a_model_does_between_its_layers_at_times(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fourth step: a layer is left out, or the hidden states before it are looked at, or changed."""

    class Odd(nn.ModuleList):
        now = False

        def __getitem__(self, index: Any) -> Any:
            found = list(self._modules.values())[index]
            if self.now and isinstance(index, slice):
                found[2:3] = [] if change == "left out" else [self.odd]
            return found

        def odd(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            assert torch.isfinite(hidden).all()
            seen.append(hidden.detach().double().sum().item())
            return self._modules["2"](hidden * 2 if change == "changed" else hidden, **kwargs)

    seen: list[float] = []
    model = tiny_model(num_hidden_layers=5)
    model.model.layers = Odd(model.model.layers)
    before = [*[nothing] * 3, lambda model: setattr(model.model.layers, "now", True)]
    before.append(lambda model: setattr(model.model.layers, "now", False))
    got = assert_alike(model, 5 - (change != "read"), steps=6, before=before)
    assert sum(got.aside.values()) == (change != "read")
    assert seen[:1] == seen[1:]


class _Writes(nn.ModuleList):
    """Before its third layer, while it is asked to, something is written into the mask that all layers are given."""

    now = False

    def __getitem__(self, index: Any) -> Any:
        found = list(self._modules.values())[index]
        if self.now and isinstance(index, slice):
            found[2:3] = [self.third]
        return found

    def third(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        mask = kwargs["attention_mask"]
        mask.mul_(0.5).sub_(torch.arange(11, device=mask.device) * 0.25)
        return self._modules["2"](hidden, **kwargs)


@pytest.mark.parametrize("layers", [7, 2])
@pytest.mark.parametrize("steps", ["one", "all"])
def test_a_mask_that_is_written_to_between_layers(steps: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fourth of six steps within a run, whose first layers then compute with the mask as it was, or before a
    run begins; or in each step."""
    monkeypatch.setattr(runs, "MOST_LAYERS", layers)
    model = tiny_model(num_hidden_layers=5, attn_implementation="eager")
    model.model.layers = _Writes(model.model.layers)
    switch = lambda now: lambda model: setattr(model.model.layers, "now", now)  # noqa: E731
    before = [switch(True)] if steps == "all" else [*[nothing] * 3, switch(True), switch(False)]
    got = assert_alike(model, 0 if steps == "all" else 4, steps=6, before=before)
    assert sum(got.aside.values()) == (6 if steps == "all" else 1)


def test_a_cache_for_a_graph_has_nothing_left_to_bring_to_the_device() -> None:
    """As that of layers with a sliding window does when it is first used, which no graph can."""
    config = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    cache = DynamicCache(config=Gemma3TextConfig(**config))
    before = [dict(vars(layer)) for layer in cache.layers]
    empty = Empty(cache)
    empty.keep(cache, torch.device("meta"))
    made = [each for layer in empty.made().layers for each in vars(layer).values() if isinstance(each, torch.Tensor)]
    assert {tensor.device.type for tensor in made} <= {"meta"}
    assert [vars(layer) for layer in cache.layers] == before
    assert len(made) == sum(isinstance(each, torch.Tensor) for scope in before for each in scope.values())


def test_the_cache_of_a_replayed_step_says_that_it_is_not_filled() -> None:
    model = model_with_graphs()
    output = model(**batch_of(model, 0))
    with pytest.raises(RuntimeError, match="not in its cache"):
        len(output.past_key_values)
    output.loss.backward()
    given = type(model(**batch_of(model, 0), use_cache=True).past_key_values)()
    counted()
    filled = model(**batch_of(model, 0), past_key_values=given).past_key_values
    assert filled.get_seq_length() == 11
    assert counted() == (0, {})


def test_another_thread_calls_the_layers_meanwhile() -> None:
    """Its calls are none of this step's."""
    model = model_with_graphs()
    seen: list[bool] = []

    def elsewhere(module: Any, inputs: Any) -> None:
        handle.remove()

        def call() -> None:
            with torch.no_grad():
                hidden = torch.randn(1, 3, 32, device=DEVICE)
                position = model.model.rotary_emb(hidden, torch.arange(3, device=DEVICE)[None])
                seen.append(bool(torch.isfinite(model.model.layers[0](hidden, position_embeddings=position)).all()))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    handle = model.model.rotary_emb.register_forward_pre_hook(elsewhere)
    loss_of(model).backward()
    assert seen == [True]
    assert counted() == (1, {})
    assert_stock_gradients(model, 0)


def test_without_cuda_it_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from bastile.graphs import conditions

    monkeypatch.setattr(conditions, "recorder_for", lambda device: None)
    with caplog.at_level("INFO", "bastile"):
        got = assert_alike(tiny_model(), 0)
    assert set(got.aside) == {f"tensors on {torch.device(DEVICE, 0) if ON_CUDA else 'cpu'}, which has no CUDA graphs"}
    assert sum("no CUDA graphs" in record.message for record in caplog.records) == 1
