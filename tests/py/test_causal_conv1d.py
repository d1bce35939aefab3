"""The short convolution against float64, on every device at hand, with Transformers' own code as the yardstick; and in
models, where it takes that code's place."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bastile
from bastile.models import short_convolution
from bastile.ops.causal_conv1d import causal_conv1d, original
from bastile.report import Tally
from oracle import (
    DTYPES,
    EMULATED,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_same_bits,
    devices,
    few_examples,
    numbers,
    random_tensor,
)
from replaced_function import Replaced, modeling

ACTIVATIONS = [None, "silu"]
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
each_device = pytest.mark.parametrize("device", devices())


def stock_function() -> Any:
    """Transformers' function, which is the same in all its files; before 5.17 it was written out in each module."""
    return getattr(modeling("qwen3_next"), "causal_conv1d_fn", None) or original


def transposed(batch: int, channels: int, tokens: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """As a linear layer's output is given to the convolution."""
    return random_tensor((batch, tokens, channels), dtype, device).transpose(1, 2)


def packing(batch: int, tokens: int, each: int, device: str) -> torch.Tensor:
    """seq_idx of rows of sequences of about `each` tokens, some of one. Numbers come back: nothing is asked of them but
    that neighbours differ."""
    begins = torch.randint(each, (batch, tokens), generator=numbers.generator) == 0
    return ((begins.cumsum(1) + torch.arange(batch)[:, None]) % 5 - 1).int().to(device)


def apart(function: Callable[..., Any], seq_idx: torch.Tensor) -> Callable[..., Any]:
    """The function on each sequence by itself."""
    lengths = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in seq_idx]

    def packed(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        rows = [
            torch.cat([function(part, *arguments) for part in row.split(of, dim=-1)], dim=-1)
            for row, of in zip(x.split(1), lengths, strict=True)
        ]
        return torch.cat(rows)

    return packed


def case(
    x: torch.Tensor,
    taps: int,
    activation: str | None,
    has_bias: bool = True,
    dtype: Any = None,
    seq_idx: torch.Tensor | None = None,
) -> Case:
    """dtype: of weight and bias, where it is not x's."""
    dtype, stock = dtype or x.dtype, stock_function()
    if seq_idx is not None and x.numel():
        stock = apart(stock, seq_idx)
    inputs = {"x": x, "weight": random_tensor((x.shape[1], taps), dtype, x.device)}
    if has_bias:
        inputs["bias"] = random_tensor(x.shape[1:2], dtype, x.device)

    def with_activation(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, weight, bias=None: function(x, weight, bias, activation)

    return Case(
        ours=with_activation(lambda *arguments: causal_conv1d(*arguments, seq_idx)),
        stock=with_activation(stock),
        exact=with_activation(stock),
        inputs=inputs,
    )


# [B, C, T] and K; each shape has its reason.
SHAPES = [
    ((2, 64, 40), 4),  # ordinary: whole vectors, windows of most models
    ((2, 64, 40), 3),  # LFM2's
    ((1, 33, 5), 4),  # odd: single-element accesses
    ((3, 20, 2), 4),  # shorter than a window
    ((2, 4098, 3), 2),  # 4-byte accesses, several blocks a token
    ((2, 8, 131), 8),  # the longest window; runs of several tokens, and a rest
    ((5, 16, 1), 4),  # one token
    ((2, 24, 9), 1),  # no window at all
]


@each_activation
@each_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "taps"), SHAPES, ids=str)
def test_matches_float64_as_well_as_transformers(
    shape: tuple[int, int, int], taps: int, dtype: torch.dtype, device: str, activation: str | None
) -> None:
    for has_bias in (True, False):
        assert_no_worse(case(transposed(*shape, dtype, device), taps, activation, has_bias))


