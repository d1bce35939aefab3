"""Statements that become one operator's call, in functions of any other code: what is found, and that nothing else
changes."""

import ast
import linecache
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import bastile
from bastile.models import decoder, norm, rewrite, small
from bastile.models.forms import Code, Source
from conftest import gradients

HEAD = "class Layer(nn.Module):\n    def forward(self, x, mask=None, **kwargs):\n"


def code(*lines: str) -> Code:
    found = Source(HEAD + "".join(f"        {line}\n" for line in lines)).method("Layer", "forward")
    assert found is not None
    return found


def body(node: ast.FunctionDef | None) -> list[str] | None:
    return None if node is None else ast.unparse(node).splitlines()[1:]


def lines(*given: str) -> list[str]:
    return [f"    {line}" for line in given]


# ---- what is found --------------------------------------------------------------------------------------------------

SUMS: dict[str, tuple[list[str], list[str] | None]] = {
    "sum, residual, norm": (
        ["x = self.f(x)", "x = r + x", "r = x", "x = self.norm(x)", "return r + x"],
        ["x = self.f(x)", "x, r = bastile_add_norm(self.norm, r, x)", "return r + x"],
    ),
    "operands of any kind": (
        ["x = r + self.drop(x) * self.scale", "r = x", "x = self.ln_2(x)", "return r + x"],
        ["x, r = bastile_add_norm(self.ln_2, r, self.drop(x) * self.scale)", "return r + x"],
    ),
    "another name for the result": (
        ["x = r + x", "r = x", "y = self.norm(x)", "return x + y + r"],
        ["y, r = bastile_add_norm(self.norm, r, x)", "x = r", "return x + y + r"],
    ),
    "a norm of a sum, whose sum goes nowhere": (
        ["x = r + x", "x = self.norm(x)", "return x"],
        ["x, bastile_unused = bastile_add_norm(self.norm, r, x)", "return x"],
    ),
    "a norm of a sum, whose sum goes on": (
        ["x = r + x", "y = self.norm(x)", "return x + y"],
        ["y, x = bastile_add_norm(self.norm, r, x)", "return x + y"],
    ),
    "in one statement": (
        ["x = self.LayerNorm(x + r)", "return x"],
        ["x = bastile_add_norm(self.LayerNorm, x, r)[0]", "return x"],
    ),
    "beside the norm before it, and in a branch": (
        ["r = x", "x = self.norm(x)", "if mask is not None:", "    x = r + x", "    x = self.norm2(x)", "return x"],
        [
            "x, r = bastile_add_norm(self.norm, x, None)",
            "if mask is not None:",
            "    x, bastile_unused = bastile_add_norm(self.norm2, r, x)",
            "return x",
        ],
    ),
    "a norm whose result is added": (
        ["x = self.f(x)", "x = self.norm(x)", "x = r + x", "r = x", "x = self.mlp(x)", "return r + x"],
        ["x = self.f(x)", "x = bastile_norm_add(self.norm, x, r)", "r = x", "x = self.mlp(x)", "return r + x"],
    ),
    "a norm whose result is added, and a norm of that": (
        ["x = self.norm(self.f(x))", "x = x + r", "r = x", "x = self.norm2(x)", "return r + x"],
        ["x = self.norm(self.f(x))", "x, r = bastile_add_norm(self.norm2, x, r)", "return r + x"],
    ),
    "a norm whose result is added twice": (["y = self.norm(x)", "y = y + y", "return y"], None),
    "a norm whose result stays": (["y = self.norm(x)", "x = r + y", "return x + y"], None),
    "a norm that is added to a call": (["x = self.norm(x)", "x = self.f(r) + x", "return x"], None),
    "no sum": (["r = x", "x = self.norm(x)", "return r + x"], None),
    "a sum of another name": (["y = r + x", "x = self.norm(x)", "return x + y"], None),
    "a difference": (["x = r - x", "x = self.norm(x)", "return x"], None),
    "something between": (["x = r + x", "x = x * 2", "x = self.norm(x)", "return x"], None),
    "no norm by its name": (["x = r + x", "x = self.mlp(x)", "return x"], None),
    "a norm with more arguments": (["x = r + x", "x = self.norm(x, mask)", "return x"], None),
    "another object's norm": (["x = r + x", "x = mask.norm(x)", "return x"], None),
    "super": (["x = r + x", "x = self.norm(x)", "return super().forward(x)"], None),
}


