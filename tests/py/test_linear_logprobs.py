"""Log-probabilities of targets from hidden states against float64, on every device at hand; log_softmax of float32
logits is the yardstick. And small losses, of this and the two other losses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bastile.ops import _valid_rows
from bastile.ops import linear_logprobs as module
from bastile.ops.cross_entropy import cross_entropy
from bastile.ops.fused_linear_cross_entropy import fused_linear_cross_entropy, set_logits_memory
from bastile.ops.linear_logprobs import OUTPUTS, LogProbs, linear_logprobs
from oracle import (
    DTYPES,
    EMULATED,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_same_bits,
    devices,
    few_examples,
    random_tensor,
)

F = torch.nn.functional
#: Those with gradients.
ALL = ("entropy", "lse")


def yardstick(hidden, weight, bias, target, outputs, exact=False, **options) -> LogProbs:
    """Logits in their own type, then float32; exact: all in float64."""
    z = F.linear(hidden, weight, bias)
    z = (z if exact else z.float()) * options.get("logit_scale", 1.0)
    if options.get("softcap"):
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    z = z / options.get("temperature", 1.0)
    counts = target != -100
    at = target.masked_fill(~counts, 0)[:, None]
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    found = {"entropy": -(p * log_p).sum(-1), "lse": z.logsumexp(-1)}
    found["log_sum_sq_probs"], found["mean_logits"] = p.square().sum(-1).log(), z.mean(-1)
    found["is_top1"] = z.argmax(-1) == at[:, 0]
    found = {name: t.masked_fill(~counts, 0) for name, t in found.items() if name in outputs}
    return LogProbs(log_p.gather(1, at)[:, 0].masked_fill(~counts, 0), **found)


def trls(hidden, weight, bias, target, outputs, **options) -> LogProbs:
    """Its function counts every row, and has no lse."""
    from trl.kernels import ChunkedLogProbFunction

    log_probs, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, bias, target, options.get("temperature", 1.0), 512, None, 1.0, outputs
    )
    return LogProbs(log_probs, entropy)


def inputs_of(tokens, vocabulary, width, dtype, device, *, bias=False, ignored=0.3, scale=1.0):
    target = random_tensor((tokens,), torch.float32, "cpu").mul(1e4).long().remainder(vocabulary)
    target[random_tensor((tokens,), torch.float32, "cpu") < torch.special.ndtri(torch.tensor(ignored))] = -100
    inputs = {
        "hidden": random_tensor((tokens, width), dtype, device, scale=scale),
        "weight": random_tensor((vocabulary, width), dtype, device, scale=width**-0.5),
    }
    if bias:
        inputs["bias"] = random_tensor((vocabulary,), dtype, device)
    return inputs, target.to(device)


def case(
    tokens,
    vocabulary,
    width,
    dtype,
    device,
    *,
    outputs=ALL,
    bias=False,
    ignored=0.3,
    scale=1.0,
    stock=yardstick,
    **options,
):
    inputs, target = inputs_of(tokens, vocabulary, width, dtype, device, bias=bias, ignored=ignored, scale=scale)

    def version(function, **more):
        def run(hidden, weight, *rest):
            found = function(hidden, weight, rest[0] if bias else None, rest[-1], outputs, **options, **more)
            return tuple(t for t in found if t is not None)

        return run

    def ours(hidden, weight, b, t, names, **more):
        return linear_logprobs(hidden, weight, t, bias=b, outputs=names, **more)

    return Case(
        version(ours),
        version(stock),
        version(yardstick, exact=True),
        inputs,
        {"target": target},
        # Of a row's gradient of the logits one number is large, the target's: its error is all of the row's.
        independent=max(1, int((target != -100).sum())),
        # Differences of terms as large as these: float32 does not resolve less.
        terms={"output 0": 4.0 * scale, "output 1": 4.0 * scale},
    )


@pytest.fixture(autouse=True)
def _budget_as_it_was():
    yield
    set_logits_memory(None)
    module.set_float32_dweight(None)


#: One row; a vocabulary that ends within a vector, one of whole vectors, less than a vector; rows of several tiles
#: (2048 on CPU); more rows than a chunk of the smallest budget (64).
SHAPES = [(1, 37, 16), (7, 64, 8), (5, 3, 8), (3, 4099, 8), (150, 101, 24)]
OPTIONS = [
    {},
    {"bias": True, "temperature": 0.7},
    {"softcap": 3.0, "logit_scale": 1.7, "temperature": 1.3},
    {"logit_scale": -0.6, "bias": True, "softcap": 5.0},
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES if not EMULATED else [(1, 37, 16), (5, 3, 8), (2, 4099, 8), (70, 101, 24)])
def test_values_and_gradients(shape, dtype, device):
    set_logits_memory(1e-6 if shape[0] > 64 else None)
    assert_no_worse(case(*shape, dtype, device))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_options(options, dtype, device):
    assert_no_worse(case(9, 77, 16, dtype, device, **options))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("outputs", [(), ("entropy",), ("lse",)], ids=str)
def test_each_output_alone(outputs, device):
    assert_no_worse(case(9, 77, 16, torch.float32, device, outputs=outputs))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "stock"), [((), yardstick), (ALL, yardstick), (("entropy",), trls)])
@pytest.mark.skipif(EMULATED, reason="many numbers; the CPU's exponentials would stand for the chip's")
def test_pooled_errors(outputs, stock, dtype, device):
    """None ignored: a product over fewer rows is another sum, MKL's to order."""
    if stock is trls:
        pytest.importorskip("trl.kernels")
    options = {"outputs": outputs, "stock": stock, "ignored": 0.0, "scale": 2.0}
    assert_no_worse_pooled(lambda: case(256, 1031, 64, dtype, device, **options))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_statistics(options, dtype, device):
    """What has no gradient: no further from float64 than the yardstick is, within the luck of the draw."""
    options = dict(options)
    inputs, target = inputs_of(33, 203, 16, dtype, device, bias=options.pop("bias", False))
    args = [inputs["hidden"], inputs["weight"]]
    bias = inputs.get("bias")
    got = linear_logprobs(*args, target, bias=bias, outputs=OUTPUTS, **options)
    stock = yardstick(*args, bias, target, OUTPUTS, **options)
    exact = yardstick(*[t.double() for t in args], None if bias is None else bias.double(), target, OUTPUTS,
                      exact=True, **options)  # fmt: skip
    for name in ("log_sum_sq_probs", "mean_logits"):
        ours, theirs, true = (getattr(found, name).double() for found in (got, stock, exact))
        floor = 4 * torch.finfo(torch.float32).eps * true.abs().max()
        assert (ours - true).square().mean().sqrt() <= 1.1 * (theirs - true).square().mean().sqrt() + floor, name
    assert got.is_top1.dtype is torch.bool
    assert torch.equal(got.is_top1, stock.is_top1)  # of the very logits: of those in float64 another may be largest


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_top_one_is_the_first_of_the_largest(sign, device):
    weight = torch.tensor([[0.0], [2.0], [1.0], [2.0], [2.0]] + 4096 * [[-3.0]] + [[2.0]], device=device)
    hidden = torch.ones(6, 1, device=device)
    target = torch.tensor([0, 1, 2, 3, 4101, -100], device=device)
    got = linear_logprobs(hidden, sign * weight, target, logit_scale=sign, outputs=("is_top1",))
    assert got.is_top1.tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize("device", devices())
