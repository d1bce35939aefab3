"""Cross-entropy against float64, on every device at hand; torch's error over float32 logits is the yardstick."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy as torch_cross_entropy

from bastile.ops.cross_entropy import BastileCrossEntropyLoss, cross_entropy
from oracle import (
    DTYPES,
    EMULATED,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_offsets_have_64_bits,
    assert_same_bits,
    devices,
    far_apart,
    few_examples,
    random_tensor,
)

scale_ = torch.ops.bastile.scale_


def written_out(
    logits, target, weight=None, *, softcap=None, logit_scale=1.0, lse_square_scale=0.0, num_items=None, **kw
):
    """What a model would run: float32 logits (float64 for the oracle), torch's loss, and the rest written out."""
    z = (logits if logits.dtype == torch.float64 else logits.float()).flatten(0, -2) * logit_scale
    target = target.reshape(-1)
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    reduction = "sum" if num_items is not None else kw.pop("reduction", "mean")
    kw.pop("reduction", None)
    loss = torch_cross_entropy(z, target, weight, reduction=reduction, **kw)
    if lse_square_scale:
        kept = target != kw.get("ignore_index", -100)
        squares = lse_square_scale * torch.logsumexp(z, -1).square() * kept
        loss = loss + {"none": squares, "sum": squares.sum(), "mean": squares.sum() / kept.sum()}[reduction]
    return loss if num_items is None else loss / num_items


def case(logits, target, weight=None, inplace=False, **kw) -> Case:
    """In place, the gradient is that of an upstream gradient of one, rounded once."""
    constants = {"target": target} | ({} if weight is None else {"weight": weight})

    def ours(x, t, w=None):
        return cross_entropy(x * 1 if inplace else x, t, weight=w, inplace=inplace, **kw)

    def other(x, t, w=None):
        return written_out(x, t, w, **kw)

    return Case(
        ours=ours,
        stock=other,
        exact=other,
        inputs={"logits": logits},
        constants=constants,
        upstream=1.0 if inplace else None,
    )


def certain_case(logits, target, *, inplace) -> Case:
    """Where a class may be nearly certain: the loss is the logarithm of a sum near 1, the target's gradient p - 1."""
    rows = (target != -100).sum().item()
    one = case(logits, target, inplace=inplace)
    one.upstream = 1.0
    one.terms = {"output 0": 1.0, "dlogits": (2 / rows / target.numel() / logits.shape[-1]) ** 0.5}
    return one


_draw = torch.Generator().manual_seed(7)


def targets(rows, classes, device, *, every=3, ignore=-100):
    """Random classes; every third row is ignored, the last never (so that a mean has something to divide by)."""
    t = torch.randint(0, classes, (rows,), generator=_draw)
    t[:-1:every] = ignore
    return t.to(device)


# Each shape has its reason.
SHAPES = [
    (5, 8),  # one vector a row
    (1, 1),  # one class: loss and gradient 0, up to the rounding of a logit times log2(e)
    (3, 7),  # odd: rows begin between vectors, and hold none
    (0, 16),  # no row
    (20000, 24),  # several rows for each block in turn
    (9, 1000),  # vectors do not divide evenly among threads
    (4, 2050),  # rows alternately off the boundaries; more than one tile on CPU
    (5, 5001),  # odd and wide: single elements at both ends of a row
    (3, 21000),  # two blocks share a row; the second slice is shorter in float32
    (130, 20488),  # several rows in turn for two blocks that share them
    (9, 128256),  # a Llama vocabulary: eight blocks share a row
    (2, 262144),  # a Gemma vocabulary
]
if torch.cuda.is_available():
    SHAPES += [(700, 128256)]  # several rows in turn for the clusters of a whole GPU
if EMULATED:
    SHAPES = [s for s in SHAPES if s[1] <= 128256]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_as_well_as_stock(shape, dtype, inplace, device):
    logits = random_tensor(shape, dtype, device, scale=3.0)
    if shape[0] == 0:
        assert cross_entropy(logits, targets(*shape, device)).isnan()
        assert cross_entropy(logits, targets(*shape, device), reduction="sum") == 0
        return
    compare = certain_case if shape[1] == 1 else case
    assert_no_worse(compare(logits, targets(*shape, device), inplace=inplace))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [64, 1000, 5000])
