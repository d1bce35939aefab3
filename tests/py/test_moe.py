"""The experts against float64, on every device at hand; the Hugging Face code's error is the yardstick."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from bastile.ops._grouped import grouped_matrices, grouped_rows
from bastile.ops.moe import moe_experts
from memory import Peak
from oracle import DTYPES, EMULATED, Case, assert_no_worse, assert_same_bits, devices, few_examples, random_tensor
from products import assert_near

GATHER = torch.ops.bastile.moe_gather.default
SORT = torch.ops.bastile.moe_sort.default
NAMES = ("hidden", "weights", "gate_up", "gate_up_bias", "down", "down_bias")


def routing(tokens: int, choices: int, experts: int, device: str, seed: int = 0, kind: str = "any") -> torch.Tensor:
    """[T, K]: distinct experts for each token; "one": all tokens go to the same; "twice": an expert may come twice."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "one":
        indices = torch.full((tokens, choices), experts - 1)
    elif kind == "twice":
        indices = torch.randint(experts, (tokens, choices), generator=generator)
    else:
        indices = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :choices].contiguous()
    return indices.to(device)


def inputs(shape, dtype, device, *, weights_dtype=None, bias=True) -> dict[str, torch.Tensor | None]:
    """Numbers for which h = hidden gate_up scatters by about 2."""
    tokens, choices, experts, width, inner = shape
    scores = random_tensor((tokens, choices), torch.float32, device).softmax(1) if choices else None
    return {
        "hidden": random_tensor((tokens, width), dtype, device),
        "weights": scores.to(weights_dtype or dtype),
        "gate_up": random_tensor((experts, width, 2 * inner), dtype, device, scale=2 / width**0.5),
        "gate_up_bias": random_tensor((experts, 2 * inner), dtype, device) if bias else None,
        "down": random_tensor((experts, inner, width), dtype, device, scale=1 / inner**0.5),
        "down_bias": random_tensor((experts, width), dtype, device) if bias else None,
    }


def ours(hidden, weights, gate_up, gate_up_bias, down, down_bias, indices, limit=7.0):
    return moe_experts(hidden, indices, weights, gate_up, gate_up_bias, down, down_bias, limit=limit)


def stock(hidden, weights, gate_up, gate_up_bias, down, down_bias, indices, limit=7.0):
    """Transformers' own loop over the experts."""
    module = SimpleNamespace(
        num_experts=gate_up.shape[0],
        gate_up_proj=gate_up,
        gate_up_proj_bias=gate_up_bias,
        down_proj=down,
        down_proj_bias=down_bias,
        alpha=1.702,
        limit=limit,
    )
    module._apply_gate = lambda h: GptOssExperts._apply_gate(module, h)
    return GptOssExperts.forward.__wrapped__(module, hidden, indices, weights)


def roomy_limit(tensors, indices) -> float:
    """A limit that clamps some of the gate's numbers, in the widest gap between them from 3 on: one that rounding
    takes to the other side of it has a gradient in one version and none in another, which says nothing of either. A
    number of the tensors' type, as torch.clamp makes of it."""
    h = tensors["hidden"].double() @ tensors["gate_up"].double() + tensors["gate_up_bias"].double()[:, None]
    used = h[indices.t(), torch.arange(indices.shape[0], device=h.device)].abs().flatten().sort().values
    used = used[used > 3]
    end = max(6.0, used[-5].item()) if len(used) > 4 else 6.0  # far out gaps are wide, and a few are to be beyond
    used = torch.cat([used.new_tensor([3.0]), used[used < end], used.new_tensor([end])])
    widest = used.diff().argmax()
    return ((used[widest] + used[widest + 1]) / 2).to(tensors["hidden"].dtype).item()


