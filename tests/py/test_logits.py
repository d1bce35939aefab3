"""Logits on demand: what is followed to the fused loss, what makes logits, and that nobody can tell but by memory."""

import copy
import io
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import bastile
from bastile.models.logits import Logits, losses, serve
from bastile.models.logits.said import counts
from bastile.ops.fused_linear_cross_entropy import set_logits_memory
from conftest import on_demand

T, H, V = 160, 16, 101  # rows enough for three chunks of the fused loss


class Largest(TorchDispatchMode):
    """The most elements of any tensor with a vocabulary in its shape, as it is or in whole vectors, made within."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and not tensor.is_meta
                and not {V, (V + 7) // 8 * 8}.isdisjoint(tensor.shape)
            ):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.fixture(autouse=True)
def counted_from_here() -> Iterator[None]:
    counts.clear()
    yield
    set_logits_memory(None)


def ran() -> int:
    return sum(count for (event, _, _), count in counts.items() if event == "ran")


def made() -> int:
    """How often somebody's reading made logits."""
    return sum(count for (event, _, _), count in counts.items() if event != "ran")


class Net(nn.Module):
    """Something before a head, so that gradients of hidden states are seen too."""

    def __init__(self, dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body, self.head = nn.Linear(H, H, dtype=dtype), nn.Linear(H, V, bias=bias, dtype=dtype)
        with torch.no_grad():
            self.head.weight.mul_(4)
        self.x = torch.randn(2, T // 2, H, dtype=dtype)
        self.labels = torch.randint(0, V, (2, T // 2))
        self.labels[:, :3] = -100
        self.served = False

    def forward(self) -> torch.Tensor:
        undo = serve(self.head) if self.served else lambda: None
        try:
            return self.head(self.body(self.x))
        finally:
            undo()


def both(run: Callable[[torch.Tensor, Net], Any], **options: Any) -> tuple[Any, Any]:
    """run(logits, net) and the gradients behind what it returns, with a head as it is and with one put off."""
    results = []
    for served in (False, True):
        net = Net(**options)
        net.served = served
        logits = net()
        assert isinstance(logits, Logits) == (served and net.x.dtype is not torch.float64)
        found = run(logits, net)
        found = found if isinstance(found, tuple) else (found,)
        wanted = [t.float().sum() for t in found if t.requires_grad]
        torch.stack(wanted).sum().backward() if wanted else None
        results.append([t.detach() for t in found] + [p.grad for p in net.parameters() if wanted])
    return results[0], results[1]


def assert_alike(run: Callable[[torch.Tensor, Net], Any], tolerance: float = 1e-5, **options: Any) -> None:
    want, got = both(run, **options)
    for a, b in zip(got, want, strict=True):
        assert type(a) is not Logits
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


def shifted(logits: torch.Tensor, net: Net) -> torch.Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, V), net.labels[..., 1:].reshape(-1))


def flat(z: torch.Tensor) -> torch.Tensor:
    return z.reshape(-1, V)


def targets(net: Net) -> torch.Tensor:
    return net.labels.reshape(-1)


def capped(z: torch.Tensor, cap: float = 3.0) -> torch.Tensor:
    return torch.tanh(z / cap) * cap


def without_grad(run: Callable[[], Any]) -> None:
    with torch.no_grad():
        run()


BIAS = torch.linspace(-1, 1, V)
CLASSES = torch.linspace(0.5, 2, V)
FUSED: dict[str, Callable[[torch.Tensor, Net], Any]] = {
    "plain": lambda z, n: F.cross_entropy(flat(z), targets(n)),
    "float": lambda z, n: F.cross_entropy(flat(z.float()), targets(n)),
    "to": lambda z, n: F.cross_entropy(flat(z.to(torch.float32).to("cpu").to(n.x.device)), targets(n)),
    "shifted": shifted,
    "view -1": lambda z, n: F.cross_entropy(z.view(-1, z.size(-1)), targets(n)),
    "flatten": lambda z, n: F.cross_entropy(z.flatten(0, 1), targets(n)),
    "flatten, torch": lambda z, n: F.cross_entropy(torch.flatten(z, end_dim=-2), targets(n)),
    "all of the vocabulary": lambda z, n: F.cross_entropy(flat(z[:, :, :V]), targets(n)),
    "Ellipsis": lambda z, n: F.cross_entropy(flat(z[..., :]), targets(n)),
    "one row": lambda z, n: F.cross_entropy(z[1], n.labels[1]),
    "selected rows": lambda z, n: F.cross_entropy(z[n.labels != -100], n.labels[n.labels != -100]),
    "None": lambda z, n: F.cross_entropy(flat(z[None, 0, 2:]), n.labels[0, 2:]),
    "squeezed": lambda z, n: F.cross_entropy(z[:1].squeeze(0).unsqueeze(0)[0], n.labels[0]),
    "split": lambda z, n: sum(
        F.cross_entropy(p, t, reduction="sum") for p, t in zip(flat(z).split(7), targets(n).split(7), strict=True)
    ),
    "chunk, unbind": lambda z, n: tuple(
        F.cross_entropy(p, t) for c, l in zip(z.chunk(2, dim=1), n.labels.chunk(2, 1), strict=True)
        for p, t in zip(c.unbind(), l, strict=True) if (t != -100).any()
    ),
    "iterated": lambda z, n: torch.stack([F.cross_entropy(p, t) for p, t in zip(z, n.labels, strict=True)]),
    "narrow": lambda z, n: F.cross_entropy(z.narrow(1, 3, 4).select(0, 1), n.labels[1, 3:7]),
    "transposed": lambda z, n: F.cross_entropy(z.transpose(1, 2), n.labels),
    "transposed and copied": lambda z, n: F.cross_entropy(z.transpose(1, 2).contiguous().float(), n.labels),
    "permuted": lambda z, n: F.cross_entropy(z.float().permute(0, 2, 1), n.labels, reduction="none"),
    "time first": lambda z, n: F.cross_entropy(
        z.transpose(0, 1).contiguous().view(-1, V), n.labels.transpose(0, 1).reshape(-1)
    ),
    "time first, flattened": lambda z, n: F.cross_entropy(
        z.float().permute(1, 0, 2).reshape(-1, V)[2:], n.labels.t().reshape(-1)[2:]
    ),
    "streams first": lambda z, n: F.nll_loss(
        z[:, None].transpose(0, 1).contiguous().view(-1, V).log_softmax(-1), targets(n)
    ),
    "scaled": lambda z, n: F.cross_entropy(flat(z * 0.3), targets(n)),
    "divided": lambda z, n: F.cross_entropy(flat(2 * z / 1.7), targets(n)),
    "softcap": lambda z, n: F.cross_entropy(flat(capped(z / 2)), targets(n)),
    "softcap in two": lambda z, n: F.cross_entropy(flat(z.div(4).tanh().mul(4).float()), targets(n)),
    "bias beside": lambda z, n: F.cross_entropy(flat(z + BIAS[None]), targets(n)),
    "in place": lambda z, n: F.cross_entropy(flat(z.div_(1.5).mul_(0.5)), targets(n)),
    "weight": lambda z, n: F.cross_entropy(flat(z), targets(n), weight=CLASSES.to(z.dtype)),
    "smoothed": lambda z, n: F.cross_entropy(flat(z), targets(n), label_smoothing=0.1),
    "sum": lambda z, n: F.cross_entropy(flat(z), targets(n), reduction="sum") / 17,
    "none": lambda z, n: F.cross_entropy(flat(z), targets(n), reduction="none").view(2, -1),
    "module": lambda z, n: nn.CrossEntropyLoss(ignore_index=3)(flat(z), targets(n).clamp(min=0)),
    "a scalar target": lambda z, n: F.cross_entropy(z[0, 4], n.labels[0, 4]),
    "nll": lambda z, n: F.nll_loss(F.log_softmax(flat(z), dim=-1), targets(n)),
    "log_softmax, gather": lambda z, n: z.log_softmax(-1).gather(2, n.labels.clamp(min=0)[..., None]),
    "log_softmax, gather, torch": lambda z, n: torch.gather(
        torch.log_softmax(capped(z), dim=-1), dim=-1, index=n.labels.clamp(min=0)[..., None]
    ),
    "gather": lambda z, n: torch.gather((z + BIAS) * 0.7, -1, n.labels.clamp(min=0)[..., None]),
    "means": lambda z, n: ((z.detach() * 0.7)[0].mean(), torch.mean((z + BIAS).float()), z[n.labels > 30].mean()),
    "chosen": lambda z, n: F.cross_entropy(flat(z.index_select(1, torch.tensor([5, 3, 5]))), targets(n)[: 2 * 3]),
    "means of rows": lambda z, n: (z.detach().mean(-1), torch.mean(z * 2, dim=2)),
    "logsumexp": lambda z, n: (torch.logsumexp(capped(z), dim=-1), z.logsumexp(-1, keepdim=True)),
    "two losses": lambda z, n: (shifted(z, n), F.cross_entropy(flat(z * 2), targets(n), reduction="sum")),
}  # fmt: skip


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", FUSED)
def test_losses_run_fused_and_make_nothing(name: str, bias: bool) -> None:
    """Against the same code on logits; nothing of their size is made."""
    assert_alike(FUSED[name], bias=bias)
    assert made() == 0, counts
    assert ran() >= (name not in ("gather", "means", "means of rows"))
    net = Net(bias=bias)
    net.served = True
    set_logits_memory(1e-3)
    with Largest() as largest:
        results = FUSED[name](net(), net)
        results = results if isinstance(results, tuple) else (results,)
        sum(result.sum() for result in results).backward()
    assert largest.elements < T * V // 2, "gradients of the weight have V * H"


READ: dict[str, Callable[[torch.Tensor, Net], Any]] = {
    "squared": lambda z, n: z.square(),
    "softmax": lambda z, n: F.softmax(z, -1),
    "matmul": lambda z, n: z[:, :-1] @ torch.ones(V, 3),
    "argmax of everything": lambda z, n: z.argmax(),
    "part of the vocabulary": lambda z, n: F.cross_entropy(z[..., :50].reshape(-1, 50), targets(n).clamp(max=49)),
    "masked": lambda z, n: z.masked_fill(BIAS > 0, -1.0).exp(),
    "assigned": lambda z, n: z.index_fill_(-1, torch.tensor([2, 5]), 0.0) * 1.5,
    "assigned to a part": lambda z, n: (z[:, 2:4].mul_(3), z * 2)[1],
    "a part written after a view": lambda z, n: (lambda view: (z[0].zero_(), view * 2)[1])(z.view(-1, V)),
    "a view sees what is written": lambda z, n: (lambda view: (z.mul_(3), view + z[..., :1].sum())[1])(z.view(-1, V)),
    "nor one of another order": lambda z, n: (lambda other: (other.mul_(3), z.exp())[1])(z.mT.contiguous()),
    "nor a transposed one": lambda z, n: (lambda other: (other.mul_(3), z * 2)[1])(z.transpose(1, 2).contiguous()),
    "nor one with time first": lambda z, n: (lambda other: (other.mul_(3), z * 2)[1])(z.transpose(0, 1).reshape(-1, V)),
    "but one that is turned does": lambda z, n: (lambda other: (z.mul_(3), other + z[:1, :1])[1])(z.transpose(0, 1)),
    "a copy does not": lambda z, n: (lambda other: (z.mul_(3), other - z)[1])(z.clone()),
    "scaled by a tensor": lambda z, n: F.cross_entropy(flat(z * torch.tensor(0.3)), targets(n)),
    "clamped": lambda z, n: F.cross_entropy(flat(z.clamp(max=1.0)), targets(n)),
    "cap after cap": lambda z, n: F.cross_entropy(flat(capped(capped(z), 2.0)), targets(n)),
    "probabilities as targets": lambda z, n: F.cross_entropy(flat(z), torch.full((T, V), 1 / V)),
    "entropy": lambda z, n: -(z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(-1),
    "the gradient of a part": lambda z, n: z[0, 3:7].exp(),
    "concatenated": lambda z, n: torch.cat([z, z], 0)[1:],
    "stacked": lambda z, n: torch.stack([z[0], z[1]]),
    "detached and written": lambda z, n: (z.detach().mul_(2), z.exp())[1],
    "written without a gradient": lambda z, n: (without_grad(lambda: z.div_(2)), z.exp())[1],
    "unpacked": lambda z, n: [p.exp() for p in z][1],
    "a loss and values": lambda z, n: (shifted(z, n), z.square().mean()),
    "out": lambda z, n: (torch.add(z.detach(), 1, out=torch.empty(2, T // 2, V)), z * z),
    "mean of a cap": lambda z, n: capped(z).mean(),
    "mean of positions": lambda z, n: z.mean(1),
    "transposed and read": lambda z, n: z.transpose(1, 2).exp(),
    "gathered twice": lambda z, n: z.gather(-1, torch.zeros(2, T // 2, 2, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", READ)
def test_everything_else_reads_them(name: str) -> None:
    assert_alike(READ[name])
    assert made() >= 1


@pytest.mark.parametrize("name", [name for name in FUSED if "one row" not in name])
def test_bfloat16_is_as_near_to_float32_as_stock(name: str) -> None:
    """Sums of half as many bits: two roundings of the largest value, and what stock itself is off by."""
    exact, _ = both(FUSED[name])
    want, got = both(FUSED[name], dtype=torch.bfloat16)
    for a, b, e in zip(got, want, exact, strict=True):
        assert a.dtype == b.dtype
        allowed = 2 * (b - e).abs().max() + 2**-6 * e.abs().max()
        assert (a - e).abs().max() <= allowed


# ---- what can be asked without values --------------------------------------------------------------------------------


def put_off(**options: Any) -> tuple[torch.Tensor, Net]:
    net = Net(**options)
    net.served = True
    return net(), net


def test_shape_and_type_are_known_without_values() -> None:
    z, net = put_off()
    net.served = False
    real = net()
    for ask in (
        lambda t: (t.shape, t.size(), t.size(-1), t.dim(), t.ndim, len(t), t.numel(), t.nbytes, t.element_size()),
        lambda t: (t.dtype, t.device, t.is_cuda, t.layout, t.is_floating_point(), torch.is_tensor(t), t.get_device()),
        lambda t: (t.requires_grad, t.grad_fn is None, t.is_leaf, t.stride(), t.is_contiguous(), t.retains_grad),
        lambda t: (t.detach().requires_grad, t.detach().grad_fn, t[:, 1:].shape, t.float().dtype, t.half().dtype),
        lambda t: (
            t.transpose(1, 2).shape,
            t.new_zeros(3).shape,
            t[..., None, 0, :].shape,
            t.view(-1, V).requires_grad,
        ),
    ):
        assert ask(z) == ask(real)
    with torch.no_grad():
        assert (z.float().requires_grad, z[0].requires_grad) == (real.float().requires_grad, real[0].requires_grad)
    assert on_demand(z)
    assert made() == 0


def test_the_best_class_of_each_row_needs_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_PIECE", 64)
    z, net = put_off(bias=True)
    real = net.head(net.body(net.x))
    with Largest() as largest:
        got = z[..., :-1, :].contiguous().argmax(dim=-1), torch.argmax(z / 2, -1, keepdim=True)
    assert largest.elements == 64 * V
    assert torch.equal(got[0], real[:, :-1].argmax(-1))
    assert torch.equal(got[1], real.argmax(-1, keepdim=True))
    assert made() == 0


def test_values_are_made_once_and_by_the_heads_own_call() -> None:
    z, net = put_off()
    real = net.head(net.body(net.x))
    assert torch.equal(z, real)
    value = z.read()
    assert z.read() is value
    assert torch.equal(z.view(-1, V)[3], real.view(-1, V)[3])
    assert z.view(-1, V).data_ptr() == value.data_ptr()


def test_parts_are_made_by_themselves_until_that_is_more_work() -> None:
    z, _ = put_off()
    for piece in z.view(-1, V).split(64):
        with Largest() as largest:
            assert piece.exp().shape[-1] == V
        assert largest.elements == piece.numel()
        assert on_demand(z)
    _ = z[0, 0].exp()
    assert not on_demand(z)


def test_gradients_are_sent_into_them_without_being_read() -> None:
    """As C++ does, which asks no Python method."""
    for send in (
        lambda z, g: torch.autograd.backward(z, g),
        lambda z, g: z.backward(g),
        lambda z, g: torch.ops.aten.mul.Tensor(z, g).sum().backward(),
        lambda z, g: Passed.apply(z).backward(g),
        lambda z, g: (Passed.apply(z) * g).sum().backward(),
    ):
        grads = []
        for served in (False, True):
            net = Net(bias=True)
            net.served = served
            z = net()
            send(z, torch.linspace(0, 1, z.numel()).view(z.shape))
            grads.append([p.grad for p in net.parameters()])
        torch.testing.assert_close(grads[1], grads[0])


class Passed(torch.autograd.Function):
    """As wrappers for sharding and data parallelism do with what a model returns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g


class Through(torch.autograd.Function):
    """As a sharding's that wants to be asked in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g


def test_functions_of_autograd_that_hand_them_on() -> None:
    want = put_off()
    shifted(*want).backward()
    for function in (Through, Passed):
        z, net = put_off()
        on = function.apply(z)
        assert on_demand(on)
        assert on.requires_grad
        shifted(on, net).backward()
        torch.testing.assert_close(net.head.weight.grad, want[1].head.weight.grad)
        torch.testing.assert_close(net.body.weight.grad, want[1].body.weight.grad)


def test_hooks_and_retained_gradients() -> None:
    seen = []
    for served in (False, True):
        net = Net()
        net.served = served
        z = net()
        handle = z.register_hook(lambda g: seen.append(g) or 2 * g)
        z.register_hook(lambda g: seen.append(g)).remove()
        assert not on_demand(z)
        z.retain_grad()
        F.cross_entropy(flat(z), targets(net)).backward()
        seen.append(z.grad)
        seen.append(net.head.weight.grad)
        handle.remove()
    for a, b in zip(seen[:3], seen[3:], strict=True):
        torch.testing.assert_close(a, b)


def test_below_the_python_functions_they_are_their_values() -> None:
    """Such as the gathering of DataParallel's replicas."""
    z, net = put_off()
    with torch._C.DisableTorchFunctionSubclass():
        got = torch.cat([z, z])
    assert type(got) is torch.Tensor
    real = net.head(net.body(net.x))
    assert torch.equal(got, torch.cat([real, real]))
    got.sum().backward()
    want = torch.autograd.grad(2 * real.sum(), net.head.weight)[0]
    torch.testing.assert_close(net.head.weight.grad, want)


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_pickles_and_copies_are_plain_tensors() -> None:
    z, net = put_off()
    real = net.head(net.body(net.x)).detach()
    buffer = io.BytesIO()
    torch.save({"logits": z.detach()}, buffer)
    assert b"bastile" not in buffer.getvalue()
    buffer.seek(0)
    for copied in (torch.load(buffer)["logits"], pickle.loads(pickle.dumps(z.detach())), copy.deepcopy(z.detach())):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, real)
    with pytest.raises(RuntimeError, match="deepcopy"):  # as of any tensor that is no leaf
        copy.deepcopy(z)
    assert np.array_equal(z.detach().numpy(), real.numpy())
    assert z[0, 0].tolist() == real[0, 0].tolist()


def test_a_model_with_a_head_being_served_is_copied_and_pickled() -> None:
    net = Net()
    undo = serve(net.head)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with torch.no_grad():
            twin.head.weight.zero_()
        assert not twin().exp().sub(1).any()
    undo()
    assert type(net.head(net.x)) is torch.Tensor
    assert "_call_impl" not in vars(net.head)


# ---- modes -----------------------------------------------------------------------------------------------------------


def test_autocast_is_as_it_was_at_the_heads_call() -> None:
    """Accelerate's wrapper ends it before the loss is computed, and casts what the model returns."""
    results = []
    for served in (False, True):
        net = Net()
        net.served = served
        with torch.autocast("cpu", torch.bfloat16):
            z = net()
        assert z.dtype is torch.bfloat16
        loss = shifted(z.float(), net)
        loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            inside = F.cross_entropy(flat(net()), targets(net))
        assert loss.dtype is inside.dtype is torch.float32
        results.append((loss.detach(), inside.detach(), net.head.weight.grad, z.detach().float() + 0))
    assert ran() == 2
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7 * b.abs().max().item())
    torch.testing.assert_close(results[0][3], results[1][3], rtol=0, atol=0)


def test_a_second_backward_pass_over_a_kept_graph() -> None:
    z, net = put_off()
    loss = shifted(z, net)
    loss.backward(retain_graph=True)
    once = net.head.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(net.head.weight.grad, 2 * once)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_head_is_called_at_once(reentrant: bool) -> None:
    grads = []
    for served in (False, True):
        net = Net()
        undo = serve(net.head) if served else lambda: None
        loss = checkpoint(
            lambda h, n=net: F.cross_entropy(flat(n.head(h)), targets(n)), net.body(net.x), use_reentrant=reentrant
        )
        undo()
        loss.backward()
        grads.append(net.head.weight.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_without_gradients_and_detached() -> None:
    z, net = put_off()
    real = net.head(net.body(net.x))
    with torch.no_grad():
        loss = shifted(z, net)
    assert not loss.requires_grad
    assert not shifted(z.detach(), net).requires_grad
    torch.testing.assert_close(loss, shifted(real, net).detach())
    with torch.no_grad():
        assert not z.exp().requires_grad
    assert z.exp().requires_grad
    with torch.inference_mode():
        assert type(put_off()[0]) is torch.Tensor


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        net = Net()
        net.served = True
        loss = shifted(net(), net)
        loss.backward()
        assert net.head.weight.grad.shape == (V, H)
    assert made() == 0


def test_a_loss_that_someone_compiles() -> None:
    z, net = put_off()
    torch.compiler.reset()
    got = torch.compile(shifted, backend="eager")(z, net)
    torch.testing.assert_close(got, shifted(net.head(net.body(net.x)), net))


# ---- what cannot be made any more, and what is said ------------------------------------------------------------------


def test_weights_that_have_changed_are_an_error_by_name() -> None:
    """A step of an optimizer between forward and reading: what could be made would be other logits, in silence."""
    z, net = put_off()
    loss = shifted(z, net)
    loss.backward()
    early = put_off()[0] + 0
    torch.optim.SGD(net.parameters(), lr=1.0).step()
    with pytest.raises(RuntimeError, match=r"not read before the output head changed in place.*optimizer's step"):
        z.exp()
    assert early.shape == z.shape
    z, net = put_off()
    with torch.no_grad():
        z.pending.rows.zero_()
    with pytest.raises(RuntimeError, match="not read before the hidden states changed in place"):
        z.exp()


def test_readers_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "bastile")
    bastile.report(reset=True)  # what other tests have said
    for _ in range(2):
        z, net = put_off()
        z.exp()
        F.cross_entropy(flat(put_off()[0].tanh().tanh()), targets(net))
    name = "a head served alone"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", f"all logits of {name} are made: exp reads them"),
        (
            "WARNING",
            f"fused_linear_cross_entropy steps aside in {name}: tanh after other steps; the original code runs",
        ),
        ("DEBUG", f"all logits of {name} are made: cross_entropy reads them"),
    ]


@pytest.mark.parametrize("change", ["forward", "hook", "gradient hook", "subclass", "float64"])
def test_a_head_that_is_more_than_a_weight_is_called(change: str, caplog: pytest.LogCaptureFixture) -> None:
    def changed() -> Net:
        net = Net()
        if change == "forward":
            net.head.forward = lambda x: F.linear(x, net.head.weight) - 1
        elif change == "hook":
            net.head.register_forward_hook(lambda module, inputs, output: output * 2)
        elif change == "gradient hook":
            net.head.register_full_backward_hook(lambda module, grads, outputs: tuple(3 * g for g in grads))
        elif change == "subclass":
            net.head.__class__ = type(
                "Halved", (nn.Linear,), {"forward": lambda self, x: nn.Linear.forward(self, x) / 2}
            )
        else:
            net.double()
            net.x = net.x.double()
        return net

    want, net = changed()(), changed()
    net.served = True
    got = net()
    assert type(got) is torch.Tensor
    assert torch.equal(got, want)
    assert ("output head" in caplog.text) == (change != "float64")
