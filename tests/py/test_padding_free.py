"""Batches whose padding does not go through the layers: stock's numbers, from fewer tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

import bastile
import test_chunked_attention as pictures
from bastile.models import mask_flow, padding, sdpa, side_by_side, sinks, small, token_layers
from bastile.models.masked_attention import MAKERS
from bastile.models.side_by_side import SideBySide
from conftest import assert_same_up_to_rounding, gradients, older_than, tiny_model
from graphing import DEVICE, ON_CUDA, allow_graphs, counted
from oracle import devices
from padded import BACKBONE, MASKS, changed_forward
from test_masks_of_segments import ONE, batch, model_of, step
from test_model_types import error_of

TYPES = ["llama", "qwen2", "qwen3_moe", "mistral", "gemma3_text", "phi3", "cohere2", "gpt_neox", "olmo2"]
TYPES += ["deepseek_v3", *([] if older_than("5.6.0") else ["gemma4_text"])]  # values narrower than keys; shared ones
TYPES += [] if older_than("5.17.0") else ["smollm3"]
TYPES += ["gpt_oss", *([] if older_than("5.24.0") else ["granite_swa", "granitemoe_swa", "flint"])]  # with sinks
#: Other attentions, or what is not made of masks alone; other recurrences: test_packed_mixers.py.
NOT = ["gpt2", "opt", "bloom", "llama4_text"]


@pytest.fixture(autouse=True)
def any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32 too, which shows what is computed to seven digits, and of few tokens."""
    for module in (sdpa, sinks):
        monkeypatch.setattr(module, "TYPES", (*module.TYPES, torch.float32))
    monkeypatch.setattr(side_by_side, "_LEAST_STEP", 2)


def of_kind(kind: str) -> dict[str, Any]:
    """The first token of a row has padding before it, which its label would read."""
    given = batch(kind)
    if kind in MASKS:
        given["labels"] = given["labels"].masked_fill(MASKS[kind].cumsum(1) <= 1, -100)
    return given


def ran() -> tuple[int, int]:
    """Passes without padding, and calls of our attention or masks that were left out."""
    report = bastile.report(reset=True)
    return report.ran("padding_free"), report.ran("masked_attention") + report.ran("sink_attention")


def aside() -> list[str]:
    return [why for line in bastile.report(reset=True) if line.operator == "padding_free" for why in line.aside]


def seen(model: Any, **how: Any) -> None:
    """What its attention takes shows in a first step."""
    bastile.apply(**how)
    step(model, batch("ones"))
    ran()


def assert_as_stock(model: Any, given: dict[str, Any]) -> tuple[int, int]:
    rows = given["attention_mask"] != 0
    want, want_grads, want_logits = step(model, given)
    seen(model)
    got, grads, logits = step(model, given)
    found = ran()
    bastile.reset()
    assert_same_up_to_rounding(got, want, model, "loss")
    assert grads.keys() == want_grads.keys()
    for name, gradient in want_grads.items():
        assert_same_up_to_rounding(grads[name], gradient, model, name)
    assert logits.shape == want_logits.shape
    assert_same_up_to_rounding(logits[rows], want_logits[rows], model, "logits")
    return found


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("model_type", TYPES)
def test_any_padding(model_type: str, kind: str) -> None:
    passes, attentions = assert_as_stock(model_of(model_type), of_kind(kind))
    assert passes == 1
    assert attentions > 0


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("implementation", CheckpointImpl)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_layers_within_pytorch_s_wrappers(model_type: str, implementation: CheckpointImpl, kind: str) -> None:
    """As Accelerate's FSDP plugin checkpoints them."""
    model = model_of(model_type)
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer, implementation)
    passes, _ = assert_as_stock(model, of_kind(kind))
    assert passes == 1


@pytest.mark.parametrize("model_type", NOT)
def test_other_layers_keep_their_padding(model_type: str) -> None:
    model = model_of(model_type)
    seen(model)
    step(model, of_kind("right"))
    assert ran()[0] == 0