@pytest.mark.parametrize("case", SUMS)
def test_sums_and_norms(case: str) -> None:
    given, want = SUMS[case]
    assert body(rewrite.add_norms(code(*given))) == (None if want is None else lines(*want))


TURN = "q, k = apply_rotary(q, k, cos, sin)"
CALL = "q, k = bastile_norm_rotary(self.q_norm, self.k_norm, q, k, cos, sin, 'apply_rotary', apply_rotary, {}, {})"
HEADS: dict[str, tuple[list[str], list[str] | None]] = {
    "transposed behind the norm": (
        ["q = self.q_norm(self.q(x).view(s)).transpose(1, 2)", "k = self.k_norm(self.k(x)).transpose(1, 2)", TURN],
        [
            "bastile_projected_0, bastile_projected_1 = bastile_projected(x, self.q, self.k)",
            "q = bastile_projected_0.view(s).transpose(1, 2)",
            "k = bastile_projected_1.transpose(1, 2)",
            CALL.format(True, True),
        ],
    ),
    "transposed before, and one behind": (
        [
            "q = q.transpose(1, 2)",
            "q = self.q_norm(q)",
            "k = self.k_norm(k)",
            "k = k.transpose(1, 2)",
            TURN,
            "return q",
        ],
        ["q = q.transpose(1, 2)", "q = q", "k = k", "k = k.transpose(1, 2)", CALL.format(False, True), "return q"],
    ),
    "where the model has norms": (
        ["if self.norms:", "    q = self.q_norm(q)", "    k = self.k_norm(k)", TURN],
        [
            CALL.format(False, False).replace(
                "self.q_norm, self.k_norm", "self.q_norm if self.norms else None, self.k_norm if self.norms else None"
            )
        ],
    ),
    "a view between": (["q = self.q_norm(q)", "q = q.view(s)", "k = self.k_norm(k)", TURN], None),
    "a use between": (["q = self.q_norm(q)", "k = self.k_norm(k)", "x = q + 1", TURN], None),
    "one norm": (["q = self.q_norm(q)", TURN], None),
    "turned elsewhere": (["q = self.q_norm(q)", "k = self.k_norm(k)", "if mask:", f"    {TURN}"], None),
    "another axis": (["q = self.q_norm(q)", "k = self.k_norm(k)", TURN.replace("sin)", "sin, unsqueeze_dim=2)")], None),
    "other results": (["q = self.q_norm(q)", "k = self.k_norm(k)", TURN.replace("q, k =", "a, b =")], None),
}


@pytest.mark.parametrize("case", HEADS)
def test_norms_of_heads_and_rotary(case: str) -> None:
    given, want = HEADS[case]
    assert body(rewrite.norm_rotaries(code(*given), {"apply_rotary"})) == (None if want is None else lines(*want))


def at_once(*names: str, x: str = "x", first: int = 0) -> str:
    places = ", ".join(f"bastile_projected_{first + i}" for i in range(len(names)))
    return f"{places} = bastile_projected({', '.join([x, *(f'self.{name}' for name in names)])})"


