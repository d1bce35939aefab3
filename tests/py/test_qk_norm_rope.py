"""QK-norm with rotary embedding against float64, on every device at hand; the yardstick is what Hugging Face's Qwen3
runs in its place: RMSNorm of each head, then apply_rotary_pos_emb."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3 import modeling_qwen3

from bastile.ops.qk_norm_rope import qk_norm_rope
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
from test_rope import LAYOUTS, table_pairs, turned, turned_by
from test_rope import layout_case as rope_case
from test_rope import stock as stock_rope

EPS = 1e-6
NAMES = ("q", "k", "q_weight", "k_weight")


def stock_norm(x, weight, casting):
    if casting == "none":
        return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)
    module = {"llama": modeling_qwen3.Qwen3RMSNorm, "gemma": GemmaRMSNorm}[casting](x.shape[-1], eps=EPS)
    return torch.func.functional_call(module, {"weight": weight}, (x,))


def stock(q, k, q_weight, k_weight, cos, sin, casting="llama", interleaved=False):
    """The code a model would run without Bastile."""
    q, k = stock_norm(q, q_weight, casting), stock_norm(k, k_weight, casting)
    return stock_rope(q, k, cos, sin, interleaved)


def exact(q, k, q_weight, k_weight, cos, sin, casting="llama", interleaved=False):
    """The definition, without any rounding in between."""

    def norm_and_turn(x, weight):
        z = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1 + weight if casting == "gemma" else weight)
        return turned(z, cos, sin, interleaved)

    return norm_and_turn(q, q_weight), norm_and_turn(k, k_weight)


def case(tensors, casting="llama", interleaved=False) -> Case:
    q, k, q_weight, k_weight, cos, sin = tensors
    terms = {}
    if q.numel() > 0 and q.shape[-1] < 8:
        # In heads of a few elements the gradient is nearly orthogonal to its terms.
        for name, x, weight in (("dq", q, q_weight), ("dk", k, k_weight)):
            factor = 1 + weight.double().abs().max()
            smallest = x.double().pow(2).mean(-1).sqrt().min().clamp_min(EPS**0.5)
            terms[name] = (factor / smallest).item()
    return Case(
        ours=lambda *t: qk_norm_rope(*t, EPS, casting=casting, interleaved=interleaved),
        stock=lambda *t: stock(*t, casting, interleaved),
        exact=lambda *t: exact(*t, casting, interleaved),
        inputs={"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight},
        constants={"cos": cos, "sin": sin},
        terms=terms,
    )


def inputs(
    batch,
    positions,
    heads,
    kv_heads,
    dim,
    rotary,
    dtype,
    device,
    *,
    weights=None,
    tables=None,
    table_batch=1,
    scale=2.0,
):
    """q and k as attention passes them, views of [B, S, heads, D], and tables whose halves differ: nothing in the
    operator may rest on cos1 = cos2."""
    q = random_tensor((batch, positions, heads, dim), dtype, device, scale=scale).transpose(1, 2)
    k = random_tensor((batch, positions, kv_heads, dim), dtype, device, scale=scale).transpose(1, 2)
    q_weight, k_weight = (random_tensor((dim,), weights or dtype, device, offset=1.0) for _ in range(2))
    angles = random_tensor((table_batch, positions, rotary), torch.float32, device, scale=3.0)
    return q, k, q_weight, k_weight, angles.cos().to(tables or dtype), angles.sin().to(tables or dtype)


def leaves_of(tensors, wanted=NAMES):
    return [t.detach().requires_grad_(name in wanted) for name, t in zip(NAMES, tensors, strict=False)]


def upstream_of(tensors, dtype):
    return [random_tensor(t.shape, dtype, t.device) for t in tensors[:2]]


@pytest.mark.parametrize(("device", "dtype"), devices_and_types())
@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
def test_pooled_error_is_no_larger(casting, device, dtype):
    assert_no_worse_pooled(lambda: case(inputs(2, 16, 8, 4, 64, 64, dtype, device), casting))


# batch, positions, heads, kv_heads, dim, rotary: each row has its reason.
SHAPES = [
    (2, 5, 4, 2, 128, 128),  # Qwen3's heads
    (1, 3, 5, 1, 32, 32),  # one KV head; heads that do not fill their slots
    (1, 1, 2, 1, 64, 64),  # one token
    (2, 4, 3, 3, 64, 32),  # partial
    (1, 3, 2, 1, 80, 32),  # partial, threads without a piece
    (1, 2, 3, 1, 48, 40),  # partial, the rest one piece in a thread that has room for two
    (1, 5, 4, 2, 96, 96),  # threads without a piece in every head
    (1, 3, 1, 1, 2, 2),  # the smallest head
    (1, 4, 2, 1, 6, 6),  # half of it odd: single elements
    (1, 3, 2, 1, 7, 4),  # an odd head
    (0, 3, 2, 1, 8, 8),  # no batch
    (1, 0, 2, 1, 8, 8),  # no position
    (1, 2, 70, 3, 128, 128),  # more slots than groups in a block
    (1, 3, 2, 1, 576, 576),  # a head of several warps
    (1, 2, 5, 1, 2048, 2048),  # the widest
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_as_well_as_stock(shape, interleaved, dtype, device):
    assert_no_worse(case(inputs(*shape, dtype, device), interleaved=interleaved))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_tokens_than_a_chip_holds_at_once(dtype, device):
    """The backward kernel then goes round them; three slots leave groups of threads over, and the last round is not
    full. The emulated chip has four multiprocessors."""
    positions = 5003 if device == "cuda" else 71
    assert_no_worse(case(inputs(2, positions, 5, 2, 128, 128, dtype, device)))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("casting", ["gemma", "none"])
def test_other_castings(casting, dtype, device):
    assert_no_worse(case(inputs(2, 5, 4, 2, 64, 32, dtype, device), casting))


@few_examples
@given(
    batch=st.integers(1, 3),
    positions=st.integers(1, 5),
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 4),
    half=st.integers(1, 40),
    rest=st.integers(0, 24),
    dtype=st.sampled_from(DTYPES),
    casting=st.sampled_from(["llama", "gemma", "none"]),
    device=st.sampled_from(devices()),
    interleaved=st.booleans(),
    own_positions=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
)
def test_any_shape(
    batch, positions, heads, kv_heads, half, rest, dtype, casting, device, interleaved, own_positions, scale
):
    tensors = inputs(
        batch,
        positions,
        heads,
        kv_heads,
        2 * half + rest,
        2 * half,
        dtype,
        device,
        table_batch=batch if own_positions else 1,
        scale=scale,
    )
    assert_no_worse(case(tensors, casting, interleaved))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("casting", ["llama", "gemma"])
@pytest.mark.parametrize(
    ("dtype", "weights", "tables"),
    [
        (torch.bfloat16, torch.float32, torch.float32),  # autocast
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16, torch.float16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_types_promote_as_in_stock(dtype, weights, tables, casting, device):
    tensors = inputs(2, 3, 4, 2, 32, 32, dtype, device, weights=weights, tables=tables)
    got, want = qk_norm_rope(*tensors, EPS, casting=casting), stock(*tensors, casting)
    assert [t.dtype for t in got] == [t.dtype for t in want]
    assert_no_worse(case(tensors, casting))


@pytest.mark.parametrize("device", devices())
def test_it_rounds_once(device):
    """The float64 result rounded, but for the few elements that float32 puts on the other side of a tie. Stock rounds
    the norm, its product with the weight, and the two products and the sum of the rotation."""
    tensors = inputs(1, 64, 4, 2, 64, 64, torch.bfloat16, device)
    want = exact(*(t.double() for t in tensors))
    for got, other, w in zip(qk_norm_rope(*tensors, EPS), stock(*tensors), want, strict=True):
        # float32's error is about 2^-15 of a bfloat16's rounding step.
        assert (got != w.bfloat16()).double().mean() < 1e-3
        assert (other != w.bfloat16()).double().mean() > 0.1


def layouts(device):
    """Views of one content: cut from a fused projection, packed in either order, with addresses or only strides that
    are not aligned, with columns apart, and with batch rows out of a longer tensor."""
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
    strided = torch.nn.functional.pad(fused, (0, 0, 0, 0, 2, 3, 0, 0))[:, 2:8]
    yield strided[:, :, :4].transpose(1, 2), strided[:, :, 4:6].transpose(1, 2)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_layout_gives_the_same_result(interleaved, device):
    """The same bits where accesses have one width; else threads share a head in another way, and sums have another
    order: then as good against float64."""
    tensors = inputs(2, 6, 1, 1, 32, 32, torch.bfloat16, device, table_batch=2)[2:]
    upstream = [random_tensor((2, heads, 6, 32), torch.bfloat16, device) for heads in (4, 2)]
    results = []
    for i, (q, k) in enumerate(layouts(device)):
        assert_no_worse(case((q, k, *tensors), interleaved=interleaved))
        leaves = leaves_of((q, k, *tensors))
        out = qk_norm_rope(*leaves, *tensors[2:], EPS, interleaved=interleaved)
        # An upstream gradient in either memory order.
        dy = [u if i % 2 else u.transpose(1, 2).contiguous().transpose(1, 2) for u in upstream]
        results.append([*(o.detach() for o in out), *torch.autograd.grad(out, leaves, dy)])
    unaligned = (3, 4)
    for i, other in enumerate(results[1:], 1):
        for g, w in zip(other, results[0], strict=True):
            if i in unaligned:
                torch.testing.assert_close(g, w, rtol=2**-7, atol=1e-6)
            else:
                assert_same_bits(g, w)


@pytest.mark.parametrize("dim", [0, 2], ids=["sequences", "positions"])
def test_heads_far_apart(dim):
    q, k, *weights, cos, sin = inputs(2, 2, 3, 1, 16, 16, torch.bfloat16, "cpu", table_batch=2)
    tables = far_apart(cos), far_apart(sin)
    assert_offsets_have_64_bits(lambda q, k: qk_norm_rope(q, k, *weights, *tables, EPS), q, k, dim=dim)
    for got, want in zip(
        qk_norm_rope(q, k, *weights, *tables, EPS), qk_norm_rope(q, k, *weights, cos, sin, EPS), strict=True
    ):
        assert_same_bits(got, want)


@pytest.mark.parametrize("device", devices())
def test_results_and_gradients_keep_the_memory_order(device):
    for heads_first in (False, True):
        q, k, *rest = inputs(2, 3, 4, 1, 16, 16, torch.float32, device)
        leaves = leaves_of([t.contiguous() if heads_first else t for t in (q, k)])
        out = qk_norm_rope(*leaves, *rest)
        for t in (*out, *torch.autograd.grad(out, leaves, [torch.ones_like(o) for o in out])):
            assert (t if heads_first else t.transpose(1, 2)).is_contiguous()


@pytest.mark.parametrize("device", devices())
def test_tables_of_any_strides(device):
    *heads, cos, sin = inputs(3, 4, 2, 1, 16, 16, torch.float32, device)
    want = qk_norm_rope(*heads, cos, sin)
    wide = torch.nn.functional.pad(cos, (3, 5))[..., 3:-5]
    for c, s in (
        (cos.expand(3, -1, -1), sin.repeat(3, 1, 1)),
        (cos, sin.transpose(1, 2).contiguous().transpose(1, 2)),
    ):
        for g, w in zip(qk_norm_rope(*heads, c, s), want, strict=True):
            assert_same_bits(g, w)
    for g, w in zip(qk_norm_rope(*heads, wide, sin), want, strict=True):  # narrower accesses
        torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    "wanted", [("q",), ("k",), ("q_weight",), ("k_weight",), ("q", "k"), ("k", "q_weight")], ids=str
)
def test_some_gradients_alone(wanted, device):
    """With parts frozen the others' gradients are what they are with none frozen; where both x and weight are, nothing
    flows to the output."""
    tensors = inputs(1, 7, 5, 2, 64, 64, torch.bfloat16, device)
    upstream = upstream_of(tensors, torch.bfloat16)
    every, some = leaves_of(tensors), leaves_of(tensors, wanted)
    out = qk_norm_rope(*every, *tensors[4:])
    torch.autograd.backward(out, upstream)
    out = qk_norm_rope(*some, *tensors[4:])
    assert out[0].requires_grad == ("q" in wanted or "q_weight" in wanted)
    assert out[1].requires_grad == ("k" in wanted or "k_weight" in wanted)
    flowing = [(o, u) for o, u in zip(out, upstream, strict=True) if o.requires_grad]
    torch.autograd.backward([o for o, _ in flowing], [u for _, u in flowing])
    for name, leaf, twin in zip(NAMES, some, every, strict=True):
        assert (leaf.grad is not None) == (name in wanted)
        if name in wanted:
            assert_same_bits(leaf.grad, twin.grad)


@pytest.mark.parametrize("device", devices())
def test_an_unused_result_gives_zeros(device):
    tensors = inputs(1, 3, 4, 2, 16, 16, torch.float32, device)
    leaves = leaves_of(tensors)
    qk_norm_rope(*leaves, *tensors[4:])[0].sum().backward()
    assert leaves[0].grad.any()
    assert not leaves[1].grad.any()
    assert not leaves[3].grad.any()


@pytest.mark.parametrize("device", devices())
def test_no_grad_at_all(device):
    tensors = inputs(1, 3, 4, 2, 16, 16, torch.float32, device)
    assert not any(o.requires_grad for o in qk_norm_rope(*tensors))
    with torch.no_grad():
        assert not any(o.requires_grad for o in qk_norm_rope(*leaves_of(tensors), *tensors[4:]))


@pytest.mark.parametrize("device", devices())
def test_a_retained_graph_gives_the_same_again(device):
    tensors = inputs(2, 5, 4, 2, 32, 32, torch.bfloat16, device)
    leaves, upstream = leaves_of(tensors), upstream_of(tensors, torch.bfloat16)
    out = qk_norm_rope(*leaves, *tensors[4:])
    first = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out, leaves, upstream), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("device", devices())
def test_expanded_upstream_gradient(device):
    """`out.sum().backward()` sends a gradient whose strides are all zero."""
    tensors = inputs(1, 3, 2, 1, 16, 16, torch.float32, device)
    leaves = leaves_of(tensors)
    out = qk_norm_rope(*leaves, *tensors[4:])
    first = torch.autograd.grad(out[0].sum() + out[1].sum(), leaves, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out, leaves, [torch.ones_like(o) for o in out]), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("device", devices())
def test_inputs_are_left_alone_and_bits_repeat(device):
    """On one thread and on several."""
    tensors = inputs(2, 40, 6, 2, 64, 64, torch.bfloat16, device)
    upstream = upstream_of(tensors, torch.bfloat16)
    kept = [t.clone() for t in (*tensors, *upstream)]
    results = []
    threads = torch.get_num_threads()
    for count in (1, 4):
        torch.set_num_threads(count)
        leaves = leaves_of(tensors)
        out = qk_norm_rope(*leaves, *tensors[4:])
        results.append([*(o.detach() for o in out), *torch.autograd.grad(out, leaves, upstream)])
    torch.set_num_threads(threads)
    for first, second in zip(*results, strict=True):
        assert_same_bits(first, second)
    for t, w in zip((*tensors, *upstream), kept, strict=True):
        assert_same_bits(t, w)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("place", [3, 14], ids=["turning", "behind"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_reach_what_they_reach_in_stock(value, place, device):
    """Heads of which four elements do not turn: an infinite one among these spoils itself, in the others a pair."""
    tensors = inputs(1, 3, 2, 1, 16, 12, torch.float32, device)
    tensors[0][0, 1, 2, place] = value
    got, want = qk_norm_rope(*tensors, EPS), stock(*tensors)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g.isnan(), w.isnan())
        torch.testing.assert_close(g, w, equal_nan=True)


@pytest.mark.parametrize("device", devices())
def test_heads_of_zeros(device):
    """Only eps keeps the norm finite then, forward and backward."""
    tensors = inputs(1, 2, 2, 1, 16, 16, torch.float32, device)
    tensors[0][0, 1] = 0
    assert_no_worse(case(tensors))


@pytest.mark.parametrize("device", devices())
def test_bad_input_is_named(device):
    q, k, qw, kw, cos, sin = inputs(2, 3, 4, 2, 16, 16, torch.float32, device)
    with pytest.raises(RuntimeError, match=r"rope_forward: cos has shape \[1, 2, 16\]; dimension 1 must be 3"):
        qk_norm_rope(q, k, qw, kw, cos[:, :2], sin)
    with pytest.raises(RuntimeError, match=r"sin has shape \[1, 3, 14\]; dimension 2 must be 16, that of cos"):
        qk_norm_rope(q, k, qw, kw, cos, sin[..., :14])
    with pytest.raises(RuntimeError, match=r"k has shape \[2, 2, 2, 16\]; dimension 2 must be 3"):
        qk_norm_rope(q, k[:, :, :2], qw, kw, cos, sin)
    with pytest.raises(RuntimeError, match=r"q_weight has shape \[15\]; dimension 0 must be 16, the size of a head"):
        qk_norm_rope(q, k, qw[:15], kw, cos, sin)
    with pytest.raises(RuntimeError, match=r"k_weight has shape \[1, 16\]; 1 dimensions"):
        qk_norm_rope(q, k, qw, kw[None], cos, sin)
    with pytest.raises(ValueError, match="qk_norm_rope: casting is 'qwen'; one of 'llama', 'gemma', 'none'"):
        qk_norm_rope(q, k, qw, kw, cos, sin, casting="qwen")


@pytest.mark.parametrize("device", devices())
def test_double_backward_is_refused(device):
    tensors = inputs(1, 2, 2, 1, 8, 8, torch.float32, device)
    leaves = leaves_of(tensors)
    out = qk_norm_rope(*leaves, *tensors[4:])[0].square().sum()
    for gradient in torch.autograd.grad(out, leaves, create_graph=True):
        with pytest.raises(RuntimeError, match="qk_norm_rope cannot be differentiated twice"):
            gradient.sum().backward(retain_graph=True)


def test_what_the_kernels_do_not_serve_runs_the_original_code():
    tensors = inputs(2, 3, 4, 2, 16, 12, torch.float64, "cpu")
    for interleaved in (False, True):
        for casting in ("llama", "gemma"):
            got = qk_norm_rope(*tensors, EPS, casting=casting, interleaved=interleaved)
            # The original code's norm works in float32.
            for g, w in zip(got, exact(*tensors, casting, interleaved), strict=True):
                torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-6)
    assert qk_norm_rope(*(t.to("meta") for t in tensors))[0].device.type == "meta"
    q, k, qw, kw, cos, sin = (t.float() for t in tensors)
    assert qk_norm_rope(q, k, qw, kw.bfloat16(), cos, sin)[1].dtype == torch.float32
    learnt = cos.clone().requires_grad_()
    qk_norm_rope(q, k, qw, kw, learnt, sin)[0].sum().backward()
    assert learnt.grad is not None
    wide = inputs(1, 2, 1, 1, 2050, 2050, torch.float32, "cpu")
    for g, w in zip(qk_norm_rope(*wide, EPS), stock(*wide), strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("frozen", [False, True])
def test_compiles_without_a_break(frozen, device):
    torch._dynamo.reset()
    *_, q_weight, k_weight, _, _ = inputs(1, 1, 1, 1, 16, 16, torch.float32, device)
    weights = [q_weight.requires_grad_(), k_weight.requires_grad_(not frozen)]

    def attention_inputs(x, cos, sin):
        q, k = ((x * scale).view(*x.shape[:2], -1, 16).transpose(1, 2) for scale in (2, 3))
        return qk_norm_rope(q, k.detach() if frozen else k, *weights, cos, sin)

    compiled = torch.compile(attention_inputs, fullgraph=True, backend="aot_eager", dynamic=True)
    for positions in (3, 5):
        x = random_tensor((2, positions, 64), torch.float32, device)
        *_, cos, sin = inputs(1, positions, 1, 1, 16, 16, torch.float32, device)
        gradients = []
        for function in (compiled, attention_inputs):
            leaf = x.clone().requires_grad_()
            q, k = function(leaf, cos, sin)
            loss = q.square().sum() + k.pow(3).sum()
            gradients.append(torch.autograd.grad(loss, [leaf, *weights[: 1 if frozen else 2]]))
        for got, want in zip(*gradients, strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("device", devices())
def test_what_the_compiler_is_told_is_true(device):
    tensors = inputs(2, 3, 4, 1, 16, 12, torch.bfloat16, device, tables=torch.float32)
    forward, backward = (
        getattr(torch.ops.bastile, f"qk_norm_rope_{pass_}").default for pass_ in ("forward", "backward")
    )
    for order in (True, False):
        for casting in (0, 1):
            given = (*tensors, EPS, casting, 0, False, False, order, not order)
            torch.library.opcheck(forward, given)
            dq, dk = forward(*given)
            given = (*tensors, EPS, casting, 1, False, False, order)
            torch.library.opcheck(backward, (dq, dk, *given, not order, *[True] * 4))
            torch.library.opcheck(backward, (dq, None, *given, False, False, False, True, False))
            torch.library.opcheck(backward, (None, dk, *given, False, False, True, False, False))
    *heads, cos, sin = tensors
    given = (*heads, cos[..., :6], sin[..., :6], EPS, 0, 2, True, True, True, False)
    torch.library.opcheck(forward, given)
    torch.library.opcheck(backward, (*forward(*given), *given, *[True] * 4))


# ---- layouts ---------------------------------------------------------------------------------------------------------


def layout_case(layout, half_tables, tensors, keep_type=False) -> Case:
    def exact(q, k, q_weight, k_weight, cos, sin):
        normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w for x, w in ((q, q_weight), (k, k_weight)))
        return tuple(turned_by(layout, x, cos, sin, half_tables) for x in normed)

    def stock(q, k, q_weight, k_weight, *tables):
        turn = rope_case(layout, q, k, *tables, half_tables, keep_type).stock
        both = turn(stock_norm(q, q_weight, "llama"), stock_norm(k, k_weight, "llama"), *tables)
        return tuple(t.to(q.dtype) for t in both) if keep_type else both

    return Case(
        ours=lambda *t: qk_norm_rope(*t, EPS, layout=layout, half_tables=half_tables, keep_type=keep_type),
        stock=stock,
        exact=exact,
        inputs=dict(zip(NAMES, tensors, strict=False)),
        constants={"cos": tensors[4], "sin": tensors[5]},
    )


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half_tables", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 5, 4, 2, 128, 128),  # whole
        (2, 5, 9, 3, 64, 64),  # groups of four heads forward
        (1, 3, 5, 1, 80, 32),  # partial, threads without a piece
        (1, 2, 3, 1, 48, 40),  # partial, the rest one piece in a thread that has room for two
        (1, 4, 2, 1, 18, 18),  # half of it odd: single elements
        (1, 3, 2, 1, 576, 576),  # a head of several warps
    ],
    ids=str,
)
def test_layouts_match_float64_as_well_as_stock(shape, layout, half_tables, dtype, device):
    *heads, cos, sin = inputs(*shape[:5], shape[5] // 2, dtype, device, table_batch=shape[0])
    tables = table_pairs((cos, sin), layout, half_tables)
    assert_no_worse(layout_case(layout, half_tables, (*heads, *tables)))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_of_float32_and_results_of_the_input_s_type(dtype, layout, device):
    *heads, cos, sin = inputs(2, 5, 4, 2, 64, 32, dtype, device, tables=torch.float32)
    for half_tables in (False, True):
        tensors = (*heads, *table_pairs((cos, sin), layout, half_tables))
        out = qk_norm_rope(*tensors, EPS, layout=layout, half_tables=half_tables, keep_type=True)
        assert all(t.dtype == dtype for t in out)
        assert_no_worse(layout_case(layout, half_tables, tensors, keep_type=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_original_code_of_each_layout(layout):
    *heads, cos, sin = inputs(2, 3, 4, 2, 16, 6, torch.float64, "cpu")
    for half_tables in (False, True):
        tensors = (*heads, *table_pairs((cos, sin), layout, half_tables))
        got = qk_norm_rope(*tensors, EPS, layout=layout, half_tables=half_tables)
        for g, w in zip(got, layout_case(layout, half_tables, tensors).exact(*tensors), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-6)  # the original code's norm works in float32
    with pytest.raises(ValueError, match="qk_norm_rope: layout is 'pairs'"):
        qk_norm_rope(*heads, cos, sin, layout="pairs")
