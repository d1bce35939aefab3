"""Encoders whose batches have padding: their masks in a few numbers, and layers without it; stock's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import bastile
from bastile.graphs.stack import _stacks
from bastile.models import encoders, mask_flow, padding, sdpa, side_by_side, small
from bastile.models.masked_attention import encoders_of
from bastile.models.sites import ModelFile
from conftest import assert_same_up_to_rounding, gradients, older_than
from graphing import DEVICE, ON_CUDA, allow_graphs, counted
from padded import MASKS, changed_forward
from test_graphs_masked import _BERT, _ROPE, made
from test_padding_free import ran

#: Model -> its config's values. The first take hidden states through layers in a module of their own; the others count
#: positions where they have their layers.
STACKS: dict[str, dict[str, Any]] = {
    "BertModel": _BERT,
    "RobertaModel": {**_BERT, "pad_token_id": 1},
    "XLMRobertaModel": {**_BERT, "pad_token_id": 1},
    "CamembertModel": {**_BERT, "pad_token_id": 1},
    "ElectraModel": {**_BERT, "embedding_size": 32},
    "DistilBertModel": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": 97},
    "RobertaPreLayerNormModel": {**_BERT, "pad_token_id": 1},
}
BACKBONES: dict[str, dict[str, Any]] = {
    "ModernBertModel": {**_BERT, **_ROPE, "local_attention": 8, "global_attn_every_n_layers": 2},
    "EuroBertModel": {**_BERT, **_ROPE, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2},
    "NomicBertModel": {**_BERT, **_ROPE},
    "GteModel": {**_BERT, **_ROPE},
}
TYPES = {**STACKS, **BACKBONES}
#: Whose masks of windows stay, where they have padding: every other layer's.
_WINDOWS = "ModernBertModel"


@pytest.fixture(autouse=True)
def any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32 too, which shows what is computed to seven digits, and of few tokens."""
    monkeypatch.setattr(sdpa, "TYPES", (*sdpa.TYPES, torch.float32))
    monkeypatch.setattr(side_by_side, "_LEAST_STEP", 2)


def model_of(name: str, device: str = "cpu", **more: Any) -> Any:
    if older_than("5.17"):
        pytest.skip("there encoders have other code")
    model = made(name, TYPES, **more).to(device).train()
    model.config.intermediate_size = getattr(model.config, "intermediate_size", 48)
    return model