@given(
    tokens=st.integers(0, 70),
    vocabulary=st.integers(1, 600 if EMULATED else 3000),
    width=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    budget=st.sampled_from([None, 1e-6]),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    outputs=st.sampled_from([(), ("entropy",), ("lse",), ALL]),
    temperature=st.sampled_from([1.0, 0.5, 2.0]),
    softcap=st.sampled_from([None, 10.0]),
    exact_sums=st.booleans(),
)
@few_examples
def test_any_shape_and_options(
    tokens, vocabulary, width, dtype, bias, budget, ignored, outputs, temperature, softcap, exact_sums, device
):
    set_logits_memory(budget)
    module.set_float32_dweight(exact_sums)
    one = case(tokens, vocabulary, width, dtype, device, outputs=outputs, bias=bias, ignored=ignored,
               temperature=temperature, softcap=softcap)  # fmt: skip
    # Two chunks of 16 bits are added up after a rounding, where float32 was not asked for.
    one.extra_roundings = {"dweight": 1.0}
    # A word that is certain: log p is a small difference in the yardstick's float32, and a zero in ours.
    assert_no_worse(one)


# ---- small losses ----------------------------------------------------------------------------------------------------

MARGINS = torch.arange(1, 61, dtype=torch.float32)


def confident(dtype, device, vocabulary, target):
    """Rows of logits with the target above the others by 1, 2, ... 60, and -log p of it, in float64."""
    hidden = MARGINS[:, None].to(dtype).to(device)
    weight = torch.zeros(vocabulary, 1, dtype=dtype, device=device)
    weight[target] = 1
    targets = torch.full((len(MARGINS),), target, device=device)
    return hidden, weight, targets, torch.log1p((vocabulary - 1) * torch.exp(-MARGINS.double())).to(device)


