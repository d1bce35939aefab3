"""SwiGLU against float64, on every device at hand; the Hugging Face code's error is the yardstick."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from bastile.ops.swiglu import BastileSwiGLUMLP, swiglu
from oracle import (
    DTYPES,
    EMULATED,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_offsets_have_64_bits,
    assert_same_bits,
    devices,
    few_examples,
    random_tensor,
)


def stock(a, b):
    """What Qwen3MLP does between its projections."""
    return torch.nn.functional.silu(a) * b


def case(a, b) -> Case:
    return Case(ours=swiglu, stock=stock, exact=stock, inputs={"a": a, "b": b})


# Each shape has its reason.
SHAPES = [
    (3, 5, 256),  # ordinary: whole vectors
    (1, 8),  # one vector
    (0, 8),  # no row
    (4, 0),  # no column
    (7, 1),  # the narrowest row
    (5, 33),  # odd: single-element accesses
    (3, 4098),  # 4-byte accesses, several blocks, several tiles on CPU
    (2, 2, 3, 8),  # four dimensions
    (17,),  # one dimension
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_as_well_as_stock(shape, dtype, device):
    assert_no_worse(case(random_tensor(shape, dtype, device, scale=3.0), random_tensor(shape, dtype, device)))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, -4.0])
def test_pooled_error_is_no_larger(offset, dtype, device):
    """Gates on both sides of zero, and such whose exponential is all that counts."""
    shape = (8, 512) if EMULATED else (64, 512)
    assert_no_worse_pooled(
        lambda: case(random_tensor(shape, dtype, device, offset=offset), random_tensor(shape, dtype, device))
    )


@few_examples
@given(
    rows=st.integers(0, 9),
    columns=st.integers(1, 700),
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from(devices()),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    wide=st.booleans(),
)
def test_any_shape(rows, columns, dtype, device, scale, wide):
    """As two tensors, or as the halves of one."""
    if wide:
        a, b = random_tensor((rows, 2 * columns), dtype, device, scale=scale).chunk(2, dim=-1)
    else:
        a, b = (random_tensor((rows, columns), dtype, device, scale=scale) for _ in range(2))
    assert_no_worse(case(a, b))


@pytest.mark.parametrize("device", devices())
def test_strided_inputs(device):
    """The halves of one tensor, also unaligned, transposed (two strides), and columns that need a copy; with an
    upstream gradient that is a slice itself."""
    base = random_tensor((4, 6, 5, 200), torch.bfloat16, device)
    pairs = [
        base.chunk(2, dim=-1),
        base.transpose(1, 2).chunk(2, dim=-1),
        (base[..., 3:67], base[..., 70:134]),
        (base[:, ::2, :, :64].contiguous(), base[:, 1::2, :, 64:128]),
        (random_tensor((64, 5), torch.bfloat16, device).t(), random_tensor((5, 64), torch.bfloat16, device)),
    ]
    for a, b in pairs:
        assert_no_worse(case(a, b))
        dy = random_tensor((*a.shape[:-1], a.shape[-1] + 8), torch.bfloat16, device)[..., 8:]
        got, want = [], []
        for results, (left, right) in ((got, (a, b)), (want, (a.contiguous(), b.contiguous()))):
            left, right = left.detach().requires_grad_(), right.detach().requires_grad_()
            y = swiglu(left, right)
            results += [y.detach(), *torch.autograd.grad(y, (left, right), dy if results is got else dy.contiguous())]
        for g, w in zip(got, want, strict=True):
            assert_same_bits(g, w)


def test_rows_far_apart():
    assert_offsets_have_64_bits(swiglu, *(random_tensor((2, 64), torch.bfloat16, "cpu") for _ in range(2)))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_far_from_zero(dtype, device):
    """Where exp overflows or vanishes, and infinities: what stock makes of them."""
    a = torch.tensor([-torch.inf, -1e4, -104, -89, -88.5, -87, -20, -0.0, 0.0, 20, 89, 1e4, torch.inf, torch.nan])
    a = a.to(dtype).to(device)
    b, dy = torch.ones_like(a), torch.ones_like(a)
    results = []
    for function in (swiglu, stock):
        left, right = a.clone().requires_grad_(), b.clone().requires_grad_()
        y = function(left, right)
        results.append((y.detach(), *torch.autograd.grad(y, (left, right), dy)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, atol=1e-35, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("device", devices())
def test_expanded_upstream_gradient(device):
    """`y.sum().backward()` sends a gradient whose strides are all zero."""
    a, b = (random_tensor((5, 48), torch.float32, device).requires_grad_() for _ in range(2))
    y = swiglu(a, b)
    first = torch.autograd.grad(y.sum(), (a, b), retain_graph=True)
    for g, w in zip(first, torch.autograd.grad(y, (a, b), torch.ones_like(y)), strict=True):
        assert_same_bits(g, w)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("wanted", ["a", "b"])
def test_one_gradient_alone(wanted, device):
    a, b, dy = (random_tensor((9, 40), torch.bfloat16, device) for _ in range(3))
    both = [t.clone().requires_grad_() for t in (a, b)]
    one = [t.clone().requires_grad_(name == wanted) for t, name in ((a, "a"), (b, "b"))]
    swiglu(*both).backward(dy)
    swiglu(*one).backward(dy)
    for x, y in zip(both, one, strict=True):
        assert y.grad is None or torch.equal(x.grad, y.grad)
    assert sum(t.grad is not None for t in one) == 1


@pytest.mark.parametrize("device", devices())
def test_inputs_are_left_alone_and_bits_repeat(device):
    """On one thread and on several."""
    a, b, dy = (random_tensor((40, 72), torch.bfloat16, device) for _ in range(3))
    kept = [t.clone() for t in (a, b, dy)]
    results = []
    threads = torch.get_num_threads()
    for count in (1, 4):
        torch.set_num_threads(count)
        left, right = a.clone().requires_grad_(), b.clone().requires_grad_()
        y = swiglu(left, right)
        y.backward(dy)
        results.append((y.detach(), left.grad, right.grad))
    torch.set_num_threads(threads)
    for first, second in zip(*results, strict=True):
        assert_same_bits(first, second)
    for t, k in zip((a, b, dy), kept, strict=True):
        assert_same_bits(t, k)


def test_keeps_nothing_but_its_inputs():
    a, b = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        swiglu(a, b)
    assert saved == [a.data_ptr(), b.data_ptr()]


@pytest.mark.parametrize("device", devices())
def test_bad_input_is_named(device):
    a = torch.ones(2, 8, device=device)
    with pytest.raises(RuntimeError, match=r"glu_forward: b has shape \[2, 7\]; it must have that of a, \[2, 8\]"):
        swiglu(a, a[:, :7])
    with pytest.raises(RuntimeError, match="a is a scalar"):
        swiglu(torch.tensor(1.0, device=device), torch.tensor(1.0, device=device))


@pytest.mark.parametrize("device", devices())
def test_double_backward_is_refused(device):
    a = torch.ones(2, 8, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(swiglu(a, torch.ones(2, 8, device=device)).sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="swiglu cannot be differentiated twice"):
        gradient.sum().backward()


def test_other_types_and_devices_run_the_original_code():
    a, b = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(swiglu(a, b), stock(a, b))
    assert torch.equal(swiglu(a.bfloat16(), b.float()), stock(a.bfloat16(), b.float()))
    assert swiglu(a.to("meta"), b.to("meta")).device.type == "meta"


@pytest.mark.parametrize("device", devices())
def test_compiles_without_a_break(device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: swiglu(a * 2, b), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        leaves = [random_tensor((rows, 24), torch.float32, device).requires_grad_() for _ in range(2)]
        twins = [t.detach().clone().requires_grad_() for t in leaves]
        compiled(*leaves).square().sum().backward()
        swiglu(twins[0] * 2, twins[1]).square().sum().backward()
        for t, twin in zip(leaves, twins, strict=True):
            assert_same_bits(t.grad, twin.grad)


@pytest.mark.parametrize("device", devices())
def test_what_the_compiler_is_told_is_true(device):
    a, b = random_tensor((3, 16), torch.bfloat16, device).chunk(2, dim=-1)
    torch.library.opcheck(torch.ops.bastile.swiglu_forward.default, (a, b))
    for wanted in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(torch.ops.bastile.swiglu_backward.default, (a, a, b, *wanted))


@pytest.mark.parametrize("bias", [False, True])
def test_module_shares_the_projections_it_takes_over(bias):
    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2, mlp_bias=bias)
    old = LlamaMLP(config)
    new = BastileSwiGLUMLP.from_module(old)
    assert all(a is b for a, b in zip(new.parameters(), old.parameters(), strict=True))
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(new(x), old(x))
    assert BastileSwiGLUMLP(config).state_dict().keys() == old.state_dict().keys()


def test_module_takes_a_config_and_refuses_other_activations():
    config = Qwen3Config(hidden_size=16, intermediate_size=24)
    new, old = BastileSwiGLUMLP(config), Qwen3MLP(config)
    old.load_state_dict(new.state_dict())
    x = torch.randn(5, 16)
    torch.testing.assert_close(new(x), old(x))
    config.hidden_act = "gelu"
    with pytest.raises(ValueError, match="hidden_act is 'gelu'"):
        BastileSwiGLUMLP(config)
    with pytest.raises(ValueError, match="Linear has no gate_proj"):
        BastileSwiGLUMLP.from_module(torch.nn.Linear(2, 2))
