"""PEFT's adapters on experts after bastile.apply(): real PEFT, real Transformers; their matrices are not made anew."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize

import bastile
from bastile.models import experts as experts_file
from bastile.models import small
from bastile.ops import moe
from conftest import gradients, tiny_batch
from graphing import DEVICE, ON_CUDA, allow_graphs, assert_alike

TYPES = ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "deepseek_v3"]
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
WRAPPED = "peft.tuners.lora.layer.ParamWrapper"
IS_NEW = tuple(map(int, peft.__version__.split(".")[:2])) >= (0, 21)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The parameters to which PEFT has added, by name."""
    names: list[str] = []
    stock = parametrize.register_parametrization

    def register(module: nn.Module, name: str, *more: Any, **kwargs: Any) -> Any:
        if name != "weight":  # a router's
            names.append(name)
        return stock(module, name, *more, **kwargs)

    monkeypatch.setattr(parametrize, "register_parametrization", register)
    yield names
    bastile.reset()


def made(model_type: str, dtype: torch.dtype = torch.float32, targets: Any = TARGETS, **values: Any) -> Any:
    """With adapters that change what experts make by about a third."""
    if model_type not in small.causal_types():
        pytest.skip(f"this Transformers has no {model_type}")
    base = small.small_model(model_type, **values).to(dtype)
    torch.manual_seed(0)
    options = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, "target_parameters": targets}
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "o_proj"], **options)).train()
    for name, parameter in model.named_parameters():
        if "lora_" in name and "experts" in name:
            parameter.data.mul_(0.3)
    return model


def step(model: Any, autocast: torch.dtype | None = None, batch: Any = None) -> dict[str, torch.Tensor]:
    given = batch or tiny_batch(model, 2, 17)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        loss = model(**given).loss
    loss.backward()
    return {"loss": loss.detach()} | gradients(model)


def served() -> tuple[int, dict[str, int]]:
    """Parameters of experts, and why others were left to PEFT."""
    lines = [line for line in bastile.report(reset=True) if line.where == WRAPPED]
    return sum(line.ran for line in lines), {why: n for line in lines for why, n in line.aside.items()}


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def assert_stock(model: Any, added: list[str], aside: set[str], ran: int = 0, **more: Any) -> None:
    """To the last bits of float32; aside: what the report says of parameters that are left to PEFT."""
    want = step(model, **more)
    bastile.apply()
    served()
    added.clear()
    got = step(model, **more)
    assert got.keys() == want.keys()
    for name, there in want.items():
        assert (got[name] - there).norm() <= 1e-5 * there.norm() + 1e-9, name
    count, why = served()
    assert (count, set(why)) == (ran, aside)
    assert bool(added) is bool(ran == 0)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("model_type", TYPES)
def test_the_numbers_of_stock(model_type: str, checkpoints: bool, added: list[str]) -> None:
    model = made(model_type)
    if checkpoints:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    assert_stock(model, added, set(), ran=2 * len(experts_of(model)) * (1 + checkpoints))


@pytest.mark.parametrize("model_type", TYPES)
def test_in_16_bits_no_further_from_float64_than_stock(model_type: str, added: list[str]) -> None:
    """Which rounds the sums of matrices and adapters to 16 bits. One layer's experts, for a router's choices turn with
    rounding; of each tensor the errors of several inputs together."""
    model = made(model_type, torch.bfloat16)
    around = next(module for module in model.modules() if type(module).__name__ == "ParamWrapper")
    exact = copy.deepcopy(around).double()
    config = copy.copy(exact.get_base_layer().config)
    config._experts_implementation = "eager"  # grouped products are of no float64
    exact.get_base_layer().config = config
    width, count = exact.get_base_layer().down_proj.shape[2 if exact.get_base_layer().is_transposed else 1], 4

    def run(module: Any, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(seed)
        rows = torch.randn(64, width, generator=drawn).bfloat16().to(dtype).requires_grad_()
        choices = torch.rand(64, count, generator=drawn).argsort(1)[:, :2]
        weights = torch.rand(64, 2, generator=drawn).bfloat16().to(dtype).requires_grad_()
        out = module(rows, choices, weights)
        out.backward(torch.randn(out.shape, generator=drawn).bfloat16().to(dtype))
        return {"out": out.detach(), "rows": rows.grad, "weights": weights.grad} | gradients(module)

    seeds = range(8)
    want = [run(exact, seed, torch.float64) for seed in seeds]
    stock = [run(around, seed, torch.bfloat16) for seed in seeds]
    bastile.apply()
    served()
    ours = [run(around, seed, torch.bfloat16) for seed in seeds]
    assert served() == (2 * len(seeds), {})
    for name in want[0]:
        errors = [
            sum(
                float((one[name].double() - other[name]).square().sum()) for one, other in zip(found, want, strict=True)
            )
            for found in (ours, stock)
        ]
        # Earlier PEFT rounds its sums to 16 bits, but not A and B, nor what becomes their gradients.
        assert errors[0] <= (1.1 if IS_NEW else 1.5) * errors[1], name


@pytest.mark.skipif(not IS_NEW, reason="earlier PEFT leaves experts out")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "olmoe"])
def test_all_linear_layers_are_experts_too(model_type: str, added: list[str]) -> None:
    base = small.small_model(model_type)
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)).train()
    adapted = [name for name, _ in model.named_parameters() if "lora_A" in name and "experts" in name]
    assert len(adapted) == 2 * len(experts_of(model)) > 0
    assert_stock(model, added, set(), ran=len(adapted))


