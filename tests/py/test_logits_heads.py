"""Logits on demand of models with several output heads, whose logits are stacked."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bastile
from bastile.models import small
from bastile.models.logits import serve
from bastile.models.logits.stacked import Stacked
from conftest import gradients, on_demand
from test_logits import Largest, counted_from_here, made, ran  # noqa: F401

T, H, V, BOOKS = 40, 16, 101, 3


class Net(nn.Module):
    """Something before several heads, so that gradients of hidden states are seen too."""

    def __init__(self, along: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.along, self.served = along, False
        self.body, self.heads = nn.Linear(H, H), nn.ModuleList(nn.Linear(H, V, bias=i > 0) for i in range(BOOKS))
        self.x, self.labels = torch.randn(2, T, H), torch.randint(0, V, (2, T, BOOKS))
        self.labels[:, :3, 1] = -100

    def forward(self) -> torch.Tensor:
        undo = [serve(head) for head in self.heads] if self.served else []
        hidden = self.body(self.x)
        logits = torch.stack([head(hidden) for head in self.heads], dim=self.along)
        for take_out in undo:
            take_out()
        return logits


def assert_alike(run: Callable[[torch.Tensor, Net], Any], along: int) -> None:
    """What run(logits, net) returns, with gradients, of heads as they are and of heads that are put off."""
    results = []
    for served in (False, True):
        net = Net(along)
        net.served = served
        logits = net()
        assert isinstance(logits, Stacked) == served
        found = run(logits, net)
        found = found if isinstance(found, tuple) else (found,)
        torch.stack([t.float().square().sum() for t in found if t.requires_grad]).sum().backward()
        results.append([t.detach() + 0 for t in (*found, logits)] + [p.grad for p in net.parameters()])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


def of_books(z: torch.Tensor, along: int) -> list[torch.Tensor]:
    return [z[(slice(None),) * along + (book,)] for book in range(BOOKS)]


def loss_of(pieces: Any, net: Net, first: int = 0) -> torch.Tensor:
    labels = net.labels[:, first:].unbind(-1)
    each = [F.cross_entropy(z.reshape(-1, V), t.reshape(-1)) for z, t in zip(pieces, labels, strict=True)]
    return torch.stack(each).sum()


FUSED: dict[str, Callable[[torch.Tensor, Net], Any]] = {
    "each by its number": lambda z, n: loss_of(of_books(z, n.along), n),
    "unbound": lambda z, n: loss_of(z.unbind(n.along), n),
    "selected": lambda z, n: loss_of([z.select(n.along, book) for book in range(BOOKS)], n),
    "in another type, scaled and capped": lambda z, n: loss_of(
        of_books(torch.tanh(z.to(torch.float32).clone() * 2 / 3.0) * 3.0, n.along), n
    ),
    "the last rows": lambda z, n: loss_of(of_books(z[:, -7:] if n.along == 2 else z[:, :, -7:], n.along), n, T - 7),
    "some heads": lambda z, n: loss_of(
        [*of_books(z, n.along)[:1], *z[(slice(None),) * n.along + (slice(1, None),)].unbind(n.along)], n
    ),
    "chosen rows": lambda z, n: F.cross_entropy(z.select(n.along, 1)[n.labels[..., 1] >= 0], valid(n)),
    "beside other shapes": lambda z, n: (flat(z).float(), loss_of(z.unbind(n.along), n))[1],
    "detached": lambda z, n: (z.detach().select(n.along, 0), loss_of(z.unbind(n.along), n))[1],
}


def valid(net: Net) -> torch.Tensor:
    return net.labels[..., 1][net.labels[..., 1] >= 0]


def flat(z: torch.Tensor) -> torch.Tensor:
    return z.reshape(-1, *z.shape[2:])


@pytest.mark.parametrize("along", [0, 1, 2])
@pytest.mark.parametrize("name", FUSED)
def test_losses_of_each_head_run_fused(name: str, along: int) -> None:
    """Against the same code on logits, which are equal when they are read afterwards; before, none are made."""
    assert_alike(FUSED[name], along)
    assert ran() >= 1
    net = Net(along)
    net.served = True
    logits = net()
    with Largest() as largest:
        FUSED[name](logits, net).backward()
    assert on_demand(logits)
    assert largest.elements <= 2 * T * V, "one head's at a time"


def written(z: torch.Tensor, write: Callable[[torch.Tensor], Any], show: torch.Tensor) -> torch.Tensor:
    write(z)
    return show * 1


def stacked_without_grad(pieces: Any) -> None:
    with torch.no_grad():
        stacked = torch.stack(pieces)
    assert not stacked.requires_grad
    assert not stacked[0].requires_grad


READ: dict[str, Callable[[torch.Tensor, Net], Any]] = {
    "squared": lambda z, n: z.square(),
    "one head's": lambda z, n: z.select(n.along, 1).exp(),
    "one head's rows": lambda z, n: z.select(n.along, 1)[:, 3:5].exp(),
    "in other shapes": lambda z, n: (z.transpose(0, 1).exp(), flat(z)[1:3].exp(), z.flatten(0, 2)[::7].exp()),
    "a view of a view": lambda z, n: flat(z[:, :, 1:].float() / 2).unsqueeze(0)[0, 1].exp(),
    "chosen": lambda z, n: z[z.detach() > 0],
    "behind the vocabulary": lambda z, n: torch.stack(z.unbind(n.along), -1).exp(),
    "stacked again": lambda z, n: torch.stack(z.unbind(n.along), 0)[1:].exp(),
    "a head written": lambda z, n: written(z.select(n.along, 1), lambda one: one.mul_(3), z),
    "a copy of a head written": lambda z, n: written(z.select(n.along, 1).clone(), lambda one: one.mul_(3), z),
    "a head made contiguous and written": lambda z, n: written(
        z.select(n.along, 1).contiguous(), lambda one: one.mul_(3) if n.along else None, z
    ),
    "a part written": lambda z, n: written(z[:, 1:], lambda one: one.zero_(), z.select(n.along, 0)),
    "all written": lambda z, n: written(z, lambda all_of_it: all_of_it.mul_(3), z.select(n.along, 0)),
    "detached and written": lambda z, n: written(z.detach().select(n.along, 0), lambda one: one.mul_(2), z),
    "stacked without a gradient": lambda z, n: (stacked_without_grad(z.unbind(n.along)), z.exp())[1],
    "a loss and a head's values": lambda z, n: (loss_of(z.unbind(n.along), n), z.select(n.along, 0).square()),
    "values and a loss": lambda z, n: (z.exp(), loss_of(z.unbind(n.along), n)),
    "all in one loss": lambda z, n: F.cross_entropy(z.reshape(-1, V), torch.arange(z.numel() // V) % V),
}


@pytest.mark.parametrize("along", [0, 1, 2])
@pytest.mark.parametrize("name", READ)
def test_everything_else_reads_them(name: str, along: int) -> None:
    assert_alike(READ[name], along)
    assert made() >= 1


def test_one_heads_rows_are_made_by_themselves() -> None:
    net = Net(1)
    net.served = True
    logits = net()
    with Largest() as largest:
        logits[:, 2, -1].argmax(-1)
        logits[:, 2].exp()
    assert largest.elements == 2 * T * V
    assert on_demand(logits)


class Passed(torch.autograd.Function):
    """As C++ does, which asks no Python method."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.linspace(-1, 1, x.numel()).view(x.shape)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g * torch.linspace(-1, 1, g.numel()).view(g.shape)


