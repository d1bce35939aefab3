"""Rotary embedding against float64, on every device at hand; the Hugging Face code's error is the yardstick."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.cohere import modeling_cohere
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm import modeling_glm
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3 import modeling_qwen3

from bastile.ops.rope import rope
from oracle import (
    DTYPES,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_offsets_have_64_bits,
    assert_same_bits,
    devices,
    devices_and_types,
    far_apart,
    few_examples,
    random_tensor,
)


def stock(q, k, cos, sin, interleaved):
    """The code a model would run without Bastile; the part of a head that does not turn is put back behind."""
    module = modeling_cohere if interleaved else modeling_qwen3
    rotary = cos.shape[-1]
    both = module.apply_rotary_pos_emb(q[..., :rotary], k[..., :rotary], cos, sin)
    return tuple(torch.cat((t, x[..., rotary:]), dim=-1) for t, x in zip(both, (q, k), strict=True))


def turned(x, cos, sin, interleaved):
    """The definition, pair by pair."""
    rotary = cos.shape[-1]
    halves = slice(0, rotary // 2), slice(rotary // 2, rotary)
    first, second = (slice(0, rotary, 2), slice(1, rotary, 2)) if interleaved else halves
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    y = x.clone()
    y[..., first] = x[..., first] * c[..., first] - x[..., second] * s[..., first]
    y[..., second] = x[..., second] * c[..., second] + x[..., first] * s[..., second]
    return y


def exact(q, k, cos, sin, interleaved):
    return turned(q, cos, sin, interleaved), turned(k, cos, sin, interleaved)


def case(q, k, cos, sin, interleaved) -> Case:
    return Case(
        ours=lambda *tensors: rope(*tensors, interleaved=interleaved),
        stock=lambda *tensors: stock(*tensors, interleaved),
        exact=lambda *tensors: exact(*tensors, interleaved),
        inputs={"q": q, "k": k},
        constants={"cos": cos, "sin": sin},
    )


def inputs(batch, positions, heads, kv_heads, dim, rotary, dtype, device, *, tables=None, table_batch=1):
    """q and k as attention passes them, views of [B, S, heads, D], and tables whose halves differ: nothing in the
    operator may rest on cos1 = cos2."""
    q = random_tensor((batch, positions, heads, dim), dtype, device).transpose(1, 2)
    k = random_tensor((batch, positions, kv_heads, dim), dtype, device).transpose(1, 2)
    angles = random_tensor((table_batch, positions, rotary), torch.float32, device, scale=3.0)
    return q, k, angles.cos().to(tables or dtype), angles.sin().to(tables or dtype)


# batch, positions, heads, kv_heads, dim, rotary: each row has its reason.
SHAPES = [
    (2, 5, 4, 2, 64, 64),  # ordinary
    (1, 3, 5, 1, 32, 32),  # one KV head; heads that leave slots empty
    (2, 4, 3, 3, 64, 32),  # partial
    (1, 3, 2, 1, 80, 32),  # partial, the rest no power of two
    (1, 2, 3, 1, 48, 40),  # partial, the rest one piece in a thread that has room for two
    (1, 2, 1, 1, 2, 2),  # the smallest head
    (1, 4, 2, 1, 6, 6),  # half of it odd: single elements
    (1, 2, 2, 1, 7, 4),  # an odd head
    (0, 3, 2, 1, 8, 8),  # no batch
    (1, 0, 2, 1, 8, 8),  # no position
    (1, 1, 70, 3, 128, 128),  # one position, more heads than a block takes at once
    (1, 2, 2, 1, 576, 576),  # more pairs than the CPU turns at once
]


@pytest.mark.parametrize(("device", "dtype"), devices_and_types())
@pytest.mark.parametrize("interleaved", [False, True])
def test_pooled_error_is_no_larger(interleaved, device, dtype):
    assert_no_worse_pooled(lambda: case(*inputs(2, 16, 8, 4, 64, 64, dtype, device), interleaved))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_as_well_as_stock(shape, interleaved, dtype, device):
    assert_no_worse(case(*inputs(*shape, dtype, device), interleaved))


@few_examples
@given(
    batch=st.integers(1, 3),
    positions=st.integers(1, 5),
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 4),
    half=st.integers(1, 40),
    rest=st.integers(0, 24),
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from(devices()),
    interleaved=st.booleans(),
    own_positions=st.booleans(),
)
def test_any_shape(batch, positions, heads, kv_heads, half, rest, dtype, device, interleaved, own_positions):
    q, k, cos, sin = inputs(
        batch,
        positions,
        heads,
        kv_heads,
        2 * half + rest,
        2 * half,
        dtype,
        device,
        table_batch=batch if own_positions else 1,
    )
    assert_no_worse(case(q, k, cos, sin, interleaved))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "types", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)]
)
def test_types_promote_as_in_stock(types, interleaved, device):
    """Qwen3's code; Cohere's rounds back to q's type, so its float32 results are taken as they are."""
    q, k, cos, sin = inputs(2, 3, 4, 2, 32, 32, types[0], device, tables=types[1])
    got = rope(q, k, cos, sin, interleaved=interleaved)
    assert got[0].dtype == got[1].dtype == modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin)[0].dtype == torch.float32
    if interleaved:
        want = exact(q.double(), k.double(), cos.double(), sin.double(), True)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w.float(), rtol=1e-6, atol=1e-6)
    else:
        assert_no_worse(case(q, k, cos, sin, False))


