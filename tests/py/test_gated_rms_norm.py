"""The RMS norm with a gate against float64, on every device at hand; the Hugging Face code's error is the yardstick."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from bastile.ops.gated_rms_norm import gated_rms_norm
from oracle import (
    DTYPES,
    EMULATED,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_offsets_have_64_bits,
    assert_same_bits,
    devices,
    devices_and_types,
    few_examples,
    random_tensor,
)

EPS = 1e-6
ACT = {"silu": functional.silu, "sigmoid": torch.sigmoid}

#: What the models have, as options: Qwen3-Next's norm, Kimi Linear's, Mamba-2's.
FORMS = {
    "qwen": {"activation": "silu"},
    "kimi": {"activation": "sigmoid"},
    "mamba": {"activation": "silu", "gate_first": True, "promote": True},
}
#: The one that no model has.
OTHER = {"activation": "sigmoid", "gate_first": True}


def normed(u, group):
    width = group or u.shape[-1]
    grouped = u.unflatten(-1, (u.shape[-1] // width, width))
    return (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + EPS)).view_as(u)


def stock(x, gate, weight, activation="silu", gate_first=False, group=0, promote=False):
    """The code that a model would run without Bastile: `test_stock_is_what_models_run`."""
    act = ACT[activation](gate.float())
    u = x.float() * act if gate_first else x.float()
    n = normed(u, group)
    # Kimi Linear's is not rounded first.
    n = weight.float() * n if activation == "sigmoid" else weight * n.to(x.dtype)
    y = n if gate_first else n * act
    return y if promote else y.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stock_is_what_models_run(dtype):
    x, gate, weight = inputs((3, 96), dtype, "cpu")
    for cls, arguments, options in (
        (Qwen3NextRMSNormGated, (96,), FORMS["qwen"]),
        (KimiLinearRMSNormGated, (96,), FORMS["kimi"]),
        (MambaRMSNormGated, (96, 32), {**FORMS["mamba"], "group": 32}),
    ):
        module = cls(*arguments, eps=EPS)
        module.weight = torch.nn.Parameter(weight)
        assert_same_bits(module(x, gate).detach(), stock(x, gate, weight, **options))


def exact(x, gate, weight, activation="silu", gate_first=False, group=0, promote=False):
    """The definition, without any rounding in between."""
    act = ACT[activation](gate)
    u = x * act if gate_first else x
    n = normed(u, group)
    return n * weight if gate_first else n * weight * act


def case(x, gate, weight, **options) -> Case:
    width = options.get("group") or x.shape[-1]
    return Case(
        ours=lambda *tensors: gated_rms_norm(*tensors, EPS, **options),
        stock=lambda *tensors: stock(*tensors, **options),
        exact=lambda *tensors: exact(*tensors, **options),
        inputs={"x": x, "gate": gate, "weight": weight},
        # In rows of a few elements the gradient is nearly orthogonal to its terms.
        terms=_terms(x, gate, weight, **options) if x.numel() and width < 4 else {},
    )


def _terms(x, gate, weight, activation="silu", gate_first=False, **_):
    value = ACT[activation](gate.double()).abs()
    least = (x.double().abs() * (value if gate_first else 1)).min().clamp_min(1e-3)
    most = (1 + weight.double().abs().max()) * (1 + value.max()) / least
    return (
        {"dx": most.item(), "dgate": (most * (1 + x.double().abs().max())).item()}
        if gate_first
        else {"dx": most.item()}
    )


def inputs(shape, dtype, device, gate_type=None, weight_type=None):
    x, gate = random_tensor(shape, dtype, device, scale=2.0), random_tensor(shape, gate_type or dtype, device)
    return x, gate, random_tensor(shape[-1:], weight_type or dtype, device, scale=0.3, offset=1.0)


# Each shape has its reason.
SHAPES = [
    (3, 5, 256),  # ordinary: whole vectors, folds to 15 rows
    (1, 64),  # one row
    (0, 64),  # no row
    (7, 1),  # the narrowest row
    (5, 33),  # odd: single-element accesses, a partial warp
    (4, 1000),  # vectors do not divide evenly among threads
    (70, 128),  # Qwen3-Next's heads: several rows of a block, the last block partial
    (2, 2, 3, 8),  # four dimensions, one vector a row
    (5, 4096),  # a block a row; more than one tile on CPU
    (3, 4098),  # 4-byte accesses
    (2, 20000),  # too wide for registers: rows are read again, partial rows in memory
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [*FORMS, "other"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_as_well_as_stock(shape, form, dtype, device):
    assert_no_worse(case(*inputs(shape, dtype, device), **FORMS.get(form, OTHER)))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
# Wide and narrow groups, one of an odd size, of single elements, one wider than a tile on CPU, all of a row.
@pytest.mark.parametrize(("columns", "group"), [(512, 128), (96, 8), (99, 33), (6, 1), (4096, 2048), (64, 64)])
def test_groups(columns, group, form, dtype, device):
    assert_no_worse(case(*inputs((9, columns), dtype, device), group=group, **FORMS[form]))


@pytest.mark.parametrize(("device", "dtype"), devices_and_types())
@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("form", FORMS)
def test_pooled_error_is_no_larger(form, group, device, dtype):
    shape = (8, 512) if EMULATED else (64, 512)
    assert_no_worse_pooled(lambda: case(*inputs(shape, dtype, device), group=group, **FORMS[form]))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", FORMS)
# With the next row ahead, and without: each block of the backward kernel takes several rows.
@pytest.mark.parametrize("shape", [(6000, 128), (1000, 2048), (150, 8192)], ids=str)
def test_more_rows_than_blocks(shape, form, device):
    rows = shape[0] // 20 if EMULATED else shape[0]
    assert_no_worse(case(*inputs((rows, shape[1]), torch.bfloat16, device), **FORMS[form]))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("types", [t for t in itertools.product(DTYPES, repeat=3) if len(set(t)) > 1])
def test_each_input_may_have_a_type_of_its_own(types, form, device):
    """As under autocast, which leaves weights in float32; the type of the result is stock's."""
    x_type, gate_type, weight_type = types
    tensors = inputs((6, 96), x_type, device, gate_type, weight_type)
    assert gated_rms_norm(*tensors, **FORMS[form]).dtype == stock(*tensors, **FORMS[form]).dtype
    assert_no_worse(case(*tensors, **FORMS[form]))


