"""The fused head and loss against float64, on every device at hand; linear + float32 cross_entropy is the yardstick."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from bastile.ops import _valid_rows
from bastile.ops import fused_linear_cross_entropy as module
from bastile.ops.cross_entropy import REDUCTION
from bastile.ops.fused_linear_cross_entropy import fused_linear_cross_entropy, set_logits_memory
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


def plain(hidden, weight, bias, target, options, exact=False):
    """What a model does: logits in its own type, then everything in float32 (exact: in float64)."""
    options = dict(options)
    logits = F.linear(hidden, weight, bias)
    logits = (logits if exact else logits.float()) * options.pop("logit_scale", 1.0)
    softcap, square, num_items = (options.pop(k, None) for k in ("softcap", "lse_square_scale", "num_items"))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    class_weight = options.pop("class_weight", None)
    if class_weight is not None:
        class_weight = class_weight.to(logits.dtype)
    reduction = options.pop("reduction", "mean")
    if num_items is not None:
        reduction = "sum"
    loss = F.cross_entropy(logits, target, weight=class_weight, reduction=reduction, **options)
    if square:
        valid = target != options.get("ignore_index", -100)
        z = square * torch.logsumexp(logits, -1).square() * valid
        loss = loss + (z if reduction == "none" else z.sum() if reduction == "sum" else z.sum() / valid.sum())
    return loss / num_items if num_items is not None else loss


def roundings(tokens, vocabulary, dtype, reduction, device, upstream) -> dict[str, float]:
    """What bastile.h documents, in roundings beyond the last.

    Sums over chunks are rounded at each, up to eight; beyond, the sum is float32, and on CPU each chunk's product is
    rounded; but dbias is rounded once. Gradients made in the forward pass are rounded before an upstream gradient that
    is not a power of two multiplies them.
    """
    if dtype is torch.float32:
        return {}
    limit = module.chunk_bytes_now() or (module.DEFAULT_LOGITS_BYTES if device == "cuda" else 256 << 20)
    rows = max(64, limit // (module.padded(vocabulary) * 2))
    chunks = -(-tokens // rows)
    summed = chunks - 1 if chunks <= 8 else 1
    kept = device == "cuda" and chunks == 1
    late = 0 if kept or reduction == "none" or dtype is torch.float16 or upstream in (0.5, 1.0, 2.0) else 1
    # Stock rounds the logits' gradients after the divisor and the upstream gradient, ours before: the same rounding at
    # another place between two powers of two, where its relative size differs by up to a factor of two. Over the many
    # magnitudes of a row that averages out to some per cent: a quarter of a rounding.
    place = 0.0 if reduction == "none" else 0.25
    # A number of dbias is mostly its own targets', of one magnitude.
    return {"dhidden": late + place, "dweight": summed + late + place, "dbias": late + 4 * place}


def computed_rows(target: torch.Tensor, device: str) -> int:
    """How many rows are worked off: the ignored ones are left out where that pays."""
    tokens = target.numel()
    if not _valid_rows.is_worthwhile(tokens, torch.empty(0, device=device)):
        return tokens
    chosen = _valid_rows.valid_first(target.to(device), -100, int((target != -100).sum()))
    return tokens if chosen is None else chosen.numel()


def case(tokens, vocabulary, width, dtype, device, *, bias=False, ignored=0.3, upstream=None, **options) -> Case:
    target = random_tensor((tokens,), torch.float32, "cpu").mul(1e4).long().remainder(vocabulary)
    target[random_tensor((tokens,), torch.float32, "cpu") < torch.special.ndtri(torch.tensor(ignored))] = -100
    inputs = {
        "hidden": random_tensor((tokens, width), dtype, device),
        "weight": random_tensor((vocabulary, width), dtype, device, scale=width**-0.5),
    }
    if bias:
        inputs["bias"] = random_tensor((vocabulary,), dtype, device)
    if options.pop("weighted", False):
        options["class_weight"] = random_tensor((vocabulary,), torch.float32, device).abs() + 0.1

    def ours(hidden, weight, *rest):
        return fused_linear_cross_entropy(hidden, weight, rest[-1], bias=rest[0] if bias else None, **options)

    def stock(hidden, weight, *rest):
        return plain(hidden, weight, rest[0] if bias else None, rest[-1], options)

    def exact(hidden, weight, *rest):
        return plain(hidden, weight, rest[0] if bias else None, rest[-1], options, exact=True)

    # One token: each rounding of a logit's gradient is shared by a whole row of dweight, and luck does not average out.
    extra = roundings(computed_rows(target, device), vocabulary, dtype, options.get("reduction"), device, upstream)
    if tokens == 1 and dtype is not torch.float32:
        extra = {name: count + 2 for name, count in extra.items()}
    constants = {"target": target.to(device)}
    # Of a row's gradient of the logits one number is large, the target's: its error is all of the row's.
    return Case(
        ours,
        stock,
        exact,
        inputs,
        constants,
        extra_roundings=extra,
        independent=max(1, int((target != -100).sum())),
        upstream=upstream,
    )


@pytest.fixture(params=["one piece", "chunks"])
def memory(request):
    """All logits at once where the device allows it, or the smallest chunks (64 rows)."""
    set_logits_memory(None if request.param == "one piece" else 1e-3)
    yield request.param
    set_logits_memory(None)


# An ordinary size, an odd vocabulary and width, one token, all three the same (no operand passes for another), and, of
# the rows that are not ignored, 23 chunks of 64 (float32 sums: a rounding at each would show).
SIZES = [(96, 200, 64), (70, 101, 33), (1, 17, 8), (48, 48, 48), (2100, 40, 16)]


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upstream", [1.0, None])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_float64_as_well_as_stock(size, dtype, device, upstream):
    assert_no_worse(case(*size, dtype, device, ignored=0.0 if size[0] == 1 else 0.3, upstream=upstream))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_pooled_error_is_no_larger(dtype, device):
    """Gradients that are sums over rows, by default: so many that a sum in one float32, or of rounded parts, would
    show. Each number is a sum of other rows' errors: they are independent."""

    def draw() -> Case:
        one = case(300, 500, 16, dtype, device, bias=True, ignored=0.0, upstream=1.0)
        one.independent = None
        return one

    assert_no_worse_pooled(draw, ("dweight", "dbias"), draws=2 if EMULATED else 8)