def test_gradients_are_sent_into_them_without_being_read() -> None:
    gradients_of = []
    for served in (False, True):
        net = Net(1)
        net.served = served
        logits = net()
        shown = logits[:, 1:].float()
        Passed.apply(shown.reshape(-1, *shown.shape[2:])).square().sum().backward()
        assert on_demand(logits) == served
        gradients_of.append(gradients(net))
    want, got = gradients_of
    assert want.keys() == got.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item())


TYPES = [name for name in ("musicgen", "musicgen_melody") if name in small.causal_types()]


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("how", ["training", "evaluation", "bfloat16"])
def test_models_of_sound(model_type: str, how: str) -> None:
    """Labels of fewer moments than there are, some of them padding and some -100; the loss is the mean over books."""
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    cls = next(c for name, c in vars(module).items() if name.endswith("ForCausalLM"))
    config = cls.config_class(
        vocab_size=97, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, num_codebooks=2,
        pad_token_id=0, bos_token_id=1, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    model = small.prepared(cls(config)).train(how != "evaluation")
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    books = model.config.num_codebooks
    ids = torch.randint(3, 90, (2 * books, 11), generator=torch.Generator().manual_seed(3))
    labels = ids.view(2, books, 11).transpose(1, 2)[:, 2:].clone()
    labels[0, 2], labels[1, 3, 0] = -100, model.config.pad_token_id

    def step() -> tuple[Any, dict[str, torch.Tensor]]:
        torch.manual_seed(7)  # of dropout
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "bfloat16"):
            output = model(input_ids=ids, labels=labels)
        if how != "evaluation":
            output.loss.backward()
        return output, gradients(model)

    stock, want = step()
    bastile.report(reset=True)
    bastile.apply(**dict.fromkeys(("layer_norm", "add_rms_norm", "recompute"), False))
    output, got = step()
    assert on_demand(output.logits)
    assert (ran(), made()) == (books, 0)
    assert bastile.report().ran("fused_linear_cross_entropy") == books
    assert (output.logits.shape, output.logits.dtype) == (stock.logits.shape, dtype)
    assert torch.equal(output.logits, stock.logits)
    assert torch.equal(copy.deepcopy(output.logits.detach()), stock.logits)
    torch.testing.assert_close(output.loss, stock.loss, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=0)
    assert want.keys() == got.keys()
    for name, gradient in want.items() if dtype is torch.float32 else ():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item())
