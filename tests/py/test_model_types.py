"""Any language model type with Bastile means what it means in Transformers: one step of a small model, stock and
patched, in float32 and in bfloat16, and ten tokens. The ordinary run takes a sample; `make test-models` all types."""

import inspect
import logging
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import bastile
from bastile.cli import main
from bastile.models import norm, rotary, small, support
from bastile.models.table import OPERATORS
from conftest import modeling, older_than

ROOT = Path(__file__).resolve().parent.parent.parent

#: A type for each form of code, and what must have run in a step of its small model. Not all are in older releases.
#: What layers with the gated delta rule have beside.
DELTA = ("gated_delta_rule", "causal_conv1d", "gated_rms_norm")

SAMPLE: dict[str, set[str]] = {
    "llama": {"rms_norm", "swiglu", "rope", "add_rms_norm", "fused_linear_cross_entropy"},
    "qwen3": {"rms_norm", "swiglu", "qk_norm_rope", "add_rms_norm", "fused_linear_cross_entropy"},
    "qwen3_moe": {"rms_norm", "qk_norm_rope", "add_rms_norm", "moe_experts", "fused_linear_cross_entropy"},
    "deepseek_v3": {"rms_norm", "swiglu", "add_rms_norm", "rope", "moe_experts", "fused_linear_cross_entropy"},
    "gpt_oss": {"rms_norm", "rope", "add_rms_norm", "moe_experts", "fused_linear_cross_entropy"},
    "gemma": {"rms_norm", "rope", "add_rms_norm", "fused_linear_cross_entropy"},
    "gemma2": {"rms_norm", "rope", "add_rms_norm"},
    "gemma3_text": {"rms_norm", "qk_norm_rope", "add_rms_norm"},
    "gemma3n_text": {"rms_norm", "swiglu", "rope", "fused_linear_cross_entropy"},
    "deepseek_v4": {"rms_norm", "swiglu", "rope", "moe_experts", "fused_linear_cross_entropy"},
    "minimax_m3_vl_text": {"rms_norm", "swiglu", "qk_norm_rope", "moe_experts", "fused_linear_cross_entropy"},
    "nemotron": {"swiglu", "rope", "fused_linear_cross_entropy"},
    "starcoder2": {"layer_norm", "swiglu", "rope", "add_rms_norm"},
    "gpt_neox": {"layer_norm", "swiglu", "rope"},
    "phi": {"layer_norm", "swiglu", "rope"},
    "codegen": {"layer_norm", "swiglu", "rope"},
    "arcee": {"rms_norm", "swiglu", "rope", "add_rms_norm"},
    "apertus": {"rms_norm", "qk_norm_rope", "add_rms_norm", "fused_linear_cross_entropy"},
    "olmo2": {"rms_norm", "swiglu", "rope", "add_rms_norm", "fused_linear_cross_entropy"},
    "cohere": {"layer_norm", "swiglu", "rope"},
    "olmo": {"layer_norm", "add_rms_norm", "rope"},
    "bert": {"layer_norm", "add_rms_norm"},
    "bart": {"layer_norm", "add_rms_norm"},
    "granite": {"rms_norm", "add_rms_norm", "swiglu"},
    "gemma4_text": {"rms_norm", "swiglu", "rope"},
    "gptj": {"layer_norm", "swiglu", "rope"},
    "llama4_text": {"rms_norm", "swiglu", "rope", "moe_experts"},
    "nanochat": {"rms_norm", "rope"},
    "qwen3_next": {"rms_norm", "qk_norm_rope", "add_rms_norm", "swiglu", *DELTA},
    "glm4_moe": {"rms_norm", "rope", "add_rms_norm", "swiglu"},
    "falcon_h1": {"swiglu", "rope", "causal_conv1d", "mamba2_scan"},
    "mamba2": {"rms_norm", "gated_rms_norm", "causal_conv1d", "mamba2_scan", "fused_linear_cross_entropy"},
    "zamba2": {"rms_norm", "gated_rms_norm", "mamba2_scan"},
    "bamba": {"rms_norm", "swiglu", "rope", "gated_rms_norm", "mamba2_scan"},
    "nemotron_h": {"rms_norm", "swiglu", "gated_rms_norm", "mamba2_scan"},
    "kimi_linear": {"rms_norm", "swiglu", "add_rms_norm", "moe_experts", "gated_rms_norm"},
    "qwen3_5_text": {"rms_norm", "swiglu", "qk_norm_rope", "add_rms_norm", *DELTA},
    "bitnet": {"swiglu", "rope"},
    "modernbert-decoder": {"layer_norm", "swiglu", "rope"},
    "glm4": {"rms_norm", "swiglu", "rope", "add_rms_norm", "fused_linear_cross_entropy"},
    "phi3": {"rms_norm", "swiglu", "rope", "fused_linear_cross_entropy"},
    "ernie4_5": {"rms_norm", "swiglu", "rope", "add_rms_norm", "fused_linear_cross_entropy"},
    "helium": {"rms_norm", "swiglu", "rope", "add_rms_norm", "fused_linear_cross_entropy"},
    "lfm2": {"rms_norm", "swiglu", "qk_norm_rope", "causal_conv1d"},
    "gpt2": {"layer_norm", "fused_linear_cross_entropy"},
    # Of images too.
    "llava": {"rms_norm", "swiglu", "rope", "add_rms_norm", "fused_linear_cross_entropy"},
    "qwen2_5_vl": {"rms_norm", "swiglu", "add_rms_norm", "fused_linear_cross_entropy"},
    "qwen3_vl": {"rms_norm", "swiglu", "qk_norm_rope", "add_rms_norm", "fused_linear_cross_entropy"},
    "shieldgemma2": {"rms_norm", "swiglu", "qk_norm_rope", "add_rms_norm", "fused_linear_cross_entropy"},
}

