"""The contenders: what Bastile is measured against, each in its best form for the purpose.

bastile        the operators of this package
unfused        where one of them fuses a sequence: that sequence, of this package's other operators
torch          PyTorch's own functions, on tensors of their own type
hf             the code of Transformers (Qwen3, GPT-OSS) that Bastile replaces; of experts, grouped_mm
hf-eager       of experts, its loop over them; hf-batched: its batched_mm
compile        torch.compile of that code
compile-torch  torch.compile of PyTorch's own functions
liger          Liger-Kernel's Triton operators
cute           Liger-Kernel's CuTe operators
quack          QuACK's operators

A builder imports what it needs and returns a function of the operator's arguments; ImportError says that a library is
not there. Contenders may write over their inputs: the harness restores them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from bastile.bench import mlp, moe

Function = Callable[..., Any]
Builder = Callable[[], Function]

EPS = 1e-6


class _Norm:
    """Stands for a norm module whose weight differs from call to call."""

    def __init__(self, weight: torch.Tensor):
        self.weight, self.variance_epsilon = weight, EPS


# ---- bastile ---------------------------------------------------------------------------------------------------------


def _bastile(op: str) -> Any:
    """The function of that name, from the module of that name."""
    return getattr(importlib.import_module(f"bastile.ops.{op}"), op)


def _bastile_rms_norm() -> Function:
    rms_norm = _bastile("rms_norm")
    return lambda x, weight: rms_norm(x, weight, EPS)


def _bastile_rope() -> Function:
    rope = _bastile("rope")
    return lambda q, k, cos, sin: rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def _bastile_add_rms_norm() -> Function:
    from bastile.ops.rms_norm import add_rms_norm

    return lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS)


def _bastile_qk_norm_rope() -> Function:
    from bastile.ops.qk_norm_rope import qk_norm_rope

    return lambda q, k, q_weight, k_weight, cos, sin: qk_norm_rope(
        q.transpose(1, 2), k.transpose(1, 2), q_weight, k_weight, cos, sin, EPS
    )


def _unfused_add_rms_norm() -> Function:
    return _added(_bastile_rms_norm())


def _unfused_qk_norm_rope() -> Function:
    return _normed(_bastile_rms_norm(), _bastile_rope())


def _added(norm: Function) -> Function:
    """The residual's sum and its norm, one after the other."""

    def run(x, residual, weight):
        total = residual + x
        return norm(total, weight), total

    return run


def _normed(norm: Function, rope: Function) -> Function:
    """Both norms and the rotation, one after the other."""
    return lambda q, k, q_weight, k_weight, cos, sin: rope(norm(q, q_weight), norm(k, k_weight), cos, sin)


def _bastile_cross_entropy() -> Function:
    cross_entropy = _bastile("cross_entropy")
    # In a model the logits are a product's result, not a leaf: in-place work on a leaf is refused, rightly.
    return lambda logits, target: cross_entropy(logits.view_as(logits), target, inplace=True)


# ---- torch, hf -------------------------------------------------------------------------------------------------------


def _torch_rms_norm() -> Function:
    return lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)


def _torch_add_rms_norm() -> Function:
    return _added(_torch_rms_norm())


def _torch_qk_norm_rope() -> Function:
    return _normed(_torch_rms_norm(), _hf_rope())  # PyTorch has no rotary function


def _torch_swiglu() -> Function:
    return lambda a, b: F.silu(a) * b


def _torch_cross_entropy() -> Function:
    return lambda logits, target: F.cross_entropy(logits, target).float()


def _torch_linear_cross_entropy() -> Function:
    return lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight), target).float()


def _hf_rms_norm() -> Function:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    forward: Any = Qwen3RMSNorm.forward
    return lambda x, weight: forward(_Norm(weight), x)


def _hf_swiglu() -> Function:
    from transformers.activations import ACT2FN

    act = ACT2FN["silu"]
    return lambda a, b: act(a) * b


def _hf_rope() -> Function:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    return lambda q, k, cos, sin: apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def _hf_add_rms_norm() -> Function:
    return _added(_hf_rms_norm())


def _hf_qk_norm_rope() -> Function:
    return _normed(_hf_rms_norm(), _hf_rope())


def _hf_cross_entropy() -> Function:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return lambda logits, target: ForCausalLMLoss(logits, None, logits.shape[-1], shift_labels=target)


def _hf_linear_cross_entropy() -> Function:
    loss = _hf_cross_entropy()
    return lambda hidden, weight, target: loss(F.linear(hidden, weight), target)


def _compiled(builder: Builder) -> Builder:
    def build() -> Function:
        torch._dynamo.reset()  # a cache full of other shapes would make it fall back to eager code
        return torch.compile(builder(), dynamic=False, fullgraph=True)

    return build


# ---- Liger, QuACK ----------------------------------------------------------------------------------------------------

# Liger's package chooses one implementation at import; its modules give both in one process.
_TRITON = "liger_kernel.ops.{}"
_CUTE = "liger_kernel.ops.cutedsl.ops"


def _liger(place: str, module: str, function: str) -> Any:
    return getattr(importlib.import_module(place.format(module)), function)


def _liger_rms_norm(place: str) -> Builder:
    def build() -> Function:
        norm = _liger(place, "rms_norm", "LigerRMSNormFunction")
        # The last argument: dx not over dy, which saves memory and not traffic. It is what Liger needs in models with a
        # residual.
        return lambda x, weight: norm.apply(x, weight, EPS, 0.0, "llama", False)

    return build