OPTIONS = {
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "num_items": {"num_items": 123.0},
    "sum, num_items": {"num_items": 77.0, "reduction": "sum"},
    "bias": {"bias": True},
    "label_smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 3.0},
    "logit_scale": {"logit_scale": 0.25},
    "z-loss": {"lse_square_scale": 1e-2},
    "class_weight": {"weighted": True},
    "all": {
        "bias": True,
        "label_smoothing": 0.2,
        "softcap": 5.0,
        "logit_scale": 1.5,
        "lse_square_scale": 1e-3,
        "weighted": True,
    },
}  # fmt: skip


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option(options, dtype, device):
    assert_no_worse(case(150, 90, 48, dtype, device, **options))


@few_examples
@given(
    tokens=st.integers(1, 140),
    vocabulary=st.integers(2, 150),
    width=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from(devices()),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    bias=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    mib=st.sampled_from([None, 1e-3]),
)
def test_any_size(tokens, vocabulary, width, dtype, device, reduction, bias, smoothing, mib):
    set_logits_memory(mib)
    try:
        assert_no_worse(
            case(
                tokens,
                vocabulary,
                width,
                dtype,
                device,
                ignored=0.0,
                bias=bias,
                reduction=reduction,
                label_smoothing=smoothing,
            )
        )
    finally:
        set_logits_memory(None)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_parts(frozen, device):
    """A frozen head gets no gradient, a frozen backbone does not keep the head from its own."""
    tensors = {
        "hidden": random_tensor((80, 24), torch.float32, device),
        "weight": random_tensor((50, 24), torch.float32, device),
        "bias": random_tensor((50,), torch.float32, device),
    }
    target = torch.arange(80, device=device) % 50
    gradients = []
    for skip in (None, frozen):
        leaves = {k: t.clone().requires_grad_(k != skip) for k, t in tensors.items()}
        fused_linear_cross_entropy(leaves["hidden"], leaves["weight"], target, bias=leaves["bias"]).backward()
        gradients.append({k: t.grad for k, t in leaves.items()})
    assert gradients[1].pop(frozen) is None
    for name, gradient in gradients[1].items():
        assert_same_bits(gradient, gradients[0][name])


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("device", devices())
def test_upstream_gradient_and_second_backward(device):
    """The upstream gradient scales, and a second backward over a retained graph does not scale twice."""
    hidden = random_tensor((70, 16), torch.float32, device).requires_grad_()
    weight = random_tensor((30, 16), torch.float32, device).requires_grad_()
    target = torch.arange(70, device=device) % 30
    once = torch.autograd.grad(fused_linear_cross_entropy(hidden, weight, target), (hidden, weight))
    loss = fused_linear_cross_entropy(hidden, weight, target) * 3.0
    for keep in (True, True, False):
        again = torch.autograd.grad(loss, (hidden, weight), retain_graph=keep)
        for a, b in zip(once, again, strict=True):
            torch.testing.assert_close(a * 3, b, rtol=1e-6, atol=1e-9)


