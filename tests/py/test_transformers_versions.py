"""Releases of Transformers that have what an operator does not know: where it is asked for by name, a message that
names the release and the piece, and everything left stock; where it is not, the rest is served."""

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

import bastile
from bastile import in_force
from bastile.graphs import caches
from bastile.models import attention, experts, loading
from bastile.models.table import OPERATORS, USUAL
from conftest import DENSE, modeling, older_than, on_demand, tiny_batch, tiny_model
from families import FAMILIES, PLACES, Family, everywhere
from test_gpt_oss import tiny_gpt_oss
from test_patching import EVERY


def changed(function: Any, new_names: dict[str, str] | None = None, more: tuple[str, ...] = ()) -> types.FunctionType:
    """A forward in which attributes, globals and parameters have other names, or which mentions one more."""
    stock, new = inspect.unwrap(function), new_names or {}
    code = stock.__code__
    code = code.replace(
        co_names=(*(new.get(name, name) for name in code.co_names), *more),
        co_varnames=tuple(new.get(name, name) for name in code.co_varnames),
    )
    copy = types.FunctionType(code, stock.__globals__, stock.__name__, stock.__defaults__, stock.__closure__)
    copy.__kwdefaults__ = stock.__kwdefaults__
    return copy


def tiny(family: str) -> PreTrainedModel:
    return tiny_gpt_oss() if family == "gpt_oss" else tiny_model(family)


#: What an attention and a layer mention.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "layer_idx", "scaling", "sliding_window")
ATTENTION += ("attention_dropout", "training", "config", "_attn_implementation", "ALL_ATTENTION_FUNCTIONS")
ATTENTION += ("eager_attention_forward", "update")
LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
CACHE = caches.NAMES[older_than("5.24")]


def places(row: Family) -> list[tuple[str, str, list[str], list[str]]]:
    """Operator, class, and what its forward must mention and name as arguments, as the replacements read it."""
    found = [
        ("rms_norm", row.norm_class, ["weight", row.norm_eps], []),
        ("swiglu", row.mlp_class, [row.gate, row.up, row.down, row.activation], []),
        ("rope", row.attention_class, [row.rotary_function], []),
        (
            "fused_linear_cross_entropy",
            row.causal_lm_class,
            [row.backbone, row.head, "loss_function", *(["num_experts_per_tok"] if row.router_loss else [])],
            ["labels", "logits_to_keep"],
        ),
        (
            "moe_experts",
            row.experts_class,
            [*experts.PARAMETERS, "_apply_gate", "num_experts"],
            ["hidden_states", "router_indices", "routing_weights"],
        ),
        (
            "qk_norm_rope",
            row.attention_class,
            [*ATTENTION, row.q_norm, row.k_norm],
            [*attention.NEEDED, CACHE],
        ),
        *(
            (operator, row.backbone_class, ["layers"], ["input_ids", "inputs_embeds"])
            for operator in ("recompute", "offload_checkpoints")
        ),
        ("cuda_graphs", row.backbone_class, ["layers"], []),
    ]
    # Some go into PEFT and PyTorch, where their statements are (test_rewrite.py), or into functions of a module's.
    elsewhere = {"lora_linear", "layer_norm", "gated_rms_norm", "add_rms_norm", "sink_attention", "masked_attention"}
    elsewhere |= {
        "causal_conv1d",
        "gated_delta_rule",
        "mamba2_scan",
        "chunked_attention",
        "adamw",
        "autocast_linear",
        "frozen_bf16",
        "padding_free",
    }
    assert {place[0] for place in found} == set(OPERATORS) - elsewhere
    return [place for place in found if place[0] in row.operators]


def alone(operator: str) -> dict[str, bool]:
    """The arguments for this operator and those it needs."""
    return {other: other in (operator, *OPERATORS[operator].needs) for other in OPERATORS}


CASES = [
    pytest.param(family, operator, class_name, name, id=f"{family}-{operator}-{class_name}-{name}")
    for family in sorted(FAMILIES)
    for operator, class_name, mentions, arguments in places(FAMILIES[family])
    for name in (*mentions, *arguments)
]
#: Logits on demand rely on nothing that the code of a model with an output head says.
LOSS = "fused_linear_cross_entropy"
RELYING = [case for case in CASES if case.values[1] != LOSS]