PROJECTIONS: dict[str, tuple[list[str], list[str] | None]] = {
    "queries, keys and values": (
        ["s = x.shape", "q = self.q_proj(x).view(s)", "k = self.k_norm(self.k_proj(x))", "v: Any = self.v_proj(x)"],
        [
            "s = x.shape",
            at_once("q_proj", "k_proj", "v_proj"),
            "q = bastile_projected_0.view(s)",
            "k = self.k_norm(bastile_projected_1)",
            "v: Any = bastile_projected_2",
        ],
    ),
    "in a return": (
        ["return attend(self.query(x), self.key(x))"],
        None,  # runs are of assignments and calls; a return is left as it is
    ),
    "in one assignment": (
        ["q, k = self.query(x), self.key(x)", "return q + k"],
        [at_once("query", "key"), "q, k = (bastile_projected_0, bastile_projected_1)", "return q + k"],
    ),
    "of two inputs": (
        ["q = self.q_proj(x)", "k = self.k_proj(mask)", "v = self.v_proj(mask)", "g = self.gate_proj(x)"],
        [
            at_once("q_proj", "gate_proj"),
            "q = bastile_projected_0",
            at_once("k_proj", "v_proj", x="mask", first=2),
            "k = bastile_projected_2",
            "v = bastile_projected_3",
            "g = bastile_projected_1",
        ],
    ),
    "the input's name for a result": (
        ["q = self.q_proj(x)", "x = self.k_proj(x)", "v = self.v_proj(x)"],
        [at_once("q_proj", "k_proj"), "q = bastile_projected_0", "x = bastile_projected_1", "v = self.v_proj(x)"],
    ),
    "in a branch": (
        ["if mask is None:", "    k = self.k_proj(x)", "    v = self.v_proj(x)", "q = self.q_proj(x)"],
        [
            "if mask is None:",
            f"    {at_once('k_proj', 'v_proj')}",
            "    k = bastile_projected_0",
            "    v = bastile_projected_1",
            "q = self.q_proj(x)",
        ],
    ),
    "another input by then": (["q = self.q_proj(x)", "x = x + 1", "k = self.k_proj(x)"], None),
    "a branch between": (["q = self.q_proj(x)", "if mask:", "    return q", "k = self.k_proj(x)"], None),
    "not in any case": (["q = self.q_proj(x)", "k = self.k_proj(x) if mask else q"], None),
    "nor this": (["q = self.q_proj(x)", "k = mask or self.k_proj(x)"], None),
    "perhaps never": (["q = self.q_proj(x)", "k = [self.k_proj(x) for _ in mask]"], None),
    "one module twice": (["q = self.q_proj(x)", "k = self.q_proj(x)"], None),
    "more arguments": (["q = self.q_proj(x)", "k = self.k_proj(x, mask)"], None),
    "other names": (["q = self.norm(x)", "k = self.dropout(x)"], None),
    "super": (["q = self.q_proj(x)", "k = self.k_proj(x)", "return super().forward(q + k)"], None),
}


@pytest.mark.parametrize("case", PROJECTIONS)
def test_layers_of_one_input(case: str) -> None:
    given, want = PROJECTIONS[case]
    assert body(rewrite.projections(code(*given))) == (None if want is None else lines(*want))


# ---- that it means the same -----------------------------------------------------------------------------------------