@each_activation
@each_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "taps"), [((2, 1026, 3) if c > 1026 else (b, c, t), taps) for (b, c, t), taps in SHAPES], ids=str
)
def test_packed_sequences_match_float64(
    shape: tuple[int, int, int], taps: int, dtype: torch.dtype, device: str, activation: str | None
) -> None:
    """Each of one token, most shorter than a window, many of a few windows, an only one in each row."""
    for each, has_bias in ((1, True), (3, False), (11, True), (1 << 20, False)):
        seq_idx = packing(shape[0], shape[2], each, device)
        assert_no_worse(case(transposed(*shape, dtype, device), taps, activation, has_bias, seq_idx=seq_idx))


@each_activation
@each_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_weight", [None, torch.float32])
def test_pooled_error_is_no_larger(
    dtype: torch.dtype, of_weight: torch.dtype | None, device: str, activation: str | None
) -> None:
    """Sums over some hundred tokens, in more than one run. Of numbers of 16 bits float32 holds nearly all sums as they
    are, so that few elements make up the error of dbias."""
    shape = (2, 32, 40) if EMULATED else (2, 64, 200)
    is_of_few = of_weight is not None and dtype is not torch.float32 and activation is None
    names = ("output 0", "dx", "dweight") if is_of_few else ()
    assert_no_worse_pooled(lambda: case(transposed(*shape, dtype, device), 4, activation, True, of_weight), names)


@each_activation
@each_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_pooled_error_of_packed_sequences(dtype: torch.dtype, device: str, activation: str | None) -> None:
    """Of dbias that of the few elements that it has: see above."""
    shape = (2, 32, 40) if EMULATED else (2, 64, 200)
    seq_idx = packing(shape[0], shape[2], 25, device)
    assert_no_worse_pooled(
        lambda: case(transposed(*shape, dtype, device), 4, activation, True, None, seq_idx),
        ("output 0", "dx", "dweight"),
    )


@few_examples
@given(
    batch=st.integers(0, 3),
    channels=st.integers(1, 300),
    tokens=st.integers(1, 70),
    taps=st.integers(1, 8),
    dtype=st.sampled_from(DTYPES),
    of_weight=st.sampled_from(DTYPES),
    device=st.sampled_from(devices()),
    activation=st.sampled_from(ACTIVATIONS),
    has_bias=st.booleans(),
    each=st.sampled_from([None, None, 2, 9, 40]),
)
def test_any_shape(
    batch: int,
    channels: int,
    tokens: int,
    taps: int,
    dtype: torch.dtype,
    of_weight: torch.dtype,
    device: str,
    activation: str | None,
    has_bias: bool,
    each: int | None,
) -> None:
    x = transposed(batch, channels, tokens, dtype, device)
    seq_idx = None if each is None else packing(batch, tokens, each, device)
    assert_no_worse(case(x, taps, activation, has_bias, of_weight, seq_idx))


def results(
    x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, activation: str | None, seq_idx: Any = None
) -> list[torch.Tensor]:
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = causal_conv1d(*leaves, None, activation, seq_idx)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@each_activation
@each_device
def test_strided_inputs(device: str, activation: str | None) -> None:
    """A slice of wider rows, unaligned, contiguous along time, every second channel, one row for all tokens: the bits
    of dense inputs."""
    base = random_tensor((2, 50, 200), torch.bfloat16, device)
    views = [
        base.transpose(1, 2)[:, 64:128],
        base.transpose(1, 2)[:, 3:67, 1:],
        base.transpose(1, 2).contiguous()[:, :64],
        base.transpose(1, 2)[:, :128:2],
        base[:, :1, :64].expand(-1, 50, -1).transpose(1, 2),
        base.transpose(0, 1)[:, :, :64].transpose(1, 2),
    ]
    spread = random_tensor((4, 64), torch.bfloat16, device).t()  # windows whose taps lie far from each other
    for x in views:
        dy = random_tensor((x.shape[0], 72, x.shape[2]), torch.bfloat16, device)[:, 8:]
        for upstream in (dy, dy[:, :1, :1].expand_as(dy)):
            for seq_idx in (None, packing(x.shape[0], x.shape[2], 4, device)):
                got = results(x, spread, upstream, activation, seq_idx)
                x_dense, dy_dense = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, upstream))
                want = results(x_dense, spread.contiguous(), dy_dense, activation, seq_idx)
                for one, other in zip(got, want, strict=True):
                    assert_same_bits(one, other)