def given_of(kind: str, mask: torch.Tensor | None = None, device: str = "cpu") -> dict[str, torch.Tensor]:
    mask = MASKS[kind] if mask is None else mask
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, mask.shape, generator=drawn)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def step(
    model: Any, given: dict[str, Any], reads: bool = True, of_tokens: bool = False, **more: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states, and gradients of a loss that reads those of tokens, or of padding too. reads: it is known that
    nobody reads padding. of_tokens: nobody does, but that is not known."""
    mask = given["attention_mask"].bool()
    labels = torch.where(mask, 0, padding.IGNORED).cpu()
    torch.manual_seed(0)
    with padding.read_by(labels if reads else None):
        hidden = model(**given, **more).last_hidden_state
    weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden.device)
    (hidden * weight * (mask[..., None] if reads or of_tokens else 1)).sum().backward()
    return hidden.detach().clone(), gradients(model)


def _assert_same_gradients(grads: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert grads.keys() == want.keys()
    scale = max(gradient.abs().max().item() for gradient in want.values())
    for name, gradient in want.items():  # some are 0 but for rounding, as that of a key's bias
        assert (grads[name] - gradient).abs().max().item() <= 2e-5 * scale, name


def assert_as_stock(model: Any, given: dict[str, Any], reads: bool, **how: Any) -> tuple[int, int]:
    """Passes without padding, and our attentions, in the second step with bastile.apply."""
    want, want_grads = step(model, given, reads)
    bastile.apply(**how)
    step(model, given, reads)
    ran()
    got, grads = step(model, given, reads)
    found = ran()
    bastile.reset()
    rows = given["attention_mask"].bool() if reads else torch.ones_like(given["attention_mask"]).bool()
    assert_same_up_to_rounding(got[rows], want[rows], model, "hidden states")
    _assert_same_gradients(grads, want_grads)
    return found


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", TYPES)
def test_padding_does_not_go_through_the_layers(name: str, kind: str) -> None:
    model = model_of(name)
    assert assert_as_stock(model, given_of(kind), reads=True) == (1, model.config.num_hidden_layers)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", TYPES)
def test_padding_that_is_read_sees_what_it_saw(name: str, kind: str) -> None:
    """All rows are as beneath a mask, which is none."""
    model = model_of(name)
    layers = model.config.num_hidden_layers
    windows = sum(each == "sliding_attention" for each in getattr(model.config, "layer_types", None) or ())
    assert assert_as_stock(model, given_of(kind), reads=False) == (0, layers - (name == _WINDOWS) * windows)


@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel"])
def test_batches_without_padding_have_no_mask(name: str) -> None:
    model, given = model_of(name), given_of("right", torch.ones(3, 17, dtype=torch.long))
    windows = sum(each == "sliding_attention" for each in getattr(model.config, "layer_types", None) or ())
    assert assert_as_stock(model, given, reads=True) == (0, windows)


@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel", "DistilBertModel"])
def test_masks_with_holes_stay(name: str) -> None:
    """A window is of places, not of tokens."""
    mask = MASKS["right"].clone()
    mask[0, 4] = 0
    assert assert_as_stock(model_of(name), given_of("", mask), reads=True) == (0, 0)


def test_rows_of_padding_are_zeros() -> None:
    model, given = model_of("BertModel"), given_of("both")
    bastile.apply()
    for _ in range(2):
        got, _ = step(model, given)
    assert not bool(got[MASKS["both"] == 0].any())
    assert bool(got[MASKS["both"] == 1].all())


def test_a_configuration_that_says_that_it_is_not_causal() -> None:
    model = model_of("BertModel")
    model.config.is_causal = False
    assert assert_as_stock(model, given_of("right"), reads=False) == (0, model.config.num_hidden_layers)


@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel"])
def test_one_row(name: str) -> None:
    model = model_of(name)
    assert assert_as_stock(model, given_of("", MASKS["both"][1:2]), reads=True)[0] == 1


def test_the_pooler_reads_the_first_token() -> None:
    model, given = model_of("BertModel"), given_of("right")
    want = model(**given).pooler_output.detach()
    bastile.apply()
    step(model, given)
    with padding.read_by(torch.where(given["attention_mask"].cpu() == 1, 0, padding.IGNORED)):
        got = model(**given).pooler_output
    assert ran()[0] == 1
    assert_same_up_to_rounding(got, want, model, "pooled")


@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel"])
def test_one_model_alone(name: str) -> None:
    model, other = model_of(name), model_of(name)
    want, _ = step(model, given_of("both"))
    bastile.apply_to_model(model)
    for each, passes in ((model, 1), (other, 0)):
        step(each, given_of("both"))
        ran()
        got, _ = step(each, given_of("both"))
        assert ran() == (passes, passes * model.config.num_hidden_layers)
        rows = MASKS["both"].bool()
        assert_same_up_to_rounding(got[rows], want[rows], model, "hidden states")
    assert "_create_attention_masks" not in vars(model)


def hooked(model: Any) -> dict[str, Any]:
    model.encoder.layer[0].register_forward_hook(lambda module, args, output: None)
    return {}


def chunked(model: Any) -> dict[str, Any]:
    for layer in model.encoder.layer:
        layer.chunk_size_feed_forward = 1
    return {}


def of_all_layers(_: Any) -> dict[str, Any]:
    return {"output_hidden_states": True}


def evaluated(model: Any) -> dict[str, Any]:
    model.eval()
    return {}


def causal(model: Any) -> dict[str, Any]:
    model.encoder.layer[1].attention.self.is_causal = True
    return {}


def counted_by_a_user(_: Any) -> dict[str, Any]:
    return {"position_ids": torch.arange(17)[None] + 1}


@pytest.mark.parametrize("change", [hooked, chunked, of_all_layers, evaluated, causal, counted_by_a_user])
def test_what_keeps_its_padding(change: Callable[[Any], dict[str, Any]]) -> None:
    model = model_of("BertModel")
    more = change(model)
    bastile.apply()
    for _ in range(2):
        step(model, given_of("right"), **more)
    passes, attentions = ran()
    assert (passes, attentions > 0) == (0, True)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("EsmModel", {**_BERT, "pad_token_id": 1, "mask_token_id": 2, "position_embedding_type": "rotary"}),
        ("MPNetModel", _BERT),
        ("RoFormerModel", {**_BERT, "embedding_size": 32}),
        ("BertModel", {**_BERT, "is_decoder": True}),
        ("XmodModel", {**_BERT, "pad_token_id": 1, "default_language": "en_XX"}),  # whose layers are told languages
        ("JinaEmbeddingsV3Model", {**_BERT, "max_position_embeddings": 64, "pad_token_id": 1}),  # pools by itself
    ],
)
def test_what_knows_where_a_token_stands(name: str, values: dict[str, Any]) -> None:
    model = made(name, {name: values}).train()
    given = given_of("right")
    want, _ = step(model, given)
    bastile.apply()
    for _ in range(2):
        got, _ = step(model, given)
    assert ran()[0] == 0
    rows = MASKS["right"].bool()
    torch.testing.assert_close(got[rows], want[rows], rtol=1e-4, atol=1e-5)


def test_what_dropout_draws() -> None:
    """Weights are dropped side by side too, others with each seed."""
    model = model_of("BertModel")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    given = given_of("right")
    labels = torch.where(MASKS["right"] == 1, 0, padding.IGNORED)
    bastile.apply()
    step(model, given)
    ran()
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        with padding.read_by(labels):
            found.append(model(**given).last_hidden_state.detach())
    assert ran() == (3, 3 * model.config.num_hidden_layers)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("type_", [torch.bfloat16, torch.float32])
def test_as_accurate_as_stock(type_: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, and under autocast, against float64: errors of many elements. With what a Trainer adds."""
    monkeypatch.undo()
    monkeypatch.setattr(side_by_side, "_LEAST_STEP", 2)
    exact, given = model_of("BertModel", DEVICE).double(), given_of("both", device=DEVICE)
    want, _ = step(exact, given)
    model, rows = copy.deepcopy(exact).to(type_), MASKS["both"].bool()
    given["num_items_in_batch"] = torch.tensor(3, device=DEVICE)
    errors = []
    for patched in (False, True):
        if patched:
            bastile.apply()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=type_ is torch.float32):
            for _ in range(2):
                got, _ = step(model, given)
        errors.append((got.double() - want)[rows].square().mean().sqrt().item())
    assert ran()[0] == 1
    assert errors[1] <= 1.15 * errors[0]  # of few samples: errors themselves are judged in test_attention_both_ways.py


