"""The fused loss without its ignored rows: the same losses and gradients, from fewer products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import bastile
from bastile.ops import _valid_rows
from bastile.ops.fused_linear_cross_entropy import (
    ValidCount,
    fused_linear_cross_entropy,
    set_compaction,
    set_logits_memory,
)
from conftest import EPS, assert_same_up_to_rounding, gradients, tiny_batch, tiny_model
from oracle import DTYPES, EMULATED, assert_no_worse, assert_same_bits, devices, random_tensor
from test_fused_linear_cross_entropy import OPTIONS, case


@pytest.fixture(autouse=True)
def from_few_tokens_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small shapes are compacted too, on every device alike."""
    monkeypatch.setattr(_valid_rows, "MIN_TOKENS", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(_valid_rows, "_MULTIPLE", {"cpu": 16, "cuda": 16})
    yield
    set_compaction(None)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call's products have."""
    from bastile.ops import fused_linear_cross_entropy as module

    rows: list[int] = []
    forward = module._forward

    def counted(hidden: torch.Tensor, *rest: Any) -> Any:
        rows.append(hidden.shape[0])
        return forward(hidden, *rest)

    monkeypatch.setattr(module, "_forward", counted)
    return rows


def inputs(tokens: int = 100, ignored: float = 0.5, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    hidden, weight = random_tensor((tokens, 24), torch.float32, device), random_tensor((70, 24), torch.float32, device)
    target = torch.randint(70, (tokens,), generator=generator)
    target[torch.rand(tokens, generator=generator) < ignored] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), target.to(device)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("mib", [None, 1e-3], ids=["one piece", "chunks"])
def test_every_option_matches_float64_as_well_as_stock(
    options: dict[str, Any], dtype: torch.dtype, device: str, mib: float | None, computed: list[int]
) -> None:
    set_logits_memory(mib)
    try:
        # Of 150 rows 68 count: 80 are computed.
        assert_no_worse(case(150, 90, 48, dtype, device, ignored=0.55, **options))
    finally:
        set_logits_memory(None)
    assert computed[0] <= 96


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", [41, 100, 333])
def test_the_result_is_that_of_all_rows(tokens: int, reduction: str, device: str, computed: list[int]) -> None:
    hidden, weight, target = inputs(tokens, device=device)
    results = []
    for enabled in (False, True):
        set_compaction(enabled)
        loss = fused_linear_cross_entropy(
            hidden.view(1, tokens, 24), weight, target.view(1, tokens), reduction=reduction
        )
        upstream = torch.linspace(1, 2, loss.numel(), device=device).view_as(loss)
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight), upstream)))
    assert computed[0] == tokens
    assert computed[1] % 16 == 0
    assert computed[1] <= 0.9 * tokens
    assert int((target != -100).sum()) <= computed[1]
    for got, want in zip(results[1], results[0], strict=True):
        assert got.shape == want.shape
        # Sums of as many terms in another order; elements sum terms of the size of the largest.
        assert (got - want).abs().max() <= EPS * tokens**0.5 * want.abs().max()
    ignored = target == -100
    assert not results[1][1][ignored].any()
    if reduction == "none":
        assert not results[1][0].view(-1)[ignored].any()


@pytest.mark.parametrize("device", devices())
def test_all_rows_ignored(device: str, computed: list[int]) -> None:
    hidden, weight, target = inputs(ignored=2.0, device=device)
    assert (target == -100).all()
    loss = fused_linear_cross_entropy(hidden, weight, target)
    assert loss.isnan()  # as torch has it
    assert not any(g.any() for g in torch.autograd.grad(loss, (hidden, weight)))
    for options in ({"reduction": "sum"}, {"num_items": 5}, {"reduction": "none"}):
        loss = fused_linear_cross_entropy(hidden, weight, target, **options)
        assert not loss.any()
        assert not any(g.any() for g in torch.autograd.grad(loss.sum(), (hidden, weight)))
    assert computed == [16] * 4


