"""Attention with sinks is that of GPT-OSS's code, with whatever mask Transformers gives it."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.gpt_oss import modeling_gpt_oss as modeling

import bastile
from bastile.models import sdpa
from bastile.models import side_by_side as side_by_sides
from bastile.models import sinks as of_models
from bastile.models.small import small_model
from bastile.models.table import OPERATORS
from bastile.ops import _flash as flash
from bastile.ops.sink_attention import sink_attention
from conftest import assert_same_up_to_rounding, gradients, older_than
from oracle import Case, assert_no_worse_pooled, devices, devices_and_types, few_examples, random_tensor
from padded import BACKBONE, LAYERS, ROWS, changed_forward
from padded import MASKS as PADDED
from test_gpt_oss import tiny_gpt_oss

stock = bastile.guards.stock_of(modeling.eager_attention_forward)

MASKS = {"none": None, "ones": torch.ones(3, 17, dtype=torch.long), **PADDED}
WITH_SINKS = ["gpt_oss", *([] if older_than("5.24.0") else ["granite_swa", "granitemoe_swa", "flint"])]


class Module(nn.Module):
    """What the stock function reads of an attention."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def boundaries(mask: torch.Tensor, device: str) -> torch.Tensor:
    """Of a batch's padding."""
    starts, length = [], mask.shape[1]
    for row, seen in enumerate(mask):
        first, count = int(seen.argmax()), int(seen.sum())
        starts += [row * length, row * length + first, row * length + first + count]
    return torch.tensor([*starts, mask.numel()], dtype=torch.int32, device=device)


def dense(mask: torch.Tensor, window: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """The mask of Transformers' eager attention: added to what it weighs."""
    length = mask.shape[1]
    before = torch.arange(length)[:, None] - torch.arange(length)
    seen = (before >= 0) & ((before < window) if window else True) & (mask[:, None, None, :] != 0)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min).to(device)


def case(dtype: torch.dtype, device: str, window: int, mask: torch.Tensor, groups: int = 2, dim: int = 16) -> Case:
    """Rows that are no part of a sequence have a weight of 0: what is behind it, nobody reads."""
    batch, length = mask.shape
    is_behind = (mask.flip(1).cumsum(1).flip(1) == 0).to(device)[:, :, None, None]
    module, cuts = Module(2), boundaries(mask, device)

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        module.sinks = sinks.to(q.dtype)
        added = dense(mask, window, q.dtype, device)
        return stock(module, q, k, v, added, scaling=0.3)[0].masked_fill(is_behind, 0.0)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        y = sink_attention(q, k, v, sinks, scale=0.3, window=window, boundaries=None if mask.all() else cuts)
        return y.masked_fill(is_behind, 0.0)

    shapes = {"q": 2 * groups, "k": groups, "v": groups}
    inputs = {n: random_tensor((batch, h, length, dim), dtype, device) for n, h in shapes.items()}
    return Case(ours, theirs, theirs, {**inputs, "sinks": random_tensor((2 * groups,), dtype, device)})


@pytest.mark.parametrize(("device", "dtype"), [each for each in devices_and_types() if each[1] in of_models.TYPES])
@pytest.mark.parametrize("window", [0, 5, 9])
@pytest.mark.parametrize("kind", ["ones", "right", "both"])
def test_errors_are_no_larger_than_the_original_code_s(device: str, dtype: torch.dtype, window: int, kind: str) -> None:
    assert_no_worse_pooled(lambda: case(dtype, device, window, MASKS[kind]))


@settings(few_examples, max_examples=30)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 70),
    groups=st.integers(1, 3),
    dim=st.sampled_from([8, 24, 64, 128]),
    window=st.integers(0, 80),
    data=st.data(),
)
def test_any_shape(batch: int, length: int, groups: int, dim: int, window: int, data: Any) -> None:
    rows = []
    for _ in range(batch):
        first = data.draw(st.integers(0, length - 1))
        count = data.draw(st.integers(1, length - first))
        rows.append([0] * first + [1] * count + [0] * (length - first - count))
    for device in devices():
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        each = case(dtype, device, window, torch.tensor(rows), groups, dim)
        leaves = [t.clone().requires_grad_() for t in each.inputs.values()]
        wide = [t.detach().double().requires_grad_() for t in leaves]
        y, want = each.ours(*leaves), each.exact(*wide)
        upstream = torch.randn_like(y)
        got = torch.autograd.grad(y, leaves, upstream)
        exact = torch.autograd.grad(want, wide, upstream.double())
        bound = 2e-5 if device == "cpu" else 5e-2
        for one, other in zip((y, *got), (want, *exact), strict=True):
            assert (one.double() - other).abs().max() <= bound * max(1.0, other.abs().max().item())


