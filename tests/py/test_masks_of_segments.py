"""Models whose batches have padding, sequences side by side or windows: stock's numbers, without stock's masks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import bastile
from bastile.graphs import unread
from bastile.models import mask_flow, padding, sdpa, small
from bastile.models import masked_attention as of_models
from bastile.models.sites import file_of
from bastile.models.table import OPERATORS
from conftest import assert_same_up_to_rounding, gradients, older_than, tiny_model
from graphing import DEVICE, allow_graphs, counted
from oracle import devices
from padded import BACKBONE, LAYERS, MASKS, ROWS, changed_forward
from test_graphs_lengths import LENGTHS, assert_close, trained
from test_graphs_lengths import PADDED as REPLAYED
from test_model_types import error_of

POSITIONS = torch.cat([torch.arange(5), torch.arange(9), torch.arange(3)]).expand(3, -1)
KINDS = [*MASKS, "packed", "ones"]
#: Of each kind of code: one mask, two by a dictionary or by a name, windows, layers with a state, texts of images.
TYPES = ["llama", "qwen2", "qwen3_moe", "mistral", "gemma3_text", "phi3", "cohere2", "gpt_neox", "dots1"]
TYPES += [] if older_than("5.17.0") else ["qwen3_5_text", "smollm3", "olmo3", "lfm2"]
TYPES += ["deepseek_v3", *([] if older_than("5.6.0") else ["gemma4_text"])]  # values narrower than keys; shared ones
WINDOW = {"sliding_window": 6}
GEMMA_4 = ["sliding_attention", "full_attention"] * 2


@pytest.fixture(autouse=True)
def any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32 too, which shows what is computed to seven digits."""
    monkeypatch.setattr(sdpa, "TYPES", (*sdpa.TYPES, torch.float32))


def batch(kind: str, reads_padding: bool = False) -> dict[str, Any]:
    ids = torch.arange(3 * 17).view(3, 17) * 7 % 90 + 3
    mask = MASKS.get(kind, torch.ones(3, 17, dtype=torch.long))
    labels = ids if reads_padding else ids.masked_fill(mask == 0, -100)
    given = {"input_ids": ids, "labels": labels, "attention_mask": mask, "use_cache": False}
    if kind == "packed":
        given |= {"attention_mask": None, "position_ids": POSITIONS}
    return given


def step(model: Any, given: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    output = model(**{name: t.to(model.device) if isinstance(t, torch.Tensor) else t for name, t in given.items()})
    output.loss.backward()
    return output.loss.detach(), gradients(model), output.logits.detach()


def ran() -> tuple[int, int, dict[str, int]]:
    """Attentions, masks that were left out, and why others stepped aside."""
    lines = [line for line in bastile.report(reset=True) if line.operator == "masked_attention"]
    counts = [sum(line.ran for line in lines if line.where.endswith(name)) for name in ("_forward", "_mask")]
    return *counts, {why: n for line in lines for why, n in line.aside.items()}  # type: ignore[return-value]


def assert_as_stock(
    model: Any, given: dict[str, Any], rows: torch.Tensor, **how: Any
) -> tuple[int, int, dict[str, int]]:
    """The loss, gradients and the logits of these rows. What ran."""
    want, want_grads, want_logits = step(model, given)
    bastile.apply(**how)
    ran()
    got, grads, logits = step(model, given)
    found = ran()
    bastile.reset()
    assert_same_up_to_rounding(got, want, model, "loss")
    assert grads.keys() == want_grads.keys()
    for name, gradient in want_grads.items():
        assert_same_up_to_rounding(grads[name], gradient, model, name)
    assert_same_up_to_rounding(logits[rows], want_logits[rows], model, "logits")
    return found


def model_of(model_type: str) -> Any:
    config = small.small_config(model_type)
    windows = WINDOW if getattr(config, "sliding_window", None) else {}
    return small.small_model(model_type, **windows).train()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", TYPES)
def test_any_padding(model_type: str, kind: str) -> None:
    attentions, left_out, aside = assert_as_stock(model_of(model_type), batch(kind), MASKS.get(kind, ROWS >= 0) != 0)
    assert not aside
    assert attentions + left_out > 0 or kind == "ones"
    assert left_out == 0 or kind in ("right", "both")


@pytest.mark.every_type
@pytest.mark.parametrize("model_type", small.causal_types())
def test_every_type(model_type: str) -> None:
    for kind in ("right", "left", "both", "packed"):
        try:
            model = model_of(model_type)
            step(model, batch(kind))
        except Exception as error:
            pytest.skip(
                f"{model_type} cannot: {type(error).__name__}"
            )  # whatever one may raise that has no such batches
        want, want_grads, _ = step(model, batch(kind))
        bastile.apply()
        ran()
        got, grads, _ = step(model, batch(kind))
        found = ran()
        bastile.reset()
        if not any(found[:2]):
            pytest.skip(f"{model_type} is not served")
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert error_of(grads, want_grads) < 1e-4, kind


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["right", "both"])
def test_losses_that_read_padding(model_type: str, kind: str) -> None:
    """Labels that are the tokens, padding's too, as some have them: all rows have the numbers that a mask gives them.
    (What stands before sequences sees nothing: no two kernels of PyTorch's agree on that.)"""
    given = batch(kind, reads_padding=True)
    given["labels"] = given["labels"].masked_fill(MASKS[kind].cumsum(1) == 0, -100)
    attentions, left_out, _ = assert_as_stock(model_of(model_type), given, MASKS[kind].cumsum(1) != 0)
    assert not left_out
    assert (attentions > 0) == (model_type != "mistral")  # whose windows are shorter than the sequences