@pytest.mark.every_type
@pytest.mark.parametrize("model_type", small.causal_types())
def test_every_type(model_type: str) -> None:
    for kind in MASKS:
        try:
            model = model_of(model_type)
            want, want_grads, _ = step(model, of_kind(kind))
            with torch.no_grad():
                drawn = {model(**of_kind(kind)).loss.item() for _ in range(2)}
        except Exception as error:
            pytest.skip(f"{model_type} cannot: {type(error).__name__}")  # whatever one may raise
        if len(drawn) > 1:
            pytest.skip(f"{model_type} draws numbers, others for a batch of another shape")
        seen(model)
        got, grads, _ = step(model, of_kind(kind))
        passes = ran()[0]
        bastile.reset()
        if not passes:
            pytest.skip(f"{model_type} is not served")
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert error_of(grads, want_grads) < 1e-4, kind


def shapes(model: Any) -> list[torch.Size]:
    """Of what each first layer's attention is given from now on."""
    found: list[torch.Size] = []
    norm = model.model.layers[0].input_layernorm
    stock = norm.forward
    norm.forward = lambda x: found.append(x.shape) or stock(x)
    return found


def test_padding_does_not_go_through_the_layers() -> None:
    model = tiny_model()
    seen(model, add_rms_norm=False)
    found = shapes(model)
    step(model, of_kind("right"))
    assert found == [torch.Size((1, side_by_side.few(11 + 17 + 11 + 1), model.config.hidden_size))]


def test_rows_of_padding_are_zeros() -> None:
    """And the states of tokens are theirs, wherever padding stands."""
    model, given = tiny_model(), of_kind("both")
    want = model.model(given["input_ids"], attention_mask=given["attention_mask"], use_cache=False)[0]
    seen(model)
    with padding.read_by(given["labels"]):
        got = model.model(given["input_ids"], attention_mask=given["attention_mask"], use_cache=False)[0]
    assert ran()[0] == 1
    mask = given["attention_mask"] != 0
    assert_same_up_to_rounding(got[mask], want[mask], model, "states")
    assert not got[~mask].any()


def beside_a_text(given: dict[str, torch.Tensor], first: bool) -> dict[str, torch.Tensor]:
    """A row with pictures, before or behind one of text that is half as long."""
    length = given["input_ids"].shape[1]
    mask = torch.stack([torch.ones(length), torch.arange(length) < length // 2]).long()
    for name, text in (("input_ids", 9), ("labels", 9), ("mm_token_type_ids", 0)):
        behind = -100 if name == "labels" else 0
        rows = torch.cat([given[name], torch.full((1, length), text).where(mask[1:] != 0, behind)])
        given[name] = rows if first else rows.flip(0)
    given["attention_mask"] = mask if first else mask.flip(0)
    return given


def assert_pictures_as_stock(model: Any, given: dict[str, torch.Tensor]) -> int:
    """Whether the second of two passes went without padding: the first one shows what the attention takes."""
    want = pictures.step(model, given)
    bastile.apply()
    for _ in range(2):
        model.zero_grad()
        ran()
        got = pictures.step(model, given)
    pictures.assert_near(got, want, 1e-5)
    return ran()[0]


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("first", [True, False])
def test_pictures(kind: str, first: bool) -> None:
    """Positions of several axes, and features that are added between layers, where pictures are; beside a shorter row
    of text, whose padding is behind it."""
    model = pictures.model_of(kind).train()
    given = beside_a_text(pictures.batch_of(kind, model, pictures.SIZES["mixed"]), first)
    assert assert_pictures_as_stock(model, given) == 1 or older_than("5.17.0")  # which hand on more


# ---- which batches ---------------------------------------------------------------------------------------------------


def first_token_is_read(model: Any, given: dict[str, Any]) -> None:
    given["labels"] = batch("both")["labels"]


def padding_is_read(model: Any, given: dict[str, Any]) -> None:
    given["labels"] = given["input_ids"]


def no_labels(model: Any, given: dict[str, Any]) -> None:
    del given["labels"]


def another_index(model: Any, given: dict[str, Any]) -> None:
    given["labels"] = given["labels"].masked_fill(given["labels"] == -100, -1)
    given["ignore_index"] = -1


def evaluation(model: Any, given: dict[str, Any]) -> None:
    model.eval()


def hidden_states(model: Any, given: dict[str, Any]) -> None:
    given["output_hidden_states"] = True


def a_hook(model: Any, given: dict[str, Any]) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: None)


def noise(model: Any, given: dict[str, Any]) -> None:
    """As NEFTune's, which is by how long the batch is."""
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output * output.shape[1] ** -0.5)