def layouts(device):
    """Views of one content: cut from a fused projection, packed in either order, with addresses or only strides that
    are not aligned, and with columns apart."""
    fused = random_tensor((2, 6, 9, 32), torch.bfloat16, device)
    q, k = fused[:, :, :4], fused[:, :, 4:6]
    yield fused[:, :, :4].transpose(1, 2), fused[:, :, 4:6].transpose(1, 2)
    yield q.contiguous().transpose(1, 2), k.contiguous().transpose(1, 2)
    yield q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    for before in (1, 0):
        padded = torch.nn.functional.pad(fused, (before, 3 - before))[..., before : before + 32]
        yield padded[:, :, :4].transpose(1, 2), padded[:, :, 4:6].transpose(1, 2)
    apart = fused.transpose(2, 3).contiguous().transpose(2, 3)
    yield apart[:, :, :4].transpose(1, 2), apart[:, :, 4:6].transpose(1, 2)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_layout_gives_the_same_bits(interleaved, device):
    *_, cos, sin = inputs(2, 6, 1, 1, 32, 32, torch.bfloat16, device, table_batch=2)
    upstream = [random_tensor((2, heads, 6, 32), torch.bfloat16, device) for heads in (4, 2)]
    results = []
    for i, (q, k) in enumerate(layouts(device)):
        leaves = [q.detach().requires_grad_(), k.detach().requires_grad_()]
        out = rope(*leaves, cos, sin, interleaved=interleaved)
        # An upstream gradient in either memory order.
        dy = [u if i % 2 else u.transpose(1, 2).contiguous().transpose(1, 2) for u in upstream]
        results.append([*(o.detach() for o in out), *torch.autograd.grad(out, leaves, dy)])
    for other in results[1:]:
        for g, w in zip(other, results[0], strict=True):
            assert_same_bits(g, w)


