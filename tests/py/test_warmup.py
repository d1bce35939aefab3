"""warmup_all_kernels: a training step after it compiles nothing; where it has nothing to do, and what it refuses.

Steps run on a GPU or on the emulated one."""

import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, PreTrainedModel, ResNetConfig

import bastile
from bastile import warmup
from bastile._library import compiling_ahead, kernel_counts
from bastile.models.recording import Call, Like, skip_repeated_layers
from bastile.models.small import small_model
from bastile.sweep.model import quantise
from command import command
from conftest import DENSE, tiny_batch, tiny_model
from families import FAMILIES
from oracle import EMULATED
from test_gpt_oss import tiny_gpt_oss

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() and not EMULATED else torch.device("cpu")
#: Processes that have compiled nothing, but have imported what takes long.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch._dynamo", "peft", "transformers.modeling_utils", "bastile.warmup"])
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
    "norms behind and before": ("gemma3_text", {"dtype": torch.bfloat16}),
    "gate and up in one": ("phi3", {"adapters": ["o_proj"]}),
    "layer norms": ("starcoder2", {}),
    "images too": ("qwen2_vl", {}),
    "checkpoints": ("qwen3", {"checkpointed": True, "adapters": ["gate_proj", "up_proj", "down_proj"]}),
    "a base of 4 bits": (
        "qwen3",
        {"adapters": "all-linear", "four_bits": True, "dtype": torch.bfloat16, "autocast": torch.bfloat16},
    ),
    "log-probabilities": ("qwen3", {"dtype": torch.bfloat16, "log_probs": True}),
    "an optimiser": ("llama", {"dtype": torch.bfloat16, "optimizer": bastile.optim.AdamW}),
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
    checkpointed: bool = False,
    optimizer: Any = None,
    log_probs: bool = False,
    four_bits: bool = False,
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
    if four_bits:
        quantise(model)
    if adapters is not None:
        model = get_peft_model(model, LoraConfig(target_modules=adapters, r=4))
    if checkpointing:
        core.enable_input_require_grads()
    if checkpointed:
        core.gradient_checkpointing_enable()
    given = core.config if by_config else torch.compile(model) if compiled else model
    in_training = torch.autocast(DEVICE.type, autocast) if autocast else nullcontext()
    with in_training:
        types, work = warmup._work(given, dtype if by_config else None, DEVICE, None, optimizer, log_probs)
        done = warmup._warm(types, work, DEVICE)
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
    if log_probs:
        logits, ids = model(batch["input_ids"]).logits, batch["input_ids"]
        torch.log_softmax(logits, -1).gather(-1, ids.unsqueeze(-1)).mean().backward()
        assert bastile.report().ran("fused_linear_cross_entropy") == 4
        look("log-probabilities")
    if optimizer is not None:
        optimizer(model.parameters()).step()
        look("the optimiser's step")
    with in_training, torch.no_grad():
        model.eval().generate(input_ids=batch["input_ids"][:, :3], max_new_tokens=2, do_sample=False)
    look("generation")
    return done.compiled + done.cached, found


@on_a_gpu
@pytest.mark.parametrize("case", CASES)
def test_training_after_it_compiles_nothing(case: str) -> None:
    family, options = CASES[case]
    if options.get("four_bits"):
        pytest.importorskip("bitsandbytes")
    with ProcessPoolExecutor(1, PROCESSES) as process:
        ready, compiled_later = process.submit(steps_that_compile, family, **options).result()
    assert ready > 3
    assert compiled_later == []


# ---- the calls ------------------------------------------------------------------------------------------------------