def test_pooled_error_is_no_larger(classes, dtype, device):
    """Losses and gradients, where a few classes have most of the probability; the largest sums go over tiles. On CUDA
    exponentials are the hardware's, off by two units in the last place of float32: gradients of 16 bits hide that, and
    so do losses over few classes in float32."""
    rows = (64 if classes < 5000 else 8) // (8 if EMULATED else 1)
    judged = ()
    if EMULATED or device == "cuda":
        judged = ("output 0",) if dtype is torch.float32 else ("dlogits",)
        if dtype is torch.float32:  # a loss is one element of a row, and the largest few make up a sum of squares
            classes, rows = 64, 32 if EMULATED else 64

    def draw() -> Case:
        logits = random_tensor((rows, classes), dtype, device, scale=3.0)
        return case(logits, targets(rows, classes, device), reduction="none")

    assert_no_worse_pooled(draw, judged)


@pytest.mark.parametrize("device", devices())
def test_targets_gradients_are_no_less_exact(device):
    """They are the largest of a row by far, and so most of what the error of a head's gradient comes from."""
    rows, classes = 64 if EMULATED else 512, 500

    def draw() -> Case:
        target = targets(rows, classes, device).clamp(min=0)
        places = torch.arange(rows, device=device), target
        logits = random_tensor((rows, classes), torch.float32, device)

        def of(function: Any) -> Any:
            def at_targets(x: torch.Tensor) -> torch.Tensor:
                # A function of the logits whose "output" is their gradient at the targets.
                leaf = x.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(function(leaf, target), leaf)
                return gradient[places] + 0 * x[places]

            return at_targets

        return Case(of(cross_entropy), of(torch_cross_entropy), of(torch_cross_entropy), {"logits": logits})

    assert_no_worse_pooled(draw, ("output 0",))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("offset", [1e4, -1e6])
def test_smoothing_far_from_zero(offset, weighted, device):
    """Logits that lie far from zero, but near each other: the smoothed part is of their differences. The second tile on
    CPU has a larger maximum than the first."""
    classes = 2600

    def draw() -> Case:
        logits = random_tensor((16, classes), torch.float32, device, scale=3.0, offset=offset)
        logits[:, 2100] += 20
        weight = random_tensor((classes,), torch.float32, device).abs() + 0.1 if weighted else None
        return case(logits, targets(16, classes, device), weight, label_smoothing=0.1, reduction="none")

    assert_no_worse_pooled(draw, names=("output 0",), draws=40)  # of 16 numbers each


OPTIONS = {
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "other ignored class": {"ignore_index": 5},
    "smoothing": {"label_smoothing": 0.1},
    "all smooth": {"label_smoothing": 1.0},
    "softcap": {"softcap": 5.0},
    "logit scale": {"logit_scale": 0.25},
    "negative logit scale": {"logit_scale": -1.5},
    "z-loss": {"lse_square_scale": 1e-2},
    "number of items": {"num_items": 17, "reduction": "sum"},
    "number of items, mean": {"num_items": 3.5, "lse_square_scale": 1e-2},
    "everything": {
        "label_smoothing": 0.2,
        "softcap": 8.0,
        "logit_scale": -0.5,
        "lse_square_scale": 1e-3,
        "ignore_index": 2,
    },
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options, dtype, inplace, weighted, device):
    if inplace and options.get("reduction") == "none":
        pytest.skip("refused, see below")
    rows, classes = 7, 1003 if weighted else 616
    logits = random_tensor((rows, classes), dtype, device, scale=3.0)
    weight = random_tensor((classes,), torch.float32, device).abs() if weighted else None
    target = targets(rows, classes, device, ignore=options.get("ignore_index", -100))
    assert_no_worse(case(logits, target, weight, inplace, **options))


