"""warmup_all_kernels: a training step after it compiles nothing; where it has nothing to do, and what it refuses.

Steps run on a GPU or on the emulated one."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, LlamaConfig, PreTrainedModel, ResNetConfig

import bastile
from bastile import warmup
from bastile._library import kernel_counts
from bastile.models.anatomy import anatomy
from bastile.models.kernels import Call, Types, Zeros, calls
from bastile.models.small import small_model
from command import command
from conftest import DENSE, tiny_batch, tiny_model
from families import FAMILIES
from oracle import EMULATED
from test_gpt_oss import tiny_gpt_oss

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() and not EMULATED else torch.device("cpu")
on_a_gpu = pytest.mark.skipif(
    not EMULATED and DEVICE.type == "cpu", reason="needs a GPU, or a build with the emulated one"
)


def tiny(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    if family not in FAMILIES:
        model = small_model(family, **changes).to(dtype)
    else:
        model = tiny_model(family, dtype=dtype, **changes) if family in DENSE else tiny_gpt_oss(dtype=dtype, **changes)
    return model.to(DEVICE)


# ---- a step after it compiles nothing -------------------------------------------------------------------------------

FULL = {
    f"{family} {dtype}": (family, {"dtype": dtype}) for family in FAMILIES for dtype in (torch.float32, torch.bfloat16)
}
#: family, and what `steps_that_compile` takes beside.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **FULL,
    # Layer 0 of a model with adapters wants fewer gradients than layer 1; frozen weights want none.
    "adapters": ("qwen3", {"adapters": ["q_proj", "v_proj"]}),
    "an adapter in the second layer": ("llama", {"adapters": r".*layers\.1\..*up_proj"}),
    "the same, and a gradient asked of the embeddings": (
        "llama",
        {"adapters": r".*layers\.1\..*up_proj", "checkpointing": True},
    ),
    "adapters beside experts": ("gpt_oss", {"adapters": ["k_proj", "o_proj"]}),
    "float32 weights under autocast": ("qwen3", {"autocast": torch.bfloat16}),
    "experts under autocast": ("gpt_oss", {"autocast": torch.bfloat16}),
    "norms of another type": ("gpt_oss", {"dtype": torch.bfloat16, "norm_type": torch.float32}),
    "heads normed and turned by two operators": ("qwen3", {"without": ["qk_norm_rope", "add_rms_norm"]}),
    "norms alone": ("qwen3", {"without": ["swiglu", "rope", "fused_linear_cross_entropy", "qk_norm_rope"]}),
    "only norms with additions": (
        "llama",
        {"without": ["rms_norm", "swiglu", "rope", "fused_linear_cross_entropy"]},
    ),
    "more tokens than logits fit": ("llama", {"dtype": torch.bfloat16, "columns": 600, "logits_memory": 1 / 1024}),
    "the same in float16": ("llama", {"dtype": torch.float16, "columns": 200, "logits_memory": 1 / 1024}),
    "an adapter behind the gate": ("llama", {"adapters": ["down_proj"]}),
    "MLPs with biases": ("llama", {"mlp_bias": True}),
    "a config alone": ("qwen3", {"dtype": torch.bfloat16, "by_config": True}),
    "a model that is compiled": ("llama", {"compiled": True}),
    "experts of another unit": ("qwen3_moe", {}),
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
    **changes: Any,
) -> tuple[int, list[str]]:
    """How many kernels the warm-up made ready, and after what, of all that a user does then, there were more. In a
    process of its own, for kernels that another test has made ready would not count."""
    from bastile.ops.fused_linear_cross_entropy import set_logits_memory

    model: Any = tiny(family, dtype, **changes)
    set_logits_memory(logits_memory)
    if norm_type is not None:
        for name, module in model.named_modules():
            if "norm" in name:
                module.to(norm_type)
    patched = bastile.apply_to_model(model)
    taken_out = bastile.reset([f"{operator}_{family}" for operator in without], model=model)
    if family in FAMILIES:
        assert len(patched) - len(taken_out) == len(FAMILIES[family].operators) - len(without)
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


# ---- the calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_and_a_model_that_is_wholly_trained_need_the_same(family: str) -> None:
    model, row = tiny(family), anatomy(family)
    assert row is not None
    types = Types(torch.float32)
    of_config = calls(model.config, row, row.operators, types)
    assert set(of_config) == set(calls(model.config, row, row.operators, types, model))
    for call in of_config:
        call.run(DEVICE)


@pytest.mark.parametrize(
    ("operators", "titles"),
    [
        (["swiglu"], {"swiglu 48"}),
        (["rope", "recompute"], {"rope 16"}),
        (["rms_norm"], {"rms_norm 32", "rms_norm 16"}),
        (["rms_norm", "rope", "qk_norm_rope"], {"rms_norm 32", "qk_norm_rope 16"}),
        (
            ["rms_norm", "add_rms_norm", "fused_linear_cross_entropy"],
            {"rms_norm 32", "rms_norm 16", "add_rms_norm 32", "fused_linear_cross_entropy 101"},
        ),
        (["fused_linear_cross_entropy"], {"fused_linear_cross_entropy 101"}),
    ],
)
def test_what_is_patched_is_what_counts(operators: list[str], titles: set[str]) -> None:
    model = tiny("qwen3")
    every = {operator: operator in operators for operator in FAMILIES["qwen3"].operators}
    bastile.apply_to_model(model, **every)
    for given in (
        model,
        get_peft_model(model, LoraConfig(target_modules=["q_proj", "gate_proj"])),
        torch.compile(model),
    ):
        assert {call.title for call in warmup._work(given, None, DEVICE)[1]} == titles
    bastile.reset()
    bastile.apply(**every)
    assert {call.title for call in warmup._work(model.config, None, DEVICE)[1]} == titles


def test_unpatched_models_are_taken_as_apply_would_leave_them() -> None:
    model = tiny("llama", torch.float16)
    unpatched = warmup._work(model, None, DEVICE)[1]
    bastile.apply()
    assert unpatched == warmup._work(model, None, DEVICE)[1]
    assert {"rope 16", "swiglu 48", "add_rms_norm 32"} < {call.title for call in unpatched}


def test_none_is_every_family() -> None:
    families, work = warmup._work(None, None, DEVICE)
    assert sorted(family.model_type for family in families) == sorted(FAMILIES)
    assert len(work) == len(set(work))
    types = {a.dtype for call in work for a in call.arguments if isinstance(a, Zeros) and a.dtype.is_floating_point}
    assert types == {torch.bfloat16, torch.float32}  # float32: what sums are kept in
    widths = {call.title for call in work}
    for model_type in FAMILIES:
        assert any(title.startswith("fused_linear_cross_entropy") for title in widths), model_type


# ---- running them ---------------------------------------------------------------------------------------------------


class Fake:
    """A call that does what it is given to do."""

    def __init__(self, title: str, run: Callable[[torch.device], Any]) -> None:
        self.title = title
        self.run = run


def test_calls_run_at_the_same_time() -> None:
    """Each waits for the other two, which two threads cannot."""

    def run(threads: int, timeout: float) -> dict[str, float]:
        barrier = threading.Barrier(3)
        work: Any = [Fake(title, lambda _: barrier.wait(timeout)) for title in "abc"]
        return warmup._run(work, DEVICE, False, threads)

    assert list(run(threads=3, timeout=60)) == ["a", "b", "c"]
    with pytest.raises(RuntimeError):
        run(threads=2, timeout=0.5)


def test_seconds_are_those_of_each_operator() -> None:
    work: Any = [Fake("slow", lambda _: time.sleep(0.05)), Fake("slow", lambda _: time.sleep(0.05)), Fake("quick", id)]
    seconds = warmup._run(work, DEVICE, False, 2)
    assert seconds["slow"] >= 0.1 > seconds["quick"]


def test_a_failure_is_told_after_the_others_have_ended() -> None:
    """By a real operator: a weight of another length."""
    ended: list[str] = []

    def end(_: torch.device) -> None:
        time.sleep(0.1)
        ended.append("end")

    x, weight = Zeros((2, 8), torch.float32), Zeros((7,), torch.float32)
    bad = Call("rms_norm_forward", (x, weight, 1e-6, 0), "rms_norm 8")
    worse = Call("swiglu_forward", (x, Zeros((2, 8), torch.bfloat16)), "swiglu 8")
    work: Any = [bad, worse, *(Fake("good", end) for _ in range(3))]
    with pytest.raises(
        RuntimeError, match=r"warmup_all_kernels: (.|\n)*rms_norm 8: bastile: norm_forward: weight"
    ) as raised:
        warmup._run(work, DEVICE, False, 2)
    assert "swiglu 8: bastile: glu_forward: b" in str(raised.value)
    assert ended == ["end"] * 3


# ---- the function ---------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so() -> None:
    """On a GPU, it compiles."""
    model = tiny("qwen3", torch.bfloat16)
    done = bastile.warmup_all_kernels(model)
    if torch.cuda.is_available():
        assert done.device == f"cuda:{torch.cuda.current_device()}"
        assert done.seconds.keys() == {call.title for call in warmup._work(model, None, DEVICE)[1]}
        assert done.total_seconds > 0
        assert "of qwen3" in str(done)
    else:
        assert (done.device, done.seconds, done.total_seconds) == (None, {}, 0)
        assert (
            str(done) == "Nothing was compiled: there is no CUDA device; CPU kernels are compiled when Bastile is built"
        )


def test_its_sentence() -> None:
    def said(compiled: int, cached: int) -> str:
        return str(warmup.Warmup("cuda:0", {}, "", 2.94, compiled, cached, ("qwen3",)))

    assert said(31, 0) == "31 kernels of qwen3 compiled in 2.9 s"
    assert said(1, 2) == "1 kernel of qwen3 compiled and 2 read from the cache in 2.9 s"
    assert said(0, 0) == "Nothing was compiled: this process has all kernels of qwen3 already"


def test_what_it_refuses() -> None:
    with pytest.raises(
        ValueError, match="GPT2Config is no supported model or config: a causal language model is needed"
    ):
        warmup._work(GPT2Config(), None, DEVICE)
    with pytest.raises(ValueError, match=r"dtype is torch.float64; kernels serve torch.float32"):
        warmup._work(LlamaConfig(), torch.float64, DEVICE)
    with pytest.raises(ValueError, match="threads is 0; 1 or more is needed"):
        bastile.warmup_all_kernels(LlamaConfig(), threads=0)


@pytest.mark.skipif(not EMULATED, reason="needs a build with the emulated GPU")
def test_other_threads_run_while_a_kernel_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that waits for this thread to tell it to begin."""
    compiler, begun, go = tmp_path / "compiler", tmp_path / "begun", tmp_path / "go"
    waiting = f'touch {begun}; for i in $(seq 600); do test -e {go} && exec g++ "$@"; sleep 0.1; done; exit 1'
    compiler.write_text(f"#!/bin/sh\n{waiting}\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("BASTILE_EMU_CXX", str(compiler))
    rows = Zeros((2, 8), torch.float32)
    call = Call("swiglu_forward", (rows, rows), "swiglu 8")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(warmup._run, [call], DEVICE, False, 1)
        while not begun.exists() and not running.done():
            time.sleep(0.01)
        go.touch()
        assert running.result()["swiglu 8"] > 0


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_compiles_or_says_why_not() -> None:
    for arguments in (["--shape", "tiny"], ["--shape", "tiny", "--dtype", "float32", "--threads", "2"]):
        printed = command("warmup", *arguments)
        if torch.cuda.is_available():
            assert "of qwen3" in printed
            assert "swiglu 128" in printed
        else:
            assert (
                printed
                == "Nothing was compiled: there is no CUDA device; CPU kernels are compiled when Bastile is built\n"
            )


def test_mistakes_in_the_command_are_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from bastile.cli import main

    ResNetConfig().save_pretrained(tmp_path / "other")
    for arguments, told in (
        (["--shape", "tiny", "--model", str(tmp_path)], "give either --model or --shape, not both"),
        (["--model", str(tmp_path)], "no config and tokenizer found there"),
        (["--model", str(tmp_path / "other")], "is of the type resnet, in which bastile knows no code"),
    ):
        assert main(["warmup", *arguments]) == 2
        assert told in capsys.readouterr().err
    LlamaConfig(hidden_size=64, num_attention_heads=4, intermediate_size=96).save_pretrained(tmp_path / "good")
    assert main(["warmup", "--model", str(tmp_path / "good")]) == 0