def side_by_side(dtype: torch.dtype, device: str, window: int, lengths: list[int], dim: int = 16) -> Case:
    """Sequences of a row, some of them empty, against the original code beneath a mask of all pairs."""
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    cuts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    before = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
    seen = (ids[:, None] == ids) & (before >= 0) & ((before < window) if window else True)
    module = Module(2)

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        module.sinks = sinks.to(q.dtype)
        added = torch.zeros(1, 1, *seen.shape, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min).to(device)
        return stock(module, q, k, v, added, scaling=0.3)[0]

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        told: dict[str, Any] = {"boundaries": cuts, "longest": max(lengths)}
        return sink_attention(q, k, v, sinks, scale=0.3, window=window, **told)

    inputs = {n: random_tensor((1, h, len(ids), dim), dtype, device) for n, h in {"q": 4, "k": 2, "v": 2}.items()}
    return Case(ours, theirs, theirs, {**inputs, "sinks": random_tensor((4,), dtype, device)})


@pytest.mark.parametrize(("device", "dtype"), [each for each in devices_and_types() if each[1] in of_models.TYPES])
@pytest.mark.parametrize("window", [0, 4, 9])
def test_sequences_side_by_side(device: str, dtype: torch.dtype, window: int) -> None:
    assert_no_worse_pooled(lambda: side_by_side(dtype, device, window, [7, 1, 19, 0, 30, 0]))
    if device == "cpu":
        each = side_by_side(torch.float32, device, window, [5, 0, 12])
        torch.testing.assert_close(each.ours(**each.inputs), each.exact(**each.inputs))


@pytest.mark.parametrize("device", devices())
def test_strided_heads_and_sinks_of_float32(device: str) -> None:
    """Queries as a rotary function leaves them, heads first in memory, and as a projection does."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = [random_tensor((2, 9, heads, 16), dtype, device).transpose(1, 2) for heads in (4, 2, 2)]
    sinks = random_tensor((4,), torch.float32, device)
    for cuts in (None, boundaries(torch.ones(2, 9), device)):
        formats = (torch.preserve_format, torch.contiguous_format)
        given, copied = ([t.clone(memory_format=f).requires_grad_() for t in (q, k, v)] for f in formats)
        one, other = sink_attention(*given, sinks, boundaries=cuts), sink_attention(*copied, sinks, boundaries=cuts)
        torch.testing.assert_close(one, other)
        for a, b in zip(torch.autograd.grad(one.sum(), given), torch.autograd.grad(other.sum(), copied), strict=True):
            torch.testing.assert_close(a, b)


def test_gradients_of_a_batch_at_once_and_second_ones() -> None:
    q, k, v = [torch.randn(2, heads, 9, 16, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, requires_grad=True)
    y = sink_attention(q, k, v, sinks, window=3, boundaries=boundaries(ROWS[:2, :9], "cpu"))
    upstream = torch.randn(3, *y.shape)
    several = torch.autograd.grad(y, (q, k, v, sinks), upstream, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        each = torch.autograd.grad(y, (q, k, v, sinks), upstream[i], retain_graph=True)
        for one, other in zip(several, each, strict=True):
            torch.testing.assert_close(one[i], other, atol=1e-5, rtol=1e-5)
    for leaf in (q, sinks):
        (first,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="sink_attention cannot be differentiated twice"):
            first.sum().backward()


def test_what_is_called_in_pytorch_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flash attention has no name that is promised: where it takes other arguments, the original runs."""
    assert flash.is_known()
    function, names, *rest = flash._FLASH[1]
    monkeypatch.setattr(flash, "_FLASH", ((function, f"{names} more", *rest),))
    flash.is_known.cache_clear()
    try:
        q = torch.randn(1, 2, 3, 8)
        with pytest.raises(ValueError, match="takes other arguments than are known"):
            sink_attention(q, q, q, torch.randn(2))
    finally:
        flash.is_known.cache_clear()


