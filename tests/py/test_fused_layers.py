"""The forwards of layers and attentions that Bastile replaces whole: what falls back to the original's, and that
nothing which someone put on or in a norm is passed over."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import bastile
from conftest import (
    DENSE,
    assert_same_up_to_rounding,
    calls_of_a_step,
    gradients,
    inductor,
    modeling,
    tiny_batch,
    tiny_model,
)
from families import FAMILIES
from hooks import HOOKS

WITH_QK_NORM = [family for family in sorted(DENSE) if FAMILIES[family].q_norm]


def step(model: PreTrainedModel, **extra: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(**tiny_batch(model), **extra).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same_step(model: PreTrainedModel, whole_process: bool = True, **extra: Any) -> None:
    bastile.reset()
    loss, grads = step(model, **extra)
    bastile.apply() if whole_process else bastile.apply_to_model(model)
    patched_loss, patched_grads = step(model, **extra)
    assert_same_up_to_rounding(patched_loss, loss, model, "loss")
    assert patched_grads.keys() == grads.keys()
    for name, want in grads.items():
        assert_same_up_to_rounding(patched_grads[name], want, model, name)


@pytest.mark.parametrize("whole_process", [True, False])
@pytest.mark.parametrize("family", sorted(DENSE))
def test_every_operator_is_called(family: str, whole_process: bool, calls: dict[str, int]) -> None:
    model = tiny_model(family)
    assert_same_step(model, whole_process)
    assert calls == calls_of_a_step(family)
    assert ("qk_norm_rope" in calls) == (family == "qwen3")


# ---- changes to a norm, each of which the original's forward honours -------------------------------------------------


def _own_forward(norm: nn.Module) -> None:
    norm.forward = lambda x: torch.tanh(x)


def _subclass(norm: nn.Module) -> None:
    class Shifted(type(norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    norm.__class__ = Shifted


CHANGES = [*HOOKS, _own_forward, _subclass]
NORMS = [(family, name) for family in sorted(DENSE) for name in ("input_layernorm", "post_attention_layernorm")]
NORMS += [(family, f"self_attn.{name}") for family in WITH_QK_NORM for name in ("q_norm", "k_norm")]


@pytest.mark.parametrize("whole_process", [True, False])
@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__.strip("_") for change in CHANGES])
@pytest.mark.parametrize(("family", "name"), NORMS, ids=[f"{family}-{name}" for family, name in NORMS])
def test_a_changed_norm_is_called(
    family: str, name: str, change: Callable[[nn.Module], None], whole_process: bool, calls: dict[str, int]
) -> None:
    model = tiny_model(family)
    change(model.model.layers[0].get_submodule(name))
    assert_same_step(model, whole_process)
    fused = "qk_norm_rope" if "self_attn" in name else "add_rms_norm"
    # In the other layer; of norms with additions, each for itself.
    all_calls = calls_of_a_step(family)[fused]
    assert calls[fused] == (all_calls / 2 if fused == "qk_norm_rope" else all_calls - 1)
    assert calls.get("rope", 0) == (1 if fused == "qk_norm_rope" else calls_of_a_step(family).get("rope", 0))


@pytest.mark.parametrize("module", ["norm", "q_norm", "act_fn", "lm_head"])
def test_a_hook_on_all_modules_changes_what_it_changes_in_stock(module: str) -> None:
    model = tiny_model("qwen3")
    changed = {found for name, found in model.named_modules() if name.endswith(module)}
    handle = nn.modules.module.register_module_forward_hook(
        lambda found, inputs, output: 1.5 * output if found in changed else None
    )
    try:
        assert_same_step(model)
    finally:
        handle.remove()


@pytest.mark.parametrize("family", sorted(DENSE))
def test_a_weight_that_is_computed_is_computed(family: str, calls: dict[str, int]) -> None:
    """A parametrised norm still runs its class's forward; only where its weight comes from is new."""

    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    model = tiny_model(family)
    nn.utils.parametrize.register_parametrization(model.model.layers[0].input_layernorm, "weight", Doubled())
    assert_same_step(model)
    assert calls == calls_of_a_step(family)


