"""GPT-OSS with Bastile means what it means in Transformers: losses, the router's included, gradients, text."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations import moe as implementations

import bastile
from conftest import (
    assert_same_up_to_rounding,
    assert_token_by_token_gives_the_whole,
    gradients,
    modeling,
    on_demand,
    result_or_error,
    tiny_batch,
)
from oracle import devices, few_examples

PATCHES = [
    f"{name}_gpt_oss" for name in ("rms_norm", "rope", "fused_linear_cross_entropy", "add_rms_norm", "moe_experts")
]
CALLS = {"rms_norm": 1, "rope": 2, "fused_linear_cross_entropy": 1, "add_rms_norm": 4, "moe_experts": 2}
CALLS["projections"] = 2


def tiny_gpt_oss(
    seed: int = 0, dtype: torch.dtype = torch.float32, experts: str | None = None, **changes: Any
) -> GptOssForCausalLM:
    """Two layers, one of them with a sliding window shorter than the batch; more experts than a token uses; biases and
    sinks that are not zero."""
    config: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.2,
        "router_aux_loss_coef": 0.1,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    torch.manual_seed(seed)
    model = GptOssForCausalLM(GptOssConfig(**{**config, **changes})).to(dtype)
    if experts is not None:
        model.set_experts_implementation(experts)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def trained(model: nn.Module, **batch: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    output = model(**batch)
    output.loss.backward()
    return output, gradients(model)


def assert_trains_alike(model: GptOssForCausalLM, run: nn.Module | None = None, **batch: Any) -> Any:
    """The same loss, router's loss and gradients; returns the patched output."""
    bastile.reset()
    stock, want = trained(run or model, **batch)
    bastile.apply()
    patched, got = trained(run or model, **batch)
    assert_same_up_to_rounding(patched.loss, stock.loss, model, "loss")
    assert (patched.aux_loss is None) == (stock.aux_loss is None)
    if stock.aux_loss is not None:
        assert_same_up_to_rounding(patched.aux_loss, stock.aux_loss, model, "aux_loss")
    assert got.keys() == want.keys() != set()
    for name, gradient in want.items():
        assert_same_up_to_rounding(got[name], gradient, model, name)
    return patched


@settings(few_examples, max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 3),
    columns=st.integers(3, 17),
    choices=st.integers(1, 5),
    experts=st.sampled_from(["eager", "batched_mm", "grouped_mm"]),
    padded=st.booleans(),
    num_items=st.sampled_from([None, 7, torch.tensor(9)]),
    router_logits=st.sampled_from([None, False, True]),
    by_config=st.booleans(),
)
def test_training_computes_the_same_losses_and_gradients(
    seed: int,
    rows: int,
    columns: int,
    choices: int,
    experts: str,
    padded: bool,
    num_items: Any,
    router_logits: bool | None,
    by_config: bool,
) -> None:
    model = tiny_gpt_oss(seed, experts=experts, num_experts_per_tok=choices, output_router_logits=by_config)
    batch: dict[str, Any] = tiny_batch(model, rows, columns, seed)
    if not padded:
        del batch["attention_mask"]
    if num_items is not None:
        batch["num_items_in_batch"] = num_items
    if router_logits is not None:
        batch["output_router_logits"] = router_logits
    output = assert_trains_alike(model, **batch)
    assert on_demand(output.logits)
    wanted = by_config if router_logits is None else router_logits
    assert (output.aux_loss is not None) == wanted
    assert (output.router_logits is not None) == wanted


def test_every_operator_is_called(calls: dict[str, int]) -> None:
    assert set(PATCHES) < set(bastile.apply(model_types="gpt_oss"))
    model = tiny_gpt_oss()
    trained(model, **tiny_batch(model))
    assert calls == CALLS


