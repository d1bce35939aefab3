"""A family with Bastile means what it means in Transformers: losses, logits, gradients, arguments of forward."""

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.loss import loss_utils

import bastile
from bastile.ops import projections
from conftest import (
    DENSE,
    assert_same_up_to_rounding,
    calls_of_a_step,
    gradients,
    modeling,
    on_demand,
    tiny_batch,
    tiny_model,
)
from memory import Memory
from oracle import few_examples

pytestmark = pytest.mark.parametrize("family", sorted(DENSE))


def stock_and_patched(model: PreTrainedModel, run: Callable[[], Any]) -> tuple[Any, Any]:
    """run() with stock Transformers, then with Bastile."""
    bastile.reset()
    stock = run()
    bastile.apply()
    return stock, run()


def trained(model: PreTrainedModel, **batch: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    output = model(**batch)
    output.loss.backward()
    return output, gradients(model)


def assert_trains_alike(model: PreTrainedModel, fused: bool = True, **batch: Any) -> None:
    """The same loss, gradients and logits; and the loss without logits exactly where that is promised."""
    (stock, stock_grads), (patched, patched_grads) = stock_and_patched(model, lambda: trained(model, **batch))
    assert on_demand(patched.logits) == fused
    assert_same_up_to_rounding(patched.logits, stock.logits, model, "logits")
    assert_same_up_to_rounding(patched.loss, stock.loss, model, "loss")
    assert patched_grads.keys() == stock_grads.keys() != set()
    for name, want in stock_grads.items():
        assert_same_up_to_rounding(patched_grads[name], want, model, name)


@settings(few_examples, max_examples=30)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 3),
    columns=st.integers(3, 17),
    heads=st.sampled_from([(4, 2), (4, 1), (2, 2)]),
    tied=st.booleans(),
    attention_bias=st.booleans(),
    padded=st.booleans(),
    num_items=st.sampled_from([None, 7, 2.5, torch.tensor(9), torch.tensor(3.5)]),
    ignore_index=st.sampled_from([None, -100, 5]),
    shifted=st.booleans(),
)
def test_training_computes_the_same_loss_and_gradients(
    family: str,
    seed: int,
    rows: int,
    columns: int,
    heads: tuple[int, int],
    tied: bool,
    attention_bias: bool,
    padded: bool,
    num_items: Any,
    ignore_index: int | None,
    shifted: bool,
) -> None:
    model = tiny_model(
        family,
        seed,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        tie_word_embeddings=tied,
        attention_bias=attention_bias,
    )
    batch: dict[str, Any] = tiny_batch(model, rows, columns, seed)
    # Where attention mixes equal values its gradients are zero, and what both compute instead is rounding alone.
    assume(batch["input_ids"][0, 0] != batch["input_ids"][0, 1])
    if not padded:
        del batch["attention_mask"]
    if ignore_index is not None:
        batch["ignore_index"] = ignore_index
        # -100 is no class: where another index is ignored, a label of -100 would be an error in both.
        batch["labels"] = batch["labels"].where(batch["labels"] != -100, ignore_index)
    if num_items is not None:
        batch["num_items_in_batch"] = num_items
    if shifted:
        # Not what the shift of labels would give, so that it shows which of the two is read.
        batch["shift_labels"] = batch["input_ids"].flip(-1)
    assert_trains_alike(model, **batch)


def test_inputs_may_be_embeddings_positions_and_a_cache(family: str) -> None:
    model = tiny_model(family)
    batch = tiny_batch(model)
    embeddings = torch.randn(2, 11, 32)
    positions = torch.arange(11).flip(0).expand(2, 11)
    assert_trains_alike(model, inputs_embeds=embeddings, position_ids=positions, labels=batch["labels"])
    (stock, _), (patched, _) = stock_and_patched(model, lambda: trained(model, **batch, use_cache=True))
    assert patched.past_key_values.get_seq_length() == stock.past_key_values.get_seq_length() == 11


