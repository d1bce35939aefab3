"""MLPs without a gate, and T5's with one, in Transformers' models after bastile.apply(): real classes against float64,
whose own code is the yardstick; whole models, with PEFT's adapters too; and what is left to the original."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import bastile
from bastile.models.sites import file_of, sites
from oracle import Case, assert_no_worse_pooled, assert_same_bits, random_tensor
from test_lora import under
from test_peft import assert_as_stock, ran, step, with_lora  # noqa: F401  (a fixture)

WIDTH, INNER = 64, 96


def of_file(model_type: str, name: str) -> Any:
    module = pytest.importorskip(f"transformers.models.{model_type}.modeling_{model_type}")
    return getattr(module, name)


def config(**options: Any) -> Any:
    return transformers.PretrainedConfig(
        **{"hidden_size": WIDTH, "intermediate_size": INNER, "n_embd": WIDTH, "mlp_bias": True, **options}
    )


#: The class's file and name, and how it is made, with the activation that its models have; dropouts drop nothing.
MADE: dict[tuple[str, str], Callable[[Any], nn.Module]] = {
    ("nemotron", "NemotronMLP"): lambda cls: cls(config(hidden_act="relu2", mlp_bias=False)),
    ("arcee", "ArceeMLP"): lambda cls: cls(config(hidden_act="relu2")),
    ("starcoder2", "Starcoder2MLP"): lambda cls: cls(
        config(hidden_act="gelu_pytorch_tanh", use_bias=True, residual_dropout=0.0)
    ),
    ("gpt_neox", "GPTNeoXMLP"): lambda cls: cls(config(hidden_act="gelu")),
    ("phi", "PhiMLP"): lambda cls: cls(config(hidden_act="gelu_new")),
    ("gptj", "GPTJMLP"): lambda cls: cls(INNER, config(activation_function="gelu_new", resid_pdrop=0.0)),
    ("codegen", "CodeGenMLP"): lambda cls: cls(INNER, config(activation_function="gelu_new", resid_pdrop=0.0)),
    ("falcon", "FalconMLP"): lambda cls: cls(
        config(activation="gelu", bias=False, ffn_hidden_size=INNER, hidden_dropout=0.0)
    ),
    ("gpt2", "GPT2MLP"): lambda cls: cls(INNER, config(activation_function="gelu_new", resid_pdrop=0.0)),
    ("siglip", "SiglipMLP"): lambda cls: cls(config(hidden_act="gelu_pytorch_tanh")),
    ("clip", "CLIPMLP"): lambda cls: cls(config(hidden_act="quick_gelu")),
    ("qwen3_vl", "Qwen3VLVisionMLP"): lambda cls: cls(config(hidden_act="gelu_pytorch_tanh")),
    ("idefics3", "Idefics3VisionMLP"): lambda cls: cls(config(hidden_act="gelu_pytorch_tanh")),
    ("janus", "JanusVisionMLP"): lambda cls: cls(config(hidden_act="gelu", mlp_ratio=1.5, hidden_dropout_rate=0.0)),
    ("dinov2", "Dinov2MLP"): lambda cls: cls(config(hidden_act="gelu", mlp_ratio=1.5)),
    ("wav2vec2", "Wav2Vec2FeedForward"): lambda cls: cls(
        config(hidden_act="gelu", activation_dropout=0.0, hidden_dropout=0.0)
    ),
    ("detr", "DetrMLP"): lambda cls: cls(
        config(activation_function="relu", activation_dropout=0.0, dropout=0.0), WIDTH, INNER
    ),
    ("t5", "T5DenseActDense"): lambda cls: cls(
        config(d_model=WIDTH, d_ff=INNER, dropout_rate=0.0, dense_act_fn="relu")
    ),
    ("t5", "T5DenseGatedActDense"): lambda cls: cls(
        config(d_model=WIDTH, d_ff=INNER, dropout_rate=0.0, dense_act_fn="gelu_new")
    ),
    ("vitdet", "VitDetMlp"): lambda cls: cls(config(hidden_act="gelu", dropout_prob=0.0), WIDTH, INNER),
}
each_class = pytest.mark.parametrize("named", MADE, ids=lambda named: named[1])


@pytest.fixture
def module(named: tuple[str, str]) -> nn.Module:
    torch.manual_seed(5)
    return MADE[named](of_file(*named)).train()


def stock_of(module: nn.Module) -> nn.Module:
    """The same module, whose forward is the class's own whatever is in force; to be made before anything is."""
    cls = type(module)
    other = copy.deepcopy(module)
    other.__class__ = type(cls.__name__, (cls,), {"forward": cls.forward})
    return other