@each_activation
@each_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_sequences_have_the_bits_of_each_by_itself(
    dtype: torch.dtype, device: str, activation: str | None
) -> None:
    """Outputs and dx; of an only sequence in each row the sums over tokens too, whatever its number. Rows of more than
    one thread's run on CUDA and one chunk on CPU, so that sequences begin and end at all places of these."""
    x, dy = (transposed(2, 40, 200, dtype, device) for _ in range(2))
    weight = random_tensor((40, 4), dtype, device)
    for each in (1, 3, 20, 90):
        seq_idx = packing(2, 200, each, device)
        y, dx, _ = results(x, weight, dy, activation, seq_idx)
        leaf = x.detach().requires_grad_()
        want = apart(lambda part, weight: causal_conv1d(part, weight, None, activation), seq_idx)(leaf, weight)
        assert_same_bits(y, want.detach())
        assert_same_bits(dx, torch.autograd.grad(want, leaf, dy)[0])
    whole = results(x, weight, dy, activation)
    for number in (0, -7):
        seq_idx = torch.full((2, 200), number, dtype=torch.int32, device=device)
        for got, want in zip(results(x, weight, dy, activation, seq_idx), whole, strict=True):
            assert_same_bits(got, want)


@each_device
def test_other_integers_and_strides_of_seq_idx(device: str) -> None:
    x, dy = (transposed(3, 16, 30, torch.float32, device) for _ in range(2))
    weight, seq_idx = random_tensor((16, 4), torch.float32, device), packing(3, 30, 4, device)
    wanted = results(x, weight, dy, "silu", seq_idx)
    wider = torch.stack((seq_idx, seq_idx + 1), dim=-1)
    for same in (seq_idx.long(), seq_idx.to(torch.int8), seq_idx.t().contiguous().t(), wider[..., 0]):
        for got, want in zip(results(x, weight, dy, "silu", same), wanted, strict=True):
            assert_same_bits(got, want)
    one = seq_idx[:1].expand(3, -1)  # the same for all rows
    for got, want in zip(results(x, weight, dy, "silu", one), results(x, weight, dy, "silu", one.clone()), strict=True):
        assert_same_bits(got, want)


@each_device
def test_channels_stay_side_by_side(device: str) -> None:
    """So that what follows, transposes and splits, copies nothing."""
    x = transposed(2, 64, 10, torch.float32, device).requires_grad_()
    y = causal_conv1d(x, random_tensor((64, 4), torch.float32, device))
    assert y.transpose(1, 2).is_contiguous()
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.transpose(1, 2).is_contiguous()


@each_device
@pytest.mark.parametrize("shape", [(0, 6, 4), (2, 6, 0)], ids=str)
def test_nothing_to_convolve(shape: tuple[int, int, int], device: str) -> None:
    x = random_tensor(shape, torch.float32, device).requires_grad_()
    weight, bias = (random_tensor(s, torch.float32, device).requires_grad_() for s in ((6, 4), (6,)))
    for seq_idx in (None, torch.zeros(shape[0], shape[2], dtype=torch.int32, device=device)):
        y = causal_conv1d(x, weight, bias, "silu", seq_idx)
        gradients = torch.autograd.grad(y.sum(), (x, weight, bias))
        assert y.shape == gradients[0].shape == shape
        assert all(not g.any() for g in gradients)


