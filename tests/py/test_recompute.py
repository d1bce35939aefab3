"""What autograd keeps of our operators' outputs: nothing, where it can be made again; and the gradients to the bit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bastile
from bastile.ops.qk_norm_rope import qk_norm_rope
from bastile.ops.rms_norm import add_rms_norm, rms_norm
from bastile.ops.swiglu import swiglu
from bastile.recompute import offer, recomputing
from conftest import gradients, tiny_batch, tiny_model
from oracle import DTYPES, EMULATED, assert_same_bits, devices, random_tensor


@pytest.fixture(autouse=True)
def at_every_size() -> Iterator[None]:
    bastile.set_recompute(0)
    yield
    bastile.set_recompute(None)


class Memory(TorchDispatchMode):
    """Counts the bytes that tensors made within still hold."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.calls: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(function))
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def kept(self) -> int:
        return sum(size for storage, size in self.storages.values() if not storage.expired())


def kept_by(run: Callable[[], torch.Tensor]) -> int:
    """Bytes that the graph behind a result holds."""
    with Memory() as memory:
        result = run()
    held = memory.kept()
    del result
    return held


# ---- each operator, with what consumes its output -------------------------------------------------------------------


def projected(y: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Each projection keeps y for its weight."""
    return sum(nn.functional.linear(y, weight).float().square().sum() for weight in weights)


def _rms_norm(new: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor], int]:
    def run(x: torch.Tensor, weight: torch.Tensor, *projections: torch.Tensor) -> torch.Tensor:
        return projected(rms_norm(x, weight), *projections)

    return [new(2, 9, 48), new(48), new(8, 48), new(8, 48), new(8, 48)], run, 2 * 9 * 48


def _add_rms_norm(new: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor], int]:
    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *projections: torch.Tensor) -> torch.Tensor:
        y, total = add_rms_norm(x, residual, weight)
        return projected(y, *projections) + total.float().sum()

    return [new(2, 9, 48), new(2, 9, 48), new(48), new(8, 48), new(8, 48)], run, 2 * 9 * 48


def _add_rms_norm_without_residual(
    new: Callable[..., torch.Tensor],
) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor], int]:
    def run(x: torch.Tensor, weight: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
        y, total = add_rms_norm(x, None, weight)
        return projected(y, projection) + total.float().sum()

    return [new(2, 9, 48), new(48), new(8, 48)], run, 2 * 9 * 48


def _swiglu(new: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor], int]:
    return [new(2, 9, 48), new(2, 9, 48), new(8, 48)], lambda a, b, weight: projected(swiglu(a, b), weight), 2 * 9 * 48


def _qk_norm_rope(new: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor], int]:
    cos, sin = new(1, 9, 16).detach(), new(1, 9, 16).detach()

    def run(q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> torch.Tensor:
        q, k = qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), q_weight, k_weight, cos, sin)
        # A product keeps its factors, as attention does, in the memory order of [B, S, heads, D].
        return (q * q).float().sum() + (k * k).float().sum()

    return [new(2, 9, 4, 16), new(2, 9, 2, 16), new(16), new(16)], run, 2 * 9 * 6 * 16


OPERATORS = [_rms_norm, _add_rms_norm, _add_rms_norm_without_residual, _swiglu, _qk_norm_rope]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__.strip("_"))
def test_an_operator_s_output_is_dropped_and_made_again(
    operator: Callable[..., Any], dtype: torch.dtype, device: str
) -> None:
    leaves, run, dropped = operator(lambda *shape: random_tensor(shape, dtype, device).requires_grad_())
    plain = torch.autograd.grad(run(*leaves), leaves)
    with recomputing():
        loss = run(*leaves)
    for want, got in zip(plain, torch.autograd.grad(loss, leaves), strict=True):
        assert_same_bits(want, got)
    before = kept_by(lambda: run(*leaves))
    with recomputing():
        after = kept_by(lambda: run(*leaves))
    assert before - after == dropped * leaves[0].element_size()


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("width", [128, 1000, 4096, 12288])
@pytest.mark.parametrize("device", devices())
def test_a_norm_of_a_sum_is_the_norm_of_the_kept_sum(device: str, width: int, rows: int) -> None:
    """add_rms_norm's output is made again by the norm alone: the two must agree to the bit at every width."""
    if EMULATED and rows * width > 10**5:
        pytest.skip("slow when emulated")
    for dtype in (torch.float32, torch.bfloat16):
        x, residual, weight = (random_tensor(shape, dtype, device) for shape in ((rows, width), (rows, width), width))
        y, total = add_rms_norm(x, residual, weight)
        assert_same_bits(y, rms_norm(total, weight))


# ---- what else may happen to a graph --------------------------------------------------------------------------------


def parameters(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [random_tensor(shape, torch.float32, "cpu").requires_grad_() for shape in shapes]


def norm_and_projections(count: int = 3) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A norm and so many projections, recorded with recomputation."""
    leaves = [
        random_tensor(shape, torch.float32, "cpu").requires_grad_() for shape in ((7, 32), (32,), *[(8, 32)] * count)
    ]
    with recomputing():
        loss = projected(rms_norm(leaves[0], leaves[1]), *leaves[2:])
    return leaves, loss


def test_one_output_is_made_once_for_all_that_kept_it() -> None:
    leaves, loss = norm_and_projections(count=3)
    with Memory() as memory:
        loss.backward()
    assert sum("rms_norm_forward" in call for call in memory.calls) == 1
    assert bastile.recompute._thread.last.outputs == ()
    # A part of the graph asks less often than tensors were dropped; nothing is left behind either.
    leaves, loss = norm_and_projections(count=3)
    torch.autograd.grad(loss, leaves[2])
    assert bastile.recompute._thread.last.outputs == ()


def test_a_retained_graph_gives_the_same_gradients_again() -> None:
    leaves, loss = norm_and_projections()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for want, got in zip(first, torch.autograd.grad(loss, leaves), strict=True):
        assert_same_bits(want, got)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_second_derivatives_flow_through_what_is_made_again() -> None:
    """A projection's own second derivative, with respect to the norm's weight, goes through the output it kept."""
    x, weight, projection = parameters((7, 32), (32,), (8, 32))

    def second() -> tuple[torch.Tensor, ...]:
        z = nn.functional.linear(rms_norm(x, weight), projection)
        (first,) = torch.autograd.grad(z.square().sum(), projection, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, weight, projection))

    plain = second()
    with recomputing():
        recomputed = second()
    for want, got in zip(plain, recomputed, strict=True):
        assert want.any()
        assert_same_bits(want, got)


def test_hooks_on_an_output_see_its_gradient() -> None:
    x, weight, projection = parameters((7, 32), (32,), (8, 32))
    seen = []
    with recomputing():
        y = rms_norm(x, weight)
        y.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
        y.retain_grad()
        loss = projected(y, projection)
    loss.backward()
    assert_same_bits(y.grad, 2 * seen[0])


@pytest.mark.parametrize("which", [0, 1])
def test_an_input_changed_in_place_is_an_error_as_autograd_s_is(which: int) -> None:
    leaves, loss = norm_and_projections()
    with torch.no_grad():
        leaves[which].add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* version 0 and is at version 1"):
        torch.autograd.grad(loss, leaves[2:])


def test_any_kept_tensor_changed_in_place_is_an_error() -> None:
    """Autograd itself does not compare versions where hooks are in force."""
    x = torch.ones(4, requires_grad=True)
    with recomputing():
        y = x * 1
        loss = (y * y).sum()
        y.detach().zero_()
    with pytest.raises(RuntimeError, match=r"torch\.float32 tensor of shape \[4\].* modified by an inplace operation"):
        loss.backward()


def test_an_output_changed_in_place_is_kept_as_it_is() -> None:
    x, weight, projection = parameters((7, 32), (32,), (8, 32))

    def run() -> tuple[torch.Tensor, ...]:
        y = rms_norm(x, weight)
        y.mul_(2)
        return torch.autograd.grad(projected(y, projection), (x, weight, projection))

    plain = run()
    with recomputing():
        recomputed = run()
    for want, got in zip(plain, recomputed, strict=True):
        assert_same_bits(want, got)


def test_an_address_used_again_is_not_mistaken_for_the_output() -> None:
    memory = np.ones((7, 32), dtype=np.float32)
    factor = torch.ones(7, 32, requires_grad=True)
    with recomputing():
        output = torch.from_numpy(memory).requires_grad_()
        offer(torch.zeros_like, (factor,), output)
        del output
        memory.fill(3)
        product = torch.from_numpy(memory) * factor
    product.sum().backward()
    assert (factor.grad == 3).all()


@pytest.mark.parametrize(
    ("view", "dropped"),
    [
        (lambda y: y.mT, True),
        (lambda y: y.view(-1), True),
        (lambda y: y.view(7, 4, 8).transpose(0, 1), True),
        (lambda y: y[:3], False),  # a part
        (lambda y: y[:, ::2], False),
        (lambda y: y.expand(2, 7, 32)[0], True),
    ],
)
def test_views_of_an_output(view: Callable[[torch.Tensor], torch.Tensor], dropped: bool) -> None:
    x, weight = parameters((7, 32), (32,))
    factor = torch.ones(view(x.detach()).shape, requires_grad=True)

    def run() -> torch.Tensor:
        return (view(rms_norm(x, weight)) * factor).sum()

    (want,) = torch.autograd.grad(run(), factor)
    with recomputing():
        loss = run()
        after = kept_by(run)
    assert_same_bits(torch.autograd.grad(loss, factor)[0], want)
    assert (kept_by(run) - after == 7 * 32 * 4) == dropped


def test_graphs_that_are_never_walked_are_freed() -> None:
    """A node that held its own output would keep it for ever."""
    x = torch.randn(100, requires_grad=True)
    with Memory() as memory, recomputing():
        y = torch.softmax(x, 0).exp().sum()
    del y
    assert memory.kept() == 0


def test_sparse_tensors_pass() -> None:
    dense = torch.eye(4).requires_grad_()
    with recomputing():
        loss = torch.sparse.mm(torch.eye(4).to_sparse(), dense).square().sum()
    loss.backward()
    assert torch.equal(dense.grad, 2 * torch.eye(4))


# ---- stepping aside -------------------------------------------------------------------------------------------------


def test_other_hooks_have_the_tensors_for_themselves() -> None:
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel())
        return tensor.detach()

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    for outer, inner in ((hooks, recomputing()), (recomputing(), hooks)):
        seen.clear()
        leaves = parameters((7, 32), (32,), (8, 32))
        with outer, inner:
            loss = projected(rms_norm(leaves[0], leaves[1]), leaves[2])
            assert not bastile.recompute._thread.offers
        assert seen.count(7 * 32) == 2  # the norm's input and its output
        loss.backward()
    assert bastile.recompute._thread.offers is None


def test_nothing_happens_without_gradients_or_under_transforms() -> None:
    x, weight = torch.randn(3, 32), torch.ones(32)
    with torch.no_grad(), recomputing():
        assert bastile.recompute._thread.offers is None
    with recomputing():
        rms_norm(x, weight)  # requires no gradient, so the operator keeps nothing either
        assert bastile.recompute._thread.offers == {}

    def function(x: torch.Tensor) -> torch.Tensor:
        with recomputing():
            return rms_norm(x, weight).square().sum()

    assert torch.func.grad(function)(x).shape == x.shape


def test_threads_do_not_see_each_other_s_outputs() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(30):
                leaves = [torch.randn(shape, requires_grad=True) for shape in ((7, 32), (32,), (8, 32))]
                want = torch.autograd.grad(projected(rms_norm(leaves[0], leaves[1]), leaves[2]), leaves)
                with recomputing():
                    loss = projected(rms_norm(leaves[0], leaves[1]), leaves[2])
                for one, other in zip(want, torch.autograd.grad(loss, leaves), strict=True):
                    assert_same_bits(one, other)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


# ---- models ---------------------------------------------------------------------------------------------------------


def with_and_without(run: Callable[[], Any]) -> tuple[Any, Any]:
    bastile.set_recompute(10**9)
    without = run()
    bastile.set_recompute(0)
    return without, run()


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_s_gradients_are_the_same_bits(dtype: torch.dtype, adapted: bool, checkpointing: bool | None) -> None:
    model: Any = tiny_model(dtype=dtype)
    batch = tiny_batch(model)
    bastile.apply()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    if adapted:
        model.enable_input_require_grads()
        targets = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(target_modules=targets, r=4, init_lora_weights=False))

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        output = model(**batch, use_cache=False)
        output.loss.backward()
        return output.loss.detach(), gradients(model)

    (want_loss, want), (loss, got) = with_and_without(run)
    assert_same_bits(loss, want_loss)
    assert want.keys() == got.keys()
    for name in want:
        assert_same_bits(got[name], want[name])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_a_model_keeps_so_much_less(adapted: bool, device: str) -> None:
    """In each layer two outputs of norms and one of SwiGLU; with adapters these are what the adapters keep."""
    model: Any = tiny_model().to(device)
    batch = {name: value.to(device) for name, value in tiny_batch(model).items()}
    bastile.apply(qk_norm_rope=False)
    if adapted:
        model.enable_input_require_grads()
        targets = ["q_proj", "k_proj", "gate_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(target_modules=targets, r=4))
    without, with_recomputation = with_and_without(lambda: kept_by(lambda: model(**batch).loss))
    assert without - with_recomputation == 2 * (2 * 32 + 48) * batch["input_ids"].numel() * 4


def test_attention_keeps_no_rotated_queries_and_keys() -> None:
    """With as many heads of keys as of queries, and no cache of keys, attention keeps them as they are."""
    model = tiny_model(num_key_value_heads=4)
    batch = tiny_batch(model)
    bastile.apply()
    without, with_recomputation = with_and_without(lambda: kept_by(lambda: model(**batch, use_cache=False).loss))
    assert without - with_recomputation == 2 * (2 * 32 + 48 + 2 * 4 * 16) * batch["input_ids"].numel() * 4


def test_what_outputs_are_made_from_goes_with_the_backward_pass() -> None:
    """When the first layer's gradients come, nothing that the last layer kept is left."""
    model: Any = tiny_model()
    batch = tiny_batch(model)
    bastile.apply()
    kept: list[StorageWeakRef] = []
    left: list[bool] = []

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
        kept.append(StorageWeakRef(output.untyped_storage()))

    def look(weight: torch.Tensor) -> None:
        left.append(kept[-1].expired())

    model.model.layers[-1].mlp.gate_proj.register_forward_hook(keep)
    model.model.layers[0].mlp.gate_proj.weight.register_post_accumulate_grad_hook(look)
    with_and_without(lambda: model(**batch, use_cache=False).loss.backward())
    assert left == [True, True]


def test_gradients_under_autocast() -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    bastile.apply()

    def run() -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        return gradients(model)

    want, got = with_and_without(run)
    for name in want:
        assert_same_bits(got[name], want[name])


def test_only_from_so_many_tokens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    bastile.apply()

    def kept() -> int:
        return kept_by(lambda: model(**batch).loss)

    assert batch["input_ids"].numel() == 22
    bastile.set_recompute(23)
    everything = kept()
    bastile.set_recompute(22)
    assert kept() < everything
    bastile.set_recompute(None)
    assert kept() == everything  # 2048 unless told otherwise
    monkeypatch.setenv("BASTILE_RECOMPUTE_TOKENS", "22")
    assert kept() < everything
    embeddings = model.model.embed_tokens(batch.pop("input_ids")).detach()
    batch["inputs_embeds"] = embeddings
    less = kept()
    monkeypatch.setenv("BASTILE_RECOMPUTE_TOKENS", "23")
    assert kept() > less
    bastile.reset("recompute_qwen3")
    monkeypatch.setenv("BASTILE_RECOMPUTE_TOKENS", "0")
    assert kept() > less
    monkeypatch.setenv("BASTILE_RECOMPUTE_TOKENS", "few")
    bastile.apply()
    with pytest.raises(ValueError, match="BASTILE_RECOMPUTE_TOKENS is 'few'"):
        model(**batch)
    with pytest.raises(ValueError, match="min_tokens is -1"):
        bastile.set_recompute(-1)


def test_weights_that_zero_3_partitions_are_left_alone() -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    bastile.apply()
    less = kept_by(lambda: model(**batch).loss)
    next(model.model.parameters()).ds_id = 0
    assert kept_by(lambda: model(**batch).loss) > less


def test_a_weight_freed_meanwhile_is_named() -> None:
    leaves, loss = norm_and_projections()
    leaves[1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"shape \[32\].*has been freed.*recompute=False"):
        loss.backward()


def test_an_output_is_kept_where_the_weight_is_freed_at_once() -> None:
    """As sharding does with a norm that is a unit of its own."""
    x, weight, projection = parameters((7, 32), (32,), (8, 32))
    (want,) = torch.autograd.grad(projected(rms_norm(x, weight), projection), projection)
    with recomputing():
        y = rms_norm(x, weight)
        weight.untyped_storage().resize_(0)
        loss = projected(y, projection)
    assert_same_bits(torch.autograd.grad(loss, projection)[0], want)


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_train_alike(whole: bool) -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    bastile.apply()
    model(**batch).loss.backward()
    want = gradients(model)
    if whole:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        compiled = model
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    compiled(**batch, use_cache=False).loss.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-4, atol=1e-6)


def test_nothing_survives_a_step() -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    bastile.apply()
    with Memory() as memory:
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)
    gc.collect()
    for parameter in model.parameters():  # seen through their transposes
        memory.storages.pop(parameter.untyped_storage()._cdata, None)
    assert memory.kept() == 0


