"""apply, apply_to_model, reset, get_patched_ops: what they change, what they leave, what they refuse."""

import copy
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForSequenceClassification
from transformers.models.qwen3 import modeling_qwen3

import bastile
from bastile.models.table import OPERATORS
from conftest import tiny_batch, tiny_model

ALL = [f"{operator}_qwen3" for operator in OPERATORS]


def pieces() -> dict[str, Any]:
    """The objects that each operator's patch replaces, as they are now."""
    return {
        "rms_norm": modeling_qwen3.Qwen3RMSNorm.__dict__["forward"],
        "swiglu": modeling_qwen3.Qwen3MLP.__dict__["forward"],
        "rope": modeling_qwen3.__dict__["apply_rotary_pos_emb"],
        "fused_linear_cross_entropy": modeling_qwen3.Qwen3ForCausalLM.__dict__["forward"],
        "recompute": modeling_qwen3.Qwen3Model.__dict__["forward"],
    }


def runs_stock(model: torch.nn.Module) -> bool:
    return all("forward" not in vars(module) for module in model.modules())


@settings(max_examples=16, deadline=None)
@given(st.tuples(*[st.booleans()] * len(OPERATORS)))
def test_apply_changes_what_was_chosen_and_reset_restores_the_very_objects(flags: tuple[bool, ...]) -> None:
    before = pieces()
    chosen = {op for op, flag in zip(OPERATORS, flags, strict=True) if flag}
    names = [f"{op}_qwen3" for op in OPERATORS if op in chosen]
    assert bastile.apply(*flags) == names == bastile.get_patched_ops()
    assert {op for op, piece in pieces().items() if piece is not before[op]} == chosen
    assert bastile.reset() == names
    assert all(piece is before[op] for op, piece in pieces().items())
    assert bastile.get_patched_ops() == []


def test_apply_twice_changes_nothing_the_second_time() -> None:
    before = pieces()
    assert bastile.apply(rope=False) == [name for name in ALL if not name.startswith("rope")]
    first = pieces()
    assert bastile.apply() == ALL
    second = pieces()
    assert all(second[op] is first[op] for op in OPERATORS if op != "rope")
    bastile.reset()
    assert all(piece is before[op] for op, piece in pieces().items())


def test_reset_of_some_leaves_the_others() -> None:
    before = pieces()
    bastile.apply()
    assert bastile.reset(["rope_qwen3"]) == ["rope_qwen3"]
    assert bastile.reset(["rope_qwen3"]) == []
    assert pieces()["rope"] is before["rope"]
    assert bastile.get_patched_ops() == [name for name in ALL if name != "rope_qwen3"]
    with pytest.raises(ValueError, match=r"unknown patch 'rope_gpt9'.*rms_norm_qwen3"):
        bastile.reset(["rope_gpt9"])


def test_models_built_before_and_after_are_both_served(calls: dict[str, int]) -> None:
    before = tiny_model()
    bastile.apply()
    after = tiny_model()
    for model in (before, after):
        calls.clear()
        assert model(**tiny_batch(model)).logits is None
        # Two norms in each of two layers, two more in its attention, one at the end.
        assert calls == {"rms_norm": 9, "swiglu": 2, "rope": 2, "fused_linear_cross_entropy": 1}
    bastile.reset()
    calls.clear()
    assert before(**tiny_batch(before)).logits is not None
    assert calls == {}


def test_replacements_keep_the_names_and_signatures_that_others_inspect() -> None:
    import inspect

    stock = inspect.signature(modeling_qwen3.Qwen3ForCausalLM.forward)
    bastile.apply()
    patched = modeling_qwen3.Qwen3ForCausalLM.forward
    assert inspect.signature(patched) == stock
    assert patched.__qualname__ == "Qwen3ForCausalLM.forward"


