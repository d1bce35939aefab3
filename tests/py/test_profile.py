"""`bastile profile`: every kernel in its group, the figures right, the model left as it was."""

import json
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import bastile
from bastile.profile import record, regions, report, run
from bastile.profile.groups import GROUPS, REGION, group_of, short_name
from command import command, one_thread, save_model
from conftest import tiny_batch, tiny_model

on_one_thread = pytest.fixture(scope="module", autouse=True)(one_thread)
NORM, LOSS, BACKBONE = REGION + "norms", REGION + "loss", REGION + "other"

# Names of kernels, shortened within their template arguments; the first block as recorded on an H200 (PyTorch 2.11).
KERNELS = [
    ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "products"),
    ("nvjet_sm90_tst_176x128_64x5_1x2_h_bz_TNN", "products"),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(cutlass_80_simt_sgemm_12", "products"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1", "attention"),
    ("segment_attention_forward", "attention"),
    ("segment_attention_dkv", "attention"),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*, void", "attention"),
    ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int, unsigned ", "attention"),
    ("void cudnn::fusion::fmha_reduce_head<true>(void const*, void*, unsigned int, unsigned int,", "attention"),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous n", "optimiser"),
    ("rms_norm_dweight", "norms"),
    ("qk_norm_rope_forward", "rotary"),
    ("cross_entropy_clusters", "loss"),
    ("cross_entropy_divisors", "loss"),
    ("moe_glu_forward", "activation"),
    ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "products"),
    ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopB_NTN", "products"),
    (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off",
        "products",
    ),
    ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "products"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(Params)", "products"),
    (
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<>>>",
        "products",
    ),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, float>(cublasSplitKParams)", "products"),
    ("void gemv2T_kernel_val<int, int, __nv_bfloat16, float, 128, 16>(cublasGemvParamsEx)", "products"),
    ("void gemmSN_TN_kernel<float, 128, 16, 2, 4, 10, 11, false>(cublasGemmSmallNParams)", "products"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)", "attention"),
    ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>(Flash_bwd_params)", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1_cga1x1x1", "attention"),
    ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<>::Params)", "attention"),
    ("fmha_cutlassB_bf16_aligned_128x64_k128_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<>)", "attention"),
    (
        "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<>>",
        "optimiser",
    ),
    ("void at::native::vectorized_elementwise_kernel<8, at::native::silu_kernel(TensorIteratorBase&)>", "activation"),
    ("void at::native::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*, float*)", "loss"),
    ("void at::native::cunn_SoftMaxForward<4, float, float, float, LogSoftMaxForwardEpilogue>(float*)", "loss"),
    ("rms_norm_forward", "norms"),
    ("rms_norm_dweight_wide", "norms"),
    ("add_rms_norm_backward", "norms"),
    ("rms_norm_backward_rows", "norms"),
    ("qk_norm_rope_dweight", "rotary"),
    ("rope", "rotary"),
    ("swiglu_backward", "activation"),
    ("cross_entropy_rows", "loss"),
    ("linear_cross_entropy_round", "loss"),
    ("scale", "loss"),
    ("Memset (Device)", "other"),
    ("Memcpy DtoD (Device -> Device)", "other"),
    ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, std::array<char*, 3ul>>", "other"),
    ("aten::mm", "products"),
    ("aten::addmm", "products"),
    ("aten::addmm_", "products"),
    ("_ProjectionsBackward", "products"),
    ("aten::_grouped_mm", "products"),
    ("aten::addcmul_", "other"),
    ("aten::linalg_vector_norm", "other"),
    ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
    ("aten::_log_softmax", "loss"),
    ("aten::silu_backward", "activation"),
    ("aten::_fused_adamw_", "optimiser"),
    ("bastile::rms_norm_backward", "norms"),
    ("bastile::linear_cross_entropy_forward", "loss"),
    ("bastile::rope_forward", "rotary"),
    ("_RopeBackward", "rotary"),
    ("_QKNormRopeBackward", "rotary"),
    ("_AddRMSNormBackward", "norms"),
    ("_SwiGLUBackward", "activation"),
    ("_GatedMLPBackward", "activation"),
    ("_ExpertsBackward", "activation"),
    ("_LinearCrossEntropyBackward", "loss"),
]
#: What has no group by its name alone: sums of any rows, and what belongs to layers that have no group.
_ANY = re.compile(r"column_sums|causal_conv1d_\w+|delta_\w+|dequantize_\w+|dropout")
MULTIPLY = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, MulFunctor<float>>>"


