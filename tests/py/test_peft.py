"""Models with PEFT's adapters after bastile.apply(): real PEFT, real Transformers; which nodes ran is counted."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import bastile
from bastile.models import adapters
from bastile.ops.dropout import dropout
from bastile.ops.lora import Adapted
from memory import Memory
from oracle import assert_same_bits, random_tensor
from test_lora import peft as restated

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture
def ran(monkeypatch) -> Iterator[Counter]:
    """bastile.apply() in force; how often each node ran."""
    counts: Counter = Counter()
    for name in ("adapted_linears", "adapted_gated_mlp", "adapted_mlp"):
        stock = getattr(adapters, name)

        def counted(*args: Any, name=name, stock=stock, **kwargs: Any) -> Any:
            counts[name] += 1
            return stock(*args, **kwargs)

        monkeypatch.setattr(adapters, name, counted)
    bastile.apply()
    yield counts
    bastile.reset()


def base(kind: str = "qwen3", dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**SIZES))
    return model.to(dtype)


def with_lora(model: nn.Module, **options: Any) -> PeftModel:
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(**options)).train()


def batch(seed: int = 1, rows: int = 2, length: int = 17) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def step(
    model: nn.Module, autocast: torch.dtype | None = None, of: Any = None, scale: float = 1.0, **more: Any
) -> dict[str, torch.Tensor]:
    """The loss and all gradients, these times a scale, which float16 needs. of: the batch."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        loss = model(**(of or batch()), **more).loss
    (loss * scale).backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@contextmanager
def our_masks() -> Iterator[None]:
    """Dropouts draw as the nodes draw, layer by layer, so that the masks are theirs."""

    def drop(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return dropout(x, p) if training and p else x

    before, F.dropout = F.dropout, drop
    try:
        yield
    finally:
        F.dropout = before


def assert_as_stock(model: nn.Module, **more: Any) -> None:
    """What apply() makes of this model, and what stock makes of it with the same masks."""
    ours = step(model, **more)
    bastile.reset()
    with our_masks():
        stock = step(model, **more)
    assert ours.keys() == stock.keys()
    for name, want in stock.items():
        # What float32 leaves of the gradients of queries and keys, behind a softmax; a wrong mask would be off by 0.1.
        assert (ours[name] - want).norm() <= (1e-5 if name == "loss" else 1e-4) * want.norm(), name


LAYERS = SIZES["num_hidden_layers"]


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_the_layer_computes_what_the_operator_s_tests_compare_with(p):
    model = with_lora(base(), lora_dropout=p)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    x = random_tensor((5, SIZES["hidden_size"]), torch.float32, "cpu")
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    given = Adapted(layer.base_layer.weight, None, a, b, layer.scaling["default"], p)
    torch.manual_seed(3)
    want = layer(x)
    torch.manual_seed(3)
    assert_same_bits(restated(x, given), want)


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_qwen3(ran, p):
    """The three layers before the attention are one node, the one behind it and the MLP one each."""
    assert_as_stock(with_lora(base(), lora_dropout=p))
    assert ran == {"adapted_linears": 2 * LAYERS, "adapted_gated_mlp": LAYERS}


def test_llama(ran):
    """Its attention has no norms."""
    assert_as_stock(with_lora(base("llama")))
    assert ran == {"adapted_linears": 2 * LAYERS, "adapted_gated_mlp": LAYERS}


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["down_proj"], ["gate_proj", "o_proj"]], ids=str)
def test_some_layers(ran, targets):
    assert_as_stock(with_lora(base(), target_modules=targets))
    attention = 1 if {"q_proj", "v_proj"} & set(targets) else 0
    mlp = 1 if {"gate_proj", "down_proj"} & set(targets) else 0
    assert ran["adapted_gated_mlp"] == mlp * LAYERS
    assert ran["adapted_linears"] == (attention + ("o_proj" in targets)) * LAYERS


