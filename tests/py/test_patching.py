"""apply, apply_to_model, reset, get_patched_ops: what they change, what they leave, what they refuse."""

import copy
import inspect
import re
from itertools import permutations
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel, GPT2Model

import bastile
from bastile.models.rebind import wrapped_cell
from bastile.models.table import OPERATORS, USUAL
from bastile.ops.rms_norm import BastileRMSNorm
from bastile.ops.swiglu import BastileSwiGLUMLP
from conftest import DENSE, calls_of_a_step, modeling, on_demand, tiny_batch, tiny_model
from families import FAMILIES, everywhere
from oracle import few_examples

families = pytest.mark.parametrize("family", sorted(DENSE))
EVERY = [name for row in FAMILIES.values() for name in row.patches()]
TYPES = list(FAMILIES)


def all_of(family: str, *without: str) -> list[str]:
    """The names of the family's patches, but for these operators'."""
    return [f"{operator}_{family}" for operator in FAMILIES[family].operators if operator not in without]


def cell_in(family: str, name: str | None) -> Any:
    """What Transformers' wrappers around a class's forward call; None in releases that have no such wrapper."""
    return wrapped_cell(getattr(modeling(family), name or "").forward)


WRAPPED = {family: cell_in(family, FAMILIES[family].layer_class) for family in DENSE}
HEADS = {family: cell_in(family, FAMILIES[family].causal_lm_class) for family in DENSE}
ATTENTIONS = {family: cell_in(family, FAMILIES[family].attention_class) for family in DENSE}


def pieces(family: str = "qwen3") -> dict[str, Any]:
    """The objects that each operator's patch replaces, as they are now."""
    row, module = FAMILIES[family], modeling(family)

    def forward(name: str | None) -> Any:
        return vars(vars(module)[name])["forward"]

    cell, attention = WRAPPED[family], ATTENTIONS[family]
    found = {
        "rms_norm": forward(row.norm_class),
        "swiglu": forward(row.mlp_class),
        "rope": vars(module)[row.rotary_function],
        "fused_linear_cross_entropy": HEADS[family].cell_contents,
        "qk_norm_rope": forward(row.attention_class) if attention is None else attention.cell_contents,
        "add_rms_norm": forward(row.layer_class) if cell is None else cell.cell_contents,
        "masked_attention": vars(module)[row.mask_function],
        "recompute": forward(row.backbone_class),
        "cuda_graphs": forward(row.backbone_class),
        "padding_free": forward(row.backbone_class),
    }
    return {operator: found[operator] for operator in row.operators}


#: They replace the backbone's forward, one within the other.
ON_BACKBONES = {"recompute", "offload_checkpoints", "cuda_graphs", "padding_free"}


def runs_stock(model: torch.nn.Module) -> bool:
    return all("forward" not in vars(module) for module in model.modules())


#: These families have no place for it, so that it cannot be asked for by its name.
NOWHERE = {"causal_conv1d", "gated_delta_rule", "gated_rms_norm", "mamba2_scan", "chunked_attention"}


@settings(few_examples, max_examples=16)
@given(st.tuples(*[st.just(False) if operator in NOWHERE else st.booleans() for operator in OPERATORS]))
def test_apply_changes_what_was_chosen_and_reset_restores_the_very_objects(flags: tuple[bool, ...]) -> None:
    before = {family: pieces(family) for family in DENSE}
    given = {op for op, flag in zip(OPERATORS, flags, strict=True) if flag}
    chosen = {op for op in given if given.issuperset(OPERATORS[op].needs)}
    names = [name for row in FAMILIES.values() for name in row.patches(chosen)]
    assert bastile.apply(*flags, model_types=TYPES) == names == bastile.get_patched_ops()
    for family, stock in before.items():
        changed = {op for op, piece in pieces(family).items() if piece is not stock[op]}
        wanted = chosen | (ON_BACKBONES if chosen & ON_BACKBONES else set())
        assert changed == wanted & set(FAMILIES[family].operators)
    assert bastile.reset() == names
    for family, stock in before.items():
        assert all(piece is stock[op] for op, piece in pieces(family).items())
    assert bastile.get_patched_ops() == []


