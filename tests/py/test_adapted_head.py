"""An adapter on a model's output head: the loss of its logits, a part of which exists at once, against float64; and in
models of PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM

import bastile
from bastile.models.logits import Logits
from bastile.ops.adapted_head import adapted_linear_cross_entropy
from bastile.ops.fused_linear_cross_entropy import set_logits_memory
from bastile.ops.lora import Adapted
from memory import Memory
from oracle import Case, assert_no_worse, assert_no_worse_pooled, devices, random_tensor
from test_lora import MIXES, POOLED, Layer, peft, under
from test_peft import SIZES, assert_as_stock, base, batch, our_masks, ran, step, with_lora  # noqa: F401  (a fixture)

CLASSES = 70
EVERY = ["q_proj", "v_proj", "down_proj", "lm_head"]


@pytest.fixture(autouse=True)
def pieces():
    """Little memory: pieces of 64 rows."""
    set_logits_memory(0.001)
    yield
    set_logits_memory(None)


def stock_loss(hidden: torch.Tensor, head: Adapted, target: torch.Tensor, **options: Any) -> torch.Tensor:
    items, cap, scale = options.pop("num_items", None), options.pop("softcap", None), options.pop("logit_scale", 1.0)
    options["weight"] = options.pop("class_weight", None)
    z = peft(hidden, head).to(torch.float64 if hidden.dtype is torch.float64 else torch.float32) * scale
    z = cap * torch.tanh(z / cap) if cap else z
    if items is not None:
        return F.cross_entropy(z.flatten(0, -2), target.flatten(), **options | {"reduction": "sum"}) / items
    loss = F.cross_entropy(z.flatten(0, -2), target.flatten(), **options)
    return loss.view(target.shape) if loss.dim() else loss


def case(shape, mix, device, *, bias: bool = False, rank: int = 4, **options: Any) -> Case:
    dtype, adapters, autocast = mix
    layer = Layer(shape[-1], CLASSES, rank, bias)
    given = layer.inputs("", dtype, adapters, device)
    frozen = [given.pop("weight"), *([given.pop("bias")] if bias else [])]
    inputs = {"x": random_tensor(shape, dtype, device)} | given
    target = torch.randint(0, CLASSES, shape[:-1], device=device)
    target[..., ::3] = -100

    def of(function):
        def run(x, *tensors):
            head = layer.take([*(t.to(x.dtype) for t in frozen), *tensors])
            weight = options.get("class_weight")
            exact = torch.float64 if x.dtype is torch.float64 else torch.float32
            more = options if weight is None else options | {"class_weight": weight.to(x.device, exact)}
            return function(x, head, target, **more)

        return run

    cast = (torch.bfloat16 if dtype is torch.float32 else dtype) if autocast else None
    ours, stock = of(adapted_linear_cross_entropy), of(stock_loss)
    return Case(under(cast, device, ours), under(cast, device, stock), stock, inputs, independent=shape[0])


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": True, "reduction": "sum"},
    {"rank": 1, "reduction": "none", "label_smoothing": 0.1},
    {"softcap": 3.0, "logit_scale": 0.5, "num_items": 7},
    {"class_weight": torch.linspace(0.2, 2, CLASSES)},
]


# One piece; three, of which the last is a part; none at all.
@pytest.mark.parametrize("shape", [(3, 33), (2, 75, 16), (0, 16)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mix", MIXES[:2], ids=str)
@pytest.mark.parametrize("device", devices())
def test_matches_float64_as_well_as_peft(device, mix, options, shape):
    if shape[0] == 0 and options.get("reduction") not in ("sum", "none"):
        pytest.skip("the mean of no rows is NaN for all three")
    assert_no_worse(case(shape, mix, device, **options))


@pytest.mark.parametrize(("device", "mix"), POOLED, ids=str)
def test_pooled_errors(mix, device):
    assert_no_worse_pooled(lambda: case((256, 64), mix, device, rank=8))


def test_faults_are_named():
    x, head = torch.randn(4, 8), Adapted(torch.randn(9, 8), None, torch.randn(2, 8), torch.randn(9, 2))
    target = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"target has shape \[3\]; \[4\]"):
        adapted_linear_cross_entropy(x, head, target[:3])
    with pytest.raises(ValueError, match=r"dropout is 0\.1; 0 is needed"):
        adapted_linear_cross_entropy(x, head._replace(dropout=0.1), target)
    with pytest.raises(ValueError, match=r"head\.weight requires a gradient"):
        adapted_linear_cross_entropy(x, head._replace(weight=torch.randn(9, 8, requires_grad=True)), target)
    with pytest.raises(ValueError, match="reduction is 'all'"):
        adapted_linear_cross_entropy(x, head, target, reduction="all")
    with pytest.raises(ValueError, match="num_items divides a sum"):
        adapted_linear_cross_entropy(x, head, target, reduction="none", num_items=2)


# ---- models ----------------------------------------------------------------------------------------------------------


def fused() -> int:
    return bastile.report().ran("fused_linear_cross_entropy")


@pytest.mark.parametrize("autocast", [False, True])
def test_a_step(ran, autocast, monkeypatch):  # noqa: F811
    """No logits of all rows."""
    monkeypatch.setattr("bastile.ops.adapted_head._FEWEST_ROWS", 8)
    model = with_lora(base(), target_modules=EVERY)
    before = fused()
    with Memory() as memory:
        step(model, torch.bfloat16 if autocast else None)
    assert fused() == before + 1
    largest = max(size for _, size in memory.storages.values())
    if not autocast:
        assert largest < 4 * batch()["labels"].numel() * SIZES["vocab_size"]
        assert_as_stock(model)


def test_what_reads_logits_gets_the_head_s(ran):  # noqa: F811
    model = with_lora(base(), target_modules=EVERY)
    ids = batch()["input_ids"]
    logits = model(input_ids=ids).logits
    assert type(logits) is Logits
    chosen, picked = logits.argmax(-1), logits.gather(-1, ids.unsqueeze(-1))
    losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
    bastile.reset()
    stock = model(input_ids=ids).logits
    assert type(stock) is torch.Tensor
    torch.testing.assert_close(logits + 0, stock)
    assert (chosen == stock.argmax(-1)).float().mean() > 0.95
    torch.testing.assert_close(picked, stock.gather(-1, ids.unsqueeze(-1)))
    torch.testing.assert_close(losses, F.cross_entropy(stock.flatten(0, 1), ids.flatten(), reduction="none"))


@pytest.mark.parametrize("way", ["disabled", "merged", "dropout"])
def test_heads_whose_adapter_is_off_are_served_and_those_with_dropout_run_as_stock(ran, way):  # noqa: F811
    model = with_lora(base(), target_modules=EVERY, lora_dropout=0.2 if way == "dropout" else 0.0)
    if way == "merged":
        model.merge_adapter()
    if way == "disabled":
        with model.disable_adapter():
            stock = model(**batch()).loss
    else:
        torch.manual_seed(2)
        stock = model(**batch()).loss
    assert ("the output head has an adapter" in str(bastile.report())) is (way == "dropout")
    assert (bastile.report().ran("fused_linear_cross_entropy") == 1) is (way != "dropout")
    bastile.reset()
    torch.manual_seed(2)
    if way == "disabled":
        with model.disable_adapter():
            want = model(**batch()).loss
    else:
        with our_masks():
            want = model(**batch()).loss
    torch.testing.assert_close(stock, want)


def test_heads_with_two_kinds_of_adapters_run_as_stock(ran):  # noqa: F811
    """PEFT trains some tokens' rows of a tied head by a module of its own, which has no bias, beneath the matrices."""
    config = BertConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    torch.manual_seed(0)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    lora = LoraConfig(r=4, target_modules=["query", "decoder"], trainable_token_indices=[3, 4])
    model = get_peft_model(BertForMaskedLM(config), lora).train()
    loss = model(**batch()).loss
    assert "an adapter on a TrainableTokensWrapper" in str(bastile.report())
    bastile.reset()
    torch.testing.assert_close(loss, model(**batch()).loss)
