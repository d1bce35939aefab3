"""Hidden states that Transformers collects by hooks on layers, which graphs call in the layers' place: those of models
of images, whose text sees one layer's before the last, and those that a model is asked for."""

import pytest
import torch
import transformers
from torch import nn

import bastile
from bastile.graphs import collected
from bastile.models import small
from conftest import older_than
from graphing import DEVICE, allow_graphs, assert_alike, batch_of, counted, train
from test_graphs_stacks import SMALL, built

capturing = pytest.importorskip("transformers.utils.output_capturing", reason="older Transformers collects otherwise")


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    allow_graphs(monkeypatch)
    yield
    bastile.reset()


TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4}
TEXT = {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0}
TOKEN = 90
#: What is in front of the text, and how many tokens stand for an image of 28 x 28.
MODELS = {
    "LlavaForConditionalGeneration": (
        {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **TOWER},
        {"model_type": "llama", **TEXT},
        4,
    ),
    "InternVLForConditionalGeneration": (
        {"image_size": [28, 28], "patch_size": [14, 14], **TOWER},
        {"model_type": "qwen2", **TEXT},
        1,
    ),
}


def of_images(name, **more):
    vision, text, tokens = MODELS[name]
    model = built(name, vision_config=vision, text_config=text, image_token_id=TOKEN, **more)

    def batches(model, step):
        drawn = torch.Generator().manual_seed(step)
        ids = torch.randint(3, 80, (2, 11), generator=drawn)
        ids[:, 2 : 2 + tokens] = TOKEN
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        batch["pixel_values"] = torch.randn(2, 3, 28, 28, generator=drawn)
        return {key: value.to(DEVICE) for key, value in batch.items()}

    return model, batches


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("layer", [-1, -2])
@pytest.mark.parametrize("name", MODELS)
def test_features_of_a_layer(name, layer, checkpoints):
    """Of a layer before the last, as LLaVA's; those behind it have no gradients."""
    model, batches = of_images(name, vision_feature_layer=layer)
    if checkpoints:
        model.gradient_checkpointing_enable()
    assert_alike(model, 2 * 3, batches=batches, steps=4)


def test_features_of_several_layers():
    """What the loss makes of a layer's output and what the next layer does are added up in another order."""
    model, batches = of_images("LlavaForConditionalGeneration", vision_feature_layer=[-3, -1])
    want, got = [train(model, graphs, batches=batches) for graphs in (False, True)]
    assert got.replayed == 2 * 3, got.aside
    torch.testing.assert_close(got.losses, want.losses, rtol=1e-5, atol=1e-6)


def test_another_layer_each_time():
    """Is another kind of step, for the tower alone; before, all of its hidden states are collected."""
    model, batches = of_images("LlavaForConditionalGeneration")
    which = [lambda model, layer=layer: setattr(model.config, "vision_feature_layer", layer) for layer in (-1, -2)]
    assert_alike(model, None if older_than("5.24") else 4 + 5, batches=batches, steps=6, before=which * 3)


class Asked(nn.Module):
    """Whose loss is of hidden states too."""

    def __init__(self, model, asked=True):
        super().__init__()
        self.model, self.asked = model, asked
        self.config = model.config
        self.kept = []

    def forward(self, **batch):
        if not self.asked:
            return self.model(**batch)
        out = self.model(**batch, output_hidden_states=True)
        assert len(out.hidden_states) == self.config.num_hidden_layers + 1
        self.kept.append([(state, state.detach().clone()) for state in out.hidden_states])
        loss = out.loss + sum(state.float().square().mean() for state in out.hidden_states)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_hidden_states_of_all_layers(checkpoints):
    model = Asked(built("LlamaForCausalLM", **TEXT))
    if checkpoints:
        model.model.gradient_checkpointing_enable()
    assert_alike(model, 3, batches=batch_of)


def test_collected_states_stay_as_they_are():
    """They are their holder's, whatever the next step writes."""
    bastile.apply(cuda_graphs=True)
    model = Asked(built("LlamaForCausalLM", **TEXT))
    for step in range(4):
        model(**batch_of(model, step)).loss.backward()
    assert counted()[0] == 3
    for states in model.kept:
        for state, as_it_was in states:
            assert type(state) is torch.Tensor
            assert torch.equal(state, as_it_was)


def test_parts_of_states_are_their_holders_too():
    """LED pads its encoder's tokens to whole windows, and returns of all states the part that is no padding."""
    bastile.apply(cuda_graphs=True)
    torch.manual_seed(0)
    config = small.small_config("led", attention_window=[4, 4], dropout=0.0, attention_dropout=0.0)
    model = small.prepared(transformers.LEDForConditionalGeneration(config)).to(DEVICE)
    kept = []
    for step in range(5):
        batch = {name: batch_of(model, step)[name] for name in ("input_ids", "labels")}
        output = model(**batch, output_hidden_states=True, return_dict=step != 4)
        states = output.encoder_hidden_states if step < 4 else next(each for each in output if type(each) is tuple)
        kept.append([(state, state.clone()) for state in states])
        (output[0] + states[1].square().mean()).backward()
    assert counted()[0] == 6
    assert all(torch.equal(state, as_it_was) for states in kept for state, as_it_was in states)


def test_hooks_that_stay_behind():
    """Once hidden states have been asked for, hooks stay, and do nothing: graphs go on."""

    class Sometimes(Asked):
        def forward(self, **batch):
            self.asked = not self.kept
            return super().forward(**batch)

    run = assert_alike(Sometimes(built("LlamaForCausalLM", **TEXT)), 3, batches=batch_of, steps=5)
    assert not run.aside


def test_other_things_that_are_collected():
    """Attention's weights, which a graph does not hand out, and a hook of somebody else's beside: without graphs."""

    class Weights(Asked):
        def forward(self, **batch):
            out = self.model(**batch, output_attentions=True)
            assert all(weights is not None for weights in out.attentions)
            return out

    model = built("LlamaForCausalLM", attn_implementation="eager", **TEXT)
    got = assert_alike(Weights(model), 0, batches=batch_of)
    assert got.aside == {"hooks in the layers, which a graph would not call": 4}
    model = built("LlamaForCausalLM", **TEXT)

    def hooked(model):
        model.model.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)

    got = assert_alike(Asked(model), 0, batches=batch_of, before=[hooked])
    assert got.aside == {"hooks in the layers, which a graph would not call": 4}


def test_states_that_are_selected():
    """By number, which tells one kind of step from another."""

    class Selected(Asked):
        def forward(self, **batch):
            out = self.model.model(**{k: batch[k] for k in ("input_ids", "attention_mask")}, output_hidden_states=[1])
            held = [state is not None for state in out.hidden_states]
            assert held == [False, True, False, False]
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=out.hidden_states[1].square().mean())

    if not hasattr(capturing, "selected_hidden_states"):
        pytest.skip("this Transformers collects all or none")
    got = assert_alike(Selected(built("LlamaForCausalLM", **TEXT)), 3, batches=batch_of)
    assert not got.aside


def test_hooks_whose_name_does_not_show():
    def output_capturing_hook(module, args, output):
        pass

    output_capturing_hook.__module__ = collected._MODULE
    token = capturing._active_collector.set({"hidden_states": []})
    try:
        assert collected.collects(output_capturing_hook)
        assert not collected.suits([{0: output_capturing_hook}], [])
    finally:
        capturing._active_collector.reset(token)
    assert collected.suits([{0: output_capturing_hook}], [])
