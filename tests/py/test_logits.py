"""Logits on demand: what is followed to the fused loss, what makes logits, and that nobody can tell but by memory."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bastile.models.logits import Logits, serve
from bastile.models.logits.said import counts
from bastile.ops.fused_linear_cross_entropy import set_logits_memory

T, H, V = 160, 16, 101  # rows enough for three chunks of the fused loss


class Largest(TorchDispatchMode):
    """The most elements of any tensor that was made within."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
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
    "permuted": lambda z, n: F.cross_entropy(z.float().permute(0, 2, 1), n.labels, reduction="none"),
    "scaled": lambda z, n: F.cross_entropy(flat(z * 0.3), targets(n)),
    "divided": lambda z, n: F.cross_entropy(flat(2 * z / 1.7), targets(n)),
    "softcap": lambda z, n: F.cross_entropy(flat(capped(z / 2)), targets(n)),
    "softcap in two": lambda z, n: F.cross_entropy(flat(z.div(4).tanh().mul(4).float()), targets(n)),
    "bias beside": lambda z, n: F.cross_entropy(flat(z + BIAS[None]), targets(n)),
    "in place": lambda z, n: F.cross_entropy(flat(z.div_(1.5).mul_(0.5)), targets(n)),
    "weight": lambda z, n: F.cross_entropy(flat(z), targets(n), weight=CLASSES),
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
    "logsumexp": lambda z, n: (torch.logsumexp(capped(z), dim=-1), z.logsumexp(-1, keepdim=True)),
    "two losses": lambda z, n: (shifted(z, n), F.cross_entropy(flat(z * 2), targets(n), reduction="sum")),
}  # fmt: skip


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", FUSED)
def test_losses_run_fused_and_make_nothing(name: str, bias: bool) -> None:
    """Against the same code on logits; nothing of their size is made."""
    assert_alike(FUSED[name], bias=bias)
    assert made() == 0, counts
    assert ran() >= (name != "gather")
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
    "argmax": lambda z, n: z.argmax(-1),
    "part of the vocabulary": lambda z, n: F.cross_entropy(z[..., :50].reshape(-1, 50), targets(n).clamp(max=49)),
    "masked": lambda z, n: z.masked_fill(BIAS > 0, -1.0).exp(),
    "assigned": lambda z, n: z.index_fill_(-1, torch.tensor([2, 5]), 0.0) * 1.5,
    "assigned to a part": lambda z, n: (z[:, 2:4].mul_(3), z * 2)[1],
    "a part written after a view": lambda z, n: (lambda view: (z[0].zero_(), view * 2)[1])(z.view(-1, V)),
    "a view sees what is written": lambda z, n: (lambda view: (z.mul_(3), view + z[..., :1].sum())[1])(z.view(-1, V)),
    "a copy does not": lambda z, n: (lambda other: (z.mul_(3), other - z)[1])(z.clone()),
    "scaled by a tensor": lambda z, n: F.cross_entropy(flat(z * torch.tensor(0.3)), targets(n)),
    "clamped": lambda z, n: F.cross_entropy(flat(z.clamp(max=1.0)), targets(n)),
    "cap after cap": lambda z, n: F.cross_entropy(flat(capped(capped(z), 2.0)), targets(n)),
    "probabilities as targets": lambda z, n: F.cross_entropy(flat(z), torch.full((T, V), 1 / V)),
    "entropy": lambda z, n: -(z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(-1),
    "the gradient of a part": lambda z, n: z[0, 3:7].exp(),
    "concatenated": lambda z, n: torch.cat([z, z], 0)[1:],
    "stacked": lambda z, n: torch.stack([z[0], z[1]]),
    "unpacked": lambda z, n: [p.exp() for p in z][1],
    "a loss and values": lambda z, n: (shifted(z, n), z.square().mean()),
    "out": lambda z, n: (torch.add(z.detach(), 1, out=torch.empty(2, T // 2, V)), z * z),
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