def bound(dtype, device):
    """1e-6, on each side of which there is one exponential. On CUDA what is raised to a power is rounded where it is
    as large as the margin in powers of two, for 16-bit logits; for float32 the rest is added."""
    if dtype is torch.float32 or (device == "cpu" and not EMULATED):
        return 1e-6
    return (1e-6 + MARGINS.double() * 2 * 2**-24 / math.log(2)).to(device)


WAYS = {
    "linear_logprobs": lambda hidden, weight, target: -linear_logprobs(hidden, weight, target).log_probs,
    "cross_entropy": lambda hidden, weight, target: cross_entropy(hidden @ weight.T, target, reduction="none"),
    "fused": lambda hidden, weight, target: fused_linear_cross_entropy(hidden, weight, target, reduction="none"),
}


#: On CUDA: rows of a block's registers; of a ring; that begin between vectors.
VOCABULARIES = [4096, 40008, 333] if EMULATED else [4096, 151936, 40008, 333]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("way", WAYS)
def test_small_losses_keep_their_digits(way, vocabulary, device):
    dtypes = [torch.float32, torch.bfloat16]
    for dtype in dtypes:
        for target in (0, vocabulary // 2 + 3, vocabulary - 1):
            if EMULATED and vocabulary > 5000 and target == 0:
                continue
            hidden, weight, targets, exact = confident(dtype, device, vocabulary, target)
            weight.requires_grad_()
            loss = WAYS[way](hidden, weight, targets)
            error = ((loss.double() - exact) / exact).abs()
            assert (error <= bound(dtype, device)).all(), error.max()
            # The target's gradient, p - 1, of each row: weight has one column, and row i alone is looked at.
            for row in range(0, len(MARGINS), 15):
                (gradient,) = torch.autograd.grad(loss[row], weight, retain_graph=True)
                want = -torch.expm1(-exact[row]) * -MARGINS[row].double()
                unit = torch.finfo(dtype).eps if dtype is not torch.float32 else 0.0
                off = abs(gradient[target, 0].double() - want) / abs(want)
                assert off <= 1e-6 + MARGINS[row] * 2**-22 + 2 * unit, (row, off)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", VOCABULARIES[:2])
def test_small_losses_and_gradients_made_at_once(vocabulary, dtype, device):
    """As the mean's: the kernels that read a row once. The others' part of the gradient is what the target lacks."""
    target = vocabulary // 2 + 3
    hidden, weight, targets, exact = confident(dtype, device, vocabulary, target)
    rows = slice(None, None, 15) if EMULATED else slice(None)
    logits = (hidden @ weight.T)[rows].requires_grad_()
    loss = cross_entropy(logits, targets[rows], reduction="sum")
    (gradient,) = torch.autograd.grad(loss, logits)
    assert abs(loss.double() - exact[rows].sum()) <= 1e-6 * exact[rows].sum()
    want = torch.expm1(-exact[rows])
    unit = torch.finfo(dtype).eps if dtype is not torch.float32 else 0.0
    off = ((gradient[:, target].double() - want) / want).abs()
    assert (off <= 1e-6 + MARGINS[rows].to(device) * 2**-22 + unit).all(), off.max()


@pytest.mark.parametrize("device", devices())
def test_of_what_log_softmax_loses_something_is_left(device):
    """Margin 16, as the issue has it: 1.1e-7 is zero in lse - z."""
    logits = torch.tensor([[16.0, 0.0]], device=device)
    target = torch.zeros(1, dtype=torch.int64, device=device)
    assert F.cross_entropy(logits, target).item() != pytest.approx(math.log1p(math.exp(-16)), rel=1e-2)
    assert cross_entropy(logits, target).item() == pytest.approx(math.log1p(math.exp(-16)), rel=1e-6)


# ---- what else holds -------------------------------------------------------------------------------------------------


def leaves(device, dtype=torch.float32, tokens=7, vocabulary=19, width=8):
    inputs, target = inputs_of(tokens, vocabulary, width, dtype, device)
    return inputs["hidden"].requires_grad_(), inputs["weight"].requires_grad_(), target


@pytest.mark.parametrize("device", devices())
def test_names_and_shapes(device):
    hidden, weight, target = leaves(device)
    found = linear_logprobs(hidden.reshape(1, 7, 8), weight, target.reshape(1, 7), outputs=("lse", "is_top1"))
    assert found._fields == ("log_probs", *OUTPUTS)
    assert [None if t is None else (t.shape, t.dtype) for t in found] == [
        ((1, 7), torch.float32), None, ((1, 7), torch.float32), None, None, ((1, 7), torch.bool)
    ]  # fmt: skip
    assert found.log_probs.requires_grad
    assert found.lse.requires_grad
    assert not found.is_top1.requires_grad
    with torch.no_grad():
        assert not linear_logprobs(hidden, weight, target).log_probs.requires_grad


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_count(dtype, device):
    hidden, weight, target = leaves(device, dtype)
    for tokens, labels in ((0, target[:0]), (7, torch.full_like(target, -100))):
        found = linear_logprobs(hidden[:tokens], weight, labels, outputs=OUTPUTS)
        assert all(t.shape == (tokens,) and not t.any() for t in found)
        gradients = torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), (hidden, weight))
        assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("device", devices())