def named(operator: str) -> dict[str, bool]:
    """The arguments that ask for this operator by its name."""
    return {operator: True}


def assert_refused(model: PreTrainedModel, operator: str, *pieces: str, by_model: bool = True) -> None:
    """By both ways of patching, with nothing changed."""
    family = model.config.model_type
    module = modeling(family)

    def state() -> tuple[dict[str, Any], list[Any]]:
        classes = [item for item in vars(module).values() if isinstance(item, type)]
        forwards = [vars(item).get("forward") for item in classes]
        cells = [cell for forward in forwards for cell in getattr(forward, "__closure__", None) or ()]
        return dict(vars(module)), [*forwards, *(cell.cell_contents for cell in cells)]

    before = state()
    ways: list[Callable[[], Any]] = [lambda: bastile.apply(model_types=family, **named(operator))]
    if by_model:
        ways.append(lambda: bastile.apply_to_model(model, **named(operator)))
    for call in ways:
        with pytest.raises(RuntimeError) as caught:
            call()
        message = str(caught.value)
        for piece in (
            f"transformers {transformers.__version__}",
            f"bastile's {operator} ",
            "nothing was patched",
            *pieces,
        ):
            assert piece in message, message
        assert bastile.get_patched_ops() == []
        assert all("forward" not in vars(part) for part in model.modules())
        names, forwards = state()
        assert names == before[0]
        assert all(now is then for now, then in zip(forwards, before[1], strict=True))