def test_other_losses_and_none() -> None:
    """Where nothing says which rows are read, all are as they were."""
    model, given = tiny_model(num_hidden_layers=3), batch("right")
    others = given["labels"].masked_fill(given["labels"] == -100, -1)
    for labels, how in ((None, {}), (others, {"ignore_index": -1})):
        bastile.reset()
        with torch.no_grad():
            more = {**given, "labels": labels, **how}
            want = model(**more).logits
            bastile.apply()
            ran()
            assert_same_up_to_rounding(model(**more).logits, want, model, "logits")
            assert ran()[:2] == (3, 0)


def test_a_mask_of_ours_is_of_this_step() -> None:
    """One batch after another, of other padding and none."""
    model = tiny_model()
    for kind in ("right", "ones", "left", "packed", "both", "right"):
        assert_as_stock(model, batch(kind), MASKS.get(kind, ROWS >= 0) != 0)


def hole(given: dict[str, Any]) -> None:
    given["attention_mask"] = given["attention_mask"].clone()
    given["attention_mask"][1, 6] = 0
    given["labels"] = given["labels"].masked_fill(given["attention_mask"] == 0, -100)


def own(given: dict[str, Any]) -> None:
    causal = torch.ones(17, 17, dtype=torch.bool).tril()
    given["attention_mask"] = (causal & (MASKS["right"] != 0)[:, None])[:, None]


def nothing(given: dict[str, Any]) -> None:
    given["attention_mask"] = given["attention_mask"].clone()
    given["attention_mask"][0] = 0
    given["labels"] = given["labels"].masked_fill(given["attention_mask"] == 0, -100)


@pytest.mark.parametrize("change", [hole, own, nothing])
def test_masks_that_segments_cannot_say(change: Any) -> None:
    given = batch("right")
    change(given)
    read = given["labels"] != -100
    assert assert_as_stock(tiny_model(), given, read) == (0, 0, {})


def test_weights_are_dropped_as_often_as_by_stock() -> None:
    """Others: the losses of many draws have the same mean."""
    model = tiny_model(attention_dropout=0.5)

    def losses() -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([model(**batch("left")).loss for _ in range(100)]).double()

    want = losses()
    bastile.apply(padding_free=False)
    got = losses()
    assert ran()[0] == 100 * model.config.num_hidden_layers
    assert (got.mean() - want.mean()).abs() < 4 * ((got.var() + want.var()) / 100).sqrt()
    assert got.unique().numel() > 90