def test_positional_arguments_are_understood(family: str) -> None:
    model = tiny_model(family)
    batch = tiny_batch(model)
    arguments = (batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"], False)
    stock, patched = stock_and_patched(model, lambda: model(*arguments))
    assert on_demand(patched.logits)
    assert_same_up_to_rounding(patched.loss, stock.loss, model, "loss")


def test_arguments_that_the_original_refuses(family: str) -> None:
    model = tiny_model(family)
    batch = tiny_batch(model)
    parameters = inspect.signature(type(model).forward).parameters.values()  # self, too
    too_many = (batch["input_ids"],) * [p.kind for p in parameters].count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for arguments, keywords in ((too_many, {}), ((batch["input_ids"],), batch)):
        errors = []
        for patched in (False, True):
            bastile.apply() if patched else bastile.reset()
            with pytest.raises(TypeError, match=r"positional arguments|multiple values") as caught:
                model(*arguments, **keywords)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]


def test_a_head_with_a_bias(family: str) -> None:
    model = tiny_model(family)
    model.lm_head.bias = nn.Parameter(torch.randn(101))
    assert_trains_alike(model, **tiny_batch(model))


@pytest.mark.parametrize("frozen", ["backbone", "head"])
def test_frozen_parts(family: str, frozen: str) -> None:
    model = tiny_model(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(("lm_head" in name) == (frozen == "backbone"))
    assert_trains_alike(model, **tiny_batch(model))


def test_all_labels_ignored(family: str) -> None:
    model = tiny_model(family)
    batch = tiny_batch(model)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    (stock, _), (patched, _) = stock_and_patched(model, lambda: trained(model, **batch))
    assert math.isnan(stock.loss.item())
    assert math.isnan(patched.loss.item())
    (stock, _), (patched, grads) = stock_and_patched(model, lambda: trained(model, **batch, num_items_in_batch=4))
    assert stock.loss.item() == patched.loss.item() == 0
    assert all(not grad.any() for grad in grads.values())


def test_the_head_is_not_called_in_training(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    called = []
    stock = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: (called.append(self), stock(self, x))[1])
    bastile.apply()
    model(**tiny_batch(model)).loss.backward()
    assert called
    assert all(module is not model.lm_head for module in called)


def test_outputs_asked_for_by_keyword(family: str) -> None:
    model = tiny_model(family, attn_implementation="eager")
    batch = tiny_batch(model)
    extra = {"output_hidden_states": True, "output_attentions": True}
    stock, patched = stock_and_patched(model, lambda: model(**batch, **extra))
    for name in ("hidden_states", "attentions"):
        assert len(patched[name]) == len(stock[name]) > 0
        for got, want in zip(patched[name], stock[name], strict=True):
            assert_same_up_to_rounding(got, want, model, name)
    for as_tuple in ({"return_dict": False}, {}):
        model.config.return_dict = bool(as_tuple)  # stock itself fails where its config says so
        output = model(**batch, **as_tuple, use_cache=False)
        assert isinstance(output, tuple)
        assert_same_up_to_rounding(output[0], stock.loss, model, "loss")
    assert on_demand(model(**batch, return_dict=True).logits)


def test_evaluation_returns_logits_and_the_loss(family: str) -> None:
    model = tiny_model(family).eval()
    batch = tiny_batch(model)
    with torch.no_grad():
        stock, patched = stock_and_patched(model, lambda: model(**batch))
        assert_same_up_to_rounding(patched.loss, stock.loss, model, "loss")
        assert_same_up_to_rounding(patched.logits, stock.logits, model, "logits")
        num_items = stock_and_patched(model, lambda: model(**batch, num_items_in_batch=3).loss)
        assert_same_up_to_rounding(num_items[1], num_items[0], model, "loss")
        assert num_items[1].item() != pytest.approx(patched.loss.item())


def test_evaluation_in_pieces_with_num_items_equals_one_large_batch(family: str) -> None:
    model = tiny_model(family).eval()
    batch = tiny_batch(model, rows=4)
    items = (batch["labels"][:, 1:] != -100).sum()
    bastile.apply()
    with torch.no_grad():
        whole = model(**batch).loss
        pieces = [
            model(**{name: value[row : row + 1] for name, value in batch.items()}, num_items_in_batch=items).loss
            for row in range(4)
        ]
    assert_same_up_to_rounding(sum(pieces), whole, model, "loss")


def test_a_number_of_items_for_each_replica(family: str) -> None:
    """As DataParallel hands it out, and the original's loss is a vector then."""
    model = tiny_model(family)
    batch = tiny_batch(model)
    items = torch.tensor([7, 9])
    stock, patched = stock_and_patched(model, lambda: model(**batch, num_items_in_batch=items))
    assert patched.logits is not None
    assert_same_up_to_rounding(patched.loss, stock.loss, model, "loss")


def test_no_number_is_fetched_that_the_original_does_not_fetch(family: str) -> None:
    """On a GPU each would wait for the device."""
    model = tiny_model(family)
    batch = tiny_batch(model)

    def fetched() -> int:
        with Memory() as memory:
            trained(model, **batch, num_items_in_batch=torch.tensor(7))
        return memory.calls.count("aten._local_scalar_dense.default")

    stock, patched = stock_and_patched(model, fetched)
    assert patched <= stock


def test_training_without_labels_returns_logits(family: str) -> None:
    model = tiny_model(family)
    batch = tiny_batch(model)
    labels = batch.pop("labels")
    for extra in ({}, {"shift_labels": labels}):
        stock, patched = stock_and_patched(model, lambda extra=extra: model(**batch, **extra))
        assert stock.loss is None
        assert patched.loss is None
        assert_same_up_to_rounding(patched.logits, stock.logits, model, "logits")


@pytest.mark.parametrize("keep", [3, torch.tensor([0, 4, 5])])
def test_logits_to_keep(family: str, keep: Any) -> None:
    model = tiny_model(family)
    batch = tiny_batch(model)
    labels = batch.pop("labels")
    stock, patched = stock_and_patched(model, lambda: model(**batch, logits_to_keep=keep).logits)
    assert patched.shape == (2, 3, 101)
    assert_same_up_to_rounding(patched, stock, model, "logits")
    assert_trains_alike(model, **batch, logits_to_keep=keep, labels=labels[:, :3])


# ---- heads and losses that someone has changed: the original code, with what they changed in force -------------------


def _lora_on_the_head(model: PreTrainedModel) -> None:
    get_peft_model(model, LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False))