def test_ranks_and_scales_of_their_own(ran):
    patterns = {"rank_pattern": {"q_proj": 7, "down_proj": 1}, "alpha_pattern": {"up_proj": 3}, "use_rslora": True}
    assert_as_stock(with_lora(base(), **patterns))
    assert ran["adapted_gated_mlp"] == LAYERS


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_gradient_checkpointing(ran, p, reentrant):
    model = base()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_as_stock(with_lora(model, lora_dropout=p))
    assert ran["adapted_gated_mlp"] == 2 * LAYERS


def test_200_steps_follow_stock_s_losses():
    curves = []
    for patched in (False, True):
        if patched:
            bastile.apply()
        try:
            model = with_lora(base(), init_lora_weights=True)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            losses = []
            for i in range(200):
                loss = model(**batch(i % 7)).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            curves.append(torch.tensor(losses))
        finally:
            bastile.reset()
    assert curves[0][-1] < curves[0][0] - 0.2  # it learns
    torch.testing.assert_close(*curves, rtol=1e-5, atol=0)


# The base's type, the adapters', and autocast's: PEFT's default, adapters of 32 bits under autocast; a whole model of
# 32 bits under autocast; adapters of the base's type without; and those of 32 bits without, a plain loop's of a model
# that was loaded in bfloat16.
MIXES = [
    (base_type, adapters_type, half if autocast else None)
    for half in (torch.bfloat16, torch.float16)
    for base_type, adapters_type, autocast in (
        (half, torch.float32, True),
        (torch.float32, torch.float32, True),
        (half, half, False),
    )
] + [(torch.bfloat16, torch.float32, None)]


@pytest.mark.parametrize(("base_type", "adapters_type", "autocast"), MIXES)
def test_a_model_in_16_bits_is_no_further_from_float64_than_stock(ran, base_type, adapters_type, autocast):
    """Gradients of a whole model scatter, all of one model together: so the ratio of the two errors is averaged (its
    logarithm) over a model's tensors, and these means over models. Theirs may be above 1 by luck alone."""
    scale, ratios = 1024.0 if torch.float16 in (base_type, autocast) else 1.0, []
    models = [with_lora(base(dtype=base_type, seed=seed)) for seed in range(16)]
    for model in models:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(adapters_type)
    batches = [batch(seed, 8, 33) for seed in range(len(models))]
    found = [step(model, autocast, of, scale) for model, of in zip(models, batches, strict=True)]
    assert ran == {"adapted_linears": 2 * LAYERS * len(models), "adapted_gated_mlp": LAYERS * len(models)}
    bastile.reset()
    for model, of, ours in zip(models, batches, found, strict=True):
        stock, exact = step(model, autocast, of, scale), step(copy.deepcopy(model).double(), None, of, scale)
        assert all(ours[name].dtype == stock[name].dtype for name in exact)
        errors = [[(one[n].double() - exact[n]).norm() for n in exact if n != "loss"] for one in (ours, stock)]
        ratios.append((torch.stack(errors[0]) / torch.stack(errors[1])).log().mean())
    means = torch.stack(ratios)
    assert means.mean() <= 2.5 * means.std() / len(models) ** 0.5


@pytest.mark.parametrize("late", [False, True])
def test_before_and_after_the_adapters_are_put_in(late):
    try:
        if not late:
            bastile.apply()
        model = with_lora(base())
        if late:
            bastile.apply()
        found = model(**batch()).loss
    finally:
        bastile.reset()
    torch.testing.assert_close(found, model(**batch()).loss)


def without_adapters(model: PeftModel) -> None:
    model.base_model.disable_adapter_layers()


def merged(model: PeftModel) -> None:
    model.merge_adapter()


def merged_and_disabled(model: PeftModel) -> None:
    merged(model)
    without_adapters(model)


def second_adapter(model: PeftModel) -> None:
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])


def a_hook(model: PeftModel) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda module, args, result: result * 1.5)


def reasons() -> set[str]:
    """Why layers with adapters stepped aside."""
    return {why for line in bastile.report() if line.operator == "lora_linear" for why in line.aside}