#: Operators whose code was written out in each module before a release, so that there is no place for them.
SINCE = {"causal_conv1d": "5.17", "gated_delta_rule": "5.17", "mamba2_scan": "5.17"}

#: Types of which ten tokens and bfloat16 are looked at in the ordinary run too.
THOROUGH = ("llama", "qwen3", "gpt_oss", "gemma3_text", "gpt2", "bart", "deepseek_v3", "qwen3_next", "qwen3_vl")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "bastile")  # until the test's end


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_step_is_what_it_is_in_stock_transformers(model_type: str) -> None:
    if model_type not in ALL_TYPES:
        pytest.skip(f"Transformers {transformers.__version__} has no {model_type}")
    if older_than("5.17"):
        try:
            small.step(small.small_model(model_type))
        except AttributeError as error:
            pytest.skip(f"Transformers {transformers.__version__}'s own code fails: {error}")
    done = support.check(model_type)
    assert done.passed, done
    wanted = {operator for operator in SAMPLE[model_type] if not older_than(SINCE.get(operator, "5.0"))}
    assert wanted <= done.ran.keys(), done.ran
    assert bastile.get_patched_ops() == []


ALL_TYPES = small.causal_types() + small.vision_types()

#: What stock Transformers cannot do with a small model of a type, by name: what begins to fail is seen so, and what
#: works by now too.
_PICTURES, _NUMBERS = "it needs pictures or sound", "its numbers must fit each other, as these small ones do not"
_CANNOT: dict[str, dict[str, str]] = {
    "be built": {
        _PICTURES: "pi0 pp_formulanet vision-encoder-decoder",
        _NUMBERS: "granite4_vision",
        "it is trained by diffusion: its forward takes no labels": "diffusion_gemma",
        "its config is of several models": "evolla",
        "it drafts for another model, whose keys and values it is given, and takes no labels": "gemma4_assistant "
        "gemma4_unified_assistant",
    },
    "step in bfloat16": {
        "a float32 tensor meets bfloat16": "inkling2 inkling2_text inkling2_loop inkling2_loop_text xlstm"
    },
    "generate": {
        "its first layers have no attention, which its cache expects": "granitemoehybrid jamba nemotron_h "
        "nemotron_h_omni recurrent_gemma",
        _PICTURES: "qwen2_5_omni_thinker qwen3_omni_moe_thinker",
        _NUMBERS: "xlstm",
        "its own generate wants more than token ids": "blip blip-2 blt idefics instructblip instructblipvideo "
        "musicgen musicgen_melody pix2struct udop",
    },
}
NEEDS = {"gemma3n": "timm", "fast_vlm": "timm", "perception_lm": "timm", "inkling_mm_model": "scipy"}
every_type = pytest.mark.parametrize(
    "model_type", [pytest.param(t, marks=[pytest.mark.needs_more] if t in NEEDS else []) for t in ALL_TYPES]
)