@pytest.mark.skipif(older_than("5.23"), reason="its last layers have all queries")
@pytest.mark.parametrize("keep", [0, 1, 2, 5, torch.tensor([3, 4, 9])], ids=str)
@pytest.mark.parametrize("kind", ["right", "left", "both", "ones"])
def test_the_last_queries_of_a_mask(kind: str, keep: Any) -> None:
    """Gemma 4's layers that share keys and values are given those tokens alone whose logits are kept."""
    model = small.small_model("gemma4_text", num_hidden_layers=4, num_kv_shared_layers=2, layer_types=GEMMA_4).train()
    given = {**batch(kind), "logits_to_keep": keep}
    del given["labels"]

    def logits() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        output = model(**given).logits
        output.square().mean().backward()
        return output.detach(), gradients(model)

    want, want_grads = logits()
    bastile.apply()
    for _ in range(2):  # in the second batches may go through the layers without their padding
        ran()
        got, grads = logits()
        attentions, _, aside = ran()
        if kind != "ones" or not isinstance(keep, int) or not keep:
            assert set(aside) == ({sdpa._OF_LAST} if isinstance(keep, int) and keep else set())
        assert attentions > 0 or kind == "ones"
        real = torch.ones_like(got[..., :1], dtype=torch.bool)
        if kind != "ones":
            rows = MASKS[kind] != 0
            real = (rows[:, keep] if isinstance(keep, torch.Tensor) else rows[:, -keep:])[..., None]
        assert_same_up_to_rounding(got * real, want * real, model, "logits")
        if bool(real.all()):
            for name, gradient in want_grads.items():
                assert_same_up_to_rounding(grads[name], gradient, model, name)


def test_float32_is_stock_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert assert_as_stock(tiny_model(), batch("left"), MASKS["left"] != 0) == (0, 0, {})


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_other_implementations_keep_their_masks(implementation: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(implementation)
    bastile.apply()
    ran()
    with torch.no_grad():
        model(**{**batch("left"), "labels": None})
    assert ran() == (0, 0, {})


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["left", "both", "packed"])
def test_checkpoints(reentrant: bool, kind: str) -> None:
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert assert_as_stock(model, batch(kind), MASKS.get(kind, ROWS >= 0) != 0) == (4, 0, {})


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["left", "both", "packed"])
def test_in_bfloat16_and_under_autocast(device: str, autocast: bool, kind: str) -> None:
    """One model alone, beside one that stays as it is; logits as near to float32's as stock's."""
    read, squares = (MASKS.get(kind, ROWS >= 0) != 0).to(device), [0.0, 0.0]
    alone = {name: name == "masked_attention" for name, operator in OPERATORS.items() if operator.of_a_model}
    for seed in range(6):
        torch.manual_seed(seed)
        wide = tiny_model().to(device)
        exact = step(wide, batch(kind))[2]
        model, other = (copy.deepcopy(wide).to(torch.float32 if autocast else torch.bfloat16) for _ in range(2))
        assert bastile.apply_to_model(model, **alone) == ["masked_attention_qwen3"]
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            ran()
            got = step(model, batch(kind))[2]
            assert ran()[0] == 2
            want = step(other, batch(kind))[2]
            assert ran()[0] == 0
        for i, each in enumerate((got, want)):
            squares[i] += (each.float() - exact)[read].square().mean().item()
    assert squares[0] <= 1.3 * squares[1]  # of few samples: errors themselves are judged in test_masked_attention.py


def test_text_is_the_same() -> None:
    """The prompt by ours, each token after it, with a cache, by the original."""
    model = tiny_model().eval()
    ids = torch.arange(2 * 9).view(2, 9) + 3
    given = {"max_new_tokens": 12, "do_sample": False, "attention_mask": MASKS["left"][:2, 5:14]}
    want = model.generate(ids, **given)
    bastile.apply()
    ran()
    assert torch.equal(model.generate(ids, **given), want)
    assert ran() == (2, 0, {})


def test_nothing_is_asked_for_each_token_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host would wait for it, and a graph of a token's call could not be captured."""
    model, asked = tiny_model().eval(), []
    bastile.apply()
    stock = of_models._padding
    monkeypatch.setattr(of_models, "_padding", lambda given: asked.append(given) or stock(given))
    given = {"max_new_tokens": 5, "do_sample": False, "attention_mask": MASKS["left"][:2, 5:14]}
    model.generate(torch.arange(2 * 9).view(2, 9) + 3, **given)
    assert len(asked) == 1


