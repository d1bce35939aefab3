"""Layers that are not a decoder's alone: encoders, encoder-decoders and towers of images as graphs."""

import gc

import pytest
import torch
import transformers
from torch import nn

import bastile
from bastile.graphs import stack
from bastile.graphs.between import Between
from bastile.graphs.recorder import Repeated
from bastile.models.checkpoints import is_layer
from graphing import DEVICE, ON_CUDA, allow_graphs, assert_alike, counted, train


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    allow_graphs(monkeypatch)
    yield
    bastile.reset()


SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 97}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 97,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "vocab_size": 97,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True}


def built(name, **values):
    torch.manual_seed(0)
    model = getattr(transformers, name)
    with torch.device(DEVICE):
        return model(model.config_class(**values)).train()


def labelled(model, step, labels):
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 97, (2, 11), generator=drawn)
    mask = torch.ones_like(ids)
    mask[1, 7 + step % 3 :] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1]) if labels == "class" else ids}
    return {key: value.to(DEVICE) for key, value in batch.items()}


def of_classes(model, step):
    return labelled(model, step, "class")


def of_tokens(model, step):
    return labelled(model, step, "tokens")


def assert_as_without(model, batches):
    if not (ON_CUDA and isinstance(model, transformers.DebertaV2ForSequenceClassification)):
        assert_alike(model, 3, batches=batches)
        return
    # Whose gradients of relative positions PyTorch adds up in whatever order they come.
    got, want = (train(model, graphs, batches=batches) for graphs in (True, False))
    assert got.replayed == 3, got.aside
    torch.testing.assert_close(got.losses, want.losses, rtol=1e-5, atol=1e-6)


ENCODERS = [
    ("BertForSequenceClassification", SMALL, of_classes),
    ("RobertaForMaskedLM", SMALL, of_tokens),
    ("ElectraForTokenClassification", {**SMALL, "embedding_size": 32, "num_labels": 97}, of_tokens),
    ("ModernBertForSequenceClassification", {**SMALL, "pad_token_id": 0}, of_classes),
    ("DebertaV2ForSequenceClassification", {**SMALL, **RELATIVE, "norm_rel_ebd": "layer_norm"}, of_classes),
    ("MPNetForSequenceClassification", SMALL, of_classes),
    (
        "XLNetForSequenceClassification",
        {"d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48, "vocab_size": 97},
        of_classes,
    ),
]


@pytest.mark.parametrize(("name", "values", "batches"), ENCODERS, ids=[row[0] for row in ENCODERS])
def test_encoders(name, values, batches):
    """Dropout and all; DeBERTa returns the hidden states of all layers."""
    assert_as_without(built(name, **values), batches)


def test_which_modules_are_layers():
    """Older models' too, which are never checkpointed; but not what keeps statistics of its calls."""

    def layer(name, module, *parts):
        found = type(name, (nn.Module,), {"__module__": module})()
        for index, part in enumerate(parts):
            found.add_module(str(index), part)
        return found

    of_models = "transformers.models.new.modeling_new"
    assert is_layer(layer("NewLayer", of_models, nn.Linear(2, 2)))
    assert is_layer(layer("NewBlock", of_models))
    assert not is_layer(layer("NewStage", of_models))
    assert not is_layer(layer("NewLayer", "somebody.modeling_new"))
    assert not is_layer(layer("NewLayer", of_models, nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))))


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "DebertaV2ForSequenceClassification"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_encoders(name, reentrant):
    values = {**SMALL, **(RELATIVE if name.startswith("Deb") else {})}
    model = built(name, **values)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_as_without(model, of_classes)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_hidden_states_that_leave(autocast, mean):
    """Whoever keeps what an encoder returns, as sentence embeddings are, gets memory of its own: the next step's graphs
    write beside it."""

    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = built("BertModel", **SMALL)
            self.kept = []

        def forward(self, labels, **batch):
            states = self.encoder(**batch).last_hidden_state
            self.kept.append(states.detach())
            pooled = states.mean(1) if mean else states[:, 0]
            return transformers.modeling_outputs.SequenceClassifierOutput(loss=pooled.square().mean() * labels.sum())

    def around():
        return torch.autocast(DEVICE, torch.bfloat16, enabled=autocast)

    kept = []
    for graphs in (False, True):
        model = Embedding()
        run = train(model, graphs, batches=of_classes, around=around)
        assert run.replayed == (3 if graphs else 0), run.aside
        kept.append(run.losses)
    assert all(map(torch.equal, *kept))


