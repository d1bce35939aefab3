"""Every operator as a function of one tensor, for what holds of all of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bastile.ops.adapted_experts import ExpertAdapters, adapted_experts
from bastile.ops.causal_conv1d import causal_conv1d
from bastile.ops.cross_entropy import cross_entropy
from bastile.ops.dropout import dropout
from bastile.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from bastile.ops.gated_delta_rule import gated_delta_rule
from bastile.ops.gated_mlp import gated_mlp
from bastile.ops.gated_rms_norm import gated_rms_norm
from bastile.ops.glu import glu
from bastile.ops.linear_divergence import linear_divergence
from bastile.ops.linear_logprobs import linear_logprobs
from bastile.ops.moe import moe_experts
from bastile.ops.norm import add_layer_norm
from bastile.ops.projections import projections
from bastile.ops.qk_norm_rope import qk_norm_rope
from bastile.ops.rms_norm import add_rms_norm, rms_norm
from bastile.ops.rope import rope
from bastile.ops.swiglu import swiglu

T, H = 4, 8

#: Whose results went through a library's matrix products, and the terms of all sums on a value's path through them,
#: there and back: no more than three products each way, of no more than 16 terms.
PRODUCTS = {
    "gated_mlp",
    "fused_linear_cross_entropy",
    "linear_logprobs",
    "linear_divergence",
    "moe_experts",
    "adapted_experts",
    "projections",
}
TERMS = 2 * 3 * 16


def random(*shape: int) -> torch.Tensor:
    """The same float32 numbers each time, in PyTorch's default type."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(torch.get_default_dtype())


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    angles = random(1, T, H)
    return angles.cos(), angles.sin()


def heads(x: torch.Tensor) -> torch.Tensor:
    """[T, H] as queries of one sequence and two heads."""
    return torch.stack([x, 2 * x])[None]


#: Each operator as a function of one tensor [T, H].
CALLS = {
    "rms_norm": lambda x: rms_norm(x, random(H)),
    "add_rms_norm": lambda x: torch.cat(add_rms_norm(x, x.square(), random(H))),
    "add_layer_norm": lambda x: torch.cat(add_layer_norm(x, x.square(), random(H), random(H))),
    "gated_rms_norm": lambda x: gated_rms_norm(x, x.cos(), random(H), gate_first=True, group=4),
    "swiglu": lambda x: swiglu(x, x.cos()),
    "glu": lambda x: glu(torch.cat((x, x.cos()), dim=-1), None, "swiglu_oai", interleaved=True),
    "gated_mlp": lambda x: gated_mlp(x, random(16, H), random(16, H), random(H, 16)),
    "rope": lambda x: torch.cat(rope(heads(x), heads(x), *tables())),
    "qk_norm_rope": lambda x: torch.cat(qk_norm_rope(heads(x), heads(x), random(H), random(H), *tables())),
    "causal_conv1d": lambda x: torch.cat(
        [
            causal_conv1d(x.t()[None], random(H, 3), random(H), "silu", seq_idx)
            for seq_idx in (None, torch.tensor([[0, 1, 1, 1]]))
        ]
    ),
    "gated_delta_rule": lambda x: torch.cat(
        [
            gated_delta_rule(
                *(f(x)[None, :, None] for f in (torch.sin, torch.cos, torch.tanh)),
                -x[None, :, :1].square(),
                x[None, :, 1:2].sigmoid(),
                normalize=True,
                cu_seqlens=cu_seqlens,
            )[0]
            for cu_seqlens in (None, torch.tensor([0, 1, 1, T]))
        ]
    ),
    "cross_entropy": lambda x: cross_entropy(x, torch.arange(T)),
    "fused_linear_cross_entropy": lambda x: fused_linear_cross_entropy(x, random(11, H), torch.arange(T)),
    "linear_logprobs": lambda x: torch.stack(
        linear_logprobs(x, random(11, H), torch.arange(T), outputs=("entropy", "lse"))[:3]
    ),
    "linear_divergence": lambda x: linear_divergence(x, random(11, H), random(T, 12), random(11, 12)).divergence,
    "moe_experts": lambda x: moe_experts(
        x, torch.tensor([[0, 1]] * T), random(T, 2), random(2, H, 16) / 4, None, random(2, 8, H) / 4, None
    ),
    "adapted_experts": lambda x: adapted_experts(
        x,
        torch.tensor([[0, 1]] * T),
        random(T, 2),
        *(random(2, H, 16) / 4, None, random(2, 8, H) / 4, None),
        ExpertAdapters(random(2, H, 2) / 4, random(2, 2, 16) / 4),
        ExpertAdapters(random(2, 8, 2) / 4, random(2, 2, H) / 4),
    ),
    "dropout": lambda x: dropout(x, 0.5, seed=torch.tensor([1 << 40, -3])),
    "projections": lambda x: torch.cat(projections(x, random(3, H), random(5, H)), dim=-1),
}


@contextmanager
def in_float64() -> Iterator[None]:
    """CALLS make tensors of float64 meanwhile, of the same numbers."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