@pytest.mark.parametrize("dim", [0, 2], ids=["sequences", "positions"])
def test_heads_far_apart(dim):
    *heads, cos, sin = inputs(2, 2, 3, 1, 16, 16, torch.bfloat16, "cpu", table_batch=2)
    tables = far_apart(cos), far_apart(sin)
    assert_offsets_have_64_bits(lambda q, k: rope(q, k, *tables), *heads, dim=dim)
    for got, want in zip(rope(*heads, *tables), rope(*heads, cos, sin), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("device", devices())
def test_results_and_gradients_keep_the_memory_order(device):
    for heads_first in (False, True):
        q, k, cos, sin = inputs(2, 3, 4, 1, 16, 16, torch.float32, device)
        q, k = (t.contiguous() if heads_first else t for t in (q, k))
        leaves = [q.requires_grad_(), k.requires_grad_()]
        out = rope(*leaves, cos, sin)
        for t in (*out, *torch.autograd.grad(out, leaves, [torch.ones_like(o) for o in out])):
            assert (t if heads_first else t.transpose(1, 2)).is_contiguous()


@pytest.mark.parametrize("device", devices())
def test_tables_of_any_strides(device):
    q, k, cos, sin = inputs(3, 4, 2, 1, 16, 16, torch.float32, device)
    want = rope(q, k, cos, sin)
    wide = torch.nn.functional.pad(cos, (3, 5))[..., 3:-5]
    for c, s in (
        (cos.expand(3, -1, -1), sin.repeat(3, 1, 1)),
        (wide, sin),
        (cos, sin.transpose(1, 2).contiguous().transpose(1, 2)),
    ):
        for g, w in zip(rope(q, k, c, s), want, strict=True):
            assert_same_bits(g, w)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("interleaved", [False, True])
def test_backward_is_the_transpose(interleaved, device):
    """<rope(x), y> = <x, transpose(y)>, with tables of unrelated halves."""
    q, k, cos, sin = inputs(1, 5, 2, 1, 24, 16, torch.float32, device)
    q.requires_grad_()
    turned, _ = rope(q, k, cos, sin, interleaved=interleaved)
    y = random_tensor(turned.shape, torch.float32, device)
    (back,) = torch.autograd.grad(turned, q, y)
    left, right = (turned.double() * y.double()).sum(), (q.double() * back.double()).sum()
    torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("wanted", ["q", "k"])
def test_one_gradient_alone(wanted, device):
    """With the other input frozen, nothing flows to its output; with its output unused, its gradient is zero."""
    q, k, cos, sin = inputs(1, 4, 4, 2, 16, 16, torch.bfloat16, device)
    index = "qk".index(wanted)
    dy = random_tensor((q, k)[index].shape, torch.bfloat16, device)
    both = [t.detach().requires_grad_() for t in (q, k)]
    one = [t.detach().requires_grad_(name == wanted) for t, name in ((q, "q"), (k, "k"))]
    rope(*both, cos, sin)[index].backward(dy)
    out = rope(*one, cos, sin)
    assert [o.requires_grad for o in out] == [t.requires_grad for t in one]
    out[index].backward(dy)
    assert_same_bits(one[index].grad, both[index].grad)
    assert one[1 - index].grad is None
    assert not both[1 - index].grad.any()


@pytest.mark.parametrize("device", devices())
def test_expanded_upstream_gradient(device):
    """`out.sum().backward()` sends a gradient whose strides are all zero."""
    q, k, cos, sin = inputs(1, 3, 2, 1, 16, 16, torch.float32, device)
    q.requires_grad_()
    out = rope(q, k, cos, sin)[0]
    (first,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    (second,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert_same_bits(first, second)


@pytest.mark.parametrize("device", devices())
def test_inputs_are_left_alone_and_bits_repeat(device):
    """On one thread and on several."""
    tensors = inputs(2, 40, 6, 2, 64, 64, torch.bfloat16, device)
    kept = [t.clone() for t in tensors]
    results = []
    threads = torch.get_num_threads()
    for count in (1, 4):
        torch.set_num_threads(count)
        leaves = [t.detach().requires_grad_() for t in tensors[:2]]
        out = rope(*leaves, *tensors[2:])
        results.append([*(o.detach() for o in out), *torch.autograd.grad(out, leaves, [o.detach() for o in out])])
    torch.set_num_threads(threads)
    for first, second in zip(*results, strict=True):
        assert_same_bits(first, second)
    for t, w in zip(tensors, kept, strict=True):
        assert_same_bits(t, w)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_reach_what_they_reach_in_stock(value, device):
    q, k, cos, sin = inputs(1, 3, 2, 1, 16, 16, torch.float32, device)
    q[0, 1, 2, 3] = value
    got, want = rope(q, k, cos, sin), stock(q, k, cos, sin, False)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, equal_nan=True)


@pytest.mark.parametrize("device", devices())
def test_bad_input_is_named(device):
    q, k, cos, sin = inputs(2, 3, 4, 2, 16, 16, torch.float32, device)
    with pytest.raises(RuntimeError, match=r"rope_forward: cos has shape \[1, 2, 16\]; dimension 1 must be 3"):
        rope(q, k, cos[:, :2], sin)
    with pytest.raises(RuntimeError, match=r"sin has shape \[1, 3, 14\]; dimension 2 must be 16, that of cos"):
        rope(q, k, cos, sin[..., :14])
    with pytest.raises(RuntimeError, match=r"cos has shape \[1, 3, 15\]; dimension 2 must be even"):
        rope(q, k, cos[..., :15], sin[..., :15])
    with pytest.raises(RuntimeError, match=r"cos has shape \[3, 3, 16\]; dimension 0 must be 1 or 2"):
        rope(q, k, cos.expand(3, -1, -1), sin)
    with pytest.raises(RuntimeError, match=r"cos has shape \[3, 16\]; 3 dimensions"):
        rope(q, k, cos[0], sin[0])
    with pytest.raises(RuntimeError, match=r"k has shape \[2, 2, 2, 16\]; dimension 2 must be 3"):
        rope(q, k[:, :, :2], cos, sin)
    with pytest.raises(RuntimeError, match=r"k has shape \[2, 2, 3, 8\]; dimension 3 must be 16"):
        rope(q, k[..., :8], cos, sin)


@pytest.mark.parametrize("device", devices())
def test_double_backward_is_refused(device):
    q, k, cos, sin = inputs(1, 2, 2, 1, 8, 8, torch.float32, device)
    q.requires_grad_()
    (gradient,) = torch.autograd.grad(rope(q, k, cos, sin)[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="rope cannot be differentiated twice"):
        gradient.sum().backward()


def test_what_the_kernels_do_not_serve_runs_the_original_code():
    q, k, cos, sin = inputs(2, 3, 4, 2, 16, 12, torch.float64, "cpu")
    for interleaved in (False, True):
        for g, w in zip(rope(q, k, cos, sin, interleaved=interleaved), exact(q, k, cos, sin, interleaved), strict=True):
            torch.testing.assert_close(g, w)
    assert rope(*(t.to("meta") for t in (q, k, cos, sin)))[0].device.type == "meta"
    assert rope(q.float(), k.bfloat16(), cos.float(), sin.float())[1].dtype == torch.float32
    wide = inputs(1, 2, 1, 1, 2050, 2050, torch.float32, "cpu")
    for g, w in zip(rope(*wide), stock(*wide, False), strict=True):
        torch.testing.assert_close(g, w)
    learnt = cos.float().requires_grad_()
    rope(q.float(), k.float(), learnt, sin.float())[0].sum().backward()
    assert learnt.grad is not None


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("frozen", [False, True])
def test_compiles_without_a_break(frozen, device):
    torch._dynamo.reset()

    def attention_inputs(x, cos, sin):
        q, k = ((x * scale).view(*x.shape[:2], -1, 16).transpose(1, 2) for scale in (2, 3))
        return rope(q, k.detach() if frozen else k, cos, sin)

    compiled = torch.compile(attention_inputs, fullgraph=True, backend="aot_eager", dynamic=True)
    for positions in (3, 5):
        x = random_tensor((2, positions, 64), torch.float32, device).requires_grad_()
        twin = x.detach().clone().requires_grad_()
        *_, cos, sin = inputs(1, positions, 1, 1, 16, 16, torch.float32, device)
        for function, leaf in ((compiled, x), (attention_inputs, twin)):
            q, k = function(leaf, cos, sin)
            (q.square().sum() + k.pow(3).sum()).backward()
        assert_same_bits(x.grad, twin.grad)


@pytest.mark.parametrize("device", devices())
def test_what_the_compiler_is_told_is_true(device):
    q, k, cos, sin = inputs(2, 3, 4, 1, 16, 12, torch.bfloat16, device, tables=torch.float32)
    forward, backward = torch.ops.bastile.rope_forward.default, torch.ops.bastile.rope_backward.default
    for order in (True, False):
        torch.library.opcheck(forward, (q, k, cos, sin, 0, False, False, order, not order))
        dq, dk = forward(q, k, cos, sin, 0, False, False, order, not order)
        torch.library.opcheck(backward, (dq, dk, cos, sin, 1, False, False, order, not order, 1))
        torch.library.opcheck(backward, (dq, None, cos, sin, 1, False, False, order, False, 2))
    torch.library.opcheck(forward, (q, k, cos[..., :6], sin[..., :6], 2, True, True, True, False))
    dq, dk = forward(q, k, cos[..., :6], sin[..., :6], 2, True, True, True, False)
    torch.library.opcheck(backward, (dq, dk, cos[..., :6], sin[..., :6], 2, True, True, True, False, 1))


# ---- layouts ---------------------------------------------------------------------------------------------------------

LAYOUTS = ("halves", "interleaved", "interleaved_to_halves")


def turned_by(layout, x, cos, sin, half_tables=False):
    """The definition of each layout, pair by pair."""
    rotary = cos.shape[-1] * (2 if half_tables else 1)
    halves = slice(0, rotary // 2), slice(rotary // 2, rotary)
    neighbours = slice(0, rotary, 2), slice(1, rotary, 2)
    first, second = halves if layout == "halves" else neighbours
    to_first, to_second = neighbours if layout == "interleaved" else halves
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    c1, c2, s1, s2 = (
        (c, c, s, s) if half_tables else (c[..., to_first], c[..., to_second], s[..., to_first], s[..., to_second])
    )
    y = x.clone()
    y[..., to_first] = x[..., first] * c1 - x[..., second] * s1
    y[..., to_second] = x[..., second] * c2 + x[..., first] * s2
    return y


def stock_of(layout, q, k, cos, sin, half_tables):
    """What models of that layout run: DeepSeek V3's code, GPT-OSS's for tables of half the width, GLM's, which has
    neighbours and reads the first half of each table, and those of above."""
    rotary = cos.shape[-1] * (2 if half_tables else 1)
    rest = [t[..., rotary:] for t in (q, k)]
    q, k = q[..., :rotary], k[..., :rotary]
    if half_tables and layout != "halves":
        cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
    if layout == "interleaved_to_halves":
        both = modeling_deepseek_v3.apply_rotary_pos_emb_interleave(q, k, cos, sin)
    elif layout == "interleaved":
        both = modeling_glm.apply_rotary_pos_emb(q, k, cos, sin)
    else:
        both = (modeling_gpt_oss if half_tables else modeling_qwen3).apply_rotary_pos_emb(q, k, cos, sin)
    return tuple(torch.cat((t, r), dim=-1) for t, r in zip(both, rest, strict=True))


def table_pairs(tables, layout, half_tables):
    """Tables of both widths, out of ones of half the width: those of a pair turn by one angle, as in models."""
    if half_tables:
        return tables
    if layout == "interleaved":
        return [t.repeat_interleave(2, -1) for t in tables]
    return [torch.cat((t, t), -1) for t in tables]


def layout_case(layout, q, k, cos, sin, half_tables, keep_type=False) -> Case:
    def stock(q, k, c, s):
        if not half_tables and layout == "interleaved":  # GLM's code takes the first half of a table
            c, s = (torch.cat((t[..., ::2], t[..., ::2]), -1) for t in (c, s))
        results = stock_of(layout, q, k, c, s, half_tables)
        return tuple(t.to(q.dtype) for t in results) if keep_type else results

    return Case(
        ours=lambda *t: rope(*t, layout=layout, half_tables=half_tables, keep_type=keep_type),
        stock=stock,
        exact=lambda q, k, c, s: tuple(turned_by(layout, x, c, s, half_tables) for x in (q, k)),
        inputs={"q": q, "k": k},
        constants={"cos": cos, "sin": sin},
    )


# batch, positions, heads, kv_heads, dim, rotary, as above.
LAYOUT_SHAPES = [
    (2, 5, 4, 2, 64, 64),  # DeepSeek V3's turning part
    (2, 4, 3, 1, 80, 32),  # partial
    (1, 3, 5, 1, 96, 96),  # threads without a piece
    (1, 4, 2, 1, 6, 6),  # half of it odd: single elements
    (1, 3, 2, 1, 7, 4),  # an odd head
    (1, 2, 2, 1, 576, 576),  # a head of several warps
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half_tables", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", LAYOUT_SHAPES, ids=str)
def test_layouts_match_float64_as_well_as_stock(shape, layout, half_tables, dtype, device):
    q, k, *tables = inputs(*shape[:5], shape[5] // 2, dtype, device, table_batch=shape[0])
    assert_no_worse(layout_case(layout, q, k, *table_pairs(tables, layout, half_tables), half_tables))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_whose_halves_differ(layout, device):
    """No layout rests on cos1 = cos2, and backward is the transpose of forward."""
    q, k, cos, sin = inputs(2, 5, 3, 1, 24, 16, torch.float32, device)
    leaves = [q.requires_grad_(), k.requires_grad_()]
    out = rope(*leaves, cos, sin, layout=layout)
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    want = [turned_by(layout, t, cos.double(), sin.double()) for t in exact_leaves]
    dy = [random_tensor(t.shape, torch.float32, device) for t in out]
    got = [*out, *torch.autograd.grad(out, leaves, dy)]
    want += torch.autograd.grad(want, exact_leaves, [t.double() for t in dy])
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_of_float32_and_results_of_the_input_s_type(dtype, layout, device):
    """As Cohere's code has it, which turns in float32 and casts back."""
    q, k, *tables = inputs(2, 6, 4, 2, 64, 32, dtype, device, tables=torch.float32)
    for half_tables in (False, True):
        pair = table_pairs(tables, layout, half_tables)
        assert all(t.dtype == dtype for t in rope(q, k, *pair, layout=layout, half_tables=half_tables, keep_type=True))
        assert_no_worse(layout_case(layout, q, k, *pair, half_tables, keep_type=True))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_tables_give_the_bits_of_whole_ones(layout, device):
    for dim, rotary in ((64, 64), (48, 20)):
        q, k, *tables = inputs(2, 5, 4, 2, dim, rotary // 2, torch.bfloat16, device)
        results = []
        for half_tables in (False, True):
            leaves = [t.detach().requires_grad_() for t in (q, k)]
            pair = table_pairs(tables, layout, half_tables)
            out = rope(*leaves, *pair, layout=layout, half_tables=half_tables)
            results.append([*(o.detach() for o in out), *torch.autograd.grad(out, leaves, [o.detach() for o in out])])
        for first, second in zip(*results, strict=True):
            assert_same_bits(first, second)


@pytest.mark.parametrize("device", devices())
def test_a_layout_is_a_layout_in_any_memory(device):
    """Unaligned and padded heads, read an element at a time, have the bits of aligned ones."""
    *_, cos, sin = inputs(2, 6, 1, 1, 32, 32, torch.bfloat16, device, table_batch=2)
    results = []
    for q, k in layouts(device):
        leaves = [q.detach().requires_grad_(), k.detach().requires_grad_()]
        out = rope(*leaves, cos, sin, layout="interleaved_to_halves")
        results.append([*(o.detach() for o in out), *torch.autograd.grad(out, leaves, [o.detach() for o in out])])
    for other in results[1:]:
        for g, w in zip(other, results[0], strict=True):
            assert_same_bits(g, w)


def test_layouts_are_named_once():
    q, k, cos, sin = inputs(1, 2, 2, 1, 8, 8, torch.float32, "cpu")
    with pytest.raises(
        ValueError, match="rope: layout is 'pairs'; one of 'halves', 'interleaved', 'interleaved_to_halves'"
    ):
        rope(q, k, cos, sin, layout="pairs")
    with pytest.raises(ValueError, match="rope: interleaved is True, but layout is 'halves'"):
        rope(q, k, cos, sin, layout="halves", interleaved=True)
    for ours, twin in zip(
        rope(q, k, cos, sin, layout="interleaved"), rope(q, k, cos, sin, interleaved=True), strict=True
    ):
        assert_same_bits(ours, twin)
    with pytest.raises(
        RuntimeError, match=r"cos has shape \[1, 2, 8\]; with half_tables dimension 2 must be at least 1 and at most 4"
    ):
        rope(q, k, cos, sin, half_tables=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("half_tables", [False, True])
def test_the_original_code_of_each_layout(half_tables, layout):
    q, k, *tables = inputs(2, 3, 4, 2, 16, 6, torch.float64, "cpu")
    pair = table_pairs(tables, layout, half_tables)
    for x, got in zip((q, k), rope(q, k, *pair, layout=layout, half_tables=half_tables), strict=True):
        torch.testing.assert_close(got, turned_by(layout, x, *pair, half_tables))
    mixed = rope(
        q.float(), k.bfloat16(), *(t.float() for t in pair), layout=layout, half_tables=half_tables, keep_type=True
    )
    assert [t.dtype for t in mixed] == [torch.float32, torch.bfloat16]
    with pytest.raises(ValueError, match="cos has shape"):
        rope(
            q[..., : pair[0].shape[-1] - 1],
            k[..., : pair[0].shape[-1] - 1],
            *pair,
            layout=layout,
            half_tables=half_tables,
        )
