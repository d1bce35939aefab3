"""Heads upon encoders: which rows of hidden states they are known to read, and that they read no others."""

from __future__ import annotations

import glob
import importlib
import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import bastile
from bastile.models import encoder_heads, padding, small
from bastile.models.sites import file_of
from conftest import older_than

pytestmark = pytest.mark.skipif(older_than("5.17"), reason="there the layers of encoders are not served")

MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 2 + [0] * 5])
IDS = (torch.arange(21).view(3, 7) * 7 % 90 + 3).masked_fill(MASK == 0, 0)
TOKENS = (IDS % 2).masked_fill((MASK == 0) | (IDS % 5 == 0), -100)
FIRST, NONE = torch.full((3, 7), -100), torch.full((3, 7), -100)
FIRST[:, 0] = 0


def heads(module: str) -> dict[str, Any]:
    """The replacements of a module's forwards, by class."""
    return {site.stock_class.__name__: site for site in encoder_heads.sites(file_of(module))}


def model_of(cls: Any, **more: Any) -> Any:
    config = small.small_config(cls.config_class.model_type)
    # Some follow from others, and some types have sizes that the small ones do not fit.
    for name, value in {"num_labels": 2, "pad_token_id": 0, "intermediate_size": 32, **more}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return small.prepared(cls(config))


def batch(model: Any) -> dict[str, torch.Tensor]:
    """What a head of this class's kind is given."""
    name, takes = type(model).__name__, inspect.signature(model.forward).parameters
    given = {"input_ids": IDS.clone(), "attention_mask": MASK.clone()}
    if "MultipleChoice" in name:
        given = {key: value.unsqueeze(1).expand(-1, 2, -1).contiguous() for key, value in given.items()}
    if "next_sentence_label" in takes or "sentence_order_label" in takes:
        pair = next(key for key in ("next_sentence_label", "sentence_order_label") if key in takes)
        given |= {"labels": TOKENS.clone(), pair: torch.tensor([1, 0, 1])}
    elif re.search("TokenClassification|MaskedLM", name):
        given["labels"] = TOKENS.clone()
    else:
        given["labels"] = torch.tensor([1, 0, 1])
    for key, shape in {"bbox": (4,), "input_shape_ids": (), "input_pronunciation_ids": ()}.items():
        if key in takes:
            given[key] = torch.ones(*given["input_ids"].shape, *shape, dtype=torch.long)
    return given