def test_bits_repeat_and_graphs_may_be_run_again(device):
    hidden, weight, target = leaves(device, torch.bfloat16)
    results = []
    for _ in range(2):
        found = linear_logprobs(hidden, weight, target, outputs=ALL)
        total = (found.log_probs * 0.3 + found.entropy).sum()
        first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
        results += [(*found[:3], *first), (*found[:3], *torch.autograd.grad(total, (hidden, weight)))]
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            assert_same_bits(a.detach(), b.detach())


@pytest.mark.parametrize("device", devices())
def test_any_strides(device):
    hidden, weight, target = leaves(device, tokens=6, vocabulary=16, width=8)
    want = torch.autograd.grad(linear_logprobs(hidden, weight, target).log_probs.sum(), (hidden, weight))
    turned = [t.detach().t().contiguous().t().requires_grad_() for t in (hidden, weight)]
    spread = torch.stack([target, target], 1)[:, 0]
    got = torch.autograd.grad(linear_logprobs(*turned, spread).log_probs.sum(), turned)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", devices())
def test_ignored_rows_are_left_out_of_the_products(device, monkeypatch):
    hidden, weight, target = leaves(device, tokens=300)
    target[17:] = -100
    counted = int((target != -100).sum())
    monkeypatch.setattr(_valid_rows, "MIN_TOKENS", {})
    want = linear_logprobs(hidden, weight, target, outputs=OUTPUTS)
    rows = []
    forward = module._forward
    monkeypatch.setattr(module, "_forward", lambda h, *rest: rows.append(h.shape[0]) or forward(h, *rest))
    monkeypatch.setattr(_valid_rows, "MIN_TOKENS", {"cpu": 256, "cuda": 256})
    monkeypatch.setattr(_valid_rows, "_MULTIPLE", {"cpu": 16, "cuda": 16})
    got = linear_logprobs(hidden, weight, target, outputs=OUTPUTS)
    assert rows == [-(-counted // 16) * 16]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    (gradient,) = torch.autograd.grad(got.log_probs.sum() + got.entropy.sum(), hidden)
    assert gradient[:17].any(1).sum() == counted
    assert not gradient[17:].any()


@pytest.fixture
def ran(monkeypatch):
    """Which of the backward operators ran."""
    names = []
    for name in ("_backward", "_backward_kept"):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=function, n=name: (names.append(n), f(*a))[1])
    return names


@pytest.mark.skipif(not torch.cuda.is_available(), reason="logits are kept on CUDA alone")
@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_logits_give_the_bits_of_those_made_again(dtype, ran):
    hidden, weight, target = leaves("cuda", dtype, tokens=64, vocabulary=1000, width=64)
    found = linear_logprobs(hidden, weight, target, outputs=ALL)
    total = found.log_probs.sum() + found.entropy.sum()
    again = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    for a, b in zip(again, torch.autograd.grad(total, (hidden, weight)), strict=True):
        assert_same_bits(a, b)
    assert ran == ["_backward", "_backward_kept"]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [70, 128, 150])