@pytest.mark.parametrize("function", [bastile.apply, bastile.apply_to_model])
def test_each_operator_is_an_argument(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    operators = [name for name, row in OPERATORS.items() if row.of_a_model or function is bastile.apply]
    assert [name for name in parameters if name not in ("model", "model_types")] == operators
    defaults = {operator: parameters[operator].default for operator in operators}
    assert defaults == {operator: operator in USUAL for operator in operators} | {"cuda_graphs": "auto"}


def test_families_lack_what_they_have_no_place_for() -> None:
    assert bastile.apply(model_types="llama") == all_of("llama")
    assert "qk_norm_rope_llama" not in all_of("llama")
    others = ("moe_experts", "sink_attention", *NOWHERE, "lora_linear", "autocast_linear", "layer_norm", "adamw")
    others += ("frozen_bf16",)
    assert set(all_of("qwen3")) == {f"{operator}_qwen3" for operator in USUAL if operator not in others}
    with pytest.raises(ValueError, match="unknown patch 'qk_norm_rope_llama'"):
        bastile.reset(["qk_norm_rope_llama"])


def test_apply_states_what_is_in_force() -> None:
    """A second call takes out what it does not name, adds what it does, and leaves the rest as it is."""
    before = pieces()
    without = [name for name in EVERY if not name.startswith(("rope", "qk_norm_rope"))]
    assert bastile.apply(rope=False, model_types=TYPES) == without == bastile.get_patched_ops()
    first = pieces()
    assert bastile.apply(model_types=TYPES) == EVERY == bastile.get_patched_ops()
    second = pieces()
    assert all((second[op] is first[op]) == (op not in ("rope", "qk_norm_rope")) for op in second)
    assert bastile.apply(model_types=TYPES) == EVERY
    assert pieces() == second
    assert bastile.apply(rope=False, model_types=TYPES) == without == bastile.get_patched_ops()
    assert pieces() == first
    assert bastile.apply(**dict.fromkeys(OPERATORS, False), model_types=TYPES) == []
    assert pieces() == before


def test_apply_concerns_the_types_that_it_is_given() -> None:
    bastile.apply(model_types=TYPES)
    assert bastile.apply(rope=False, model_types=["llama"]) == all_of("llama", "rope")
    assert bastile.get_patched_ops() == [name for name in EVERY if name != "rope_llama"]
    assert bastile.apply(model_types=["qwen3"]) == all_of("qwen3")
    assert bastile.get_patched_ops() == [name for name in EVERY if name != "rope_llama"]


@pytest.mark.parametrize("whole_process", [True, False])
@families
def test_what_fuses_two_operators_needs_both(family: str, whole_process: bool, calls: dict[str, int]) -> None:
    model = tiny_model(family)
    for off, fused in (("rope", ["qk_norm_rope"]), ("rms_norm", ["add_rms_norm", "qk_norm_rope"])):
        want = all_of(family, off, *fused)
        flags = {off: False}
        got = bastile.apply(model_types=family, **flags) if whole_process else bastile.apply_to_model(model, **flags)
        assert got == want == bastile.get_patched_ops(model)
        calls.clear()
        model(**tiny_batch(model))
        assert calls.keys().isdisjoint({off, *fused})
        assert ("projections" in calls) == (off != "rope" and not FAMILIES[family].q_norm)


@pytest.mark.parametrize(("arguments", "what"), [(("qwen3",), "rms_norm is 'qwen3'"), ((True, 1), "swiglu is 1")])
def test_operators_are_true_or_false(arguments: tuple[Any, ...], what: str) -> None:
    for call in (lambda: bastile.apply(*arguments), lambda: bastile.apply_to_model(tiny_model(), *arguments)):
        with pytest.raises(TypeError, match=rf'{what}; True or False is needed.*model_types=\["qwen3"\]'):
            call()
    assert bastile.get_patched_ops() == []


@families
def test_reset_of_some_leaves_the_others(family: str) -> None:
    before = pieces(family)
    bastile.apply(model_types=TYPES)
    for operator in FAMILIES[family].operators:
        name = f"{operator}_{family}"
        assert bastile.reset([name]) == [name]
        assert bastile.reset([name]) == []
        if operator not in ON_BACKBONES:
            assert pieces(family)[operator] is before[operator]
        assert bastile.get_patched_ops() == [other for other in EVERY if other != name]
        assert bastile.apply(model_types=TYPES) == EVERY
    with pytest.raises(ValueError, match=r"unknown patch 'rope_gpt9'.*rms_norm_qwen3"):
        bastile.reset(["rope_gpt9"])


@pytest.mark.parametrize(("first", "second"), permutations(sorted(ON_BACKBONES), 2))
def test_two_on_one_place_are_taken_out_apart(first: str, second: str) -> None:
    """In whatever order they came and go, each is in force until it is taken out, and the very object comes back."""
    before, needed = pieces(), {need for each in (first, second) for need in OPERATORS[each].needs}
    calls, patches = {name: name in needed for name in OPERATORS}, FAMILIES["qwen3"].patches
    for leaves, stays in ((first, second), (second, first)):
        bastile.apply(model_types="qwen3", **{**calls, first: True})
        names = bastile.apply(model_types="qwen3", **{**calls, first: True, second: True})
        assert names == patches({first, second, *needed})
        assert bastile.reset([f"{leaves}_qwen3"]) == [f"{leaves}_qwen3"]
        assert bastile.get_patched_ops() == patches({stays, *needed})
        bastile.report(reset=True)
        tiny_model()(**tiny_batch(tiny_model()))
        assert leaves not in {line.operator for line in bastile.report()}
        assert pieces() != before
        assert bastile.reset() == patches({stays, *needed})
        assert pieces() == before


@families
def test_models_built_before_and_after_are_both_served(family: str, calls: dict[str, int]) -> None:
    before = tiny_model(family)
    bastile.apply()
    after = tiny_model(family)
    for model in (before, after):
        calls.clear()
        assert on_demand(model(**tiny_batch(model)).logits)
        assert calls == calls_of_a_step(family)
    bastile.reset()
    calls.clear()
    assert not on_demand(before(**tiny_batch(before)).logits)
    assert calls == {}


@pytest.mark.parametrize("whole_process", [True, False])
@families
def test_operators_that_share_a_place_are_put_in_and_taken_out_apart(
    family: str, whole_process: bool, calls: dict[str, int]
) -> None:
    """A layer's fused forward calls neither of the norms it replaces, an attention's no rotary function; without the
    one the other takes over, whichever was there first."""
    model = tiny_model(family)
    target: dict[str, Any] = {} if whole_process else {"model": model}
    put = bastile.apply if whole_process else bastile.apply_to_model

    def counted() -> dict[str, int]:
        calls.clear()
        model(**tiny_batch(model))
        return dict(calls)

    put(**target)
    for operator in FAMILIES[family].operators:
        assert bastile.reset([f"{operator}_{family}"], **target) == [f"{operator}_{family}"]
        want = calls_of_a_step(family, **{operator: True})
        assert counted() == want, operator
        put(**target)
        assert counted() == calls_of_a_step(family)


def test_replacements_keep_the_names_and_signatures_that_others_inspect() -> None:
    def described() -> list[tuple[str, inspect.Signature]]:
        return [
            (getattr(piece, "__qualname__", ""), inspect.signature(piece))
            for family in sorted(DENSE)
            for piece in pieces(family).values()
        ]

    stock = described()
    bastile.apply()
    assert described() == stock


def test_unsupported_model_types_are_named_with_what_is_supported() -> None:
    supported = re.escape(f"the types of transformers {transformers.__version__}, such as ") + ".*gpt2"
    with pytest.raises(ValueError, match=f"'gpt9' is not supported; supported are: {supported}"):
        bastile.apply(model_types=["qwen3", "gpt9"])
    assert bastile.get_patched_ops() == []
    config = GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, n_positions=8)
    other = GPT2Model(config).h[0].attn.c_attn
    with pytest.raises(ValueError, match="no module of Conv1D, which has the model type None, runs code that bastile"):
        bastile.apply_to_model(other)
    assert runs_stock(other)
    given = bastile.apply_to_model(GPT2LMHeadModel(config))
    assert given == ["swiglu_gpt2", "fused_linear_cross_entropy_gpt2", "layer_norm_gpt2", "cuda_graphs_gpt2"]
    bastile.reset()
    with pytest.raises(ValueError, match="model type None"):
        bastile.apply_to_model(torch.nn.Linear(2, 2))