class Watched:
    """An encoder's last hidden states: what is known of who reads them, and others in the places of those that nobody
    reads."""

    def __init__(self, encoder: nn.Module) -> None:
        self.labels: torch.Tensor | None = None
        self.is_alone: bool | None = None
        self.noise: float | None = None
        encoder.register_forward_pre_hook(lambda *_: self._see())
        inner, pooler = encoder._modules.get("encoder"), encoder._modules.get("pooler")
        if inner is not None:
            inner.register_forward_hook(lambda _, args, out: self._of_output(out))
        if pooler is not None:
            pooler.register_forward_pre_hook(lambda _, args: tuple(map(self._of_states, args)))
        encoder.register_forward_hook(lambda _, args, out: self._of_output(out))

    def _see(self) -> None:
        self.labels, self.is_alone = padding._here.labels, padding._here.is_alone

    def _of_output(self, output: Any) -> Any:
        if isinstance(output, dict):
            output["last_hidden_state"] = self._of_states(output["last_hidden_state"])
        return output

    def _of_states(self, states: torch.Tensor) -> torch.Tensor:
        if self.noise is None or states.dim() != 3 or states.shape[1] != MASK.shape[1]:  # not of tokens
            return states
        assert self.labels is not None
        mask = MASK.repeat_interleave(len(states) // len(MASK), 0)
        is_unread = (mask == 0) & (self.labels == -100)
        assert is_unread.any()
        return torch.where(is_unread[..., None], self.noise * (states.detach().tanh() + 2), states)


def watched(model: Any) -> Watched:
    return Watched(getattr(model, model.base_model_prefix))


def put_in(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site = heads(cls.__module__).get(cls.__name__)
    if site is not None:
        monkeypatch.setattr(cls, "forward", site.build(cls.forward))


def seen(name: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[Any, Any]:
    """What is known within a head: whose rows are read, and whether nobody sees others."""
    if not hasattr(transformers, name):
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    cls = getattr(transformers, name)
    put_in(cls, monkeypatch)
    model = model_of(cls, **more)
    found = watched(model)
    model(**batch(model))
    assert padding._here.labels is None
    return found.labels, found.is_alone


OF_SEQUENCES = [
    *(f"Bert{name}" for name in ("ForSequenceClassification", "ForNextSentencePrediction")),
    *(f"{kind}ForSequenceClassification" for kind in ("Roberta", "Electra", "DistilBert", "XLMRoberta", "Camembert")),
    *(f"{kind}ForSequenceClassification" for kind in ("MPNet", "Esm", "Ernie", "RemBert", "MegatronBert", "Albert")),
    *(f"{kind}ForSequenceClassification" for kind in ("Data2VecText", "ConvBert", "DebertaV2", "NomicBert")),
]
OF_TOKENS = [
    f"{kind}For{name}"
    for kind in ("Bert", "Roberta", "Electra", "DistilBert", "ModernBert", "EuroBert", "Esm", "DebertaV2")
    for name in ("TokenClassification", "MaskedLM")
]


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_of_sequences_the_first_row_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    labels, is_alone = seen(name, monkeypatch)
    assert is_alone
    assert torch.equal(labels, FIRST)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "Electra", "DistilBert", "MPNet"])
def test_of_choices_each_is_a_sequence(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    labels, is_alone = seen(f"{kind}ForMultipleChoice", monkeypatch)
    assert is_alone
    assert torch.equal(labels, FIRST.repeat_interleave(2, 0))


@pytest.mark.parametrize("name", OF_TOKENS)
def test_of_tokens_those_with_labels_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    labels, is_alone = seen(name, monkeypatch)
    assert is_alone is False
    assert torch.equal(labels, TOKENS)


@pytest.mark.parametrize("kind", ["Bert", "Ernie", "MegatronBert", "Albert"])
def test_two_losses(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    labels, is_alone = seen(f"{kind}ForPreTraining", monkeypatch)
    assert is_alone is False
    want = TOKENS.clone()
    want[:, 0] = 0
    assert torch.equal(labels, want)


@pytest.mark.parametrize(
    ("name", "setting", "pooling", "want"),
    [
        ("ModernBertForSequenceClassification", "classifier_pooling", "cls", FIRST),
        ("ModernBertForSequenceClassification", "classifier_pooling", "mean", NONE),
        ("ModernBertForMultipleChoice", "classifier_pooling", "mean", NONE.repeat(2, 1)),
        ("ModernBertForMultipleChoice", "classifier_pooling", "cls", None),  # the first that is no padding
        ("EuroBertForSequenceClassification", "classifier_pooling", "bos", FIRST),
        ("EuroBertForSequenceClassification", "classifier_pooling", "mean", NONE),
        ("EuroBertForSequenceClassification", "classifier_pooling", "late", NONE),
        ("ElectraForMultipleChoice", "summary_type", "first", FIRST.repeat_interleave(2, 0)),
        ("ElectraForMultipleChoice", "summary_type", "last", None),
        ("ElectraForMultipleChoice", "summary_type", "mean", None),
        ("ModernBertForMaskedLM", "sparse_prediction", True, None),
    ],
)
def test_by_its_config(name: str, setting: str, pooling: Any, want: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    labels, _ = seen(name, monkeypatch, **{setting: pooling})
    assert (labels is None) == (want is None)
    assert want is None or torch.equal(labels, want)


@pytest.mark.parametrize(
    "name",
    [
        *(f"{kind}ForQuestionAnswering" for kind in ("Bert", "Roberta", "Electra", "DistilBert", "ModernBert")),
        *("BertLMHeadModel", "BertModel", "ElectraForPreTraining", "RoCBertForPreTraining", "CanineForMultipleChoice"),
        *("BartForSequenceClassification", "BrosForTokenClassification", "LukeForMaskedLM"),
    ],
)
def test_what_is_not_known(name: str) -> None:
    cls = getattr(transformers, name)
    assert name not in heads(cls.__module__)


def test_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """No labels, a loss of one's own, no mask, other modules."""
    cls = transformers.ModernBertForMaskedLM
    put_in(cls, monkeypatch)
    model = model_of(cls)
    found, given = watched(model), batch(model)
    model(**{**given, "labels": None})
    assert found.labels is None
    model(**{**given, "attention_mask": None})
    assert found.labels is None
    model(**given)
    assert found.labels is not None
    model(**{**given, "labels": given["labels"].masked_fill(MASK == 0, 3)}, ignore_index=-100)
    assert found.labels is not None  # by which padding is read
    model(**{**given, "labels": given["labels"].clamp(min=3)}, ignore_index=3)
    assert found.labels is None
    model.loss_function = lambda logits, labels, **_: logits.sum()
    model(**given)
    assert found.labels is None


class Sums(nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states + states.sum(1, keepdim=True))


@pytest.mark.parametrize("name", ["BertForTokenClassification", "BertForSequenceClassification"])
def test_others_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = getattr(transformers, name)
    put_in(cls, monkeypatch)
    model = model_of(cls)
    found, given = watched(model), batch(model)
    model.classifier = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    model(**given)
    assert found.labels is not None
    if "Token" in name:
        model.classifier = Sums(32, 2)
    else:
        model.bert.pooler.forward = lambda states: states.mean(1)
    model(**given)
    assert found.labels is None


def test_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies of a head that it trains, and adapters in it."""
    peft = pytest.importorskip("peft")
    for name, target in (("Bert", "query"), ("Roberta", "query"), ("Roberta", "dense")):
        with monkeypatch.context() as patch:
            cls = getattr(transformers, f"{name}ForSequenceClassification")
            put_in(cls, patch)
            model = model_of(cls)
            found = watched(model)
            adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules=[target]))
            adapted(**batch(model))
            assert torch.equal(found.labels, FIRST)


def test_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bert import modeling_bert

    stock = modeling_bert.BertForMaskedLM.forward
    bastile.apply()
    assert modeling_bert.BertForMaskedLM.forward is not stock
    model = model_of(modeling_bert.BertForMaskedLM)
    found = watched(model)
    model(**batch(model))
    assert torch.equal(found.labels, TOKENS)
    bastile.reset()
    assert modeling_bert.BertForMaskedLM.forward is stock
    model(**batch(model))
    assert found.labels is None
    bastile.apply_to_model(model)
    model(**batch(model))
    assert torch.equal(found.labels, TOKENS)
    bastile.reset(model=model)
    model(**batch(model))
    assert found.labels is None


# ---- whatever the code says -----------------------------------------------------------------------------------------

#: Types with encoders, of which heads are built; the ordinary run takes a few.
FILES = sorted(
    path
    for path in glob.glob(f"{os.path.dirname(transformers.__file__)}/models/*/modeling_*.py")
    if re.search("class .*For(Sequence|Token|Masked|Multiple)", Path(path).read_text())
)
SAMPLE = ("albert", "bert", "deberta_v2", "distilbert", "electra", "eurobert", "modernbert", "roberta", "xmod")


def reads_as_known(model: Any) -> bool | None:
    """Whether loss, gradients and, where nobody sees other rows, logits are the same to the last bit whatever stands in
    the rows that are not read; None where nothing is known."""
    found, given = watched(model), batch(model)

    def results() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(0)  # some drop out by functions
        output = model(**{name: value.clone() for name, value in given.items()})
        output.loss.backward()
        logits = [output.logits] if found.is_alone else []
        return [output.loss, *logits, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    want = results()
    if found.labels is None:
        return None
    same = []
    for noise in (0.0, 50.0):
        found.noise = noise
        got = results()
        same.append(len(got) == len(want) and all(map(torch.equal, got, want)))
    return all(same)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=Path(path).stem, marks=[] if Path(path).parent.name in SAMPLE else pytest.mark.every_type)
        for path in FILES
    ],
)
def test_no_other_rows_are_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"transformers.models.{Path(path).parent.name}.{Path(path).stem}"
    importlib.import_module(module)
    tried = []
    for name in heads(module):
        cls = getattr(sys.modules[module], name)
        put_in(cls, monkeypatch)
        try:
            model = model_of(cls)
            model(**batch(model))
        except Exception as error:  # whatever a model of any kind may raise
            print(f"{name} is not tried: {type(error).__name__}: {error}")
            continue
        found = reads_as_known(model)
        print(name, found)
        assert found is not False, name
        tried += [name] if found else []
    assert tried or not heads(module) or Path(path).parent.name not in SAMPLE


def test_the_noise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions' answers are sought in all rows, padding too."""
    model = model_of(transformers.BertForQuestionAnswering)
    found = watched(model)
    given = {"input_ids": IDS, "attention_mask": MASK, "start_positions": torch.ones(3).long()}
    given["end_positions"] = given["start_positions"]
    want = model(**given).loss
    monkeypatch.setattr(found, "_see", lambda: setattr(found, "labels", NONE))
    found.noise = 50.0
    assert not torch.equal(model(**given).loss, want)


# ---- one thing different --------------------------------------------------------------------------------------------

_HEADER = """
import torch
from torch import nn
from torch.nn import CrossEntropyLoss
from transformers.modeling_outputs import BaseModelOutputWithPooling, TokenClassifierOutput
from transformers.models.bert.modeling_bert import BertPreTrainedModel, BertModel as Stock


def elsewhere(outputs):
    return outputs[0]


class Pooler(nn.Module):
    def forward(self, hidden_states):
        return hidden_states[:, 0]


class BertModel(Stock):
    def __init__(self, config):
        super().__init__(config)
        self.pooler = Pooler()

    def forward(self, input_ids=None, attention_mask=None):
        states = Stock.forward(self, input_ids, attention_mask=attention_mask).last_hidden_state
        pooled = self.pooler(states)
        return BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=pooled)


class Head(BertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(config)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(config.hidden_size, 3)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        outputs = self.bert(input_ids, attention_mask=attention_mask)
"""
_FIRST = """
        pooled = outputs[0][:, 0]
        return TokenClassifierOutput(logits=self.classifier(self.dropout(pooled)), hidden_states=outputs.hidden_states)
"""
_POOLED = """
        pooled = outputs[1]
        return TokenClassifierOutput(logits=self.classifier(self.dropout(pooled)), hidden_states=outputs.hidden_states)
"""
_MEAN = """
        states = outputs.last_hidden_state
        pooled = (states * attention_mask.unsqueeze(-1)).sum(dim=1) / attention_mask.sum(dim=1, keepdim=True)
        return TokenClassifierOutput(logits=self.classifier(pooled))
"""
_TOKENS = """
        logits = self.classifier(self.dropout(outputs[0]))
        loss = None
        if labels is not None:
            loss_fct = CrossEntropyLoss()
            loss = loss_fct(logits.view(-1, 3), labels.view(-1))
        return TokenClassifierOutput(loss=loss, logits=logits)
"""


def known(text: str, tmp_path: Path) -> bool:
    name = f"heads_of_{abs(hash(text))}"
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return "Head" in heads(name)
    finally:
        del sys.modules[name]


@pytest.mark.parametrize("body", [_FIRST, _POOLED, _MEAN, _TOKENS])
def test_what_is_changed_below_is_known(body: str, tmp_path: Path) -> None:
    assert known(_HEADER + body, tmp_path)


@pytest.mark.parametrize(
    ("body", "old", "new"),
    [
        (_FIRST, "[:, 0]", "[:, 1]"),
        (_FIRST, "[:, 0]", "[0]"),
        (_FIRST, "[:, 0]", "[:, -1]"),
        (_FIRST, "[:, 0]", ".mean(1)"),
        (_FIRST, "outputs[0]", "elsewhere(outputs)"),
        (_FIRST, "outputs.hidden_states", "outputs"),
        (_FIRST, "outputs.hidden_states", "outputs[0]"),
        (_FIRST, "outputs.hidden_states", "outputs.last_hidden_state"),
        (_FIRST, "attention_mask=attention_mask)", "attention_mask=None)"),
        (
            _FIRST,
            "        pooled =",
            "        outputs = self.bert(labels, attention_mask=attention_mask)\n        pooled =",
        ),
        (_FIRST, "        pooled =", "        more = self.bert(labels, attention_mask)\n        pooled ="),
        (_FIRST, "        pooled =", "        self.states = outputs[0]\n        pooled ="),
        (_FIRST, "        pooled =", "        for _ in range(2):\n            print(outputs)\n        pooled ="),
        (_POOLED, "hidden_states[:, 0]", "hidden_states[:, -1]"),
        (_POOLED, "hidden_states[:, 0]", "hidden_states.mean(1)"),
        (_POOLED, "self.pooler(states)", "self.pooler(states) + states.sum(1)"),
        (_POOLED, "self.pooler(states)", "self.pooler(input_ids)"),
        (_POOLED, "        return BaseM", "        states = states.flip(1)\n        return BaseM"),
        (_POOLED, "last_hidden_state=states, pooler_output=pooled", "last_hidden_state=pooled, pooler_output=states"),
        (_MEAN, " * attention_mask.unsqueeze(-1)", ""),
        (_MEAN, " * attention_mask.unsqueeze(-1)", " * torch.ones_like(attention_mask).unsqueeze(-1)"),
        (_MEAN, "        states =", "        attention_mask = 1 - attention_mask\n        states ="),
        (_MEAN, "* attention_mask", "+ attention_mask"),
        (_MEAN, ".sum(dim=1) /", ".sum(dim=0) /"),
        (_TOKENS, "CrossEntropyLoss()", "CrossEntropyLoss(ignore_index=0)"),
        (_TOKENS, "CrossEntropyLoss()", "nn.MSELoss()"),
        (_TOKENS, "labels.view(-1)", "labels[:, 1:].view(-1)"),
        (_TOKENS, "labels.view(-1)", "labels.clamp(min=0).view(-1)"),
        (_TOKENS, "            loss_fct", "            labels[labels == -100] = 0\n            loss_fct"),
        (_TOKENS, "            loss_fct", "            labels += 100\n            loss_fct"),
        (_TOKENS, "            loss_fct", "            labels.masked_fill_(labels == -100, 0)\n            loss_fct"),
        (_TOKENS, "logits.view(-1, 3)", "logits[:, :-1].view(-1, 3)"),
        (_TOKENS, "logits.view(-1, 3)", "logits.transpose(0, 1).reshape(-1, 3)"),
        (_TOKENS, "labels.view(-1))", "labels.view(-1)) + logits.sum()"),
        (_TOKENS, "logits=logits", "logits=outputs[0]"),
        (_TOKENS, "self.dropout(outputs[0])", "self.dropout(outputs[0]).softmax(1)"),
        (_TOKENS, "self.dropout = nn.Dropout(0.1)", "self.dropout = nn.Softmax(1)"),
        (_TOKENS, "self.dropout = nn.Dropout(0.1)", "self.dropout = nn.LSTM(config.hidden_size, 3)"),
        (_TOKENS, "            loss_fct = CrossEntropyLoss()\n", "            loss_fct = self.make()\n"),
    ],
)
def test_one_thing_is_different(body: str, old: str, new: str, tmp_path: Path) -> None:
    text = _HEADER + body
    assert old in text
    assert not known(text.replace(old, new), tmp_path)