def test_a_block_that_weights_what_its_experts_are_given(added: list[str]) -> None:
    """Llama 4's, whose experts get all tokens: with adapters on them the block runs its own code, and PEFT adds."""
    model = made("llama4_text")
    assert_stock(model, added, {"it is around a parameter of a module that is no experts which Bastile computes"})


@pytest.mark.parametrize("targets", [TARGETS[:1], TARGETS[1:]])
def test_one_of_the_parameters(targets: list[str], added: list[str]) -> None:
    model = made("qwen3_moe", targets=targets)
    assert_stock(model, added, set(), ran=len(experts_of(model)))


def test_adapters_that_are_switched_off(added: list[str]) -> None:
    """As a reference is, and those that add nothing yet agree with it to the bit."""
    model = made("qwen3_moe")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    bastile.apply()
    batch = tiny_batch(model, 2, 17)
    served()
    with torch.no_grad():
        policy = model(**batch).loss
        with model.disable_adapter():
            reference = model(**batch).loss
    assert torch.equal(policy, reference)
    assert served() == (2 * len(experts_of(model)), {})
    assert not added


def test_no_sums_of_matrices_are_kept(added: list[str]) -> None:
    """Which PEFT's backward pass reads."""
    model = made("qwen3_moe")
    own = {parameter.data_ptr() for parameter in model.parameters()}
    sizes = {experts.down_proj.numel() for experts in experts_of(model)}

    def kept() -> int:
        found: set[int] = set()

        def pack(t: torch.Tensor) -> torch.Tensor:
            if t.numel() in sizes and t.data_ptr() not in own:
                found.add(t.data_ptr())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(**tiny_batch(model, 1, 5)).loss.backward()
        return len(found)

    assert kept() >= len(experts_of(model))
    bastile.apply()
    assert kept() == 0


def test_merged_adapters(added: list[str]) -> None:
    model = made("qwen3_moe").eval()
    bastile.apply()
    batch = tiny_batch(model, 2, 17)
    with torch.no_grad():
        want = model(**batch).loss
        model.merge_adapter()
        served()
        torch.testing.assert_close(model(**batch).loss, want)
        assert served() == (0, {})
        model.unmerge_adapter()
        torch.testing.assert_close(model(**batch).loss, want)
        assert served()[0] == 2 * len(experts_of(model))


@pytest.mark.skipif(not IS_NEW, reason="earlier PEFT has one on parameters")
def test_several_adapters(added: list[str]) -> None:
    model = made("qwen3_moe")
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    model.base_model.set_adapter(["default", "other"])
    assert_stock(model, added, {"several adapters are active at once"})
    bastile.reset()
    model.set_adapter("other")
    assert_stock(model, added, set(), ran=2 * len(experts_of(model)))


def test_experts_that_someone_has_chosen(added: list[str]) -> None:
    model = made("qwen3_moe")
    model.get_base_model().set_experts_implementation("eager")
    assert_stock(model, added, {"its experts are left to other code"})


def test_experts_that_are_trained_too(added: list[str]) -> None:
    """Get gradients of the sums, which are made for that."""
    model = made("qwen3_moe")
    for experts in experts_of(model):
        experts.down_proj.requires_grad_()
    want = step(model)
    bastile.apply()
    served()
    got = step(model)
    assert any(name.endswith("down_proj") for name in want)
    for name, there in want.items():
        assert (got[name] - there).norm() <= 1e-5 * there.norm() + 1e-9, name
    assert served()[0] == 2 * len(experts_of(model))


def test_experts_that_something_else_calls(added: list[str]) -> None:
    """And not their forward: what is added is not lost."""
    model = made("qwen3_moe")
    for experts in experts_of(model):
        stock = type(experts).forward
        experts._compiled_call_impl = lambda *args, e=experts, f=stock: f(e, *args)
    assert_stock(model, added, {"its experts were called in another way than by their forward"})


def test_experts_with_a_forward_of_their_own(added: list[str]) -> None:
    model = made("qwen3_moe")
    for experts in experts_of(model):
        stock = type(experts).forward
        experts.forward = lambda *args, e=experts, f=stock: f(e, *args)
    assert_stock(model, added, {"it is around a parameter of a module that is no experts which Bastile computes"})