def able(model_type: str, what: str, run: Callable[[], Any]) -> Any:
    """run(), which must fail for the types that cannot do this, and for no other."""
    why = next((why for why, names in _CANNOT[what].items() if model_type in names.split()), None)
    if why is None:
        return run()
    with pytest.raises(Exception):  # noqa: B017, PT011  (whatever a model of any kind may raise)
        run()
    pytest.skip(f"{model_type} cannot {what}: {why}")


def stepped(model_type: str) -> Any:
    """A small model that has made a step, which may change it."""
    if model_type not in ALL_TYPES:
        pytest.skip(f"Transformers {transformers.__version__} has no {model_type}")
    if model_type in NEEDS:
        pytest.importorskip(NEEDS[model_type])

    def run() -> Any:
        model = small.small_model(model_type)
        small.step(model)
        return model

    return able(model_type, "be built", run)


@pytest.mark.every_type
@every_type
def test_a_step_of_every_type(model_type: str) -> None:
    stepped(model_type)
    done = support.check(model_type)
    assert done.passed, done


def error_of(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The root mean square over parameters of each gradient's relative error. Where one is small against all others,
    that of keys' biases say, which is zero but for rounding, it is the others' size that counts."""
    assert got.keys() >= want.keys()
    sizes = {name: float(w.double().norm()) for name, w in want.items()}
    least = 1e-2 * max(sizes.values())
    errors = [float((got[n].double() - w.double()).norm()) / max(sizes[n], least) for n, w in want.items()]
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def assert_bfloat16_is_as_close(model_type: str) -> None:
    """To the float32 step of the same rounded weights, in the middle one of five steps: in one or the other a router
    sends a token elsewhere. Of so few numbers luck may still be a factor of two, below which no other formula stays."""
    model = stepped(model_type)
    able(model_type, "step in bfloat16", lambda: small.step(model.bfloat16()))
    exact = stepped(model_type)
    exact.load_state_dict(model.state_dict())  # a copy of a model would not do where it keeps something of a step
    stock, patched = [], []
    for seed in range(5):
        _, want = small.step(exact, seed)
        stock.append(error_of(small.step(model, seed)[1], want))
        bastile.apply_to_model(model)
        patched.append(error_of(small.step(model, seed)[1], want))
        bastile.reset(model=model)
    assert sorted(patched)[2] <= 2 * sorted(stock)[2]


def assert_generates_the_same(model_type: str) -> None:
    model = stepped(model_type).eval()
    ids = torch.randint(3, 90, (2, 5), generator=torch.Generator().manual_seed(1))

    def generated() -> torch.Tensor:
        tokens = {"max_new_tokens": 10, "min_new_tokens": 10}
        return model.generate(input_ids=ids, **tokens, do_sample=False, use_cache=True)

    want = able(model_type, "generate", generated)
    bastile.apply_to_model(model)
    assert torch.equal(generated(), want)


@pytest.mark.parametrize("model_type", THOROUGH)
def test_bfloat16(model_type: str) -> None:
    assert_bfloat16_is_as_close(model_type)


@pytest.mark.parametrize("model_type", THOROUGH)
def test_ten_tokens(model_type: str) -> None:
    assert_generates_the_same(model_type)


@pytest.mark.every_type
@every_type
def test_bfloat16_of_every_type(model_type: str) -> None:
    assert_bfloat16_is_as_close(model_type)


@pytest.mark.every_type
@every_type
def test_ten_tokens_of_every_type(model_type: str) -> None:
    assert_generates_the_same(model_type)


def test_a_wrong_variant_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a form's entry wrong, the check would say so."""
    stock_norm, stock_rope = norm.rms_norm, rotary.rope
    wrong: dict[str, Any] = {
        "another epsilon": (norm, "rms_norm", lambda x, w, eps, casting: stock_norm(x, w, 0.1, casting=casting)),
        "another norm": (norm, "rms_norm", lambda x, w, eps, casting: stock_norm(x, w, eps, casting="gemma")),
        "neighbours": (rotary, "rope", lambda q, k, c, s, **_: stock_rope(q, k, c, s, interleaved=True)),
        "the other way": (rotary, "rope", lambda q, k, c, s, **_: stock_rope(q, k, c, -s)),
    }
    for what, (module, name, function) in wrong.items():
        with monkeypatch.context() as patch:
            patch.setattr(module, name, function)
            assert not support.check("llama").passed, what
    assert support.check("llama").passed


def test_the_command_tells_and_checks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["support", "longcat_flash"]) == 0
    assert "stock: LongcatFlashExperts.forward has code that is not known" in capsys.readouterr().out
    assert main(["support", "llava"]) == 0
    told = capsys.readouterr().out
    assert "recompute, cuda_graphs, padding_free  stock: LlavaModel.forward does not itself take input_ids" in told
    parts = re.search(r"of other types, by default (.*);", told)
    assert parts
    assert {"clip_vision_model (vision_config)", "llama (text_config)"} == set(parts[1].split(", "))
    assert main(["support", "gemma2", "--check"]) == 0
    told = capsys.readouterr().out
    assert "note:" not in told
    assert "rms_norm                    Gemma2RMSNorm.forward" in told
    assert "fused_linear_cross_entropy  Gemma2ForCausalLM.forward" in told
    assert "gemma2: the same: loss by" in told
    assert main(["support", "gpt9"]) == 2
    assert "'gpt9' is no model type" in capsys.readouterr().err
    assert main(["support", "--check"]) == 2
    assert "needs model types" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers.models.gemma2.modeling_gemma2", None)
        assert main(["support", "gemma2"]) == 1
        assert "gemma2: Transformers' file of it cannot be imported here" in capsys.readouterr().err
    stock = norm.rms_norm
    monkeypatch.setattr(norm, "rms_norm", lambda x, w, eps, casting: stock(x, w, 0.1, casting=casting))
    assert main(["support", "gemma2", "--check"]) == 1
    assert "gemma2: DIFFERS" in capsys.readouterr().out


