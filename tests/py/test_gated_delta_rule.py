"""The gated delta rule against float64, on every device at hand, with Transformers' torch code as the yardstick. In
models: test_delta_rule_models.py.

On CUDA each number of a product is a sum of parts of 8 bits, two for types of 16 bits and three for float32 (the
emulated GPU has the same). Two parts leave up to 2^-18 of a number, for each is rounded to 8 bits; with both factors,
a product is off by up to 2^-17. That is far below half a unit of 16 bits, 2^-9 and 2^-12, so results of these types
obey the rule as they are. Results in float32 of a call in 16 bits, the states and the gradients of g and of a beta in
float32, show it: a term goes through some four products in a row (keys with keys, what the triangular system leaves of
values, the state, and what is read of that; backward as many), and a result may be twice as small as its terms are: 8
* 2^-17, of the result's size over all its elements. The worst element may be four times as far off, as of normal
numbers. Three parts leave 2^-25, about half a unit of float32, where PyTorch multiplies exactly and rounds sums alone,
and tensor cores cut off what they add up: on an H100 errors were found to be up to 8 times the original's. So models
keep the original there, unless its products may take TF32, of 11 bits: those are the yardstick here on a GPU. Of rows
of no whole 16 bytes cuBLAS takes no TF32: there the bound is what it leaves of two factors, 2^-11 of a result's size.
The emulated one rounds its sums, and was seen to be off by up to 2.6 times the original's, and 5 for dg, the difference
of sums over all that follows a token: these factors, rounded up, are the bound there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bastile.ops.gated_delta_rule import _original, gated_delta_rule
from oracle import (
    DTYPES,
    EMULATED,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_same_bits,
    devices,
    few_examples,
    products_of_float32,
    random_tensor,
)

each_device = pytest.mark.parametrize("device", devices())
#: On the emulated GPU one type: of float32 the C test runs these kernels there, over three chunks.
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16] if EMULATED else DTYPES)
too_slow_emulated = pytest.mark.skipif(EMULATED, reason="many calls, which take minutes on the emulated GPU")
NAMES = ("q", "k", "v", "g", "beta", "initial")
RESULTS = ("output 0", "output 1", *(f"d{name}" for name in NAMES))
#: The errors of two parts of 8 bits, of a result's size; and of three, in errors of the original's.
TWO_PARTS, THREE_PARTS, THREE_PARTS_DG, OF_TF32 = 2.0**-14, 3.0, 6.0, 2.0**-11


@pytest.fixture(autouse=True)
def yardstick(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a GPU the original's products of float32 are of TF32, as where models call the operator."""
    given_ = getattr(request.node, "callspec", None)
    is_wide = given_ is not None and given_.params.get("dtype") is torch.float32
    with products_of_float32("tf32") if is_wide else nullcontext():
        yield


def stock_function() -> Any:
    """Transformers' torch code, without what puts packages and kernels of the hub in its place."""
    try:
        module = import_module("transformers.models.qwen3_next.modeling_qwen3_next")
        function = inspect.unwrap(module.torch_chunk_gated_delta_rule)
    except (ImportError, AttributeError):
        pytest.skip("Transformers has no such function in this release")
    if "use_qk_l2norm_in_kernel" not in inspect.signature(function).parameters:
        pytest.skip("Transformers' function has other arguments in this release")
    return function


def definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial: torch.Tensor | None = None,
    *,
    normalize: bool,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A state, its matrix (1 - beta k k^T), and what is added to it, token by token and head by head: in float64, and
    written without a look at the operator's own original."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if normalize:
        q, k = q / (q.norm(dim=-1, keepdim=True) ** 2 + 1e-6).sqrt(), k / ((k * k).sum(-1, True) + 1e-6).sqrt()
    group = v.shape[2] // max(q.shape[2], 1)
    rows, states = [], []
    for n in range(v.shape[2]):
        state = q.new_zeros(q.shape[0], q.shape[-1], v.shape[-1]) if initial is None else initial[:, n]
        of_head = []
        for t in range(v.shape[1]):
            key, query = k[:, t, n // group], q[:, t, n // group]
            state = state * torch.exp(g[:, t, n])[:, None, None]
            seen = torch.einsum("bk,bkv->bv", key, state)
            state = state + torch.einsum("b,bk,bv->bkv", beta[:, t, n], key, v[:, t, n] - seen)
            of_head.append(scale * torch.einsum("bk,bkv->bv", query, state))
        rows.append(torch.stack(of_head, 1))
        states.append(state)
    return torch.stack(rows, 2), torch.stack(states, 1)


Shape = tuple[int, int, int, int, int, int]


def inputs(
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    *,
    of_beta: torch.dtype | None = None,
    decay: float = 0.1,
    offset: int = 0,
) -> dict[str, torch.Tensor]:
    """As models make them: q, k and v are splits of one wide tensor, of which the first `offset` columns are none; g is
    float32, the state too. Keys are of length 1 for those who do not normalise them: longer ones make states that grow
    without end."""
    batch, tokens, heads, of_values, key, value = shape
    sizes = [offset, heads * key, heads * key, of_values * value]
    wide = random_tensor((batch, tokens, sum(sizes)), torch.float32, device)
    of_keys = wide[..., offset + heads * key :][..., : heads * key].unflatten(-1, (heads, key))
    of_keys /= (of_keys.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    _, q, k, v = wide.to(dtype).split(sizes, dim=-1)
    g = -decay * random_tensor((batch, tokens, of_values), torch.float32, device).abs()
    beta = random_tensor((batch, tokens, of_values), torch.float32, device).sigmoid().to(of_beta or dtype)
    return {
        "q": q.unflatten(-1, (heads, key)),
        "k": k.unflatten(-1, (heads, key)),
        "v": v.unflatten(-1, (of_values, value)),
        "g": g,
        "beta": beta,
        "initial": random_tensor((batch, of_values, key, value), torch.float32, device),
    }


def case(
    given_: dict[str, torch.Tensor],
    *,
    normalize: bool = True,
    initial: bool = True,
    final: bool = True,
    times: float = 1.0,
    only_final: bool = False,
) -> Case:
    """`times`: of the usual scale; a power of two, by which the original's result is multiplied without an error."""
    stock = stock_function()
    given_ = given_ if initial else {name: t for name, t in given_.items() if name != "initial"}
    scale = None if times == 1 else times * given_["q"].shape[-1] ** -0.5

    def some(y: torch.Tensor, state: torch.Tensor | None) -> Any:
        return state if only_final else (y, state) if final else y

    def ours(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None) -> Any:
        y, last = gated_delta_rule(
            q, k, v, g, beta, scale=scale, initial_state=state, output_final_state=final, normalize=normalize
        )
        assert (last is not None) == final
        return some(y, last)

    def original(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None) -> Any:
        y, last = stock(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=normalize,
        )
        return some(y * times, last)

    def exact(*tensors: Any) -> Any:
        return some(*definition(*tensors, normalize=normalize, scale=scale))

    functions: list[Callable[..., Any]] = [ours, original, exact]
    # The columns of a state share the errors of the triangular system; dinitial is little more than those.
    independent = given_["k"].shape[0] * given_["v"].shape[2] * given_["k"].shape[-1] if only_final else None
    if only_final:  # q is not read
        q = given_["q"]
        given_ = {name: t for name, t in given_.items() if name != "q"}
        functions = [partial(with_query, function, q) for function in functions]
    extra = documented(given_["k"], given_["v"], given_["beta"])
    if only_final and "of_size" in extra:
        extra["of_size"]["output 0"] = extra["of_size"].pop("output 1")
    return Case(*functions, inputs=given_, independent=independent, **extra)


def with_query(function: Callable[..., Any], q: torch.Tensor, *rest: torch.Tensor) -> Any:
    return function(q.to(rest[0].dtype), *rest)


def rounds_parts(device: Any) -> bool:
    return EMULATED or torch.device(device).type == "cuda"


def documented(k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor) -> dict[str, Any]:
    """What products of parts allow beyond the rule; see the head."""
    if not rounds_parts(v.device):
        return {}
    # Of one token, dg is the difference of two numbers like dy · y; where there is no state before it, it is 0.
    # A row of one element has but a sign to be normalised to: its gradient is what eps leaves of such a difference.
    terms = {"dg": 1.0} | ({"dq": 1.0, "dk": 1.0} if k.shape[-1] == 1 else {})
    if v.dtype is torch.float32 and v.is_cuda:
        is_tf32 = k.shape[-1] % 4 == v.shape[-1] % 4 == 0
        return {"terms": terms} | ({} if is_tf32 else {"of_size": dict.fromkeys(RESULTS, OF_TF32)})
    if v.dtype is torch.float32:
        return {"times_stock": {**dict.fromkeys(RESULTS, THREE_PARTS), "dg": THREE_PARTS_DG}, "terms": terms}
    wide = ["output 1", "dinitial", *terms, *(["dbeta"] if beta.dtype is torch.float32 else [])]
    return {"of_size": dict.fromkeys(wide, TWO_PARTS), "terms": terms}


# [B, T, H, N, K, V]; each shape has its reason.
SHAPES: list[Shape] = [
    (2, 1, 1, 2, 16, 16),  # one token
    (1, 63, 2, 2, 16, 24),  # a chunk less a token
    (2, 64, 1, 1, 24, 16),  # a whole chunk
    (1, 65, 1, 2, 16, 16),  # a token more: grouped heads
    (1, 200, 2, 6, 32, 16),  # four chunks, the last one of 8 tokens; three heads of values each
    (2, 70, 1, 3, 7, 9),  # odd: single-element accesses, sizes that fill no tile
    (3, 20, 2, 2, 1, 1),  # the narrowest
    (1, 130, 1, 2, 128, 128),  # Qwen3-Next's and Qwen3.5's
    (1, 70, 1, 1, 96, 192),  # OLMo-Hybrid's
    (1, 66, 1, 1, 128, 256),  # the widest
]
if EMULATED:
    SHAPES = [(1, 65, 1, 2, 16, 16), (1, 70, 1, 3, 7, 9)]


@each_device
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_as_well_as_transformers(shape: Shape, dtype: torch.dtype, device: str) -> None:
    assert_no_worse(case(inputs(shape, dtype, device)))
    assert_no_worse(case(inputs(shape, dtype, device, offset=1), normalize=False, initial=False, final=False))


@too_slow_emulated
@each_device
@each_dtype
@pytest.mark.parametrize("of_beta", [None, torch.float32])
def test_pooled_error_is_no_larger(dtype: torch.dtype, of_beta: torch.dtype | None, device: str) -> None:
    """Several chunks. On CUDA of results in 16 bits alone."""

    def draw() -> Case:
        return case(inputs((2, 130, 1, 2, 32, 32), dtype, device, of_beta=of_beta))

    names: tuple[str, ...] = ()
    if rounds_parts(device):
        if dtype is torch.float32:
            pytest.skip("its products are of three parts: test_matches_float64_as_well_as_transformers has the bound")
        names = ("output 0", "dq", "dk", "dv", *(() if of_beta is torch.float32 else ("dbeta",)))
    assert_no_worse_pooled(draw, names)


@too_slow_emulated
@each_device
@each_dtype
@pytest.mark.parametrize(
    "options", [{"times": 4.0}, {"times": 0.25, "normalize": False}, {"only_final": True}], ids=str
)
def test_options(options: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    """Scales of one's own; gradients that come through the state alone, which queries have no part in."""
    assert_no_worse(case(inputs((2, 70, 1, 2, 16, 24), dtype, device), **options))


@too_slow_emulated
@each_device
@each_dtype
@pytest.mark.parametrize("decay", [0.0, 1e-4, 2.0, 30.0])
def test_decays(decay: float, dtype: torch.dtype, device: str) -> None:
    """None at all; long memory; of some tokens, and one that leaves nothing of what was before. Of several heads, for
    the gradients of g are running sums, whose errors along a head are nearly one."""
    assert_no_worse(case(inputs((3, 140, 1, 4, 16, 16), dtype, device, decay=decay)))


@each_device
@each_dtype
def test_a_decay_of_nothing(dtype: torch.dtype, device: str) -> None:
    """exp(g) is 0: a sequence begins there, whose results are those of one that does."""
    given_ = inputs((1, 100, 1, 2, 16, 16), dtype, device)
    for at in (37, 64, 80):
        given_["g"] = given_["g"].clone()
        given_["g"][:, at] = -1e4
    y, _ = gated_delta_rule(*list(given_.values())[:5], initial_state=given_["initial"], normalize=True)
    rest, _ = gated_delta_rule(*[t[:, 80:] for t in list(given_.values())[:5]], normalize=True)
    assert y.isfinite().all()
    # On CUDA sums of g over a chunk are rounded to float32, as the original's are: of 2e4 in the last one, so that what
    # two of them differ by, an exponent, is off by up to their roundoff.
    of_sums = 2e4 * torch.finfo(torch.float32).eps if rounds_parts(device) else 0
    near = 2 * torch.finfo(dtype).eps + of_sums
    torch.testing.assert_close(y[:, 80:], rest, rtol=near, atol=near)
    found = case(given_)
    assert_no_worse(replace(found, of_size={name: max(found.of_size.get(name, 0.0), of_sums) for name in RESULTS}))


@too_slow_emulated
@each_device
@each_dtype
@pytest.mark.parametrize("how", ["0", "1", "1, keys alike"])
def test_beta_at_its_ends(how: str, dtype: torch.dtype, device: str) -> None:
    """0 writes nothing; 1 with keys of length 1 writes all, where the triangular system is hardest: keys that are
    nearly the same have entries near 1 there."""
    given_ = inputs((1, 130, 1, 2, 16, 16), dtype, device)
    given_["beta"] = torch.full_like(given_["beta"], float(how[0]))
    if "alike" in how:
        given_["k"] = (given_["k"][:, :1] + 0.05 * given_["k"]).contiguous()
    assert_no_worse(case(given_))


@too_slow_emulated
@few_examples
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 140),
    heads=st.integers(1, 3),
    times=st.integers(1, 3),
    key=st.integers(1, 40),
    value=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    of_beta=st.sampled_from(DTYPES),
    device=st.sampled_from(devices()),
    normalize=st.booleans(),
    initial=st.booleans(),
    final=st.booleans(),
    offset=st.integers(0, 9),
)
def test_any_shape(
    batch: int,
    tokens: int,
    heads: int,
    times: int,
    key: int,
    value: int,
    dtype: torch.dtype,
    of_beta: torch.dtype,
    device: str,
    normalize: bool,
    initial: bool,
    final: bool,
    offset: int,
) -> None:
    shape = (batch, tokens, heads, heads * times, key, value)
    given_ = inputs(shape, dtype, device, of_beta=of_beta, offset=offset)
    assert_no_worse(case(given_, normalize=normalize, initial=initial, final=final))


def test_the_original_is_the_definition() -> None:
    """In float64, where both are exact: what no kernel serves is computed by the operator's own original."""
    for normalize in (True, False):
        wide = {name: t.double() for name, t in inputs((2, 9, 2, 4, 7, 5), torch.float32, "cpu").items()}
        leaves = [t.requires_grad_() for t in wide.values()]
        got = _original(*leaves[:5], None, leaves[5], 0.3, False, False, 1e-6 if normalize else None)
        want = definition(*leaves, normalize=normalize, scale=0.3)
        upstream = [torch.randn_like(t) for t in want]
        gradients = [torch.autograd.grad(outputs, leaves, upstream) for outputs in (got, want)]
        for one, other in zip((*got, *gradients[0]), (*want, *gradients[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@too_slow_emulated
@each_device
@each_dtype
def test_a_sequence_in_parts(dtype: torch.dtype, device: str) -> None:
    """The state that one call leaves is where the next one begins, whose chunks lie elsewhere."""
    given_ = inputs((2, 150, 1, 2, 16, 24), dtype, device)
    tensors, initial = [given_[name] for name in NAMES[:5]], given_["initial"]
    options: dict[str, Any] = {"output_final_state": True, "normalize": True}
    y, last = gated_delta_rule(*tensors, initial_state=initial, **options)
    first, between = gated_delta_rule(*[t[:, :50] for t in tensors], initial_state=initial, **options)
    second, end = gated_delta_rule(*[t[:, 50:] for t in tensors], initial_state=between, **options)
    assert last is not None
    assert end is not None
    near = 2.0**-12 if rounds_parts(device) and dtype is not torch.float32 else 1e-5
    torch.testing.assert_close(end, last, rtol=near, atol=near)
    near = max(near, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(torch.cat((first, second), 1), y, rtol=near, atol=near)


def results(tensors: list[torch.Tensor], dy: torch.Tensor, dfinal: torch.Tensor) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = gated_delta_rule(*leaves[:5], initial_state=leaves[5], output_final_state=True, normalize=True)
    return [*(o.detach() for o in outputs if o is not None), *torch.autograd.grad(outputs, leaves, (dy, dfinal))]


@too_slow_emulated
@each_device
@each_dtype
def test_strided_inputs(dtype: torch.dtype, device: str) -> None:
    """Slices of wider rows, aligned and not, heads before tokens, one token for all, columns far from each other: the
    bits of dense inputs."""
    given_ = list(inputs((2, 70, 2, 4, 16, 24), dtype, device).values())
    dense = [t.contiguous() for t in given_]
    dy, dfinal = random_tensor((2, 70, 4, 24), dtype, device), random_tensor((2, 4, 16, 24), torch.float32, device)
    want = results(dense, dy, dfinal)

    def wider(t: torch.Tensor, before: int) -> torch.Tensor:
        room = t.new_zeros(*t.shape[:-1], t.shape[-1] + before + 3)
        room[..., before : before + t.shape[-1]] = t
        return room[..., before : before + t.shape[-1]]

    layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: wider(t, 8),
        lambda t: wider(t, 1),
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    ]
    for layout in layouts:
        for one, other in zip(results([layout(t) for t in dense], layout(dy), layout(dfinal)), want, strict=True):
            assert_same_bits(one, other)
    for one, other in zip(results(given_, dy, dfinal), want, strict=True):
        assert_same_bits(one, other)
    same, expanded = [t[:, :1].expand(-1, 70, *t.shape[2:]) for t in dense[:5]], dy[:, :1, :1, :1].expand_as(dy)
    for one, other in zip(
        results([*same, dense[5]], expanded, dfinal),
        results([*[t.contiguous() for t in same], dense[5]], expanded.contiguous(), dfinal),
        strict=True,
    ):
        assert_same_bits(one, other)


@too_slow_emulated
@each_device
@each_dtype
def test_each_gradient_alone_and_again(dtype: torch.dtype, device: str) -> None:
    """The same bits whatever else is wanted, and at each repetition."""
    tensors = list(inputs((2, 70, 1, 2, 16, 16), dtype, device).values())
    dy = random_tensor((2, 70, 2, 16), dtype, device)
    whole: list[torch.Tensor] = []
    for wanted in (tuple(range(6)), tuple(range(6)), *[(i,) for i in range(6)], (0, 2), (1, 3, 5)):
        leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        y, _ = gated_delta_rule(*leaves[:5], initial_state=leaves[5], normalize=True)
        got = torch.autograd.grad(y, [leaves[i] for i in wanted], dy)
        whole = whole or list(got)
        for i, gradient in zip(wanted, got, strict=True):
            assert_same_bits(gradient, whole[i])


@each_device
def test_kinds_of_results(device: str) -> None:
    """y is contiguous and of v's type, states float32, gradients of their tensors' types and shapes."""
    given_ = inputs((2, 70, 1, 2, 16, 24), torch.bfloat16, device, of_beta=torch.float16)
    given_["g"] = given_["g"].to(torch.bfloat16)
    given_["initial"] = given_["initial"].to(torch.bfloat16)
    leaves = [t.detach().requires_grad_() for t in given_.values()]
    y, last = gated_delta_rule(*leaves[:5], initial_state=leaves[5], output_final_state=True)
    assert last is not None
    assert y.is_contiguous()
    assert y.dtype is torch.bfloat16
    assert last.dtype is torch.float32
    assert last.shape == given_["initial"].shape
    for leaf, gradient in zip(leaves, torch.autograd.grad((y, last), leaves, (y, last)), strict=True):
        assert gradient.dtype is leaf.dtype
        assert gradient.shape == leaf.shape


@each_device
@pytest.mark.parametrize("shape", [(0, 6, 1, 2, 4, 5), (2, 0, 1, 2, 4, 5)], ids=str)
def test_nothing_to_do(shape: Shape, device: str) -> None:
    """No sequence; sequences without tokens, behind which the state is what it was, and its gradient too."""
    leaves = [t.detach().requires_grad_() for t in inputs(shape, torch.float32, device).values()]
    y, last = gated_delta_rule(*leaves[:5], initial_state=leaves[5], output_final_state=True)
    assert last is not None
    assert y.shape == leaves[2].shape
    assert torch.equal(last, leaves[5])
    upstream = random_tensor(last.shape, torch.float32, device)
    gradients = torch.autograd.grad((y, last), leaves, (torch.zeros_like(y), upstream))
    assert torch.equal(gradients[5], upstream)
    assert [t.shape for t in gradients] == [t.shape for t in leaves]


def test_a_token_without_a_number_reaches_what_it_reaches_in_transformers() -> None:
    """Its chunk, within which all is products of matrices, and what follows; no other head, nor sequence."""
    given_ = inputs((2, 140, 1, 2, 8, 8), torch.float32, "cpu")
    given_["v"] = given_["v"].clone()
    given_["v"][1, 70, 1] = torch.nan
    tensors = [given_[name] for name in NAMES[:5]]
    got = gated_delta_rule(*tensors, output_final_state=True, normalize=True)
    want = stock_function()(*tensors, output_final_state=True, use_qk_l2norm_in_kernel=True)
    for one, other in zip(got, want, strict=True):
        assert one is not None
        assert one.isnan().any()
        assert not (one.isnan() & ~other.isnan()).any()


@each_device
def test_a_second_differentiation_is_an_error(device: str) -> None:
    leaves = [t.detach().requires_grad_() for t in inputs((1, 5, 1, 1, 4, 4), torch.float32, device).values()]
    y, last = gated_delta_rule(*leaves[:5], initial_state=leaves[5], output_final_state=True)
    assert last is not None
    for result in (y, last):
        (dk,) = torch.autograd.grad(result.square().sum(), leaves[1], create_graph=True)
        with pytest.raises(RuntimeError, match="gated_delta_rule"):
            dk.sum().backward()


def test_what_no_kernel_serves_runs_the_original() -> None:
    """float64; wide heads; keys of another type than values."""
    given_ = list(inputs((1, 5, 1, 2, 6, 7), torch.float32, "cpu").values())
    wide = [t.double() for t in given_]
    y, last = gated_delta_rule(*wide[:5], initial_state=wide[5], output_final_state=True, normalize=True)
    want = definition(*wide, normalize=True)
    torch.testing.assert_close((y, last), want)
    for shape in ((1, 3, 1, 1, 129, 4), (1, 3, 1, 1, 4, 257)):
        large = list(inputs(shape, torch.float32, "cpu").values())
        got, none = gated_delta_rule(*large[:5], normalize=True)
        assert none is None
        assert torch.equal(got, _original(*large[:5], None, None, shape[4] ** -0.5, False, False, 1e-6)[0])
    mixed = [given_[0], given_[1].bfloat16(), *given_[2:5]]
    assert torch.equal(gated_delta_rule(*mixed)[0], _original(*mixed, None, None, 6**-0.5, False, False, None)[0])


def test_errors_name_the_argument() -> None:
    q, k, v, g, beta, state = inputs((1, 5, 2, 4, 6, 7), torch.float32, "cpu").values()
    for bad, message in (
        ((q[0], k, v, g, beta), r"q has shape \[5, 2, 6\]; 4 dimensions are needed"),
        ((q, k[:, :4], v, g, beta), r"k has shape \[1, 4, 2, 6\]"),
        ((q, k[..., :5], v, g, beta), r"k has shape \[1, 5, 2, 5\]"),
        ((q, k, v[:, :4], g, beta), r"v has shape \[1, 4, 4, 7\]"),
        ((q, k, v[:, :, :3], g[..., :3], beta[..., :3]), "v has 3 heads and q 2; a multiple is needed"),
        ((q, k, v, g[..., :3], beta), r"g has shape \[1, 5, 3\]"),
        ((q, k, v, g, beta[:, :2]), r"beta has shape \[1, 2, 4\]"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            gated_delta_rule(*bad)
    with pytest.raises((ValueError, RuntimeError), match=r"initial has shape \[1, 4, 6, 6\]"):
        gated_delta_rule(q, k, v, g, beta, initial_state=state[..., :6])
    with pytest.raises((ValueError, RuntimeError), match="eps is -1"):
        gated_delta_rule(q, k, v, g, beta, normalize=True, eps=-1.0)
    with pytest.raises(TypeError, match=r"beta is torch.int64"):
        gated_delta_rule(q, k, v, g, beta.long())
    with pytest.raises(TypeError, match="g is a int"):
        gated_delta_rule(q, k, v, 3, beta)  # type: ignore[arg-type]


@each_dtype
def test_autocast(dtype: torch.dtype) -> None:
    """Nothing is rounded to its type: the bits are those without it, as the original's result has its inputs' type."""
    tensors = list(inputs((1, 70, 1, 2, 16, 16), dtype, "cpu").values())
    want = gated_delta_rule(*tensors[:5], output_final_state=True, normalize=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = gated_delta_rule(*tensors[:5], output_final_state=True, normalize=True)
    for one, other in zip(got, want, strict=True):
        assert one is not None
        assert other is not None
        assert_same_bits(one, other)


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("initial", [True, False])
def test_compiled_in_one_graph(final: bool, initial: bool) -> None:
    given_ = inputs((1, 70, 1, 2, 8, 8), torch.float32, "cpu")
    leaves = [given_[name].clone().requires_grad_() for name in NAMES[: 6 if initial else 5]]

    def function(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None) -> Any:
        y, last = gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=final, normalize=True)
        return (y.transpose(1, 2).contiguous(), last) if final else (y.transpose(1, 2).contiguous(),)

    compiled, plain = torch.compile(function, fullgraph=True)(*leaves), function(*leaves)
    of_both = [torch.autograd.grad(sum(t.square().sum() for t in ts), leaves) for ts in (compiled, plain)]
    for got, want in zip((*compiled, *of_both[0]), (*plain, *of_both[1]), strict=True):
        assert_same_bits(got.detach(), want.detach())