def case(tensors, indices) -> Case:
    """All outputs and gradients are products of the gate's numbers, [T K, I], and share their errors; the largest of
    them, being products of two, weigh as much as all others."""
    limit = roomy_limit(tensors, indices)
    return Case(
        ours=partial(ours, limit=limit),
        stock=partial(stock, limit=limit),
        exact=partial(stock, limit=limit),
        inputs=tensors,
        constants={"indices": indices},
        independent=max(1, indices.numel() * tensors["down"].shape[1] // 8),
        extra_roundings={"dweights": 1},  # of dy, where stock rounds y
    )


# [T, K, E, H, I]. Each has its reason.
SHAPES = [
    (24, 2, 4, 32, 48),  # ordinary
    (1, 1, 4, 16, 8),  # one token, one choice: three experts without rows
    (9, 4, 4, 33, 7),  # odd sizes: narrow accesses; every expert for every token
    (70, 3, 5, 24, 40),  # several blocks, and experts that end inside one
    (6, 2, 40, 8, 16),  # more experts than rows
    (5, 6, 8, 16, 12),  # more choices than are read at once
    (3, 1, 1, 16, 8),  # one expert
    (12, 2, 3, 8, 2100),  # a gate wider than a block's threads, and than a tile on CPU
    (10, 2, 3, 4200, 8),  # a token wider than these
    (1400, 3, 5, 8, 8),  # blocks of 32 rows: from 4096 rows on
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_as_well_as_stock(shape, dtype, device):
    assert_no_worse(case(inputs(shape, dtype, device), routing(*shape[:3], device)))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["one", "twice"])
def test_uneven_routing(kind, device):
    shape = (80, 2, 6, 24, 16)
    assert_no_worse(case(inputs(shape, torch.bfloat16, device), routing(*shape[:3], device, kind=kind)))


@few_examples
@given(
    tokens=st.integers(6, 40),
    choices=st.integers(1, 5),
    experts=st.integers(5, 70),
    width=st.integers(8, 40),
    inner=st.integers(8, 40),
    dtype=st.sampled_from(DTYPES),
    weights_dtype=st.sampled_from(DTYPES),
    device=st.sampled_from(devices()),
)
def test_any_shape(tokens, choices, experts, width, inner, dtype, weights_dtype, device):
    shape = (tokens, choices, experts, width, inner)
    tensors = inputs(shape, dtype, device, weights_dtype=weights_dtype)
    assert_no_worse(case(tensors, routing(tokens, choices, experts, device, seed=tokens)))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("shape", [(1, 1, 2, 1, 1), (3, 2, 3, 1, 2), (3, 2, 3, 2, 1)], ids=str)
def test_narrowest(shape, device):
    """Too few numbers for statistics."""
    tensors, indices = inputs(shape, torch.float32, device), routing(*shape[:3], device)
    results = []
    for function in (ours, stock):
        given = leaves(tensors)
        out = function(*given.values(), indices)
        results.append((out.detach(), *torch.autograd.grad(out, tuple(given.values()), torch.ones_like(out))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("pairs", "experts"), [((700, 3), 70), ((300, 2), 700), ((66000, 2), 70)], ids=str)
def test_sort_is_stable(pairs, experts, device):
    """Several blocks of one round of 512 pairs, or of two, the last one not full; more experts than threads."""
    indices = routing(*pairs, experts, device, kind="twice")
    order, position, ends = SORT(indices, experts)
    want = torch.sort(indices.flatten(), stable=True).indices
    assert torch.equal(order.long(), want)
    assert torch.equal(position.flatten().long(), want.argsort())
    assert torch.equal(ends.long(), torch.bincount(indices.flatten(), minlength=experts).cumsum(0))
    x = random_tensor((pairs[0], 24), torch.float16, device)
    assert torch.equal(GATHER(x, position.view(-1)), x[want // pairs[1]])


def leaves(tensors, wanted=NAMES) -> dict[str, torch.Tensor]:
    return {name: t.clone().requires_grad_(name in wanted) for name, t in tensors.items()}


def run(tensors, indices, dout=None):
    """The output, and the gradients of what wants one."""
    out = ours(**tensors, indices=indices)
    wanted = [t for t in tensors.values() if t is not None and t.requires_grad]
    return out.detach(), torch.autograd.grad(out, wanted, torch.ones_like(out) if dout is None else dout)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    "wanted", [(name,) for name in NAMES] + [("hidden", "weights"), ("weights", "down_bias"), ("gate_up", "down")]
)
def test_frozen_parts_change_nothing_for_the_others(wanted, device):
    shape = (20, 2, 5, 24, 16)
    tensors, indices = inputs(shape, torch.bfloat16, device), routing(*shape[:3], device)
    dout = random_tensor((20, 24), torch.bfloat16, device)
    every = dict(zip(NAMES, run(leaves(tensors), indices, dout)[1], strict=True))
    some = dict(zip([n for n in NAMES if n in wanted], run(leaves(tensors, wanted), indices, dout)[1], strict=True))
    for name, gradient in some.items():
        assert_same_bits(gradient, every[name])


@pytest.mark.parametrize("device", devices())
def test_without_biases(device):
    shape = (20, 2, 5, 24, 16)
    tensors, indices = inputs(shape, torch.float32, device, bias=False), routing(*shape[:3], device)
    zeros = {
        **tensors,
        "gate_up_bias": torch.zeros(5, 32, device=device),
        "down_bias": torch.zeros(5, 24, device=device),
    }
    names = [name for name, t in tensors.items() if t is not None]
    got = {n: None if t is None else t.clone().requires_grad_() for n, t in tensors.items()}
    out, gradients = run(got, indices)
    want, with_zeros = run(leaves(zeros, names), indices)
    for g, w in zip((out, *gradients), (want, *with_zeros), strict=True):
        assert_same_bits(g, w)


@pytest.mark.parametrize("device", devices())
def test_no_token(device):
    shape = (0, 2, 5, 24, 16)
    tensors = leaves(inputs(shape, torch.bfloat16, device))
    out, gradients = run(tensors, routing(*shape[:3], device))
    assert out.shape == (0, 24)
    assert all(not g.any() and g.shape == t.shape for g, t in zip(gradients, tensors.values(), strict=True))


@pytest.mark.parametrize("device", devices())
def test_strides(device):
    """Tokens that lie apart, transposed weights, a transposed index matrix, an upstream gradient of zero strides."""
    shape = (20, 2, 5, 24, 16)
    dense, indices = inputs(shape, torch.float32, device), routing(*shape[:3], device)
    apart = dict(dense)
    apart["hidden"] = torch.cat([dense["hidden"]] * 2, 1)[:, 24:]
    apart["weights"] = dense["weights"].t().contiguous().t()
    for name in ("gate_up", "down"):
        apart[name] = dense[name].transpose(1, 2).contiguous().transpose(1, 2)
    shifted = random_tensor((5 * 32 + 1,), torch.float32, device)
    shifted[1:] = dense["gate_up_bias"].flatten()
    apart["gate_up_bias"] = shifted[1:].view(5, 32)  # aligned to one element
    got = run({n: t.detach().requires_grad_() for n, t in apart.items()}, indices.t().contiguous().t())
    out = ours(**(want := leaves(dense)), indices=indices)
    for g, w in zip((got[0], *got[1]), (out, *torch.autograd.grad(out.sum(), tuple(want.values()))), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)  # products sum transposed matrices in another order


@pytest.mark.parametrize("device", devices())
def test_nan_and_infinity_pass_as_in_stock(device):
    shape = (4, 1, 2, 2, 8)
    tensors = inputs(shape, torch.float32, device)
    indices = torch.zeros((4, 1), dtype=torch.int64, device=device)
    tensors["gate_up"][0] = torch.eye(2, device=device).repeat(1, 8)
    tensors["gate_up_bias"].zero_()
    special = [[torch.nan, 1.0], [torch.inf, -torch.inf], [-1e4, 1.0], [7.0, -7.0]]
    tensors["hidden"][:] = torch.tensor(special, device=device)
    tensors["gate_up"][0].nan_to_num_()
    results = []
    for function in (ours, stock):
        given = leaves(tensors)
        out = function(*given.values(), indices)
        results.append((out.detach(), *torch.autograd.grad(out, tuple(given.values()), torch.ones_like(out))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", devices())
def test_an_index_that_is_no_expert(device):
    shape = (20, 2, 5, 24, 16)
    tensors, indices = leaves(inputs(shape, torch.float32, device)), routing(*shape[:3], device)
    wrong = indices.clone()
    wrong[3, 1], wrong[17, 0] = 5, -1
    if device == "cpu" and not EMULATED:
        with pytest.raises(RuntimeError, match=r"moe_sort: indices, of shape \[20, 2\], has 5; 0 to 4"):
            run(tensors, wrong)
        return
    out, gradients = run(tensors, wrong)
    bad = torch.zeros(20, dtype=torch.bool, device=device)
    bad[[3, 17]] = True
    assert out[bad].isnan().all()
    # Experts have fewer rows now, which products may sum in another order.
    exact = stock(**{name: t.detach().double() for name, t in tensors.items()}, indices=indices)
    for result in (out, run(tensors, indices)[0]):
        assert_near(result[~bad], exact[~bad], terms=24 + 16 + 2)
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[1][3, 1] == 0
    assert gradients[1][17, 0] == 0


@pytest.mark.parametrize("device", devices())
def test_operators_refuse_what_cannot_be(device):
    shape = (20, 2, 5, 24, 16)
    t, indices = inputs(shape, torch.float32, device), routing(*shape[:3], device)
    for experts in (-1, 0, 1024):
        with pytest.raises(RuntimeError, match=f"moe_sort: ends has {experts} elements, one an expert; 1 to 1023"):
            SORT(indices, experts)
    order, position, ends = SORT(indices, 5)
    for wanted in ((True, False), (False, True)):
        with pytest.raises(RuntimeError, match="moe_combine_backward: dots or dbias is wanted, but bias is NULL"):
            torch.ops.bastile.moe_combine_backward(t["hidden"], order, ends, t["weights"], None, *wanted)
    with pytest.raises(RuntimeError, match=r"rows of x, 20, is needed"):
        GATHER(t["hidden"], position.view(-1)[:-1])


@pytest.mark.parametrize("device", devices())
def test_inputs_are_left_alone_and_bits_repeat(device):
    """In a second backward pass over the same graph, and a last one: the graph goes with it, and the gate's gradients
    are written over what it kept. On one thread and on several, where products may sum in another order."""
    shape = (70, 2, 5, 24, 48)
    tensors, indices = inputs(shape, torch.bfloat16, device), routing(*shape[:3], device)
    kept = {name: t.clone() for name, t in tensors.items()}
    exact = leaves({name: t.double() for name, t in tensors.items()})
    out = stock(**exact, indices=indices)
    exact = (out.detach(), *torch.autograd.grad(out, tuple(exact.values()), torch.ones_like(out)))
    threads = torch.get_num_threads()
    for count in (1, 4):
        torch.set_num_threads(count)
        given, results = leaves(tensors), []
        out = ours(**given, indices=indices)
        for retain in (True, True, False):
            gradients = torch.autograd.grad(out, tuple(given.values()), torch.ones_like(out), retain_graph=retain)
            results.append((out.detach(), *gradients))
        for other in results[1:]:
            for g, w in zip(results[0], other, strict=True):
                assert_same_bits(g, w)
        for g, w in zip(results[0], exact, strict=True):
            # Products of 24, 48, 24 and at most 140 terms; h, y, the output and the gradients between them are rounded.
            assert_near(g, w, terms=24 + 48 + 24 + 140, roundings=6)
    torch.set_num_threads(threads)
    for name, t in tensors.items():
        assert_same_bits(t, kept[name])


def test_keeps_inputs_the_rows_the_first_product_and_the_sort():
    shape = (20, 2, 5, 24, 16)
    tensors, indices = leaves(inputs(shape, torch.bfloat16, "cpu")), routing(*shape[:3], "cpu")
    own = {t.data_ptr() for t in tensors.values()}
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(**tensors, indices=indices)
    extra = sorted((t.dtype == torch.int32, tuple(t.shape)) for t in saved if t.data_ptr() not in own)
    assert extra == [(False, (40, 24)), (False, (40, 32)), (True, (5,)), (True, (20, 2)), (True, (40,))]


def peak(run: Callable[[], object]) -> int:
    with Peak() as memory:
        run()
    return memory.most


# [T, K, E, H, I]: matrices larger than all rows together, and rows larger than these.
@pytest.mark.parametrize("shape", [(16, 2, 8, 64, 48), (128, 2, 2, 16, 64)], ids=str)
@pytest.mark.parametrize("wanted", [NAMES, ("hidden", "weights")], ids=["trained", "frozen"])
def test_the_last_backward_pass_needs_no_more_memory_than_its_steps(shape, wanted):
    """What a step reads and makes, what later ones read, the gradients so far: nothing else is there, but for the sort,
    the output, its gradient, and a few numbers a pair. Without gradients wanted, h goes before the second product."""
    tokens, choices, experts, width, inner = shape
    tensors, indices = leaves(inputs(shape, torch.float32, "cpu"), wanted), routing(*shape[:3], "cpu")
    pairs = 4 * tokens * choices
    rows, gate, h, token = pairs * width, pairs * inner, pairs * 2 * inner, 4 * tokens * width
    trained = "down" in wanted
    ddown = 4 * experts * width * inner if trained else 0
    dgate_up, dbiases = 2 * ddown, 4 * experts * (width + 2 * inner) if trained else 0
    read_by_ddown = rows + gate if trained else 0
    steps = [
        rows + gate + h + (rows if trained else 0),  # dy, then dh and wy in the memory of h and dy; the kept rows
        h + read_by_ddown + rows + dgate_up,
        h + read_by_ddown + rows + dgate_up + token,  # dhidden
        read_by_ddown + dgate_up + token + ddown,
    ]
    few = 2 * pairs + 4 * experts + 2 * pairs + dbiases  # the sort; dots, the gradients of weights and biases

    def backward():
        out = ours(**tensors, indices=indices)
        torch.autograd.grad(out, [tensors[name] for name in wanted], torch.ones_like(out))

    assert peak(backward) <= few + 2 * token + max(steps)
    with torch.no_grad():
        assert peak(lambda: ours(**tensors, indices=indices)) <= few + h + max(rows, gate)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("reentrant", [True, False, None], ids=["reentrant", "checkpoint", "hooks"])
def test_hooks_and_checkpoints_change_no_bit(reentrant, device):
    """They hand the kept tensors to the backward pass in their own ways."""
    shape = (20, 2, 5, 24, 16)
    tensors, indices = inputs(shape, torch.bfloat16, device), routing(*shape[:3], device)
    dout = random_tensor((20, 24), torch.bfloat16, device)
    want = run(leaves(tensors), indices, dout)
    given = leaves(tensors)
    if reentrant is None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu().clone(), lambda t: t.to(device)):
            out = ours(**given, indices=indices)
    else:
        out = checkpoint(ours, *given.values(), indices, use_reentrant=reentrant)
    for retain in (True, False):
        out.backward(dout, retain_graph=retain)
        for tensor, gradient in zip(given.values(), want[1], strict=True):
            assert_same_bits(tensor.grad, gradient)
            tensor.grad = None
    assert_same_bits(out.detach(), want[0])


def test_what_no_kernel_serves_runs_plain_torch():
    """float64, mixed types and autocast; the definition, which the tests above take for granted, is stock's."""
    shape = (20, 2, 5, 24, 16)
    tensors, indices = inputs(shape, torch.float32, "cpu"), routing(*shape[:3], "cpu")
    double = {name: t.double() for name, t in tensors.items()}
    torch.testing.assert_close(ours(**double, indices=indices), stock(**double, indices=indices))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            ours(**tensors, indices=indices), stock(**tensors, indices=indices), rtol=0.02, atol=0.02
        )


def test_tensors_without_values_have_their_shapes():
    """Under FakeTensorMode, by which tools learn how much memory a step needs."""
    shape = (20, 2, 5, 24, 16)
    tensors, indices = inputs(shape, torch.float32, "cpu"), routing(*shape[:3], "cpu")
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(t).requires_grad_() for name, t in tensors.items()}
        out = ours(**fakes, indices=mode.from_tensor(indices))
        out.sum().backward()
    assert out.shape == tensors["hidden"].shape
    assert all(fake.grad.shape == fake.shape for fake in fakes.values())


@pytest.mark.parametrize("device", devices())
def test_bad_input_is_named(device):
    shape = (20, 2, 5, 24, 16)
    tensors, indices = inputs(shape, torch.float32, device), routing(*shape[:3], device)
    bad = {
        r"routing_weights has shape \[20, 1\]; \[T, K\]": {"weights": tensors["weights"][:, :1]},
        r"gate_up_proj has shape \[5, 24, 31\]": {"gate_up": tensors["gate_up"][..., 1:]},
        r"down_bias has shape \[5, 23\]; \[E, H\] is needed, here \[5, 24\]": {
            "down_bias": tensors["down_bias"][:, 1:]
        },
        r"hidden has shape \[24\]": {"hidden": tensors["hidden"][0]},
        "router_indices is torch.float32": {"indices": indices.float()},
    }
    for message, change in bad.items():
        with pytest.raises(RuntimeError, match="moe_experts: " + message):
            ours(**{**tensors, "indices": indices, **change})
    with pytest.raises(ValueError, match=r"limit is 0\.0"):
        moe_experts(tensors["hidden"], indices, *[tensors[n] for n in NAMES[1:]], limit=0.0)


@pytest.mark.parametrize("device", devices())
def test_double_backward_is_refused(device):
    shape = (20, 2, 5, 24, 16)
    tensors, indices = leaves(inputs(shape, torch.float32, device)), routing(*shape[:3], device)
    out = ours(**tensors, indices=indices)
    (gradient,) = torch.autograd.grad(out.sum(), tensors["weights"], create_graph=True)
    with pytest.raises(RuntimeError, match="moe_experts cannot be differentiated twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("device", devices())
def test_compiles_without_a_break(device):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda hidden, *rest: ours(hidden * 2, *rest), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for tokens in (8, 11):
        shape = (tokens, 2, 5, 24, 16)
        tensors, indices = inputs(shape, torch.float32, device), routing(*shape[:3], device)
        got, want = leaves(tensors), leaves(tensors)
        compiled(*got.values(), indices).square().sum().backward()
        doubled = {**want, "hidden": want["hidden"] * 2}
        ours(**doubled, indices=indices).square().sum().backward()
        for name in NAMES:
            assert_same_bits(got[name].grad, want[name].grad)


@pytest.mark.parametrize("device", devices())
def test_what_the_compiler_is_told_is_true(device):
    shape = (20, 2, 5, 24, 16)
    t, indices = inputs(shape, torch.bfloat16, device), routing(*shape[:3], device)
    ops, check = torch.ops.bastile, torch.library.opcheck
    check(SORT, (indices, 5))
    order, position, ends = SORT(indices, 5)
    check(GATHER, (t["hidden"], position.view(-1)))
    rows = GATHER(t["hidden"], position.view(-1))
    h = grouped_rows(rows, t["gate_up"], ends)
    check(ops.grouped_rows.default, (rows, t["gate_up"], ends))
    unit = 5, True, 1.7, 7.0, False  # swiglu_oai, interleaved, alpha, limit, open_limit
    check(ops.moe_glu_forward.default, (h, t["gate_up_bias"], ends, *unit))
    y = ops.moe_glu_forward(h, t["gate_up_bias"], ends, *unit)
    check(ops.grouped_matrices.default, (rows, y, ends))
    for wanted in ((True,) * 4, (True, False, False, False), (False, True, True, False)):
        given = (y, h, t["gate_up_bias"], ends, order, t["weights"], None, *unit, *wanted)
        check(ops.moe_glu_backward.default, given)
        check(ops.moe_glu_backward_inplace.default, (y.clone(), h.clone(), *given[2:]))
    check(ops.moe_combine_forward.default, (rows, position, t["weights"], t["down_bias"], indices))
    check(ops.moe_combine_forward.default, (rows, position, None, None, None))
    for wanted in ((True, True), (False, True)):
        check(ops.moe_combine_backward.default, (t["hidden"], order, ends, t["weights"], t["down_bias"], *wanted))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products(dtype, device):
    """On CUDA in bfloat16 the kernel of PyTorch, with an empty group and groups of no round size."""
    ends = torch.tensor([5, 5, 18, 31], dtype=torch.int32, device=device)
    rows, right = random_tensor((31, 64), dtype, device), random_tensor((31, 40), dtype, device)
    matrices = random_tensor((4, 64, 40), dtype, device)
    product, outer = grouped_rows(rows, matrices, ends), grouped_matrices(rows, right, ends)
    turned = grouped_rows(right, matrices.transpose(1, 2), ends)
    start = 0
    for group, end in enumerate(ends.tolist()):
        close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 64 * torch.finfo(dtype).eps}
        exact = [t.double() for t in (rows[start:end], right[start:end], matrices[group])]
        torch.testing.assert_close(product[start:end].double(), exact[0] @ exact[2], **close)
        torch.testing.assert_close(turned[start:end].double(), exact[1] @ exact[2].t(), **close)
        torch.testing.assert_close(outer[group].double(), exact[0].t() @ exact[1], **close)
        start = end
    assert not outer[1].any()