OWN = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

class OwnMLP(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) ** 2)

class OwnConfig(LlamaConfig):
    model_type = "own_of_a_user"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = OwnMLP(config)
        self.post_init()

AutoConfig.register("own_of_a_user", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
"""


def test_a_type_of_a_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """A subclass that keeps the forward, and an MLP that nobody knows: by the command, and in the report."""
    request.addfinalizer(lambda: sys.modules.pop("own_of_a_user", None))
    (tmp_path / "own_of_a_user.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert main(["support", "own_of_a_user"]) == 2
    assert "--import MODULE" in capsys.readouterr().err
    assert main(["support", "--import", "no_such_module", "own_of_a_user"]) == 2
    assert "no_such_module cannot be imported" in capsys.readouterr().err
    assert main(["support", "--import", "own_of_a_user", "own_of_a_user", "--check"]) == 0
    told = capsys.readouterr().out
    assert "stock: OwnMLP.forward has code that is not known" in told
    assert "LlamaModel" not in told, "of another file"
    assert "own_of_a_user: the same" in told
    assert "rms_norm 1, rope 2, fused_linear_cross_entropy 1, add_rms_norm 4" in told
    bastile.apply()
    small.small_model("own_of_a_user")
    assert "own_of_a_user.OwnMLP.forward has code that is not known" in str(bastile.report().notes)
    bastile.apply(swiglu=False)
    assert bastile.report().notes == ()
    bastile.reset()
    assert bastile.report().notes == ()


def test_forms_of_a_release_beside_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "transformers" / "models" / "new"
    folder.mkdir(parents=True)
    known = inspect.getsource(modeling("llama").LlamaMLP)
    text = f"from torch import nn\n{known}\n{known.replace('LlamaMLP', 'NewMLP').replace('* self.up', '+ self.up')}"
    (folder / "modeling_new.py").write_text(text)
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "forms.py", tmp_path, "--kind", "mlp"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "mlp: 2 pieces of 2 forms; known are 1" in done.stdout
    assert "down(activation(gate(x)) * up(x)): new.LlamaMLP" in done.stdout
    assert "not known: new.NewMLP" in done.stdout


def test_what_a_type_has_places_for() -> None:
    found = support.support("gemma2")
    assert found.places["rms_norm"] == ["Gemma2RMSNorm.forward"]
    assert "Gemma2Attention.forward" not in found.stock.get("qk_norm_rope", {})  # it has no norms of heads
    assert "Gemma2ForCausalLM.forward" in found.places["fused_linear_cross_entropy"]  # whatever its code
    assert set(found.places) < set(OPERATORS)
    assert support.serves("gemma2")
    assert support.serves("gpt2")  # it has an output head
    assert not support.serves("resnet")  # it has no such code
    with pytest.raises(ValueError, match="'gpt9' is no model type of transformers"):
        support.support("gpt9")
