"""LayerNorms of models under autocast after bastile.apply(): their types are those of stock, their errors no larger,
and ours is what ran. CPUs' autocast leaves F.layer_norm alone, CUDA's casts to float32 all that it is given: "as on
cuda" F.layer_norm does so on a CPU, and models' norms are told that they are on a GPU."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.bert import modeling_bert

import bastile
from bastile.models import norm
from memory import Memory
from oracle import DTYPES, EMULATED, assert_same_bits, random_tensor
from test_float32_layer_norm import widened
from test_peft import with_lora
from test_plain_mlps import model_of

HALVES = [torch.bfloat16, torch.float16]
F32 = torch.float32


@dataclass
class Place:
    device: str
    casts: bool  # whether autocast is CUDA's
    stock: Counter = field(default_factory=Counter)  # calls of F.layer_norm

    def autocast(self, dtype: torch.dtype) -> torch.autocast:
        return torch.autocast(self.device, dtype)


needs_gpu = pytest.mark.skipif(EMULATED or not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["cpu", "as on cuda", pytest.param("cuda", marks=needs_gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    found = Place("cuda" if request.param == "cuda" else "cpu", request.param != "cpu")
    stock = nn.functional.layer_norm

    def layer_norm(x: torch.Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        found.stock["layer_norm"] += 1
        if request.param == "as on cuda" and torch.is_autocast_enabled("cpu"):
            x, weight, bias = map(widened, (x, weight, bias))
        return stock(x, shape, weight, bias, eps)

    monkeypatch.setattr(nn.functional, "layer_norm", layer_norm)
    if request.param == "as on cuda":
        monkeypatch.setattr(norm, "on_gpu", lambda _: True)
    for bound in ("_ELEMENTS", "_ELEMENTS_CAST"):
        monkeypatch.setattr(norm, bound, 0)
    return found


# ---- PyTorch's module ------------------------------------------------------------------------------------------------


def outcome(call: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """What it returns and the gradients; None where it fails."""
    try:
        y = call()
    except RuntimeError:
        return None
    upstream = torch.linspace(-1, 2, y.numel(), device=y.device).view(y.shape).bfloat16().to(y.dtype)  # in any type
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("x_type", DTYPES)
def test_every_mix_of_types_is_what_stock_makes_of_it(x_type, half, place):
    x = random_tensor((6, 40), x_type, place.device, scale=2.0, offset=0.5).requires_grad_()
    columns = random_tensor((40,), F32, place.device, offset=1.0)
    modules = {}
    for types in [*itertools.product(DTYPES, [*DTYPES, None]), (None, None)]:
        module = nn.LayerNorm(40, elementwise_affine=types[0] is not None, bias=types[1] is not None).to(place.device)
        for parameter, dtype in zip(module.parameters(), types, strict=False):
            parameter.data = columns.to(dtype)
        with place.autocast(half):
            modules[types] = module, outcome(lambda module=module: module(x), [x, *module.parameters()])
    bastile.apply()  # once: in a process that has imported many models it takes seconds
    for types, (module, stock) in modules.items():
        place.stock.clear()
        bastile.report(reset=True)
        with place.autocast(half):
            ours = outcome(lambda module=module: module(x), [x, *module.parameters()])
        assert (ours is None) == (stock is None), types
        if stock is None:
            continue
        is_ours = types[1] in (types[0], None)  # of a weight and a bias of two types our operator is not
        assert (place.stock["layer_norm"], bastile.report().ran("layer_norm")) == (not is_ours, is_ours), types
        wide, module = x.detach().double().requires_grad_(), module.double()
        exact = outcome(lambda module=module, wide=wide: module(wide), [wide, *module.parameters()])
        for got, other, want in zip(ours, stock, exact, strict=True):
            assert got.dtype == other.dtype, types
            errors = [(t.double() - want).norm() for t in (got, other)]  # a CPU sums dweight in 16 bits
            assert errors[0] <= 1.1 * errors[1] + torch.finfo(F32).eps * want.norm(), types


@pytest.mark.parametrize("place", ["as on cuda"], indirect=True)
def test_pytorch_s_norm_stays_where_it_costs_little(place, monkeypatch):
    """Of what is cast less: the host's time is nearly the same then."""
    monkeypatch.setattr(norm, "_ELEMENTS", 4 * 80)
    monkeypatch.setattr(norm, "_ELEMENTS_CAST", 80)
    bastile.apply()
    layer = nn.LayerNorm(8)
    for rows, dtype, autocasts, is_ours in (
        (10, torch.bfloat16, True, True),
        (9, torch.bfloat16, True, False),
        (39, F32, True, False),
        (40, F32, True, True),
        (39, F32, False, False),
        (40, F32, False, True),
    ):
        bastile.report(reset=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            layer(torch.ones(rows, 8, dtype=dtype))
            with torch.no_grad():
                layer(torch.ones(rows, 8, dtype=dtype))
        assert bastile.report().ran("layer_norm") == is_ours, (rows, dtype, autocasts)


@pytest.mark.parametrize("place", ["cpu", "as on cuda"], indirect=True)
def test_pytorch_s_rms_norm_is_left_to_autocast_where_that_may_cast(place):
    """Which depends on the release of PyTorch."""
    bastile.apply()
    bastile.report(reset=True)
    with torch.autocast("cpu", torch.bfloat16):
        nn.RMSNorm(8, dtype=torch.bfloat16)(torch.ones(3, 8, dtype=torch.bfloat16))
        nn.RMSNorm(8)(torch.ones(3, 8))
    told = [line for line in bastile.report() if line.operator == "rms_norm"]
    assert sum(line.ran for line in told) == 2 - place.casts
    assert [line.aside for line in told if line.aside] == [{"autocast decides on its type": 1}] * place.casts


def test_the_type_of_a_sum_decides(place):
    """bfloat16 and float32 are a float32 sum, for which the weight must have its type without autocast."""
    layer = modeling_bert.BertSelfOutput(transformers.BertConfig(**SIZES)).to(place.device)
    layer.dense.bfloat16()
    x, residual = (random_tensor((4, 32), dtype, place.device) for dtype in (torch.bfloat16, F32))
    want = layer(x, residual)
    bastile.apply()
    bastile.report(reset=True)
    torch.testing.assert_close(layer(x, residual), want, rtol=1e-6, atol=1e-5)
    assert bastile.report().ran("add_rms_norm") == 1
    layer.LayerNorm.bfloat16()
    with pytest.raises(RuntimeError, match="type"):  # as stock has it
        layer(x, residual)
    with (
        place.autocast(torch.bfloat16),
        pytest.raises(RuntimeError, match="type") if not place.casts else nullcontext(),
    ):
        assert layer(x, residual).dtype is F32
    assert bastile.report().ran("add_rms_norm") == 1 + place.casts


# ---- models ----------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class SumOfSquares(nn.Module):
    """A model of images with a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> Any:
        hidden = self.model(pixel_values).last_hidden_state
        return transformers.modeling_outputs.MaskedLMOutput(loss=hidden.float().square().mean(), logits=hidden)


def siglip() -> nn.Module:
    sizes = {
        key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    config = transformers.SiglipVisionConfig(**sizes, image_size=28, patch_size=7, vision_use_head=False)
    return transformers.SiglipVisionModel(config)


def masked(name: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    return getattr(transformers, f"{name}ForMaskedLM")(config)


#: How each is made, by seed and type; the norms of a step that are calls of a module, and those of its layers'
#: statements; and of these the norms of sums. Post-norm models of float32 weights, whose sums are of two types; then
#: adapters on a frozen base of 16 bits, whose norms are of 16 bits.
MODELS: dict[str, tuple[Callable[[int, torch.dtype], nn.Module], int, int, int]] = {
    "bert": (lambda *_: masked("Bert"), 2, 4, 4),
    "roberta": (lambda *_: masked("Roberta"), 1, 5, 5),
    "deberta_v2": (
        lambda *_: masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], pooler_dropout=0.0),
        2, 4, 4,
    ),
    "siglip": (lambda *_: SumOfSquares(siglip()), 1, 4, 2),
    "siglip with adapters": (lambda _, half: SumOfSquares(with_lora(siglip().to(half))), 1, 4, 2),
    "gpt_neox with adapters": (lambda seed, half: with_lora(model_of("gpt_neox", half, seed)), 5, 0, 0),
    "starcoder2 with adapters": (lambda seed, half: with_lora(model_of("starcoder2", half, seed)), 1, 4, 2),
}  # fmt: skip


def made(name: str, seed: int, half: torch.dtype, device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Weights and biases of norms are not ones and zeros, and adapters have float32, as PEFT has them."""
    torch.manual_seed(seed)
    model = MODELS[name][0](seed, half).train()
    for key, parameter in model.named_parameters():
        if "norm" in key.lower() or key.endswith("bias"):
            parameter.data += 0.2 * torch.randn_like(parameter)
        if "lora_" in key:
            parameter.data = torch.randn(parameter.shape) * 0.2
    if "siglip" in name:
        batch = {"pixel_values": torch.randn(2, 3, 28, 28)}
    else:
        ids = torch.randint(3, 67, (2, 9))
        batch = {"input_ids": ids, "labels": ids}
    return model.to(device), {key: t.to(device) for key, t in batch.items()}


def step(model: nn.Module, batch: dict[str, torch.Tensor], context: Any, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """All gradients of a loss within this context, times a scale, which float16 needs."""
    model.zero_grad(set_to_none=True)
    with context:
        loss = model(**batch).loss
    (loss * scale).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def norms_alone() -> Iterator[None]:
    """bastile.apply() of norms, so that errors are theirs."""
    bastile.reset()
    bastile.apply(**dict.fromkeys(("rope", "swiglu", "fused_linear_cross_entropy", "lora_linear", "recompute"), False))
    yield
    bastile.reset()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_no_further_from_float64_than_stock(name, half, place, norms_alone):
    """As in test_peft.py: the mean of the logarithms of the errors' ratios over a model's gradients, over models."""
    _, alone, joined, sums = MODELS[name]
    scale = 256.0 if half is torch.float16 else 1.0
    models = [made(name, seed, half, place.device) for seed in range(8)]
    bastile.report(reset=True)
    with Memory() as memory:
        found = [step(model, batch, place.autocast(half), scale) for model, batch in models]
    told = [line for line in bastile.report() if line.operator in ("layer_norm", "add_rms_norm")]
    assert not [line for line in told if line.aside]
    assert not place.stock
    ran = [sum(line.ran for line in told if line.operator == o) for o in ("layer_norm", "add_rms_norm")]
    assert ran == [alone * len(models), joined * len(models)]
    assert memory.calls.count("bastile.add_norm_forward.default") == sums * len(models)
    assert memory.calls.count("bastile.norm_forward.default") == (alone + joined - sums) * len(models)
    bastile.reset()
    ratios = []
    for (model, batch), ours in zip(models, found, strict=True):
        stock = step(model, batch, place.autocast(half), scale)
        wide = {key: t.double() if t.is_floating_point() else t for key, t in batch.items()}
        exact = step(copy.deepcopy(model).double(), wide, nullcontext(), scale)
        assert ours.keys() == stock.keys()
        assert all(ours[n].dtype == stock[n].dtype for n in stock)
        # What is zero by construction, as the gradient of keys' biases, is nothing but error.
        named = [n for n in stock if exact[n].norm() > 1e-9 * scale]
        errors = [[(one[n].double() - exact[n]).norm() for n in named] for one in (ours, stock)]
        ratios.append((torch.stack(errors[0]) / torch.stack(errors[1])).log().mean())
    means = torch.stack(ratios)
    assert means.mean() <= 2.5 * means.std() / len(models) ** 0.5


@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_layers_are_given_the_types_of_stock(name, autocasts, place, norms_alone):
    """Behind norms, and behind the sums that they take in; without autocast all has 16 bits."""
    model, batch = made(name, 0, torch.bfloat16, place.device)
    if not autocasts:
        model.bfloat16()
        batch = {key: t.bfloat16() if t.is_floating_point() else t for key, t in batch.items()}
    seen: list[torch.dtype] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    types = []
    for _ in range(2):
        step(model, batch, place.autocast(torch.bfloat16) if autocasts else nullcontext())
        types.append([*seen])
        seen.clear()
        bastile.reset()
    assert types[0] == types[1]
    assert autocasts or set(types[0]) == {torch.bfloat16}


def test_the_same_twice(place, norms_alone):
    model, batch = made("bert", 0, torch.bfloat16, place.device)
    once, again = (step(model, batch, place.autocast(torch.bfloat16)) for _ in range(2))
    for name, got in again.items():
        if "embeddings" not in name or place.device == "cpu":  # a GPU sums theirs in any order
            assert_same_bits(got, once[name])