@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel"])
@pytest.mark.parametrize("reads", [True, False], ids=["unread", "read"])
def test_few_kinds_of_steps_with_graphs(name: str, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the numbers of steps without."""
    allow_graphs(monkeypatch)
    monkeypatch.setattr(side_by_side, "_LEAST_STEP", 16)
    model = model_of(name, DEVICE)
    batches = []
    for i in range(24):
        drawn = torch.Generator().manual_seed(i)
        lengths = torch.randint(6, 30, (4,), generator=drawn)
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        batches.append(given_of("", mask, DEVICE))
    found: list[list[Any]] = []
    for graphs in (False, True):
        bastile.apply(cuda_graphs=graphs)
        counted()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=ON_CUDA):  # where there is no attention of float32
            found.append([step(model, given, reads, of_tokens=True) for given in batches])
        replayed, why = counted()
        assert (replayed >= 12) == graphs, why
    near = {"rtol": 0.0, "atol": 3e-2 if ON_CUDA else 1e-4}  # flash attention sums up in no fixed order
    for (got, grads), (want, want_grads), given in zip(*found, batches, strict=True):
        rows = given["attention_mask"].bool()
        torch.testing.assert_close(got[rows], want[rows], **near)
        for key, gradient in want_grads.items():
            scale = max(gradient.abs().max().item(), 1.0)
            torch.testing.assert_close(grads[key] / scale, gradient / scale, **near)
    kinds = [len(stack.captured) for stack in _stacks.values() if stack.captured]
    assert kinds
    assert max(kinds) <= 8


@pytest.mark.parametrize(("more", "served"), [("", 1), ("at = torch.arange(len(hidden_states))", 0)])
def test_layers_that_count(more: str, served: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"counts_{served}"
    (tmp_path / f"{name}.py").write_text(f"""
import torch
from torch import nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

class Layer(nn.Module):
    def forward(self, hidden_states, attention_mask=None):
        {more}
        attention_interface = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return attention_interface(self, hidden_states, hidden_states, hidden_states, attention_mask)

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList([Layer()])

    def forward(self, hidden_states, attention_mask=None):
        for each in self.layer:
            hidden_states = each(hidden_states, attention_mask)
        return hidden_states

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Stack()

    def forward(self, hidden_states, attention_mask=None):
        mask = create_bidirectional_mask(config=None, inputs_embeds=hidden_states, attention_mask=attention_mask)
        return self.encoder(hidden_states, attention_mask=mask)
""")
    monkeypatch.syspath_prepend(tmp_path)
    file = ModelFile(name, __import__(name))
    found = encoders_of(file)
    assert [cls.__name__ for cls in found] == ["Model"]
    assert len(list(encoders.stacks(file, *found))) == served


# ---- code ------------------------------------------------------------------------------------------------------------

STACK = """
class Stack:
    def forward(self, hidden_states, attention_mask=None, **kwargs):
        for i, layer in enumerate(self.layer):
            hidden_states = layer(hidden_states, attention_mask, **kwargs)
        return Output(last_hidden_state=self.norm(hidden_states))
"""
ATTENTION = """
class Attention:
    def forward(self, hidden_states, attention_mask=None):
        attention_mask = attention_mask if self.own else self.other
        return attention_interface(self, self.dense(hidden_states), attention_mask)
"""
MODEL = """
class Model:
    def forward(self, input_ids, attention_mask=None):
        hidden = self.embeddings(input_ids)
        attention_mask, other = self.make(attention_mask=attention_mask)
        return self.encoder(hidden, attention_mask=attention_mask)
"""


class Layer(nn.Module):
    def forward(self, hidden_states: Any, attention_mask: Any = None) -> Any: ...


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Layer() for _ in range(2)])
        self.norm = nn.LayerNorm(4)

    def count(self) -> Any: ...

    def forward(self, hidden_states: Any, attention_mask: Any = None) -> Any: ...


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)


def create_bidirectional_mask(**given: Any) -> Any: ...


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack()
        self.embeddings = nn.Embedding(4, 4)

    def make(self, attention_mask: Any) -> Any:
        mask = create_bidirectional_mask(attention_mask=attention_mask)
        return mask, None


@pytest.mark.parametrize(
    ("old", "new", "served"),
    [
        ("", "", True),
        ("self.norm(hidden_states)", "hidden_states", True),
        ("self.norm(hidden_states)", "hidden_states.mean(1)", False),
        ("self.norm(hidden_states)", "self.count(hidden_states)", False),
        ("self.norm(hidden_states)", "self.norm(hidden_states), other=hidden_states", False),
        ("self.norm(hidden_states)", "self.norm(hidden_states, attention_mask)", False),
        ("hidden_states, attention_mask, **kwargs)\n", "hidden_states, hidden_states)\n", False),
        ("for i,", "kwargs['n'] = hidden_states.shape[1]\n        for i,", False),
        ("hidden_states = layer(", "hidden_states = other(", False),
        ("enumerate(self.layer)", "enumerate(layers)", False),
        (
            "hidden_states = layer(hidden_states, attention_mask, **kwargs)",
            "out = layer(hidden_states)\n            hidden_states = out[0]",
            True,
        ),
        (
            "hidden_states = layer(hidden_states, attention_mask, **kwargs)",
            "out = layer(hidden_states)\n            hidden_states = out[1]",
            False,
        ),
    ],
)
def test_what_becomes_of_hidden_states(old: str, new: str, served: bool) -> None:
    _, code = changed_forward(STACK, old, new)
    assert encoders._takes_hidden_through_layers(code, Stack) is (served or None)


@pytest.mark.parametrize(
    ("text", "cls", "old", "new", "served"),
    [
        (STACK, Stack, "", "", True),
        (STACK, Stack, "hidden_states, attention_mask, **", "hidden_states, None, attention_mask, **", False),
        (STACK, Stack, "hidden_states, attention_mask, **", "hidden_states, attention_mask=attention_mask, **", True),
        (STACK, Stack, "self.norm(hidden_states)", "self.norm(hidden_states * attention_mask)", False),
        (STACK, Stack, "self.norm(hidden_states)", "self.count(attention_mask=attention_mask)", False),
        (ATTENTION, Attention, "", "", True),
        (ATTENTION, Attention, "attention_interface(", "attend(", False),
        (ATTENTION, Attention, "self.own else", "attention_mask.any() else", False),
        (ATTENTION, Attention, "self.dense(hidden_states)", "self.dense(hidden_states, attention_mask)", False),
    ],
)
def test_what_becomes_of_a_mask(text: str, cls: Any, old: str, new: str, served: bool) -> None:
    _, code = changed_forward(text, old, new)
    assert mask_flow.hands_mask_to_modules(code, cls) is (served or None)


@pytest.mark.parametrize(
    ("old", "new", "served"),
    [
        ("", "", True),
        ("attention_mask, other = self.make(attention_mask=attention_mask)", "other = attention_mask", False),
        (
            "attention_mask, other = self.make(attention_mask=attention_mask)",
            "attention_mask = create_bidirectional_mask(attention_mask=attention_mask)",
            True,
        ),
        ("hidden, attention_mask=", "hidden * attention_mask, attention_mask=", False),
        ("self.encoder(hidden, attention_mask=", "self.encoder(hidden, mask=", False),
        ("self.encoder(hidden, attention_mask=", "self.encoder(hidden, ", True),
        ("self.encoder(hidden, attention_mask=", "self.encoder(hidden, None, ", False),
        ("return self.encoder(", "return attention_mask, self.encoder(", False),
    ],
)
def test_what_becomes_of_masks_that_are_made(old: str, new: str, served: bool) -> None:
    _, code = changed_forward(MODEL, old, new)
    assert mask_flow.hands_masks_to_modules(code, Model) is (served or None)


@pytest.mark.skipif(older_than("5.24"), reason="of the newest release")
def test_files() -> None:
    """Of Transformers' own."""
    known = {"bert": True, "roberta": True, "modernbert": True, "esm": False, "t5": False, "mpnet": False}
    for name, served in known.items():
        module = getattr(__import__(f"transformers.models.{name}.modeling_{name}").models, name)
        file = ModelFile(f"transformers.models.{name}.modeling_{name}", getattr(module, f"modeling_{name}"))
        assert bool(encoders_of(file)) == served, name


def test_a_method_of_a_class_without_a_forward_makes_masks_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom it hands them to is not seen."""
    text = """
from torch import nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

class Layer(nn.Module):
    def forward(self, hidden_states, attention_mask=None):
        attention_interface = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return attention_interface(self, hidden_states, hidden_states, hidden_states, attention_mask)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, hidden_states, attention_mask=None):
        mask = create_bidirectional_mask(config=None, inputs_embeds=hidden_states, attention_mask=attention_mask)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=mask)
        return hidden_states