# Rows that several blocks hold between them: ones that blocks share two to a multiprocessor, and ones so wide that a
# block ends each row before it begins the next (in float32 on the H200).
WIDE = [
    (options, dtype, 40024)
    for options in ("sum", "all smooth", "negative logit scale", "number of items, mean", "everything")
    for dtype in (torch.bfloat16, torch.float32)
] + [(options, torch.float32, 200000) for options in ("sum", "everything")]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("options", "dtype", "classes"), WIDE)
def test_options_of_wide_rows(options, dtype, classes, device):
    logits = random_tensor((5, classes), dtype, device, scale=3.0)
    weight = random_tensor((classes,), torch.float32, device).abs() if options == "everything" else None
    target = targets(5, classes, device, every=2, ignore=OPTIONS[options].get("ignore_index", -100))
    assert_no_worse(case(logits, target, weight, True, **OPTIONS[options]))


@few_examples
@given(
    rows=st.integers(1, 9),
    classes=st.integers(2, 3000),
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from(devices()),
    scale=st.sampled_from([1e-2, 1.0, 20.0]),
    inplace=st.booleans(),
)
def test_any_shape(rows, classes, dtype, device, scale, inplace):
    logits = random_tensor((rows, classes), dtype, device, scale=scale)
    assert_no_worse(certain_case(logits, targets(rows, classes, device), inplace=inplace))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("inplace", [False, True])
def test_far_from_zero_and_nearly_certain(inplace, device):
    """The loss is a small difference of large numbers, and the target's gradient p - 1 all but cancels."""
    logits = random_tensor((6, 300), torch.bfloat16, device) + 256
    assert_no_worse(case(logits, targets(6, 300, device), inplace=inplace))
    target = targets(6, 300, device, every=7)
    certain = random_tensor((6, 300), torch.bfloat16, device)
    certain[torch.arange(1, 6), target[1:]] += 14
    assert_no_worse(certain_case(certain, target, inplace=inplace))


@pytest.mark.parametrize("device", devices())
def test_strided_inputs(device):
    """Shifted tokens without a copy (two strides), slices off their boundaries, columns that need a copy."""
    base = random_tensor((3, 5, 88), torch.bfloat16, device)
    labels = torch.randint(0, 64, (3, 5), generator=_draw).to(device)
    views = [
        (base[:, :-1, :64], labels[:, 1:]),
        (base[..., 3:67], labels),
        (base[:, 1::2, 8:72], labels[:, 1::2]),
        (base.transpose(0, 1)[..., :64], labels.t()),
        (random_tensor((64, 5), torch.bfloat16, device).t(), labels[0]),
    ]
    for logits, target in views:
        assert_no_worse(case(logits, target))
    for logits, target in views[:4]:  # in place, through the strides, and nothing beside the rows
        layout = (logits.size(), logits.stride(), logits.storage_offset())
        whole = case(base, target, inplace=True)
        inner = whole.ours, whole.stock
        whole.ours, whole.stock = (lambda x, t, f=f, layout=layout: f((x * 1).as_strided(*layout), t) for f in inner)
        whole.exact = whole.stock
        assert_no_worse(whole)
        holder = base.clone().requires_grad_() * 1
        cross_entropy(holder.as_strided(*layout), target, inplace=True)
        beside = torch.ones_like(base, dtype=torch.bool)
        beside.as_strided(*layout).fill_(False)
        assert_same_bits(holder.detach()[beside], base[beside])
        assert (holder.detach() != base).as_strided(*layout).sum() > 0.9 * logits.numel()


def test_rows_far_apart():
    logits, target = random_tensor((2, 64), torch.bfloat16, "cpu"), torch.tensor([3, 60])
    for options in ({}, {"reduction": "none"}):
        assert_offsets_have_64_bits(lambda x, options=options: cross_entropy(x, target, **options), logits)
    holder = far_apart(logits).requires_grad_() * 1
    (want,) = torch.autograd.grad(
        cross_entropy(near := logits.clone().requires_grad_() * 1, target, inplace=True), near
    )
    (got,) = torch.autograd.grad(cross_entropy(holder, target, inplace=True), holder)
    assert_same_bits(got, want)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("classes", [24, 61])