# ---- on a GPU -------------------------------------------------------------------------------------------------------

on_a_gpu = pytest.mark.skipif(EMULATED or not torch.cuda.is_available(), reason="needs a GPU")


def norm_gated(x: torch.Tensor, weight: torch.Tensor, *projections: torch.Tensor) -> torch.Tensor:
    y = rms_norm(x, weight)
    return swiglu(*[nn.functional.linear(y, projection) for projection in projections]).square().sum()


@on_a_gpu
@pytest.mark.parametrize("capture", [False, True], ids=["side stream", "graph"])
def test_streams_and_graphs(capture: bool) -> None:
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in parameters((7, 32), (32,), (64, 32), (64, 32))]
    want = torch.autograd.grad(norm_gated(*leaves), leaves)

    def run() -> tuple[torch.Tensor, ...]:
        with recomputing():
            loss = norm_gated(*leaves)
        return torch.autograd.grad(loss, leaves)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run()
    torch.cuda.synchronize()
    if capture:
        with torch.cuda.graph(graph):
            got = run()
        graph.replay()
        torch.cuda.synchronize()
    for one, other in zip(want, got, strict=True):
        assert_same_bits(one, other)


@on_a_gpu
def test_nothing_waits_for_the_device() -> None:
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in parameters((7, 32), (32,), (64, 32), (64, 32))]
    norm_gated(*leaves).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with recomputing():
            loss = norm_gated(*leaves)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