def test_one_model_alone(calls: dict[str, int]) -> None:
    model, other = tiny_gpt_oss(), tiny_gpt_oss()
    batch = tiny_batch(model)
    want, want_grads = trained(other, **batch)
    assert set(PATCHES) < set(bastile.apply_to_model(model))
    got, got_grads = trained(model, **batch)
    assert calls == CALLS
    assert_same_up_to_rounding(got.loss, want.loss, model, "loss")
    for name, gradient in want_grads.items():
        assert_same_up_to_rounding(got_grads[name], gradient, model, name)
    bastile.reset(["moe_experts_gpt_oss"])
    calls.clear()
    model(**batch)
    assert calls == {name: count for name, count in CALLS.items() if name != "moe_experts"}


def test_outputs_asked_for(calls: dict[str, int]) -> None:
    model = tiny_gpt_oss(attn_implementation="eager")
    batch = tiny_batch(model)
    extra = {"output_hidden_states": True, "output_attentions": True, "output_router_logits": True}
    stock = model(**batch, **extra)
    bastile.apply()
    patched = model(**batch, **extra)
    assert calls["fused_linear_cross_entropy"] == 1
    for name in ("hidden_states", "attentions", "router_logits"):
        assert len(patched[name]) == len(stock[name]) > 0
        for got, want in zip(patched[name], stock[name], strict=True):
            assert_same_up_to_rounding(got, want, model, name)
    as_tuple = model(**batch, output_router_logits=True, return_dict=False, use_cache=False)
    assert_same_up_to_rounding(as_tuple[0], stock.loss, model, "loss")
    assert_same_up_to_rounding(as_tuple[1], stock.aux_loss, model, "aux_loss")


def test_evaluation_returns_logits() -> None:
    model = tiny_gpt_oss().eval()
    batch = tiny_batch(model)
    with torch.no_grad():
        stock = model(**batch, output_router_logits=True)
        bastile.apply()
        patched = model(**batch, output_router_logits=True)
    for name in ("loss", "aux_loss", "logits"):
        assert_same_up_to_rounding(patched[name], stock[name], model, name)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_pieces_with_num_items_equal_one_large_batch(training: bool) -> None:
    """Without the router's loss, which Transformers takes of each piece."""
    model = tiny_gpt_oss().train(training)
    batch = tiny_batch(model, rows=4)
    items = (batch["labels"][:, 1:] != -100).sum()
    bastile.apply()
    whole, want = trained(model, **batch)
    losses = []
    for row in range(4):
        piece = {name: value[row : row + 1] for name, value in batch.items()}
        output = model(**piece, num_items_in_batch=items)
        assert on_demand(output.logits)
        output.loss.backward()
        losses.append(output.loss.detach())
    assert_same_up_to_rounding(sum(losses), whole.loss.detach(), model, "loss")
    for name, gradient in gradients(model).items():
        assert_same_up_to_rounding(gradient, want[name], model, name)


@pytest.mark.parametrize("router_logits", [False, True])
def test_training_steps_in_float32(router_logits: bool) -> None:
    def losses(model: nn.Module) -> list[torch.Tensor]:
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for step in range(6):
            loss = model(**tiny_batch(model, 2, 13, seed=step % 2), output_router_logits=router_logits).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    stock, model = tiny_gpt_oss(), tiny_gpt_oss()
    want = losses(stock)
    bastile.apply()
    # AdamW divides a gradient by its own size: where that is rounding alone, a step of lr goes either way.
    for got, expected in zip(losses(model), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=0)
    assert want[-1] < want[1]