def test_nan_and_inf_as_stock(classes, inplace, device):
    """A NaN, a +inf, the target at -inf, another class at -inf, a row of -inf; and an ignored row of NaN, which here,
    unlike in torch's log_softmax, stays out of the gradient."""
    logits = random_tensor((7, classes), torch.float32, device)
    target = torch.arange(7, device=device)
    logits[0, 9], logits[1, 9], logits[2, 2], logits[3, 9] = math.nan, math.inf, -math.inf, -math.inf
    logits[4], logits[5] = -math.inf, math.nan
    target[5] = -100
    results = []
    for function in (
        lambda x: cross_entropy(x * 1, target, inplace=inplace, reduction="sum"),
        lambda x: written_out(x, target, reduction="sum"),
    ):
        x = logits.clone().requires_grad_()
        loss = function(x)
        loss.backward()
        results.append((loss.detach(), x.grad))
    torch.testing.assert_close(results[0][0], results[1][0], equal_nan=True)
    results[1][1][5] = 0
    torch.testing.assert_close(results[0][1], results[1][1], equal_nan=True)
    torch.testing.assert_close(
        cross_entropy(logits, target, reduction="none"),
        torch_cross_entropy(logits, target, reduction="none"),
        equal_nan=True,
    )


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_ignored(smoothing, inplace, device):
    target = torch.full((4,), -100, device=device)
    for reduction, value in (("mean", math.nan), ("sum", 0.0)):
        x = random_tensor((4, 40), torch.bfloat16, device).requires_grad_()
        loss = cross_entropy(x * 1, target, reduction=reduction, label_smoothing=smoothing, inplace=inplace)
        stock = torch_cross_entropy(x.float(), target, reduction=reduction, label_smoothing=smoothing)
        torch.testing.assert_close(loss, stock, equal_nan=True)
        torch.testing.assert_close(loss.item(), value, equal_nan=True)
        loss.backward()
        assert x.grad.count_nonzero() == 0
    assert cross_entropy(x, target, num_items=3).item() == 0
    assert cross_entropy(x, target, num_items=0).isnan()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("bad", [-1, 24, 2**40, -(2**62)])
def test_targets_out_of_range(bad, inplace, device):
    logits = random_tensor((5, 24), torch.float32, device)
    target = torch.tensor([1, 2, bad, -100, 3], device=device)
    x = logits.clone().requires_grad_()
    y = x * 1
    if device == "cpu" and not EMULATED:
        with pytest.raises(
            RuntimeError, match=rf"cross_entropy_forward: target\[2\] is {bad}; 0 to 23, or ignore_index"
        ):
            cross_entropy(y, target, inplace=inplace)
        assert_same_bits(y.detach(), logits)
        return
    loss = cross_entropy(y, target, inplace=inplace, reduction="sum")
    loss.backward()
    assert loss.isnan()
    assert x.grad[[2, 3]].count_nonzero() == 0
    assert x.grad[[0, 1, 4]].isfinite().all()
    assert x.grad[[0, 1, 4]].count_nonzero() > 0
    assert cross_entropy(logits, target, reduction="none").isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("classes", [72, 333])
def test_inputs_are_left_alone_and_bits_repeat(classes, device):
    logits, target = random_tensor((40, classes), torch.bfloat16, device), targets(40, classes, device)
    kept, threads = (logits.clone(), target.clone()), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
            loss, other = cross_entropy(x, target), cross_entropy(y * 1, target, inplace=True)
            loss.backward()
            other.backward()
            results.append((loss.detach(), x.grad, other.detach(), y.grad))
            assert_same_bits(x.detach(), kept[0])
    finally:
        torch.set_num_threads(threads)
    for later in results[1:]:
        for first, again in zip(results[0], later, strict=True):
            assert_same_bits(first, again)
    with torch.no_grad():
        cross_entropy(logits, target, inplace=True)
    assert_same_bits(logits, kept[0])
    assert_same_bits(target, kept[1])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_keeps_the_gradient_where_the_logits_were(dtype, device):
    x = random_tensor((6, 50), dtype, device).requires_grad_()
    target = targets(6, 50, device)
    logits = x * 1
    version = logits._version
    loss = cross_entropy(logits, target, inplace=True)
    assert logits._version > version
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.data_ptr() == logits.data_ptr()
    want = cross_entropy(x, target)
    want.backward()
    assert_same_bits(loss.detach(), want.detach())
    torch.testing.assert_close(gradient, x.grad)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("factor", [3.0, 65536.0])