@few_examples
@given(
    rows=st.integers(0, 9),
    groups=st.integers(1, 5),
    width=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(list(FORMS)),
    device=st.sampled_from(devices()),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
)
def test_any_shape(rows, groups, width, dtype, form, device, scale):
    x, gate, weight = inputs((rows, groups * width), dtype, device)
    assert_no_worse(case((x.float() * scale).to(dtype), gate, weight, group=width, **FORMS[form]))


@pytest.mark.parametrize("device", devices())
def test_strided_inputs(device):
    """Rows that are a slice, a transposed view (two strides), an unaligned slice, and columns that need a copy; as the
    halves of a projection are."""
    base, weight = random_tensor((4, 6, 3, 80), torch.bfloat16, device), inputs((64,), torch.bfloat16, device)[2]
    views = [base[..., :64], base.transpose(1, 2)[..., :64], base[..., 3:67], base[:, 1::2, :, 8:72]]
    for view in [*views, random_tensor((64, 5), torch.bfloat16, device).t()]:
        whole = random_tensor(view.shape, torch.bfloat16, device)
        for options in FORMS.values():
            for x, gate in ((view, whole), (whole, view), (view, view)):
                assert_no_worse(case(x, gate, weight, group=32, **options))
                assert_same_bits(
                    gated_rms_norm(x, gate, weight, **options),
                    gated_rms_norm(x.contiguous(), gate.contiguous(), weight, **options),
                )