"""
    other = """
class Other(nn.Module):
    def mask(self, x, attention_mask):
        return create_bidirectional_mask(config=None, inputs_embeds=x, attention_mask=attention_mask)
"""
    monkeypatch.syspath_prepend(tmp_path)
    for name, more, served in (("alone_here", "", True), ("with_another", other, False)):
        (tmp_path / f"{name}.py").write_text(text + more)
        file = ModelFile(name, __import__(name))
        assert bool(encoders_of(file)) == served


@pytest.mark.skipif(older_than("5.17"), reason="there encoders have other code")
@pytest.mark.parametrize(("kind", "passes"), [("right", 1), ("left", 0)])
@pytest.mark.parametrize("name", ["BertLMHeadModel", "RobertaForCausalLM", "ErnieForCausalLM"])
def test_the_token_that_comes_next_is_read_off_padding(name: str, kind: str, passes: int) -> None:
    """A head of causal models upon an encoder, which is no decoder: a first token's label is that of the row before."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = small.prepared(cls(small.small_config(cls.config_class.model_type)))
    given = given_of(kind)
    given["labels"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, padding.IGNORED)

    def trained() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = model(**given).loss
        loss.backward()
        return loss.detach(), gradients(model)

    want, want_grads = trained()
    bastile.apply()
    trained()
    ran()
    got, grads = trained()
    assert ran()[0] == passes
    assert_same_up_to_rounding(got, want, model, "loss")
    _assert_same_gradients(grads, want_grads)