def test_empty() -> None:
    q, sinks = torch.randn(0, 4, 9, 16, requires_grad=True), torch.randn(4, requires_grad=True)
    y = sink_attention(q, q[:, :2], q[:, :2], sinks)
    assert y.shape == (0, 9, 4, 16)
    y.sum().backward()
    assert sinks.grad is not None
    assert not sinks.grad.any()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k": torch.randn(2, 3, 9, 16)}, "queries, keys and values are of other shapes"),
        ({"q": torch.randn(4, 9, 16)}, "queries, keys and values are of other shapes"),
        ({"v": torch.randn(2, 2, 9, 16).double()}, "of different types or devices"),
        ({"sinks": torch.randn(3)}, r"sinks are torch.float32 of shape \[3\]"),
        ({"window": -1}, "window is -1"),
        ({"boundaries": torch.zeros(3, dtype=torch.int32)}, r"shape \[3\]; int32 of \[7\] is needed"),
        ({"boundaries": torch.zeros(7)}, "boundaries are torch.float32"),
        ({"boundaries": torch.zeros(4), "longest": 9}, "boundaries are torch.float32"),
        ({"longest": 9}, "longest is given without the boundaries"),
        ({"longest": -1}, "longest is -1"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    given = {"q": torch.randn(2, 4, 9, 16), "sinks": torch.randn(4)}
    given |= {name: torch.randn(2, 2, 9, 16) for name in ("k", "v")}
    with pytest.raises(ValueError, match=f"sink_attention: .*{said}"):
        sink_attention(**{**given, **changes})


# ---- in models -------------------------------------------------------------------------------------------------------


@pytest.fixture
def any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32 too, which shows what is computed to seven digits."""
    monkeypatch.setattr(of_models, "TYPES", (*of_models.TYPES, torch.float32))


def trained(model: Any, mask: torch.Tensor | None, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    ids = torch.arange(3 * 17, device=model.device).view(3, 17) % 90 + 3
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    model.zero_grad()
    output = model(input_ids=ids, labels=labels, attention_mask=mask, **more)
    output.loss.backward()
    return output.loss.detach(), gradients(model), output


def ran() -> tuple[int, dict[str, int]]:
    lines = [line for line in bastile.report(reset=True) if line.operator == "sink_attention"]
    return sum(line.ran for line in lines), {why: n for line in lines for why, n in line.aside.items()}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_any_padding(any_type: None, kind: str, use_cache: bool) -> None:
    """Losses and gradients, in training as it is usual, with a cache that nobody asked for too."""
    model = tiny_gpt_oss()
    want, want_grads, whole = trained(model, MASKS[kind], use_cache=use_cache)
    bastile.apply()
    ran()
    got, got_grads, output = trained(model, MASKS[kind], use_cache=use_cache)
    assert ran() == (2, {})
    assert_same_up_to_rounding(got, want, model, "loss")
    for name, gradient in want_grads.items():
        assert_same_up_to_rounding(got_grads[name], gradient, model, name)
    if MASKS[kind] is not None:
        seen = MASKS[kind].bool()
        assert_same_up_to_rounding(output.logits[seen], whole.logits[seen], model, "logits")


@pytest.mark.parametrize("model_type", WITH_SINKS)
@pytest.mark.parametrize("kind", ["none", "both"])
def test_each_type_that_has_them(any_type: None, model_type: str, kind: str) -> None:
    model = small_model(model_type).train()
    want, want_grads, _ = trained(model, MASKS[kind])
    bastile.apply()
    ran()
    got, got_grads, _ = trained(model, MASKS[kind])
    assert ran() == (model.config.num_hidden_layers, {})
    assert_same_up_to_rounding(got, want, model, "loss")
    for name, gradient in want_grads.items():
        assert_same_up_to_rounding(got_grads[name], gradient, model, name)


def test_what_a_mask_of_ours_cannot_say(any_type: None) -> None:
    """A hole, a row that nobody sees, a mask of the user's own, dropped weights, weights that are wanted, another
    implementation: Transformers' code, with Transformers' mask."""
    model = tiny_gpt_oss()
    hole, nothing = MASKS["right"].clone(), MASKS["right"].clone()
    hole[1, 3], nothing[0] = 0, 0
    own = torch.zeros(3, 1, 17, 17)
    not_whole = "its mask is packed sequences', one with holes or a user's own"
    for mask, more, why in (
        (hole, {}, not_whole),
        (nothing, {}, not_whole),
        ({"full_attention": own, "sliding_attention": own}, {}, not_whole),
        (MASKS["both"], {"output_attentions": True}, "its weights are wanted"),
    ):
        labels = mask if isinstance(mask, torch.Tensor) else None
        want = _loss(model, mask, labels, **more)
        bastile.apply()
        ran()
        got = _loss(model, mask, labels, **more)
        assert ran() == (0, {why: 2})
        assert torch.equal(got[0], want[0]) or abs(got[0] - want[0]) < 1e-5
        for one, other in zip(got[1] or (), want[1] or (), strict=True):
            torch.testing.assert_close(one, other)
        bastile.reset()


def _loss(model: Any, mask: Any, labels: torch.Tensor | None, **more: Any) -> tuple[torch.Tensor, Any]:
    ids = torch.arange(3 * 17).view(3, 17) % 90 + 3
    labels = ids if labels is None else ids.masked_fill(labels == 0, -100)
    output = model(input_ids=ids, labels=labels, attention_mask=mask, **more)
    return output.loss.detach(), output.attentions


def test_the_original_s_mask_of_sequences_side_by_side(any_type: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch without its padding (models/padding_free.py) whose attention is not served after all."""
    monkeypatch.setattr(side_by_sides, "_LEAST_STEP", 2)
    model = tiny_gpt_oss()
    want, want_grads, _ = trained(model, MASKS["right"])
    bastile.apply()
    trained(model, None)
    monkeypatch.setattr(of_models, "refusal", lambda *_: "it is not")
    ran()
    got, got_grads, _ = trained(model, MASKS["right"])
    report = bastile.report(reset=True)
    assert (report.ran("padding_free"), report.ran("sink_attention")) == (1, 0)
    assert_same_up_to_rounding(got, want, model, "loss")
    for name, gradient in want_grads.items():
        assert_same_up_to_rounding(got_grads[name], gradient, model, name)


def test_what_masks_say_of_sequences_side_by_side() -> None:
    """How long the longest is, or more: PyTorch's attention on a GPU goes by that."""
    for longest in (1, 2, 3, 8, 9, 60):
        ids = torch.arange(4).repeat_interleave(torch.tensor([1, longest, 2, 1]))[None]
        with sdpa.packed(ids, 100):
            mask = of_models._boundaries(batch_size=1, kv_length=ids.shape[1], device="cpu", local_size=7)
        cuts, window, most = of_models._said(mask)
        assert cuts.tolist()[:5] == [0, 1, 1 + longest, 3 + longest, 4 + longest]
        assert window == 7
        assert longest <= most <= 2 * longest
    assert of_models._said(of_models._mask_of(cuts, 3))[1:] == (3, 0)


@pytest.mark.skipif(older_than("5.24.0"), reason="this release has no such model")
def test_nobody_asks_where_sequences_begin_that_is_known(any_type: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Granite's hands positions to what makes masks, of which Transformers would ask that, and wait for the device."""
    from transformers import masking_utils

    monkeypatch.setattr(side_by_sides, "_LEAST_STEP", 2)
    model = small_model("granite_swa").train()
    bastile.apply()
    trained(model, None)
    bastile.report(reset=True)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda *_: pytest.fail("it is asked"))
    trained(model, MASKS["right"])
    assert bastile.report().ran("padding_free") == 1


def test_dropout_is_stock_s(any_type: None) -> None:
    model = tiny_gpt_oss(attention_dropout=0.5)
    torch.manual_seed(3)
    want = trained(model, MASKS["both"])[0]
    bastile.apply()
    ran()
    torch.manual_seed(3)
    got = trained(model, MASKS["both"])[0]
    assert ran() == (0, {"it drops weights": 2})
    assert_same_up_to_rounding(got, want, model, "loss")


def test_text_is_the_same(any_type: None) -> None:
    """The prompt by ours, each token after it, with a cache, by the original."""
    model = tiny_gpt_oss().eval()
    ids = torch.arange(2 * 9).view(2, 9) + 3
    given = {"max_new_tokens": 12, "do_sample": False, "attention_mask": MASKS["left"][:2, 5:14]}
    want = model.generate(ids, **given)
    bastile.apply()
    ran()
    assert torch.equal(model.generate(ids, **given), want)
    assert ran() == (2, {"its keys are a cache's": 22})


def test_of_float32_the_original_runs() -> None:
    model = tiny_gpt_oss()
    want, want_grads, _ = trained(model, MASKS["both"])
    bastile.apply(sink_attention=True, model_types="gpt_oss", rms_norm=False, rope=False, moe_experts=False)
    ran()
    got, got_grads, _ = trained(model, MASKS["both"])
    assert ran() == (0, {"its tensors are of float32, in which the original code is the more exact": 2})
    assert_same_up_to_rounding(got, want, model, "loss")
    for name, gradient in want_grads.items():
        assert_same_up_to_rounding(got_grads[name], gradient, model, name)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("autocast", [False, True])
def test_in_bfloat16_and_under_autocast(device: str, autocast: bool) -> None:
    """One model alone, beside one that stays as it is; logits as near to float32's as stock's. Each token goes to all
    experts: rounding would choose others."""
    seen, squares = MASKS["both"].bool(), [0.0, 0.0]
    for seed in range(6):
        wide = tiny_gpt_oss(seed, num_experts_per_tok=5).to(device)
        exact = trained(wide, MASKS["both"].to(device))[2].logits.detach()
        model, other = (copy.deepcopy(wide).to(torch.float32 if autocast else torch.bfloat16) for _ in range(2))
        left_out = [name for name, operator in OPERATORS.items() if operator.of_a_model and name != "sink_attention"]
        assert bastile.apply_to_model(model, **dict.fromkeys(left_out, False)) == ["sink_attention_gpt_oss"]
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            ran()
            got = trained(model, MASKS["both"].to(device))[2].logits.detach()
            assert ran()[0] == 2
            want = trained(other, MASKS["both"].to(device))[2].logits.detach()
            assert ran()[0] == 0
        for i, each in enumerate((got, want)):
            squares[i] += (each.float() - exact)[seen].square().mean().item()
    assert squares[0] <= 1.2 * squares[1]  # of few samples: errors themselves are judged above


@pytest.mark.parametrize(
    ("text", "old", "new", "is_served"),
    [
        (BACKBONE, "", "", True),
        (BACKBONE, "return x", "return x + masks['full']", False),
        (BACKBONE, "attention_mask=masks[", "mask=masks[", False),
        (BACKBONE, "create_sliding_window_causal_mask(x)", "None", False),
        (BACKBONE, "return x", "return x, create_causal_mask(x)", False),
        *LAYERS,
    ],
)
def test_masks_that_go_elsewhere(text: str, old: str, new: str, is_served: bool) -> None:
    """Where anything but an attention of ours would see a mask of ours, there is none."""
    name, code = changed_forward(text, old, new)
    asked = of_models._hands_masks_out if name == "Backbone" else of_models.hands_mask_on
    assert bool(asked(code)) == is_served


def test_what_is_not_served_says_why() -> None:
    if older_than("5.24.0"):
        pytest.skip("the type is younger")
    from bastile.models.support import support

    told = [line for line in support("deepseek_v4").stock.get("sink_attention", {}).items()]
    assert told == [("eager_attention_forward", "a mask is not only handed to the layers")]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(any_type: None, reentrant: bool) -> None:
    model = tiny_gpt_oss()
    want, want_grads, _ = trained(model, MASKS["both"])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    bastile.apply()
    ran()
    got, got_grads, _ = trained(model, MASKS["both"])
    assert ran() == (4, {})
    assert_same_up_to_rounding(got, want, model, "loss")
    for name, gradient in want_grads.items():
        assert_same_up_to_rounding(got_grads[name], gradient, model, name)