@pytest.mark.parametrize(("name", "group"), KERNELS)
def test_names_that_tell_their_group(name: str, group: str) -> None:
    assert group_of(name) == group


def test_every_kernel_of_ours_tells_its_group() -> None:
    """In a CUDA graph nothing else does."""
    sources = (Path(__file__).resolve().parents[2] / "src").rglob("*.cu")
    names = {name for source in sources for name in re.findall(r"BST_KERNEL\((\w+)", source.read_text())}
    assert len(names) > 50
    assert [name for name in sorted(names) if group_of(name) == "other" and not _ANY.fullmatch(name)] == []
    assert group_of("low_rank_tiles") == group_of("low_rank_backward") == "products"
    assert group_of("low_rank_glu_backward") == "activation"


@pytest.mark.parametrize(
    ("name", "context", "group"),
    [
        (MULTIPLY, ["aten::mul", NORM, BACKBONE, LOSS], "norms"),
        (MULTIPLY, ["aten::mul", "autograd::engine::evaluate_function: MulBackward0", "aten::mul", NORM], "norms"),
        (MULTIPLY, ["aten::add", BACKBONE, LOSS], "other"),
        (MULTIPLY, ["aten::mul_", "Optimizer.step#AdamW.step"], "optimiser"),
        (MULTIPLY, ["aten::mul", "aten::silu_backward", BACKBONE], "activation"),
        ("Memset (Device)", ["bastile::linear_cross_entropy_forward", "_FusedLinearCrossEntropy", LOSS], "loss"),
        ("nvjet_tst_1", ["bastile::linear_cross_entropy_forward", LOSS], "products"),
        ("nvjet_tst_1", ["aten::mm", "aten::linear", REGION + "activation"], "products"),
        ("nvjet_tst_1", ["aten::bmm", "aten::matmul", REGION + "attention", BACKBONE], "attention"),
        ("ampere_sgemm_128x64_tn", ["aten::bmm", "aten::_scaled_dot_product_attention_math", BACKBONE], "attention"),
        ("void at::native::cunn_SoftMaxForward<4, float>", ["aten::softmax", REGION + "attention", LOSS], "attention"),
        ("rms_norm_forward", ["bastile::rms_norm_forward", REGION + "attention"], "norms"),
    ],
)  # fmt: skip
def test_context_tells_the_group_of_what_has_no_name(name: str, context: list[str], group: str) -> None:
    assert group_of(name, context) == group


def test_short_names_can_be_read() -> None:
    assert short_name(MULTIPLY) == "vectorized_elementwise_kernel (MulFunctor)"
    assert short_name("void cutlass::Kernel2<cutlass_80_tensorop>(Params)") == "cutlass::Kernel2"
    of_nowhere = (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::X>(X)"
    )
    assert short_name(of_nowhere) == "multi_tensor_apply_kernel"
    assert short_name("aten::mm") == "aten::mm"
    assert len(short_name("x" * 100)) == 60


