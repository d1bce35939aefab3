"""The contenders of one operator, each in its best form for the purpose: `PEERS`.

A builder imports what it needs and returns a function of the operator's arguments; ImportError says that a library is
not there. Where a library has no fused operator, its contender is the sequence of its own. Contenders may write over
their inputs: the harness restores them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

Function = Callable[..., Any]
Builder = Callable[[], Function]

EPS = 1e-6
DROPOUT = 0.05


def _get(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


# ---- sequences -------------------------------------------------------------------------------------------------------


def _added(norm: Function) -> Function:
    """The residual's sum and its norm, one after the other."""

    def run(x, residual, weight):
        total = residual + x
        return norm(total, weight), total

    return run


def _normed(norm: Function, rope: Function) -> Function:
    """Both norms and the rotation, one after the other."""
    return lambda q, k, q_weight, k_weight, cos, sin: rope(norm(q, q_weight), norm(k, k_weight), cos, sin)


def _around(activation: Function) -> Function:
    """Three linear layers, and between them a function of the first two."""
    return lambda x, gate, up, down: F.linear(activation(F.linear(x, gate), F.linear(x, up)), down)


def _of_logits(loss: Function) -> Function:
    """The head's product and the loss of its result."""
    return lambda hidden, weight, target: loss(F.linear(hidden, weight), target)


def _heads_first(function: Function) -> Function:
    """For what wants q and k as [batch, heads, tokens, dim]."""
    return lambda q, k, *rest: function(q.transpose(1, 2), k.transpose(1, 2), *rest)


def _channels_first(convolve: Function) -> Function:
    """Of x [batch, tokens, channels], for what wants and returns [batch, channels, tokens]."""
    return lambda x, weight: convolve(x.transpose(1, 2), weight, None, activation="silu").transpose(1, 2)


