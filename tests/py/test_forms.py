"""Recognition of code: what is taken away before two functions are compared, what makes them differ, and where apply
finds the code of models: late imports, users' own modules, subclasses."""

import importlib.util
import linecache
import logging
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

import bastile
from bastile.models.forms import Source
from bastile.models.known import FORMS, KNOWN
from bastile.models.sites import file_of, sites
from bastile.models.small import causal_types
from bastile.models.table import OPERATORS, USUAL
from conftest import modeling, tiny_batch, tiny_model
from families import FAMILIES, everywhere

NORM = """
import torch
from torch import nn

class Norm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)
"""

GEMMA_NORM = """
import torch
from torch import nn

class Norm(nn.Module):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)
"""

MLP = """
class MLP(nn.Module):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
"""

ROTARY = """
import torch

def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)

def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
"""

LAYER = """
class Layer(nn.Module):
    def forward(self, hidden_states, attention_mask=None, use_cache=False, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states, attention_mask=attention_mask, use_cache=use_cache, **kwargs
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states
"""


def fingerprint(text: str) -> str:
    """Of the rotary function, or of the only class's forward."""
    source = Source(text)
    if "apply_rotary_pos_emb" in source.functions:
        return source.function("apply_rotary_pos_emb").fingerprint
    (name,) = source.classes
    code = source.method(name, "forward")
    assert code is not None
    return code.fingerprint


def kind(text: str) -> str | None:
    known = KNOWN.get(fingerprint(text))
    return None if known is None else known.kind


# ---- reduction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "want"), [(NORM, "norm"), (GEMMA_NORM, "norm"), (MLP, "mlp"), (ROTARY, "rotary"), (LAYER, "layer")]
)
def test_the_forms_of_these_tests_are_known(text: str, want: str) -> None:
    assert kind(text) == want


SAME = [
    (NORM, NORM.replace("hidden_states", "x").replace("input_dtype", "kind")),
    (NORM, NORM.replace("self, hidden_states)", "self, hidden_states: torch.Tensor) -> torch.Tensor")),
    (NORM, NORM.replace("    def forward", "    @decorated\n    def forward").replace("dtype\n", 'dtype  # "a"\n')),
    (NORM, NORM.replace("):\n        input", '):\n        """What it does."""\n        input')),
    (NORM, NORM.replace("variance_epsilon", "eps").replace("weight", "gain")),
    (NORM, NORM.replace("variance = ", "variance: torch.Tensor = ")),
    (GEMMA_NORM, GEMMA_NORM.replace("_norm(", "_normed(")),
    (MLP, MLP.replace("gate_proj", "w1").replace("up_proj", "w3").replace("act_fn", "activation")),
    (ROTARY, ROTARY.replace("rotate_half", "turned").replace("q_embed", "first")),
    (LAYER, LAYER.replace("attention_mask", "position_ids")),
]


@pytest.mark.parametrize(("text", "other"), SAME, ids=range(len(SAME)))
def test_what_computes_the_same_by_the_same_steps_is_one_form(text: str, other: str) -> None:
    assert text != other
    assert fingerprint(text) == fingerprint(other)


#: Each changes what is computed, or what is called.
CHANGED = {
    "epsilon outside of the root": (NORM, "variance + self.variance_epsilon)", "variance) + self.variance_epsilon"),
    "the cast after the weight": (NORM, "self.weight * hidden_states.to(", "(self.weight * hidden_states).to("),
    "a sum with the weight": (NORM, "self.weight * hidden", "self.weight + hidden"),
    "a cast that is missing": (NORM, "        hidden_states = hidden_states.to(torch.float32)\n", ""),
    "another power": (NORM, "pow(2)", "pow(3)"),
    "a helper that changed": (GEMMA_NORM, "+ self.eps)", "+ 2 * self.eps)"),
    "the weight without one": (GEMMA_NORM, "1.0 + self.weight", "self.weight"),
    "the other sign": (ROTARY, "(-x2, x1)", "(x2, -x1)"),
    "halves at another place": (ROTARY, "// 2]", "// 4]"),
    "another axis": (ROTARY, "unsqueeze_dim=1", "unsqueeze_dim=2"),
    "a sigmoid of up": (MLP, "self.up_proj(x))", "self.up_proj(x).sigmoid())"),
    "a scale": (MLP, "self.up_proj(x))", "self.up_proj(x) * 0.5)"),
    "a norm after the sum": (LAYER, "return hidden_states", "return self.norm(hidden_states)"),
    "another residual": (LAYER, "hidden_states = residual + hidden_states\n        residual", "residual"),
    "an argument that is used": (LAYER, "self.mlp(hidden_states)", "self.mlp(hidden_states, use_cache)"),
    "an argument that is not handed on": (LAYER, ", use_cache=use_cache, **kwargs", ", **kwargs"),
}