def _liger_add_rms_norm() -> Function:
    norm = _liger(_TRITON, "fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    return lambda x, residual, weight: norm.apply(x, residual, weight, EPS, 0.0, "llama", False)


def _liger_swiglu(place: str) -> Builder:
    return lambda: _liger(place, "swiglu", "LigerSiLUMulFunction").apply


def _liger_rope(place: str) -> Builder:
    def build() -> Function:
        rope = _liger(place, "rope", "LigerRopeFunction")
        return lambda q, k, cos, sin: rope.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    return build


def _liger_qk_norm_rope(place: str) -> Builder:
    return lambda: _normed(_liger_rms_norm(place)(), _liger_rope(place)())


def _liger_cross_entropy(place: str) -> Builder:
    def build() -> Function:
        loss = _liger(place, "cross_entropy", "LigerCrossEntropyFunction")
        return lambda logits, target: loss.apply(logits, target, None)[0]

    return build


def _liger_linear_cross_entropy(place: str) -> Builder:
    def build() -> Function:
        loss = _liger(place, "fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
        return lambda hidden, weight, target: loss.apply(hidden, weight, target)[0]

    return build


def _quack_rms_norm() -> Function:
    from quack.rmsnorm import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, eps=EPS)


def _quack_add_rms_norm() -> Function:
    from quack.rmsnorm import rmsnorm

    return lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)


def _quack_qk_norm_rope() -> Function:
    return _normed(_quack_rms_norm(), _quack_rope())


def _quack_rope() -> Function:
    from quack.rotary import apply_rotary_emb

    def run(q, k, cos, sin):
        half = cos.shape[-1] // 2
        cos, sin = cos[0, :, :half], sin[0, :, :half]
        return apply_rotary_emb(q, cos, sin).transpose(1, 2), apply_rotary_emb(k, cos, sin).transpose(1, 2)

    return run


def _quack_cross_entropy() -> Function:
    from quack.cross_entropy import cross_entropy

    return lambda logits, target: cross_entropy(logits, target, inplace_backward=True)


def _quack_linear_cross_entropy() -> Function:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy


# ---- the table -------------------------------------------------------------------------------------------------------

_TORCH: dict[str, Builder] = {
    "rms_norm": _torch_rms_norm,
    "add_rms_norm": _torch_add_rms_norm,
    "swiglu": _torch_swiglu,
    "gated_mlp": lambda: mlp.around(_torch_swiglu()),
    "qk_norm_rope": _torch_qk_norm_rope,
    "cross_entropy": _torch_cross_entropy,
    "fused_linear_cross_entropy": _torch_linear_cross_entropy,
}
_HF: dict[str, Builder] = {
    "rms_norm": _hf_rms_norm,
    "add_rms_norm": _hf_add_rms_norm,
    "swiglu": _hf_swiglu,
    "gated_mlp": lambda: mlp.around(_hf_swiglu()),
    "rope": _hf_rope,
    "qk_norm_rope": _hf_qk_norm_rope,
    "cross_entropy": _hf_cross_entropy,
    "fused_linear_cross_entropy": _hf_linear_cross_entropy,
    "moe_experts": moe.transformers_experts("grouped_mm"),
}


def _both(place: str) -> dict[str, Builder]:
    return {
        "rms_norm": _liger_rms_norm(place),
        "swiglu": _liger_swiglu(place),
        "gated_mlp": lambda: mlp.around(_liger_swiglu(place)()),
        "rope": _liger_rope(place),
        "qk_norm_rope": _liger_qk_norm_rope(place),
        "cross_entropy": _liger_cross_entropy(place),
        "fused_linear_cross_entropy": _liger_linear_cross_entropy(place),
    }


#: contender -> operator -> builder. Where an operator is missing, the contender has none.
PEERS: dict[str, dict[str, Builder]] = {
    "bastile": {
        "rms_norm": _bastile_rms_norm,
        "add_rms_norm": _bastile_add_rms_norm,
        "swiglu": lambda: _bastile("swiglu"),
        "gated_mlp": lambda: _bastile("gated_mlp"),
        "rope": _bastile_rope,
        "qk_norm_rope": _bastile_qk_norm_rope,
        "cross_entropy": _bastile_cross_entropy,
        "fused_linear_cross_entropy": lambda: _bastile("fused_linear_cross_entropy"),
        "moe_experts": moe.bastile_experts,
    },
    "unfused": {
        "add_rms_norm": _unfused_add_rms_norm,
        "gated_mlp": lambda: mlp.around(_bastile("swiglu")),
        "qk_norm_rope": _unfused_qk_norm_rope,
    },
    "torch": _TORCH,
    "hf": _HF,
    "hf-eager": {"moe_experts": moe.transformers_experts("eager")},
    "hf-batched": {"moe_experts": moe.transformers_experts("batched_mm")},
    "compile": {op: _compiled(builder) for op, builder in _HF.items()},
    "compile-torch": {op: _compiled(builder) for op, builder in _TORCH.items()},
    "liger": {**_both(_TRITON), "add_rms_norm": _liger_add_rms_norm},
    "cute": _both(_CUTE),
    "quack": {
        "rms_norm": _quack_rms_norm,
        "add_rms_norm": _quack_add_rms_norm,
        "rope": _quack_rope,
        "qk_norm_rope": _quack_qk_norm_rope,
        "cross_entropy": _quack_cross_entropy,
        "fused_linear_cross_entropy": _quack_linear_cross_entropy,
    },
}

#: What --against may name, and the contenders that it stands for.
AGAINST = {
    "torch": ("torch",),
    "hf": ("hf", "hf-eager", "hf-batched"),
    "compile": ("compile", "compile-torch"),
    "liger": ("liger", "cute"),
    "quack": ("quack",),
}
CUDA_ONLY = ("liger", "cute", "quack")