@pytest.mark.parametrize("form", FORMS)
def test_rows_far_apart(form):
    x, gate, weight = inputs((2, 64), torch.bfloat16, "cpu")
    for w in (weight, weight.clone().requires_grad_()):
        assert_offsets_have_64_bits(lambda x, gate, w=w: gated_rms_norm(x, gate, w, **FORMS[form]), x, gate)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", FORMS)
def test_expanded_upstream_gradient(form, device):
    """`y.sum().backward()` sends a gradient whose strides are all zero."""
    tensors = inputs((5, 48), torch.float32, device)
    leaves, others = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    gated_rms_norm(*leaves, **FORMS[form]).sum().backward()
    gated_rms_norm(*others, **FORMS[form]).backward(torch.ones(5, 48, device=device))
    for leaf, other in zip(leaves, others, strict=True):
        assert_same_bits(leaf.grad, other.grad)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wanted", [w for w in itertools.product([False, True], repeat=3) if any(w)], ids=str)
def test_some_gradients_alone(wanted, form, device):
    tensors, dy = inputs((9, 40), torch.bfloat16, device), random_tensor((9, 40), torch.bfloat16, device)
    everything = [t.clone().requires_grad_() for t in tensors]
    some = [t.clone().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)]
    gated_rms_norm(*everything, **FORMS[form]).backward(dy)
    gated_rms_norm(*some, **FORMS[form]).backward(dy)
    for a, b, want in zip(everything, some, wanted, strict=True):
        assert (b.grad is not None) == want
        if want:
            assert_same_bits(a.grad, b.grad)


@pytest.mark.parametrize("device", devices())
def test_the_weight_s_gradient_alone_of_more_rows_than_blocks(device):
    """A row has one sum then, not two: what the next row's is put together in is still being read."""
    tensors = inputs((40 if EMULATED else 600, 4096), torch.bfloat16, device)
    dy, results = random_tensor(tensors[0].shape, torch.bfloat16, device), []
    for others in (False, True):
        leaves = [t.clone().requires_grad_(others or t is tensors[2]) for t in tensors]
        gated_rms_norm(*leaves).backward(dy)
        results.append(leaves[2].grad)
    assert_same_bits(*results)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", FORMS)
def test_inputs_are_left_alone_and_bits_repeat(form, device):
    tensors, dy = inputs((40, 72), torch.bfloat16, device), random_tensor((40, 72), torch.bfloat16, device)
    kept, results = [t.clone() for t in (*tensors, dy)], []
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = gated_rms_norm(*leaves, group=24, **FORMS[form])
        y.backward(dy)
        results.append((y.detach(), *[t.grad for t in leaves]))
    for first, second in zip(*results, strict=True):
        assert_same_bits(first, second)
    for t, k in zip((*tensors, dy), kept, strict=True):
        assert_same_bits(t, k)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of_gate", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 200.0, -200.0])