def test_what_an_encoder_returned_stays_as_it_is():
    bastile.apply(cuda_graphs=True)
    model = built("BertModel", **SMALL)
    seen = []
    for step in range(4):
        batch = of_classes(model, step % 2)
        del batch["labels"]
        torch.manual_seed(step % 2)
        states = model(**batch).last_hidden_state
        states.sum().backward()
        seen.append((states, states.detach().clone()))
    assert counted()[0] == 3
    assert all(torch.equal(one, other) for one, other in seen)
    assert torch.equal(seen[0][0], seen[2][0])
    assert torch.equal(seen[1][0], seen[3][0])


def test_a_noted_step_leaves_nothing_to_garbage_collection():
    """What stands for the hidden states between its layers goes when the step does."""

    def held():
        found = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
        return sum(type(each) is Between or tuple(each.shape) == (2, 11, SMALL["hidden_size"]) for each in found)

    bastile.apply(cuda_graphs=True)
    model = built("BertForSequenceClassification", **SMALL)
    gc.collect()
    gc.disable()
    try:
        before = held()  # another test's, perhaps
        model(**of_classes(model, 0)).loss.backward()
        assert counted() == (0, {})  # it was noted
        assert held() == before
    finally:
        gc.enable()


SEQ2SEQS = [
    ("BartForConditionalGeneration", SEQ2SEQ),
    ("T5ForConditionalGeneration", T5),
    ("UMT5ForConditionalGeneration", T5),
    ("PegasusForConditionalGeneration", SEQ2SEQ),
]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("name", "values"), SEQ2SEQS, ids=[row[0] for row in SEQ2SEQS])
def test_encoder_decoders(name, values, checkpointing):
    """The decoder's layers are given hidden states that have a gradient; T5's first layer makes a bias that has one,
    and runs itself."""
    model = built(name, **values)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_alike(model, 6, batches=of_tokens)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_more_layers_of_a_decoder_than_one_graph_has(checkpointing):
    """What they add to the encoder's gradient is added in the order of steps without graphs."""
    model = built("BartForConditionalGeneration", **{**SEQ2SEQ, "decoder_layers": 9, "dropout": 0.0})
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_alike(model, 6, batches=of_tokens)


