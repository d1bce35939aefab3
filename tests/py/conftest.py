"""What the Python tests share: a tiny model of each family with random weights, a batch, and a process left as it was
found."""

import importlib
import os
import platform
import zlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads anything
# Threads that wait for the others sleep: spinning, which OpenMP does by default, they take the processor from another
# worker's test, and a model's test costs four times as much.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Callable, Iterator
from tempfile import gettempdir
from types import ModuleType
from typing import Any

import pytest
import torch

import torchvision_on_cpu  # noqa: F401

# isort: split
import transformers
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import bastile
import found_before
from bastile.graphs.conditions import settings
from bastile.models import adapters, attention, decoder, experts, mlp, norm, rotary
from bastile.models.logits import losses
from bastile.models.logits.tensor import OnDemand
from families import FAMILIES
from found_before import no_garbage_in_sources  # noqa: F401
from oracle import numbers

# The families in which every layer is norm, attention, norm, MLP.
DENSE = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}

EPS = torch.finfo(torch.float32).eps

# What inductor compiled for one vector level crashes when it is loaded at another, and its folder is the user's.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(gettempdir(), f"torchinductor-{os.getuid()}-{torch.backends.cpu.get_cpu_capability()}"),
)
#: For what inductor compiles: on an x86-64 without vectors it makes C++ that has none of what it uses.
inductor = pytest.mark.xfail(
    platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="inductor's C++ needs vectors",
    raises=RuntimeError,  # BackendCompilerFailed is one
    strict=True,
)

found_before.put_in()


@pytest.fixture(autouse=True)
def the_same_numbers_each_time(request: pytest.FixtureRequest) -> None:
    seed = zlib.crc32(request.node.nodeid.encode())
    numbers.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def stock_after_each_test() -> Iterator[None]:
    before = settings()
    bastile.report(reset=True)
    yield
    bastile.reset()
    assert bastile.get_patched_ops() == []
    assert settings() == before, "a test leaves PyTorch's settings as it found them"


def older_than(release: str) -> bool:
    """Whether Transformers is."""
    return Version(transformers.__version__) < Version(release)


def modeling(family: str) -> ModuleType:
    """The family's module in Transformers."""
    return importlib.import_module(FAMILIES[family].module)


def tiny_model(
    family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """Two layers, grouped-query attention, a vocabulary that is no round number."""
    config: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,  # so that no activation is small against epsilon or the rounding of its neighbours
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    config_class, model_class = DENSE[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**config, **changes})).to(dtype)
    with torch.no_grad():  # the weights of norms are not all ones after training
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def tiny_batch(model: PreTrainedModel, rows: int = 2, columns: int = 11, seed: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded rows of unequal length; labels ignore the padding and a few tokens more."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, model.config.get_text_config().vocab_size, (rows, columns), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : min(row, columns - 2)] = 0
    ids = ids.where(mask.bool(), 0)
    labels = ids.where(mask.bool(), -100)
    labels[:, columns // 2] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every gradient, which is then cleared."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def result_or_error(call: Callable[[], Any]) -> Any:
    """What a call returns, or the message with which it fails: for what not every release of Transformers computes."""
    try:
        return call()
    except RuntimeError as error:
        return str(error)


def on_demand(logits: torch.Tensor) -> bool:
    """Whether these are logits that nobody has made yet."""
    return isinstance(logits, OnDemand) and not logits.is_made


def assert_same_up_to_rounding(got: torch.Tensor, want: torch.Tensor, model: PreTrainedModel, what: str) -> None:
    """Two float32 programs for one formula. A value's path through the model, there and back, takes about 40 roundings
    a layer, of products summed over at most `longest` terms; errors of a sum of n terms grow as sqrt(n). The scale is
    the largest element, since each element sums terms of that size."""
    config = model.config
    longest = max(config.vocab_size, config.hidden_size, config.intermediate_size)
    roundings = 40 * (config.num_hidden_layers + 1)
    tolerance = EPS * roundings * longest**0.5
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    scale = max(want.abs().max().item(), 1e-30)
    error = (got - want).abs().max().item() / scale
    assert error <= tolerance, f"{what}: differs by {error:.1e} of its largest element, allowed {tolerance:.1e}"


def assert_token_by_token_gives_the_whole(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """The logits of all positions at once, from a cache that grows by one."""
    with torch.no_grad():
        whole = model(ids).logits
        cache, steps = None, []
        for column in range(ids.shape[1]):
            output = model(ids[:, column : column + 1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the calls of each operator that models make. To be asked for before anything is patched."""
    counts: dict[str, int] = {}

    def counted(module: Any, name: str, function: str = "") -> None:
        function = function or name
        operator: Callable[..., Any] = getattr(module, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return operator(*args, **kwargs)

        monkeypatch.setattr(module, function, call)

    counted(norm, "rms_norm")
    counted(rotary, "rope")
    counted(mlp, "swiglu", "gated_mlp")  # by any of its ways
    counted(adapters, "projections")
    counted(attention, "qk_norm_rope")
    counted(decoder, "add_rms_norm")
    counted(experts, "moe_experts")
    counted(experts, "adapted_experts")
    counted(losses, "fused_linear_cross_entropy")
    return counts


def calls_of_a_step(family: str, **without: bool) -> dict[str, int]:
    """How often the forward of a tiny model in training calls each operator, with all of them but `without`.

    Two norms in each of two layers and one at the end; in Qwen3 two more in each attention."""
    row = FAMILIES[family]
    chosen = {operator for operator in row.operators if not without.get(operator)}
    counts = {
        "rms_norm": 1 + 4 * ("add_rms_norm" not in chosen),
        "swiglu": 2,
        "rope": 2 * ("qk_norm_rope" not in chosen),
        "fused_linear_cross_entropy": 1,
        "qk_norm_rope": 2,
        "add_rms_norm": 4,
    }
    if row.q_norm and "qk_norm_rope" not in chosen:
        counts["rms_norm"] += 4
    found = {operator: count for operator, count in counts.items() if operator in chosen and count}
    if ("qk_norm_rope" if row.q_norm else "rope") in chosen:
        found["projections"] = 2  # queries, keys and values of each attention
    return found


def without_dropout(model: Any) -> Any:
    """In training, but for what it would draw."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in [name for name in vars(module) if "dropout" in name and isinstance(vars(module)[name], float)]:
            setattr(module, name, 0.0)
    return model.train()