def another_s_forward(model: Any, given: dict[str, Any]) -> None:
    class Weighs:
        def __init__(self, target: nn.Module) -> None:
            self.target, self.weights = target, torch.ones(3, 17, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weights * type(self.target).forward(self.target, x)

    projection = model.model.layers[0].mlp.down_proj
    projection.forward = Weighs(projection).forward


def nothing_but_padding(model: Any, given: dict[str, Any]) -> None:
    given["attention_mask"] = torch.zeros_like(given["attention_mask"])
    given["labels"] = torch.full_like(given["labels"], -100)


def short_tables(model: Any, given: dict[str, Any]) -> None:
    model.config.max_position_embeddings = 16


def bidirectional(model: Any, given: dict[str, Any]) -> None:
    model.model.layers[1].self_attn.is_causal = False


def mixing(model: Any, given: dict[str, Any]) -> None:
    model.model.layers[0].mlp.add_module("mixing", nn.Conv1d(2, 2, 1))


def nothing(model: Any, given: dict[str, Any]) -> None:
    pass


@pytest.mark.parametrize(
    "change",
    [
        nothing,
        first_token_is_read,
        padding_is_read,
        no_labels,
        another_index,
        evaluation,
        hidden_states,
        a_hook,
        noise,
        another_s_forward,
        nothing_but_padding,
        short_tables,
        bidirectional,
        mixing,
    ],
)
def test_what_keeps_its_padding(change: Any) -> None:
    model, given = tiny_model(), of_kind("both")
    change(model, given)
    want = model(**given)[0]
    bastile.apply()
    model(**batch("ones"))
    ran()
    got = model(**given)[0]
    if not (got.isnan().all() and want.isnan().all()):
        assert_same_up_to_rounding(got, want, model, change.__name__)
    assert ran()[0] == (change is nothing)


def test_embeddings_that_require_gradients() -> None:
    """By a hook of Transformers' or PEFT's, as checkpointed layers and adapters need it."""
    model = tiny_model()
    model.get_input_embeddings().requires_grad_(False)
    model.enable_input_require_grads()
    assert assert_as_stock(model, of_kind("both"))[0] == 1


def test_tuples() -> None:
    """Of a model, whose backbone returns names, and of a backbone that is asked for one."""
    model, given = tiny_model(), {**of_kind("right"), "return_dict": False}
    want = model(**given)[0]
    seen(model)
    assert_same_up_to_rounding(model(**given)[0], want, model, "loss")
    assert ran()[0] == 1
    with padding.read_by(given["labels"]):
        states = model.model(given["input_ids"], attention_mask=given["attention_mask"], return_dict=False)[0]
    assert states.shape[:2] == (3, 17)
    assert ran()[0] == 0


def test_weights_are_dropped_side_by_side() -> None:
    """As by the attention that it calls (test_attention_both_ways.py), others with each seed."""
    model = tiny_model(attention_dropout=0.5)
    seen(model)
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        losses.append(model(**of_kind("right")).loss.item())
    assert ran()[0] == 3
    assert losses[0] == losses[2] != losses[1]


def test_float32_keeps_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert assert_as_stock(tiny_model(), of_kind("right"))[0] == 0


def test_attention_that_can_no_longer_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where autocast is off in one step: the pass begins again, with its padding, and so do all after it."""
    model, given = tiny_model(), of_kind("right")
    want = step(model, given)[0]
    seen(model)
    monkeypatch.setattr(sdpa, "TYPES", (torch.bfloat16,))
    for _ in range(2):
        assert_same_up_to_rounding(step(model, given)[0], want, model, "loss")
        assert ran()[0] == 0
    assert sdpa.making.packed is None


def test_masks_that_are_made_by_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who replaces what makes them, behind our back, is not told where rows begin: the pass begins again."""
    from transformers.models.qwen3 import modeling_qwen3

    model, given = tiny_model(), of_kind("right")
    want = step(model, given)[0]
    seen(model)
    stock = bastile.guards.stock_of(modeling_qwen3.create_causal_mask)
    monkeypatch.setattr(modeling_qwen3, "create_causal_mask", stock)
    assert_same_up_to_rounding(step(model, given)[0], want, model, "loss")
    assert ran()[0] == 0


def test_what_returns_more_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny_model(), of_kind("right")
    want = step(model, given)[0]
    seen(model)
    monkeypatch.setattr(token_layers, "put_back", lambda result, batch: False)
    assert_same_up_to_rounding(step(model, given)[0], want, model, "loss")
    monkeypatch.undo()
    assert_same_up_to_rounding(step(model, given)[0], want, model, "loss")
    assert ran()[0] == 0


def test_a_cache_that_a_training_step_makes() -> None:
    """Is there, says that it was not filled, and the user's own is filled by rows as they are."""
    model, given = tiny_model(), {**of_kind("right"), "use_cache": True}
    seen(model)
    output = model(**given)
    assert ran()[0] == 1
    with pytest.raises(RuntimeError, match="not in its cache"):
        output.past_key_values.layers[0]
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(**given, past_key_values=cache)
    assert ran()[0] == 0
    assert cache.get_seq_length() == 17


def test_positions_are_the_batch_s() -> None:
    """Those that a user gives, and, of none, those of the columns: a row with padding before it does not begin at 0."""
    model, given = tiny_model("llama"), of_kind("both")
    for positions in (None, torch.arange(17).expand(3, -1) * 2, (MASKS["both"].cumsum(1) - 1).clamp(0)):
        assert assert_as_stock(model, {**given, "position_ids": positions})[0] == 1


def test_embeddings_in_place_of_tokens() -> None:
    """With gradients, as adapters and images have them."""
    model, given = tiny_model(), of_kind("both")
    ids = given.pop("input_ids")
    found = []
    for apply in (False, True):
        if apply:
            seen(model)
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=embedded, **given).loss.backward()
        found.append(embedded.grad)
    assert ran()[0] == 1
    assert_same_up_to_rounding(found[1], found[0], model, "embeddings")
    assert not found[1][given["attention_mask"] == 0].any()  # type: ignore[index]