@pytest.mark.parametrize("family", sorted(DENSE))
def test_a_norm_that_others_replaced_for_all_is_called(
    family: str, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another library of kernels does, after bastile.apply()."""
    model = tiny_model(family)
    norm = getattr(modeling(family), FAMILIES[family].norm_class)

    def others(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden_states) * self.weight

    with monkeypatch.context() as patch:
        patch.setattr(norm, "forward", others)
        want, _ = step(model)
    bastile.apply()
    with monkeypatch.context() as patch:
        patch.setattr(norm, "forward", others)
        got, _ = step(model)
    assert_same_up_to_rounding(got, want, model, "loss")
    with_rope = set() if FAMILIES[family].q_norm else {"projections"}
    assert calls.keys() == {"swiglu", "rope", "fused_linear_cross_entropy", *with_rope}


@pytest.mark.parametrize("family", WITH_QK_NORM)
def test_a_rotary_function_that_others_replaced_is_called(
    family: str, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)

    def others(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return q * 2, k * cos.unsqueeze(unsqueeze_dim)

    def loss() -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(modeling(family), "apply_rotary_pos_emb", others)
            return step(model)[0]

    want = loss()
    bastile.apply()
    assert_same_up_to_rounding(loss(), want, model, "loss")
    assert "qk_norm_rope" not in calls


@pytest.mark.parametrize("family", WITH_QK_NORM)
def test_two_epsilons_are_two_norms(family: str, calls: dict[str, int]) -> None:
    model = tiny_model(family)
    model.model.layers[1].self_attn.k_norm.variance_epsilon = 0.5
    assert_same_step(model)
    assert calls["qk_norm_rope"] == 1
    assert calls["rope"] == 1


@pytest.mark.parametrize("family", sorted(DENSE))
def test_each_norm_has_its_own_epsilon(family: str, calls: dict[str, int]) -> None:
    model = tiny_model(family)
    layer = model.model.layers[0]
    layer.input_layernorm.variance_epsilon, layer.post_attention_layernorm.variance_epsilon = 0.1, 0.7
    for name in filter(None, (FAMILIES[family].q_norm, FAMILIES[family].k_norm)):
        getattr(layer.self_attn, name).variance_epsilon = 0.4
    assert_same_step(model)
    assert calls == calls_of_a_step(family)


# ---- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "sdpa", pytest.param("flex_attention", marks=inductor)])
@pytest.mark.parametrize("family", sorted(DENSE))
def test_every_implementation_of_attention(family: str, implementation: str, calls: dict[str, int]) -> None:
    model = tiny_model(family, attn_implementation=implementation)
    if implementation == "flex_attention":  # no backward pass on a CPU: test_model_contracts.py has one
        model.eval()
        with torch.no_grad():
            want = model(**tiny_batch(model)).logits
            bastile.apply()
            assert_same_up_to_rounding(model(**tiny_batch(model)).logits, want, model, "logits")
    else:
        assert_same_step(model)
    assert calls["add_rms_norm"] == 4


@pytest.mark.parametrize("family", WITH_QK_NORM)
def test_sliding_windows(family: str, calls: dict[str, int]) -> None:
    model = tiny_model(family, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert set(model.config.layer_types) == {"full_attention", "sliding_attention"}
    assert_same_step(model)
    assert calls["qk_norm_rope"] == 2


@pytest.mark.parametrize("family", sorted(DENSE))
def test_dropout_of_attention_draws_the_same_numbers(family: str) -> None:
    model = tiny_model(family, attn_implementation="eager", attention_dropout=0.5)
    torch.manual_seed(5)
    want, _ = step(model)
    bastile.apply()
    torch.manual_seed(5)
    got, _ = step(model)
    assert_same_up_to_rounding(got, want, model, "loss")
    got, _ = step(model)
    assert not torch.allclose(got, want)
    model.eval()
    with torch.no_grad():
        losses = [model(**tiny_batch(model)).loss for _ in range(2)]
    assert torch.equal(*losses)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", sorted(DENSE))
def test_an_attention_function_is_told_what_it_was_told(
    family: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all implementations read all of it: a window is the mask's business in some and an argument in others."""
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    model = tiny_model(family, attention_dropout=0.25, **(windows if family == "qwen3" else {})).train(training)
    functions = modeling(family).ALL_ATTENTION_FUNCTIONS
    told: list[dict[str, Any]] = []
    sdpa = functions["sdpa"]

    def spy(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        told.append({**options, "module": module, "mask": mask, "shapes": (q.shape, k.shape, v.shape)})
        return sdpa(module, q, k, v, mask, **{**options, "dropout": 0.0})

    monkeypatch.setitem(functions, "sdpa", spy)
    batch = tiny_batch(model)
    want_loss = model(**batch, colour="blue").loss
    want, told[:] = list(told), []
    bastile.apply()
    assert_same_up_to_rounding(model(**batch, colour="blue").loss, want_loss, model, "loss")
    assert len(told) == len(want) == 2
    for got, expected in zip(told, want, strict=True):
        assert got.keys() == expected.keys()
        assert expected["colour"] == "blue"
        assert expected["dropout"] == (0.25 if training else 0.0)
        assert torch.equal(got.pop("mask"), expected.pop("mask"))
        for name in ("position_ids", "cache_position"):  # tensors in some releases, absent in others
            assert torch.equal(torch.as_tensor(got.pop(name, 0)), torch.as_tensor(expected.pop(name, 0)))
        assert got == expected


@pytest.mark.parametrize("family", sorted(DENSE))
def test_layers_and_attentions_called_by_hand(family: str) -> None:
    """Positional and keyword arguments, and errors for those that are wrong or not there."""
    model = tiny_model(family)
    layer, x = model.model.layers[0], torch.randn(2, 5, 32)
    positions = torch.arange(5)[None]
    turns = model.model.rotary_emb(x, positions)
    attention = layer.self_attn

    def run() -> list[Any]:
        return [
            layer(x, position_embeddings=turns),
            layer(x, None, positions, position_embeddings=turns),
            layer(hidden_states=x, position_embeddings=turns, attention_mask=None),
            attention(x, turns, None)[0],
            attention(x, position_embeddings=turns, attention_mask=None)[0],
            attention(hidden_states=x, attention_mask=None, position_embeddings=turns, unknown=3)[0],
        ]

    def faults() -> list[str]:
        messages = []
        for call in (
            lambda: layer(),
            lambda: layer(position_embeddings=turns),
            lambda: attention(x),
            lambda: attention(x, None, None),
            lambda: layer(x, *range(20)),
            lambda: attention(x, *range(20)),
        ):
            with pytest.raises((TypeError, ValueError)) as caught:
                call()
            messages.append(str(caught.value))
        return messages

    want, complaints = run(), faults()
    bastile.apply()
    for got, expected in zip(run(), want, strict=True):
        assert_same_up_to_rounding(got, expected, model, "output")
    assert faults() == complaints


@pytest.mark.parametrize("family", sorted(DENSE))
def test_hooks_on_layers_see_what_they_saw(family: str) -> None:
    """Inputs, outputs and gradients of layers and attentions: the sum that a layer takes in is still its own."""
    model = tiny_model(family)
    seen: list[torch.Tensor] = []
    for module in (*model.model.layers, *(layer.self_attn for layer in model.model.layers)):
        module.register_forward_hook(
            lambda module, inputs, output: seen.append((output[0] if isinstance(output, tuple) else output).detach())
        )
        module.register_full_backward_hook(lambda module, grads, outputs: seen.append(outputs[0]))
    step(model)
    want, seen[:] = list(seen), []
    bastile.apply()
    step(model)
    assert len(seen) == len(want) == 8
    for got, expected in zip(seen, want, strict=True):
        assert_same_up_to_rounding(got, expected, model, "seen by a hook")


@pytest.mark.parametrize("frozen", ["norm", "proj", "mlp", "embed_tokens", "layers.0"])
@pytest.mark.parametrize("family", sorted(DENSE))
def test_frozen_parts_of_layers(family: str, frozen: str) -> None:
    model = tiny_model(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    assert_same_step(model)
