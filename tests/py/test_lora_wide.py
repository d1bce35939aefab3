"""Adapters of float32 beside a model of bfloat16 that is trained without autocast: on every device at hand, and on a
CPU by the pieces of a GPU's products too. See test_lora.py, whose cases have such a mix of types among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bastile.ops import _wide_adapters, low_rank
from bastile.ops._wide_adapters import _Run, in_pieces, split
from bastile.ops.lora import Adapted, adapted_linears
from oracle import Case, assert_no_worse, assert_no_worse_pooled, devices, random_tensor
from test_lora import GROUPS, MLPS, WIDE, Layer, group_case, mlp_case, peft


@pytest.fixture(autouse=True)
def by_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a GPU, whose products of bfloat16 have results in float32. Counts them."""
    count: list[int] = []

    def product(dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert (dtype, a.dtype, b.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
        count.append(1)
        return a.float() @ b.float() if a.is_cpu else torch.mm(a, b, out_dtype=torch.float32)

    monkeypatch.setattr(_wide_adapters, "has_float32_sums", lambda factor: True)
    monkeypatch.setattr(_wide_adapters, "product", product)
    return count


@pytest.fixture(params=["two products", "one product"])
def within(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the adapter's part is summed up within the large product, as on Hopper."""
    if request.param == "one product":

        def linear_into(x: Any, weight: Any, thin: Any, b: Any, bias: Any, y: Any, scale: float) -> None:
            assert thin.dtype is b.dtype is torch.bfloat16
            total = x.float() @ weight.float().t() + scale * (thin.float() @ b.float().t())
            y.copy_(total if bias is None else total + bias.float())

        monkeypatch.setattr(_wide_adapters, "is_one_product", lambda *_: True)
        monkeypatch.setattr(low_rank, "fills", lambda y: True)
        monkeypatch.setattr(low_rank, "linear_into", linear_into)
    return request.param


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("shape", "layers"), GROUPS, ids=str)
def test_groups(shape: Any, layers: Any, device: str, within: str) -> None:
    assert_no_worse(group_case([Layer(shape[-1], *layer) for layer in layers], shape, WIDE, device))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("shape", "widths", "ranks"), MLPS, ids=str)
def test_mlps(shape: Any, widths: Any, ranks: Any, device: str) -> None:
    assert_no_worse(mlp_case(widths, ranks, shape, WIDE, device))


#: Times the error of float32's own product, which is some 1e-7, that A's and B's gradients may have: tensor cores cut
#: off where they sum.
TIMES = {"cpu": 1.0, "cuda": 2.0}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("ranks", [(16, 8, 32), (64, 16, 24)], ids=str)
def test_pooled_errors(device: str, ranks: tuple[int, ...], within: str, by_pieces: list[int]) -> None:
    """The rule itself. A's and B's gradients are off by float32's rounding alone, as PEFT's are."""
    layers = [Layer(128, 96, ranks[0], bias=False), Layer(128, 64, ranks[1], bias=True), Layer(128, 64, 0, bias=False)]

    def group() -> Case:
        return group_case(layers, (256, 128), WIDE, device)

    trained = ("d0 a", "d0 b", "d1 a", "d1 b")
    others = tuple({"dx", "output 0", "output 1", "output 2", *[f"d{name}" for name in group().inputs]} - {*trained})
    assert_no_worse_pooled(group, others)
    assert_no_worse_pooled(group, trained, times=TIMES[device])
    assert_no_worse_pooled(lambda: mlp_case((128, 192), ranks, (256, 128), WIDE, device))
    assert by_pieces


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("ranks", [[24], [8, 8, 8], [3, 16, 5], [0, 24]], ids=str)
def test_pieces(device: str, ranks: list[int]) -> None:
    """Three of bfloat16 are a number of float32, in columns that are all of a matrix or a part of it."""
    runs, begin = [], 0
    for rank in ranks:
        runs.append(_Run(slice(begin, begin + rank), rank))
        begin += rank
    runs = [_Run(slice(0, 24), 8)] if len({*ranks}) == 1 else runs
    matrix = random_tensor((40, 32), torch.float32, device)
    for each in (matrix[:, 8:], matrix[:, 3:27], matrix[:, :24].contiguous(), matrix[:, :24] * 1e-20):
        made = in_pieces(each, runs)
        assert made.dtype is torch.bfloat16
        assert made.shape == (40, 72)
        repeated, added = torch.empty_like(made), torch.empty(40, 24, device=device)
        split(each, runs, repeated=repeated)
        split(made.float(), runs, sum=added, scale=0.5)
        assert torch.equal(added, each * 0.5)
        for run in runs:
            mine, whole = made[:, run.wide], each[:, run.columns].unflatten(1, (-1, run.rank)) if run.rank else None
            if whole is None:
                continue
            in_three = mine.unflatten(1, (-1, 3, run.rank))
            assert torch.equal(in_three.double().sum(2), whole.double())
            assert torch.equal(in_three[:, :, 0].float(), (whole.view(torch.int32) & ~0xFFFF).view(torch.float32))
            rounded = repeated[:, run.wide].unflatten(1, (-1, 3, run.rank))
            assert all(torch.equal(rounded[:, :, i], whole.bfloat16()) for i in range(3))


@pytest.mark.parametrize("device", devices())
def test_pieces_of_several_at_once(device: str) -> None:
    """Under vmap, by which autograd makes several gradients at once."""
    matrices = random_tensor((5, 40, 24), torch.float32, device)
    runs = [_Run(slice(0, 24), 8)]
    made = torch.vmap(lambda matrix: in_pieces(matrix, runs))(matrices)
    assert torch.equal(made.unflatten(2, (-1, 3, 8)).double().sum(3).flatten(2), matrices.double())


@pytest.mark.parametrize("device", devices())
def test_dropout_is_exact_too(device: str) -> None:
    """What stays is divided by 1 - p in float32: with the mask that was drawn, results and gradients are PEFT's."""
    x = random_tensor((64, 48), torch.bfloat16, device).requires_grad_()
    given = Layer(48, 32, 8, bias=False).inputs("", torch.bfloat16, torch.float32, device)
    tensors = [t.requires_grad_() for t in given.values()]
    layer = Adapted(tensors[0], None, tensors[1], tensors[2], 2.0, 0.3)
    masks: list[torch.Tensor] = []

    def watched(rows: Any, seed: Any, p: float) -> Any:
        masks.append(drop(rows, seed, p) != 0)
        return drop(rows, seed, p)

    drop = _wide_adapters.drop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_wide_adapters, "drop", watched)
        (y,) = adapted_linears(x, [layer])
        dy = random_tensor((64, 32), torch.bfloat16, device)
        found = torch.autograd.grad(y, tensors[1:], dy)
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    mask = masks[0]

    def masked(rows: torch.Tensor, p: float) -> torch.Tensor:
        return rows * mask / (1 - p)

    right = torch.autograd.grad(
        peft(
            x.double(),
            Adapted(*[t.double() for t in layer[:1]], None, *[t.double() for t in layer[2:4]], 2.0, 0.3),
            masked,
        ),
        tensors[1:],
        dy.double(),
    )
    for mine, exact in zip(found, right, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)