def test_layers_that_are_left_out_at_random(monkeypatch):
    """Such a step goes on without graphs; after three of them its kind does from the start."""
    steps = iter([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, *[1.0] * 4] * 2)  # once without graphs, once with them
    drawn = torch.rand

    def scripted(*size, **how):
        if size != ([],):
            return drawn(*size, **how)
        scripted.calls += 1
        if scripted.calls % 6 == 1:  # three layers of each half ask in a step
            scripted.now = next(steps)
        return torch.tensor(scripted.now if scripted.calls % 6 == 2 else 1.0)

    scripted.calls = 0
    monkeypatch.setattr(torch, "rand", scripted)
    monkeypatch.setattr(stack, "_IN_VAIN", 100)  # numbers are those of graphs until then
    values = {**SEQ2SEQ, "dropout": 0.0, "encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4}
    model = built("BartForConditionalGeneration", **values)
    got = assert_alike(model, 9 + 2, batches=of_tokens, steps=10)
    assert got.aside == {"layers that are not called one after the other": 3 + 4}


def test_whisper():
    values = {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16, "dropout": 0.1}

    def batches(model, step):
        drawn = torch.Generator().manual_seed(step)
        sound = torch.randn(2, 8, 24, generator=drawn)
        labels = torch.randint(3, 97, (2, 9), generator=drawn)
        return {"input_features": sound.to(DEVICE), "labels": labels.to(DEVICE)}

    assert_alike(built("WhisperForConditionalGeneration", **values), 6, batches=batches)


IMAGE, START = 90, 91
VISION = {
    "depth": 5,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "deepstack_visual_indexes": [1, 2],
}
TEXT = {
    **SMALL,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
GRIDS = [[1, 4, 6], [1, 2, 4]]


def of_images(model, step, grids=GRIDS):
    """Two rows of text, an image in each."""
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 80, (2, 13), generator=drawn)
    places = [frames * height * width // 4 for frames, height, width in grids]
    for row, count in enumerate(places):
        ids[row, 1], ids[row, 2 : 2 + count] = START, IMAGE
    patches = torch.randn(4 * sum(places), 3 * 2 * 16, generator=drawn)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids,
        "pixel_values": patches,
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }
    return {key: value.to(DEVICE) for key, value in batch.items()}


def with_images(**vision):
    values = {"text_config": TEXT, "vision_config": {**VISION, **vision}, "image_token_id": IMAGE}
    return built("Qwen3VLForConditionalGeneration", **values, vision_start_token_id=START)


def lines():
    return {line.where.rpartition(".")[2]: line for line in bastile.report() if line.operator == "cuda_graphs"}


def test_a_tower_of_images():
    """Some layers' results are looked at by others than the next layer: the first time that is seen the layers before
    run once more, and from then on a graph ends there."""
    got = assert_alike(with_images(), 10, batches=of_images, steps=6)
    assert not got.aside


def test_layers_within_layers():
    """Those of a layer that runs as a graph belong to it."""
    from transformers.models.bert.modeling_bert import BertEncoder, BertLayer

    class Both(BertLayer):
        def __init__(self, config):
            super().__init__(config)
            self.inner = BertEncoder(config)

        def forward(self, hidden_states, attention_mask=None, *args, **kwargs):
            hidden_states = super().forward(hidden_states, attention_mask, *args, **kwargs)
            return self.inner(hidden_states, attention_mask).last_hidden_state

    model = built("BertForSequenceClassification", **SMALL)
    model.bert.encoder.layer = nn.ModuleList([Both(model.config) for _ in range(3)]).to(DEVICE)
    assert_alike(model, 3, batches=of_classes)


@pytest.mark.skipif(ON_CUDA, reason="it replaces what stands for graphs on a CPU")
def test_frozen_encoders(monkeypatch):
    """A tower whose weights are frozen has graphs of its forward pass alone."""
    recorded = []
    made = Repeated.__init__

    def counting(self, function):
        recorded.append(function.__qualname__.split(".")[1])
        made(self, function)

    monkeypatch.setattr(Repeated, "__init__", counting)
    model = built("BertForSequenceClassification", **SMALL)
    model.bert.requires_grad_(False)
    assert_alike(model, 3, batches=of_classes)
    assert set(recorded) == {"_forward_of"}


def test_lengths_that_the_host_reads():
    """How patches are parted into images is a size of what a graph launches: each kind of step has its own, though all
    tensors are of the same shapes."""
    model = with_images()
    others = [[[1, 4, 6], [1, 2, 4]], [[1, 2, 4], [1, 4, 6]], [[1, 4, 4], [1, 4, 4]]]

    def batches(model, step):
        return of_images(model, step, others[step % 3])

    got = assert_alike(model, None, batches=batches, steps=9)
    assert not got.aside
    assert got.replayed == 6 + 8


def with_windows():
    values = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": 32,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [2],
    }
    text = {name: value for name, value in TEXT.items() if name != "head_dim"}
    return built(
        "Qwen2_5_VLForConditionalGeneration",
        text_config=text,
        vision_config=values,
        image_token_id=IMAGE,
        vision_start_token_id=START,
    )


def test_lengths_that_a_later_layer_reads_alone():
    """Qwen2.5-VL's windows are what the first layers are given, and its images what a later one is."""
    got = assert_alike(with_windows(), None, batches=of_images, steps=4)
    assert not got.aside
    assert got.replayed == 6


LENGTHS = [30, 36, 37, 43, 25, 38, 28, 41, 26, 34, 27, 40, 31, 42, 24, 35, 44, 29, 33, 39]