def test_few_ignored_rows_are_not_worth_it(computed: list[int]) -> None:
    fused_linear_cross_entropy(*inputs(tokens=320, ignored=0.05))
    assert computed == [320]


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_parts(frozen: str, computed: list[int]) -> None:
    hidden, weight, target = inputs()
    set_compaction(False)
    want = torch.autograd.grad(fused_linear_cross_entropy(hidden, weight, target), (hidden, weight))
    set_compaction(True)
    leaves = {"hidden": hidden.detach(), "weight": weight.detach()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(frozen not in (name, "both"))
    loss = fused_linear_cross_entropy(*leaves.values(), target)
    assert computed[1] < computed[0]
    assert loss.requires_grad == (frozen != "both")
    if loss.requires_grad:
        loss.backward()
    for leaf, gradient in zip(leaves.values(), want, strict=True):
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.requires_grad:
            torch.testing.assert_close(leaf.grad, gradient, rtol=1e-5, atol=1e-6)


def test_a_second_backward_pass_over_a_retained_graph() -> None:
    hidden, weight, target = inputs()
    loss = fused_linear_cross_entropy(hidden, weight, target)
    first = torch.autograd.grad(loss, (hidden, weight), torch.tensor(3.0), retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, (hidden, weight), torch.tensor(3.0)), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("device", devices())
def test_a_count_of_other_targets_is_refused(device: str) -> None:
    hidden, weight, target = inputs(device=device)
    want = fused_linear_cross_entropy(hidden, weight, target, reduction="sum")

    def loss(count: ValidCount, targets: torch.Tensor = target, **options: int) -> torch.Tensor:
        return fused_linear_cross_entropy(hidden, weight, targets, reduction="sum", valid_rows=count, **options)

    torch.testing.assert_close(loss(ValidCount(target.view(2, -1))), want)  # another view of all of it
    strided = target.repeat_interleave(2)[::2]
    torch.testing.assert_close(loss(ValidCount(strided), strided), want)
    fewer = target.clone()
    fewer[: fewer.numel() // 2] = -100
    changed = target.clone()
    late = ValidCount(changed)
    changed[0] = 1
    for wrong, given, options in (
        (ValidCount(fewer), target, {}),
        (ValidCount(target.clone()), target, {}),  # the same today
        (ValidCount(target[1:]), target, {}),
        (ValidCount(strided), strided.contiguous(), {}),
        (ValidCount(target, 3), target, {}),
        (ValidCount(target), target, {"ignore_index": 3}),
        (late, changed, {}),
    ):
        with pytest.raises(ValueError, match="fused_linear_cross_entropy: valid_rows was counted from another tensor"):
            loss(wrong, given, **options)
    with torch.inference_mode():
        labels = target.clone()
        torch.testing.assert_close(loss(ValidCount(labels), labels), want)
    with pytest.raises(TypeError, match="valid_rows is a float; an int or a ValidCount is needed"):
        fused_linear_cross_entropy(hidden, weight, target, valid_rows=2.5)


@pytest.mark.parametrize("device", devices())
def test_a_caller_who_knows_the_count(device: str, computed: list[int]) -> None:
    hidden, weight, target = inputs(device=device)
    there = int((target != -100).sum())
    want = fused_linear_cross_entropy(hidden, weight, target)
    for known in (there, there + 20, ValidCount(target)):
        got = fused_linear_cross_entropy(hidden, weight, target, valid_rows=known)
        torch.testing.assert_close(got, want)
    assert computed == [computed[0], computed[0], -(-(there + 20) // 16) * 16, computed[0]]
    if device == "cpu":
        with pytest.raises(ValueError, match=rf"valid_rows is {there - 1}, but {there} targets are not ignore_index"):
            fused_linear_cross_entropy(hidden, weight, target, valid_rows=there - 1)
    else:
        assert fused_linear_cross_entropy(hidden, weight, target, valid_rows=1).isnan()
    with pytest.raises(ValueError, match="valid_rows is -3"):
        fused_linear_cross_entropy(hidden, weight, target, valid_rows=-3)


def test_the_switch(monkeypatch: pytest.MonkeyPatch, computed: list[int]) -> None:
    arguments = inputs()
    for setting, enabled, compacted in (("1", None, True), ("0", None, False), ("0", True, True), ("1", False, False)):
        monkeypatch.setenv("BASTILE_COMPACT", setting)
        set_compaction(enabled)
        fused_linear_cross_entropy(*arguments)
        assert (computed[-1] < 100) == compacted
    set_compaction(None)
    monkeypatch.setenv("BASTILE_COMPACT", "maybe")
    with pytest.raises(ValueError, match="BASTILE_COMPACT is 'maybe'; 0 or 1 is needed"):
        fused_linear_cross_entropy(*arguments)


def test_small_batches_are_not_counted(monkeypatch: pytest.MonkeyPatch, computed: list[int]) -> None:
    monkeypatch.setattr(_valid_rows, "MIN_TOKENS", {"cpu": 101})
    fused_linear_cross_entropy(*inputs(tokens=100))
    fused_linear_cross_entropy(*inputs(tokens=101))
    assert computed[0] == 100
    assert computed[1] < 101


def test_a_number_too_small_does_no_harm_to_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_valid_rows, "MIN_TOKENS", {"cpu": 101})
    hidden, weight, target = inputs(tokens=100)
    got = fused_linear_cross_entropy(hidden, weight, target, valid_rows=0)
    assert_same_bits(got, fused_linear_cross_entropy(hidden, weight, target))


def test_labels_of_eight_bits_have_a_class_156(computed: list[int]) -> None:
    """As torch's loss has it, which takes uint8 too: -100 is not among them."""
    hidden, weight, target = torch.randn(100, 8), torch.randn(200, 8), torch.full((100,), 156)
    got = fused_linear_cross_entropy(hidden, weight, target.to(torch.uint8))
    assert_same_bits(got, fused_linear_cross_entropy(hidden, weight, target))
    assert computed == [100, 100]


def test_compiled_calls_compute_all_rows() -> None:
    hidden, weight, target = inputs()
    want = fused_linear_cross_entropy(hidden, weight, target)
    compiled = torch.compile(fused_linear_cross_entropy, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden, weight, target), want)


def test_tensors_without_values_are_not_counted() -> None:
    """Under FakeTensorMode, by which tools learn how much memory a step needs."""
    model = tiny_model()
    with FakeTensorMode() as mode:
        hidden, weight, target = [mode.from_tensor(tensor) for tensor in inputs()]
        fused_linear_cross_entropy(hidden, weight, target).backward()
        assert (hidden.grad.shape, weight.grad.shape) == (hidden.shape, weight.shape)
        labels = torch.ones(2, 200, dtype=torch.long)
        weights = {name: mode.from_tensor(parameter) for name, parameter in model.named_parameters()}
        buffers = {name: mode.from_tensor(buffer) for name, buffer in model.named_buffers()}
        bastile.apply()
        torch.func.functional_call(model, {**weights, **buffers}, (labels,), {"labels": labels}).loss.backward()
    assert all(weight.grad.shape == weight.shape for weight in weights.values())


# ---- in models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_items", [None, 7])
def test_a_model_counts_before_its_backbone_runs(
    num_items: int | None, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    batch = tiny_batch(model, rows=4, columns=40)
    batch["labels"][:, :25] = -100
    bastile.apply()
    results = []
    for enabled in (False, True):
        set_compaction(enabled)
        loss = model(**batch, num_items_in_batch=num_items).loss
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    assert computed == [160, 64]
    assert_same_up_to_rounding(results[1][0], results[0][0], model, "loss")
    for name, want in results[0][1].items():
        assert_same_up_to_rounding(results[1][1][name], want, model, name)

    from bastile.models.logits import serving

    order: list[str] = []
    count = serving.ValidCount
    monkeypatch.setattr(serving, "ValidCount", lambda *given: order.append("count") or count(*given))
    model.model.register_forward_pre_hook(lambda *given: order.append("backbone"))
    model(**batch)
    assert order == ["count", "backbone"]


def test_instruction_tuning_in_pieces_equals_one_batch() -> None:
    """With num_items the losses of pieces add up to that of the whole, however many labels each piece ignores."""
    model = tiny_model()
    batch = tiny_batch(model, rows=4, columns=40)
    for row, prompt in enumerate((0, 10, 30, 40)):
        batch["labels"][row, :prompt] = -100
    items = (batch["labels"][:, 1:] != -100).sum()
    bastile.apply()
    whole = model(**batch).loss
    whole.backward()
    want = gradients(model)
    pieces = 0.0
    for row in range(4):
        loss = model(**{name: value[row : row + 1] for name, value in batch.items()}, num_items_in_batch=items).loss
        loss.backward()
        pieces += loss.detach()
    assert_same_up_to_rounding(pieces, whole.detach(), model, "loss")
    for name, gradient in gradients(model).items():
        assert_same_up_to_rounding(gradient, want[name], model, name)


# ---- on a GPU -------------------------------------------------------------------------------------------------------

on_a_gpu = pytest.mark.skipif(EMULATED or not torch.cuda.is_available(), reason="needs a GPU")


@on_a_gpu
def test_a_captured_graph_computes_all_rows(computed: list[int]) -> None:
    hidden, weight, target = inputs(device="cuda")
    want = fused_linear_cross_entropy(hidden, weight, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        loss = fused_linear_cross_entropy(hidden, weight, target)
    graph.replay()
    torch.testing.assert_close(loss, want)
    assert computed[-1] == 100


@on_a_gpu
def test_counts_on_a_side_stream_and_mailboxes_used_again() -> None:
    stream = torch.cuda.Stream()
    target = torch.full((5000,), -100, device="cuda")
    _valid_rows._idle.clear()
    for number in range(50):
        with torch.cuda.stream(stream if number % 2 else torch.cuda.current_stream()):
            target = torch.full((5000,), -100, device="cuda")
            target[:number] = 1
            count = ValidCount(target)
            assert count.rows() == count.rows() == number
    assert [len(mailboxes) for mailboxes in _valid_rows._idle.values()] == [1]


@on_a_gpu
def test_a_count_that_has_arrived_waits_for_nobody() -> None:
    target = torch.zeros(4096, dtype=torch.int64, device="cuda")
    count = ValidCount(target)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # half a second of other work, queued after the count
    assert count.rows() == 4096
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("device", devices())
def test_counts_in_inference_mode_and_out_of_it_share_what_they_may(device: str) -> None:
    target = torch.tensor([1, -100, 2], device=device)
    for mode in (True, False, True, False):
        with torch.inference_mode(mode):
            assert ValidCount(target).rows() == 2