def _subclass(model: PreTrainedModel) -> None:
    class Halved(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 2

    model.lm_head.__class__ = Halved


def _hook(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)


def _pre_hook(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))


def _gradient_hook(model: PreTrainedModel) -> None:
    model.lm_head.register_full_backward_hook(lambda module, grads, outputs: tuple(3 * grad for grad in grads))


def _own_forward(model: PreTrainedModel) -> None:
    weight = model.lm_head.weight
    model.lm_head.forward = lambda x: nn.functional.linear(x, weight) - 1


def _parametrized(model: PreTrainedModel) -> None:
    nn.utils.parametrizations.weight_norm(model.lm_head)


def _sharded(model: PreTrainedModel) -> None:
    """As ZeRO-3 does: the weight is whole only while its module runs."""
    whole, head = model.lm_head.weight.detach().clone(), model.lm_head
    head.weight.data = torch.empty(0)
    head.weight.ds_id = 0
    head.register_forward_pre_hook(lambda module, inputs: setattr(module.weight, "data", whole))


def _loss_function(model: PreTrainedModel) -> None:
    def squared(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        return logits.square().mean()

    model.loss_function = squared


def _loss_type(model: PreTrainedModel) -> None:
    model.loss_type = "ForMaskedLM"  # does not shift


def _float64(model: PreTrainedModel) -> None:
    model.lm_head.to(torch.float64)
    model.model.norm.register_forward_hook(lambda module, inputs, output: output.double())


CHANGES = [
    _lora_on_the_head,
    _subclass,
    _hook,
    _pre_hook,
    _gradient_hook,
    _own_forward,
    _parametrized,
    _sharded,
    _loss_function,
    _loss_type,
    _float64,
]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__.strip("_") for change in CHANGES])
def test_a_changed_head_or_loss_is_honoured(family: str, change: Callable[[PreTrainedModel], None]) -> None:
    model = tiny_model(family)
    change(model)
    assert_trains_alike(model, fused=change in (_loss_type, _lora_on_the_head), **tiny_batch(model))


