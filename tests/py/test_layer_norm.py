"""LayerNorm, alone and after the addition of a residual, against float64; F.layer_norm's error is the yardstick."""

import pytest
import torch
from torch.nn.functional import layer_norm as stock

from bastile.ops.norm import add_layer_norm, layer_norm
from oracle import (
    DTYPES,
    EMULATED,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_same_bits,
    devices,
    devices_and_types,
    random_tensor,
)
from test_rms_norm import SHAPES

EPS = 1e-5


def case(x, weight=None, bias=None, residual=None, independent=None) -> Case:
    """What is None stays out of it. Stock has the rounded inputs in x's type, or where they are mixed in float32."""
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    names = [name for name, t in given.items() if t is not None]

    def function(norm, add):
        def run(*tensors):
            t = dict.fromkeys(given) | dict(zip(names, tensors, strict=True))
            if t["residual"] is None:
                return norm(t["x"], t["weight"], t["bias"])
            return add(t["x"], t["residual"], t["weight"], t["bias"])

        return run

    def torchs(x, weight, bias):
        if weight is None or weight.dtype is x.dtype:
            return stock(x, x.shape[-1:], weight, bias, EPS)
        return stock(x.float(), x.shape[-1:], weight, bias, EPS).to(x.dtype)

    plain = function(torchs, lambda x, r, w, b: (torchs(x + r, w, b), x + r))
    ours = function(layer_norm, add_layer_norm)
    return Case(ours, plain, plain, inputs={name: given[name] for name in names}, independent=independent)


def random_case(shape, dtype, device, w_type=None, leave="", add=False) -> Case:
    w = None if "w" in leave else random_tensor(shape[-1:], w_type or dtype, device, offset=1.0)
    b = None if "b" in leave else random_tensor(shape[-1:], w_type or dtype, device)
    x, r = (random_tensor(shape, dtype, device, scale=2.0, offset=0.5) for _ in range(2))
    return case(x, w, b, r if add else None)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_as_well_as_stock(shape, add, dtype, device):
    assert_no_worse(random_case(shape, dtype, device, add=add))


# The last: rows come through all stages of the backward kernel's rings, and a block sums several.
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("shape", [(6, 96), (5, 33), (600, 2048)], ids=str)
@pytest.mark.parametrize(
    ("leave", "w_type"), [("w", None), ("b", None), ("wb", None), ("", torch.float32), ("b", torch.float32)]
)
def test_without_weight_or_bias_and_of_another_type(leave, w_type, shape, device):
    assert_no_worse(random_case(shape, torch.bfloat16, device, w_type, leave, add=w_type is None))


@pytest.mark.parametrize(("device", "dtype"), devices_and_types())
@pytest.mark.parametrize("add", [False, True], ids=["alone", "residual"])
def test_pooled_error_is_no_larger(add, device, dtype):
    shape = (8, 512) if EMULATED else (64, 512)
    assert_no_worse_pooled(lambda: random_case(shape, dtype, device, add=add))


@pytest.mark.parametrize("device", devices())
def test_a_mean_far_from_zero(device):
    """1000 standard deviations: the variance is not the difference of two large numbers."""
    assert_no_worse(case(random_tensor((9, 700), torch.float32, device, offset=1000.0), independent=9))


@pytest.mark.parametrize("device", devices())
def test_strides_types_and_one_gradient(device):
    base, weight = random_tensor((4, 6, 3, 80), torch.bfloat16, device), random_tensor((64,), torch.bfloat16, device)
    for x in (base[..., :64], base.transpose(1, 2)[..., :64], base[..., 3:67]):
        assert_same_bits(layer_norm(x, weight), layer_norm(x.contiguous(), weight))
        y, total = add_layer_norm(x, x, weight)
        assert_same_bits(total, x + x)
        assert_same_bits(y, layer_norm(total, weight))
    y, total = add_layer_norm(base.float(), base)
    assert (y.dtype, total.dtype) == (torch.float32, torch.float32)
    leaves = [base[..., :64].clone(), weight.clone(), weight.clone()]
    dy = random_tensor(leaves[0].shape, torch.bfloat16, device)
    want = torch.autograd.grad(layer_norm(*[t.requires_grad_() for t in leaves]), leaves, dy)
    for i, leaf in enumerate(leaves):
        alone = [t.detach() for t in leaves]
        alone[i] = leaf
        assert_same_bits(torch.autograd.grad(layer_norm(*alone), leaf, dy)[0], want[i])


@pytest.mark.parametrize("device", devices())
def test_bad_input_is_named(device):
    x, w = torch.ones(2, 8, device=device), torch.ones(8, device=device)
    for function, message in (
        (lambda: layer_norm(x, w, w[:7]), r"norm_forward: bias has shape \[7\]; dimension 0 must be 8"),
        (lambda: layer_norm(x, w, w.half()), "bias is float16; float32 is needed, as weight has it, or without one x"),
        (lambda: torch.ops.bastile.norm_forward(x, w, w, 0.0, 0, 0), r"mean is given, but kind is 0 \(rms\)"),
    ):
        with pytest.raises(RuntimeError, match=message):
            function()


@pytest.mark.parametrize("device", devices())
def test_compiles_without_a_break(device):
    torch._dynamo.reset()
    w, b = (torch.ones(24, device=device, requires_grad=True) for _ in range(2))
    compiled = torch.compile(
        lambda x: sum(add_layer_norm(layer_norm(x * 2, w, b), x, w, b)), fullgraph=True, backend="aot_eager"
    )
    x = random_tensor((3, 24), torch.float32, device).requires_grad_()
    want = torch.autograd.grad(sum(add_layer_norm(layer_norm(x * 2, w, b), x, w, b)).square().sum(), (x, w, b))
    for got, expected in zip(torch.autograd.grad(compiled(x).square().sum(), (x, w, b)), want, strict=True):
        assert_same_bits(got, expected)