def titles(given: Any, dtype: torch.dtype | None = None, **options: Any) -> set[str]:
    return {call.title for call in warmup._work(given, dtype, DEVICE, **options)[1]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_and_a_model_that_is_wholly_trained_need_the_same(family: str) -> None:
    """As does a model without memory."""
    model = tiny(family)
    with torch.device("meta"):
        weightless = type(model)(model.config)
    of_config = warmup._work(model.config, torch.float32, DEVICE)
    assert of_config == warmup._work(model, None, DEVICE) == warmup._work(weightless, None, DEVICE)
    assert of_config[0] == [family]


HEAD = {"linear_cross_entropy 32"}
#: Gradients are made in the forward pass, and multiplied in the backward pass. A GPU that needs more than that of the
#: hidden states keeps so few logits instead.
NOW = {"scale 32"}


@pytest.mark.parametrize(
    ("operators", "expected"),
    [
        (["swiglu"], {"swiglu 48"}),
        (["rope", "recompute"], {"rope 16"}),
        (["rms_norm"], {"rms_norm 32", "rms_norm 16"}),
        (["rms_norm", "rope", "qk_norm_rope"], {"rms_norm 32", "qk_norm_rope 16"}),
        (
            ["rms_norm", "add_rms_norm", "fused_linear_cross_entropy"],
            {"rms_norm 32", "rms_norm 16", "add_rms_norm 32", *HEAD},
        ),
        (["fused_linear_cross_entropy"], HEAD),
    ],
)
def test_what_is_patched_is_what_counts(operators: list[str], expected: set[str]) -> None:
    model = tiny("qwen3")
    every = {operator: operator in operators for operator in FAMILIES["qwen3"].operators}
    bastile.apply_to_model(model, **every)
    has_head = expected >= HEAD
    of_all = expected | NOW if has_head and DEVICE.type == "cpu" else expected
    of_adapters = expected | NOW if has_head else expected
    assert titles(model) == titles(torch.compile(model)) == of_all
    assert titles(get_peft_model(model, LoraConfig(target_modules=["q_proj", "gate_proj"]))) == of_adapters
    bastile.reset()
    bastile.apply(**every)
    assert titles(model.config, torch.float32) == of_all


def test_unpatched_models_are_taken_as_apply_would_leave_them() -> None:
    model = tiny("llama", torch.float16)
    unpatched = warmup._work(model, None, DEVICE)[1]
    assert bastile.get_patched_ops(model) == []
    bastile.apply()
    assert unpatched == warmup._work(model, None, DEVICE)[1]
    assert {"rope 16", "swiglu 48", "add_rms_norm 32"} < {call.title for call in unpatched}


def test_recording_leaves_no_trace() -> None:
    """In the model, the report, and the random numbers."""
    model = get_peft_model(tiny("qwen3"), LoraConfig(target_modules=["q_proj"], lora_dropout=0.5))
    bastile.apply()
    before = [(name, t, t.grad, t._version) for name, t in model.state_dict(keep_vars=True).items()]
    drawn, reported = torch.get_rng_state(), told()
    model.eval()
    assert "rms_norm 32" in titles(model, optimizer=bastile.optim.AdamW)
    assert not model.training
    assert [(name, t, t.grad, t._version) for name, t in model.state_dict(keep_vars=True).items()] == before
    assert torch.equal(torch.get_rng_state(), drawn)
    assert told() == reported


def told() -> str:
    """The report, without how much memory others have left."""
    return re.sub(r"of the \d+ GiB", "", str(bastile.report()))


def test_none_is_every_family() -> None:
    types, work = warmup._work(None, None, DEVICE)
    assert sorted(types) == sorted({*FAMILIES, "qwen3_moe", "qwen3_5_text"})
    assert len(work) == len(set(work))
    floats = {a.dtype for call in work for a in call.arguments if isinstance(a, Like) and a.dtype.is_floating_point}
    assert floats == {torch.bfloat16, torch.float32}  # float32: what sums are kept in


def test_layers_that_are_alike_run_as_often_as_they_differ() -> None:
    """Layer 4 has an adapter, so layer 5 wants gradients that layer 1 does not; layer 6 wants what layer 5 does."""
    model = get_peft_model(
        tiny("llama", num_hidden_layers=9), LoraConfig(target_modules=r".*layers\.4\..*up_proj", r=4)
    )
    skip_repeated_layers(model)
    skipped = [i for i, layer in enumerate(model.get_base_model().model.layers) if "forward" in vars(layer)]
    assert skipped == [2, 3, 6, 7, 8]


def test_few_layers_and_many_need_the_same() -> None:
    """Of two kinds."""
    kinds = ["sliding_attention", "full_attention"]
    few, many = (
        warmup._work(tiny("gpt_oss", num_hidden_layers=2 * n, layer_types=kinds * n), None, DEVICE)[1] for n in (1, 4)
    )
    assert set(few) == set(many)


def test_products_of_experts() -> None:
    """A kernel of ours multiplies by experts' matrices where its tiles have columns enough, and by adapters on them
    always."""

    def on_a_gpu_that_need_not_be_there(model: Any) -> set[str]:
        return {call.title for call in warmup._work(model, torch.bfloat16, torch.device("cuda", 0))[1]}

    wide = small_model("qwen3_moe", hidden_size=256, moe_intermediate_size=128)
    assert {"moe_linear 256", "moe_linear 128"} <= on_a_gpu_that_need_not_be_there(wide)
    small = small_model("qwen3_moe").to(torch.bfloat16)
    assert not {title for title in on_a_gpu_that_need_not_be_there(small) if title.startswith("moe_linear")}
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = get_peft_model(small, LoraConfig(target_modules=[], target_parameters=experts))
    bastile.apply()
    assert {"moe_linear 32", "moe_linear 16", "moe_transpose 32"} <= on_a_gpu_that_need_not_be_there(adapted)


def test_a_model_that_asks_for_values_gets_some() -> None:
    """Experts in a loop over those that have tokens."""
    assert {"rms_norm 32", "swiglu 48", "linear_cross_entropy 32"} <= titles(small_model("longcat_flash"))


def test_a_shard_is_as_large_as_the_whole() -> None:
    """As DeepSpeed's third stage leaves a model: parameters of no elements that say what they stand for."""
    model = tiny("llama")
    whole = warmup._work(model, None, DEVICE)
    for parameter in model.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0, device=DEVICE)
    assert warmup._work(model, None, DEVICE) == whole


