"""Mixtures of experts with Bastile mean what they mean in Transformers, and the experts that someone chose are run."""

import logging
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForTokenClassification
from transformers.integrations import moe as implementations

import bastile
from bastile.models import small, support
from bastile.models.table import OPERATORS
from conftest import gradients, older_than, result_or_error
from oracle import Case, assert_no_worse_pooled, devices, random_tensor
from test_moe import routing

#: A type for each form of experts beside GPT-OSS's, with the first release in which it has this code.
FORMS = {
    "mixtral": "5.0",
    "lfm2_moe": "5.0",  # whose activation is a function
    "aria_text": "5.23",  # weights as products read them
    "beam": "5.23",  # in float32
    "deepseek_v4": "5.17",  # clamped
    "hy_v4": "5.17",  # clamped, with silu by name
    "minimax_m3_vl_text": "5.17",  # (up + 1) gate sigmoid(alpha gate) of halves
}

#: What each calls the width between an expert's products.
INNER = {"qwen3_moe": {"moe_intermediate_size": 96}, "mixtral": {"intermediate_size": 96}}

#: Grouped products are of no float64.
CHOICE = {"exact": "eager", "stock": "grouped_mm", "patched": "grouped_mm"}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "bastile")  # until the test's end


def built(model_type: str, device: str = "cpu", experts: str | None = None, **more: Any) -> Any:
    model: Any = small.small_model(model_type, **more).to(device)
    if experts is not None:
        model.set_experts_implementation(experts)
    return model