@pytest.mark.parametrize("only", [0, 2])
def test_rows_of_which_one_alone_has_tokens(only: int) -> None:
    model, given = tiny_model(), of_kind("right")
    empty = torch.ones(3, 1, dtype=torch.bool)
    empty[only] = False
    given["attention_mask"] = given["attention_mask"].masked_fill(empty, 0)
    given["labels"] = given["labels"].masked_fill(empty, -100)
    assert assert_as_stock(model, given)[0] == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert assert_as_stock(model, of_kind("both"))[0] == 1


def test_one_model_alone() -> None:
    model, other = tiny_model(), tiny_model()
    bastile.apply_to_model(model)
    for each, passes in ((model, 1), (other, 0)):
        step(each, batch("ones"))
        ran()
        step(each, of_kind("right"))
        assert ran()[0] == passes


def test_it_needs_the_attention() -> None:
    assert "padding_free" not in bastile.apply(masked_attention=False)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("autocast", [False, True])
def test_in_bfloat16_and_under_autocast(device: str, autocast: bool) -> None:
    """Logits as near to float32's as stock's."""
    read, squares = (MASKS["both"] != 0).to(device), [0.0, 0.0]
    for seed in range(6):
        bastile.reset()
        torch.manual_seed(seed)
        wide = tiny_model().to(device)
        exact = step(wide, of_kind("both"))[2]
        model = copy.deepcopy(wide).to(torch.float32 if autocast else torch.bfloat16)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            want = step(model, of_kind("both"))[2]
            seen(model)
            got = step(model, of_kind("both"))[2]
            assert ran()[0] == 1
        for i, each in enumerate((got, want)):
            squares[i] += (each.float() - exact)[read].square().mean().item()
    assert squares[0] <= 1.3 * squares[1]  # of few samples: errors themselves are judged in test_masked_attention.py