@families
def test_apply_to_model_touches_that_model_only(family: str, calls: dict[str, int]) -> None:
    before = pieces(family)
    patched, other = tiny_model(family), tiny_model(family)
    assert bastile.apply_to_model(patched) == all_of(family)
    assert bastile.apply_to_model(patched) == all_of(family)
    assert all(piece is before[op] for op, piece in pieces(family).items())
    assert runs_stock(other)
    assert bastile.get_patched_ops() == []
    assert bastile.get_patched_ops(patched) == all_of(family)
    assert bastile.get_patched_ops(other) == []
    assert not on_demand(other(**tiny_batch(other)).logits)
    assert calls == {}
    assert on_demand(patched(**tiny_batch(patched)).logits)
    assert calls == calls_of_a_step(family)
    assert bastile.reset([f"swiglu_{family}"], model=patched) == [f"swiglu_{family}"]
    calls.clear()
    patched(**tiny_batch(patched))
    assert calls == calls_of_a_step(family, swiglu=True)
    assert bastile.reset(model=patched) == all_of(family, "swiglu")
    assert runs_stock(patched)


@families
def test_class_and_model_patches_are_taken_out_apart(family: str, calls: dict[str, int]) -> None:
    model = tiny_model(family)
    bastile.apply(swiglu=False)
    own = ("swiglu", "fused_linear_cross_entropy", "masked_attention", "recompute", "cuda_graphs", "padding_free")
    assert bastile.apply_to_model(model, rms_norm=False, rope=False) == [f"{name}_{family}" for name in own]
    assert bastile.get_patched_ops(model) == everywhere(all_of(family), family)
    model(**tiny_batch(model))
    assert calls == calls_of_a_step(family)
    bastile.reset(model=model)
    assert runs_stock(model)
    assert bastile.get_patched_ops(model) == everywhere(all_of(family, "swiglu"), family)
    calls.clear()
    model(**tiny_batch(model))
    assert calls == calls_of_a_step(family, swiglu=True)


