"""warmup_all_kernels: what it has compiled, a training step does not compile again; where it has nothing to do, and what
it refuses. Steps run on a GPU or on the emulated one."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, LlamaConfig, PreTrainedModel

import bastile
from bastile import warmup
from bastile._library import kernel_counts
from bastile.models.kernels import Call, Types, Zeros, calls
from bastile.models.table import FAMILIES
from conftest import DENSE, tiny_batch, tiny_model
from oracle import EMULATED
from test_gpt_oss import tiny_gpt_oss

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() and not EMULATED else torch.device("cpu")
on_a_gpu = pytest.mark.skipif(
    not EMULATED and DEVICE.type == "cpu", reason="needs a GPU, or a build with the emulated one"
)


def tiny(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = tiny_model(family, dtype=dtype) if family in DENSE else tiny_gpt_oss(dtype=dtype)
    return model.to(DEVICE)


# ---- a step after it compiles nothing -------------------------------------------------------------------------------

FULL = {
    f"{family} {dtype}": (family, {"dtype": dtype})
    for family in FAMILIES
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
#: family, and what `steps_that_compile` takes beside.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **FULL,
    # Layer 0 of a model with adapters wants fewer gradients than layer 1; frozen weights want none.
    "adapters": ("qwen3", {"adapters": ["q_proj", "v_proj"]}),
    "adapters of the second layer": ("llama", {"adapters": r".*layers\.1\..*(k_proj|up_proj)"}),
    "adapters beside experts": ("gpt_oss", {"adapters": ["k_proj", "o_proj"]}),
    "adapters, and gradients asked of the embeddings": ("qwen3", {"adapters": ["v_proj"], "checkpointing": True}),
    "float32 weights under autocast": ("qwen3", {"autocast": torch.bfloat16}),
    "experts under autocast": ("gpt_oss", {"autocast": torch.bfloat16}),
    "norms of another type": ("gpt_oss", {"dtype": torch.bfloat16, "norm_type": torch.float32}),
    "heads normed and turned by two operators": ("qwen3", {"without": ["qk_norm_rope", "add_rms_norm"]}),
    "norms alone": ("qwen3", {"without": ["swiglu", "rope", "fused_linear_cross_entropy", "qk_norm_rope"]}),
    "more tokens than logits fit": ("llama", {"dtype": torch.bfloat16, "columns": 600, "logits_memory": 1 / 1024}),
    "the same in float16": ("llama", {"dtype": torch.float16, "columns": 200, "logits_memory": 1 / 1024}),
    "a config alone": ("qwen3", {"dtype": torch.bfloat16, "by_config": True}),
    "a model that is compiled": ("llama", {"compiled": True}),
}


def steps_that_compile(
    family: str,
    dtype: torch.dtype = torch.float32,
    adapters: Any = None,
    checkpointing: bool = False,
    autocast: torch.dtype | None = None,
    norm_type: torch.dtype | None = None,
    without: tuple[str, ...] = (),
    columns: int = 11,
    logits_memory: float | None = None,
    by_config: bool = False,
    compiled: bool = False,
) -> tuple[int, list[str]]:
    """How many kernels the warm-up made ready, and after what, of all that a user does then, there were more. In a
    process of its own, for kernels that another test has made ready would not count."""
    from bastile.ops.fused_linear_cross_entropy import set_logits_memory

    model: Any = tiny(family, dtype)
    set_logits_memory(logits_memory)
    if norm_type is not None:
        for name, module in model.named_modules():
            if "norm" in name:
                module.to(norm_type)
    patched = bastile.apply_to_model(model, **dict.fromkeys(without, False))
    assert len(patched) == len(FAMILIES[family].operators) - len(without)
    core = model
    if adapters is not None:
        model = get_peft_model(model, LoraConfig(target_modules=adapters, r=4))
    if checkpointing:
        core.enable_input_require_grads()
    given = core.config if by_config else torch.compile(model) if compiled else model
    in_training = torch.autocast(DEVICE.type, autocast) if autocast else nullcontext()
    with in_training:
        done = warmup._warm(given, dtype if by_config else None, DEVICE, progress=False, threads=2)
    assert done.compiled + done.cached == sum(kernel_counts())

    found, ready = [], sum(kernel_counts())

    def look(what: str) -> None:
        nonlocal ready
        if sum(kernel_counts()) > ready:
            found.append(f"{what}: {sum(kernel_counts()) - ready}")
        ready = sum(kernel_counts())

    for sequences, least in ((1, 0), (2, 0), (1, 10**6)):
        bastile.set_recompute(least)
        batch = {name: t.to(DEVICE) for name, t in tiny_batch(core, sequences, columns).items()}
        with in_training:
            loss = model(**batch, num_items_in_batch=torch.tensor(7, device=DEVICE)).loss
        look(f"forward, {sequences} sequences")
        loss.backward()
        look(f"backward, {sequences} sequences, recomputation from {least} tokens on")
    with in_training, torch.no_grad():
        model.eval().generate(input_ids=batch["input_ids"][:, :3], max_new_tokens=2, do_sample=False)
    look("generation")
    return done.compiled + done.cached, found


@on_a_gpu
@pytest.mark.parametrize("case", CASES)
def test_training_after_it_compiles_nothing(case: str) -> None:
    family, options = CASES[case]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        ready, compiled_later = process.submit(steps_that_compile, family, **options).result()
    assert ready > 3
    assert compiled_later == []