#: What each of these says is another form.
OTHER_FORMS = {
    "the cast after the weight": {"casting": "none"},
    "the weight without one": {"casting": "none"},
    "the other sign": {"is_backward": True},
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_changed_formula_is_not_known(change: str) -> None:
    text, old, new = CHANGED[change]
    assert text.count(old) >= 1
    known = KNOWN.get(fingerprint(text.replace(old, new)))
    assert known is not KNOWN[fingerprint(text)]
    assert known is None or OTHER_FORMS[change].items() <= known.variant.items()


def test_attributes_are_told_in_the_order_in_which_they_are_read() -> None:
    code = Source(MLP).method("MLP", "forward")
    assert code is not None
    assert code.attributes == ("down_proj", "act_fn", "gate_proj", "up_proj")
    assert dict(zip(KNOWN[code.fingerprint].roles, code.attributes, strict=True))["gate"] == "gate_proj"


@pytest.mark.parametrize("default", ["lambda x, *y: x", "(lambda x: x)(1)", "[lambda x: lambda z: z]"])
@pytest.mark.parametrize("star", ["", "*, "])
def test_functions_among_defaults(star: str, default: str) -> None:
    """Of a file of users' that has a model, too, all functions are looked at."""
    source = Source(f"def rotates(q, {star}by={default}):\n    return by(q)\n")
    other = Source(f"def rotates(p, {star}how={default.replace('x', 'a')}):\n    return how(p)\n")
    assert source.function("rotates").fingerprint == other.function("rotates").fingerprint


def test_no_two_forms_share_a_fingerprint() -> None:
    fingerprints = [f for form in FORMS for f in form.fingerprints]
    assert len(fingerprints) == len(set(fingerprints)) == len(KNOWN)


# ---- live code -------------------------------------------------------------------------------------------------------

MODEL = (
    """
from transformers.models.llama import modeling_llama as llama
from transformers import LlamaConfig, LlamaForCausalLM

class OwnNorm(nn.Module):
"""
    + NORM.partition("class Norm(nn.Module):\n")[2]
    + '''

class Kept(llama.LlamaMLP):
    """A subclass that keeps the forward."""

class Other(llama.LlamaMLP):
    def forward(self, x):
        return 2 * x

class OwnForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.norm = OwnNorm(config.hidden_size)
        self.model.layers[0].mlp = Kept(config)
        self.model.layers[1].mlp = Other(config)
        self.post_init()
'''
)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[types.ModuleType]:
    """A module of a checkpoint with code of its own."""
    name = "transformers_modules.someone.own_model"
    path = tmp_path / "own_model.py"
    path.write_text(NORM.partition("class")[0] + MODEL)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


#: Calls of a step: both layers' norms are of the layers, the last one is the user's; one MLP has a forward of its own.
OF_OWN = {"rms_norm": 1, "swiglu": 1, "rope": 2, "projections": 2, "add_rms_norm": 4, "fused_linear_cross_entropy": 1}


def built(own: Any) -> PreTrainedModel:
    return own.OwnForCausalLM(tiny_model("llama").config).train()


@pytest.mark.parametrize("before", [True, False])
def test_code_of_users_is_known_by_the_same_rule(own: Any, before: bool, calls: dict[str, int]) -> None:
    model = built(own) if before else None
    bastile.apply()
    model = model or built(own)
    model(**tiny_batch(model)).loss.backward()
    assert own.OwnNorm.forward.__qualname__ == "OwnNorm.forward"
    assert calls == OF_OWN
    assert bastile.get_patched_ops(model) == everywhere(FAMILIES["llama"].patches(), "llama")
    bastile.reset()
    calls.clear()
    model(**tiny_batch(model))
    assert calls == {}


def test_apply_to_model_knows_code_of_users(own: Any, calls: dict[str, int]) -> None:
    model = built(own)
    assert bastile.apply_to_model(model) == FAMILIES["llama"].patches()
    model(**tiny_batch(model))
    assert calls == OF_OWN


def test_a_class_that_a_module_gets_later_is_served_too(own: Any, calls: dict[str, int]) -> None:
    """As in a notebook: another cell, another model."""
    bastile.apply()
    built(own)
    later = "class Later(nn.Module):\n" + NORM.partition("class Norm(nn.Module):\n")[2]
    path = Path(own.__file__).with_name("later.py")
    path.write_text(later)
    exec(compile(later, str(path), "exec"), vars(own))
    model = built(own)
    assert not hasattr(own.Later.forward, "_bastile_original")
    model.model.norm = own.Later(model.config.hidden_size)
    model.post_init()
    model(**tiny_batch(model))
    assert calls["rms_norm"] == 1
    bastile.reset()
    assert not hasattr(own.Later.forward, "_bastile_original")


def test_a_helper_that_a_subclass_overrides_is_honoured() -> None:
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")

    class Louder(gemma.GemmaRMSNorm):
        def _norm(self, x: torch.Tensor) -> torch.Tensor:
            return 3 * super()._norm(x)

    norm, x = Louder(8), torch.randn(2, 8)
    want = norm(x)
    bastile.apply()
    torch.testing.assert_close(norm(x), want)


def test_a_file_that_was_changed_after_its_import_is_not_what_runs(own: Any) -> None:
    """What is read must be what runs: here the file has a known form, and what was imported another."""
    path = Path(own.__file__)
    good = path.read_text()
    for changed, is_served in ((good.replace("pow(2)", "pow(3)"), False), (good, True)):
        path.write_text(changed)
        exec(compile(changed, str(path), "exec"), vars(own))
        path.write_text(good)
        linecache.checkcache()
        file = file_of(own.__name__)
        assert ("OwnNorm.forward" in {site.where for site in sites(file, OPERATORS)}) == is_served
        assert ("other code than its source says" in file.unknown.get("OwnNorm.forward", "")) != is_served


def test_attributes_that_say_otherwise(calls: dict[str, int]) -> None:
    """A weight of another shape, which the code would broadcast."""
    bastile.apply()
    norm = modeling("llama").LlamaRMSNorm(1)
    x = torch.randn(2, 8)
    torch.testing.assert_close(norm(x), x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    assert calls == {}


IMPORTS = """
import sys, time
import transformers, torch
import transformers.loss.loss_utils  # which apply() looks at: with torchvision, where that is installed
before = set(sys.modules)
import bastile
bastile.apply()
files = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
assert not files, files
slow = {"transformers.modeling_utils", "torch._dynamo", "torch.distributed.fsdp", "sympy"}  # a second, all together
assert not slow & (set(sys.modules) - before), slow & set(sys.modules)
from transformers.models.llama import modeling_llama
import importlib
looked = bastile.get_patched_ops()
assert "bastile" in modeling_llama.LlamaRMSNorm.forward.__globals__["__name__"] or hasattr(
    modeling_llama.LlamaRMSNorm.forward, "_bastile_original")
assert not [n for n in sys.modules if ".modeling_qwen3" in n]
bastile.reset()
assert not hasattr(modeling_llama.LlamaRMSNorm.forward, "_bastile_original")
importlib.import_module("transformers.models.qwen3.modeling_qwen3")
assert not hasattr(sys.modules["transformers.models.qwen3.modeling_qwen3"].Qwen3RMSNorm.forward, "_bastile_original")
print("fine")
"""


def test_apply_imports_no_model_file_and_serves_those_that_come_later() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n", done.stderr


# ---- names -----------------------------------------------------------------------------------------------------------


def test_names_are_those_of_operators_and_with_the_type_where_one_is_given() -> None:
    model = tiny_model("llama")
    assert bastile.apply() == list(USUAL) == bastile.get_patched_ops()
    assert bastile.get_patched_ops(model) == everywhere(FAMILIES["llama"].patches(), "llama")
    llama = FAMILIES["llama"].patches([op for op in USUAL if op != "rope"])
    assert bastile.apply(rope=False, model_types="llama") == llama
    assert bastile.get_patched_ops() == [*USUAL, *llama]
    assert bastile.get_patched_ops(model) == everywhere(llama, "llama")
    assert bastile.reset(["swiglu", "rms_norm_llama"]) == ["swiglu", "rms_norm_llama"]
    left = [name for name in llama if name not in ("swiglu_llama", "rms_norm_llama")]
    assert bastile.get_patched_ops(model) == everywhere(left, "llama")
    assert bastile.reset() == [*(op for op in USUAL if op != "swiglu"), *left]
    assert bastile.get_patched_ops() == []


# ---- what ran --------------------------------------------------------------------------------------------------------


def test_the_report_counts_what_ran_and_what_stepped_aside(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    bastile.report(reset=True)
    bastile.apply()
    with caplog.at_level(logging.INFO, logger="bastile"):
        for _ in range(2):
            model(**tiny_batch(model))
        model.eval()(**tiny_batch(model))
    told = bastile.report()
    assert told.ran("swiglu") == 3
    assert told.ran("add_rms_norm") == 12
    assert told.ran("fused_linear_cross_entropy") == 3  # evaluation with labels, too
    assert told.ran("moe_experts") == 0
    (line,) = [line for line in told if line.operator == "swiglu"]
    assert line.where == "transformers.models.llama.modeling_llama.LlamaMLP"
    assert line.aside == {"its activation is none that Bastile computes": 3}
    said = Counter((r.levelname, r.getMessage()) for r in caplog.records if "swiglu" in r.getMessage())
    assert list(said.values()) == [1]
    assert next(iter(said))[0] == "WARNING"
    assert "3  stepped aside: its activation is none that Bastile computes" in str(told)
    bastile.report(reset=True)
    assert not bastile.report().lines


# ---- the installed release -------------------------------------------------------------------------------------------


#: In how many of the causal types' folders: in the oldest release, and from 5.20 on.
AT_LEAST = {
    False: {"norm": 70, "mlp": 55, "rotary": 75, "head": 50, "layer": 40, "attention": 3, "experts": 1},
    True: {"norm": 95, "mlp": 75, "rotary": 95, "head": 50, "layer": 55, "attention": 4, "experts": 1},
}


def test_how_many_types_have_a_place_for_each_operator(record_property: Any) -> None:
    """By the text of their files: nothing is imported."""
    folder = Path(importlib.util.find_spec("transformers").origin).parent / "models"  # type: ignore[union-attr, arg-type]
    auto = __import__("transformers.models.auto.configuration_auto", fromlist=["x"])
    kinds: Counter[str] = Counter()
    for name in {auto.model_type_to_module_name(model_type) for model_type in causal_types()}:
        path = folder / name / f"modeling_{name}.py"
        if not path.exists():
            continue
        source = Source(path.read_text(encoding="utf-8"))
        codes = [source.method(cls, "forward") for cls in source.classes]
        codes += [source.function(function) for function in source.functions if "rotary" in function]
        kinds.update({KNOWN[code.fingerprint].kind for code in codes if code and code.fingerprint in KNOWN})
    record_property("kinds", dict(kinds))
    print(dict(kinds))
    for kind, least in AT_LEAST[Version(transformers.__version__) >= Version("5.20")].items():
        assert kinds[kind] >= least, kinds
