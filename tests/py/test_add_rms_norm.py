"""The addition of a residual fused with RMSNorm: against float64; the yardstick is what a decoder layer runs."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bastile.ops.rms_norm import add_rms_norm, rms_norm
from memory import Memory
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
from test_rms_norm import EPS, SHAPES, exact, stock


def case(x, residual, weight, casting) -> Case:
    """residual None: the sum is x itself, and both outputs have a gradient all the same."""

    def add(x, residual):
        return x if residual is None else x + residual

    def outputs(norm):
        def run(x, weight, residual=None):
            total = add(x, residual)
            return norm(total, weight, casting), total

        return run

    total = add(x.double(), None if residual is None else residual.double())
    # As for rms_norm: in rows of a few elements the gradient is nearly orthogonal to its terms.
    narrow = x.numel() and x.shape[-1] < 4
    terms = ((1 + weight.double().abs().max()) / total.abs().min().clamp_min(1e-3)).item() if narrow else 0.0
    return Case(
        ours=lambda x, w, r=None: add_rms_norm(x, r, w, EPS, casting=casting),
        stock=outputs(stock),
        exact=outputs(exact),
        inputs={"x": x, "weight": weight} | ({} if residual is None else {"residual": residual}),
        terms={"dx": terms, "dresidual": terms},
    )


def random_case(shape, dtype, device, casting, with_residual, scale=2.0) -> Case:
    x, residual = (random_tensor(shape, dtype, device, scale=scale) for _ in range(2))
    weight = random_tensor(shape[-1:], dtype, device, offset=0.0 if casting == "gemma" else 1.0)
    return case(x, residual if with_residual else None, weight, casting)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_as_well_as_stock(shape, with_residual, casting, dtype, device):
    assert_no_worse(random_case(shape, dtype, device, casting, with_residual))


@pytest.mark.parametrize(("device", "dtype"), devices_and_types())
def test_pooled_error_is_no_larger(device, dtype):
    shape = (8, 512) if EMULATED else (64, 512)
    assert_no_worse_pooled(lambda: random_case(shape, dtype, device, "llama", True))


# 16384: the widest whose rows stay on the chip in the backward pass, through the ring where the chip has room for three
# inputs. 65536: the widest there is, the sum read again in the forward pass.
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [16384, 65536])
def test_wide_rows(columns, dtype, device):
    assert_no_worse(random_case((2, columns), dtype, device, "llama", True))


# By rows of a whole block: up to six stages, filled again on a chip of 132 multiprocessors. Narrower, or on
# older chips: two stages, two blocks a multiprocessor.
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("shape", [(1000, 2048), (600, 1536)], ids=str)
def test_more_rows_than_blocks(shape, device):
    """Each block of the backward kernel takes several rows, so that they come through all stages of its ring."""
    assert_no_worse(random_case(shape, torch.bfloat16, device, "llama", True))


@few_examples
@given(
    rows=st.integers(0, 9),
    hidden=st.integers(1, 700),
    dtype=st.sampled_from(DTYPES),
    casting=st.sampled_from(["llama", "gemma", "none"]),
    device=st.sampled_from(devices()),
    with_residual=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
)
def test_any_shape(rows, hidden, dtype, casting, device, with_residual, scale):
    assert_no_worse(random_case((rows, hidden), dtype, device, casting, with_residual, scale))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_weight_promotes_as_stock_does(dtype, device):
    """Autocast leaves norm weights in float32: y is float32, the sum is not."""
    x, residual = (random_tensor((6, 96), dtype, device) for _ in range(2))
    weight = random_tensor((96,), torch.float32, device, offset=1.0)
    y, total = add_rms_norm(x, residual, weight)
    assert (y.dtype, total.dtype) == (torch.float32, dtype)
    for casting in ("llama", "gemma"):
        assert_no_worse(case(x, residual, weight, casting))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_as_torch_adding_and_rms_norm(dtype, device):
    x, residual = (random_tensor((5, 6, 96), dtype, device, scale=3.0) for _ in range(2))
    weight = random_tensor((96,), dtype, device, offset=1.0)
    y, total = add_rms_norm(x, residual, weight)
    assert_same_bits(total, x + residual)
    assert_same_bits(y, rms_norm(x + residual, weight))
    y, total = add_rms_norm(x, None, weight)
    assert_same_bits(total, x)
    assert_same_bits(y, rms_norm(x, weight))


def run(inputs, upstream, wanted=("x", "residual", "weight"), function=add_rms_norm) -> dict[str, torch.Tensor | None]:
    """Gradients by name; an upstream gradient of None: that output goes nowhere."""
    leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in inputs.items()}
    outputs = function(leaves["x"], leaves.get("residual"), leaves["weight"])
    used = [(o, u) for o, u in zip(outputs, upstream, strict=True) if u is not None]
    torch.autograd.backward(*zip(*used, strict=True))
    return {name: t.grad for name, t in leaves.items()}


def random_inputs(shape, dtype, device, with_residual=True):
    """Inputs, and a gradient for each of the two outputs."""
    inputs = {name: random_tensor(shape, dtype, device) for name in ("x", "residual")[: 1 + with_residual]}
    inputs["weight"] = random_tensor(shape[-1:], dtype, device, offset=1.0)
    return inputs, [random_tensor(shape, dtype, device) for _ in range(2)]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
def test_one_output_alone(with_residual, device):
    inputs, (dy, dsum) = random_inputs((9, 40), torch.bfloat16, device, with_residual)
    norm = run(inputs, [dy, None])
    total = (inputs["x"] + inputs["residual"] if with_residual else inputs["x"]).requires_grad_()
    weight = inputs["weight"].clone().requires_grad_()
    rms_norm(total, weight).backward(dy)
    assert_same_bits(norm["x"], total.grad)
    assert_same_bits(norm["weight"], weight.grad)
    addition = run(inputs, [None, dsum])
    assert_same_bits(addition["x"], dsum)
    assert addition["weight"] is None
    if with_residual:
        assert_same_bits(norm["residual"], norm["x"])
        assert_same_bits(addition["residual"], dsum)
        assert norm["residual"].data_ptr() != norm["x"].data_ptr()


def some_of(*names):
    return [chosen for n in range(1, len(names)) for chosen in itertools.combinations(names, n)]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("with_residual", "wanted"),
    [(True, w) for w in some_of("x", "residual", "weight")] + [(False, w) for w in some_of("x", "weight")],
)
def test_frozen_inputs(with_residual, wanted, device):
    inputs, upstream = random_inputs((9, 40), torch.bfloat16, device, with_residual)
    if wanted == ("weight",):
        _, total = add_rms_norm(inputs["x"], inputs.get("residual"), inputs["weight"].clone().requires_grad_())
        assert not total.requires_grad
        upstream[1] = None
    every, some = run(inputs, upstream), run(inputs, upstream, wanted)
    for name in inputs:
        if name in wanted:
            assert_same_bits(some[name], every[name])
        else:
            assert some[name] is None


@pytest.mark.parametrize("device", devices())
def test_strided_inputs_and_gradients(device):
    """Each tensor in turn as rows that are a slice, a transposed view (two strides), an unaligned slice, and columns
    that need a copy, while the others stay plain."""
    plain, upstream = random_inputs((4, 6, 64), torch.bfloat16, device)

    def like(t, kind):
        wide = t.new_zeros(4, 6, 80)
        if kind == "slice":
            wide[..., :64] = t
            return wide[..., :64]
        if kind == "two strides":
            return t.transpose(0, 1).contiguous().transpose(0, 1)
        if kind == "unaligned":
            wide[..., 3:67] = t
            return wide[..., 3:67]
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def results(inputs, upstream):
        with torch.no_grad():
            outputs = add_rms_norm(inputs["x"], inputs["residual"], inputs["weight"])
        return [*outputs, *run(inputs, upstream).values()]

    want = results(plain, upstream)
    for kind in ("slice", "two strides", "unaligned", "columns"):
        for name in ("x", "residual"):
            changed = plain | {name: like(plain[name], kind)}
            assert changed[name].stride() != plain[name].stride()
            for got, expected in zip(results(changed, upstream), want, strict=True):
                assert_same_bits(got, expected)
        for i in range(2):
            changed = list(upstream)
            changed[i] = like(upstream[i], kind)
            for got, expected in zip(results(plain, changed), want, strict=True):
                assert_same_bits(got, expected)


def test_rows_far_apart():
    inputs, _ = random_inputs((2, 64), torch.bfloat16, "cpu")
    weight = inputs["weight"].requires_grad_()
    assert_offsets_have_64_bits(lambda x, r: add_rms_norm(x, r, weight), inputs["x"], inputs["residual"])


@pytest.mark.parametrize("device", devices())
def test_expanded_upstream_gradient(device):
    """`sum.sum().backward()` sends a gradient whose strides are all zero."""
    inputs, (dy, _) = random_inputs((5, 48), torch.float32, device)
    one = torch.ones((), device=device)
    flat, dense = run(inputs, [dy, one.expand(5, 48)]), run(inputs, [dy, torch.ones(5, 48, device=device)])
    for name in inputs:
        assert_same_bits(flat[name], dense[name])


@pytest.mark.parametrize("device", devices())
def test_inputs_are_left_alone_and_bits_repeat(device):
    inputs, upstream = random_inputs((40, 72), torch.bfloat16, device)
    kept = [t.clone() for t in (*inputs.values(), *upstream)]
    first, second = run(inputs, upstream), run(inputs, upstream)
    for name in inputs:
        assert_same_bits(first[name], second[name])
    for t, k in zip((*inputs.values(), *upstream), kept, strict=True):
        assert_same_bits(t, k)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_row(value, device):
    inputs, upstream = random_inputs((4, 64), torch.float32, device)
    inputs["residual"][2, 5] = value
    y, total = add_rms_norm(*inputs.values())
    assert torch.equal(y.isnan(), stock(total, inputs["weight"], "llama").isnan())
    assert y[2].isnan().any()
    assert y[[0, 1, 3]].isfinite().all()
    assert run(inputs, upstream)["x"][[0, 1, 3]].isfinite().all()


# As under autocast with float32 weights, where products add bfloat16 to what runs from layer to layer in float32. 48:
# vectors; 37: single elements. 65536: the widest, whose sum is read again.
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", ["x", "residual"])
@pytest.mark.parametrize("shape", [(6, 48), (5, 37), (2, 65536)], ids=str)
def test_a_residual_of_another_type(shape, which, narrow, device):
    inputs, upstream = random_inputs(shape, torch.float32, device)
    inputs[which] = inputs[which].to(narrow)

    def separate(x, residual, weight):
        total = x + residual
        return rms_norm(total, weight), total

    with Memory() as memory:
        ours = add_rms_norm(*inputs.values())
    assert memory.calls.count("bastile.add_rms_norm_forward.default") == 1
    for got, want in zip(ours, separate(*inputs.values()), strict=True):
        assert_same_bits(got, want)
    got, want = run(inputs, upstream), run(inputs, upstream, function=separate)
    for name in inputs:  # the sum's gradient is float32 in both
        assert got[name].dtype == inputs[name].dtype
        torch.testing.assert_close(got[name], want[name])


@pytest.mark.parametrize("device", devices())
def test_two_types_that_promote_to_a_third_are_added_by_torch(device):
    x, residual = random_tensor((3, 48), torch.bfloat16, device), random_tensor((3, 48), torch.float16, device)
    y, total = add_rms_norm(x, residual, None)
    assert_same_bits(total, x + residual)
    assert_same_bits(y, rms_norm(x + residual, None))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
def test_hooks_retained_gradients_and_retained_graphs(with_residual, device):
    inputs, (dy, dsum) = random_inputs((5, 24), torch.float32, device, with_residual)
    x = inputs["x"].requires_grad_()
    y, total = add_rms_norm(x * 1, inputs.get("residual"), inputs["weight"])
    seen = []
    total.register_hook(lambda gradient: seen.append(gradient.clone()))
    y.retain_grad()
    total.retain_grad()
    torch.autograd.backward([y, total], [dy, dsum], retain_graph=True)
    assert_same_bits(seen[0], dsum)
    assert_same_bits(total.grad, dsum)
    assert_same_bits(y.grad, dy)
    once, x.grad = x.grad, None
    torch.autograd.backward([y, total], [dy, dsum])
    assert_same_bits(x.grad, once)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
def test_a_sum_changed_in_place_is_an_error(with_residual, device):
    inputs, _ = random_inputs((5, 24), torch.float32, device, with_residual)
    x = inputs["x"].requires_grad_()
    y, total = add_rms_norm(x * 1, inputs.get("residual"), inputs["weight"])

    def change_and_go_back():
        total.add_(1)
        y.sum().backward()

    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|is being modified inplace"):
        change_and_go_back()


@pytest.mark.parametrize("device", devices())
def test_without_gradients(device):
    inputs, _ = random_inputs((5, 24), torch.float32, device)
    x, weight = inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()
    for residual in (inputs["residual"], None):
        with torch.no_grad():
            y, total = add_rms_norm(x, residual, weight)
        assert not y.requires_grad
        assert not total.requires_grad
    assert add_rms_norm(x.detach(), None, weight)[1].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("device", devices())
def test_no_weight(device):
    x, residual = (random_tensor((4, 64), torch.float32, device) for _ in range(2))
    y, total = add_rms_norm(x, residual, None, EPS, casting="none")
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(total, (64,), None, EPS))


@pytest.mark.parametrize("device", devices())
def test_bad_input_is_named(device):
    x, weight = torch.ones(2, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(RuntimeError, match=r"residual has shape \[1, 8\]; it must have that of x, \[2, 8\]"):
        add_rms_norm(x, x[:1], weight)
    with pytest.raises(RuntimeError, match=r"norm_forward: weight has shape \[7\].*must be 8"):
        add_rms_norm(x, x, weight[:7])
    with pytest.raises(ValueError, match="add_rms_norm: casting is 'qwen'"):
        add_rms_norm(x, x, weight, casting="qwen")
    if device == "cuda":
        with pytest.raises(RuntimeError, match="residual is on cpu"):
            add_rms_norm(x, x.cpu(), weight)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
def test_double_backward_is_refused(with_residual, device):
    x = torch.ones(2, 8, device=device, requires_grad=True)
    y, total = add_rms_norm(x, torch.ones_like(x) if with_residual else None, torch.ones(8, device=device))
    (gradient,) = torch.autograd.grad(y.sum() + total.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="add_rms_norm cannot be differentiated twice"):
        gradient.sum().backward()


def test_other_types_and_devices_run_the_original_code():
    x, residual = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    ours = add_rms_norm(x.float(), residual.float(), torch.ones(8))
    for wide, narrow in zip(add_rms_norm(x, residual, torch.ones(8).double()), ours, strict=True):
        torch.testing.assert_close(wide.float(), narrow)
    meta = x.to("meta")
    assert [t.device.type for t in add_rms_norm(meta, meta, torch.ones(8, device="meta"))] == ["meta", "meta"]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("used", ["y", "sum", "both"])
def test_compiles_without_a_break(used, with_residual, device):
    torch._dynamo.reset()

    def block(x, residual, weight):
        y, total = add_rms_norm(x * 2, residual if with_residual else None, weight)
        return {"y": y.square().sum(), "sum": total.square().sum(), "both": (y * total).sum()}[used]

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        inputs, _ = random_inputs((rows, 24), torch.float32, device)
        leaves = [t.clone().requires_grad_() for t in inputs.values()]
        twins = [t.clone().requires_grad_() for t in inputs.values()]
        compiled(*leaves).backward()
        block(*twins).backward()
        for ours, twin in zip(leaves, twins, strict=True):
            if twin.grad is None:  # a compiled graph may say it with zeros
                assert ours.grad is None or not ours.grad.any()
            else:
                assert_same_bits(ours.grad, twin.grad)


@pytest.mark.parametrize("device", devices())
def test_compiled_sum_of_a_frozen_input_wants_no_gradient(device):
    torch._dynamo.reset()
    weight = torch.ones(24, device=device, requires_grad=True)
    x, residual = (random_tensor((3, 24), torch.float32, device) for _ in range(2))
    compiled = torch.compile(lambda x, r: add_rms_norm(x, r, weight), fullgraph=True, backend="aot_eager")
    for added in (residual, None):
        y, total = compiled(x, added)
        assert y.requires_grad
        assert not total.requires_grad


@pytest.mark.parametrize("device", devices())
def test_checkpointed_layers_give_the_same_bits(device):
    from torch.utils.checkpoint import checkpoint

    inputs, upstream = random_inputs((5, 24), torch.float32, device)

    def again(x, residual, weight):
        return checkpoint(add_rms_norm, x, residual, weight, use_reentrant=False)

    plain, recomputed = run(inputs, upstream), run(inputs, upstream, function=again)
    for name in inputs:
        assert_same_bits(recomputed[name], plain[name])