def test_each_operator_of_a_step_is_in_its_group() -> None:
    """Stock Transformers on a CPU: operators that only one part of the model uses, forward and backward."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = run._step(model, optimizer, tiny_batch(model)["input_ids"])
    step()
    norm, attention = type(model.model.norm), type(model.model.layers[0].self_attn)
    before = norm.forward, attention.forward
    with regions.marked(model), profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert norm.forward is not before[0]
        step()
    assert (norm.forward, attention.forward) == before
    found = record.summary(profiler.events(), "cpu", 1.0)
    groups: dict[str, set[str]] = {}
    for kernel in found["kernels"]:
        groups.setdefault(kernel["name"], set()).add(kernel["group"])
    for name, group in {
        "aten::pow": "norms",  # of the backward pass too, whose operators no region encloses
        "aten::rsqrt": "norms",
        "aten::neg": "rotary",
        "aten::silu": "activation",
        "aten::silu_backward": "activation",
        "aten::mm": "products",
        "aten::_log_softmax": "loss",
        "aten::_fused_adamw_": "optimiser",
        "aten::embedding_dense_backward": "other",
    }.items():
        assert groups[name] == {group}, name
    assert groups["aten::mul"] == {"norms", "rotary", "activation", "optimiser"}
    assert found["busy"] is None
    assert sum(found["groups"].values()) == pytest.approx(sum(kernel["seconds"] for kernel in found["kernels"]))


def test_marks_do_not_change_which_operators_run() -> None:
    """Fused operators look whether a norm or the rotary function is still what they know."""
    model = tiny_model()
    step = run._step(model, torch.optim.AdamW(model.parameters()), tiny_batch(model)["input_ids"])
    bastile.apply()
    step()
    found = []
    for marks in (nullcontext(), regions.marked(model)):
        with marks, profile(activities=[ProfilerActivity.CPU]) as profiler:
            step()
        ours = ("bastile::", "aten::addmm_")  # the latter adds up the gradients of queries, keys and values
        found.append(Counter(event.name for event in profiler.events() if event.name.startswith(ours)))
    assert found[0] == found[1]
    assert {"bastile::add_rms_norm_forward", "bastile::qk_norm_rope_forward", "aten::addmm_"} <= set(found[0])


def _event(name: str, begin: float, end: float, **more: Any) -> SimpleNamespace:
    plain = {"device_type": DeviceType.CPU, "kernels": [], "cpu_parent": None, "thread": 1, "fwd_thread": 0}
    plain |= {"sequence_nr": -1, "is_user_annotation": False}
    time = SimpleNamespace(start=begin, end=end, elapsed_us=lambda: end - begin)
    return SimpleNamespace(**{"name": name, "time_range": time, **plain, **more})


def test_kernels_of_a_gpu_get_their_launchers_context() -> None:
    """Events as the profiler makes them of a GPU's trace: microseconds."""
    cuda = {"device_type": DeviceType.CUDA}
    region = _event(NORM, 0, 10)
    forward = _event(
        "aten::mul", 1, 2, cpu_parent=region, sequence_nr=7, kernels=[SimpleNamespace(name=MULTIPLY, duration=4.0)]
    )
    engine = _event("autograd::engine::evaluate_function: MulBackward0", 20, 30, thread=2, fwd_thread=1, sequence_nr=7)
    backward = _event(
        "aten::mul", 21, 22, thread=2, cpu_parent=engine, kernels=[SimpleNamespace(name=MULTIPLY, duration=6.0)]
    )
    # Calls of the driver are numbered apart from operators: this one happens to have the first operator's number.
    stranger = _event("cudaDeviceSynchronize", 0, 1, kernels=forward.kernels)
    device = [
        _event(MULTIPLY, 5, 9, **cuda),
        _event(MULTIPLY, 25, 31, **cuda),
        _event("rope", 30, 33, **cuda),  # launched where the profiler saw no operator, before the one before had ended
        _event(NORM, 5, 9, is_user_annotation=True, **cuda),
    ]
    found = record.summary([stranger, region, forward, engine, backward, *device], "cuda", 20e-6)
    assert found["kernels"] == [
        {"name": MULTIPLY, "group": "norms", "calls": 2, "seconds": pytest.approx(10e-6)},
        {"name": "rope", "group": "rotary", "calls": 1, "seconds": pytest.approx(2e-6)},
    ]
    assert found["busy"] == pytest.approx((4 + 8) / 20)
    assert found["groups"]["norms"] == pytest.approx(10e-6)
    assert sum(found["groups"].values()) == pytest.approx(20e-6 * found["busy"])


def test_covered_time_counts_overlaps_once() -> None:
    assert record.covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert record.covered([]) == 0


@pytest.mark.parametrize(
    ("busy", "groups", "told"),
    [
        (0.98, {"products": 70, "attention": 20, "norms": 10}, "products take 70% of GPU time, then attention 20% and"),
        (0.98, {"products": 70}, "bound by arithmetic in products"),
        (0.9, {"norms": 70, "products": 30}, "the host during 10% of the step: bound by memory traffic in norms"),
        (0.6, {"products": 70}, "the GPU waits for the host during 40% of the step: launch-bound"),
        (0.97, {"optimiser": 60, "products": 40}, "fewer trained weights (LoRA) help"),
        (None, {"loss": 60, "products": 40}, "loss takes 60% of CPU time, then products 40%"),
    ],
)  # fmt: skip
def test_the_sentence_follows_from_the_figures(busy: float | None, groups: dict[str, float], told: str) -> None:
    figures = {"name": "stock", "busy": busy, "groups": {group: groups.get(group, 0.0) for group in GROUPS}}
    assert told in report.sentence({**figures, "kernels": []})


