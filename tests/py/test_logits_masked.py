"""Logits on demand in models whose labels are not those of next tokens: masked language models, pretraining with
several losses, translation, encoders with decoders of another type."""

from __future__ import annotations

import glob
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import bastile
from bastile.models import causal_lm, sdpa, small
from bastile.models.logits import serving
from bastile.models.logits.said import counts
from bastile.models.sites import file_of
from bastile.ops._valid_rows import ValidCount
from bastile.ops.fused_linear_cross_entropy import set_logits_memory
from conftest import gradients, older_than, on_demand, without_dropout
from test_encoder_heads import MASK, TOKENS, batch, model_of
from test_logits import Largest, made, ran
from test_logits_models import assert_same, stepped

#: Only the loss: others round otherwise.
ALONE: dict[str, Any] = {
    **dict.fromkeys(["rms_norm", "layer_norm", "swiglu", "rope", "masked_attention", "padding_free"], False),
    **dict.fromkeys(["moe_experts", "chunked_attention", "recompute", "cuda_graphs"], False),
}
#: What is built by a test of its own, wants what batches of text have not, or another number of labels than it gets.
APART = re.compile(
    r"Perceiver|VisualBert|Beit|Vilt|BridgeTower|ImageGPT|DoubleHeads|EncoderDecoder|Marian|SeamlessM4T|SpeechT5|Blip2"
    r"|Reformer|NeoMME|Esmc|Pix2Struct"
)
#: Its head is no linear layer: the transposed weights of two, side by side.
OF_THEIR_OWN = {"MobileBertForMaskedLM", "MobileBertForPreTraining"}
FILES = sorted(
    path
    for path in glob.glob(f"{os.path.dirname(transformers.__file__)}/models/*/modeling_*.py")
    if re.search(r"class \w+For(MaskedLM|PreTraining)\(\w+PreTrainedModel", Path(path).read_text())
)
SAMPLE = ("bert", "deberta_v2", "distilbert", "esm", "modernbert", "roberta")


@pytest.fixture(autouse=True)
def counted_from_here() -> Iterator[None]:
    counts.clear()
    yield
    set_logits_memory(None)


def classes_of(module: str) -> list[str]:
    """Those that are served in a file, but causal ones."""
    found = [site.stock_class.__name__ for site in causal_lm.sites(file_of(module))]
    return [name for name in found if not causal_lm._IS_CAUSAL.search(name)]


def assert_same_gradients(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """That of a key's bias is zero but for rounding, so the scale is at least a thousandth of all gradients'."""
    assert got.keys() == want.keys()
    top = max(gradient.abs().max().item() for gradient in want.values() if gradient.numel())
    for name, gradient in want.items():
        if gradient.numel():
            scale = max(gradient.abs().max().item(), 1e-3 * top)
            assert (got[name] - gradient).abs().max() <= 5e-5 * scale, name


def compared(model: Any, given: dict[str, Any]) -> Any:
    """A step as stock's, in which no logits of the vocabulary were made; its output."""
    stock, want = stepped(model, **given)
    _, repeated = stepped(model, **given)
    if not all(map(torch.equal, repeated.values(), want.values())):
        return None  # draws numbers of its own
    bastile.apply_to_model(model, **ALONE)
    patched, got = stepped(model, **given)
    bastile.reset(model=model)
    if type(model).__name__ not in OF_THEIR_OWN:
        assert (ran(), made()) == (1, 0), counts
        name = next(name for name in ("logits", "prediction_logits") if name in patched)
        assert on_demand(patched[name])
        assert_same(patched[name], stock[name], name)
    assert_same(patched.loss, stock.loss, "loss")
    assert_same_gradients(got, want)
    assert list(patched.keys()) == list(stock.keys())
    return patched


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=Path(path).stem, marks=[] if Path(path).parent.name in SAMPLE else pytest.mark.every_type)
        for path in FILES
    ],
)
def test_every_file(path: str) -> None:
    module = f"transformers.models.{Path(path).parent.name}.{Path(path).stem}"
    importlib.import_module(module)
    names = classes_of(module)
    defined = re.findall(r"^class (\w+ForMaskedLM)\(\w+PreTrainedModel", Path(path).read_text(), re.MULTILINE)
    assert set(defined) <= {*names}, "a masked language model that is not served"
    tried = []
    for name in names:
        if APART.search(name):
            continue
        model = without_dropout(model_of(getattr(sys.modules[module], name)))
        given = batch(model)
        given["labels"] = TOKENS.clone()
        counts.clear()
        if compared(model, given) is not None:
            tried.append(name)
    assert tried or Path(path).parent.name not in SAMPLE


def translator() -> Any:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.MarianConfig(
        vocab_size=100, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0, **sizes,
    )  # fmt: skip
    return transformers.MarianMTModel(config)


def two_berts() -> Any:
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        *[small.small_config("bert").__class__(**_BERT, is_decoder=d, add_cross_attention=d) for d in (False, True)]
    )
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return transformers.EncoderDecoderModel(config)


_BERT: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


_BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("made_by", [translator, two_berts])
def test_encoders_with_decoders(made_by: Any) -> None:
    torch.manual_seed(0)
    model = without_dropout(made_by())
    given = {"input_ids": TOKENS.clamp(min=3), "attention_mask": MASK, "labels": TOKENS.clone()}
    assert compared(model, given) is not None


def masked(name: str = "BertForMaskedLM", **more: Any) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return without_dropout(cls(cls.config_class(**{**_BERT, **more})))