def test_a_cross_entropy_that_others_put_into_the_loss_is_called(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = loss_utils.fixed_cross_entropy
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", lambda *args, **kwargs: 3 * stock(*args, **kwargs))
    model = tiny_model(family)
    assert_trains_alike(model, **tiny_batch(model))


def test_a_config_that_disagrees_with_the_head_gets_the_original_error(family: str) -> None:
    model = tiny_model(family)
    model.config.vocab_size = 100
    errors = []
    for patched in (False, True):
        bastile.apply() if patched else None
        with pytest.raises(RuntimeError) as caught:
            model(**tiny_batch(model))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


# ---- the other modules -----------------------------------------------------------------------------------------------


def test_another_activation_keeps_the_original_mlp(family: str, calls: dict[str, int]) -> None:
    for act, used in (("tanh", 0), ("gelu", 2), ("gelu_pytorch_tanh", 2), ("relu2", 2), ("silu", 2), ("swish", 2)):
        calls.clear()
        model = tiny_model(family, hidden_act=act)
        assert_trains_alike(model, **tiny_batch(model))
        assert calls.get("swiglu", 0) == used


def test_a_hook_on_the_activation_stays_in_force(family: str, calls: dict[str, int]) -> None:
    model = tiny_model(family)
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, inputs, output: output + 1)
    assert_trains_alike(model, **tiny_batch(model))
    assert calls["swiglu"] == 1  # the other layer's


@pytest.mark.parametrize("axis", [1, 2])
def test_rotary_honours_the_unsqueezed_axis(family: str, axis: int, calls: dict[str, int]) -> None:
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    cos, sin = torch.randn(2, 2, 5 if axis == 1 else 3, 8)  # axis 2: q is [B, S, heads, D]
    stock = modeling(family).apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=axis)
    bastile.apply()
    for arguments, keywords in (((axis,), {}), ((), {"unsqueeze_dim": axis})):
        for got, want in zip(
            modeling(family).apply_rotary_pos_emb(q, k, cos, sin, *arguments, **keywords), stock, strict=True
        ):
            torch.testing.assert_close(got, want)
    assert calls["rope"] == 1  # by keyword: nobody gives it by position


def test_mixed_types_are_promoted_as_by_the_original(family: str) -> None:
    model = tiny_model(family, dtype=torch.bfloat16)
    mlp = model.model.layers[0].mlp
    mlp.up_proj.register_forward_hook(lambda module, inputs, output: output.float())
    mlp.down_proj.float()
    x = torch.randn(1, 3, 32).bfloat16()
    q, k = torch.randn(2, 1, 3, 5, 8).bfloat16()
    cos, sin = torch.randn(2, 1, 5, 8)
    stock, patched = stock_and_patched(model, lambda: (mlp(x), *modeling(family).apply_rotary_pos_emb(q, k, cos, sin)))
    for got, want in zip(patched, stock, strict=True):
        assert got.dtype == want.dtype == torch.float32
        assert_same_up_to_rounding(got, want, model, "mixed types")


