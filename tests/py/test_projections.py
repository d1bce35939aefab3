"""Projections of one input against float64 and against the linear layers that they stand for, alone and in Qwen3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import linear
from torch.nn.modules import module as hooks_on_all
from torch.utils.checkpoint import checkpoint

import bastile
from bastile.ops._modules import plain_linear
from bastile.ops.projections import projections
from bastile.ops.rms_norm import rms_norm
from bastile.recompute import recomputing
from conftest import assert_same_up_to_rounding, gradients, tiny_batch, tiny_model
from hooks import HOOKS
from memory import Memory, Peak, kept_by
from oracle import DTYPES, Case, assert_no_worse, assert_same_bits, devices, few_examples, random_tensor

ADDS = ("aten.add.Tensor", "aten.add_.Tensor")


class Shard(torch.Tensor):
    """As sharding, quantisation and others make of weights."""


def stock(x, *weights):
    return tuple(linear(x, weight) for weight in weights)


def exact(x, *weights):
    return tuple(x @ weight.T for weight in weights)


def inputs(shape, widths, dtype=torch.float32, device="cpu") -> list[torch.Tensor]:
    """x, and weights that keep the size of their input, as trained ones do."""
    weights = [random_tensor((width, shape[-1]), dtype, device, scale=shape[-1] ** -0.5) for width in widths]
    return [random_tensor(shape, dtype, device), *weights]


def case(tensors) -> Case:
    return Case(projections, stock, exact, {name: t for name, t in zip("xabcd", tensors, strict=False)})


def leaves_of(tensors, frozen=()):
    return [t.detach().requires_grad_(i not in frozen) for i, t in enumerate(tensors)]


def upstream_of(outputs):
    return [random_tensor(o.shape, o.dtype, o.device) for o in outputs]


def is_one_node(outputs) -> bool:
    """Whether one node is behind all outputs."""
    return len(outputs) > 1 and len({o.grad_fn for o in outputs}) == 1


# The shape of x and the widths of the weights: each row has its reason.
SHAPES = [
    ((2, 9, 64), (128, 32, 32)),  # queries, and fewer keys and values
    ((2, 99, 64), (512, 8, 8)),  # small terms behind a large one: a sum that begins with it rounds more than autograd's
    ((24, 64), (96, 96)),  # gate and up; rows without a batch
    ((2, 3, 4, 16), (8, 24, 1, 5)),  # four weights, a narrow one
    ((1, 1, 32), (16, 8, 8)),  # one token
    ((2, 0, 16), (8, 4)),  # no token
    ((3, 1), (2, 3)),  # the narrowest input
    ((5, 16), (8,)),  # one weight
    ((7, 33), (17, 9, 3)),  # odd
    ((16,), (8, 4)),  # one dimension
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "widths"), SHAPES, ids=str)
def test_matches_float64_as_well_as_stock(shape, widths, dtype, device):
    assert_no_worse(case(inputs(shape, widths, dtype, device)))


@few_examples
@given(
    rows=st.integers(0, 40),
    width=st.integers(1, 130),
    widths=st.lists(st.integers(1, 130), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from(devices()),
    batched=st.booleans(),
)
def test_any_shape(rows, width, widths, dtype, device, batched):
    assert_no_worse(case(inputs((2, rows, width) if batched else (rows, width), widths, dtype, device)))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_outputs_and_the_weights_gradients_are_the_layers_bits(dtype, device):
    tensors = inputs((2, 9, 64), (128, 32, 32), dtype, device)
    ours, theirs = leaves_of(tensors), leaves_of(tensors)
    outputs, wanted = projections(*ours), stock(*theirs)
    assert is_one_node(outputs)
    upstream = upstream_of(outputs)
    torch.autograd.backward(outputs, upstream)
    torch.autograd.backward(wanted, upstream)
    for got, want in zip(outputs, wanted, strict=True):
        assert_same_bits(got, want)
    for got, want in zip(ours[1:], theirs[1:], strict=True):
        assert_same_bits(got.grad, want.grad)


def calls_of(run: Callable[[], Any]) -> list[str]:
    with Memory() as memory:
        run()
    return memory.calls


def test_products_add_up_the_gradient_and_nothing_else_does():
    tensors = inputs((2, 9, 64), (128, 32, 32))
    counts = {}
    for function in (projections, stock):
        outputs = function(*leaves_of(tensors))
        upstream = upstream_of(outputs)
        calls = calls_of(lambda o=outputs, u=upstream: torch.autograd.backward(o, u))
        counts[function] = [sum(call in ADDS for call in calls), calls.count("aten.addmm_.default")]
        assert not [call for call in calls if "clone" in call or "copy" in call]
    assert counts == {projections: [0, 2], stock: [2, 0]}


@pytest.mark.parametrize("device", devices())
def test_the_backward_pass_holds_no_second_gradient_of_x(device):
    x, *weights = leaves_of(inputs((64, 256), (8, 8, 8), device=device), frozen=(1, 2, 3))
    most = {}
    for function in (projections, stock):
        outputs = function(x, *weights)
        upstream = upstream_of(outputs)
        with Peak() as peak:
            torch.autograd.grad(outputs, x, upstream)
        most[function] = peak.most
    assert most[projections] == x.nbytes
    assert most[stock] >= 2 * x.nbytes


# ---- parts of it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("frozen", [(1,), (2, 3), (1, 2, 3), (0,), (0, 2)], ids=str)
def test_frozen_parts_get_no_gradient_and_the_others_theirs(frozen, device):
    tensors = inputs((2, 5, 32), (16, 8, 8), torch.bfloat16, device)
    every, some = leaves_of(tensors), leaves_of(tensors, frozen)
    outputs = projections(*some)
    assert is_one_node(outputs) == (0 not in frozen)
    # An output of frozen parts alone asks for no gradient: attention then computes none.
    assert [o.requires_grad for o in outputs] == [0 not in frozen or i not in frozen for i in (1, 2, 3)]
    upstream = upstream_of(outputs)
    torch.autograd.backward(projections(*every), upstream)
    flowing = [(o, u) for o, u in zip(outputs, upstream, strict=True) if o.requires_grad]
    torch.autograd.backward([o for o, _ in flowing], [u for _, u in flowing])
    for i, (leaf, twin) in enumerate(zip(some, every, strict=True)):
        assert (leaf.grad is None) == (i in frozen)
        if i not in frozen:
            assert_same_bits(leaf.grad, twin.grad)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("used", [(0,), (2,), (0, 2), (1, 2)], ids=str)
def test_an_output_that_nobody_uses_takes_no_part(used, device):
    tensors = inputs((2, 5, 32), (16, 8, 8), device=device)
    ours, theirs = leaves_of(tensors), leaves_of(tensors)
    outputs, wanted = projections(*ours), stock(*theirs)
    upstream = upstream_of(outputs)
    calls = calls_of(
        lambda: torch.autograd.backward([outputs[i] for i in used], [upstream[i] for i in used]),
    )
    torch.autograd.backward([wanted[i] for i in used], [upstream[i] for i in used])
    assert calls.count("aten.mm.default") + calls.count("aten.addmm_.default") == 2 * len(used)
    for i, (got, want) in enumerate(zip(ours, theirs, strict=True)):
        assert (got.grad is None) == (want.grad is None) == (i > 0 and i - 1 not in used)
        if got.grad is not None:
            torch.testing.assert_close(got.grad, want.grad)


def test_no_gradient_at_all():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            return tuple(t.clone() for t in tensors)

        @staticmethod
        def backward(ctx, *_):
            return None, None

    leaves = leaves_of(inputs((5, 16), (8, 4)))
    sum(o.sum() for o in Nothing.apply(*projections(*leaves))).backward()
    assert [leaf.grad for leaf in leaves] == [None] * 3
    with torch.no_grad():
        assert not any(o.requires_grad for o in projections(*leaves))


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_keeps_its_inputs_each_once_and_only_what_is_read():
    def saved(leaves):
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.data_ptr()) or t, lambda t: t):
            projections(*leaves)
        return found

    tensors = inputs((2, 5, 32), (16, 8, 8))
    leaves = leaves_of(tensors)
    assert saved(leaves) == [t.data_ptr() for t in leaves]
    leaves = leaves_of(tensors, frozen=(1, 2, 3))
    assert saved(leaves) == [t.data_ptr() for t in leaves[1:]]


@pytest.mark.parametrize("device", devices())
def test_a_norm_s_output_is_dropped_and_made_again_once(device):
    x, *weights = inputs((2, 9, 48), (16, 8, 8), torch.bfloat16, device)
    x, factor, *weights = leaves = leaves_of([x, random_tensor((48,), torch.bfloat16, device), *weights])

    def run():
        return sum(o.float().square().sum() for o in projections(rms_norm(x, factor), *weights))

    plain = torch.autograd.grad(run(), leaves)
    kept = kept_by(run)
    with recomputing():
        loss = run()
        assert kept - kept_by(run) == x.nbytes
    with Memory() as memory:
        got = torch.autograd.grad(loss, leaves)
    assert sum("rms_norm_forward" in call for call in memory.calls) == 1
    for a, b in zip(got, plain, strict=True):
        assert_same_bits(a, b)


def layouts(dy):
    """The same gradient in other memory orders that a product can read, and one that only a copy can give it."""
    yield dy.contiguous(), 0
    yield torch.cat((dy, dy), -1)[..., : dy.shape[-1]], 0  # a part of wider rows
    yield dy.mT.contiguous().mT, 0 if dy.dim() == 2 else 1  # columns lie together
    if dy.dim() == 3:
        yield dy.transpose(0, 1).contiguous().transpose(0, 1), 1  # rows out of order


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("shape", [(10, 32), (2, 5, 32)], ids=str)
def test_upstream_gradients_are_read_where_they_lie(shape, device):
    leaves = leaves_of(inputs(shape, (16, 8), device=device))
    outputs = projections(*leaves)
    upstream = upstream_of(outputs)
    want = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    for pair in zip(*(layouts(dy) for dy in upstream), strict=True):
        with Memory() as memory:
            got = torch.autograd.grad(outputs, leaves, [dy for dy, _ in pair], retain_graph=True)
        assert sum("clone" in call or "copy" in call for call in memory.calls) == sum(copies for _, copies in pair)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)


@pytest.mark.parametrize("device", devices())
def test_inputs_of_any_strides(device):
    base, *weights = inputs((4, 6, 40), (16, 8), device=device)
    for x in (base.transpose(0, 1), base[:, ::2], base[..., 3:], base.mT.contiguous().mT, base[:1].expand(4, 6, 40)):
        fitting = [w[:, : x.shape[-1]] for w in weights]
        assert_no_worse(case([x, *fitting]))
        assert_no_worse(case([x, *[w.mT.contiguous().mT for w in fitting]]))


@pytest.mark.parametrize("device", devices())
def test_expanded_upstream_gradient(device):
    """`y.sum().backward()` sends a gradient whose strides are all zero; products may choose another kernel for it."""
    leaves = leaves_of(inputs((2, 5, 32), (16, 8), device=device))
    outputs = projections(*leaves)
    first = torch.autograd.grad(sum(o.sum() for o in outputs), leaves, retain_graph=True)
    for g, w in zip(first, torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs]), strict=True):
        torch.testing.assert_close(g, w)


# ---- what else may happen to a graph ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
def test_a_retained_graph_gives_the_same_again_and_inputs_are_left_alone(device):
    tensors = inputs((2, 9, 32), (16, 8, 8), torch.bfloat16, device)
    leaves = leaves_of(tensors)
    outputs = projections(*leaves)
    upstream = upstream_of(outputs)
    kept = [t.clone() for t in (*tensors, *upstream)]
    first = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(outputs, leaves, upstream), strict=True):
        assert_same_bits(a, b)
    for a, b in zip((*tensors, *upstream), kept, strict=True):
        assert_same_bits(a, b)


def test_second_derivatives():
    leaves = leaves_of(inputs((2, 3, 4), (5, 2, 3), torch.float64))
    assert is_one_node(projections(*leaves))
    assert torch.autograd.gradcheck(projections, leaves)
    assert torch.autograd.gradgradcheck(projections, leaves)


def test_outputs_may_be_changed_in_place():
    tensors = inputs((2, 5, 16), (8, 4))
    got, want = [], []
    for function, results in ((projections, got), (stock, want)):
        leaves = leaves_of(tensors)
        a, b = function(*leaves)
        a.mul_(2)
        (a.square().sum() + b.sum()).backward()
        results += [leaf.grad for leaf in leaves]
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def test_a_weight_changed_in_place_is_an_error():
    leaves = leaves_of(inputs((2, 5, 16), (8, 4)))
    outputs = projections(*leaves)
    with torch.no_grad():
        leaves[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(outputs, leaves, upstream_of(outputs))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant, device):
    leaves = leaves_of(inputs((2, 5, 32), (16, 8, 8), device=device))
    plain = projections(*leaves)
    upstream = upstream_of(plain)
    want = torch.autograd.grad(plain, leaves, upstream)
    torch.autograd.backward(checkpoint(projections, *leaves, use_reentrant=reentrant), upstream)
    for leaf, w in zip(leaves, want, strict=True):
        assert_same_bits(leaf.grad, w)


def test_functorch_runs_the_layers_own_code():
    x, *weights = inputs((2, 5, 16), (8, 4))

    def loss(x, *weights):
        return sum(o.square().sum() for o in projections(x, *weights))

    got = torch.func.grad(loss, argnums=(0, 1, 2))(x, *weights)
    leaves = leaves_of((x, *weights))
    for g, w in zip(got, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(g, w)
    assert torch.vmap(lambda row: projections(row, *weights)[0])(x).shape == (2, 5, 8)


def test_subclasses_of_tensors_run_the_layers_own_code():
    for i in range(3):
        leaves = inputs((2, 5, 16), (8, 4))
        leaves[i] = leaves[i].as_subclass(Shard)
        assert not is_one_node(projections(*leaves_of(leaves)))


def test_other_devices_run_the_layers_own_code():
    leaves = leaves_of([t.to("meta") for t in inputs((2, 5, 16), (8, 4))])
    outputs = projections(*leaves)
    assert [o.shape for o in outputs] == [(2, 5, 8), (2, 5, 4)]
    assert not is_one_node(outputs)


def test_bad_input_is_named_as_a_linear_layer_names_it():
    x, a, b = leaves_of(inputs((2, 5, 16), (8, 4)))
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(10x16 and 15x4\)"):
        projections(x, a, b[:, 1:])
    with pytest.raises(RuntimeError, match="dtype"):
        projections(x, a, b.bfloat16())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("frozen", [(), (2,), (1, 2, 3)], ids=str)
def test_compiles_without_a_break(frozen, device):
    torch._dynamo.reset()
    _, *weights = leaves_of(inputs((1, 1, 32), (16, 8, 8), device=device), frozen)

    def attention_inputs(x, *weights):
        return projections(x * 2, *weights)

    compiled = torch.compile(attention_inputs, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        x = random_tensor((2, rows, 32), torch.float32, device).requires_grad_()
        wanted = [x, *[w for w in weights if w.requires_grad]]
        for used in ((0, 1, 2), (0, 2)):
            results = []
            for function in (compiled, attention_inputs):
                outputs = function(x, *weights)
                loss = sum(outputs[i].pow(i + 2).sum() for i in used)
                results.append([*outputs, *torch.autograd.grad(loss, wanted, allow_unused=True)])
            for got, want in zip(*results, strict=True):
                if want is None:  # the compiler makes zeros of it
                    assert got is None or not got.any()
                else:
                    assert_same_bits(got, want)


# ---- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16])
def test_autocast_is_that_of_linear_layers(x, weights, device):
    tensors = inputs((2, 9, 32), (16, 8, 8), torch.float32, device)
    tensors = [t.to(weights if i else x) for i, t in enumerate(tensors)]

    def cast(function):
        def run(*leaves):
            with torch.autocast(device, torch.bfloat16):
                return function(*leaves)

        return run

    outputs = cast(projections)(*leaves_of(tensors))
    assert is_one_node(outputs)
    for got, want in zip(outputs, cast(stock)(*leaves_of(tensors)), strict=True):
        assert_same_bits(got, want)
    assert_no_worse(Case(cast(projections), cast(stock), exact, dict(zip("xabc", tensors, strict=True))))


@pytest.mark.parametrize("device", devices())
def test_a_backward_pass_within_autocast_keeps_the_types_of_the_forward_pass(device):
    leaves = leaves_of(inputs((2, 9, 32), (16, 8, 8), device=device))
    outputs = projections(*leaves)
    upstream = upstream_of(outputs)
    want = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    with torch.autocast(device, torch.bfloat16):
        got = torch.autograd.grad(outputs, leaves, upstream)
    for g, w in zip(got, want, strict=True):
        assert_same_bits(g, w)


# ---- which layers it may stand for -----------------------------------------------------------------------------------


class Counted(nn.Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + 1


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Louder(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _own_forward(layer: nn.Module) -> None:
    layer.forward = lambda x: torch.tanh(linear(x, layer.weight))


def _subclass(layer: nn.Module) -> None:
    layer.__class__ = Louder


def _parametrised(layer: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())


def _bias(layer: nn.Module) -> None:
    layer.bias = nn.Parameter(torch.randn(layer.out_features))


CHANGES = [*HOOKS, _own_forward, _subclass, _parametrised, _bias]


@pytest.mark.parametrize("whole_process", [True, False])
@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__.strip("_") for change in CHANGES])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_changed_projection_is_called(
    name: str, change: Callable[[nn.Module], None], whole_process: bool, calls: dict[str, int]
) -> None:
    model = tiny_model()
    change(model.model.layers[0].self_attn.get_submodule(name))
    loss = model(**tiny_batch(model)).loss
    loss.backward()
    want = gradients(model)
    bastile.apply() if whole_process else bastile.apply_to_model(model)
    got = model(**tiny_batch(model)).loss
    got.backward()
    # The other layer's are one operator; with a bias these are too.
    assert (calls["projections"], calls["qk_norm_rope"]) == (1 + (change is _bias), 2)
    assert_same_up_to_rounding(got, loss, model, "loss")
    for name, gradient in gradients(model).items():
        assert_same_up_to_rounding(gradient, want[name], model, name)


@pytest.fixture
def hook_on_all_modules(request: pytest.FixtureRequest) -> Iterator[list[nn.Module]]:
    seen: list[nn.Module] = []
    handle = request.param(lambda module, *_: seen.append(module))
    yield seen
    handle.remove()


@pytest.mark.parametrize(
    "hook_on_all_modules",
    [
        hooks_on_all.register_module_forward_hook,
        hooks_on_all.register_module_forward_pre_hook,
        hooks_on_all.register_module_full_backward_hook,
        hooks_on_all.register_module_full_backward_pre_hook,
    ],
    ids=lambda register: register.__name__,
    indirect=True,
)
def test_hooks_on_all_modules_see_the_projections(hook_on_all_modules: list[nn.Module], calls: dict[str, int]) -> None:
    model = tiny_model()
    bastile.apply()
    model(**tiny_batch(model)).loss.backward()
    assert "projections" not in calls
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            assert layer.self_attn.get_submodule(name) in hook_on_all_modules


def test_plain_layers_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(4, 3, bias=False)
    assert plain_linear(layer)
    assert not plain_linear(nn.Linear(4, 3))
    assert not plain_linear(nn.Identity())
    assert not plain_linear(Counted(4, 3, bias=False))
    sharded = nn.Linear(4, 3, bias=False)
    sharded.weight = nn.Parameter(torch.ones(3, 4).as_subclass(Shard))
    assert type(sharded.weight) is not nn.Parameter
    assert not plain_linear(sharded)
    with monkeypatch.context() as patch:  # as libraries of quantised products do
        patch.setattr(nn.Linear, "forward", lambda self, x: x)
        assert not plain_linear(layer)
    assert plain_linear(layer)


@pytest.mark.parametrize(("targets", "fused"), [(["q_proj"], 0), (["o_proj", "up_proj"], 2)])
def test_adapters_are_called(targets: list[str], fused: int, calls: dict[str, int]) -> None:
    def adapted() -> Any:
        torch.manual_seed(3)
        model = tiny_model()
        model.enable_input_require_grads()
        return get_peft_model(model, LoraConfig(target_modules=targets, r=4, init_lora_weights=False))

    model = adapted()
    batch = tiny_batch(model)
    model(**batch).loss.backward()
    want = gradients(model)
    bastile.apply()
    model(**batch).loss.backward()
    assert calls.get("projections", 0) == fused
    got = gradients(model)
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        assert_same_up_to_rounding(gradient, want[name], model, name)


def test_a_model_s_backward_pass_has_two_additions_less_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    bastile.apply()

    def additions() -> int:
        loss = model(**batch).loss
        model.zero_grad(set_to_none=True)
        return sum(call in ADDS for call in calls_of(loss.backward))

    got = additions()
    monkeypatch.setattr(bastile.models.attention, "linears", lambda x, layers: [layer(x) for layer in layers])
    assert additions() - got == 2 * 2
