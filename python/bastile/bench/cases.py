"""What is measured: one row per operator and shape, with what Bastile has to reach there.

Shapes, by operator:
    rms_norm, add_rms_norm       (rows, columns)
    gated_rms_norm               (rows, columns), the gate behind the norm; gate_first_rms_norm: before it
    swiglu                       (rows, columns)
    gated_mlp                    (tokens, hidden size, size between the products)
    rope, qk_norm_rope           (tokens, query heads, key heads, head size), batch 1
    causal_conv1d                (tokens, channels), batch 1, windows of four tokens, with SiLU
    gated_delta_rule             (sequences, tokens, heads of keys, heads of values, size of keys, size of values)
    cross_entropy                (rows, vocabulary)
    fused_linear_cross_entropy   (rows, hidden size, vocabulary)
    linear_logprobs              (rows, hidden size, vocabulary): log-probabilities alone
    linear_divergence            (rows, hidden size of both, vocabulary): a sum of forward divergences
    moe_experts, swiglu_experts  (tokens, hidden size, size between the products, experts, experts of a token)
    adamw, grad_norm             (tensors, elements of each)
    dropout                      (rows, columns), with p = 0.05
    low_rank                     (rows, columns, rank)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Need:
    """What Bastile must reach in a case; whatever is left out is not asked for. All times are ratios within one run."""

    limit: float | None = None  #: time, as a multiple of the case's limit (see operators.Cost)
    peers: Mapping[str, float] = field(default_factory=dict)  #: time, as a multiple of each of these contenders'
    all_labels: float | None = None  #: time, as a multiple of Bastile's in the same case with no label ignored
    mib: float | None = None  #: extra memory
    memory_of: tuple[str, float] | None = None  #: extra memory, as a multiple of this contender's


@dataclass(frozen=True)
class Case:
    op: str
    shape: tuple[int, ...]
    backward: bool = True
    ignored: float = 0.0  #: the share of labels that are ignore_index
    host: bool = False  #: measure the host's time per call, not the device's
    #: By type: figures for bfloat16 do not hold for other types.
    needs: Mapping[str, Need] = field(default_factory=dict)

    @property
    def name(self) -> str:
        size = "x".join(map(str, self.shape))
        part = "forward+backward" if self.backward else "forward"
        return f"{self.op} {size} {part}" + (f", {self.ignored:.0%} ignored" if self.ignored else "")


def _bf16(**need: object) -> dict[str, Need]:
    return {"bf16": Need(**need)}  # type: ignore[arg-type]


def _within(limit: float, must: float, **need: object) -> dict[str, Need]:
    """From a limit and a time to reach, both in the microseconds of one earlier run: times drift, ratios do not."""
    return _bf16(limit=must / limit, **need)


def _loss(rows: int, hidden: int, vocabulary: int, ignored: float = 0.0, **need: object) -> Case:
    return Case("fused_linear_cross_entropy", (rows, hidden, vocabulary), ignored=ignored, needs=_bf16(**need))


def _experts(*shape: int, limit: float) -> Case:
    return Case("swiglu_experts", shape, needs=_bf16(limit=limit, peers={"hf": 1.0}, memory_of=("hf", 1.0)))


_ROPE = (16384, 32, 8, 128)
#: A fused operator has to beat the sequence that it replaces.
_FUSED = {"unfused": 1.0}
#: And the code that it takes the place of, be that compiled.
_REPLACED = {"hf": 1.0, "compile": 1.0}

#: The fastest of Transformers' ways is to be beaten. (A third, batched_mm, copies the weights for each row: 500 GiB.)
_EXPERTS = {name: 1 / 1.12 for name in ("hf", "hf-eager")}

#: Qwen3-8B's and Llama-3's shapes on one large GPU. Limits at 4.28 TB/s, on an H200.
_LOG_PROBS = {"trl": 1.0, "liger": 1.0, "cce": 1.0, "torch": 1.0}

LIMITS = (
    Case("rms_norm", (16384, 4096), backward=False, needs=_within(62.7, 65)),
    Case("rms_norm", (16384, 4096), needs=_within(157, 172)),
    Case("rms_norm", (4096, 4096), needs=_within(39, 52)),
    Case("rms_norm", (131072, 128), needs=_within(39, 48)),  # QK-norm
    Case("add_rms_norm", (16384, 4096), backward=False, needs=_bf16(peers=_FUSED)),
    Case("add_rms_norm", (16384, 4096), needs=_bf16(peers=_FUSED)),
    # Qwen3-Next's heads, 8192 tokens of 32, and a Mamba-2 layer's rows.
    Case("gated_rms_norm", (262144, 128), backward=False, needs=_bf16(limit=1.15, peers=_REPLACED)),
    Case("gated_rms_norm", (262144, 128), needs=_bf16(limit=1.15, peers=_REPLACED)),
    Case("gate_first_rms_norm", (8192, 8192), backward=False, needs=_bf16(limit=1.15, peers=_REPLACED)),
    Case("gate_first_rms_norm", (8192, 8192), needs=_bf16(limit=1.15, peers=_REPLACED)),
    Case("swiglu", (16384, 12288), needs=_within(752, 762)),
    Case("gated_mlp", (4096, 4096, 12288), needs=_bf16(limit=1.05, peers=_FUSED)),
    Case("rope", _ROPE, backward=False, needs=_within(78, 82)),
    Case("rope", _ROPE, needs=_within(157, 162)),
    Case("qk_norm_rope", _ROPE, backward=False, needs=_within(78, 88, peers=_FUSED)),
    Case("qk_norm_rope", _ROPE, needs=_bf16(peers=_FUSED)),
    # Queries, keys and values of Qwen3.5's and Qwen3-Next's linear attention.
    Case("causal_conv1d", (16384, 8192), backward=False, needs=_bf16(peers={"hf": 1.0})),
    Case("causal_conv1d", (16384, 8192), needs=_bf16(peers={"hf": 1.0})),
    Case("gated_delta_rule", (4, 2048, 16, 32, 128, 128), backward=False, needs=_bf16(peers={"hf": 1.0})),
    Case("gated_delta_rule", (4, 2048, 16, 32, 128, 128), needs=_bf16(peers={"hf": 1.0}, memory_of=("hf", 1.0))),
    Case("cross_entropy", (4096, 128256), needs=_within(493, 540, mib=1)),
    Case("cross_entropy", (1024, 128256), needs=_within(123, 140, mib=1)),
    Case("cross_entropy", (4096, 151936), needs=_within(584, 640, mib=1)),
    Case("cross_entropy", (4096, 32000), needs=_within(123, 140, mib=1)),
    _loss(512, 4096, 151936, limit=1.05),
    _loss(2048, 4096, 151936, limit=1.0),
    _loss(4096, 4096, 151936, limit=1.0, mib=2500),
    _loss(4096, 4096, 151936, ignored=0.5, all_labels=0.6),
    _loss(8192, 4096, 151936, limit=1.0),
    _loss(16384, 4096, 151936, limit=1.0, mib=3100),
    _loss(16384, 4096, 151936, ignored=0.5, all_labels=0.6),
    _loss(4096, 4096, 128256, limit=1.0),
    _loss(16384, 4096, 128256, limit=1.0),
    _loss(4096, 1024, 151936),  # Qwen3-0.6B's head
    Case("linear_logprobs", (4096, 4096, 151936), backward=False, needs=_bf16(limit=1.03, peers=_LOG_PROBS)),
    Case("linear_logprobs", (4096, 4096, 151936), needs=_bf16(limit=1.02, peers=_LOG_PROBS)),
    # Beyond the budget: four products but for a chunk's, of which the limit has three.
    Case("linear_logprobs", (8192, 4096, 151936), backward=False, needs=_bf16(limit=1.03, peers=_LOG_PROBS)),
    Case("linear_logprobs", (8192, 4096, 151936), needs=_bf16(limit=1.03 * 4 / 3, peers=_LOG_PROBS)),
    Case("linear_logprobs", (16384, 4096, 151936), backward=False, needs=_bf16(limit=1.03, peers=_LOG_PROBS)),
    Case("linear_logprobs", (16384, 4096, 151936), needs=_bf16(limit=1.03 * 4 / 3, peers=_LOG_PROBS)),
    Case("linear_divergence", (4096, 4096, 151936), needs=_bf16(limit=1.15, peers={"trl": 1}, memory_of=("trl", 1))),
    Case("moe_experts", (4096, 2880, 2880, 32, 4), needs=_bf16(peers=_EXPERTS, memory_of=("hf", 1.0))),  # GPT-OSS-20B's
    _experts(8192, 2048, 768, 128, 8, limit=1.15),  # Qwen3-30B-A3B's
    _experts(8192, 4096, 14336, 8, 2, limit=1.05),  # Mixtral-8x7B's
    # As much as eight of Qwen3-8B's matrices; a step of all is to take 30 ms, the norm of its gradients 4 more.
    Case("adamw", (8, 4096 * 12288), backward=False, needs=_within(26.8, 30, peers={"hf": 30 / 42.2})),
    Case("grad_norm", (8, 4096 * 12288), backward=False, needs=_within(3.83, 4)),
    # An adapter's input at Qwen3-8B, 4 x 2048.
    Case("dropout", (8192, 4096), backward=False, needs=_bf16(limit=1.1, peers={"torch": 1 / 1.25})),
    Case("dropout", (8192, 4096), needs=_bf16(limit=1.1, peers={"torch": 1 / 1.25})),
    # Gradients of its gate's or up's adapter, of queries' and of keys'.
    Case("low_rank", (8192, 12288, 16), backward=False, needs=_bf16(limit=1.4, peers={"torch": 0.65})),
    Case("low_rank", (8192, 4096, 16), backward=False, needs=_bf16(limit=1.8, peers={"torch": 0.7})),
    Case("low_rank", (8192, 1024, 16), backward=False, needs=_bf16(peers={"torch": 0.8})),
)


# On CPU: at least 1.5 x faster than Transformers' code in bfloat16, where that rounds and copies at every step; not
# slower in float32.
_CPU = {"bf16": Need(peers={"hf": 1 / 1.5}), "fp32": Need(peers={"hf": 1.0})}
_CPU_MLP = {
    # In float32 the products take all but 2 % of the time: the two differ by less than clocks do.
    "bf16": Need(peers=_FUSED, memory_of=("unfused", 1.0)),
    "fp32": Need(memory_of=("unfused", 1.0)),
}
_CPU_OPTIMISER = {"bf16": Need(peers={"hf": 1.0})}  # in float32 the memory decides
_CPU_LOSS = {t: Need(peers={"hf": 1.0}) for t in ("bf16", "fp32")}
_CPU_EXPERTS = {t: Need(peers={"hf": 1.0, "hf-eager": 1.0}, memory_of=("hf", 1.0)) for t in ("bf16", "fp32")}
_CPU_LEAN_LOSS = {t: Need(peers={"hf": 1.0}, memory_of=("hf", 0.25)) for t in ("bf16", "fp32")}
_CPU_TRAINERS_LOSS = {t: Need(peers={"hf": 1.0, "trl": 1.0}, memory_of=("trl", 0.25)) for t in ("bf16", "fp32")}

#: The shapes of a small model (Qwen3-0.6B, 512 tokens; the demo's head), for a CPU or a quick look at a GPU.
SMALL = (
    Case("rms_norm", (512, 1024), needs=_CPU),
    Case("rms_norm", (8192, 128), needs=_CPU),  # QK-norm
    Case("add_rms_norm", (512, 1024), needs=_CPU),
    Case("gated_rms_norm", (8192, 128), needs=_CPU),
    Case("gate_first_rms_norm", (512, 2048), needs=_CPU),
    Case("swiglu", (512, 3072), needs=_CPU),
    Case("gated_mlp", (512, 1024, 3072), needs=_CPU_MLP),
    Case("rope", (512, 16, 8, 128), needs=_CPU),
    Case("qk_norm_rope", (512, 16, 8, 128), needs=_CPU),
    Case("causal_conv1d", (512, 2048), needs=_CPU),
    Case("gated_delta_rule", (1, 256, 2, 4, 64, 64)),
    Case("cross_entropy", (256, 32000), needs=_CPU),
    Case("fused_linear_cross_entropy", (1024, 256, 8192), needs=_CPU_LEAN_LOSS),
    Case("fused_linear_cross_entropy", (256, 1024, 32000), needs=_CPU_LOSS),  # most of its memory is dweight itself
    Case("linear_logprobs", (1024, 256, 8192), needs=_CPU_TRAINERS_LOSS),
    Case("linear_divergence", (1024, 256, 8192), needs=_CPU_TRAINERS_LOSS),
    Case("moe_experts", (256, 256, 256, 8, 2), needs=_CPU_EXPERTS),
    Case("swiglu_experts", (256, 256, 256, 8, 2), needs=_CPU_EXPERTS),
    Case("adamw", (28, 1 << 18), backward=False, needs=_CPU_OPTIMISER),
    Case("grad_norm", (28, 1 << 18), backward=False),  # by the memory's speed, as torch's
    Case("dropout", (512, 1024), needs={t: Need(peers={"torch": 1.0}) for t in ("bf16", "fp32")}),
)

# One row: the kernels take microseconds, so that what is left is the host's work.
_HOST_NORM = {t: Need(peers={"torch": 1.35, "liger": 0.35}) for t in ("bf16", "fp32")}
HOST = (
    Case("rms_norm", (1, 4096), host=True, needs=_HOST_NORM),
    Case("add_rms_norm", (1, 4096), host=True),
    Case("gated_rms_norm", (1, 4096), host=True),
    Case("swiglu", (1, 4096), host=True),
    Case("gated_mlp", (1, 64, 128), host=True),
    Case("rope", (1, 32, 8, 128), host=True),
    Case("qk_norm_rope", (1, 32, 8, 128), host=True),
    Case("cross_entropy", (1, 4096), host=True),
    Case("fused_linear_cross_entropy", (8, 256, 1024), host=True),
)

SHAPES = {"limits": LIMITS, "small": SMALL}
OPS = tuple(dict.fromkeys(case.op for case in LIMITS))