def case_of(module: nn.Module, stock: nn.Module, dtype: torch.dtype, autocast: torch.dtype | None) -> Case:
    """Weights as large as keeps numbers' size, drawn anew: x, and all weights and biases, want gradients."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    inputs = {"x": random_tensor((256, WIDTH), dtype, "cpu")}
    for name, shape in shapes.items():
        inputs[name] = random_tensor(shape, dtype, "cpu", scale=shape[-1] ** -0.5 if len(shape) == 2 else 1.0)

    def of(which: nn.Module) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(which, dict(zip(shapes, tensors, strict=True)), (x,))

        return run

    return Case(under(autocast, "cpu", of(module)), under(autocast, "cpu", of(stock)), of(stock), inputs)


def counts() -> Counter[str]:
    """How often classes' forwards ran ours and, as "aside", stepped aside."""
    found: Counter[str] = Counter()
    for line in bastile.report():
        if line.operator == "swiglu":
            found["ran"] += line.ran
            found["aside"] += sum(line.aside.values())
    return +found


MIXES = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.float32, torch.bfloat16),
]


@each_class
@pytest.mark.parametrize(("dtype", "autocast"), MIXES, ids=str)
def test_errors_are_no_larger_than_the_class_s_own(named, module, dtype, autocast, ran):  # noqa: F811
    """The rule itself: the result and the gradients of x, weights and biases."""
    bastile.reset()
    stock = stock_of(module)
    bastile.apply(autocast_linear=False)  # which the class's own code would call, too
    drawn = 0

    def draw() -> Case:
        nonlocal drawn
        drawn += 1
        return case_of(module, stock, dtype, autocast)

    assert_no_worse_pooled(draw)
    # Plain layers with a gate are another node.
    assert ran == ({} if "Gated" in named[1] else {"adapted_mlp": drawn})
    assert counts()["ran"] % drawn == 0 < counts()["ran"]


@each_class
def test_results_have_the_types_of_the_original(named, module):
    """Under autocast, of an input of either type, and without."""
    stock = stock_of(module)
    bastile.apply()
    for autocast in (None, torch.bfloat16, torch.float16):
        for kind in (torch.float32,) if autocast is None else (torch.float32, autocast):
            x = random_tensor((2, 3, WIDTH), kind, "cpu")
            with torch.autocast("cpu", autocast, enabled=autocast is not None), torch.no_grad():
                ours, theirs = module(x), stock(x)
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.02, atol=0.02)


# ---- what is left to the original -----------------------------------------------------------------------------------


def gpt_neox(**options: Any) -> nn.Module:
    torch.manual_seed(5)
    return of_file("gpt_neox", "GPTNeoXMLP")(config(**{"hidden_act": "gelu", **options})).train()


class Louder(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def hook_on(name: str) -> Callable[[nn.Module], None]:
    return lambda module: getattr(module, name).register_forward_hook(lambda _, args, y: y * 1.5) and None


def other_class(module: nn.Module) -> None:
    module.dense_h_to_4h.__class__ = Louder


def adds_its_bias(module: nn.Module) -> None:
    """Under autocast the sum would be of the bias's type."""
    layer = of_file("falcon", "FalconLinear")(WIDTH, INNER)
    layer.load_state_dict(module.dense_h_to_4h.state_dict())
    module.dense_h_to_4h = layer


def other_activation(module: nn.Module) -> None:
    module.act = nn.Tanh()


def own_forward(module: nn.Module) -> None:
    layer = module.dense_4h_to_h
    layer.forward = lambda x: nn.functional.linear(x, 2 * layer.weight)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (hook_on("dense_h_to_4h"), "hooks"),
        (hook_on("dense_4h_to_h"), "hooks"),
        (hook_on("act"), "activation"),
        (other_class, "Louder is no layer that Bastile knows"),
        (adds_its_bias, "a bias in a type of its own"),
        (other_activation, "activation"),
        (own_forward, "a forward of its own"),
    ],
)
def test_what_runs_as_stock(change, why):
    """To the bit, with a reason."""
    module, x = gpt_neox(), random_tensor((5, WIDTH), torch.float32, "cpu")
    change(module)
    want = module(x)
    bastile.apply()
    bastile.report(reset=True)
    assert_same_bits(module(x), want)
    (line,) = [line for line in bastile.report() if line.operator == "swiglu"]
    assert line.ran == 0
    assert all(why in reason for reason in line.aside)


def test_other_arguments_run_the_original():
    module, x = gpt_neox(), random_tensor((5, WIDTH), torch.float32, "cpu")
    want = module(x)
    bastile.apply()
    bastile.report(reset=True)
    assert_same_bits(module(hidden_states=x), want)
    assert counts() == {"aside": 1}


