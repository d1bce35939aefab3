"""A student's divergence from a teacher, from hidden states and heads, against float64, on every device at hand; the
yardsticks are log_softmax of float32 logits and TRL's function."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from bastile.ops import _valid_rows
from bastile.ops import linear_divergence as module
from bastile.ops.fused_linear_cross_entropy import set_logits_memory
from bastile.ops.linear_divergence import KINDS, linear_divergence
from oracle import (
    DTYPES,
    EMULATED,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_same_bits,
    devices,
    random_tensor,
)

F = torch.nn.functional
CUDA = torch.cuda.is_available() and not EMULATED


def yardstick(hidden, weight, bias, teacher_logits, kind, beta=0.3, **options):
    """Of logits in float32 (or float64), as a paper writes it."""
    maps = [(options.get(p + "logit_scale", 1.0), options.get(p + "softcap", 0.0)) for p in ("", "teacher_")]
    found = []
    for z, (scale, cap) in zip((F.linear(hidden, weight, bias), teacher_logits), maps, strict=True):
        z = (z if z.dtype is torch.float64 else z.float()) * scale
        z = cap * torch.tanh(z / cap) if cap else z
        found.append((z / options.get("temperature", 1.0)).log_softmax(-1))
    log_p, log_q = found
    if kind == "jsd":
        log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
        of_teacher, of_student = ((a.exp() * (a - log_m)).sum(-1) for a in (log_q, log_p))
        return beta * of_teacher + (1 - beta) * of_student
    a, b = (log_q, log_p) if kind == "forward" else (log_p, log_q)
    return (a.exp() * (a - b)).sum(-1)


def trls(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, kind, beta=0.3, **options):
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    beta = {"forward": 0.0, "reverse": 1.0}.get(kind, beta)
    return ChunkedDivergenceFunction.apply(
        hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, beta, options.get("temperature", 1.0),
        1.0, None, 1.0, None,
    )[0]  # fmt: skip


def inputs_of(tokens, vocabulary, width, dtype, device, *, bias=False, near=None):
    """The student's, and the teacher's hidden states, weight and bias; near: how far these are from the student's."""
    student = {
        "hidden": random_tensor((tokens, width), dtype, device, scale=2.0),
        "weight": random_tensor((vocabulary, width), dtype, device, scale=width**-0.5),
    }
    if bias:
        student["bias"] = random_tensor((vocabulary,), dtype, device)
    if near is not None:
        noise = random_tensor((tokens, width), torch.float32, device, scale=near)
        return student, [(student["hidden"] + noise).to(dtype), student["weight"], student.get("bias")]
    other = 3 * width // 2
    teacher = [
        random_tensor((tokens, other), dtype, device, scale=2.0),
        random_tensor((vocabulary, other), dtype, device, scale=other**-0.5),
        random_tensor((vocabulary,), dtype, device) if bias else None,
    ]
    return student, teacher


def case(tokens, vocabulary, width, dtype, device, kind, *, bias=False, near=None, stock=None, **options):
    student, teacher = inputs_of(tokens, vocabulary, width, dtype, device, bias=bias, near=near)

    def ours(hidden, weight, *b):
        more = {"bias": b[0], "teacher_bias": teacher[2]} if bias else {}
        return linear_divergence(hidden, weight, *teacher[:2], kind=kind, **{"beta": 0.3, **more, **options}).divergence

    def plain(hidden, weight, *b):
        wide = [None if t is None else t.to(hidden.dtype) for t in teacher]
        return yardstick(hidden, weight, b[0] if bias else None, F.linear(*wide), kind, **options)

    def by_trl(hidden, weight, *b):
        return trls(hidden, weight, b[0] if bias else None, *teacher, kind, **options)

    size = 8.0 * abs(options.get("logit_scale", 1.0)) / options.get("temperature", 1.0)
    return Case(
        ours,
        by_trl if stock == "trl" else plain,
        plain,
        student,
        independent=tokens,
        terms={"output 0": size, "dhidden": size * width**-0.5},
    )