def test_the_optimiser_that_is_asked_for() -> None:
    model = tiny("llama")
    assert titles(model, optimizer=bastile.optim.AdamW) == titles(model) | {"optim_adamw"}
    clipping = partial(bastile.optim.AdamW, max_grad_norm=1.0, master_weights=True)
    assert titles(model, optimizer=clipping) == titles(model) | {"optim_adamw", "optim_norm"}


# ---- running them ---------------------------------------------------------------------------------------------------


class Fake:
    """A call that does what it is given to do."""

    def __init__(self, title: str, run: Callable[[], Any]) -> None:
        self.title = title
        self.run = run


def test_calls_run_at_the_same_time() -> None:
    """Each waits for the other two, which two threads cannot."""

    def run(threads: int, timeout: float) -> dict[str, float]:
        barrier = threading.Barrier(3)
        work: Any = [Fake(title, lambda: barrier.wait(timeout)) for title in "abc"]
        return warmup._run(work, nullcontext, False, threads)

    assert list(run(threads=3, timeout=60)) == ["a", "b", "c"]
    with pytest.raises(RuntimeError):
        run(threads=2, timeout=0.5)


def test_seconds_are_those_of_each_operator() -> None:
    def slow() -> None:
        time.sleep(0.05)

    work: Any = [Fake("slow", slow), Fake("slow", slow), Fake("quick", str)]
    seconds = warmup._run(work, nullcontext, False, 2)
    assert seconds["slow"] >= 0.1 > seconds["quick"]


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Like:
    return Like.of(torch.empty(shape, dtype=dtype, device="meta"))


def test_a_failure_is_told_after_the_others_have_ended() -> None:
    """By a real operator: a weight of another length."""
    ended: list[str] = []

    def end() -> None:
        time.sleep(0.1)
        ended.append("end")

    bad = Call("rms_norm_forward", (rows(2, 8), rows(7), 1e-6, 0))
    worse = Call("swiglu_forward", (rows(2, 8), rows(2, 8, dtype=torch.bfloat16)))
    work: Any = [bad, worse, *(Fake("good", end) for _ in range(3))]
    with pytest.raises(
        RuntimeError, match=r"warmup_all_kernels: (.|\n)*rms_norm 8: bastile: norm_forward: weight"
    ) as raised:
        warmup._run(work, nullcontext, False, 2)
    assert "swiglu 8: bastile: glu_forward: b" in str(raised.value)
    assert ended == ["end"] * 3


def test_tensors_are_made_as_they_were() -> None:
    whole = torch.empty(4, 6, 8, dtype=torch.bfloat16)
    for t in (
        whole,
        whole[1:, ::2, 3:],
        whole.transpose(0, 2),
        whole[:, :0],
        whole[0, 0, 5],
        whole[:1].expand(4, 6, 8),
    ):
        made = Like.of(t).make()
        assert (made.shape, made.stride(), made.dtype) == (t.shape, t.stride(), t.dtype)
        assert made.storage_offset() == t.storage_offset() or not t.numel()