def test_a_chunk_of_what_does_not_fit_is_kept(tokens, dtype, device, monkeypatch):
    """The last 64 rows' logits, which is all that the budget holds; the others are made again in their place."""
    set_logits_memory(1e-6)
    module.set_float32_dweight(True)
    hidden, weight, target = leaves(device, dtype, tokens=tokens, vocabulary=40, width=16)
    kept, backward = [], module._backward_kept
    monkeypatch.setattr(module, "on_gpu", lambda t: True)
    monkeypatch.setattr(module, "_backward_kept", lambda *a: kept.append(a[9].shape[0]) or backward(*a))
    found = linear_logprobs(hidden, weight, target, outputs=ALL)
    total = (found.log_probs * torch.arange(tokens, device=hidden.device)).sum() + found.entropy.sum()
    again = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    for a, b in zip(again, torch.autograd.grad(total, (hidden, weight)), strict=True):
        bound = 8 * torch.finfo(dtype).eps * a.float().abs().max()
        assert (a.float() - b.float()).abs().max() <= bound  # sums in another order, rounded once
    assert kept == [64]


# ---- a frozen head ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_frozen_head_s_gradients_are_as_exact(options, dtype, device, ran):
    """Several chunks, an upstream gradient of each row's own, rows that do not count; nothing is made again."""
    set_logits_memory(1e-6)
    given = case(70, 101, 24, dtype, device, outputs=(), **options)
    frozen = {name: t for name, t in given.inputs.items() if name != "hidden"}

    def version(function):
        def run(hidden, *rest):
            return function(hidden, *[t.to(hidden.dtype) if t.is_floating_point() else t for t in rest])

        return run

    versions = [version(f) for f in (given.ours, given.stock, given.exact)]
    inputs, others = {"hidden": given.inputs["hidden"]}, {**frozen, **given.constants}
    assert_no_worse(Case(*versions, inputs, others, independent=given.independent, terms=given.terms))
    assert ran == []