def test_a_dropout_between_the_layers_must_drop_nothing():
    """A module's, and a probability's."""
    made = of_file("wav2vec2", "Wav2Vec2FeedForward"), of_file("detr", "DetrMLP")
    options = config(
        hidden_act="gelu", activation_function="relu", activation_dropout=0.5, hidden_dropout=0.0, dropout=0.0
    )
    modules = made[0](options), made[1](options, WIDTH, INNER)
    x = random_tensor((5, WIDTH), torch.float32, "cpu")
    bastile.apply()
    for module in modules:
        for training in (True, False):
            bastile.report(reset=True)
            module.train(training)(x)
            assert counts() == ({"aside": 1} if training else {"ran": 1})


@pytest.mark.parametrize(
    ("named", "options"),
    [
        (("starcoder2", "Starcoder2MLP"), {"hidden_act": "gelu", "use_bias": True, "residual_dropout": 0.5}),
        (("gptj", "GPTJMLP"), {"activation_function": "gelu", "resid_pdrop": 0.5}),
        (("vitdet", "VitDetMlp"), {"hidden_act": "gelu", "dropout_prob": 0.5}),
    ],
    ids=str,
)
def test_a_dropout_behind_drops_what_it_dropped(named, options):
    """VitDet's module is between the layers too, where it drops."""
    sizes = {"starcoder2": (), "gptj": (INNER,), "vitdet": (WIDTH, INNER)}[named[0]]
    made = [config(**options)]
    module = of_file(*named)(*(sizes + tuple(made) if named[0] == "gptj" else tuple(made) + sizes)).train()
    x = random_tensor((50, WIDTH), torch.float32, "cpu")
    torch.manual_seed(1)
    want = module(x)
    bastile.apply()
    bastile.report(reset=True)
    torch.manual_seed(1)
    got = module(x)
    assert counts() == ({"aside": 1} if named[0] == "vitdet" else {"ran": 1})
    assert ((got == 0) == (want == 0)).all()
    assert 0.3 < (got == 0).float().mean() < 0.7
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_code_that_calls_other_modules_one_after_another_is_none_of_these_mlps():
    """Three modules in a row may be anything; their attributes' names say which are worth looking at."""
    for model_type, name in (
        ("bert", "BertPredictionHeadTransform"),
        ("clvp", "ClvpEncoderMLP"),
        ("timesformer", "TimesformerIntermediate"),
        ("detr", "DetrConvBlock"),
    ):
        cls = of_file(model_type, name)
        file = file_of(cls.__module__)
        places = {site.where for site in sites(file, ["swiglu"])}
        assert f"{name}.forward" not in places
        assert "attributes that are not known" in file.unknown[f"{name}.forward"]


# ---- whole models ---------------------------------------------------------------------------------------------------

_SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "nemotron": _SMALL,
    "starcoder2": {**_SMALL, "use_bias": True, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "gpt_neox": _SMALL,
    "arcee": _SMALL,
    "falcon": {**_SMALL, "bias": False, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gpt2": {
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    "phi": {**_SMALL, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
each_family = pytest.mark.parametrize("family", FAMILIES)
LAYERS = 2


def model_of(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    made = transformers.AutoConfig.for_model(family, **{**FAMILIES[family], **options})
    model = transformers.AutoModelForCausalLM.from_config(made).to(dtype).train()
    for name, parameter in model.named_parameters():  # biases begin at zero
        if name.endswith("bias"):
            parameter.data.normal_(std=0.1)
    return model


@each_family
@pytest.mark.parametrize("checkpointing", [False, True])
def test_full_fine_tuning(family, checkpointing, ran):  # noqa: F811
    model = model_of(family)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_as_stock(model)
    assert ran == {"adapted_mlp": LAYERS * (1 + checkpointing)}


@each_family
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_adapters_of_peft_on_all_layers(family, p, ran):  # noqa: F811
    bastile.report(reset=True)
    model = with_lora(model_of(family), lora_dropout=p)
    assert_as_stock(model)
    assert ran["adapted_mlp"] == LAYERS
    assert "adapted_gated_mlp" not in ran
    # A layer of an MLP is counted as if it had been called by itself.
    layers = sum("lora_A" in dict(module.named_children()) for module in model.modules())
    assert bastile.report().ran("lora_linear") == layers


@pytest.mark.parametrize("targets", [["dense_h_to_4h"], ["dense_4h_to_h"], ["query_key_value"]], ids=str)
def test_adapters_of_peft_on_some_layers(targets, ran):  # noqa: F811
    assert_as_stock(with_lora(model_of("gpt_neox"), target_modules=targets))
    assert ran["adapted_mlp"] == LAYERS


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_are_trained_beside_adapters(bias, ran):  # noqa: F811
    model = with_lora(model_of("starcoder2"), bias=bias)
    assert model.base_model.model.model.layers[0].mlp.c_fc.base_layer.bias.requires_grad
    assert_as_stock(model)
    assert ran["adapted_mlp"] == LAYERS


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_adapters_and_gradient_checkpointing(p, reentrant, ran):  # noqa: F811
    model = model_of("nemotron")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_as_stock(with_lora(model, lora_dropout=p))
    assert ran["adapted_mlp"] == 2 * LAYERS


@pytest.mark.parametrize("family", ["nemotron", "starcoder2"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_model_in_16_bits_is_no_further_from_float64_than_stock(family, autocast, ran):  # noqa: F811
    """As in test_peft.py: the mean of the logarithms of the errors' ratios over a model's gradients, over models."""
    models = [with_lora(model_of(family, torch.bfloat16, seed)) for seed in range(16)]
    for model in models:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.bfloat16 if autocast is None else torch.float32)
    found = [step(model, autocast) for model in models]
    assert ran["adapted_mlp"] == LAYERS * len(models)
    bastile.reset()
    ratios = []
    for model, ours in zip(models, found, strict=True):
        stock, exact = step(model, autocast), step(copy.deepcopy(model).double())
        assert all(ours[name].dtype == stock[name].dtype for name in exact)
        errors = [[(one[n].double() - exact[n]).norm() for n in exact if n != "loss"] for one in (ours, stock)]
        ratios.append((torch.stack(errors[0]) / torch.stack(errors[1])).log().mean())
    means = torch.stack(ratios)
    assert means.mean() <= 2.5 * means.std() / len(models) ** 0.5


def test_merged_adapters_are_served():
    model = with_lora(model_of("gpt_neox"))
    model.merge_adapter()
    mlp, x = model.base_model.model.gpt_neox.layers[0].mlp, random_tensor((3, 32), torch.float32, "cpu")
    want = mlp(x)
    bastile.apply()
    bastile.report(reset=True)
    torch.testing.assert_close(mlp(x), want)
    assert counts() == {"ran": 1}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("named", [("gpt_neox", "GPTNeoXMLP"), ("gpt2", "GPT2MLP"), ("falcon", "FalconMLP")], ids=str)
def test_compiles_without_a_break(named, module, autocast):
    torch._dynamo.reset()
    x = random_tensor((5, WIDTH), torch.float32, "cpu")
    bastile.apply(lora_linear=False)

    def run(called: Any) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = called(x)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), list(module.parameters()))]

    for got, want in zip(run(torch.compile(module, fullgraph=True, backend="aot_eager")), run(module), strict=True):
        assert_same_bits(got, want)


def test_gradients_of_transposed_weights_lie_as_these_do(ran):  # noqa: F811
    """A Conv1D's: no copy is made of one."""
    module = MADE["gpt2", "GPT2MLP"](of_file("gpt2", "GPT2MLP"))
    found: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: found.update({name: gradient}))
    module(random_tensor((5, WIDTH), torch.float32, "cpu")).sum().backward()
    assert ran == {"adapted_mlp": 1}
    assert all(found[name].is_contiguous() for name in ("c_fc.weight", "c_proj.weight"))


def test_one_model_alone(ran):  # noqa: F811
    bastile.reset()
    served, other = model_of("nemotron"), model_of("nemotron")
    assert "swiglu_nemotron" in bastile.apply_to_model(served)
    for model in (served, other):
        step(model)
    assert ran == {"adapted_mlp": LAYERS}


@pytest.mark.parametrize("name", ["T5DenseActDense", "T5DenseGatedActDense"])
@pytest.mark.parametrize("drops", [False, True])
def test_a_last_layer_that_is_kept_in_float32(name: str, drops: bool) -> None:
    """As T5's is where the rest is in 16 bits: what it is given is cast to its type, and what it returns has it."""
    torch.manual_seed(3)
    made = of_file("t5", name)(config(d_model=WIDTH, d_ff=INNER, dropout_rate=0.5 * drops, dense_act_fn="relu"))
    made.to(torch.bfloat16).train().wo.float()
    stock, x = stock_of(made), random_tensor((4, 9, WIDTH), torch.bfloat16, "cpu")
    bastile.apply()
    got, want = [], []
    for module, found in ((made, got), (stock, want)):
        torch.manual_seed(4)
        found.append(module(x))
        found[0].square().sum().backward()
        found += [p.grad for p in module.parameters()]
    assert [t.dtype for t in got] == [t.dtype for t in want]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.detach().abs().max()))