@families
def test_a_model_patched_by_itself_keeps_that_when_the_process_is_reset(family: str, calls: dict[str, int]) -> None:
    """Whatever was patched first, a model's own methods are made of Transformers' code, not of the process's patch."""
    for order in ((bastile.apply, bastile.apply_to_model), (bastile.apply_to_model, bastile.apply)):
        model, other = tiny_model(family), tiny_model(family)
        for put in order:
            put(model) if put is bastile.apply_to_model else put()
        calls.clear()
        model(**tiny_batch(model))
        assert calls == calls_of_a_step(family)
        twin = copy.deepcopy(model)  # which reset does not know
        bastile.reset()
        for stock in (model, other):
            calls.clear()
            stock(**tiny_batch(stock))
            assert calls == {}
        twin(**tiny_batch(twin))
        assert calls == calls_of_a_step(family)


def test_apply_to_model_states_what_is_in_force() -> None:
    model = tiny_model()
    bastile.apply_to_model(model)
    assert bastile.apply_to_model(model, swiglu=False, recompute=False) == all_of("qwen3", "swiglu", "recompute")
    assert bastile.get_patched_ops(model) == all_of("qwen3", "swiglu", "recompute")
    assert "forward" not in vars(model.model.layers[0].mlp)
    none = {name: False for name, row in OPERATORS.items() if row.of_a_model}
    assert bastile.apply_to_model(model, **none) == []
    assert runs_stock(model)


def test_reset_without_a_model_reaches_every_patched_model() -> None:
    models = [tiny_model(family) for family in sorted(DENSE)]
    for model in models:
        bastile.apply_to_model(model)
    assert bastile.reset() == [name for family in sorted(DENSE) for name in all_of(family)]
    assert all(runs_stock(model) for model in models)


@families
def test_wrappers_are_looked_through(family: str) -> None:
    lora = get_peft_model(tiny_model(family), LoraConfig(target_modules=["q_proj", "gate_proj"], r=2))
    served = {*all_of(family), f"lora_linear_{family}"}
    adapted = [name for name in (f"{op}_{family}" for op in OPERATORS) if name in served]
    for wrapped, names in (
        (lora, adapted),
        (torch.compile(lora, backend="eager"), adapted),
        (torch.nn.DataParallel(tiny_model(family)), all_of(family)),
    ):
        assert bastile.apply_to_model(wrapped) == names
        assert bastile.get_patched_ops(wrapped) == names
        assert bastile.reset(model=wrapped) == names


