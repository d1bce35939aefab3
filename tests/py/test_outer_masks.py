"""Models of images whose masks are left to their text model: stock's numbers, without masks of all pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import bastile
from bastile.host_copies import remember
from bastile.models import forms, outer_masks, sdpa, side_by_side, small, support
from conftest import assert_same_up_to_rounding, older_than
from padded import MASKS
from test_masks_of_segments import KINDS, batch, step
from test_padding_free import of_kind

ALL = ("gemma3", "gemma4", "gemma4_unified")
TYPES = [each for each in ALL if not older_than("5.17") and each in CONFIG_MAPPING]
#: Of which the smaller ones have no image whose tokens see each other.
BOTH_WAYS = ("gemma4, both ways", "gemma4_unified")
NAMES = {"gemma3": "token_type_ids"}  # of the others: mm_token_type_ids
pytestmark = pytest.mark.skipif(not TYPES, reason="other ways of making masks")


@pytest.fixture(autouse=True)
def any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32 too, which shows what is computed to seven digits, and of few tokens."""
    monkeypatch.setattr(sdpa, "TYPES", (*sdpa.TYPES, torch.float32))
    monkeypatch.setattr(side_by_side, "_LEAST_STEP", 2)


def model_of(model_type: str) -> Any:
    torch.manual_seed(0)
    config = small.small_config(model_type.partition(",")[0])
    if model_type in BOTH_WAYS or model_type == "gemma4":
        config.get_text_config().use_bidirectional_attention = "vision" if model_type in BOTH_WAYS else None
    return AutoModelForCausalLM.from_config(config).train()


def given_of(model_type: str, kind: str, types: str | None) -> dict[str, Any]:
    """types: None, or of text alone, or of images, whose tokens see each other."""
    given = of_kind(kind)
    if types is not None:
        of_tokens = torch.zeros_like(given["input_ids"])
        of_tokens[:, 6:9] = types == "images"
        given[NAMES.get(model_type, "mm_token_type_ids")] = of_tokens
    return given


def ran(where: str) -> int:
    return sum(line.ran for line in bastile.report() if line.where.endswith(where))


