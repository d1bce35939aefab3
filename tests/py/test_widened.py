"""MLPs of a width that tiles cannot begin at: what they compute is the same, and no copy of a weight is kept."""

import pytest
import torch
from torch.nn.functional import gelu, linear, silu

from bastile.ops import _widened
from bastile.ops.lora import Adapted, adapted_gated_mlp, adapted_mlp
from memory import kept_by
from oracle import Case, assert_no_worse_pooled, devices, random_tensor

ROWS, WIDTH, INNER, RANK = 512, 64, 92, 8


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_widened, "on_gpu", lambda x: True)


def layer(prefix, outputs, inputs, has_bias, has_adapter, device, dtype):
    drawn = {f"{prefix} weight": random_tensor((outputs, inputs), dtype, device, scale=inputs**-0.5)}
    if has_bias:
        drawn[f"{prefix} bias"] = random_tensor((outputs,), dtype, device)
    if has_adapter:
        drawn[f"{prefix} a"] = random_tensor((RANK, inputs), dtype, device, scale=inputs**-0.5)
        drawn[f"{prefix} b"] = random_tensor((outputs, RANK), dtype, device, scale=RANK**-0.5)
    return drawn


def taken(left, has_bias, has_adapter):
    weight = left.pop(0)
    bias = left.pop(0) if has_bias else None
    a, b = (left.pop(0), left.pop(0)) if has_adapter else (None, None)
    return Adapted(weight, bias, a, b, 0.5)


def stock(x, one):
    y = linear(x, one.weight, one.bias)
    return y if one.a is None else y + 0.5 * linear(linear(x, one.a), one.b)


def case_of(gated, has_bias, has_adapter, device, dtype):
    names = ["gate", "up", "down"] if gated else ["up", "down"]
    inputs = {"x": random_tensor((ROWS, WIDTH), dtype, device)}
    for name in names:
        sizes = (WIDTH, INNER) if name == "down" else (INNER, WIDTH)
        inputs |= layer(name, *sizes, has_bias, has_adapter, device, dtype)

    def layers(tensors):
        left = list(tensors)
        return [taken(left, has_bias, has_adapter) for _ in names]

    def ours(x, *tensors):
        return (adapted_gated_mlp if gated else adapted_mlp)(x, *layers(tensors), "silu" if gated else "gelu")

    def theirs(x, *tensors):
        *first, down = layers(tensors)
        y = silu(stock(x, first[0])) * stock(x, first[1]) if gated else gelu(stock(x, first[0]))
        return stock(y, down)

    return Case(ours, theirs, theirs, inputs, independent=WIDTH)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_adapter", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_results_and_gradients(gated, has_bias, has_adapter, dtype, device):
    """All are trained: weights get their zeros where autograd sees it."""
    assert_no_worse_pooled(lambda: case_of(gated, has_bias, has_adapter, device, dtype), draws=4)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("gated", [False, True])
def test_frozen_weights(gated, device, monkeypatch):
    """Are made wide where they are read: the same numbers, and nothing as large is kept."""
    case = case_of(gated, True, True, device, torch.bfloat16)
    case.inputs["x"].requires_grad_()
    tensors = [tensor.requires_grad_(not name.endswith(("weight", "bias"))) for name, tensor in case.inputs.items()]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    made = []
    monkeypatch.setattr(_widened, "_made", lambda *args, make=_widened._made: made.append(1) or make(*args))

    def gradients():
        y = case.ours(*tensors)
        return y.detach(), torch.autograd.grad(y.float().square().sum(), wanted)

    y, found = gradients()
    assert len(made) == (6 if gated else 4)  # each both ways
    monkeypatch.setattr(_widened, "on_gpu", lambda x: False)
    without, without_found = gradients()
    torch.testing.assert_close(y, without, rtol=2e-2, atol=2e-2 * float(without.abs().max()))
    for one, other in zip(found, without_found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


def test_what_is_kept():
    """As much as of a width with eight for a factor."""

    def kept(inner):
        x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        weights = [
            torch.randn(*shape, dtype=torch.bfloat16) for shape in ((inner, WIDTH), (inner, WIDTH), (WIDTH, inner))
        ]
        return kept_by(lambda: adapted_gated_mlp(x, *map(Adapted, weights)))

    assert 0 < kept(92) == kept(96)


@pytest.mark.parametrize("inner", [96, 92])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [8, 512])
def test_where_it_pays(inner, dtype, rows):
    x = torch.empty(rows, 64, dtype=dtype)
    pays = inner == 92 and dtype is torch.bfloat16 and rows == 512
    assert _widened.missing(x, inner) == (4 if pays else 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert _widened.missing(x, inner) == (4 if inner == 92 and rows == 512 else 0)
    assert _widened.missing(x, None) == 0


def test_a_quantised_base():
    weights = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    plain = {name: torch.randn(shape, dtype=torch.bfloat16) * shape[1] ** -0.5 for name, shape in weights.items()}
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    made = [Adapted(None, dequantise=w.to, outputs=w.shape[0]) for w in plain.values()]
    y = adapted_gated_mlp(x, *made)
    want = linear(silu(linear(x, plain["gate"])) * linear(x, plain["up"]), plain["down"])
    torch.testing.assert_close(y, want, rtol=2e-2, atol=2e-2)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x, retain_graph=True)
    (dx_want,) = torch.autograd.grad(want.float().square().sum(), x)
    torch.testing.assert_close(dx, dx_want, rtol=2e-2, atol=2e-2 * float(dx_want.abs().max()))