def step(model: Any, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    ids = torch.randint(3, 90, (2, 17), generator=generator).to(device)
    labels = ids.clone()
    labels[:, 5] = -100
    output = model(input_ids=ids, labels=labels, **more)
    output.loss.backward()
    assert output.logits is not None
    return output.loss.detach(), gradients(model)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("router_loss", [False, True], ids=["", "router's loss"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_training_computes_the_same_losses_and_gradients(model_type: str, router_loss: bool, device: str) -> None:
    """Float32: every gradient, the router's among them, whose loss reads its logits. Counted: the experts of each layer
    once, and nothing stepped aside."""
    model = built(model_type, device)
    stock, want = step(model, output_router_logits=router_loss)
    bastile.report(reset=True)
    bastile.apply_to_model(model)
    patched, got = step(model, output_router_logits=router_loss)
    torch.testing.assert_close(patched, stock, rtol=1e-5, atol=0)
    assert got.keys() == want.keys()
    assert sum(".experts." in name for name in got) == 4
    for name, gradient in want.items():
        # Sums of float32 in another order, through two layers: the largest element's scale, as support.check has it.
        assert (got[name] - gradient).abs().max() <= support.Check.ALLOWED_GRADIENT * gradient.abs().max(), name
    told = bastile.report(reset=True)
    assert told.ran("moe_experts") == 2
    assert not [line.aside for line in told if line.operator == "moe_experts" and line.aside]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_bfloat16_is_as_near_to_float64_as_stock(model_type: str, device: str) -> None:
    """The error over all gradients of several models together. All experts serve each token: so no rounding decides
    which do."""
    ours, theirs = 0.0, 0.0
    for seed in range(4):
        found: dict[str, dict[str, torch.Tensor]] = {}
        for kind in ("exact", "stock", "patched"):
            model = built(model_type, experts=CHOICE[kind], seed=seed, num_experts_per_tok=4).to(torch.bfloat16)
            model = model.double() if kind == "exact" else model.to(device)
            if kind == "patched":
                bastile.apply_to_model(model)
            found[kind] = step(model)[1]
        for name, exact in found["exact"].items():
            size = exact.square().sum().item()
            ours += (found["patched"][name].double().cpu() - exact).square().sum().item() / size
            theirs += (found["stock"][name].double().cpu() - exact).square().sum().item() / size
    assert bastile.report(reset=True).ran("moe_experts") == 8
    assert ours <= theirs


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_the_experts_alone_by_the_rule(model_type: str, device: str) -> None:
    """The module's own forward, stock and patched, of the same routing."""
    model = built(model_type, device, hidden_size=64, **INNER[model_type])
    module = model.model.layers[0].mlp.experts
    bastile.apply_to_model(model)
    patched, original = module.forward, type(module).forward

    def run(forward: Any, *tensors: torch.Tensor) -> torch.Tensor:
        hidden, weights, gate_up, down, indices = tensors
        parameters = {"gate_up_proj": gate_up, "down_proj": down}
        module.forward = forward
        return torch.func.functional_call(module, parameters, (hidden, indices.long(), weights))

    def draw() -> Case:
        shapes = {"hidden": (512, 64), "weights": (512, 2), "gate_up": (4, 192, 64), "down": (4, 64, 96)}
        return Case(
            ours=partial(run, patched),
            stock=partial(run, MethodType(original, module)),
            exact=partial(run, MethodType(original.__wrapped__, module)),  # the loop over experts
            inputs={n: random_tensor(s, torch.bfloat16, device, scale=s[-1] ** -0.5) for n, s in shapes.items()},
            constants={"indices": routing(512, 2, 4, device)},
            independent=512 * 2 * 96 // 8,  # as in test_moe.py
        )

    # But for the routing weights' gradients: see docs/moe.md.
    assert_no_worse_pooled(draw, ("output 0", "dhidden", "dgate_up", "ddown"))


@pytest.mark.parametrize("model_type", FORMS)
def test_every_form(model_type: str) -> None:
    if older_than(FORMS[model_type]):
        pytest.skip(f"this type's experts have had their form since {FORMS[model_type]}")
    done = support.check(model_type)
    assert done.passed, done
    assert done.ran["moe_experts"] > 0


def served(model: Any, reason: str | None = None, **operators: bool) -> None:
    """Whether the experts ran in a step, or stepped aside for this reason; either way the step is stock's."""
    bastile.reset(model=model)
    want, want_gradients = step(model)
    bastile.report(reset=True)
    bastile.apply_to_model(model, **operators)
    got, got_gradients = step(model)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    for name, gradient in want_gradients.items():
        assert (got_gradients[name] - gradient).abs().max() <= 1e-3 * gradient.abs().max() + 1e-9, name
    (line,) = [line for line in bastile.report(reset=True) if line.operator == "moe_experts"]
    assert (line.ran, line.aside) == ((2, {}) if reason is None else (0, {reason: 2}))


SPREAD = "only a part of the experts is here: they are spread over devices"


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_who_chose_an_implementation_gets_it(experts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """grouped_mm is what Transformers takes where nobody chose."""
    model = built("qwen3_moe", experts=experts)
    why = f"the model's experts_implementation is '{experts}', not 'grouped_mm'"
    served(model, None if experts == "grouped_mm" else why)
    if experts == "grouped_mm":  # one of one's own under that name
        own = implementations.grouped_mm_experts_forward
        monkeypatch.setitem(
            implementations.ALL_EXPERTS_FUNCTIONS._local_mapping, "grouped_mm", lambda *a, **k: own(*a, **k)
        )
        served(model, "the gate, or Transformers' grouped products, have been replaced by others")


def test_what_an_instance_says_otherwise() -> None:
    """Each by the original, with its reason; an activation that the operator has is served."""
    model = built("mixtral", hidden_act="gelu_pytorch_tanh")
    served(model)
    blocks = [layer.mlp.experts for layer in model.model.layers]
    for experts in blocks:
        experts.act_fn = nn.Tanh()
    served(model, "its activation is none that Bastile computes")
    model = built("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts._apply_gate = lambda both: both.chunk(2, -1)[0].exp() * both.chunk(2, -1)[1]
    served(model, "the gate has been replaced by another")
    model = built("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts._is_expert_parallel = False
        layer.mlp.experts.config = type(model.config)(**{**model.config.to_dict(), "num_local_experts": 8})
        layer.mlp.experts.config._experts_implementation = "grouped_mm"
    served(model, SPREAD)  # half of the experts are here
    model = built("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.data = layer.mlp.experts.down_proj.data.bfloat16()
    stock = result_or_error(lambda: step(model))
    if isinstance(stock, str):  # this Transformers does not multiply two types: nor do we
        bastile.apply_to_model(model)
        assert result_or_error(lambda: step(model)) == stock
    else:
        # Alone: stock rounds to bfloat16 within, which makes much of the last bit of what other operators compute.
        others = {name: name == "moe_experts" for name, row in OPERATORS.items() if row.of_a_model}
        served(model, "types or shapes that the operator does not take", **others)


def test_frozen_experts_and_checkpointing() -> None:
    model = built("qwen3_moe")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    served(model)
    model.gradient_checkpointing_enable()
    want, _ = step(model)
    bastile.reset(model=model)
    got, _ = step(model)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


def test_it_compiles_without_a_break() -> None:
    model = built("qwen3_moe")
    bastile.apply_to_model(model)
    torch._dynamo.reset()
    experts = model.model.layers[0].mlp.experts
    hidden, indices = torch.randn(7, 32), torch.randint(4, (7, 2))
    weights = torch.rand(7, 2)
    compiled = torch.compile(lambda *given: experts(*given), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, indices, weights), experts(hidden, indices, weights))


@pytest.mark.parametrize("choices", [1, 3])
def test_experts_whose_inputs_are_weighted(choices: int) -> None:
    """Llama 4's, which stock gives all tokens: the chosen ones are computed, with its losses and gradients."""
    model = built("llama4_text", num_experts_per_tok=choices)
    served(model)
    why = "its router or experts have hooks, or code that is not known"
    for layer in model.model.layers:
        layer.feed_forward.experts.register_forward_hook(lambda _module, _given, output: output * 2)
    served(model, why)
    model = built("llama4_text", num_experts_per_tok=choices)
    for layer in model.model.layers:
        layer.feed_forward.experts.act_fn = nn.Tanh()
    served(model, "types, shapes or an activation that the operator does not take")


def test_weighted_inputs_under_autocast() -> None:
    """Of float32 weights, as the Trainer's bf16=True trains: as near to float32 as stock is, over all gradients."""
    model = built("llama4_text")
    _, exact = step(model)
    errors = []
    for patched in (False, True):
        if patched:
            bastile.apply_to_model(model)
        with torch.autocast("cpu", torch.bfloat16):
            _, found = step(model)
        errors.append(sum(float((found[n] - g).square().sum() / g.square().sum()) for n, g in exact.items()))
    assert errors[1] <= 1.1 * errors[0]  # two orders of rounding, and the same formula
    assert bastile.report().ran("moe_experts") >= 2


def test_experts_with_biases_in_halves() -> None:
    if "openai_privacy_filter" not in CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} has no openai_privacy_filter")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
    }
    config = AutoConfig.for_model("openai_privacy_filter", **sizes)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    model: Any = AutoModelForTokenClassification.from_config(config)
    (experts,) = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    hidden, weights = torch.randn(7, 16, requires_grad=True), torch.rand(7, 2, requires_grad=True)
    indices, upstream = torch.randint(5, (7, 2)), torch.randn(7, 16)
    leaves = [hidden, weights, *experts.parameters()]

    def run() -> list[torch.Tensor]:
        out = experts(hidden, indices, weights)
        return [out, *torch.autograd.grad(out, leaves, upstream)]

    stock = run()
    bastile.apply()
    bastile.report(reset=True)
    for got, want in zip(run(), stock, strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert bastile.report().ran("moe_experts") == 1