@pytest.mark.parametrize(
    ("family", "operator", "class_name", "name"), [case for case in CASES if case.values[1] == LOSS]
)
def test_the_loss_asks_nothing_of_the_code(
    family: str, operator: str, class_name: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = getattr(modeling(family), class_name)
    monkeypatch.setattr(owner, "forward", changed(owner.forward, {name: "renamed"}, more=("softcap",)))
    assert bastile.apply(model_types=family, **alone(operator)) == [f"{operator}_{family}"]


@pytest.mark.parametrize(("family", "operator", "class_name", "name"), RELYING)
def test_a_renamed_attribute_or_argument(
    family: str, operator: str, class_name: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, owner = tiny(family), getattr(modeling(family), class_name)
    monkeypatch.setattr(owner, "forward", changed(owner.forward, {name: "renamed"}))
    with pytest.raises(RuntimeError) as caught:
        bastile.apply(model_types=family, **alone(operator))
    assert f"bastile's {operator} " in str(caught.value)
    assert f"{operator}=False" in str(caught.value)
    piece = FAMILIES[family].rotary_function if operator == "rope" else f"{class_name}.forward"
    assert piece in str(caught.value)
    assert_refused(model, operator, piece)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_moved_class_or_function(family: str) -> None:
    """A type without it has no place for the operator; a model that was built before has the class still."""
    row, model = FAMILIES[family], tiny(family)
    for operator in row.operators:
        if operator == "masked_attention":
            continue  # in the place of any of two functions
        place = getattr(row, PLACES[operator])
        name = row.attention_class if operator == "qk_norm_rope" else place
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(modeling(family), name)
            assert_refused(model, operator, f"no place for bastile's {operator} in {family}", by_model=False)
            if operator not in ("rope", "sink_attention"):  # which are functions
                found = bastile.apply_to_model(model, **named(operator))
                lost = [each for each in row.patches() if each not in found]
                assert lost in ([], [f"masked_attention_{family}"])  # looks layers up by the names of their classes
                bastile.reset()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_moved_module(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(family)
    monkeypatch.setitem(__import__("sys").modules, FAMILIES[family].module, None)
    with pytest.raises(RuntimeError, match=f"lacks module {FAMILIES[family].module}"):
        bastile.apply(model_types=[family])
    assert bastile.get_patched_ops() == []
    others = [other for other in FAMILIES if other != family]
    assert bastile.apply(model_types=others) == [name for name in EVERY if not name.endswith(family)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_one_type_lacks_leaves_only_what_needs_it_stock(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name the operator is refused."""
    row, model = FAMILIES[family], tiny(family)
    owner = getattr(modeling(family), row.norm_class)
    monkeypatch.setattr(owner, "forward", changed(owner.forward, {row.norm_eps: "epsilon"}))
    rest = [n for n in row.patches() if not n.startswith(("rms_norm", "add_rms_norm", "qk_norm_rope"))]
    assert bastile.apply() == list(USUAL) == bastile.get_patched_ops()
    assert bastile.get_patched_ops(model) == everywhere(rest, family)
    bastile.reset()
    assert bastile.apply(model_types=[family]) == rest == bastile.get_patched_ops()
    bastile.reset()
    assert bastile.apply_to_model(model) == rest
    bastile.reset()
    others = [name for name in EVERY if not name.endswith(family)]
    assert set(bastile.apply(model_types=list(FAMILIES))) == {*rest, *others}
    bastile.reset()
    for given in (family, [family]):
        with pytest.raises(RuntimeError, match=rf"bastile's rms_norm in {family}: {row.norm_class}\.forward"):
            bastile.apply(model_types=given, rms_norm=True)
    assert bastile.get_patched_ops() == []


def test_what_no_imported_type_can_be_served_with_is_an_error_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "model_files", lambda: [row.module for row in FAMILIES.values()])
    monkeypatch.setattr(loading, "other_classes", dict)
    for row in FAMILIES.values():
        owner = getattr(modeling(row.model_type), row.norm_class)
        monkeypatch.setattr(owner, "forward", changed(owner.forward, {row.norm_eps: "epsilon"}))
    in_force.FILES.clear()
    with pytest.raises(
        RuntimeError, match=r"rms_norm in any model that is imported: LlamaRMSNorm\.forward.*nothing was"
    ):
        bastile.apply(rms_norm=True)
    assert bastile.get_patched_ops() == []


@pytest.mark.parametrize("argument", ["q", "k", "cos", "sin", "unsqueeze_dim"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_rotary_function_with_other_arguments(family: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rotary = tiny(family), modeling(family).apply_rotary_pos_emb
    monkeypatch.setattr(modeling(family), "apply_rotary_pos_emb", changed(rotary, {argument: "renamed"}))
    assert_refused(model, "rope", "apply_rotary_pos_emb")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_something_new_in_a_rotary_function(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rotary = tiny(family), modeling(family).apply_rotary_pos_emb
    monkeypatch.setattr(modeling(family), "apply_rotary_pos_emb", changed(rotary, more=("rescale",)))
    assert_refused(model, "rope", "apply_rotary_pos_emb")


# Each place whose replacement does all that the original does, and the operators that replace it.
WHOLE = {
    "norm_class": ("rms_norm",),
    "mlp_class": ("swiglu",),
    "attention_class": ("qk_norm_rope", "masked_attention"),
    "experts_class": ("moe_experts",),
}


@pytest.mark.parametrize("place", WHOLE)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_something_new_in_a_forward_that_is_replaced_whole(
    family: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement that knows nothing of it would leave it out."""
    row, model = FAMILIES[family], tiny(family)
    operators = [operator for operator in WHOLE[place] if operator in row.operators]
    if not operators:
        pytest.skip("this is not replaced in this family")
    owner = getattr(modeling(family), getattr(row, place))
    stock = owner.forward
    new = [changed(stock, more=("sinks",))]
    if place != "experts_class":  # all of whose arguments are needed
        others = {"norm_class": "hidden_states", "mlp_class": "x"}
        new.append(changed(stock, {others.get(place, CACHE): "memory"}))
    for forward in new:
        monkeypatch.setattr(owner, "forward", forward)
        assert_refused(model, operators[0], f"{owner.__name__}.forward", f"{operators[0]}=False")
        # Each operator that replaces it refuses it, and the rest can be had.
        for operator in operators:
            with pytest.raises(RuntimeError, match=f"bastile's {operator} "):
                bastile.apply(model_types=family, **alone(operator))
        names = bastile.apply(model_types=family, **dict.fromkeys(operators, False))
        rest = [other for other in row.operators if not {other, *OPERATORS[other].needs} & set(operators)]
        assert names == row.patches(rest)
        bastile.reset()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_another_wrapper_around_a_layer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, owner = tiny(family), getattr(modeling(family), FAMILIES[family].layer_class)
    inner = inspect.unwrap(owner.forward)
    calls: dict[str, Callable[..., Any]] = {"layer": inner}

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return calls["layer"](self, *args, **kwargs)

    wrapper.__wrapped__ = inner  # type: ignore[attr-defined]
    monkeypatch.setattr(owner, "forward", wrapper)
    assert_refused(model, "add_rms_norm", f"other code has replaced {owner.__name__}.forward")


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(RuntimeError, match=r"needs transformers >= 5\.0\.0; installed is 4\.57\.1"):
        bastile.apply()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_changes_of_these_tests_are_all_that_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that is a copy, with nothing renamed, is served: what is refused above is refused for its names."""
    row, model = FAMILIES[family], tiny(family)
    names = (row.norm_class, row.mlp_class, row.attention_class, row.causal_lm_class, row.backbone_class)
    for name in filter(None, names):
        owner = getattr(modeling(family), name)
        if not hasattr(owner.forward, "__wrapped__"):
            monkeypatch.setattr(owner, "forward", changed(owner.forward))
    assert bastile.apply(model_types=family) == row.patches()
    assert on_demand(model(**tiny_batch(model)).logits)
    bastile.reset()


def test_a_release_that_nobody_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of it the report names what stays stock and looks as if it could be served; of others `bastile support` does."""
    rotary = modeling("llama").apply_rotary_pos_emb
    monkeypatch.setattr(modeling("llama"), "apply_rotary_pos_emb", changed(rotary, more=("rescale",)))
    model = tiny("llama")
    for newest, is_said in ((loading.NEWEST, False), ("5.0.0", Version(transformers.__version__).minor > 0)):
        monkeypatch.setattr(loading, "NEWEST", newest)
        bastile.apply()
        model(**tiny_batch(model))
        notes = " ".join(bastile.report(reset=True).notes)
        assert ("modeling_llama.apply_rotary_pos_emb runs, in apply_rotary_pos_emb, other code" in notes) == is_said
        assert (f"{transformers.__version__} is newer than 5.0.0" in notes) == is_said
        bastile.reset()
        in_force.FILES.pop(modeling("llama").__name__)


def test_the_newest_release_is_the_one_that_the_tests_run_with() -> None:
    pinned = (Path(__file__).parents[2] / "requirements" / "demo.txt").read_text()
    assert f'\ntransformers=={loading.NEWEST}; python_version >= "3.11"\n' in pinned


@pytest.mark.skipif(older_than("5.24"), reason="it has the cache's old name")
@pytest.mark.parametrize("whole_process", [True, False])
@pytest.mark.parametrize("family", sorted(DENSE))
def test_the_names_of_earlier_releases(family: str, whole_process: bool, calls: dict[str, int]) -> None:
    """Layers and attentions take the cache by its old name, with Transformers' warning, as they do without Bastile."""
    model = tiny(family).eval()
    layer = model.model.layers[1]
    hidden = torch.randn(1, 5, model.config.hidden_size)
    positions = model.model.rotary_emb(hidden, torch.arange(5)[None])

    def run(module: Any) -> tuple[torch.Tensor, int]:
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad(), pytest.warns(FutureWarning, match="`past_key_values` is deprecated"):
            found = module(hidden, position_embeddings=positions, attention_mask=None, past_key_values=cache)
        return (found[0] if isinstance(found, tuple) else found), cache.get_seq_length(1)

    want = [run(module) for module in (layer, layer.self_attn)]
    bastile.apply() if whole_process else bastile.apply_to_model(model)
    for (result, length), module in zip(want, (layer, layer.self_attn), strict=True):
        calls.clear()
        got = run(module)
        assert calls.keys() & {"rope", "qk_norm_rope"}
        torch.testing.assert_close(got[0], result)
        assert got[1] == length == 5