def test_nan_and_inf_are_where_stock_has_them(value, of_gate, form, device):
    x, gate, weight = inputs((4, 64), torch.float32, device)
    (gate if of_gate else x)[2, 5] = value
    results = []
    for function in (lambda *t: gated_rms_norm(*t, EPS, **FORMS[form]), lambda *t: stock(*t, **FORMS[form])):
        leaves = [t.clone().requires_grad_() for t in (x, gate, weight)]
        y = function(*leaves)
        y.sum().backward()
        results.append((y.detach(), *[t.grad for t in leaves]))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got.isnan(), want.isnan())
    assert results[0][0][[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("device", devices())
def test_bad_input_is_named(device):
    x, weight = torch.ones(2, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(RuntimeError, match=r"gated_rms_norm_forward: weight has shape \[7\].*must be 8"):
        gated_rms_norm(x, x, weight[:7])
    with pytest.raises(RuntimeError, match=r"gate has shape \[8\]; it must have that of x, \[2, 8\]"):
        gated_rms_norm(x, weight, weight)
    with pytest.raises(RuntimeError, match="group is 3, and x has rows of 8; a divisor is needed"):
        gated_rms_norm(x, x, weight, group=3)
    with pytest.raises(RuntimeError, match="group is -1; 0 to 65536 is needed"):
        gated_rms_norm(x, x, weight, group=-1)
    with pytest.raises(ValueError, match="activation is 'gelu'; 'silu' or 'sigmoid' is needed"):
        gated_rms_norm(x, x, weight, activation="gelu")
    with pytest.raises(RuntimeError, match="x has rows of 65537"):
        gated_rms_norm(*[torch.ones(1, 65537, device=device)] * 2, torch.ones(65537, device=device))
    double = x.double()
    with pytest.raises(ValueError, match=r"gate has shape \[8\]; \[2, 8\], that of x, is needed"):
        gated_rms_norm(double, double[0], weight.double())
    with pytest.raises(ValueError, match="group is 3, and x has rows of 8"):
        gated_rms_norm(double, double, weight.double(), group=3)
    with pytest.raises(ValueError, match=r"weight has shape \[7\]"):
        gated_rms_norm(double, double, weight.double()[:7])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("of", range(3))
def test_double_backward_is_refused(of, device):
    leaves = [t.requires_grad_() for t in inputs((2, 8), torch.float32, device)]
    gradients = torch.autograd.grad(gated_rms_norm(*leaves).sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="gated_rms_norm cannot be differentiated twice"):
        gradients[of].sum().backward()


def test_rows_of_no_elements_have_fakes_and_are_refused():
    with pytest.raises(RuntimeError, match="x has rows of 0 elements; 1 to 65536 are supported"):
        gated_rms_norm(torch.ones(2, 0), torch.ones(2, 0), torch.ones(0))
    with FakeTensorMode():
        x, weight = torch.ones(2, 3, 0, dtype=torch.bfloat16), torch.ones(0)
        forward = torch.ops.bastile.gated_rms_norm_forward
        for promote, dtype in ((False, torch.bfloat16), (True, torch.float32)):
            y = forward(x, x, weight, 1e-6, 0, False, 0, promote)
            assert (y.shape, y.dtype) == ((2, 3, 0), dtype)


@pytest.mark.parametrize("form", FORMS)
def test_other_types_and_devices_run_the_original_code(form):
    tensors = [t.double() for t in inputs((3, 8), torch.float32, "cpu")]
    for group in (0, 4):
        torch.testing.assert_close(
            gated_rms_norm(*[t.float() for t in tensors], EPS, group=group, **FORMS[form]),
            gated_rms_norm(*tensors, EPS, group=group, **FORMS[form]).float(),
        )
    assert gated_rms_norm(*[t.to("meta") for t in tensors], **FORMS[form]).device.type == "meta"
    half = [t.half() for t in tensors]
    got = torch.func.vmap(lambda x, gate: gated_rms_norm(x, gate, tensors[2], **FORMS[form]))(*half[:2])
    assert got.dtype == (torch.float64 if FORMS[form].get("promote") else torch.float16)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", FORMS)
def test_compiles_without_a_break(form, device):
    torch._dynamo.reset()
    weight = torch.ones(24, device=device, requires_grad=True)

    def run(x, gate):
        return gated_rms_norm(x * 2, gate, weight, group=8, **FORMS[form])

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        leaves = [random_tensor((rows, 24), torch.float32, device).requires_grad_() for _ in range(2)]
        twins = [t.detach().clone().requires_grad_() for t in leaves]
        compiled(*leaves).square().sum().backward()
        run(*twins).square().sum().backward()
        for a, b in zip(leaves, twins, strict=True):
            assert_same_bits(a.grad, b.grad)