@each_activation
@each_device
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_gradient_alone_and_again(dtype: torch.dtype, packs: bool, device: str, activation: str | None) -> None:
    """The same bits whatever else is wanted, and at each repetition."""
    seq_idx = packing(2, 70, 6, device) if packs else None
    x, dy = (transposed(2, 40, 70, dtype, device) for _ in range(2))
    leaves = (x, random_tensor((40, 4), dtype, device), random_tensor((40,), dtype, device))
    whole: list[torch.Tensor] = []
    for wanted in ((0, 1, 2), (0, 1, 2), (0,), (1,), (2,), (0, 2), (1, 2)):
        given_ = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(leaves)]
        got = torch.autograd.grad(causal_conv1d(*given_, activation, seq_idx), [given_[i] for i in wanted], dy)
        whole = whole or list(got)
        for i, gradient in zip(wanted, got, strict=True):
            assert_same_bits(gradient, whole[i])


@each_device
def test_far_from_zero(device: str) -> None:
    """Where exponentials overflow or vanish."""
    x = torch.tensor([-1e20, -1e4, -104.0, -89.0, -20.0, 0.0, 20.0, 89.0, 1e4, 1e20], device=device)[None, None]
    weight = torch.ones(1, 1, device=device)
    x.requires_grad_()
    y = causal_conv1d(x, weight, None, "silu")
    (dx,) = torch.autograd.grad(y.sum(), x)
    exact = x.detach().double().requires_grad_()
    want = torch.nn.functional.silu(exact)
    (want_dx,) = torch.autograd.grad(want.sum(), exact)
    torch.testing.assert_close(y.double(), want, atol=1e-30, rtol=1e-6)
    torch.testing.assert_close(dx.double(), want_dx, atol=1e-30, rtol=1e-5)


def test_a_token_without_a_number_reaches_its_windows_alone() -> None:
    x = torch.ones(1, 2, 40)
    x[0, 0, 20] = torch.nan
    x.requires_grad_()
    y = causal_conv1d(x, torch.ones(2, 4), None, "silu")
    assert y.isnan().nonzero().tolist() == [[0, 0, t] for t in range(20, 24)]
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.isnan().nonzero().tolist() == [[0, 0, t] for t in range(17, 24)]


@each_device
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_token_without_a_number_stays_in_its_sequence(bad: float, device: str) -> None:
    """Both ways: of its neighbours' outputs and gradients none is not a number."""
    seq_idx = torch.tensor([0] * 19 + [1] * 3 + [2] * 18, dtype=torch.int32, device=device)[None]
    x, weight = torch.ones(1, 2, 40, device=device), torch.ones(2, 4, device=device)
    x[0, 0, 20] = bad
    x.requires_grad_()
    y = causal_conv1d(x, weight, None, "silu", seq_idx)
    assert (~y.isfinite()).nonzero().tolist() == [[0, 0, 20], [0, 0, 21]]
    dy = torch.ones_like(y)
    dy[0, 1, 20] = bad
    (dx,) = torch.autograd.grad(y, x, dy)
    dx = dx.isfinite()[0].cpu()
    assert dx[:, :19].all()
    assert dx[:, 22:].all()
    assert dx[1].tolist() == [t not in (19, 20) for t in range(40)]


@each_device
def test_windows_behind_the_last_token_have_no_gradient(device: str) -> None:
    """Though they would overflow there, where the first tap meets what is before it."""
    x = torch.full((1, 2, 2), 1e10, device=device, requires_grad=True)
    weight = torch.tensor([[1e30, 1.0, 1.0, 1.0]] * 2, device=device, requires_grad=True)
    gradients = torch.autograd.grad(causal_conv1d(x, weight, None, "silu").sum(), (x, weight))
    assert gradients[0].tolist() == [[[2.0, 1.0], [2.0, 1.0]]]
    torch.testing.assert_close(gradients[1].cpu(), torch.tensor([[0, 0, 1e10, 2e10]] * 2))