@pytest.mark.parametrize("device", devices())
def test_a_frozen_head_s_entropy_has_its_gradient(device, ran):
    set_logits_memory(1e-6)
    hidden, weight, target = leaves(device, tokens=80)
    results = []
    for head in (weight.detach(), weight):
        found = linear_logprobs(hidden, head, target, outputs=ALL)
        for total in (found.entropy.sum(), found.lse.sum() + (found.log_probs * 3).sum()):
            results.append(torch.autograd.grad(total, hidden, retain_graph=True)[0])
    assert ran == ["_backward"] * 4
    # Of a head that is trained a GPU keeps a chunk's logits, so that its chunks have other sizes, and products of
    # other sizes may have other bits.
    torch.testing.assert_close(results[0], results[2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[1], results[3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_head_s_graph_may_be_run_again(dtype, device, ran):
    set_logits_memory(1e-6)
    hidden, weight, target = leaves(device, dtype, tokens=80)
    total = linear_logprobs(hidden, weight.detach(), target, outputs=ALL).log_probs.square().sum()
    passes = [torch.autograd.grad(total, hidden, retain_graph=i < 2)[0] for i in range(3)]
    assert_same_bits(passes[0], passes[1])
    assert_same_bits(passes[0], passes[2])
    assert ran == []
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, hidden)


def test_half_precision_of_a_frozen_head_waits_for_its_scale(ran):
    """Without the loss scale that comes with the upstream gradient, p would vanish in float16."""
    set_logits_memory(1e-6)
    hidden, weight, target = leaves("cpu", torch.float16, tokens=80)
    (linear_logprobs(hidden, weight.detach(), target).log_probs.sum() * 1024).backward()
    assert ran == ["_backward"]


def test_under_autocast_and_on_other_tensors():
    hidden, weight, target = leaves("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_logprobs(hidden, weight, target).log_probs
    want = linear_logprobs(hidden.bfloat16(), weight.bfloat16(), target).log_probs
    assert_same_bits(found.detach(), want.detach())
    # float64 is none of the kernels': the formulas in plain torch.
    wide = linear_logprobs(hidden.double(), weight.double(), target, outputs=OUTPUTS)
    exact = yardstick(hidden.double(), weight.double(), None, target, OUTPUTS, exact=True)
    for a, b in zip(wide, exact, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("budget", [None, 1e-6])  # the second: two chunks of rows
def test_a_float32_weight_under_autocast_has_a_gradient_that_is_not_rounded(budget, device):
    """On a GPU; on a CPU, whose products of 16 bits are rounded, that of each chunk is. Either is no further from
    float64 than a gradient that is rounded once more."""
    set_logits_memory(budget)
    hidden, weight, target = leaves(device, tokens=80, vocabulary=40, width=16)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = linear_logprobs(hidden, weight, target, outputs=("entropy",))
    (gradient,) = torch.autograd.grad((found.log_probs + 0.1 * found.entropy).sum(), weight)
    lower = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    found = linear_logprobs(*lower, target, outputs=("entropy",))
    (rounded,) = torch.autograd.grad((found.log_probs + 0.1 * found.entropy).sum(), lower[1])
    wide = [t.detach().double().requires_grad_() for t in lower]
    exact = yardstick(*wide, None, target, ("entropy",), exact=True)
    (true,) = torch.autograd.grad((exact.log_probs + 0.1 * exact.entropy).sum(), wide[1])
    assert gradient.dtype is torch.float32
    assert (gradient - true).square().mean() <= (rounded - true).square().mean()
    if device == "cuda" or EMULATED or budget:
        assert (gradient != gradient.bfloat16()).sum() > gradient.numel() / 2
    (again,) = torch.autograd.grad(  # a second derivative finds its way to the weight
        linear_logprobs_under_autocast(hidden, weight, target, device), weight, create_graph=True
    )
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(again.sum(), weight)


def linear_logprobs_under_autocast(hidden, weight, target, device):
    with torch.autocast(device, dtype=torch.bfloat16):
        return linear_logprobs(hidden.detach(), weight, target).log_probs.sum()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"outputs": ("entropie",)}, ValueError, "outputs names 'entropie'"),
        ({"temperature": 0.0}, ValueError, "temperature is 0.0"),
        ({"target": [1, 2]}, TypeError, "target is a list"),
        ({"softcap": -1.0}, RuntimeError, "softcap is -1"),
        ({"logit_scale": math.inf}, RuntimeError, "logit_scale is inf"),
        ({"weight": torch.zeros(19, 9)}, RuntimeError, "weight has shape"),
        ({"weight": torch.zeros(19, 8).bfloat16()}, RuntimeError, "weight is"),
        ({"bias": torch.zeros(18)}, RuntimeError, "bias has shape"),
        ({"target": torch.zeros(6, dtype=torch.int64)}, RuntimeError, "target has shape"),
        ({"hidden": torch.zeros(7, 8, dtype=torch.int64)}, TypeError, "hidden is torch.int64"),
        ({"hidden": torch.tensor(1.0)}, ValueError, "hidden is a scalar"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_errors_name_the_argument(change, error, message):
    hidden, weight, target = leaves("cpu")
    call = {"hidden": hidden, "weight": weight, "target": target, **change}
    with pytest.raises(error, match=message):
        linear_logprobs(**call)


@pytest.mark.skipif(EMULATED, reason="on CUDA targets are not checked, for that would wait for the device")
def test_a_target_out_of_range_is_named():
    hidden, weight, target = leaves("cpu")
    target[3] = 19
    with pytest.raises(RuntimeError, match=r"target\[3\] is 19"):
        linear_logprobs(hidden, weight, target)