def test_in_place_scales_by_the_upstream_gradient_each_time(factor, device):
    """Twice over a retained graph; a loss scale beyond float16's range must not be rounded to it."""
    logits, target = random_tensor((6, 50), torch.float16, device, scale=9.0), targets(6, 50, device)
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x * 1, target, inplace=True, reduction="sum") * (factor / 2**18)
    (unscaled,) = torch.autograd.grad(cross_entropy(y := x * 1, target, inplace=True, reduction="sum"), y)
    want = (unscaled.float() * (factor / 2**18)).half()
    for retain in (True, True, False):
        x.grad = None
        loss.backward(retain_graph=retain)
        assert_same_bits(x.grad, want)
    big = cross_entropy(y := x * 1, target, inplace=True, reduction="sum")
    (got,) = torch.autograd.grad(big, y, torch.tensor(factor, device=device))
    assert_same_bits(got, (unscaled.float() * factor).half())


@pytest.mark.parametrize("device", devices())
def test_in_place_refuses_what_it_would_get_wrong(device):
    x, target = random_tensor((3, 8), torch.float32, device).requires_grad_(), torch.tensor([0, 1, 2], device=device)
    with pytest.raises(ValueError, match="a leaf that requires a gradient"):
        cross_entropy(x, target, inplace=True)
    with pytest.raises(ValueError, match="inplace needs reduction"):
        cross_entropy(x * 1, target, inplace=True, reduction="none")
    logits = x * 1
    other = logits.square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (cross_entropy(logits, target, inplace=True) + other).backward()
    # The backward pass writes there, too.
    logits = x * 1
    loss = cross_entropy(logits, target, inplace=True) * 3
    later = logits.square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.backward()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "count"), [(0, 0), (0, 1), (0, 4096), (0, 5003), (1, 77), (4, 1000)])
def test_scale(start, count, dtype, device):
    base = random_tensor((count + start + 9,), dtype, device)
    want = base.clone()
    want[start : start + count] = (want[start : start + count].float() * 0.3).to(dtype)
    scale_(base[start : start + count], torch.tensor(0.3, device=device))
    assert_same_bits(base, want)
    scale_(base[start : start + count], torch.tensor(1.0, device=device))
    assert_same_bits(base, want)


@pytest.mark.parametrize("device", devices())
def test_bad_input_is_named(device):
    x, t = torch.ones(2, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"target has shape \[2, 1\]; \[2\]"):
        cross_entropy(x, t[:, None])
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint16, torch.bool, torch.float64, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for labels in (t.to(dtype), torch.zeros(4, dtype=dtype, device=device)[::2]):
            with pytest.raises(RuntimeError, match=f"target has elements of type {name}; int64 is needed"):
                cross_entropy(x, labels)
    with pytest.raises(RuntimeError, match=r"class_weight has shape \[7\]; dimension 0 must be 8"):
        cross_entropy(x, t, weight=torch.ones(7, device=device))
    with pytest.raises(RuntimeError, match=r"label_smoothing is 1\.5; a number from 0 to 1"):
        cross_entropy(x, t, label_smoothing=1.5)
    with pytest.raises(RuntimeError, match="softcap is -1"):
        cross_entropy(x, t, softcap=-1.0)
    with pytest.raises(RuntimeError, match="logit_scale is nan"):
        cross_entropy(x, t, logit_scale=math.nan)
    with pytest.raises(RuntimeError, match=r"num_items has shape \[2\]; one element"):
        cross_entropy(x, t, num_items=torch.ones(2, device=device))
    with pytest.raises(ValueError, match="reduction is 'max'"):
        cross_entropy(x, t, reduction="max")
    with pytest.raises(ValueError, match="num_items divides a sum"):
        cross_entropy(x, t, reduction="none", num_items=2)
    with pytest.raises(ValueError, match="weight requires a gradient"):
        cross_entropy(x, t, weight=torch.ones(8, device=device, requires_grad=True))
    with pytest.raises(RuntimeError, match="scale: tensor, of shape"):
        scale_(torch.ones(4, 6, device=device)[:, :3], torch.tensor(2.0, device=device))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("inplace", [False, True])
