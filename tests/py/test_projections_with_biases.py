"""Projections with biases against float64 and the layers that they stand for, alone and in attentions that turn
nothing by its position: encoders', towers', Whisper's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import linear

import bastile
from bastile.models import rewrite
from bastile.models.forms import Source
from bastile.ops.projections import projections
from conftest import gradients, older_than, without_dropout
from memory import Memory
from oracle import DTYPES, Case, assert_no_worse, assert_same_bits, devices, few_examples, random_tensor

WIDTHS = (24, 8, 8)


def inputs(shape: tuple[int, ...], widths: Any, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    weights = [random_tensor((width, shape[-1]), dtype, device, scale=shape[-1] ** -0.5) for width in widths]
    biases = [random_tensor((width,), dtype, device) for width in widths]
    return [random_tensor(shape, dtype, device), *weights, *biases]


def ours(x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    count = len(rest) // 2
    return projections(x, *rest[:count], biases=rest[count:])


def stock(x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    count = len(rest) // 2
    return tuple(linear(x, *pair) for pair in zip(rest[:count], rest[count:], strict=True))


def leaves_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 9, 64), (24, 64), (1, 1, 32), (2, 0, 16), (300, 24), (2, 3, 4, 16)], ids=str)
def test_as_good_as_the_layers(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    tensors = inputs(shape, WIDTHS, dtype, device)
    assert_no_worse(Case(ours, stock, stock, {f"t{i}": t for i, t in enumerate(tensors)}))
    outputs = ours(*leaves_of(tensors))
    assert len({o.grad_fn for o in outputs}) == 1
    for got, want in zip(outputs, stock(*leaves_of(tensors)), strict=True):
        assert_same_bits(got, want)


@few_examples
@given(rows=st.integers(0, 40), inner=st.integers(1, 70), widths=st.lists(st.integers(1, 70), min_size=2, max_size=4))
def test_any_shape(rows: int, inner: int, widths: list[int]) -> None:
    tensors = inputs((rows, inner), widths, torch.float32)
    assert_no_worse(Case(ours, stock, stock, {f"t{i}": t for i, t in enumerate(tensors)}))


@pytest.mark.parametrize("device", devices())
def test_some_without_a_bias_and_some_frozen(device: str) -> None:
    """As Whisper's keys have none."""
    x, a, b, c, bias, _, last = leaves_of(inputs((3, 5, 16), WIDTHS, torch.float32, device))
    a.requires_grad_(False)
    last.requires_grad_(False)
    got = projections(x, a, b, c, biases=[bias, None, last])
    want = linear(x, a, bias), linear(x, b), linear(x, c, last)
    wanted = [x, b, c, bias]
    upstream = [torch.randn_like(o) for o in want]
    for one, other in zip(
        torch.autograd.grad(got, wanted, upstream), torch.autograd.grad(want, wanted, upstream), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("device", devices())
def test_under_autocast_gradients_have_their_tensors_types(device: str) -> None:
    def run(function: Any) -> Any:
        def call(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.autocast(device, torch.bfloat16):
                return function(*given)

        return call

    tensors = inputs((4, 50, 48), WIDTHS, torch.float32, device)
    assert_no_worse(Case(run(ours), run(stock), stock, {f"t{i}": t for i, t in enumerate(tensors)}))
    leaves = leaves_of(tensors)
    outputs = run(ours)(*leaves)
    assert [o.dtype for o in outputs] == [torch.bfloat16] * 3
    found = torch.autograd.grad(outputs, leaves, [torch.randn_like(o) for o in outputs])
    assert [g.dtype for g in found] == [torch.float32] * 7
    rounded = [bool((g.bfloat16() == g).all()) for g in found[4:]]
    assert rounded == [False] * 3  # sums of biases are float32's


def test_derivatives_and_changes_in_place() -> None:
    leaves = leaves_of(inputs((2, 3, 4), (5, 2, 3), torch.float64))
    assert torch.autograd.gradcheck(ours, leaves)
    assert torch.autograd.gradgradcheck(ours, leaves)
    first, *_ = ours(*leaves)
    first.mul_(2).sum().backward()
    with pytest.raises(ValueError, match="2 biases of 3 weights"):
        projections(*leaves[:4], biases=leaves[4:6])


# ---- in models -------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 100,
}  # fmt: skip
_S2S: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 100, "pad_token_id": 0, "decoder_start_token_id": 1,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
#: Class -> its config's values, and how often several projections of one input come in a step.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "BertModel": (SIZES, 2),
    "RobertaModel": (SIZES, 2),
    "DistilBertModel": ({"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 100}, 2),
    "DebertaV2Model": ({**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, 2),
    "OPTModel": ({**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}, 2),
    "ViTModel": ({**SIZES, "image_size": 16, "patch_size": 4}, 2),
    "CLIPVisionModel": ({**SIZES, "image_size": 16, "patch_size": 4}, 2),
    "BartModel": (_S2S, 6),
    "T5Model": ({"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 100}, 6),
    "WhisperModel": ({**_S2S, "num_mel_bins": 8, "max_source_positions": 16}, 6),
}
#: Which of these share their input: keys and values, where queries may have another; DeBERTa's likewise.
EACH = dict.fromkeys(["BartModel", "T5Model", "WhisperModel", "DebertaV2Model"], 2)


def made(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    values, _ = MODELS[name]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = without_dropout(cls(cls.config_class(**values)))
    ids = torch.arange(2 * 7).view(2, 7) + 3
    if "pixel_values" in model.dummy_inputs or hasattr(model.config, "patch_size"):
        return model, {"pixel_values": torch.randn(2, 3, 16, 16)}
    given = {"input_features": torch.randn(2, 8, 32)} if name == "WhisperModel" else {"input_ids": ids}
    return model, {**given, **({"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {})}


def step(model: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    hidden = model(**given).last_hidden_state
    (hidden * torch.linspace(-1, 1, hidden.numel()).view(hidden.shape)).sum().backward()
    return hidden.detach(), gradients(model)


ALONE: dict[str, Any] = dict.fromkeys(
    ["rms_norm", "layer_norm", "swiglu", "rope", "masked_attention", "padding_free", "cuda_graphs", "recompute"], False
)


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """That of a key's bias is zero but for rounding."""
    assert got.keys() == want.keys()
    top = max(gradient.abs().max().item() for gradient in want.values())
    for name, gradient in want.items():
        assert (got[name] - gradient).abs().max() <= 1e-4 * max(gradient.abs().max().item(), 1e-2 * top), name


def ran() -> int:
    """Projections of attentions that have been called with others at once."""
    lines = bastile.report(reset=True)
    return sum(line.ran for line in lines if line.operator == "autocast_linear" and "Attention" in line.where)


@pytest.mark.parametrize("name", MODELS)
def test_attentions_without_a_rotary_function(name: str) -> None:
    if older_than("5.17") and name != "BertModel":
        pytest.skip("other code in this release")
    model, given = made(name)
    want, want_grads = step(model, given)
    bastile.apply(**ALONE)
    ran()
    with Memory() as memory:
        got, grads = step(model, given)
    assert ran() == EACH.get(name, 3) * MODELS[name][1]
    assert torch.equal(got, want)
    assert_close(grads, want_grads)
    adds = sum(call in ("aten.addmm_.default", "aten.addmm.out") for call in memory.calls)
    assert adds >= MODELS[name][1]
    bastile.reset()
    step(model, given)
    assert ran() == 0


def test_whispers_heads_are_not_copied() -> None:
    """Queries, keys and values as the products have made them go to the function that attends."""
    if older_than("5.17"):
        pytest.skip("other code in this release")
    model, given = made("WhisperModel")
    copies = []
    for _ in range(2):
        with Memory() as memory:
            step(model, given)
        copies.append(sum("clone" in call for call in memory.calls))
        bastile.apply(**ALONE)
    assert copies[0] - copies[1] >= 3 * MODELS["WhisperModel"][1]


@pytest.mark.parametrize("name", ["BertModel", "ViTModel", "WhisperModel"])
def test_adapters(name: str) -> None:
    if older_than("5.17"):
        pytest.skip("other code in this release")
    model, given = made(name)
    names = ["query", "key", "value"] if name == "BertModel" else ["q_proj", "k_proj", "v_proj"]
    config = LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    model = get_peft_model(model, config)
    inner = model.base_model.model
    want, want_grads = step(inner, given)
    bastile.apply(**{**ALONE, "lora_linear": True})
    ran()
    with Memory() as memory:
        got, grads = step(inner, given)
    thin = sum("mm" in call for call in memory.calls)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert_close(grads, want_grads)
    bastile.apply(**{**ALONE, "lora_linear": True, "autocast_linear": False})
    with Memory() as memory:
        step(inner, given)
    assert thin < sum("mm" in call for call in memory.calls)  # one of each layer's
    bastile.apply(**{**ALONE, "lora_linear": False})
    step(inner, given)
    assert bastile.report(reset=True).ran("lora_linear") > 0
    step(inner, given)
    assert bastile.report().ran("lora_linear") == 0


def test_modules_that_are_more_than_a_weight_and_a_bias_are_called() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model, given = made("BertModel")
    attention = model.encoder.layer[0].attention.self
    seen: list[str] = []
    attention.key.register_forward_hook(lambda *_: seen.append("key"))
    other = model.encoder.layer[1].attention.self
    other.value.__class__ = Scaled
    want, want_grads = step(model, given)
    bastile.apply(**ALONE)
    got, grads = step(model, given)
    assert torch.equal(got, want)
    assert_close(grads, want_grads)
    assert seen == ["key"] * 2


@pytest.mark.parametrize("name", ["Qwen3", "Qwen2"])
def test_compiled(name: str) -> None:
    """Of an attention whose code is known, and of one whose statements are."""
    config = getattr(transformers, f"{name}Config")(**SIZES, num_key_value_heads=2, head_dim=8)
    config.attention_bias = True
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    assert any("q_proj.bias" in key for key, _ in model.named_parameters())
    ids = torch.arange(32).view(2, 16)
    want = model(input_ids=ids, labels=ids).loss
    want.backward()
    want_grads = gradients(model)
    model.zero_grad()
    bastile.apply_to_model(model, cuda_graphs=False)
    torch.compiler.reset()
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(input_ids=ids, labels=ids).loss
    got.backward()
    torch.testing.assert_close(got, want)
    assert_close(gradients(model), want_grads)


# ---- what is rewritten -----------------------------------------------------------------------------------------------

_TEXT = """
class Attention:
    def forward(self, x, cache=None):
        q = (self.q_proj(x) * 2).view(1).transpose(1, 2).contiguous()
        k = self.k_proj(x).view(1).transpose(1, 2).contiguous()
        v = self.v_proj(x).view(1).transpose(1, 2).contiguous()
        {more}
        k, v = cache.update(k, v)
        return attention_interface(self, q, k, value=v)
"""


@pytest.mark.parametrize(
    ("more", "copies"),
    [
        ("pass", 0),
        ("q = q.view(3)", 1),  # which needs it as it was
        ("y = k", 1),
        ("q = q.transpose(1, 2).contiguous()", 2),
        ("other(v)", 1),
    ],
)
def test_heads_that_go_elsewhere_too_stay_contiguous(more: str, copies: int) -> None:
    code = Source(_TEXT.format(more=more)).method("Attention", "forward")
    assert code is not None
    node = rewrite.attended(code)
    assert node is not None
    names = [each.attr for each in rewrite.ast.walk(node) if isinstance(each, rewrite.ast.Attribute)]
    assert names.count("contiguous") == copies