@pytest.mark.parametrize("made", [with_images, with_windows])
@pytest.mark.parametrize("is_masked", [False, True])
def test_texts_of_many_lengths_with_images(made, is_masked):
    """Positions have several axes, and Qwen3-VL adds features of images to the first layers' hidden states: lengths
    become few there, too, with the results of their own."""

    def batches(model, step):
        batch = of_images(model, step)
        more = torch.randint(3, 80, (2, LENGTHS[step] - 13), generator=torch.Generator().manual_seed(step))
        ids = torch.cat((batch["input_ids"], more.to(DEVICE)), 1)
        mask = torch.ones_like(ids)
        if is_masked:
            mask[1, -1 - step % 3 :] = 0
        new = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        return {**batch, **new, "mm_token_type_ids": (ids == IMAGE).int()}

    model = made()
    want, got = (train(model, graphs, steps=len(LENGTHS), batches=batches) for graphs in (False, True))
    torch.testing.assert_close(got.losses, want.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.parameters, want.parameters, rtol=1e-3, atol=1e-4)
    assert not got.aside
    # The tower in all steps but the first; the text from the ninth length on, but for the first of two kinds each.
    assert got.replayed == 19 + 10


GEMMA = {
    **TEXT,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": None,
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("has_image", [False, True])
def test_masks_that_were_made_before(attention, has_image):
    """Gemma 3's for each kind of layers, in which the tokens of an image see each other. Its cache, which it makes if
    nobody has said use_cache=False, has lost what a window does not reach: it stays empty."""
    vision = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    model = built(
        "Gemma3ForConditionalGeneration",
        text_config=GEMMA,
        vision_config={**vision, "image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
    )
    model.set_attn_implementation(attention)

    def batches(model, step):
        drawn = torch.Generator().manual_seed(step)
        ids = torch.randint(3, 80, (2, LENGTHS[step]), generator=drawn)
        mask = torch.ones_like(ids)
        mask[1, -1 - step % 3 :] = 0
        ids[:, 5:9] = IMAGE if has_image else 3
        batch = {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(mask == 0, -100),
            "token_type_ids": (ids == IMAGE).long(),
        }
        if has_image:
            batch["pixel_values"] = torch.randn(2, 3, 16, 16, generator=drawn)
        return {key: value.to(DEVICE) for key, value in batch.items()}

    want, got = (train(model, graphs, steps=len(LENGTHS), batches=batches) for graphs in (False, True))
    torch.testing.assert_close(got.losses, want.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.parameters, want.parameters, rtol=1e-3, atol=1e-4)
    assert not got.aside
    assert got.replayed == 19 * has_image + 10


def smolvlm():
    """Which makes the cache that its text model fills."""
    text = {"model_type": "llama", **SMALL, "num_key_value_heads": 2, "pad_token_id": 0}
    vision = {**SMALL, "image_size": 28, "patch_size": 14}
    vision.pop("vocab_size")
    return built(
        "SmolVLMForConditionalGeneration",
        text_config=text,
        vision_config=vision,
        image_token_id=90,
        scale_factor=2,
        pad_token_id=0,
    )


def of_pictures(model, step):
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 80, (2, 11), generator=drawn)
    ids[:, 2] = 90
    pixels = torch.randn(2, 1, 3, 28, 28, generator=drawn)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "pixel_values": pixels}
    return {key: value.to(DEVICE) for key, value in batch.items()}


def test_a_cache_that_the_model_makes_for_its_text_model():
    run = assert_alike(smolvlm(), 2 * 3, batches=of_pictures)
    assert not run.aside


def test_a_cache_that_the_model_is_given():
    """Is filled, for somebody may read it."""

    class WithCache(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.kept = smolvlm(), []

        def forward(self, **batch):
            self.kept.append(transformers.DynamicCache())
            return self.model(**batch, past_key_values=self.kept[-1])

    bastile.apply(cuda_graphs=True)
    model = WithCache()
    for step in range(3):
        batch = of_pictures(model, step)
        model(**batch).loss.backward()
        assert model.kept[-1].get_seq_length() == 11
    assert counted()[0] == 2  # the tower's