@families
def test_a_model_without_a_language_model_head_gets_the_rest(family: str) -> None:
    classifier = AutoModelForSequenceClassification.from_config(tiny_model(family).config)
    names = all_of(family, "fused_linear_cross_entropy")
    assert bastile.apply_to_model(classifier) == names
    bastile.reset()
    bastile.apply()
    assert bastile.get_patched_ops(classifier) == everywhere(names, family)


def test_a_subclass_with_its_own_forward_keeps_it() -> None:
    class Doubling(modeling("qwen3").Qwen3MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp = Doubling(model.config)
    assert "swiglu_qwen3" not in bastile.apply_to_model(model)
    x = torch.ones(1, 1, 32)
    assert torch.equal(model.model.layers[0].mlp(x), 2 * x)


def test_a_module_whose_forward_someone_replaced_keeps_it() -> None:
    model = tiny_model()
    model.model.norm.forward = lambda x: 3 * x
    bastile.apply_to_model(model)
    x = torch.ones(1, 1, 32)
    assert torch.equal(model.model.norm(x), 3 * x)


def test_copies_of_a_patched_model_run_their_own_weights_and_can_be_reset() -> None:
    model = tiny_model()
    bastile.apply_to_model(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.norm.weight.zero_()
    assert twin(**tiny_batch(twin)).loss.item() == pytest.approx(torch.tensor(101.0).log().item())
    assert model(**tiny_batch(model)).loss.item() != pytest.approx(torch.tensor(101.0).log().item())
    assert bastile.reset(model=twin) == all_of("qwen3")
    assert runs_stock(twin)
    assert not runs_stock(model)


def replica(model: torch.nn.Module, factor: float) -> torch.nn.Module:
    """What DataParallel makes for another device: copies of the modules, with tensors in place of their parameters.
    Here they are `factor` times as large, to tell them from the model's."""
    made = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, copied in made.items():
        copied._former_parameters = {}
        for name, child in module.named_children():
            setattr(copied, name, made[child])
        for name, parameter in module._parameters.items():
            setattr(copied, name, None if parameter is None else factor * parameter)
    return made[model]


@families
def test_replicas_of_a_patched_model_run_their_own_weights(family: str, calls: dict[str, int]) -> None:
    model = tiny_model(family)
    batch = tiny_batch(model)
    want = replica(model, 0.5)(**batch).loss
    assert bastile.apply_to_model(model) == all_of(family)
    got = replica(model, 0.5)(**batch).loss
    torch.testing.assert_close(got, want)
    assert "projections" not in calls  # the weights are no parameters now, and their layers are called
    assert {**calls_of_a_step(family), **calls} == calls_of_a_step(family)
    got.backward()
    assert model.lm_head.weight.grad.any()
    assert bastile.reset(model=model) == all_of(family)
    assert runs_stock(model)
    assert all("_replicate_for_data_parallel" not in vars(module) for module in model.modules())


@families
def test_single_modules_are_replaced(family: str, calls: dict[str, int]) -> None:
    """The modules of bastile.ops in place of a model's own, without any patch."""
    model = tiny_model(family)
    batch = tiny_batch(model)
    want = model(**batch)
    for layer in model.model.layers:
        layer.mlp = BastileSwiGLUMLP.from_module(layer.mlp)
        layer.input_layernorm = BastileRMSNorm.from_module(layer.input_layernorm)
    model.model.norm = BastileRMSNorm.from_module(model.model.norm)
    got = model(**batch)
    torch.testing.assert_close(got.loss, want.loss)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    got.loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.any()
    # Patches go around them: a norm of another class is called, beside those that are the model's own.
    bastile.apply()
    torch.testing.assert_close(model(**batch).loss, want.loss)
    assert calls["add_rms_norm"] == 2  # of four
    assert "swiglu" not in calls


def test_hooks_of_accelerate_stay_in_force(calls: dict[str, int]) -> None:
    class Doubles(ModelHook):
        def post_forward(self, module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
            return 2 * output

    model = tiny_model()
    norm = model.model.norm
    x = torch.randn(1, 3, 32)
    plain = norm(x)
    add_hook_to_module(norm, Doubles())
    bastile.apply_to_model(model)
    torch.testing.assert_close(norm(x), 2 * plain)
    assert calls == {"rms_norm": 1}
    bastile.reset(model=model)
    torch.testing.assert_close(norm(x), 2 * plain)
    assert calls == {"rms_norm": 1}
    remove_hook_from_module(norm)
    assert torch.equal(norm(x), plain)