def test_float64_models_stay_with_float64(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    assert_trains_alike(model, fused=False, **tiny_batch(model))


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_keyword_calls_and_other_types_of_norm_and_mlp(family: str, kind: torch.dtype) -> None:
    model = tiny_model(family).to(kind)
    norm, mlp = model.model.norm, model.model.layers[0].mlp
    x = torch.randn(2, 3, 32, dtype=kind)
    stock, patched = stock_and_patched(model, lambda: (norm(hidden_states=x), norm(x), mlp(x=x), mlp(x)))
    for got, want in zip(patched, stock, strict=True):
        assert got.dtype == kind
        torch.testing.assert_close(got, want)


def test_float32_norms_in_a_bfloat16_model_promote_as_the_original_does(family: str) -> None:
    model = tiny_model(family, dtype=torch.bfloat16)
    norm = model.model.norm.float()
    x = torch.randn(4, 32).bfloat16()
    stock, patched = stock_and_patched(model, lambda: norm(x))
    assert patched.dtype == stock.dtype == torch.float32
    # Both round the normalised value to bfloat16 (8 bits); float32 sums in another order may tip that rounding.
    torch.testing.assert_close(patched, stock, rtol=2**-7, atol=0)


def test_autocast_with_float32_weights(family: str) -> None:
    model = tiny_model(family)
    batch = tiny_batch(model)

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(**batch)
        output.loss.backward()
        return output.loss.detach(), gradients(model)

    (stock, stock_grads), (patched, patched_grads) = stock_and_patched(model, run)
    exact, exact_grads = trained(model, **batch)
    # Both round to bfloat16 on the way; Bastile must come as near to the float32 model as stock does, up to chance.
    assert patched.dtype == torch.float32
    assert abs(patched - exact.loss) <= 2 * abs(stock - exact.loss) + 2**-8 * exact.loss
    for name, want in exact_grads.items():
        assert patched_grads[name].dtype == torch.float32
        assert (patched_grads[name] - want).norm() <= 1.5 * (stock_grads[name] - want).norm() + 2**-8 * want.norm(), (
            name
        )


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_autocast_leaves_the_operators_on(
    family: str, kind: torch.dtype, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of float32 weights residual and norm are one operator, though the two terms have two types, and so are the
    projections, of an input that is cast."""
    model = tiny_model(family, dtype=kind)
    bastile.apply()
    apply, nodes = projections._Projections.apply, []
    monkeypatch.setattr(projections._Projections, "apply", lambda *given: (nodes.append(given), apply(*given))[1])
    with torch.autocast("cpu", torch.bfloat16), Memory() as memory:
        model(**tiny_batch(model)).loss.backward()
    assert calls == calls_of_a_step(family)
    assert memory.calls.count("bastile.add_rms_norm_forward.default") == 2
    assert memory.calls.count("bastile.add_rms_norm_backward.default") == 4
    assert len(nodes) == calls.get("projections", 0)


# ---- what people do with models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole_process", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(family: str, reentrant: bool, whole_process: bool, calls: dict[str, int]) -> None:
    model = tiny_model(family)
    batch = tiny_batch(model)
    _, want = trained(model, **batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    bastile.apply() if whole_process else bastile.apply_to_model(model)
    _, got = trained(model, **batch, use_cache=False)
    assert calls["swiglu"] == 4  # each layer again on the way back
    assert calls["add_rms_norm"] == 8
    for name in want:
        assert_same_up_to_rounding(got[name], want[name], model, name)


def test_accumulated_gradients_with_num_items_equal_one_large_batch(family: str) -> None:
    model = tiny_model(family)
    batch = tiny_batch(model, rows=4)
    items = (batch["labels"][:, 1:] != -100).sum()
    bastile.apply()
    whole, want = trained(model, **batch)
    losses = 0.0
    for row in range(4):
        output = model(**{name: value[row : row + 1] for name, value in batch.items()}, num_items_in_batch=items)
        output.loss.backward()
        losses += output.loss.detach()
    assert_same_up_to_rounding(losses, whole.loss.detach(), model, "loss")
    for name, grad in gradients(model).items():
        assert_same_up_to_rounding(grad, want[name], model, name)


def test_lora_adapters_are_trained_through_the_replacements(family: str, calls: dict[str, int]) -> None:
    model = tiny_model(family)
    adapted = get_peft_model(
        model,
        LoraConfig(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"], r=4, init_lora_weights=False),
    )
    batch = tiny_batch(model)

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        output = adapted(**batch)
        output.loss.backward()
        return output, gradients(adapted)

    (stock, stock_grads), (patched, patched_grads) = stock_and_patched(model, run)
    assert on_demand(patched.logits)
    assert calls["swiglu"] == 2
    assert_same_up_to_rounding(patched.loss, stock.loss, model, "loss")
    assert stock_grads.keys() == patched_grads.keys()
    assert all("lora_" in name for name in stock_grads)
    assert len(stock_grads) == 2 * 2 * 4
    for name, want in stock_grads.items():
        assert_same_up_to_rounding(patched_grads[name], want, model, name)


def test_the_model_is_left_as_it_was_by_a_step(family: str) -> None:
    model = tiny_model(family)
    batch = tiny_batch(model)
    state, inputs = copy.deepcopy(model.state_dict()), copy.deepcopy(batch)
    bastile.apply()
    trained(model, **batch)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, inputs[name]) for name, value in batch.items())


def test_other_devices_run_the_original_code(family: str, calls: dict[str, int]) -> None:
    model = tiny_model(family).to("meta")
    batch = {name: value.to("meta") for name, value in tiny_batch(model).items() if name != "attention_mask"}
    try:
        model(**batch).loss.backward()
    except RuntimeError as error:
        pytest.skip(f"this Transformers does not run on meta tensors: {error}")
    bastile.apply()
    output = model(**batch)
    output.loss.backward()
    assert not on_demand(output.logits)
    assert "fused_linear_cross_entropy" not in calls
    assert model.lm_head.weight.grad.shape == model.lm_head.weight.shape