def test_training_steps_in_bfloat16() -> None:
    """As near to float32 as stock is, with the norms in float32 as Transformers loads them, and in bfloat16."""
    batches = [(tiny_batch(tiny_gpt_oss(), 2, 13, seed=step)) for step in range(4)]

    def losses(dtype: torch.dtype, float_norms: bool) -> torch.Tensor:
        model, found = tiny_gpt_oss(dtype=dtype), []
        if float_norms:
            for name, module in model.named_modules():
                module.float() if name.endswith("norm") else None
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for batch in batches:
            loss = model(**batch, output_router_logits=True).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().double())
        return torch.stack(found)

    for float_norms in (True, False):
        bastile.reset()
        exact, stock = losses(torch.float32, False), losses(torch.bfloat16, float_norms)
        bastile.apply()
        patched = losses(torch.bfloat16, float_norms)
        assert (patched - exact).abs().max() <= 1.5 * (stock - exact).abs().max() + 2**-8 * exact.max()


@pytest.mark.parametrize("frozen", ["experts", "all but experts", "all but the router"])
def test_frozen_parts(frozen: str) -> None:
    model = tiny_gpt_oss()
    for name, parameter in model.named_parameters():
        wanted = {
            "experts": ".experts." not in name,
            "all but experts": ".experts." in name,
            "all but the router": ".router." in name,
        }[frozen]
        parameter.requires_grad_(wanted)
    assert_trains_alike(model, **tiny_batch(model))


def test_lora_on_the_experts_parameters(calls: dict[str, int]) -> None:
    model = tiny_gpt_oss()
    adapted = get_peft_model(
        model,
        LoraConfig(
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            r=2,
            lora_dropout=0.0,
            init_lora_weights=False,
        ),
    )
    assert_trains_alike(model, run=adapted, **tiny_batch(model))
    assert calls["adapted_experts"] == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool, calls: dict[str, int]) -> None:
    model = tiny_gpt_oss()
    batch = tiny_batch(model)
    _, want = trained(model, **batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    bastile.apply()
    _, got = trained(model, **batch, use_cache=False)
    assert calls["moe_experts"] == 4
    for name in want:
        assert_same_up_to_rounding(got[name], want[name], model, name)


# ---- experts that are not the plain ones: the original code ----------------------------------------------------------


def _another_gate(experts: nn.Module) -> None:
    experts._apply_gate = lambda h: h[..., ::2] * h[..., 1::2]


def _subclass_with_a_gate(experts: nn.Module) -> None:
    class Plain(type(experts)):
        def _apply_gate(self, h: torch.Tensor) -> torch.Tensor:
            return h[..., ::2] * h[..., 1::2]

    experts.__class__ = Plain


def _registered(experts: nn.Module) -> None:
    experts.config._experts_implementation = "halved"


def _shard(experts: nn.Module) -> None:
    """As expert parallelism does: fewer experts than the configuration has, and indices beyond them."""
    experts.num_experts = 3
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        setattr(experts, name, nn.Parameter(getattr(experts, name)[:3].detach().clone()))
    experts.register_forward_pre_hook(lambda module, given: (given[0], given[1].clamp(max=2), given[2]))


def _flagged(experts: nn.Module) -> None:
    experts._is_expert_parallel = True


CHANGES = [_another_gate, _subclass_with_a_gate, _registered, _shard, _flagged]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__.strip("_") for change in CHANGES])
def test_changed_experts_run_the_original_code(change: Any, calls: dict[str, int]) -> None:
    def halved(self: nn.Module, *given: Any) -> torch.Tensor:
        return implementations.grouped_mm_experts_forward(self, *given) / 2

    implementations.ALL_EXPERTS_FUNCTIONS["halved"] = halved
    try:
        model = tiny_gpt_oss()
        for layer in model.model.layers:
            change(layer.mlp.experts)
        assert_trains_alike(model, **tiny_batch(model))
        assert "moe_experts" not in calls
        assert calls["add_rms_norm"] == 4
    finally:
        del implementations.ALL_EXPERTS_FUNCTIONS["halved"]


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_experts_of_types_that_no_kernel_serves(kind: torch.dtype, calls: dict[str, int]) -> None:
    """float64, which Transformers' loop takes, and a second product of another type than the first."""
    experts = tiny_gpt_oss(experts="eager" if kind == torch.float64 else None).model.layers[0].mlp.experts
    for name in ("gate_up_proj", "gate_up_proj_bias", *(["down_proj", "down_proj_bias"] if kind.itemsize == 8 else [])):
        setattr(experts, name, nn.Parameter(getattr(experts, name).detach().to(kind)))
    tokens = torch.randn(7, 32, dtype=torch.promote_types(kind, torch.float32))
    given = tokens, torch.randint(5, (7, 2)), torch.rand(7, 2).to(tokens.dtype)
    stock = result_or_error(lambda: experts(*given))
    bastile.apply()
    got = result_or_error(lambda: experts(*given))
    assert torch.equal(got, stock) if isinstance(stock, torch.Tensor) else got == stock
    assert "moe_experts" not in calls