def test_what_is_behind_is_nothing_new() -> None:
    """Zeros are no numbers of a model that divides by a root of what it is given."""
    mask, states = MASKS["both"] != 0, torch.randn(3, 17, 4).requires_grad_()
    unpadded = SideBySide(mask, torch.device("cpu"), 64)
    got = unpadded.of(states)
    assert got.shape == (1, 64, 4)
    assert torch.equal(got[0, :37], states[mask])
    assert torch.equal(got[0, 37:], states[mask][:27])
    got.sum().backward()
    assert torch.equal(states.grad, mask[..., None].expand(-1, -1, 4).float())  # type: ignore[arg-type]
    assert torch.equal(unpadded.back(got), states * mask[..., None])
    assert unpadded.of(mask).tolist() == [[True] * 37 + [False] * 27]
    assert unpadded.sequences.tolist() == [[0] * 11 + [1] * 9 + [2] * 17 + [3] * 17 + [4] * 10]  # type: ignore[union-attr]


def test_memory_is_judged_by_the_batch_as_it_came() -> None:
    """Activations are made again from a number of tokens on, which a user may have set (docs/memory.md)."""
    model, given = tiny_model(), of_kind("right")
    seen(model)
    bastile.set_recompute(3 * 17)
    try:
        step(model, given)
        report = bastile.report()
    finally:
        bastile.set_recompute(None)
    assert report.ran("padding_free") == report.ran("recompute") == 1


# ---- graphs ----------------------------------------------------------------------------------------------------------


def ragged(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    ends = torch.randint(8, 65, (4,), generator=generator)
    mask = (torch.arange(int(ends.max())) < ends[:, None]).long()
    ids = torch.randint(3, 90, mask.shape, generator=generator)
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: tensor.to(DEVICE) for name, tensor in given.items()}


@pytest.fixture
def trained_with_graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    allow_graphs(monkeypatch)
    monkeypatch.setattr(side_by_side, "_LEAST_STEP", 8)
    return tiny_model().to(DEVICE, torch.bfloat16 if ON_CUDA else torch.float32).train()


def test_few_kinds_of_steps(trained_with_graphs: Any) -> None:
    """Batches none of which is like another, in a handful of graphs; each step's gradients those of stock."""
    model = trained_with_graphs
    want = []
    for number in range(24):
        model.zero_grad()
        model(**ragged(number), use_cache=False).loss.backward()
        want.append(gradients(model))
    bastile.apply(cuda_graphs=True)
    replayed = 0
    for number in range(24):
        model.zero_grad()
        model(**ragged(number), use_cache=False).loss.backward()
        if not ON_CUDA:  # where they are of 16 bits
            for name, gradient in gradients(model).items():
                assert_same_up_to_rounding(gradient, want[number][name], model, name)
    passes = bastile.report().ran("padding_free")
    replayed, why = counted()
    assert passes >= 22
    assert replayed >= 20
    assert not why


# ---- what becomes of a batch's mask ----------------------------------------------------------------------------------

DICTIONARY = """
class Backbone:
    def forward(self, x, attention_mask):
        if not isinstance(masks := attention_mask, dict):
            given = {"config": self.config, "attention_mask": attention_mask}
            masks = {"full": create_causal_mask(**given)}
        for layer in self.layers:
            x = layer(x, attention_mask=masks[layer.kind])
        return x
"""
HANDED = BACKBONE.replace("(x, attention_mask)", "(x, attention_mask=attention_mask)")


@pytest.mark.parametrize(
    ("text", "old", "new", "is_served"),
    [
        (HANDED, "", "", True),
        (DICTIONARY, "", "", True),
        (ONE, "", "", True),
        (ONE, "return x", "return attention_mask", False),
        (ONE, "for i", "y = attention_mask\n        for i", False),
        (HANDED, "x = layer(", "x = x * attention_mask\n            x = layer(", False),
        (HANDED, "return x", "return x, attention_mask", False),
        (HANDED, "attention_mask=attention_mask", "mask=attention_mask", False),
        (HANDED, "create_sliding_window_causal_mask", "create_chunked_causal_mask", False),
        (HANDED, "create_sliding_window_causal_mask", "create_recurrent_attention_mask", False),
        (DICTIONARY, '"attention_mask":', '"other":', False),
        (DICTIONARY, "isinstance(masks := attention_mask, dict)", "other(masks := attention_mask)", False),
    ],
)
def test_a_mask_goes_to_makers_alone(text: str, old: str, new: str, is_served: bool) -> None:
    code = changed_forward(text, old, new)[1]
    assert bool(mask_flow.goes_to_makers_alone(code, MAKERS)) == is_served