def asked(rows: int = 8, length: int = 64) -> dict[str, torch.Tensor]:
    """Rows of which a seventh of the tokens is asked for, three with padding."""
    ids = torch.arange(rows * length).view(rows, length) * 31 % 90 + 5
    mask = torch.ones_like(ids)
    mask[1:4, length // 2 :] = 0
    ids = ids.masked_fill(mask == 0, 0)
    is_asked = (torch.arange(length) % 7 == 3) & (mask == 1)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~is_asked, -100)}


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BartForConditionalGeneration"])
def test_nothing_is_computed_of_rows_that_are_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are counted once, before the layers run."""
    counted: list[str] = []
    init = ValidCount.__init__

    def count(self: Any, target: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        counted.append("before" if not has_run else "behind")
        init(self, target, *args, **kwargs)

    model, given, has_run = masked(name, **(_BART if "Bart" in name else {})), asked(), []
    want = stepped(model, **given)[0]
    monkeypatch.setattr(ValidCount, "__init__", count)
    model.base_model.encoder.register_forward_hook(lambda *_: has_run.append(True))
    bastile.apply_to_model(model, **ALONE)
    with Largest() as largest:
        got = stepped(model, **given)[0]
    assert_same(got.loss, want.loss, "loss")
    assert counted == ["before"]
    assert largest.elements < 8 * 64 * 100 // 2


@pytest.mark.parametrize("name", ["BertForMaskedLM", "ModernBertForMaskedLM"])
def test_labels_that_are_changed_on_the_way(name: str) -> None:
    """What was counted is not of these."""

    class Later(getattr(transformers, name)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
            labels[:, ::2] = -100
            return super().forward(input_ids, attention_mask, labels=labels)

    given = asked()
    model = Later(masked(name, cls_token_id=1, sep_token_id=2, eos_token_id=2, bos_token_id=1).config)
    model = without_dropout(model)
    want = model(**{**given, "labels": given["labels"].clone()}).loss
    bastile.apply_to_model(model, **ALONE)
    got = model(**{**given, "labels": given["labels"].clone()}).loss
    assert_same(got, want, "loss")
    assert ran() == 1


@pytest.mark.skipif(older_than("5.17"), reason="there the layers of encoders are not served")
def test_with_padding_left_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "TYPES", (*sdpa.TYPES, torch.float32))
    model, given = masked(), asked()
    want, gradients_before = stepped(model, **given)
    bastile.apply_to_model(model, cuda_graphs=False)
    bastile.report(reset=True)
    for _ in range(2):
        model.zero_grad()
        got, found = stepped(model, **given)
    report = bastile.report()
    assert report.ran("padding_free") == 1
    assert report.ran("fused_linear_cross_entropy") == 2
    assert_same(got.loss, want.loss, "loss")
    assert_same_gradients(found, gradients_before)


def test_metrics_of_an_evaluation_have_logits() -> None:
    model, given = masked().eval(), asked()
    with torch.no_grad():
        want = model(**given)
        bastile.apply_to_model(model, **ALONE)
        got = model(**given)
        assert on_demand(got.logits)
        assert_same(got.loss, want.loss, "loss")
        assert torch.equal(got.logits, want.logits)
        assert type(model(given["input_ids"]).logits) is torch.Tensor  # as a pipeline that fills masks


def test_a_bias_that_is_trained_beside_the_head() -> None:
    """ESM's. Where nothing else has a gradient it is not left without one; logits that were not read before a step
    changed it cannot be made."""
    model = masked("EsmForMaskedLM", mask_token_id=2)
    nn.init.normal_(model.lm_head.bias)
    given = asked()
    want = stepped(model, **given)[1]
    bastile.apply_to_model(model, **ALONE)
    output, got = stepped(model, **given)
    assert_same_gradients(got, want)
    assert (ran(), made()) == (1, 0)
    with torch.no_grad():
        model.lm_head.bias += 1
    with pytest.raises(RuntimeError, match="were not read before"):
        output.logits.sum()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "lm_head.bias")
    model.zero_grad()
    found = stepped(model, **given)[1]
    bastile.reset(model=model)
    model.zero_grad()
    assert_same_gradients(found, stepped(model, **given)[1])


@pytest.mark.parametrize("name", ["BertForMaskedLM", "ModernBertForMaskedLM"])
def test_compiled(name: str) -> None:
    """ModernBERT calls its head itself, and makes no logits then; BERT's is within another module."""
    if older_than("5.17"):
        pytest.skip("this release's own code asks the mask")
    model, given = masked(name, cls_token_id=1, sep_token_id=2, eos_token_id=2, bos_token_id=1), asked()
    want, gradients_before = stepped(model, **given)
    bastile.apply_to_model(model, **ALONE)
    torch.compiler.reset()
    got = torch.compile(model, backend="aot_eager")(**given)
    got.loss.backward()
    assert_same(got.loss, want.loss, "loss")
    assert (got.logits is None) == (name == "ModernBertForMaskedLM")
    assert_same_gradients(gradients(model), gradients_before)


def test_a_loss_that_asks_for_labels_as_they_are_and_one_that_shifts() -> None:
    """Which of the two counts before the layers run is told by the forward's code."""
    found = []
    for cls in (transformers.BertForMaskedLM, transformers.ModernBertForMaskedLM, transformers.BertLMHeadModel):
        found.append(serving.calls(vars(cls)["forward"], "loss_function"))
    assert found == [False, True, True]