def test_who_chose_an_implementation_of_the_experts_gets_that_one(
    calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Transformers' own test of its models looks for it, by putting others into its table."""
    model = tiny_gpt_oss().eval()
    assert model.config._experts_implementation == "grouped_mm"  # of itself
    batch = tiny_batch(model)
    bastile.apply()
    with torch.no_grad():
        served = model(**batch).logits
        assert calls["moe_experts"] == 2
        called: dict[str, int] = {}
        for name in ("batched_mm", "grouped_mm"):

            def spy(*given: Any, name: str = name, own: Any = implementations.ALL_EXPERTS_FUNCTIONS[name]) -> Any:
                called[name] = called.get(name, 0) + 1
                return own(*given)

            monkeypatch.setitem(implementations.ALL_EXPERTS_FUNCTIONS._global_mapping, name, spy)
        for name in ("eager", "batched_mm", "grouped_mm"):
            calls.clear()
            called.clear()
            model.set_experts_implementation(name)
            assert_same_up_to_rounding(model(**batch).logits, served, model, name)
            assert called == ({} if name == "eager" else {name: 2})
            assert "moe_experts" not in calls


@pytest.mark.parametrize("hidden_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_experts_under_autocast_have_their_weights_type(
    kind: torch.dtype, hidden_type: torch.dtype, calls: dict[str, int]
) -> None:
    """Autocast casts no grouped product of Transformers', nor does it cast ours: the same as without it."""
    model = tiny_gpt_oss(dtype=kind)
    experts, usual = model.model.layers[0].mlp.experts, model.config._experts_implementation
    hidden, indices = torch.randn(7, 32).to(hidden_type), torch.randint(5, (7, 2))
    weights, upstream = torch.rand(7, 2).bfloat16(), torch.randn(7, 32).to(hidden_type)

    def run(autocast: bool, tokens: torch.Tensor = hidden, dtype: torch.dtype = kind) -> list[torch.Tensor]:
        leaves = [tokens.clone().requires_grad_(), weights.clone().requires_grad_()]
        experts.to(dtype).zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = experts(leaves[0], indices, leaves[1])
        out.backward(upstream.to(out.dtype))
        return [out.detach(), *(t.grad.clone() for t in (*leaves, *experts.parameters()))]

    model.set_experts_implementation("eager")  # grouped products take no float64
    exact = run(False, hidden.double(), torch.float64)
    model.set_experts_implementation(usual)
    try:
        stock = run(True)
    except RuntimeError as error:
        pytest.skip(f"this Transformers does not multiply two types: {error}")
    bastile.apply()
    got, plain = run(True), run(False)
    assert calls["moe_experts"] == 2
    for ours, without, theirs, precise in zip(got, plain, stock, exact, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, without)
        # As near to float64 as stock is, up to the rounding of the last step.
        allowed = (theirs.double() - precise.double()).norm() + torch.finfo(ours.dtype).eps * precise.double().norm()
        assert (ours.double() - precise.double()).norm() <= 1.5 * allowed


def test_a_step_under_autocast(calls: dict[str, int]) -> None:
    """Of float32 weights, as the Trainer's bf16=True trains: as near to float32 as stock is."""
    model = tiny_gpt_oss()
    batch = tiny_batch(model)

    def run(autocast: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        return loss.detach(), gradients(model)

    (exact, exact_grads), (stock, stock_grads) = run(False), run(True)
    bastile.apply()
    loss, grads = run(True)
    assert calls == CALLS
    assert abs(loss - exact) <= 2 * abs(stock - exact) + 2**-8 * exact
    for name, want in exact_grads.items():
        assert grads[name].dtype == torch.float32
        assert (grads[name] - want).norm() <= 2 * (stock_grads[name] - want).norm() + 2**-8 * want.norm(), name


def test_a_changed_gate_in_transformers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply_gate(self: nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up[..., ::2].relu()

    monkeypatch.setattr(modeling("gpt_oss").GptOssExperts, "_apply_gate", apply_gate)
    with pytest.raises(
        RuntimeError, match=r"bastile's moe_experts in gpt_oss: .*GptOssExperts\._apply_gate, other code"
    ):
        bastile.apply(model_types=["gpt_oss"], moe_experts=True)
    assert bastile.get_patched_ops() == []


@pytest.mark.parametrize("axis", [1, 2])
def test_rotary_with_half_a_table(axis: int, calls: dict[str, int]) -> None:
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    cos, sin = torch.randn(2, 2, 5 if axis == 1 else 3, 4)
    rotary = modeling("gpt_oss")
    stock = rotary.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=axis)
    bastile.apply()
    for got, want in zip(rotary.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=axis), stock, strict=True):
        torch.testing.assert_close(got, want)
    assert calls["rope"] == 1


# ---- text and torch.compile ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "way", [{}, {"cache_implementation": "static", "disable_compile": True}, {"use_cache": False}], ids=str
)
def test_generates_the_same_tokens(way: dict[str, Any], rows: int, device: str, calls: dict[str, int]) -> None:
    model = tiny_gpt_oss().eval().to(device)
    prompt = {name: t.to(device) for name, t in tiny_batch(model, rows=rows).items() if name != "labels"}
    options = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, "output_logits": True, **way}
    want = model.generate(**prompt, **options)
    bastile.apply()
    # Behind the first step Transformers may take its batched_mm: always in 5.0, on GPUs later.
    taken: list[str] = []
    model.register_forward_pre_hook(lambda model, _: taken.append(model.config._experts_implementation))
    got = model.generate(**prompt, **options)
    assert len(taken) == 16
    assert taken[0] == "grouped_mm"
    assert calls["moe_experts"] == 2 * taken.count("grouped_mm")
    best = torch.stack(want.logits).topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 1e-4  # two tokens as likely up to rounding: no fair test
    assert want.sequences[:, -16:].unique().numel() > 5
    assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("device", devices())
def test_token_by_token_gives_the_logits_of_the_whole(device: str) -> None:
    model = tiny_gpt_oss().eval().to(device)
    ids = tiny_batch(model, rows=1)["input_ids"].to(device)
    bastile.apply()
    assert_token_by_token_gives_the_whole(model, ids)


@pytest.mark.parametrize("device", devices())
def test_compiles(device: str) -> None:
    """Without a break, for lengths that change."""
    torch.compiler.reset()
    model = tiny_gpt_oss().to(device)
    bastile.apply()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for columns in (11, 17, 8):
        batch = {name: t.to(device) for name, t in tiny_batch(model, 2, columns).items()}
        want, want_grads = trained(model, **batch, output_router_logits=True)
        got = compiled(**batch, output_router_logits=True)
        assert got.logits is None  # nothing has read them, the loss neither
        got.loss.backward()
        got_grads = gradients(model)
        assert_same_up_to_rounding(got.loss, want.loss, model, "loss")
        for name, gradient in want_grads.items():
            assert_same_up_to_rounding(got_grads[name], gradient, model, name)