def said(found: set[str], *words: str) -> bool:
    return bool(found) and all(any(word in why for word in words) for why in found)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (merged_and_disabled, "merged and disabled"),
        (second_adapter, "several adapters are active"),
        (a_hook, "hooks"),
    ],
)
def test_what_runs_as_stock(ran, change, why):
    """Layers in such a state run PEFT's own code, bit for bit, and the report says why."""
    model = with_lora(base())
    change(model)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    x = random_tensor((3, SIZES["hidden_size"]), torch.float32, "cpu")
    bastile.report(reset=True)
    ours = layer(x)
    assert not ran
    assert said(reasons(), why)
    bastile.reset()
    assert_same_bits(ours, layer(x))


@pytest.mark.parametrize("diverged", [False, True])
@pytest.mark.parametrize("change", [without_adapters, merged])
def test_adapters_that_are_off_are_served(ran, change, diverged):
    """One that has diverged is nothing, once it is off."""
    model = with_lora(base())
    for name, parameter in model.named_parameters():
        if "lora_" in name and diverged and change is without_adapters:
            parameter.data.fill_(float("nan"))
    change(model)
    with torch.no_grad():
        got = model(**batch()).logits
        assert ran == {"adapted_linears": 2 * LAYERS, "adapted_gated_mlp": LAYERS}
        assert not reasons()
        bastile.reset()
        torch.testing.assert_close(got, model(**batch()).logits, rtol=1e-5, atol=1e-5)


def test_a_layer_whose_adapter_is_off_has_zeros_in_its_place():
    """So that the kernels are those that compute it with the adapter; of one that PEFT computes itself, none."""
    bastile.apply()
    for more, has_zeros in (({}, True), ({"use_dora": True}, False)):
        model = with_lora(base(), **more)
        without_adapters(model)
        module = model.base_model.model.model.layers[0].mlp.up_proj
        found = adapters.adapted(module, random_tensor((3, SIZES["hidden_size"]), torch.float32, "cpu"))
        assert found.weight is module.base_layer.weight
        for zeros, matrix in ((found.a, module.lora_A), (found.b, module.lora_B)):
            assert (zeros is not None) is has_zeros
            assert zeros is None or (zeros.shape == matrix["default"].weight.shape and not zeros.any())


def test_adapters_that_are_first_off_in_inference_mode(monkeypatch):
    """What is made there may be kept for passes of which gradients are wanted."""
    monkeypatch.setattr(adapters, "_ZEROS", {})
    bastile.apply()
    model = with_lora(base())
    without_adapters(model)
    with torch.inference_mode():
        model(**batch())
    model.base_model.model.model.embed_tokens.weight.requires_grad_(True)
    assert torch.isfinite(step(model)["loss"])


def embeddings(**more: Any) -> PeftModel:
    return with_lora(base(), target_modules=["embed_tokens", "q_proj"], **more)


def copies() -> PeftModel:
    """The head's copy is trained, and has no name in the report: the fused loss takes it."""
    return with_lora(base(), target_modules=["q_proj"], modules_to_save=["model.norm", "lm_head"])


def scaled() -> PeftModel:
    modules = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    return get_peft_model(base(), IA3Config(**modules)).train()


@pytest.mark.parametrize(
    ("made", "served", "left"),
    [
        (embeddings, LAYERS, "peft.tuners.lora.layer.Embedding (1)"),
        (copies, LAYERS, "peft.utils.other.ModulesToSaveWrapper (1)"),
        (scaled, 0, f"peft.tuners.ia3.layer.Linear ({2 * LAYERS})"),
    ],
)
def test_modules_of_peft_that_are_none_of_these_layers(ran, made, served, left):
    """They run as stock, which a note says; the layers beside them are served and counted."""
    bastile.report(reset=True)
    model = made()
    assert_as_stock(model)
    found = bastile.report()
    assert found.ran("lora_linear") == served
    assert found.ran("fused_linear_cross_entropy") == 1
    assert [note for note in found.notes if note.endswith(f"its own code: {left}")]
    del model
    gc.collect()
    assert not any("peft." in note for note in bastile.report().notes)