# ---- the function ---------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so() -> None:
    """On a GPU, it compiles."""
    model = tiny("qwen3", torch.bfloat16)
    done = bastile.warmup_all_kernels(model)
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        assert done.device == str(device)
        assert done.seconds.keys() == {call.title for call in warmup._work(model, None, device)[1]}
        assert done.total_seconds > 0
        assert "of qwen3" in str(done)
    else:
        assert (done.device, done.seconds, done.total_seconds) == (None, {}, 0)
        assert (
            str(done) == "Nothing was compiled: there is no CUDA device; CPU kernels are compiled when Bastile is built"
        )


def kernels_for(chip: str, cache: str) -> tuple[str | None, int, int]:
    """Device, kernels compiled and kernels found, in a process whose cache is this folder."""
    os.environ["BASTILE_CACHE"] = cache
    model = tiny("qwen3", torch.bfloat16)
    bastile.apply_to_model(model, **{operator: operator == "swiglu" for operator in FAMILIES["qwen3"].operators})
    done = bastile.warmup_all_kernels(model, chip=chip, progress=False)
    assert done.seconds["swiglu 48"] > 0
    return done.device, done.compiled, done.cached


@pytest.mark.skipif(EMULATED, reason="the emulator compiles for no chip")
@pytest.mark.skipif(find_spec("nvidia") is None, reason="needs NVRTC")
def test_a_chip_that_is_not_there(tmp_path: Path) -> None:
    """Its kernels are in the cache afterwards, where a second process finds them, and another chip none."""
    found = []
    for chip in ("sm_90", "sm_90", "sm_80"):
        with ProcessPoolExecutor(1, PROCESSES) as process:
            found.append(process.submit(kernels_for, chip, str(tmp_path / "cache")).result())
    (_, count, none), *_ = found
    assert none == 0 < count
    assert found[1] == ("sm_90", 0, count)
    assert found[2][0] == "sm_80"
    assert found[2][1] > 0 == found[2][2]


def test_its_sentence() -> None:
    def said(compiled: int, cached: int) -> str:
        return str(warmup.Warmup("cuda:0", {}, "", 2.94, compiled, cached, ("qwen3",)))

    assert said(31, 0) == "31 kernels of qwen3 compiled in 2.9 s"
    assert said(1, 2) == "1 kernel of qwen3 compiled and 2 read from the cache in 2.9 s"
    assert said(0, 0) == "Nothing was compiled: this process has all kernels of qwen3 already"


def test_what_it_refuses() -> None:
    with pytest.raises(
        ValueError, match="ResNetConfig is no supported model or config: a causal language model is needed"
    ):
        warmup._work(ResNetConfig(), None, DEVICE)
    with pytest.raises(ValueError, match="Linear is no supported model or config"):
        warmup._work(torch.nn.Linear(2, 2), None, DEVICE)
    with pytest.raises(ValueError, match=r"dtype is torch.float64; kernels serve torch.float32"):
        warmup._work(LlamaConfig(), torch.float64, DEVICE)
    with pytest.raises(ValueError, match="threads is 0; 1 or more is needed"):
        bastile.warmup_all_kernels(LlamaConfig(), threads=0)
    with pytest.raises(ValueError, match="chip is 'sm_70'; one of sm_80, sm_86, sm_89, sm_90, sm_100, sm_120 is"):
        bastile.warmup_all_kernels(LlamaConfig(), chip="sm_70")
    with pytest.raises(
        RuntimeError, match=r"a step of Pix2Struct.* cannot run without values: ValueError: You have to"
    ):
        warmup._work(small_model("pix2struct"), None, DEVICE)
    with pytest.raises(RuntimeError, match="a step of BlipForConditionalGeneration cannot run without values: Type"):
        warmup._work(small_model("blip"), None, DEVICE)