def test_weights_that_are_gathered_for_a_call(added: list[str]) -> None:
    """DeepSpeed's, by its mark, of which a module's own call sees all."""
    model = made("qwen3_moe")
    for name, parameter in model.named_parameters():
        if "lora_A" in name and "experts" in name:
            parameter.ds_id = 0
    assert_stock(model, added, {"weights that are sharded, or of a type that Bastile does not compute in"})


def test_a_class_that_adds_another_product(added: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora.layer import ParamWrapper

    model = made("qwen3_moe")
    kind = type("Other", (ParamWrapper,), {"get_delta_weight": lambda self, name: 2 * self.stock(name)})
    kind.stock = ParamWrapper.get_delta_weight  # type: ignore[attr-defined]
    for module in list(model.modules()):
        if type(module) is ParamWrapper:
            module.__class__ = kind
    bastile.apply()
    served()
    step(model)
    assert served() == (0, {"the class adds another product than that of A and B": 2 * len(experts_of(model))})


def test_without_the_operators(added: list[str]) -> None:
    model = made("qwen3_moe")
    for off in ("lora_linear", "moe_experts"):
        bastile.apply(**{off: False})
        added.clear()
        step(model)
        assert len(added) == 2 * len(experts_of(model)), off
        bastile.reset()


def test_one_model_alone(added: list[str]) -> None:
    model, other = made("qwen3_moe"), made("qwen3_moe")
    want = step(model)
    bastile.apply_to_model(model)
    added.clear()
    got = step(model)
    assert not added
    for name, there in want.items():
        assert (got[name] - there).norm() <= 1e-5 * there.norm() + 1e-9, name
    step(other)
    assert added


def test_an_error_leaves_nothing_behind(added: list[str]) -> None:
    """What was handed to a call that failed is not taken by the next one."""
    model = made("qwen3_moe")
    bastile.apply()
    first = experts_of(model)[0]
    hook = first.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model)
    hook.remove()
    model.zero_grad()
    served()
    got = step(model)
    assert served() == (2 * len(experts_of(model)), {})
    bastile.reset()
    want = step(model)
    for name, there in want.items():
        assert (got[name] - there).norm() <= 1e-5 * there.norm() + 1e-9, name


@pytest.mark.parametrize("adapted", [False, True])
def test_a_second_run_leaves_out_the_second_product(adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint, whose result nobody reads: products of rows with whole matrices are gate_up's and down's, then
    gate_up's again, then those of two gradients."""
    model = made("qwen3_moe") if adapted else small.small_model("qwen3_moe").train()
    model.gradient_checkpointing_enable()
    if adapted:
        model.enable_input_require_grads()
    bastile.apply()
    inner = experts_of(model)[0].down_proj.shape[2]
    calls = []
    for module in (moe, __import__("bastile.ops.adapted_experts", fromlist=["_"])):
        stock = module.grouped_rows

        def counted(rows: Any, matrices: Any, *more: Any, stock: Any = stock) -> Any:
            calls.append(min(matrices.shape[1:]))
            return stock(rows, matrices, *more)

        monkeypatch.setattr(module, "grouped_rows", counted)
    step(model)
    bastile.reset()
    assert sum(least >= inner for least in calls) == 5 * len(experts_of(model))


def test_frozen_experts_in_float32_are_told_of(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Where autocast has everything else in bfloat16 on a GPU; once, and in the report. Not where they are trained, nor
    without autocast, nor in bfloat16."""
    monkeypatch.setattr(experts_file, "_wide", set())
    trained = small.small_model("qwen3_moe").train()
    bastile.apply()
    device = torch.device(DEVICE).type
    batch = tiny_batch(trained, 2, 17)

    def run(model: Any, enabled: bool = True) -> list[str]:
        caplog.clear()
        given = {name: t.to(DEVICE) for name, t in batch.items()}
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            model.to(DEVICE)(**given)
        return [record.message for record in caplog.records if "float32" in record.message]

    assert ON_CUDA or not run(made("qwen3_moe"))  # it is a GPU's
    monkeypatch.setattr(experts_file, "on_gpu", lambda _: True)
    assert not run(trained)
    assert not run(made("qwen3_moe"), enabled=False)
    assert not run(made("qwen3_moe", torch.bfloat16))
    assert not any("float32" in note for note in bastile.report().notes)
    model = made("qwen3_moe")
    (said,) = run(model)
    assert "Qwen3MoeExperts are float32" in said
    assert not run(model)
    assert said in bastile.report().notes


@pytest.mark.parametrize("checkpoints", [False, True])
def test_graphs(checkpoints: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch)
    model = made("qwen3_moe", torch.bfloat16 if ON_CUDA else torch.float32).to(DEVICE)
    if checkpoints:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    assert not assert_alike(model, 3).aside
    bastile.reset()