def test_what_is_registered_goes() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stock = bastile.guards.stock_of(ALL_ATTENTION_FUNCTIONS["sdpa"])
    assert_as_stock(tiny_model(), batch("left"), MASKS["left"] != 0)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is stock
    assert sdpa.MASKS not in ALL_MASK_ATTENTION_FUNCTIONS
    model = tiny_model()
    bastile.apply_to_model(model)
    assert step(model, batch("left"))[0].isfinite()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not stock
    bastile.reset()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is stock


@pytest.mark.parametrize("scope", ["_local_mapping", "_global_mapping"])
@pytest.mark.parametrize("is_own", [False, True])
def test_an_attention_of_a_user_s_under_the_name(scope: str, is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the masks that it always has; Transformers' own, assigned anew, is served."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stock, masks = bastile.guards.stock_of(ALL_ATTENTION_FUNCTIONS["sdpa"]), []

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        masks.append(attention_mask)
        return stock(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.delitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", raising=False)  # of another test's
    monkeypatch.setitem(getattr(ALL_ATTENTION_FUNCTIONS, scope), "sdpa", attend if is_own else stock)
    attentions = assert_as_stock(tiny_model(), batch("left"), MASKS["left"] != 0)[0]
    assert attentions == (0 if is_own else 2)
    assert all(mask.dtype is torch.bool for mask in masks)


# ---- what nobody reads -----------------------------------------------------------------------------------------------


def test_what_is_taken_for_granted_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass as if nobody read padding, and again where somebody does; from then on that is known of the model."""
    monkeypatch.setattr(padding, "_is_counted_later", lambda target: True)
    mask, model, passes = MASKS["right"], nn.Identity(), []

    def run() -> int:
        passes.append(padding.is_unread(mask))
        return len(passes)

    target = torch.where(mask != 0, 1, padding.IGNORED)
    assert padding.assumed(model, mask, target, run) == 1
    assert padding.assumed(model, mask, torch.ones_like(mask), run) == 3
    assert padding.assumed(model, mask, target, run) == 4
    assert passes == [True, True, False, True]
    assert not padding.is_unread(mask)
    assert padding.assumed(model, mask, torch.ones_like(mask), run) == 5
    assert not passes[-1]
    assert padding.assumed(model, None, target, run) == 6


def test_labels_that_are_not_of_these_rows() -> None:
    mask = MASKS["right"]
    for labels in (torch.full((3,), -100), torch.full((2, 17), -100), torch.full((3, 18), -100), torch.zeros(3, 17)):
        with padding.read_by(labels):
            assert not padding.is_unread(mask)
    with padding.read_by(torch.full((3, 14), -100)):  # of a batch that was made longer
        assert padding.is_unread(mask)
    assert not padding.is_unread(mask)


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch)


@pytest.mark.parametrize("mask", ["right", "left", "packed"])
def test_lengths_that_vary(graphs: None, mask: str) -> None:
    model = tiny_model()
    want = trained(model, False, mask)
    ran()
    got = trained(model, True, mask)
    lines = list(bastile.report(reset=True))
    assert_close(got, want)
    graphs_of = [line for line in lines if line.operator == "cuda_graphs"]
    assert sum(line.ran for line in graphs_of) >= REPLAYED - 2
    assert not any(line.aside for line in graphs_of)
    # Each batch's mask, longer ones too, was one of ours or none, or it went through without its padding.
    left_out = sum(line.ran for line in lines if line.where.endswith("sdpa_mask") or line.operator == "padding_free")
    assert left_out == (len(LENGTHS) if mask == "right" else 0)


def test_what_tells_sequences_apart_for_others_makes_no_kinds(graphs: None) -> None:
    """As TRL's collator has it: for FlashAttention where they begin, for layers with a state of which a token is."""
    model = tiny_model().to(DEVICE).train()
    bastile.apply(cuda_graphs=True)
    counted()
    for number in range(8):
        cut = 5 + number
        ids = torch.arange(1, 33, device=DEVICE)[None]
        positions = torch.cat((torch.arange(cut), torch.arange(32 - cut)))[None].to(DEVICE)
        begins = torch.tensor([0, cut, 32], dtype=torch.int32, device=DEVICE)
        more = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": 32 - cut, "max_length_k": 32 - cut}
        more["seq_idx"] = (positions == 0).cumsum(1).int() - 1
        model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False, **more).loss.backward()
        model.zero_grad()
    replayed, aside = counted()
    assert replayed >= 5
    assert not aside


def test_what_is_read_stays() -> None:
    class Reads(nn.Module):
        def forward(self, x: Any, **kwargs: Any) -> Any:
            return x, kwargs.get("seq_idx")

    given = {"position_ids": 0, "seq_idx": 1, "cu_seq_lens_q": 2, "input_ids": 3}
    config = tiny_model().config
    assert unread.without(given, config, [nn.Linear(2, 2)]) == {"position_ids": 0, "input_ids": 3}
    assert unread.without(given, config, [nn.Sequential(Reads())]) is given
    assert unread.without({**given, "position_ids": None}, config, []) == {**given, "position_ids": None}
    config._attn_implementation_internal = "flash_attention_2"
    assert unread.without(given, config, []) is given


# ---- what becomes of masks -------------------------------------------------------------------------------------------

ONE = """
class Backbone:
    def forward(self, x, attention_mask):
        make = create_causal_mask if self.window is None else create_sliding_window_causal_mask
        attention_mask = make(x, attention_mask=attention_mask)
        for i, layer in enumerate(self.layers):
            x = layer(x, attention_mask=attention_mask)
        return x
"""


@pytest.mark.parametrize(
    ("text", "old", "new", "is_served"),
    [
        (BACKBONE, "", "", True),
        (BACKBONE, "return x", "return x + masks['full']", False),
        (BACKBONE, "attention_mask=masks[", "mask=masks[", False),
        (BACKBONE, "attention_mask=masks[layer.kind]", "attention_mask=masks", False),
        (BACKBONE, "masks[layer.kind]", "masks.get(layer.kind)", True),
        (BACKBONE, "masks[layer.kind]", "masks.pop(layer.kind)", False),
        (BACKBONE, "return x", "return x + masks.get('full')", False),
        (BACKBONE, "return x", "return x, masks.get", False),
        (BACKBONE, "x = layer(", "x = self.first(", False),
        (BACKBONE, "return x", "return x, create_causal_mask(x)", False),
        (BACKBONE, "for layer", "masks['full'] = masks['full'].float()\n        for layer", False),
        (BACKBONE, "for layer", "masks['more'] = create_causal_mask(x)\n        for layer", True),
        (
            BACKBONE,
            "for layer",
            "masks = {k: None if m is None else m for k, m in masks.items()}\n        for layer",
            False,
        ),
        (ONE, "", "", True),
        (ONE, "return x", "return attention_mask", False),
        (ONE, "x = layer(x, ", "x = layer(x, attention_mask, ", False),
        (ONE, "make(x, attention_mask=", "make(x, mask=", False),
        (ONE, "for i", "attention_mask = attention_mask[:, :, -1:]\n        for i", False),
        *LAYERS,
    ],
)
def test_masks_that_go_elsewhere(text: str, old: str, new: str, is_served: bool) -> None:
    """Where anything but the attention would see a mask of ours, there is none."""
    name, code = changed_forward(text, old, new)
    asked = mask_flow.hands_masks_out if name == "Backbone" else mask_flow.hands_mask_on
    assert bool(asked(code)) == is_served


def test_which_files_are_served() -> None:
    for name, is_served in (
        ("llama", True),
        ("gpt_oss", False),
        ("bart", True),
        ("t5", False),
        ("gpt2", False),
        ("qwen3_vl", True),
    ):
        file = file_of(f"transformers.models.{name}.modeling_{name}")
        if file.module is None:
            __import__(file.name)
            file = file_of(file.name)
        found = [site.where for site in of_models.sites(file)]
        assert bool(found) == is_served, (name, file.unknown)


def test_what_is_not_served_says_why() -> None:
    from bastile.models.support import support

    told = list(support("gpt2").stock.get("masked_attention", {}).values())
    assert told == ["stay: GPT2Model.forward is not known to hand them to its layers alone"]