@pytest.fixture(autouse=True)
def _budget_as_it_was():
    yield
    set_logits_memory(None)


#: One row; a vocabulary that ends within a vector, one of whole vectors, less than a vector; rows of several tiles
#: (2048 on CPU, 4096 on CUDA); more rows than a chunk of the smallest budget (64).
SHAPES = [(1, 37, 16), (7, 64, 8), (5, 3, 8), (3, 4101, 8), (150, 101, 24)]
OPTIONS = [
    {"bias": True, "temperature": 0.7},
    {"softcap": 3.0, "teacher_softcap": 5.0, "logit_scale": 1.7, "temperature": 1.3},
    {"logit_scale": -0.6, "teacher_logit_scale": 0.8, "bias": True, "teacher_softcap": 5.0},
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES if not EMULATED else [(1, 37, 16), (5, 3, 8), (2, 4101, 8), (70, 101, 24)])
def test_values_and_gradients(shape, kind, dtype, device):
    set_logits_memory(1e-6 if shape[0] > 64 else None)
    assert_no_worse(case(*shape, dtype, device, kind))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, kind, dtype, device):
    assert_no_worse(case(9, 77, 16, dtype, device, kind, **options))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stock", ["logits", "trl"])
@pytest.mark.skipif(EMULATED, reason="many numbers; the CPU's exponentials would stand for the chip's")
def test_pooled_errors(stock, kind, dtype, device):
    """TRL's function, too, has its logits in float32."""
    if stock == "trl":
        pytest.importorskip("trl.kernels.chunked_divergence")
    assert_no_worse_pooled(lambda: case(128, 1031, 64, dtype, device, kind, stock=stock, temperature=0.8))


# ---- small divergences -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", KINDS)
def test_small_divergences_keep_their_digits(kind, device):
    """Logits that are float32 numbers, given: no product's error. 3e-6 of what is 1e-9, where subtracting cancels, and
    the square of what normalisers near 8 are rounded by, 2^-21."""
    rows, classes = (3, 333) if EMULATED else (20, 5003)
    z = random_tensor((rows, classes), torch.float32, device, scale=3.0)
    eye = torch.eye(rows, device=device)
    near = z + random_tensor(z.shape, torch.float32, device, scale=2e-4)
    weight = z.T.contiguous().requires_grad_()
    found = linear_divergence(eye, weight, teacher_logits=near, kind=kind, beta=0.3).divergence
    exact = [z.double().requires_grad_(), near.double()]
    wanted = yardstick(exact[0], torch.eye(classes, dtype=torch.float64, device=device), None, exact[1], kind)
    assert 1e-10 < wanted.max() < 1e-7
    assert ((found.double() - wanted).abs() <= 3e-6 * wanted + 0.5 * 2.0**-42).all()
    plain = yardstick(z, torch.eye(classes, device=device), None, near, kind)
    assert ((plain.double() - wanted) / wanted).abs().max() > 1e-2, "what the naive sum loses"
    (gradient,) = torch.autograd.grad(found.sum(), weight)
    (exact_gradient,) = torch.autograd.grad(wanted.sum(), exact[0])
    error = (gradient.T.double() - exact_gradient).norm() / exact_gradient.norm()
    # Two normalisers between 4 and 8, rounded to 2^-22 each, beside d, 2e-4. In the others they cancel.
    assert error < (2.0**-21 / 2e-4 if kind == "forward" else 1e-6)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", KINDS)
def test_of_itself_it_is_zero(kind, device):
    student, _ = inputs_of(5, 101, 16, torch.bfloat16, device)
    hidden, weight = (t.requires_grad_() for t in student.values())
    found = linear_divergence(hidden, weight, hidden.detach(), weight.detach(), kind=kind).divergence
    assert not found.any()
    gradients = torch.autograd.grad(found.sum(), (hidden, weight))
    assert all(g.abs().max() < 1e-6 for g in gradients)