@pytest.mark.skipif(not EMULATED, reason="needs a build with the emulated GPU")
def test_other_threads_run_while_a_kernel_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that waits for this thread to tell it to begin."""
    compiler, begun, go = tmp_path / "compiler", tmp_path / "begun", tmp_path / "go"
    waiting = f'touch {begun}; for i in $(seq 600); do test -e {go} && exec g++ "$@"; sleep 0.1; done; exit 1'
    compiler.write_text(f"#!/bin/sh\n{waiting}\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("BASTILE_EMU_CXX", str(compiler))
    call = Call("swiglu_forward", (rows(2, 8), rows(2, 8)))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(warmup._run, [call], partial(compiling_ahead, 0), False, 1)
        while not begun.exists() and not running.done():
            time.sleep(0.01)
        go.touch()
        assert running.result()["swiglu 8"] > 0


@pytest.mark.skipif(not EMULATED, reason="needs a build with the emulated GPU")
def test_other_threads_compute_while_one_compiles_ahead() -> None:
    x, y = torch.randn(2, 4, 8)
    want = torch.nn.functional.silu(x) * y
    with compiling_ahead(0), ThreadPoolExecutor(1) as pool:
        torch.testing.assert_close(pool.submit(torch.ops.bastile.swiglu_forward, x, y).result(), want)
    torch.testing.assert_close(torch.ops.bastile.swiglu_forward(x, y), want)


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


@pytest.mark.skipif(find_spec("nvidia") is None, reason="needs NVRTC")
def test_the_command_compiles_for_a_chip_that_is_not_there() -> None:
    """Of a model with adapters on a base of four bits."""
    options = ["--shape", "tiny", "--chip", "sm_89", "--lora", "4", "--batch", "2", "--sequence", "32"]
    printed = command("warmup", *options, *(["--load-in-4bit"] if find_spec("bitsandbytes") else []))
    assert "of qwen3" in printed
    assert ("dequantize_4bit_group" in printed) == (find_spec("bitsandbytes") is not None)


def test_mistakes_in_the_command_are_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from bastile.cli import main

    ResNetConfig().save_pretrained(tmp_path / "other")
    for arguments, told in (
        (["--shape", "tiny", "--model", str(tmp_path)], "give either --model or --shape, not both"),
        (["--model", str(tmp_path)], "no config and tokenizer found there"),
        (["--shape", "tiny", "--batch", "2"], "--batch and --sequence go together"),
        (["--lora", "2"], "--lora needs --model or --shape"),
        (["--shape", "tiny", "--load-in-4bit"], "--load-in-4bit goes with --lora"),
        (["--shape", "tiny", "--chip", "sm_7"], "chip is 'sm_7'; one of sm_80"),
        (["--model", str(tmp_path / "other")], "is of the type resnet, in which bastile knows no code"),
    ):
        assert main(["warmup", *arguments]) == 2
        assert told in capsys.readouterr().err
    LlamaConfig(hidden_size=64, num_attention_heads=4, intermediate_size=96).save_pretrained(tmp_path / "good")
    assert main(["warmup", "--model", str(tmp_path / "good")]) == 0


def test_attention_within_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a batch with padding takes, on the chip that has kernels of it, of widths and types that they serve."""
    warmed: list[list[str]] = []
    windows: list[int] = []

    def warm(_types: Any, work: Any, *_rest: Any) -> None:
        warmed.append([call.operator for call in work])
        of_segments = [call.arguments for call in work if call.operator == "segment_attention_forward"]
        windows.extend(given[-1] for given in of_segments)
        assert all(given[-1] < given[0].shape[0] for given in of_segments)  # else there is none

    monkeypatch.setattr(warmup, "_warm", warm)
    heads = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    wide, narrow = [tiny("qwen3", torch.bfloat16, **heads, head_dim=width) for width in (64, 32)]
    in_windows = tiny("qwen3", torch.bfloat16, **heads, head_dim=64)
    in_windows.config.sliding_window = 512
    for given, dtype, chip in (
        (wide, None, "sm_90"),
        (wide, None, "sm_80"),
        (wide, torch.float32, "sm_90"),
        (wide.config, None, "sm_90"),
        (narrow, None, "sm_90"),
        (in_windows, None, "sm_90"),
    ):
        bastile.warmup_all_kernels(given, dtype, chip=chip, progress=False)
    found = [[name for name in each if name.startswith("segment_attention")] for each in warmed]
    both = ["segment_attention_forward", "segment_attention_backward"]
    assert found == [both, [], [], both, [], both * 2]
    assert windows == [0, 0, 0, 1]
    assert all(len(each) > 5 for each in warmed)
