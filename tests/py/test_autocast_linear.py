"""Linear layers of float32 under autocast against float64 and against PyTorch's, alone, in nn.Linear and in models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import bastile
from bastile.ops._modules import plain_linear
from bastile.ops.autocast_linear import autocast_linear
from conftest import gradients, tiny_batch, tiny_model
from memory import kept_by
from oracle import Case, assert_no_worse, assert_same_bits, devices, few_examples, random_tensor

HALVES = [torch.bfloat16, torch.float16]


def inputs(
    shape: tuple[int, ...], width: int, dtype: torch.dtype = torch.float32, device: str = "cpu", bias: bool = True
) -> list[torch.Tensor]:
    weight = random_tensor((width, shape[-1]), torch.float32, device, scale=shape[-1] ** -0.5)
    return [random_tensor(shape, dtype, device), weight, *[random_tensor((width,), torch.float32, device)] * bias]


def under_autocast(function: Any, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    def run(*given: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype):
            return function(*given)

    return run


def leaves_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


def assert_good(tensors: list[torch.Tensor], device: str, dtype: torch.dtype = torch.bfloat16) -> None:
    ours, stock = (under_autocast(function, device, dtype) for function in (autocast_linear, linear))
    assert_same_bits(ours(*leaves_of(tensors)), stock(*leaves_of(tensors)))
    assert_no_worse(Case(ours, stock, linear, dict(zip(("x", "weight", "bias"), tensors, strict=False))))


def is_ours(result: torch.Tensor) -> bool:
    return "AutocastLinear" in type(result.grad_fn).__name__


# The shape of x and the width of the weight: each row has its reason.
SHAPES = [
    ((2, 9, 64), 128),
    ((24, 64), 96),  # rows without a batch
    ((2, 3, 4, 16), 24),
    ((1, 1, 32), 16),  # one token
    ((2, 0, 16), 8),  # no token
    ((3, 1), 2),  # the narrowest input
    ((5, 16), 1),  # one result
    ((300, 24), 40),  # more rows than columns: sums of the bias are long
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("shape", "width"), SHAPES)
def test_shapes(shape: tuple[int, ...], width: int, dtype: torch.dtype, bias: bool, device: str) -> None:
    assert_good(inputs(shape, width, device=device, bias=bias), device, dtype)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_x_may_be(dtype: torch.dtype, device: str) -> None:
    tensors = inputs((3, 7, 48), 20, dtype, device)
    assert_good(tensors, device)
    assert is_ours(under_autocast(autocast_linear, device)(*leaves_of(tensors)))


@pytest.mark.parametrize("device", devices())
def test_strides(device: str) -> None:
    x, weight, bias = inputs((4, 6, 48), 32, device=device)
    assert_good([x.transpose(0, 1), weight, bias], device)
    assert_good([x[..., ::2], weight[:, ::2], bias], device)
    assert_good([x, weight.t().contiguous().t(), bias[::2].repeat_interleave(2)], device)
    assert_good([x[0, 0].expand(4, 6, 48), weight, bias], device)


@few_examples
@given(rows=st.integers(0, 40), inner=st.integers(1, 40), width=st.integers(1, 40), bias=st.booleans())
def test_any_shape(rows: int, inner: int, width: int, bias: bool) -> None:
    assert_good(inputs((rows, inner), width, bias=bias), "cpu")


@pytest.mark.parametrize("device", devices())
def test_gradients_are_not_rounded_where_the_product_can_write_them(device: str) -> None:
    """Sums of 16 bits in float32: on CUDA all three, on a CPU that of the bias."""
    leaves = leaves_of(inputs((500, 64), 32, device=device))
    result = under_autocast(autocast_linear, device)(*leaves)
    found = torch.autograd.grad(result, leaves, random_tensor(result.shape, result.dtype, device))
    assert [g.dtype for g in found] == [torch.float32] * 3
    rounded = [bool((g.bfloat16() == g).all()) for g in found]
    assert rounded == ([False] * 3 if device == "cuda" else [True, True, False])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
def test_what_has_no_gradient_costs_none(wanted: tuple[int, ...], device: str) -> None:
    tensors = inputs((4, 5, 32), 16, device=device)
    leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
    run = under_autocast(autocast_linear, device)
    result = run(*leaves)
    upstream = random_tensor(result.shape, result.dtype, device)
    every = leaves_of(tensors)
    want = torch.autograd.grad(run(*every), every, upstream)
    found = torch.autograd.grad(result, [leaves[i] for i in wanted], upstream)
    for g, i in zip(found, wanted, strict=True):
        assert_same_bits(g, want[i])
    # Beside the result: x for the weight's gradient, the weight for x's.
    assert kept_by(lambda: run(*leaves)) == 2 * (4 * 5 * 16 + 4 * 5 * 32 * (1 in wanted) + 16 * 32 * (0 in wanted))


@pytest.mark.parametrize("device", devices())
def test_another_backward_pass_over_the_same_graph(device: str) -> None:
    leaves = leaves_of(inputs((4, 32), 16, device=device))
    result = under_autocast(autocast_linear, device)(*leaves).float().square().sum()
    first = torch.autograd.grad(result, leaves, retain_graph=True)
    for g, want in zip(torch.autograd.grad(result, leaves), first, strict=True):
        assert_same_bits(g, want)


@pytest.mark.parametrize("which", range(3))
def test_a_second_derivative_is_an_error(which: int) -> None:
    leaves = leaves_of(inputs((4, 32), 16))
    result = under_autocast(autocast_linear, "cpu")(*leaves).float().square().sum()
    gradient = torch.autograd.grad(result, leaves[which], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="autocast_linear"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant: bool) -> None:
    leaves = leaves_of(inputs((4, 5, 32), 16))
    run = under_autocast(autocast_linear, "cpu")
    want = torch.autograd.grad(run(*leaves).float().square().sum(), leaves)
    checkpoint(run, *leaves, use_reentrant=reentrant).float().square().sum().backward()
    for leaf, w in zip(leaves, want, strict=True):
        assert_same_bits(leaf.grad, w)


def test_gradients_of_several_at_once() -> None:
    leaves = leaves_of(inputs((4, 32), 16))
    result = under_autocast(autocast_linear, "cpu")(*leaves)
    upstreams = random_tensor((3, *result.shape), result.dtype, "cpu")
    found = torch.autograd.grad(result, leaves, upstreams, retain_graph=True, is_grads_batched=True)
    for i, upstream in enumerate(upstreams):
        for g, want in zip(found, torch.autograd.grad(result, leaves, upstream, retain_graph=True), strict=True):
            torch.testing.assert_close(g[i], want, rtol=2e-2, atol=2e-2)


def test_what_runs_pytorchs_own() -> None:
    x, weight, bias = leaves_of(inputs((4, 32), 16))
    assert not is_ours(autocast_linear(x, weight, bias))  # no autocast
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_ours(autocast_linear(x.bfloat16(), weight.detach(), bias.detach()))  # all of 16 bits, or frozen
        assert not is_ours(autocast_linear(x[0], weight, bias))  # no rows
        assert not is_ours(autocast_linear(x.double(), weight.double(), bias.double()))
        assert torch.func.vmap(lambda row: autocast_linear(row[None], weight, bias))(x).shape == (4, 1, 16)
        with torch.no_grad():
            assert autocast_linear(x, weight, bias).grad_fn is None
    with pytest.raises(RuntimeError, match="mat1 and mat2"), torch.autocast("cpu", torch.bfloat16):
        autocast_linear(x, weight[:, 1:], bias)


# ---- in nn.Linear ----------------------------------------------------------------------------------------------------


def ran() -> int:
    return bastile.report(reset=True).ran("autocast_linear")


def test_the_class_is_served_and_given_back() -> None:
    stock = nn.Linear.forward
    layer = nn.Linear(8, 4)
    assert "autocast_linear" in bastile.apply()
    assert ran() == 0
    with torch.autocast("cpu", torch.bfloat16):
        result = layer(torch.ones(3, 8))
        assert is_ours(result)
        assert plain_linear(nn.Linear(8, 4, bias=False))  # others may still take its weight for it
    assert ran() == 1
    assert not is_ours(layer(torch.ones(3, 8)))
    assert layer(input=torch.ones(3, 8)).shape == (3, 4)
    bastile.reset()
    assert nn.Linear.forward is stock


def test_it_can_be_left_out() -> None:
    stock = nn.Linear.forward
    assert "autocast_linear" not in bastile.apply(autocast_linear=False)
    assert nn.Linear.forward is stock


def test_a_forward_of_somebody_elses_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = nn.Linear.forward
    other = lambda self, x: stock(self, x) * 2  # noqa: E731
    monkeypatch.setattr(nn.Linear, "forward", other)
    bastile.apply()
    assert nn.Linear.forward is other


def test_a_class_with_a_forward_of_its_own() -> None:
    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    layer = Twice(8, 4)
    x = torch.ones(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        want = layer(x)
        bastile.apply()
        assert_same_bits(layer(x), want)
    assert ran() == 1


def test_scripts_and_compiles() -> None:
    bastile.apply()
    layer = nn.Sequential(nn.Linear(8, 4))
    x = torch.ones(3, 8)
    assert_same_bits(torch.jit.script(layer)(x), layer(x))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        want = layer(x)
        ran()
        assert_same_bits(compiled(x), want)
        assert_same_bits(compiled(x), want)
    assert ran() == 0  # the compiler casts gradients in passes that do more


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=60,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).train()


@pytest.mark.parametrize("device", devices())
def test_an_encoder_under_autocast(device: str) -> None:
    """Six layers in each of two, the pooler's, and the classifier's."""
    model = bert().to(device)
    ids = torch.arange(24, device=device).view(2, 12)
    found = []
    for ours in (False, True):
        if ours:
            bastile.apply()
        ran()
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=ids, labels=torch.tensor([0, 1], device=device)).loss
        loss.backward()
        assert ran() == (14 if ours else 0)
        found.append({"loss": loss.detach(), **gradients(model)})
        model.zero_grad()
    exact = bert().to(device).double()
    loss = exact(input_ids=ids, labels=torch.tensor([0, 1], device=device)).loss
    loss.backward()
    want = {"loss": loss.detach(), **gradients(exact)}
    errors = [sum(float((each[name] - want[name]).norm() ** 2) for name in want) ** 0.5 for each in found]
    assert errors[1] <= 1.05 * errors[0]


def test_frozen_layers_and_those_of_16_bits_are_left() -> None:
    bastile.apply(lora_linear=False)
    model = get_peft_model(bert(), LoraConfig(r=4, target_modules=["query"]))
    ids = torch.arange(24).view(2, 12)
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids).logits.sum().backward()
    assert ran() == 4  # the adapters' own
    model = tiny_model().to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        model(**tiny_batch(model)).loss.backward()
    assert ran() == 0