def test_profile_of_a_shape(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    arguments = ["--shape", "tiny", "--layers", 1, "--sequence", 16, "--steps", 2, "--device", "cpu", "--out", tmp_path]
    printed = command("profile", *arguments, "--trace", trace)
    for shown in ("CPU time by group", "The 20 that take longest", "Stock Transformers:", "Bastile:", "optimiser"):
        assert shown in printed
    result = json.loads((tmp_path / "profile.json").read_text())
    stock, ours = result["runs"]
    assert (stock["patched"], stock["name"]) == ([], "stock")
    assert "rms_norm_qwen3" in ours["patched"]
    assert stock["first_loss"] != ours["first_loss"]  # it went on training
    for measured in (stock, ours):
        assert measured["tokens_per_second"] == pytest.approx(16 / measured["seconds_per_step"])
        assert all(measured["groups"][group] > 0 for group in GROUPS)
    names = [{kernel["name"].split("::")[0] for kernel in measured["kernels"]} for measured in (stock, ours)]
    assert ("bastile" in names[0], "bastile" in names[1]) == (False, True)
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    begins = {}
    for event in events:
        if event.get("name") in ("aten::_log_softmax", "bastile::rms_norm_forward"):
            begins.setdefault(event["name"], set()).add(event["pid"])
    assert begins["aten::_log_softmax"].isdisjoint(begins["bastile::rms_norm_forward"])  # one below the other
    assert min(event["ts"] for event in events if event.get("ph") == "X") == 0


def test_results_as_json_stand_alone_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from bastile.cli import main

    arguments = ["--shape", "tiny", "--layers", "1", "--sequence", "8", "--steps", "1", "--device", "cpu", "--json"]
    assert main(["profile", *arguments, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads((tmp_path / "profile.json").read_text())
    assert "CPU time by group" in printed.err


def test_profile_of_a_saved_model_with_one_operator(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "text to cut into tokens")
    arguments = [model, "--sequence", 16, "--steps", 1, "--device", "cpu", "--checkpointing", "--rms-norm"]
    printed = command("profile", *arguments, "--out", tmp_path)
    assert "Loading weights" not in printed, "no bars where nobody watches"
    assert "Warning" not in printed
    result = json.loads((tmp_path / "profile.json").read_text())
    assert result["runs"][1]["patched"] == ["rms_norm_qwen3"]
    assert result["settings"]["layers"] == 2


def test_mistakes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from bastile.cli import main

    tiny = ["--shape", "tiny", "--device", "cpu", "--out", str(tmp_path)]
    for arguments, told in (
        (["--device", "cpu"], "give either --model, or --shape with one of qwen3-8b"),
        ([str(tmp_path), *tiny], "give either --model, or --shape"),
        ([*tiny, "--layers", "3"], "--layers is 3; the model has 2"),
        ([*tiny, "--sequence", "1"], "--sequence must be at least 2"),
        ([*tiny, "--trace", str(tmp_path / "no" / "trace.json")], "there is no folder"),
        ([*tiny, "--trace", str(tmp_path)], "is a folder; give the name of a file"),
    ):
        assert main(["profile", *arguments]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_profile_on_a_gpu(tmp_path: Path) -> None:
    command("profile", "--shape", "tiny", "--sequence", 512, "--out", tmp_path, "--trace", tmp_path / "trace.json")
    stock, ours = json.loads((tmp_path / "profile.json").read_text())["runs"]
    for measured in (stock, ours):
        assert 0 < measured["busy"] <= 1
        assert measured["peak_memory"] > 0
        assert all(measured["groups"][group] > 0 for group in GROUPS)
    own = {kernel["name"]: kernel["group"] for kernel in ours["kernels"]}
    assert own["norm_forward"] == own["norm_backward"] == "norms"
    assert not own.keys() & {REGION + group for group in GROUPS}
    # What a stock norm launches has no name of its own: a handful of kernels, forward and backward, in five norms.
    assert sum(kernel["calls"] for kernel in stock["kernels"] if kernel["group"] == "norms") > 50


def test_patches_are_gone_after_a_profile() -> None:
    model = tiny_model()
    runs, profilers = run.compare(model, 1, 8, 1, {"rms_norm": True, "rope": False}, 0)
    assert bastile.get_patched_ops() == []
    assert [run["name"] for run in runs] == list(profilers) == ["stock", "bastile"]