@pytest.mark.parametrize("types", [None, "text", "images"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", [*TYPES, *(BOTH_WAYS[:1] if "gemma4" in TYPES else ())])
def test_masks_are_those_of_the_text_model(model_type: str, kind: str, types: str | None) -> None:
    model, given = model_of(model_type), given_of(model_type, kind, types)
    real = given["attention_mask"] != 0 if kind in MASKS else torch.ones(3, 17, dtype=torch.bool)
    want, want_grads, want_logits = step(model, given)
    bastile.apply()
    for passed in range(2):  # the second without padding
        bastile.report(reset=True)
        got, grads, logits = step(model, given)
        assert_same_up_to_rounding(got, want, model.model.language_model, "loss")
        for name, gradient in want_grads.items():
            assert_same_up_to_rounding(grads[name], gradient, model.model.language_model, name)
        assert_same_up_to_rounding(logits[real], want_logits[real], model.model.language_model, "logits")
        is_left = types != "images" or model_type not in ("gemma3", *BOTH_WAYS)
        assert ran("Model") - ran("TextModel") == is_left
        assert ran("TextModel") >= (passed == 1 and is_left and kind in MASKS)
        assert bastile.report().ran("padding_free") == (passed == 1 and is_left and kind in MASKS)


@pytest.mark.parametrize("model_type", TYPES)
def test_what_masks_are_made_of_changes(model_type: str) -> None:
    """A mask that is made already, a text model of another class or configuration: as ever."""
    model, given = model_of(model_type), batch("left")
    bastile.apply()
    step(model, given)
    assert ran("Model") == 1
    bastile.report(reset=True)
    length, text = given["input_ids"].shape[1], model.model.language_model
    of_pairs = torch.ones(length, length).tril().bool().expand(3, 1, -1, -1)
    step(model, {**given, "attention_mask": of_pairs})
    assert ran("Model") == 0
    other, text.config = text.config, small.small_config(model_type).get_text_config()
    step(model, given)
    assert ran("Model") == 0
    text.config = other
    text.__class__ = type("Own", (type(text),), {})
    step(model, given)
    assert ran("Model") == 0


@pytest.mark.parametrize("model_type", TYPES)
def test_generation(model_type: str) -> None:
    model = model_of(model_type).eval()
    given = {name: batch("left")[name] for name in ("input_ids", "attention_mask")}
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    want = model.generate(**given, **how)
    bastile.apply()
    assert torch.equal(model.generate(**given, **how), want)


@pytest.mark.parametrize("model_type", TYPES)
def test_one_model_and_none(model_type: str) -> None:
    model, other, given = model_of(model_type), model_of(model_type), batch("left")
    forward = type(model.model).forward
    bastile.apply_to_model(model)
    step(other, given)
    assert ran("Model") == 0
    step(model, given)
    assert ran("Model") == 1
    bastile.reset()
    bastile.apply()
    bastile.reset()
    assert type(model.model).forward is forward
    bastile.report(reset=True)
    step(model, given)
    assert ran("Model") == 0


def test_nobody_waits_for_what_types_say_of_images() -> None:
    """Unless the host knows them: a batch that has images is not of texts alone."""
    types = torch.zeros(2, 3, dtype=torch.long)
    assert outer_masks._is_of_text({"token_type_ids": types})
    remember(known := types.clone(), types)
    assert outer_masks._is_of_text({"token_type_ids": known, "pixel_values": torch.zeros(1)})
    assert not outer_masks._is_of_text({"token_type_ids": types, "pixel_values": torch.zeros(1)})
    assert not outer_masks._is_of_text({"token_type_ids": types + 1})
    assert outer_masks._is_of_text({"pixel_values": torch.zeros(1)})


@pytest.mark.parametrize("uses_cache", [False, True, None])
@pytest.mark.parametrize("model_type", TYPES)
def test_packed_positions_reach_the_text_model(model_type: str, uses_cache: bool | None) -> None:
    """Which does not ask them where it has made a cache for itself: then masks are the model's."""
    model, given = model_of(model_type), {**batch("packed"), "use_cache": uses_cache}
    model.config.get_text_config().use_cache = True
    want, *_ = step(model, given)
    (of_one, *_), whole = (
        step(model, {**given, "position_ids": None}),
        {**given, "position_ids": torch.arange(17)[None]},
    )
    assert abs(of_one - want) > 1e-3
    bastile.apply()
    got, *_ = step(model, given)
    assert_same_up_to_rounding(got, want, model.model.language_model, "loss")
    assert ran("Model") - ran("TextModel") == (uses_cache is False)
    assert_same_up_to_rounding(step(model, whole)[0], of_one, model.model.language_model, "loss")


OUTER = """
def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, token_type_ids=None, **kwargs):
    inputs_embeds = self.embedded(input_ids)
    if not isinstance(masks := attention_mask, dict):
        told = {
            "config": self.config.get_text_config(),
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "cache": cache,
            "position_ids": position_ids,
        }
        if token_type_ids is not None:
            blocks = blocks_of(token_type_ids)
            masks = create_masks_for_vision_model(block_sequence_ids=blocks, **told)
        else:
            masks = create_masks_for_generate(**told)
    return self.language_model(
        attention_mask=masks, position_ids=position_ids, cache=cache, inputs_embeds=inputs_embeds, **kwargs
    )
"""


def text_of(code: str) -> str | None:
    return outer_masks.text_model(forms.Source(code).function("forward"))


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ("    return self", "    self.seen(masks)\n    return self"),  # somebody else sees them
        ("    return self", "    masks = self.changed\n    return self"),
        ("attention_mask=masks", "attention_mask=attention_mask"),
        ("self.language_model(", "language_model("),
        ("return self.language_model(", "return self.other(attention_mask=masks) + self.language_model("),
        ("position_ids=position_ids, ", ""),  # of which masks are made
        ("cache=cache, ", "cache=self.cache, "),
        ("inputs_embeds=inputs_embeds, **kwargs", "inputs_embeds=2 * inputs_embeds, **kwargs"),
        ('"cache": cache', '"cache": cache, "and_mask_function": self.window'),
        ('"config": self.config.get_text_config()', '"config": self.config'),
        ('"attention_mask": attention_mask', '"attention_mask": attention_mask[:, 1:]'),
        ("create_masks_for_generate(**told)", "create_masks_for_generate(**told, or_mask_function=both)"),
        ("create_masks_for_generate(**told)", "create_masks_for_generate(**other)"),
        ("create_masks_for_generate(**told)", "create_masks_for_generate(self.config, **told)"),
        ("        if token_type_ids", '        told["or_mask_function"] = both\n        if token_type_ids'),
        ("        if token_type_ids", "        told.update(self.more)\n        if token_type_ids"),
        ("    inputs_embeds = self", "    attention_mask = attention_mask.flip(1)\n    inputs_embeds = self"),
        ("masks := attention_mask", "masks := position_ids"),
        (
            '            "position_ids": position_ids,\n        }',
            '            "position_ids": position_ids,\n        }\n        told = dict(told)',
        ),
    ],
)
def test_code_that_masks_are_left_to(now: str, then: str) -> None:
    assert text_of(OUTER) == "language_model"
    of_blocks = '        told["block_sequence_ids"] = self.blocks\n        if token_type_ids'
    assert text_of(OUTER.replace("        if token_type_ids", of_blocks)) == "language_model"
    assert now in OUTER
    assert text_of(OUTER.replace(now, then)) is None


def test_another_model_s_code_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_masks, "text_model", lambda _: None)
    told = support.support(TYPES[0]).stock["masked_attention"]
    assert "stay: its text model is not known to make the same" in told.values()