class _WithoutGradient(torch.autograd.Function):
    """Reads its input, and gives no gradient for it."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_reader_without_a_gradient(reduction):
    hidden, weight = torch.randn(8, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)
    loss = fused_linear_cross_entropy(hidden, weight, torch.arange(8), reduction=reduction)
    _WithoutGradient.apply(loss).sum().backward()
    assert hidden.grad is None or not hidden.grad.any()


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("device", devices())
def test_all_ignored_is_torch_s_nan(device):
    hidden = random_tensor((66, 16), torch.float32, device).requires_grad_()
    weight = random_tensor((30, 16), torch.float32, device).requires_grad_()
    target = torch.full((66,), -100, device=device)
    assert fused_linear_cross_entropy(hidden, weight, target).isnan()
    total = fused_linear_cross_entropy(hidden, weight, target, reduction="sum")
    total.backward()
    assert total == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()
    assert fused_linear_cross_entropy(hidden, weight, target, num_items=5) == 0


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("device", devices())
def test_no_tokens(device):
    hidden = torch.empty(0, 16, device=device, requires_grad=True)
    weight = random_tensor((30, 16), torch.float32, device).requires_grad_()
    target = torch.empty(0, dtype=torch.int64, device=device)
    loss = fused_linear_cross_entropy(hidden, weight, target, reduction="sum")
    loss.backward()
    assert loss == 0
    assert not weight.grad.any()
    assert fused_linear_cross_entropy(hidden, weight, target).isnan()


@pytest.mark.parametrize("device", devices())
def test_num_items_as_a_device_tensor(device):
    hidden, weight = random_tensor((9, 8), torch.float32, device), random_tensor((11, 8), torch.float32, device)
    target = torch.arange(9, device=device)
    by_number = fused_linear_cross_entropy(hidden, weight, target, num_items=4)
    for kind in (torch.int64, torch.float32):
        assert_same_bits(
            by_number,
            fused_linear_cross_entropy(hidden, weight, target, num_items=torch.tensor(4, dtype=kind, device=device)),
        )


@pytest.mark.parametrize("device", devices())
def test_leading_dimensions_and_strides(device):
    hidden = random_tensor((4, 12, 10), torch.float32, device)
    weight = random_tensor((20, 10), torch.float32, device)
    target = torch.arange(48, device=device).view(4, 12) % 20
    want = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), target.flatten())
    torch.testing.assert_close(fused_linear_cross_entropy(hidden, weight, target), want)
    torch.testing.assert_close(fused_linear_cross_entropy(hidden, weight.t().contiguous().t(), target), want)
    sliced = fused_linear_cross_entropy(hidden[:, :-1], weight, target[:, 1:], reduction="none")
    assert sliced.shape == (4, 11)
    expanded = hidden[:1, :1].expand(2, 3, 10)
    torch.testing.assert_close(
        fused_linear_cross_entropy(expanded, weight, target[:2, :3]),
        fused_linear_cross_entropy(expanded.clone(), weight, target[:2, :3]),
    )


def test_targets_out_of_range_are_named():
    if EMULATED:
        pytest.skip("the emulated GPU does not check, as a GPU does not")
    hidden, weight = torch.randn(3, 8), torch.randn(5, 8)
    with pytest.raises(RuntimeError, match=r"linear_cross_entropy_forward: target.*5"):
        fused_linear_cross_entropy(hidden, weight, torch.tensor([0, 5, 1]))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("device", devices())
def test_targets_out_of_range_on_cuda_poison_the_loss_only(device):
    if device == "cpu" and not EMULATED:
        pytest.skip("an error on CPU")
    hidden = random_tensor((70, 8), torch.float32, device).requires_grad_()
    weight = random_tensor((5, 8), torch.float32, device).requires_grad_()
    target = torch.arange(70, device=device) % 5
    target[3] = 5
    loss = fused_linear_cross_entropy(hidden, weight, target, reduction="sum")
    loss.backward()
    assert loss.isnan()
    assert not hidden.grad[3].any()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("device", devices())
def test_bad_input_is_named(device):
    hidden, weight = torch.ones(4, 8, device=device), torch.ones(5, 8, device=device)
    target = torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(RuntimeError, match=r"weight has shape \[5, 7\].*must be 8"):
        fused_linear_cross_entropy(hidden, weight[:, :7], target)
    with pytest.raises(RuntimeError, match=r"target has shape \[3\].*must be 4"):
        fused_linear_cross_entropy(hidden, weight, target[:3])
    with pytest.raises(RuntimeError, match="weight is bfloat16; float32 is needed"):
        fused_linear_cross_entropy(hidden, weight.bfloat16(), target)
    for dtype in (torch.int32, torch.int16):
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(RuntimeError, match=f"target has elements of type {name}; int64 is needed"):
            fused_linear_cross_entropy(hidden, weight, target.to(dtype))
    with pytest.raises(ValueError, match="reduction"):
        fused_linear_cross_entropy(hidden, weight, target, reduction="average")
    with pytest.raises(RuntimeError, match=r"label_smoothing is 1\.5; a number from 0 to 1"):
        fused_linear_cross_entropy(hidden, weight, target, label_smoothing=1.5)
    with pytest.raises(ValueError, match="positive number"):
        set_logits_memory(0)


@pytest.mark.parametrize("shape", [(1, 3), (), (1, 5, 8)])
def test_kept_logits_of_another_shape_are_refused(shape):
    # One row has no stride that would tell: its columns alone say whether it is long enough to be read.
    hidden, weight, row, scalar = torch.ones(1, 8), torch.ones(5, 8), torch.ones(1), torch.ones(())
    options = (-100, REDUCTION["sum"], 0.0, 0.0, 1.0, 0.0, 0)  # plainly; no budget
    inputs = (
        scalar,
        hidden,
        weight,
        torch.zeros(1, dtype=torch.int64),
        None,
        None,
        None,
        row.expand(1, 2),
        torch.ones(shape),
    )
    with pytest.raises(RuntimeError, match="dlogits has shape"):
        torch.ops.bastile.linear_cross_entropy_backward(*inputs, *options, False, True, True, False)


@pytest.mark.parametrize("device", devices())
def test_autocast_casts_as_a_linear_layer_does(device):
    hidden = random_tensor((20, 16), torch.float32, device).requires_grad_()
    weight = random_tensor((12, 16), torch.float32, device).requires_grad_()
    target = torch.arange(20, device=device) % 12
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = fused_linear_cross_entropy(hidden, weight, target)
    loss.backward()
    assert weight.grad.dtype == torch.float32
    want = fused_linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), target)
    assert_same_bits(loss, want)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_float32_weight_under_autocast_has_a_gradient_that_is_not_rounded(reduction, device, memory):
    """On a GPU; on a CPU, whose products of 16 bits are rounded, that of each chunk is. Either is no further from
    float64 than a gradient that is rounded once more."""
    hidden, weight = (random_tensor((n, 16), torch.float32, device).requires_grad_() for n in (80, 40))
    target = torch.arange(80, device=device) % 40
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = fused_linear_cross_entropy(hidden, weight, target, reduction=reduction).sum()
    (gradient,) = torch.autograd.grad(3 * loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(gradient.sum(), weight)
    lower = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    (rounded,) = torch.autograd.grad(
        3 * fused_linear_cross_entropy(*lower, target, reduction=reduction).sum(), lower[1]
    )
    wide = [t.detach().double().requires_grad_() for t in lower]
    logits = wide[0] @ wide[1].T
    loss = torch.nn.functional.cross_entropy(logits, target, reduction="mean" if reduction == "mean" else "sum")
    (true,) = torch.autograd.grad(3 * loss, wide[1])
    assert gradient.dtype is torch.float32
    assert (gradient - true).square().mean() <= (rounded - true).square().mean()
    if device == "cuda" or EMULATED or memory == "chunks":
        assert (gradient != gradient.bfloat16()).sum() > gradient.numel() / 2


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("device", devices())
def test_compiles_without_a_break(device):
    torch._dynamo.reset()
    weight = random_tensor((40, 24), torch.float32, device).requires_grad_()
    compiled = torch.compile(
        lambda h, t: fused_linear_cross_entropy(h * 2, weight, t), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for tokens in (70, 90):
        hidden = random_tensor((tokens, 24), torch.float32, device).requires_grad_()
        twin = hidden.detach().clone().requires_grad_()
        target = torch.arange(tokens, device=device) % 40
        compiled(hidden, target).backward()
        first, weight.grad = weight.grad, None
        fused_linear_cross_entropy(twin * 2, weight, target).backward()
        assert_same_bits(hidden.grad, twin.grad)
        assert_same_bits(first, weight.grad)
        weight.grad = None


@pytest.mark.parametrize("device", devices())
def test_double_backward_is_refused(device):
    hidden = torch.ones(2, 8, device=device, requires_grad=True)
    loss = fused_linear_cross_entropy(hidden, torch.eye(8, device=device), torch.tensor([0, 1], device=device))
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="fused_linear_cross_entropy cannot be differentiated twice"):
        gradient.sum().backward()


@pytest.mark.skipif(EMULATED or not torch.cuda.is_available(), reason="needs a GPU, whose library has kernels to miss")
def test_a_large_vocabulary_that_is_no_multiple_of_8():
    """Each of the three products is cut in two (src/cuda/blas_cut.c)."""
    assert_no_worse(case(6144, 8203, 2048, torch.bfloat16, "cuda"))


@pytest.mark.skipif(EMULATED, reason="memory is what PyTorch's allocator on a real device says")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_stays_within_the_budget():
    tokens, width, vocabulary = 4096, 512, 65536
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocabulary, (tokens,), device="cuda")
    set_logits_memory(64)
    try:
        fused_linear_cross_entropy(hidden, weight, target).backward()
        hidden.grad = weight.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fused_linear_cross_entropy(hidden, weight, target).backward()
        extra = torch.cuda.max_memory_allocated() - before
    finally:
        set_logits_memory(None)
    gradients = hidden.numel() * 2 + weight.numel() * 2
    # Gradients, one chunk, and (eight chunks and no more) no float32 sum.
    assert extra <= 2 * gradients + (72 << 20)


def test_budget_from_the_environment(monkeypatch):
    monkeypatch.setenv("BASTILE_LOGITS_MIB", "12")
    assert module.chunk_bytes_now() == 12 << 20
    monkeypatch.setenv("BASTILE_LOGITS_MIB", "much")
    with pytest.raises(ValueError, match="BASTILE_LOGITS_MIB is 'much'"):
        module.chunk_bytes_now()
    set_logits_memory(3)
    assert module.chunk_bytes_now() == 3 << 20
    set_logits_memory(None)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_memory_held_before_does_not_show(dtype, device):
    """Odd vocabularies are padded in memory, and a product that reads the padding may multiply it by zero."""
    tokens, vocabulary, width = 128, 101, 32
    hidden = random_tensor((tokens, width), dtype, device).requires_grad_()
    weight = random_tensor((vocabulary, width), dtype, device).requires_grad_()
    target = torch.arange(tokens, device=device) % vocabulary
    for _ in range(10):
        garbage = [
            torch.full((count,), float("nan"), dtype=dtype, device=device)
            for count in (tokens * vocabulary, tokens * 104, tokens * width, vocabulary * width)
            for _ in range(6)
        ]
        del garbage
        loss = fused_linear_cross_entropy(hidden, weight, target)
        for result in (loss, *torch.autograd.grad(loss, (hidden, weight))):
            assert result.isfinite().all()


@pytest.mark.parametrize(
    ("gibibytes", "rows", "fit", "kept"),
    [
        (141, 8192, False, 4096),
        (141, 5741, True, 5741),
        (80, 8192, False, 4096),
        (24, 1325, True, 1325),
        (24, 8192, False, 1280),
        (24, 16384, False, 2048),
        (4, 883, True, 883),
    ],
)
def test_the_budget_is_of_the_gpu_s_memory(
    gibibytes: int, rows: int, fit: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the C library has it (test_linear_cross_entropy.c). Of Qwen3's vocabulary, in bfloat16."""
    monkeypatch.delenv("BASTILE_LOGITS_MIB", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "_memory_of", lambda index: gibibytes << 30)
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden = torch.empty(rows, 8, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(151936, 8, dtype=torch.bfloat16, device="cuda")
    assert module.logits_fit(hidden, weight, 0) is fit
    assert module.kept_rows(hidden, weight, 0) == kept
    assert module.logits_fit(hidden, weight, 1 << 40)