def test_labels_of_eight_bits_and_labels_apart(inplace, device):
    """torch's loss takes uint8 too, whose 156 is no -100; and labels need not lie side by side."""
    x, apart = random_tensor((3, 200), torch.float32, device), torch.tensor([1, 7, 156, 7, 3, 7], device=device)[::2]
    for target in (apart.to(torch.uint8), apart):
        got, want = (x.clone().requires_grad_() for _ in range(2))
        cross_entropy(got * 1, target, inplace=inplace).backward()
        cross_entropy(want * 1, apart.contiguous(), inplace=inplace).backward()
        assert_same_bits(got.grad, want.grad)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("inplace", [False, True])
def test_double_backward_is_refused_by_name(inplace, device):
    x = random_tensor((3, 8), torch.float32, device).requires_grad_()
    loss = cross_entropy(x * 1, torch.tensor([0, 1, 2], device=device), inplace=inplace)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="cross_entropy cannot be differentiated twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("device", devices())
def test_number_of_items_of_any_kind(device):
    x, target = random_tensor((4, 16), torch.float32, device), targets(4, 16, device)
    want = cross_entropy(x, target, reduction="sum", num_items=6.0)
    for items in (6, torch.tensor(6, device=device), torch.tensor([6.0], device=device), torch.tensor(6.0).double()):
        assert_same_bits(cross_entropy(x, target, num_items=items), want)


def test_other_types_and_devices_run_the_original_code():
    x, target = torch.randn(3, 8, dtype=torch.float64), torch.tensor([1, 0, -100])
    options = {"softcap": 2.0, "lse_square_scale": 0.1, "label_smoothing": 0.1, "logit_scale": 0.7}
    for reduction in ("mean", "sum", "none"):
        torch.testing.assert_close(
            cross_entropy(x, target, reduction=reduction, **options).float(),
            cross_entropy(x.float(), target, reduction=reduction, **options),
        )
    on_meta = cross_entropy(x.to("meta"), target.to("meta"), reduction="none")
    assert on_meta.device.type == "meta"
    assert on_meta.shape == (3,)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_without_a_break(reduction, inplace, device):
    if inplace and reduction == "none":
        pytest.skip("refused, see above")
    torch._dynamo.reset()

    def step(x, target):
        return cross_entropy(x * 2, target, reduction=reduction, label_smoothing=0.1, inplace=inplace)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        x = random_tensor((rows, 24), torch.float32, device).requires_grad_()
        twin, target = x.detach().clone().requires_grad_(), targets(rows, 24, device)
        compiled(x, target).square().sum().backward()
        cross_entropy(twin * 2, target, reduction=reduction, label_smoothing=0.1).square().sum().backward()
        assert_same_bits(x.grad, twin.grad)


@pytest.mark.parametrize("device", devices())
def test_module(device):
    x, target = random_tensor((2, 3, 16), torch.bfloat16, device), targets(6, 16, device).view(2, 3)
    weight = random_tensor((16,), torch.float32, device).abs()
    ours = BastileCrossEntropyLoss(weight, label_smoothing=0.1, ignore_index=-100)
    stock = torch.nn.CrossEntropyLoss(weight, label_smoothing=0.1)
    torch.testing.assert_close(ours(x, target), stock(x.float().flatten(0, 1), target.flatten()))
    assert ours.state_dict().keys() == stock.state_dict().keys()
    torch.testing.assert_close(
        ours(x, target, num_items=2), cross_entropy(x, target, weight=weight, label_smoothing=0.1, num_items=2)
    )
