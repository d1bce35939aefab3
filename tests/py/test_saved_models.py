"""What `bastile support` says of the very model that a folder holds, and its check of it, from the config alone."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, dynamic_module_utils

import bastile
from bastile.cli import main
from bastile.models import norm, saved, small, support

#: As the hub has them, of models that differ from their types' defaults.
LLAMA_3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
PHI_3_LONG = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [1.2] * 48},
    "pad_token_id": 32000,
    "vocab_size": 32064,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
}
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "kv_lora_rank": 512,
    "q_lora_rank": None,  # queries come from one projection
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
}
GRANITE_4_DENSE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "shared_intermediate_size": 8192,
    "num_hidden_layers": 40,
    "layer_types": ["attention"] * 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 0,  # no experts, in a type that has them
    "num_experts_per_tok": 0,
    "position_embedding_type": "rope",
    "vocab_size": 100352,
}
QWEN_2_5_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
}
DENSE = {"rms_norm": 1, "swiglu": 2, "rope": 2, "fused_linear_cross_entropy": 1, "add_rms_norm": 4}


def folder(path: Path, config: dict[str, Any]) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "ran"),
    [
        (LLAMA_3, DENSE),
        (PHI_3_LONG, DENSE),
        (DEEPSEEK_V2_LITE, {**DENSE, "rms_norm": 3, "moe_experts": 1}),  # a norm of keys and values, none of queries
        (GRANITE_4_DENSE, DENSE),
        (QWEN_2_5_VL, None),  # as its type: its rotary function has a known form in later releases alone
    ],
    ids=["llama", "phi3", "deepseek_v2", "granitemoehybrid", "qwen2_5_vl"],
)
def test_a_model_keeps_what_it_has(config: dict[str, Any], ran: dict[str, int] | None, tmp_path: Path) -> None:
    """And is small: what it has not is not added, and the sizes that must fit each other do."""
    found = saved.read(folder(tmp_path, config))
    told = support.support_of(found.without_weights())
    done = support.check_model(found.built_small())
    assert done.passed, done
    ran = support.check(config["model_type"]).ran if ran is None else ran
    assert done.ran == ran
    assert set(ran) <= told.places.keys()
    assert ("moe_experts" in told.places) == ("moe_experts" in ran)


@pytest.mark.parametrize("model_type", ["qwen3_next", "gemma3_text", "falcon_h1", "gpt2", "bart", "llava"])
def test_the_default_of_a_type_runs_what_the_type_runs(model_type: str, tmp_path: Path) -> None:
    if model_type not in small.causal_types() + small.vision_types():
        pytest.skip(f"Transformers {transformers.__version__} has no {model_type}")
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    done = support.check_model(saved.read(str(tmp_path)).built_small())
    assert done.passed, done
    assert done.ran.keys() == support.check(model_type).ran.keys()


def test_the_command_with_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of that model alone: this Qwen3-MoE has experts in each layer, so no gated MLP is called."""
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=3, quantization_config={"quant_method": "fp8"})
    config.architectures = ["Qwen3MoeForCausalLM"]
    name = folder(tmp_path / "llama", config.to_dict())
    assert main(["support", name, "--check"]) == 0
    told = capsys.readouterr().out
    assert f"{name} (Qwen3MoeForCausalLM, qwen3_moe):" in told
    assert "moe_experts                 Qwen3MoeExperts.forward" in told
    assert "Qwen3MoeMLP" not in told
    assert "note: its weights are quantised" in told
    assert f"{name}: the same: loss by" in told
    assert "moe_experts 2" in told
    assert main(["support", f"{name}/config.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[f"{name}/config.json"]["places"]["rms_norm"] == [
        "Qwen3MoeRMSNorm.forward"
    ]


def test_a_types_name_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder(tmp_path / "llama", PHI_3_LONG)
    folder(tmp_path / "mine", PHI_3_LONG)
    monkeypatch.chdir(tmp_path)
    assert main(["support", "llama", "mine", "./llama"]) == 0
    told = capsys.readouterr().out
    assert "llama:" in told
    assert "mine (Phi3ForCausalLM, phi3):" in told
    assert "./llama (Phi3ForCausalLM, phi3):" in told


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "has no config.json; give a folder"),
        ("{", "is no JSON"),
        ("[]", "holds no config"),
        ({"model_type": "gpt9"}, r"cannot read \(ValueError: .*gpt9.*--import MODULE"),
        (
            {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own"}},
            r"whose code is its own \(own.Own\) and would run here: read it, and give --trust-remote-code",
        ),
    ],
)
def test_what_a_folder_lacks_is_said(
    config: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    assert main(["support", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    with pytest.raises(ValueError, match=said):
        saved.read(str(tmp_path))
    assert str(tmp_path) in error


def test_other_mistakes_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["support", str(tmp_path / "no")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a/base"}))
    assert main(["support", str(tmp_path)]) == 2
    assert "PEFT's adapters of a/base: that model's folder is needed" in capsys.readouterr().err
    name = folder(tmp_path, {"model_type": "bert", "architectures": ["BertForSequenceClassification"]})
    assert main(["support", name]) == 0
    assert "layer_norm                  LayerNorm.forward" in capsys.readouterr().out
    assert main(["support", name, "--check"]) == 1
    assert "a BertForSequenceClassification is no language model" in capsys.readouterr().err


OWN = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class OwnConfig(PretrainedConfig):
    model_type = "own_remote"

    def __init__(self, hidden_size=1024, intermediate_size=4096, num_layers=24, vocab_size=50000, **more):
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_layers, self.vocab_size = num_layers, vocab_size
        super().__init__(**more)


class OwnMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = nn.SiLU()

    def forward(self, hidden):
        return self.w2(self.act(self.w1(hidden)) * self.w3(hidden))


class OwnBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm, self.mlp = LlamaRMSNorm(config.hidden_size), OwnMLP(config)

    def forward(self, hidden):
        return hidden + torch.tanh(self.mlp(self.norm(hidden)))


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([OwnBlock(config) for _ in range(config.num_layers)])
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, labels=None):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits, loss = self.lm_head(hidden), None
        if labels is not None:
            rows = logits[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(rows, labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder with code of its own, of which Transformers keeps its copy here."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = folder(
        tmp_path / "own",
        {
            "model_type": "own_remote",
            "architectures": ["OwnForCausalLM"],
            "num_layers": 12,
            "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
        },
    )
    (Path(name) / "modeling_own.py").write_text(OWN)
    yield name
    for module in [module for module in sys.modules if module.startswith("transformers_modules")]:
        del sys.modules[module]


def test_code_of_a_folders_own(
    own_code: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known by its forms as Transformers' code is: the MLP with names of its own, a norm from elsewhere, the head."""
    assert main(["support", own_code]) == 2
    assert "modeling_own.OwnForCausalLM) and would run here: read it" in capsys.readouterr().err
    assert not [name for name in sys.modules if name.startswith("transformers_modules")]  # nothing of it ran
    assert main(["support", own_code, "--trust-remote-code", "--check"]) == 0
    told = capsys.readouterr().out
    assert "(OwnForCausalLM, own_remote):" in told
    assert "swiglu                      OwnMLP.forward" in told
    assert "rms_norm                    LlamaRMSNorm.forward" in told
    assert "fused_linear_cross_entropy  OwnForCausalLM.forward" in told
    assert "LlamaAttention" not in told
    assert "LlamaMLP" not in told
    assert "ran: rms_norm 2, swiglu 2, fused_linear_cross_entropy 1" in told
    assert bastile.get_patched_ops() == []
    stock = norm.rms_norm
    monkeypatch.setattr(norm, "rms_norm", lambda x, w, eps, casting: stock(x, w, 0.1, casting=casting))
    assert main(["support", own_code, "--trust-remote-code", "--check"]) == 1
    assert f"{own_code}: DIFFERS" in capsys.readouterr().out


def test_numbers_of_other_names_are_not_built_large(own_code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(small.SIZES, "num_layers", 2)
    monkeypatch.delitem(small.SIZES, "intermediate_size")
    monkeypatch.setattr(saved, "_MOST_PARAMETERS", 100_000)
    found = saved.read(own_code, trust_remote_code=True)
    assert all(p.device == torch.device("meta") for p in found.without_weights().parameters())
    with pytest.raises(ValueError, match="it has still 792704 parameters; copy its folder without the weights"):
        found.built_small()