# ---- what the teacher gives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_its_logits(kind, dtype, device):
    """Read where they lie, in their own type; rows apart, and such that no vector fits."""
    student, _ = inputs_of(9, 77, 16, torch.float32, device)
    for width in (80, 77):
        logits = random_tensor((9, width), dtype, device, scale=3.0)[:, :77]

        def ours(hidden, weight, z=logits):
            return linear_divergence(hidden, weight, teacher_logits=z, kind=kind, beta=0.3).divergence

        def plain(hidden, weight, z=logits):
            return yardstick(hidden, weight, None, z.to(torch.promote_types(hidden.dtype, dtype)), kind)

        assert_no_worse(Case(ours, plain, plain, student, independent=9, terms={"output 0": 8.0, "dhidden": 2.0}))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["forward", "jsd"])
@pytest.mark.parametrize("options", [{}, {"teacher_softcap": 5.0, "teacher_logit_scale": -0.7}], ids=str)
def test_its_largest_logits(options, kind, device):
    """As all logits of which the others are -inf, whatever the teacher's scale and cap."""
    student, _ = inputs_of(70, 77, 16, torch.float32, device)
    hidden, weight = (t.requires_grad_() for t in student.values())
    values, indices = random_tensor((70, 77), torch.float32, device, scale=3.0).topk(9, -1)
    z = values.double() * options.get("teacher_logit_scale", 1.0)
    z = 5 * torch.tanh(z / 5) if options else z
    log_q = z.new_full((70, 77), -torch.inf).scatter_(1, indices, z)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = module.reference(wide[0] @ wide[1].T, log_q, kind, 0.3, 1.0, 1.0, 0.0, 1.0, 0.0).divergence
    gradients = torch.autograd.grad(wanted.sum(), wide)
    for budget in (None, 1e-6):
        set_logits_memory(budget)
        given = {"teacher_logits": values, "teacher_indices": indices, **options}
        found = linear_divergence(hidden, weight, kind=kind, beta=0.3, **given).divergence
        torch.testing.assert_close(found, wanted.float())
        for a, b in zip(torch.autograd.grad(found.sum(), (hidden, weight)), gradients, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    assert (linear_divergence(hidden, weight, kind="reverse", **given).divergence == torch.inf).all()


# ---- what else holds -------------------------------------------------------------------------------------------------


def leaves(device, dtype=torch.float32, tokens=7, vocabulary=19, width=8):
    student, teacher = inputs_of(tokens, vocabulary, width, dtype, device)
    return *[t.requires_grad_() for t in student.values()], *teacher[:2]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", KINDS)
def test_entropy_and_rows_that_do_not_count(kind, device, monkeypatch):
    hidden, weight, *teacher = leaves(device, tokens=300)
    mask = random_tensor((300,), torch.float32, "cpu").lt(-0.5).to(device)
    log_p = F.linear(hidden, weight).detach().double().log_softmax(-1)
    results = []
    for tokens in ({}, {"cpu": 256, "cuda": 256}):  # all rows in the products; those alone that count
        monkeypatch.setattr(_valid_rows, "MIN_TOKENS", tokens)
        found = linear_divergence(
            hidden.view(3, 100, 8), weight, teacher[0].view(3, 100, -1), teacher[1], kind=kind,
            mask=mask.view(3, 100), outputs=("entropy",),
        )  # fmt: skip
        assert found.divergence.shape == found.entropy.shape == (3, 100)
        assert not found.entropy.requires_grad
        results.append([*found, *torch.autograd.grad(found.divergence.sum(), (hidden, weight))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    entropy = torch.where(mask, -(log_p.exp() * log_p).sum(-1), 0)
    torch.testing.assert_close(results[0][1].view(-1).double(), entropy, rtol=1e-6, atol=1e-6)
    assert not results[0][0].view(-1)[~mask].any()
    assert not results[0][2][~mask].any()
    whole = linear_divergence(hidden, weight, *teacher, kind=kind).divergence
    torch.testing.assert_close(results[0][0].view(-1)[mask], whole[mask])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_count(dtype, device):
    hidden, weight, *teacher = leaves(device, dtype)
    for tokens in (0, 7):
        mask = torch.zeros(tokens, device=device)
        found = linear_divergence(hidden[:tokens], weight, teacher[0][:tokens], teacher[1], mask=mask).divergence
        assert found.shape == (tokens,)
        assert not found.any()
        assert not any(g.any() for g in torch.autograd.grad(found.sum(), (hidden, weight)))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", KINDS)
def test_bits_repeat_and_graphs_may_be_run_again(kind, device):
    hidden, weight, *teacher = leaves(device, torch.bfloat16, vocabulary=4500 if not EMULATED else 45)
    results = []
    for _ in range(2):
        found = linear_divergence(hidden, weight, *teacher, kind=kind).divergence
        for upstream in (found.sum(), (found * 0.3).square().sum()):
            results.append([found.detach(), *torch.autograd.grad(upstream, (hidden, weight), retain_graph=True)])
    for first, again in zip(results[:2], results[2:], strict=True):
        for a, b in zip(first, again, strict=True):
            assert_same_bits(a, b)


@pytest.fixture
def early(monkeypatch):
    """Gradients are kept, or made in the forward pass, as on CUDA alone; the backward operators that then run."""
    ran = []

    def spied(name):
        op = getattr(module, name)

        def spy(*args):
            ran.append((name, *args[-3:]))
            return op(*args)

        monkeypatch.setattr(module, name, spy)

    spied("_backward")
    spied("_backward_kept")
    monkeypatch.setattr(module, "on_gpu", lambda t: True)
    return ran


SUMMED = {
    "a sum": lambda t: t.sum() * 0.3,
    "of its own a row": lambda t: (t * torch.arange(len(t), device=t.device)).sum(),
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_early_gradients_are_as_exact_as_late_ones(kind, dtype, device, early):
    """Kept, and made in the forward pass in chunks of rows; for one upstream gradient, and for one a row."""
    for budget in (None, 1e-6):
        set_logits_memory(budget)
        for way in SUMMED.values():
            given = case(70, 101, 16, dtype, device, kind, bias=True, softcap=3.0, temperature=0.7)
            size = sum(range(70)) * given.terms["output 0"]
            versions = [lambda *t, f=f, way=way: way(f(*t)) for f in (given.ours, given.stock, given.exact)]
            terms = {"output 0": size, "dhidden": 70 * given.terms["dhidden"]}
            assert_no_worse(Case(*versions, given.inputs, independent=70, terms=terms))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("left_out", [False, True])
def test_what_is_made_early_is_not_made_again(left_out, device, early, monkeypatch):
    """Of one upstream gradient nothing, where rows are left out too; of one a row hidden's gradient is not. Of a frozen
    head nothing is, and no logits are kept."""
    monkeypatch.setattr(_valid_rows, "MIN_TOKENS", {"cpu": 1, "cuda": 1})
    hidden, weight, *teacher = leaves(device, tokens=80)
    mask = torch.arange(80, device=device) % 4 == 0 if left_out else None
    ran = {}
    for budget in (None, 1e-6):
        for name, way in SUMMED.items():
            for frozen in (False, True):
                head = weight.detach() if frozen else weight
                wanted = (hidden,) if frozen else (hidden, weight)
                results = []
                for on_gpu in (True, False):
                    monkeypatch.setattr(module, "on_gpu", lambda t, on_gpu=on_gpu: on_gpu)
                    set_logits_memory(budget)
                    early.clear()
                    found = linear_divergence(hidden, head, *teacher, mask=mask).divergence
                    results.append(torch.autograd.grad(way(found), wanted))
                    ran[budget is None, name, frozen, on_gpu] = list(early)
                for a, b in zip(*results, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    both, weight_alone, hidden_alone = (("_backward", *w, False) for w in ((True, True), (False, True), (True, False)))
    for name in SUMMED:
        assert {(ran[fits, name, False, False][0], ran[fits, name, True, False][0]) for fits in (True, False)} == {
            (both, hidden_alone)
        }
        assert not ran[True, name, True, True]
        assert not ran[False, name, True, True]
    assert ran[True, "a sum", False, True] == [("_backward_kept", True, True, False)]
    assert not ran[False, "a sum", False, True]
    assert ran[True, "of its own a row", False, True] == [both]
    assert ran[False, "of its own a row", False, True] == [weight_alone]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [None, 1e-6])
def test_early_gradients_of_several_passes(budget, dtype, device, early):
    """A graph that is run again, several upstream gradients at once, second derivatives."""
    set_logits_memory(budget)
    tensors = leaves(device, dtype, tokens=80)
    found = linear_divergence(*tensors).divergence
    results = [torch.autograd.grad(found.sum(), tensors[:2], retain_graph=True) for _ in range(2)]
    if dtype is torch.float32:  # others differ by roundings of what is small beside its parts
        upstream = torch.arange(1, 4.0, device=device)[:, None].expand(3, 80)
        batched = torch.autograd.grad(found, tensors[:2], upstream, is_grads_batched=True, retain_graph=True)
        for one, several in zip(results[0], batched, strict=True):
            for i, g in enumerate(several):
                torch.testing.assert_close(g, one * (i + 1), rtol=1e-5, atol=1e-5)
    results.append(torch.autograd.grad(found.sum(), tensors[:2]))
    for a, b, c in zip(*results, strict=True):
        assert_same_bits(a, b)
        assert_same_bits(a, c)
    (gradient,) = torch.autograd.grad(linear_divergence(*tensors).divergence.sum(), tensors[1], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(gradient.sum(), tensors[1])


@pytest.mark.parametrize("device", devices())
def test_any_strides_and_other_tensors(device):
    hidden, weight, *teacher = leaves(device, tokens=6, vocabulary=16, width=8)
    want = torch.autograd.grad(linear_divergence(hidden, weight, *teacher).divergence.sum(), (hidden, weight))
    turned = [t.detach().t().contiguous().t().requires_grad_(i < 2) for i, t in enumerate((hidden, weight, *teacher))]
    got = torch.autograd.grad(linear_divergence(*turned).divergence.sum(), turned[:2])
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b)
    # float64 is none of the kernels': the formulas in plain torch.
    wide = [t.detach().double() for t in (hidden, weight, *teacher)]
    torch.testing.assert_close(linear_divergence(*wide).divergence.float(), linear_divergence(*turned).divergence)


def test_under_autocast():
    hidden, weight, *teacher = leaves("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_divergence(hidden, weight, *teacher).divergence
    halves = [t.detach().bfloat16() for t in (hidden, weight, *teacher)]
    assert_same_bits(found.detach(), linear_divergence(*halves).divergence)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("budget", [None, 1e-6])  # the second: two chunks of rows
@pytest.mark.parametrize("is_early", [False, True])
def test_a_float32_weight_under_autocast_has_a_gradient_that_is_not_rounded(is_early, budget, device, monkeypatch):
    """On a GPU; on a CPU, whose products of 16 bits are rounded, that of each chunk is. Either is no further from
    float64 than a gradient that is rounded once more."""
    set_logits_memory(budget)
    monkeypatch.setattr(module, "on_gpu", lambda t: is_early)
    tensors = leaves(device, tokens=80, vocabulary=40, width=16)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = linear_divergence(*tensors).divergence.sum()
    (gradient,) = torch.autograd.grad(found, tensors[1], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(gradient.sum(), tensors[1])
    lower = [t.detach().bfloat16().requires_grad_(i < 2) for i, t in enumerate(tensors)]
    (rounded,) = torch.autograd.grad(linear_divergence(*lower).divergence.sum(), lower[1])
    wide = [t.detach().double().requires_grad_(i < 2) for i, t in enumerate(lower)]
    (true,) = torch.autograd.grad(linear_divergence(*wide).divergence.sum(), wide[1])
    assert gradient.dtype is torch.float32
    assert (gradient - true).square().mean() <= (rounded - true).square().mean()
    if device == "cuda" or EMULATED or budget:
        assert (gradient != gradient.bfloat16()).sum() > gradient.numel() / 2


def test_it_is_compiled():
    hidden, weight, *teacher = leaves("cpu")
    compiled = torch.compile(lambda *t: linear_divergence(*t, kind="jsd").divergence.sum(), fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [
            torch.autograd.grad(f(hidden, weight, *teacher), (hidden, weight))
            for f in (compiled, lambda *t: linear_divergence(*t, kind="jsd").divergence.sum())
        ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def of_teacher(**change):
    return {"teacher_hidden": None, "teacher_weight": None, **change}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"outputs": ("lse",)}, ValueError, "outputs names 'lse'"),
        ({"kind": "backward"}, ValueError, "kind is 'backward'; one of 'forward', 'reverse', 'jsd'"),
        ({"kind": "jsd", "beta": 1.0}, ValueError, "beta is 1.0"),
        ({"temperature": 0.0}, ValueError, "temperature is 0.0"),
        ({"mask": [1]}, TypeError, "mask is a list"),
        ({"mask": torch.ones(6)}, RuntimeError, "mask has shape"),
        ({"softcap": -1.0}, RuntimeError, "softcap is -1"),
        ({"teacher_logit_scale": math.inf}, RuntimeError, "teacher_logit_scale is inf"),
        ({"weight": torch.zeros(19, 9)}, RuntimeError, "weight has shape"),
        ({"teacher_weight": torch.zeros(18, 12)}, RuntimeError, "teacher_weight has shape"),
        ({"teacher_weight": torch.zeros(19, 12).bfloat16()}, RuntimeError, "teacher_weight is"),
        ({"teacher_weight": None}, RuntimeError, "teacher_weight"),
        ({"teacher_hidden": torch.zeros(6, 12)}, ValueError, "teacher_hidden has shape"),
        ({"teacher_hidden": torch.zeros(7, 12, dtype=torch.int64)}, TypeError, "teacher_hidden is torch.int64"),
        ({"teacher_weight": torch.zeros(19, 12, requires_grad=True)}, ValueError, "teacher_weight requires a gradient"),
        (of_teacher(), RuntimeError, "teacher_hidden and teacher_logits are both NULL"),
        ({"teacher_logits": torch.zeros(7, 19)}, RuntimeError, "teacher_hidden and teacher_logits are both given"),
        (of_teacher(teacher_logits=torch.zeros(7, 4)), RuntimeError, "teacher_logits has shape"),
        (
            of_teacher(teacher_logits=torch.zeros(7, 4), teacher_indices=torch.zeros(7, 3, dtype=torch.int64)),
            RuntimeError,
            "teacher_indices has shape",
        ),
        ({"hidden": torch.zeros(7, 8, dtype=torch.int64)}, TypeError, "hidden is torch.int64"),
        ({"hidden": torch.tensor(1.0)}, ValueError, "hidden is a scalar"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_name_the_argument(change, error, message):
    hidden, weight, teacher_hidden, teacher_weight = leaves("cpu")
    call = {"hidden": hidden, "weight": weight, "teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    with pytest.raises(error, match=message):
        linear_divergence(**{**call, **change})


@pytest.mark.skipif(EMULATED, reason="on CUDA indices are not checked, for that would wait for the device")
def test_an_index_out_of_range_is_named():
    hidden, weight, *_ = leaves("cpu")
    indices = torch.arange(21).view(7, 3)
    with pytest.raises(RuntimeError, match=r"teacher_indices\[19\] is 19; 0 to 18"):
        linear_divergence(hidden, weight, teacher_logits=torch.zeros(7, 3), teacher_indices=indices)