LAYERS = '''
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class Unknown(nn.Module):
    """Of no form."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm_a, self.norm_b = LlamaRMSNorm(16), nn.LayerNorm(16)
        self.scale = 0.3

    def forward(self, x, *, more=None):
        """A layer."""
        kept = x
        x = self.norm_a(x)
        x = self.a(x).sin()
        x = kept + x * self.scale
        kept = x
        x = self.norm_b(x)
        y = self.norm_a(self.b(x))
        y = y + kept
        return y if more is None else self.norm_b(x + more) + y
'''


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module whose class is in no form, from a file that Bastile can read."""
    name, module = "<layers>", ModuleType("layers_of_a_user")
    monkeypatch.setitem(linecache.cache, name, (len(LAYERS), None, LAYERS.splitlines(keepends=True), name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(LAYERS, name, "exec"), vars(module))
    torch.manual_seed(0)
    return vars(module)["Unknown"]()


def run(module: nn.Module, x: torch.Tensor, **more: Any) -> list[torch.Tensor]:
    given = x.clone().requires_grad_()
    y = module(given, **more)
    return [y, *torch.autograd.grad(y.square().sum(), [given, *module.parameters()], allow_unused=True)]


def same(got: list[Any], want: list[Any]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            # Sums of float32 in another order, one behind the other; of what cancels 1e-5 is left.
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def hooked(module: Any) -> None:
    module.norm_b.register_forward_hook(lambda _module, _given, output: output * 2)


def exchanged(module: Any) -> None:
    module.norm_b = nn.Sequential(nn.Linear(16, 16), nn.Tanh())


@pytest.mark.parametrize("change", [None, hooked, exchanged])
@pytest.mark.parametrize("more", [None, "as x", "one number", "to be spread"])
def test_code_of_no_form(unknown: Any, change: Callable[[Any], None] | None, more: str | None) -> None:
    x = torch.randn(2, 5, 16)
    if change is not None:
        change(unknown)
    given = {None: None, "as x": torch.randn(2, 5, 16), "one number": 1.5, "to be spread": torch.randn(16)}[more]
    want = run(unknown, x, more=given)
    bastile.report(reset=True)
    assert "add_rms_norm" in bastile.apply_to_model(unknown)
    same(run(unknown, x, more=given), want)
    told = {line.operator: line.ran for line in bastile.report()}
    assert told["add_rms_norm"] == (3 if change is None else 2)
    bastile.reset(model=unknown)
    same(run(unknown, x, more=given), want)


def test_a_wrong_call_would_be_seen(unknown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 5, 16)
    want = run(unknown, x)
    stock = decoder.add_layer_norm
    monkeypatch.setattr(decoder, "add_layer_norm", lambda x, r, *others, **more: (stock(x, r, *others, **more)[0], x))
    bastile.apply_to_model(unknown)
    with pytest.raises(AssertionError):
        same(run(unknown, x), want)


def test_pytorch_s_own_norm_is_served_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = nn.LayerNorm.forward
    layer, x = nn.LayerNorm(16), torch.randn(3, 16)
    want = run(layer, x)
    bastile.report(reset=True)
    bastile.apply(model_types="llama")
    assert nn.LayerNorm.forward is stock  # of what type it is, nobody can say
    bastile.apply()
    same(run(layer, x), want)
    with torch.no_grad():
        layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.bfloat16()).dtype is torch.bfloat16
    several = nn.LayerNorm((3, 16))
    torch.testing.assert_close(several(x), nn.functional.layer_norm(x, (3, 16)))
    assert bastile.report().ran("layer_norm") == 2
    torch.jit.script(nn.LayerNorm(4))  # which reads the source of forward
    monkeypatch.setattr(norm, "_ELEMENTS", 0)
    bastile.reset()
    assert nn.LayerNorm.forward is stock


def test_an_attention_of_any_code_with_a_norm_that_is_hooked() -> None:
    model: Any = small.small_model("qwen3_next")
    (attention,) = [layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")]
    seen = []
    attention.q_norm.register_forward_hook(lambda _module, given, _output: seen.append(given[0].shape))
    loss, gradients = small.step(model)
    bastile.apply_to_model(model)
    bastile.report(reset=True)
    patched, got = small.step(model)
    torch.testing.assert_close(patched, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-5)
    assert seen[0] == seen[1]  # [B, S, heads, D], as the attention gives it
    assert bastile.report().ran("qk_norm_rope") == 0


def test_norms_of_heads_that_have_no_weight() -> None:
    """Of a class whose instances may have one: NeoMME's. Its norms and its rotary function are served apart."""
    if not hasattr(transformers, "NeoMMEForMaskedLM"):
        pytest.skip("this Transformers has no NeoMME")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97, "embedding_rank": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    model: Any = small.prepared(transformers.NeoMMEForMaskedLM(transformers.NeoMMEConfig(**sizes, **heads)))
    ids = torch.arange(24).view(2, 12) + 3

    def step() -> tuple[Any, Any]:
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        return loss.detach(), gradients(model)

    want, want_gradients = step()
    bastile.apply_to_model(model)
    bastile.report(reset=True)
    got, got_gradients = step()
    torch.testing.assert_close(got, want)
    for name, gradient in want_gradients.items():
        torch.testing.assert_close(got_gradients[name], gradient, rtol=1e-3, atol=1e-5)
    ran = bastile.report()
    assert (ran.ran("qk_norm_rope"), ran.ran("rope") > 0) == (0, True)