def test_unsupported_model_types_are_named_with_what_is_supported() -> None:
    with pytest.raises(ValueError, match=r"'gpt9' is not supported; supported are: qwen3"):
        bastile.apply(model_types=["qwen3", "gpt9"])
    assert bastile.get_patched_ops() == []
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has the model type 'llama'.*supported are: qwen3"):
        bastile.apply_to_model(llama)
    with pytest.raises(ValueError, match="model type None"):
        bastile.apply_to_model(torch.nn.Linear(2, 2))


def _without(name: str) -> Any:
    return lambda patch: patch.delattr(modeling_qwen3, name)


def _renamed_argument(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", lambda q, k, cos, sin, axis=1: (q, k))


def _renamed_attribute(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", lambda self, x: self.weight * x * self.epsilon)


def _rotary_called_by_another_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_qwen3.Qwen3Attention, "forward", lambda self, x: self.rotate(x))


@pytest.mark.parametrize(
    ("change", "piece"),
    [
        (_without("Qwen3MLP"), "Qwen3MLP"),
        (_without("apply_rotary_pos_emb"), "apply_rotary_pos_emb"),
        (_renamed_argument, "argument 'unsqueeze_dim' of apply_rotary_pos_emb"),
        (_renamed_attribute, "'variance_epsilon' in Qwen3RMSNorm.forward"),
        (_rotary_called_by_another_name, "'apply_rotary_pos_emb' in Qwen3Attention.forward"),
    ],
)
def test_a_release_that_moved_a_piece_is_reported_and_all_stays_stock(
    change: Any, piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    with monkeypatch.context() as patch:
        change(patch)
        before = (
            dict(vars(modeling_qwen3)),
            {c: c.__dict__.get("forward") for c in vars(modeling_qwen3).values() if isinstance(c, type)},
        )
        for call in (bastile.apply, lambda: bastile.apply_to_model(model)):
            with pytest.raises(RuntimeError) as caught:
                call()
            assert f"transformers {transformers.__version__} lacks" in str(caught.value)
            assert piece in str(caught.value)
        assert before[0] == vars(modeling_qwen3)
        assert all(c.__dict__.get("forward") is forward for c, forward in before[1].items())
        assert bastile.get_patched_ops() == []
        assert runs_stock(model)


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(RuntimeError, match=r"needs transformers >= 5\.0\.0; installed is 4\.57\.1"):
        bastile.apply()


def test_reset_refuses_to_throw_away_what_others_put_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    bastile.apply()
    with monkeypatch.context() as patch:
        patch.setattr(modeling_qwen3.Qwen3MLP, "forward", lambda self, x: x)
        with pytest.raises(RuntimeError, match=r"other code has replaced Qwen3MLP\.forward"):
            bastile.reset()
        assert bastile.get_patched_ops() == ALL
    assert bastile.reset() == ALL


def test_apply_to_model_touches_that_model_only(calls: dict[str, int]) -> None:
    before = pieces()
    patched, other = tiny_model(), tiny_model()
    assert bastile.apply_to_model(patched) == ALL
    assert bastile.apply_to_model(patched) == ALL
    assert all(piece is before[op] for op, piece in pieces().items())
    assert runs_stock(other)
    assert bastile.get_patched_ops() == []
    assert bastile.get_patched_ops(patched) == ALL
    assert bastile.get_patched_ops(other) == []
    assert other(**tiny_batch(other)).logits is not None
    assert calls == {}
    assert patched(**tiny_batch(patched)).logits is None
    assert calls == {"rms_norm": 9, "swiglu": 2, "rope": 2, "fused_linear_cross_entropy": 1}
    assert bastile.reset(["rope_qwen3"], model=patched) == ["rope_qwen3"]
    calls.clear()
    patched(**tiny_batch(patched))
    assert calls == {"rms_norm": 9, "swiglu": 2, "fused_linear_cross_entropy": 1}
    assert bastile.reset(model=patched) == [name for name in ALL if name != "rope_qwen3"]
    assert runs_stock(patched)


def test_class_and_model_patches_are_taken_out_apart() -> None:
    model = tiny_model()
    bastile.apply(swiglu=False)
    chosen = ["swiglu_qwen3", "fused_linear_cross_entropy_qwen3"]
    assert bastile.apply_to_model(model, rms_norm=False, rope=False, recompute=False) == chosen
    assert bastile.get_patched_ops(model) == ALL
    bastile.reset(model=model)
    assert runs_stock(model)
    assert bastile.get_patched_ops(model) == [name for name in ALL if name != "swiglu_qwen3"]


def test_reset_without_a_model_reaches_every_patched_model() -> None:
    models = [tiny_model(), tiny_model()]
    for model in models:
        bastile.apply_to_model(model)
    assert bastile.reset() == ALL
    assert all(runs_stock(model) for model in models)


def test_wrappers_are_looked_through() -> None:
    lora = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj", "gate_proj"], r=2))
    for wrapped in (lora, torch.compile(lora, backend="eager"), torch.nn.DataParallel(tiny_model())):
        assert bastile.apply_to_model(wrapped) == ALL
        assert bastile.get_patched_ops(wrapped) == ALL
        assert bastile.reset(model=wrapped) == ALL


def test_a_model_without_a_language_model_head_gets_the_rest() -> None:
    config = tiny_model().config
    classifier = Qwen3ForSequenceClassification(Qwen3Config(**{**config.to_dict(), "num_labels": 3}))
    assert bastile.apply_to_model(classifier) == [name for name in ALL if not name.startswith("fused")]


def test_a_subclass_with_its_own_forward_keeps_it() -> None:
    class Doubling(modeling_qwen3.Qwen3MLP):
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
    assert bastile.reset(model=twin) == ALL
    assert runs_stock(twin)
    assert not runs_stock(model)


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


@pytest.mark.parametrize("whole_process", [True, False])
def test_compiled_models_run_the_operators_and_follow_a_reset(whole_process: bool, calls: dict[str, int]) -> None:
    torch.compiler.reset()
    model = tiny_model()
    batch = tiny_batch(model)
    want = model(**batch).loss
    bastile.apply() if whole_process else bastile.apply_to_model(model)
    compiled = torch.compile(model, backend="eager")
    output = compiled(**batch)
    torch.testing.assert_close(output.loss, want)
    assert output.logits is None
    assert calls == {"rms_norm": 9, "swiglu": 2, "rope": 2, "fused_linear_cross_entropy": 1}
    bastile.reset()
    assert compiled(**batch).logits is not None


@pytest.mark.parametrize("whole_process", [True, False])
def test_compiled_models_are_one_graph_and_compile_once(whole_process: bool) -> None:
    torch.compiler.reset()
    model = tiny_model()
    batch = tiny_batch(model)
    bastile.apply() if whole_process else bastile.apply_to_model(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    want = compiled(**batch).loss
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(**batch).loss, want)


def test_a_patched_and_a_stock_model_in_one_graph_keep_their_own_rotary(calls: dict[str, int]) -> None:
    torch.compiler.reset()
    patched, stock = tiny_model(), tiny_model()
    bastile.apply_to_model(patched)
    ids = tiny_batch(patched)["input_ids"]
    for models in ((patched, stock), (stock, patched)):
        calls.clear()
        torch.compile(lambda models=models: [model(ids).logits for model in models], backend="eager")()
        assert calls["rope"] == 2  # of the patched model's two layers


def test_warmup_without_cuda_does_nothing_and_says_so() -> None:
    if torch.cuda.is_available():
        done = bastile.warmup_all_kernels(tiny_model())
        assert set(done.seconds) == {"rms_norm 16", "rms_norm 32", "swiglu", "rope", "fused_linear_cross_entropy"}
        assert done.total_seconds > 0
        assert done.device.startswith("cuda")
    else:
        done = bastile.warmup_all_kernels(tiny_model())
        assert done.device is None
        assert done.seconds == {}
        assert "no CUDA device" in done.reason
    assert bastile.clear_autotune_cache() == 0