def test_what_no_kernel_serves_runs_the_original() -> None:
    x, weight = torch.randn(2, 6, 12, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    assert torch.equal(causal_conv1d(x, weight, None, "swish"), original(x, weight, None, "silu"))
    longer, seq_idx = torch.randn(6, 9), packing(2, 12, 3, "cpu")
    assert torch.equal(causal_conv1d(x.float(), longer), original(x.float(), longer))
    for one, other, activation in ((x, weight, "silu"), (x.float(), longer, None), (x.bfloat16(), longer, "silu")):
        for bias in (None, torch.randn(6, dtype=other.dtype)):
            got = causal_conv1d(one, other, bias, activation, seq_idx.long())
            assert got.dtype == one.dtype
            assert torch.equal(got, original(one, other, bias, activation, seq_idx))
            torch.testing.assert_close(got, apart(original, seq_idx)(one, other, bias, activation))
    torch.testing.assert_close(original(x, weight, seq_idx=torch.ones(2, 12).int()), original(x, weight))
    bias = torch.zeros(6, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):  # PyTorch's own refusal
        causal_conv1d(x.float(), weight.float(), bias)


def test_errors_name_the_argument() -> None:
    x, weight = torch.randn(2, 6, 12), torch.randn(6, 4)
    for bad, message in (
        ((x[0], weight), r"x has shape \[6, 12\]; \[B, C, T\] is needed"),
        ((x, weight[:5]), r"weight has shape \[5, 4\]; \[6, K\] is needed"),
        ((x, weight[:, :0]), r"weight has shape \[6, 0\]"),
        ((x, weight, weight[:5, 0]), r"bias has shape \[5\]; \[6\] is needed"),
        ((x, weight, None, "gelu"), "activation is 'gelu'; None, 'silu' or 'swish' is needed"),
        ((x, weight, None, None, torch.zeros(12).int()), r"seq_idx has shape \[12\]; \[2, 12\] is needed"),
        ((x, weight, None, None, torch.zeros(12, 2).int()), r"seq_idx has shape \[12, 2\]; \[2, 12\] is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            causal_conv1d(*bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"x is torch.int64"):
        causal_conv1d(torch.ones(1, 6, 2, dtype=torch.int64), weight)
    with pytest.raises(TypeError, match="weight is a int"):
        causal_conv1d(x, 3)  # type: ignore[arg-type]
    for dtype in (torch.float32, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=f"seq_idx is {dtype}; an integer type is needed"):
            causal_conv1d(x, weight, seq_idx=torch.zeros(2, 12, dtype=dtype))
    with pytest.raises(TypeError, match="seq_idx is a list; a tensor is needed"):
        causal_conv1d(x, weight, seq_idx=[[0] * 12] * 2)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available() or EMULATED, reason="needs two devices")
def test_seq_idx_elsewhere_is_named() -> None:
    x, weight = torch.randn(2, 6, 12, device="cuda"), torch.randn(6, 4, device="cuda")
    with pytest.raises(RuntimeError, match="seq_idx is on cpu"):
        causal_conv1d(x, weight, seq_idx=torch.zeros(2, 12, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast(dtype: torch.dtype) -> None:
    """The result has x's type, as Transformers' has, whose convolution autocast rounds; ours keeps the numbers."""
    x, weight = transposed(2, 32, 40, dtype, "cpu"), random_tensor((32, 4), torch.float32, "cpu")
    exact = original(x.double(), weight.double(), None, "silu")
    with torch.autocast("cpu", torch.bfloat16):
        ours, stock = causal_conv1d(x, weight, None, "silu"), stock_function()(x, weight, activation="silu")
    assert ours.dtype == stock.dtype == dtype
    assert (ours.double() - exact).norm() <= (stock.double() - exact).norm()


@pytest.mark.parametrize("packs", [False, True])
def test_compiled_in_one_graph(packs: bool) -> None:
    seq_idx = packing(2, 20, 4, "cpu").long() if packs else None
    x = transposed(2, 32, 20, torch.float32, "cpu").requires_grad_()
    weight, bias = torch.randn(32, 1, 4, requires_grad=True), torch.randn(32, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return causal_conv1d(x, weight.squeeze(1), bias, "silu", seq_idx).transpose(1, 2).contiguous()

    compiled = torch.compile(function, fullgraph=True)(x)
    assert_same_bits(compiled, function(x))
    for got, want in zip(
        torch.autograd.grad(compiled.square().sum(), (x, weight, bias)),
        torch.autograd.grad(function(x).square().sum(), (x, weight, bias)),
        strict=True,
    ):
        assert_same_bits(got, want)


# ---- in models -------------------------------------------------------------------------------------------------------

REPLACED = Replaced("causal_conv1d", "causal_conv1d_fn")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    bastile.reset()


#: Of the gated delta rule, of Mamba's two, beside attention, and LFM2's without an activation; with how often it runs
#: in a step of the small model.
TYPES = {"qwen3_next": 1, "mamba": 2, "mamba2": 2, "bamba": 1, "lfm2": 1}


@pytest.mark.parametrize("model_type", TYPES)
def test_a_step_of_a_model(model_type: str) -> None:
    REPLACED.assert_a_step(model_type, TYPES[model_type])


@pytest.mark.parametrize("model_type", TYPES)
def test_generation_keeps_its_states(model_type: str) -> None:
    REPLACED.assert_same_generation(model_type, TYPES[model_type])


def test_calls_by_position_and_by_keyword() -> None:
    stock, ours = REPLACED.function_and_ours("qwen3_next")
    x, weight, bias = torch.randn(2, 8, 12), torch.randn(8, 4), torch.randn(8)
    REPLACED.ran()
    want = stock(x, weight, bias, "silu")
    for got in (
        ours(x, weight, bias, "silu"),
        ours(x, weight=weight, bias=bias, activation="silu", seq_idx=None, cache_position=torch.arange(3)),
        ours(hidden_states=x, weight=weight, bias=bias, activation="swish"),
    ):
        torch.testing.assert_close(got, want)
    assert REPLACED.ran() == 3


def test_compiled_as_models_call_it() -> None:
    _, ours = REPLACED.function_and_ours("qwen3_next")
    x, weight, bias = transposed(2, 8, 12, torch.float32, "cpu"), torch.randn(8, 1, 4), torch.randn(8)

    def function(x: torch.Tensor) -> Any:
        return ours(x, weight.squeeze(1), bias, activation="silu", seq_idx=None).transpose(1, 2)

    assert_same_bits(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))


def test_what_steps_aside() -> None:
    """Another activation, wide windows, other types."""
    stock, ours = REPLACED.function_and_ours("qwen3_next")
    x, weight = torch.randn(1, 8, 12), torch.randn(8, 4)
    bastile.report(reset=True)
    assert torch.equal(ours(x, weight, activation="gelu"), stock(x, weight, activation="gelu"))
    assert torch.equal(ours(x, weight.repeat(1, 3)), stock(x, weight.repeat(1, 3)))
    assert torch.equal(ours(x.double(), weight.double()), stock(x.double(), weight.double()))
    (line,) = [line for line in bastile.report() if line.operator == "causal_conv1d"]
    assert line.ran == 0
    assert set(line.aside) == {
        "its activation is not SiLU",
        "its windows are of more than 8 tokens",
        "its tensors are of a kind that no kernel serves",
    }


def test_a_package_in_force_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = types.FunctionType((lambda x, weight, **_: x).__code__, {"__name__": "causal_conv1d.interface"})
    REPLACED.assert_a_package_stays("qwen3_next", monkeypatch, "causal_conv1d", theirs)


def test_a_kernel_of_the_hub_runs() -> None:
    """The package `kernels` makes a module of the function, and gives it another forward where it has a kernel."""

    class Function(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

    module, x, weight = Function(), torch.randn(1, 8, 12), torch.randn(8, 4)
    ours = short_convolution._convolve(Tally("causal_conv1d", "a test"), module)
    torch.testing.assert_close(ours(x, weight), original(x, weight))
    module.forward = lambda *args, **kwargs: "theirs"  # type: ignore[assignment, method-assign]
    assert ours(x, weight) == "theirs"