def test_every_layer_with_an_adapter_is_counted(ran):
    bastile.report(reset=True)
    step(with_lora(base()))
    assert bastile.report().ran("lora_linear") == 7 * LAYERS


def test_adapters_of_a_layer_are_rounded_in_one_launch(ran):
    """Once a pass has shown which they are; the first one of all shows that there are adapters."""
    model = with_lora(base())
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16), Memory() as memory:
            model(**batch()).loss.backward()
    assert memory.calls.count("aten._foreach_copy_.default") == LAYERS


@pytest.mark.parametrize("when", ["before", "behind"])
def test_one_model_alone(when, ran):
    """Patched before it has adapters or behind that: its layers have forwards of ours then, and are one node still.
    What PEFT puts in later, and is called by itself, is its own."""
    bastile.reset()
    bastile.report(reset=True)
    core = base()
    if when == "before":
        bastile.apply_to_model(core)
    model = with_lora(core)
    if when == "behind":
        bastile.apply_to_model(core)
    step(model)
    assert ran == {"adapted_linears": (1 if when == "before" else 2) * LAYERS, "adapted_gated_mlp": LAYERS}
    assert not reasons()


def test_another_adapter_in_mid_run(ran):
    model = with_lora(base())
    model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    first = model(**batch()).loss
    model.set_adapter("other")
    second = model(**batch()).loss
    count = ran["adapted_gated_mlp"]
    bastile.reset()
    torch.testing.assert_close(model(**batch()).loss, second)
    model.set_adapter("default")
    torch.testing.assert_close(model(**batch()).loss, first)
    assert count == 2 * LAYERS
    assert first != second


def test_dora_runs_as_stock(ran):
    model = with_lora(base(), use_dora=True)
    bastile.report(reset=True)
    assert_as_stock(model)
    assert not ran
    assert said(reasons(), "DoraLinearVariant")


def test_mixed_batches_run_as_stock(ran):
    model = with_lora(base()).eval()
    model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    names = ["default", "other"]
    bastile.report(reset=True)
    ours = model(**batch(), adapter_names=names).logits
    assert not ran
    assert said(reasons(), "not called with one tensor", "hooks")
    bastile.reset()
    torch.testing.assert_close(ours, model(**batch(), adapter_names=names).logits)


def test_saving_loading_and_merging(ran, tmp_path):
    model = with_lora(base()).eval()
    want = model(**batch()).logits
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(), tmp_path).eval()
    torch.testing.assert_close(loaded(**batch()).logits, want)
    torch.testing.assert_close(loaded.merge_and_unload()(**batch()).logits, want, rtol=1e-4, atol=1e-5)
    bastile.reset()
    torch.testing.assert_close(model(**batch()).logits, want)


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_compiled_without_a_graph_break(ran, p):
    """Each decoder layer: attention's three, the one behind it, the MLP."""
    model = with_lora(base(), lora_dropout=p)
    want = step(model)
    for layer in model.base_model.model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    ran.clear()
    found = step(model)
    assert ran["adapted_gated_mlp"]
    for name, gradient in want.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_adapters_on_the_parameters_of_experts(ran):
    """PEFT adds them to the weights, which our operator then multiplies by."""
    options = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**options))
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    before = bastile.report().ran("moe_experts")
    assert_as_stock(with_lora(model, target_modules=["q_proj", "k_proj", "v_proj"], target_parameters=experts))
    assert bastile.report().ran("moe_experts") == before + LAYERS
    assert ran == {"adapted_linears": LAYERS}


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_prompts_are_switched_off_by_peft(kind):
    """They stand before a model, which has its layers as `transformer` or as `model`."""
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=4) if kind == "gpt2" else Qwen3Config(**SIZES)
    torch.manual_seed(0)
    inner = (GPT2LMHeadModel if kind == "gpt2" else Qwen3ForCausalLM)(config).eval()
    want = inner(**batch()).loss
    model = get_peft_model(inner, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    bastile.apply()
    with model.disable_adapter():
        torch.testing.assert_close(model(**batch()).loss, want)
    assert model(**batch()).loss != want
    bastile.reset()