def _linear_attention(chunks: Function) -> Function:
    """y alone, of queries and keys made rows of length 1."""
    return lambda q, k, v, g, beta: chunks(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


def _sequences(own: dict[str, Builder]) -> dict[str, Builder]:
    """What the fused operators do, of a library's single ones."""
    made: dict[str, Builder] = {"add_rms_norm": lambda: _added(own["rms_norm"]())}
    if "swiglu" in own:
        made["gated_mlp"] = lambda: _around(own["swiglu"]())
    if "rope" in own:
        made["qk_norm_rope"] = lambda: _normed(own["rms_norm"](), own["rope"]())
    return made


# ---- Bastile ---------------------------------------------------------------------------------------------------------


def _ours(name: str, module: str | None = None) -> Any:
    """The function of that name, from the module of that name. EPS is what it takes where none is given."""
    return _get(f"bastile.ops.{module or name}", name)


def _bastile_cross_entropy() -> Function:
    cross_entropy = _ours("cross_entropy")
    # In a model the logits are a product's result, not a leaf: in-place work on a leaf is refused, rightly.
    return lambda logits, target: cross_entropy(logits.view_as(logits), target, inplace=True)


def _bastile_swiglu_experts() -> Function:
    experts = _ours("moe_experts", module="moe")
    return lambda hidden, indices, weights, gate_up, down: experts(
        hidden, indices, weights, gate_up.transpose(1, 2), None, down.transpose(1, 2), None, activation="silu"
    )


def _bastile_logprobs() -> Function:
    """As its trainers call it: every target counts."""
    run = _ours("linear_logprobs")
    return lambda hidden, weight, target: run(hidden, weight, target, valid_rows=target.numel()).log_probs


def _bastile_divergence() -> Function:
    linear_divergence = _ours("linear_divergence")
    return lambda *tensors: linear_divergence(*tensors).divergence.sum()


def _bastile_delta_rule(*tensors: torch.Tensor) -> torch.Tensor:
    return _ours("gated_delta_rule")(*tensors, normalize=True)[0]


_BASTILE: dict[str, Builder] = {
    "rms_norm": lambda: _ours("rms_norm"),
    "add_rms_norm": lambda: _ours("add_rms_norm", module="rms_norm"),
    "gated_rms_norm": lambda: _ours("gated_rms_norm"),
    "gate_first_rms_norm": lambda: partial(_ours("gated_rms_norm"), gate_first=True),
    "swiglu": lambda: _ours("swiglu"),
    "gated_mlp": lambda: _ours("gated_mlp"),
    "rope": lambda: _heads_first(_ours("rope")),
    "qk_norm_rope": lambda: _heads_first(_ours("qk_norm_rope")),
    "causal_conv1d": lambda: _channels_first(_ours("causal_conv1d")),
    "gated_delta_rule": lambda: _bastile_delta_rule,
    "cross_entropy": _bastile_cross_entropy,
    "fused_linear_cross_entropy": lambda: _ours("fused_linear_cross_entropy"),
    "linear_logprobs": _bastile_logprobs,
    "linear_divergence": _bastile_divergence,
    "moe_experts": lambda: _ours("moe_experts", module="moe"),
    "swiglu_experts": _bastile_swiglu_experts,
    "dropout": lambda: partial(_ours("dropout"), p=DROPOUT),
    "low_rank": lambda: _get("bastile.ops.low_rank", "low_rank_backward"),
}


# ---- Transformers ----------------------------------------------------------------------------------------------------


class _Norm:
    """Stands for a norm module whose weight differs from call to call."""

    def __init__(self, weight: torch.Tensor):
        self.weight, self.variance_epsilon = weight, EPS
        self.activation, self.group_size = "silu", weight.shape[0]  # of one with a gate


def _hf_rms_norm() -> Function:
    forward = _get("transformers.models.qwen3.modeling_qwen3", "Qwen3RMSNorm").forward
    return lambda x, weight: forward(_Norm(weight), x)


def _hf_gated_rms_norm(model: str, name: str) -> Builder:
    def build() -> Function:
        forward = _get(f"transformers.models.{model}.modeling_{model}", name).forward
        return lambda x, gate, weight: forward(_Norm(weight), x, gate)

    return build


def _hf_swiglu() -> Function:
    act = _get("transformers.activations", "ACT2FN")["silu"]
    return lambda a, b: act(a) * b


def _hf_rope() -> Function:
    return _heads_first(_get("transformers.models.qwen3.modeling_qwen3", "apply_rotary_pos_emb"))


def _hf_causal_conv1d() -> Function:
    """What runs where the package causal-conv1d is not installed."""
    function = _get("transformers.models.qwen3_next.modeling_qwen3_next", "causal_conv1d_fn")
    return _channels_first(inspect.unwrap(function))


def _hf_gated_delta_rule() -> Function:
    """What runs where the package flash-linear-attention is not installed."""
    function = _get("transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule")
    return _linear_attention(inspect.unwrap(function))


def _hf_cross_entropy() -> Function:
    loss = _get("transformers.loss.loss_utils", "ForCausalLMLoss")
    return lambda logits, target: loss(logits, None, logits.shape[-1], shift_labels=target)


def _log_probs(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As trainers have it that are given logits."""
    return logits.float().log_softmax(-1).gather(-1, target[:, None])[:, 0]


def _divergence(hidden: Any, weight: Any, teacher_hidden: Any, teacher_weight: Any) -> torch.Tensor:
    """As trainers have it that are given logits."""
    log_p, log_q = (
        F.linear(*of).float().log_softmax(-1) for of in ((hidden, weight), (teacher_hidden, teacher_weight))
    )
    return F.kl_div(log_p, log_q, reduction="sum", log_target=True)


def _hf_experts(implementation: str, is_oai: bool = True) -> Builder:
    """One of Transformers' implementations of GptOssExperts, or of MixtralExperts, for weights that come as
    arguments."""

    def build() -> Function:
        from transformers.activations import ACT2FN
        from transformers.integrations import moe
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        like: Any = GptOssExperts if is_oai else MixtralExperts
        ways: dict[str, Any] = {
            "eager": getattr(like.forward, "__wrapped__", like.forward),
            "batched_mm": moe.batched_mm_experts_forward,
            "grouped_mm": moe.grouped_mm_experts_forward,
        }

        class Experts:
            """Stands for the module."""

            alpha, limit = 1.702, 7.0
            has_gate, has_bias, is_transposed, is_concatenated = True, is_oai, is_oai, not is_oai
            has_post_expert_norm = _is_expert_parallel = False
            act_fn = ACT2FN["silu"]
            _apply_gate = like._apply_gate

            def __init__(self, *parameters):
                biases = parameters[1::2] if is_oai else (None, None)
                self.gate_up_proj, self.down_proj = parameters[::2] if is_oai else parameters
                self.gate_up_proj_bias, self.down_proj_bias = biases
                self.num_experts = self.gate_up_proj.shape[0]

        way = ways[implementation]
        return lambda hidden, indices, weights, *parameters: way(Experts(*parameters), hidden, indices, weights)

    return build


def _hf_experts_by(implementation: str) -> dict[str, Builder]:
    return {
        "moe_experts": _hf_experts(implementation),
        "swiglu_experts": _hf_experts(implementation, is_oai=False),
    }


_HF: dict[str, Builder] = {
    "rms_norm": _hf_rms_norm,
    "gated_rms_norm": _hf_gated_rms_norm("qwen3_next", "Qwen3NextRMSNormGated"),
    "gate_first_rms_norm": _hf_gated_rms_norm("mamba2", "MambaRMSNormGated"),
    "swiglu": _hf_swiglu,
    "rope": _hf_rope,
    "causal_conv1d": _hf_causal_conv1d,
    "gated_delta_rule": _hf_gated_delta_rule,
    "cross_entropy": _hf_cross_entropy,
    "fused_linear_cross_entropy": lambda: _of_logits(_hf_cross_entropy()),
    "linear_logprobs": lambda: _of_logits(_log_probs),
    "linear_divergence": lambda: _divergence,
    "moe_experts": _hf_experts("grouped_mm"),
    "swiglu_experts": _hf_experts("grouped_mm", is_oai=False),
}
_HF |= _sequences(_HF)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def _torch_cross_entropy() -> Function:
    return lambda logits, target: F.cross_entropy(logits, target).float()


def _two_products(dy: torch.Tensor, thin: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if dy.is_cuda and dy.dtype is not torch.float32:
        return dy @ b, torch.mm(dy.t(), thin, out_dtype=torch.float32)
    return dy @ b, (dy.t() @ thin).float()


_TORCH: dict[str, Builder] = {
    "rms_norm": lambda: lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
    "gated_rms_norm": lambda: lambda x, gate, weight: F.rms_norm(x, weight.shape, weight, EPS) * F.silu(gate),
    "gate_first_rms_norm": lambda: lambda x, gate, weight: F.rms_norm(x * F.silu(gate), weight.shape, weight, EPS),
    "swiglu": lambda: lambda a, b: F.silu(a) * b,
    "cross_entropy": _torch_cross_entropy,
    "fused_linear_cross_entropy": lambda: _of_logits(_torch_cross_entropy()),
    "linear_logprobs": lambda: _torch_logprobs(),
    "dropout": lambda: partial(F.dropout, p=DROPOUT),
    "low_rank": lambda: _two_products,
}
_TORCH |= _sequences({**_TORCH, "rope": _hf_rope})  # PyTorch has no rotary function


def _compiled(builders: dict[str, Builder]) -> dict[str, Builder]:
    def build(builder: Builder) -> Function:
        torch._dynamo.reset()  # a cache full of other shapes would make it fall back to eager code
        return torch.compile(builder(), dynamic=False, fullgraph=True)

    return {op: partial(build, builder) for op, builder in builders.items()}


# ---- Liger, QuACK ----------------------------------------------------------------------------------------------------

_TRITON = "liger_kernel.ops.{}"
_CUTE = "liger_kernel.ops.cutedsl.ops"


def _liger(place: str) -> dict[str, Builder]:
    """Liger's package chooses Triton or CuTe at import; its modules give both in one process."""

    def operator(module: str, name: str) -> Any:
        return _get(place.format(module), f"Liger{name}Function").apply

    def norm(module: str, name: str) -> Function:
        apply = operator(module, name)
        # The last argument: dx not over dy, which saves memory and not traffic. It is what Liger needs in models with a
        # residual.
        return lambda *given: apply(*given, EPS, 0.0, "llama", False)

    def cross_entropy() -> Function:
        apply = operator("cross_entropy", "CrossEntropy")
        return lambda logits, target: apply(logits, target, None)[0]

    def linear_cross_entropy() -> Function:
        apply = operator("fused_linear_cross_entropy", "FusedLinearCrossEntropy")
        return lambda hidden, weight, target: apply(hidden, weight, target)[0]

    own: dict[str, Builder] = {
        "rms_norm": lambda: norm("rms_norm", "RMSNorm"),
        "swiglu": lambda: operator("swiglu", "SiLUMul"),
        "rope": lambda: _heads_first(operator("rope", "Rope")),
        "cross_entropy": cross_entropy,
        "fused_linear_cross_entropy": linear_cross_entropy,
    }
    fused: dict[str, Builder] = {"add_rms_norm": lambda: norm("fused_add_rms_norm", "FusedAddRMSNorm")}
    return {**_sequences(own), **own, **(fused if place == _TRITON else {})}


def _quack_rms_norm() -> Function:
    norm = _get("quack.rmsnorm", "rmsnorm")
    return lambda x, weight: norm(x, weight, eps=EPS)


def _quack_add_rms_norm() -> Function:
    norm = _get("quack.rmsnorm", "rmsnorm")
    return lambda x, residual, weight: norm(x, weight, residual=residual, eps=EPS, prenorm=True)


def _quack_rope() -> Function:
    rope = _get("quack.rotary", "apply_rotary_emb")

    def run(q, k, cos, sin):
        half = cos.shape[-1] // 2
        cos, sin = cos[0, :, :half], sin[0, :, :half]
        return rope(q, cos, sin).transpose(1, 2), rope(k, cos, sin).transpose(1, 2)

    return run


def _quack_cross_entropy() -> Function:
    loss = _get("quack.cross_entropy", "cross_entropy")
    return lambda logits, target: loss(logits, target, inplace_backward=True)


_QUACK: dict[str, Builder] = {
    "rms_norm": _quack_rms_norm,
    "rope": _quack_rope,
    "cross_entropy": _quack_cross_entropy,
    "fused_linear_cross_entropy": lambda: _get("quack.linear_cross_entropy", "chunked_linear_cross_entropy"),
}
_QUACK |= {**_sequences(_QUACK), "add_rms_norm": _quack_add_rms_norm}


def _liger_logprobs() -> Function:
    """By CuTe where that is installed, else what Liger has in its place."""
    apply = _get(
        "liger_kernel.ops.fused_linear_scaled_cross_entropy", "LigerFusedLinearScaledCrossEntropyFunction"
    ).apply
    return lambda hidden, weight, target: -apply(hidden, weight, target)


def _torch_logprobs() -> Function:
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError("this release of PyTorch has no linear_cross_entropy")
    return lambda hidden, weight, target: -F.linear_cross_entropy(hidden, weight, target, reduction="none").float()


def _cut_logprobs() -> Function:
    loss = _get("cut_cross_entropy", "linear_cross_entropy")
    return lambda hidden, weight, target: -loss(hidden, weight, target, reduction="none")


def _trl_logprobs() -> Function:
    apply = _get("trl.kernels", "ChunkedLogProbFunction").apply
    chunk = 8192  # columns at a time, as its trainers have it
    return lambda hidden, weight, target: apply(hidden, weight, None, target, 1.0, chunk, None, 1.0, ())[0]


def _trl_divergence() -> Function:
    apply = _get("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction").apply
    rest = (None, 0.0, 1.0, 1.0, None, 1.0, None)
    return lambda hidden, weight, *teacher: apply(hidden, weight, None, *teacher, *rest)[0].sum()


# ---- the optimiser ---------------------------------------------------------------------------------------------------

_HYPER: dict[str, Any] = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01}


def _of_some(step: Function) -> Function:
    """A step on lists of tensors, from one tensor of each kind; of what it writes, a part to compare."""

    def run(parameter, gradient, exp_avg, exp_avg_sq, steps):
        step(*(list(t.unbind()) for t in (parameter, gradient, exp_avg, exp_avg_sq, steps)))
        return parameter[:, :1024].clone()

    return run


def _our_step() -> Function:
    from bastile.ops.optim import AdamWLists, adamw_

    def step(parameter, gradient, exp_avg, exp_avg_sq, steps):
        lists = AdamWLists(parameter, gradient, exp_avg, exp_avg_sq, steps, [], [], [])
        adamw_(lists, betas=(0.9, 0.999), **_HYPER)

    return _of_some(step)


def _torchs_step() -> Function:
    """What AdamW(fused=True), Trainer's choice, calls."""

    def step(parameter, gradient, exp_avg, exp_avg_sq, steps):
        torch._foreach_add_(steps, 1)
        options = {"beta1": 0.9, "beta2": 0.999, "amsgrad": False, "maximize": False, **_HYPER}
        torch._fused_adamw_(parameter, gradient, exp_avg, exp_avg_sq, [], steps, **options)

    return _of_some(step)


def _our_norm() -> Function:
    from bastile.ops.optim import grad_norm

    return lambda gradient: grad_norm(list(gradient.unbind()))[0]


_BASTILE |= {"adamw": _our_step, "grad_norm": _our_norm}
_OF_TRAINER: dict[str, Builder] = {
    "adamw": _torchs_step,
    "grad_norm": lambda: lambda gradient: torch.nn.utils.get_total_norm(list(gradient.unbind())),
}


# ---- the table -------------------------------------------------------------------------------------------------------


class Peer(dict[str, Builder]):
    """By operator; where one is missing, the contender has none."""

    def __init__(self, meaning: str, colour: str, builders: dict[str, Builder], title: str = "") -> None:
        super().__init__(builders)
        self.meaning = meaning
        self.colour = colour  # in plots: what is of one library has shades of one colour
        self.title = title  # in the documents' tables, which have no others


PEERS = {
    "bastile": Peer("the operators of this package", "#1b7f4d", _BASTILE, "Bastile"),
    "unfused": Peer(
        "where one of them fuses a sequence: that, of its others", "#8fcfae", _sequences(_BASTILE), "Bastile, unfused"
    ),
    "torch": Peer("PyTorch's own functions, on tensors of their own type", "#888888", _TORCH, "torch"),
    "hf": Peer("the code of Transformers that Bastile replaces", "#bbbbbb", _HF | _OF_TRAINER, "Hugging Face code"),
    "hf-eager": Peer("of experts, its loop over them", "#cccccc", _hf_experts_by("eager")),
    "hf-batched": Peer("of experts, its batched_mm", "#dddddd", _hf_experts_by("batched_mm")),
    "compile": Peer("torch.compile of the code that is replaced", "#e0a030", _compiled(_HF), "that, compiled"),
    "compile-torch": Peer("torch.compile of PyTorch's own functions", "#f0c878", _compiled(_TORCH)),
    "liger": Peer(
        "Liger-Kernel's Triton operators",
        "#7a5bb0",
        _liger(_TRITON) | {"linear_logprobs": _liger_logprobs},
        "Liger (Triton)",
    ),
    "cute": Peer("Liger-Kernel's CuTe operators", "#a98fd0", _liger(_CUTE), "Liger (CuTe)"),
    "quack": Peer("QuACK's operators", "#3f7fbf", _QUACK, "QuACK"),
    "trl": Peer(
        "TRL's chunked kernels",
        "#c06060",
        {"linear_logprobs": _trl_logprobs, "linear_divergence": _trl_divergence},
        "TRL",
    ),
    "cce": Peer("Cut Cross-Entropy", "#508080", {"linear_logprobs": _cut_logprobs}, "Cut Cross-Entropy"),
    "conv": Peer(
        "the package causal-conv1d",
        "#a08050",
        {"causal_conv1d": lambda: _channels_first(_get("causal_conv1d", "causal_conv1d_fn"))},
        "causal-conv1d",
    ),
    "fla": Peer(
        "flash-linear-attention",
        "#607080",
        {"gated_delta_rule": lambda: _linear_attention(_get("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"))},
        "flash-linear-attention",
    ),
}

#: What --against may name, and the contenders that it stands for.
AGAINST = {
    "torch": ("torch",),
    "hf": ("hf", "hf-eager", "hf-batched"),
    "compile": ("compile", "compile-torch"),
    "liger": ("liger", "cute"),
    "quack": ("quack",),
    "trl": ("trl",),
    "cce": ("cce",),
    "conv": ("conv",),
    "fla": ("fla",),
}
CUDA_ONLY = ("liger", "cute", "quack", "cce", "conv", "fla")
