"""What no operator computes is an error that names the operator, the argument, what was given and what is needed: on
the way to the kernels, and on that to PyTorch's code, which would truncate, drop imaginary parts or broadcast."""

from collections.abc import Callable

import pytest
import torch

from bastile.ops.adapted_experts import adapted_experts
from bastile.ops.cross_entropy import cross_entropy
from bastile.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from bastile.ops.gated_delta_rule import gated_delta_rule
from bastile.ops.gated_mlp import gated_mlp
from bastile.ops.gated_rms_norm import gated_rms_norm
from bastile.ops.low_rank import low_rank_add
from bastile.ops.moe import moe_experts
from bastile.ops.norm import layer_norm
from bastile.ops.projections import projections
from bastile.ops.qk_norm_rope import qk_norm_rope
from bastile.ops.rms_norm import add_rms_norm, rms_norm
from bastile.ops.rope import rope
from bastile.ops.swiglu import swiglu

X = torch.ones(4, 8)
W, GATE, DOWN, HEAD = torch.ones(8), torch.ones(16, 8), torch.ones(8, 16), torch.ones(11, 8)
HEADS, TABLE = torch.ones(1, 2, 4, 8), torch.ones(1, 4, 8)
T, CHOICES = torch.arange(4), torch.zeros(4, 2, dtype=torch.int64)
MOE = {"gate_up_proj": torch.ones(2, 8, 16), "gate_up_bias": None, "down_proj": torch.ones(2, 8, 8), "down_bias": None}


def added_to_one(x, y_0, a_0, b_0):
    low_rank_add(x, [y_0], [(a_0, b_0)], [0.5])


#: Each operator with arguments that it serves.
GIVEN: dict[str, tuple[Callable, dict]] = {
    "rms_norm": (rms_norm, {"x": X, "weight": W}),
    "layer_norm": (layer_norm, {"x": X, "weight": W, "bias": W}),
    "add_rms_norm": (add_rms_norm, {"x": X, "residual": X, "weight": W}),
    "gated_rms_norm": (gated_rms_norm, {"x": X, "gate": X, "weight": W}),
    "gated_delta_rule": (
        gated_delta_rule,
        {
            **{"q": HEADS, "k": HEADS, "v": HEADS, "g": -HEADS[..., 0], "beta": HEADS[..., 0]},
            "initial_state": torch.ones(1, 4, 8, 8),
        },
    ),
    "swiglu": (swiglu, {"a": X, "b": X}),
    "gated_mlp": (gated_mlp, {"x": X, "gate_weight": GATE, "up_weight": GATE, "down_weight": DOWN}),
    "rope": (rope, {"q": HEADS, "k": HEADS, "cos": TABLE, "sin": TABLE}),
    "qk_norm_rope": (
        qk_norm_rope,
        {"q": HEADS, "k": HEADS, "q_weight": W, "k_weight": W, "cos": TABLE, "sin": TABLE},
    ),
    "cross_entropy": (cross_entropy, {"logits": X, "target": T, "weight": W}),
    "fused_linear_cross_entropy": (
        fused_linear_cross_entropy,
        {"hidden": X, "weight": HEAD, "target": T, "bias": torch.ones(11), "class_weight": torch.ones(11)},
    ),
    "moe_experts": (
        moe_experts,
        {"hidden": X, "router_indices": CHOICES, "routing_weights": torch.ones(4, 2), **MOE},
    ),
    "adapted_experts": (
        adapted_experts,
        {"hidden": X, "router_indices": CHOICES, "routing_weights": torch.ones(4, 2), **MOE},
    ),
}
GIVEN["low_rank_add"] = (added_to_one, {"x": X, "y_0": torch.ones(4, 16), "a_0": X[:2], "b_0": torch.ones(16, 2)})
#: Those that are no floats to begin with.
INDICES = ("target", "router_indices")


def arguments(indices: bool) -> list[tuple[str, str]]:
    return [
        (op, name)
        for op, (_, given) in GIVEN.items()
        for name, value in given.items()
        if value is not None and (indices or name not in INDICES)
    ]


@pytest.mark.parametrize(("op", "name"), arguments(indices=True))
def test_what_is_no_tensor(op, name):
    function, given = GIVEN[op]
    with pytest.raises(TypeError, match=f"^{op}: {name} is a list; a tensor is needed$"):
        function(**{**given, name: [1.0, 2.0]})


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize(("op", "name"), arguments(indices=False))
def test_what_is_no_real_number(op, name, dtype):
    function, given = GIVEN[op]
    with pytest.raises(TypeError, match=f"^{op}: {name} is {dtype}; a floating-point type is needed$"):
        function(**{**given, name: given[name].to(dtype)})


def in_float64(given: dict) -> dict:
    return {n: t.double() if t is not None and t.is_floating_point() else t for n, t in given.items()}


@pytest.mark.parametrize(
    ("op", "changed", "message"),
    [
        ("rms_norm", {"weight": W[None]}, r"weight has shape \[1, 8\]; \[8\], the last dimension"),
        ("add_rms_norm", {"weight": W[:1]}, r"weight has shape \[1\]; \[8\], the last dimension"),
        ("add_rms_norm", {"residual": X[:1]}, r"residual has shape \[1, 8\]; \[4, 8\], that of x"),
        ("swiglu", {"b": X[0]}, r"b has shape \[8\]; \[4, 8\], that of a"),
        ("rope", {"q": HEADS[0]}, r"q has shape \[2, 4, 8\]; \[B, heads, S, D\]"),
        (
            "rope",
            {"k": HEADS[:, :, :2]},
            r"k has shape \[1, 2, 2, 8\]; \[B, kv_heads, S, D\], here \[1, kv_heads, 4, 8\]",
        ),
        ("rope", {"cos": TABLE[0]}, r"cos has shape \[4, 8\]; \[B or 1, S, R\]"),
        (
            "rope",
            {"cos": TABLE[:, :1], "sin": TABLE[:, :1]},
            r"cos has shape \[1, 1, 8\]; .* here \[1 or 1, 4, an even",
        ),
        (
            "rope",
            {"cos": TABLE[..., :3], "sin": TABLE[..., :3]},
            r"cos has shape \[1, 4, 3\]; .* an even number up to 8\]",
        ),
        ("rope", {"sin": TABLE[..., :1]}, r"sin has shape \[1, 4, 1\]; \[1, 4, 8\], that of cos"),
        ("qk_norm_rope", {"k": HEADS[0]}, r"k has shape \[2, 4, 8\]; \[B, kv_heads, S, D\]"),
        ("qk_norm_rope", {"k_weight": W[:1]}, r"k_weight has shape \[1\]; \[8\], the last dimension"),
        (
            "low_rank_add",
            {"y_0": torch.ones(5, 16)},
            r"y_0 has shape \[5, 16\]; \[4, 16\], as rows of x and of b_0 have it,",
        ),
        ("low_rank_add", {"x": X[:1]}, r"y_0 has shape \[4, 16\]; \[1, 16\], as rows of x and of b_0 have it,"),
        ("low_rank_add", {"a_0": X[:1]}, r"a_0 has shape \[1, 8\]; \[2, 8\], as columns of b_0 and x have it,"),
        ("fused_linear_cross_entropy", {"hidden": X[0, 0]}, r"hidden is a scalar; \[..., H\]"),
        ("fused_linear_cross_entropy", {"weight": W}, r"weight has shape \[8\]; \[V, H\], here \[V, 8\],"),
        ("fused_linear_cross_entropy", {"weight": HEAD}, "weight is torch.float32; torch.float64, the type of hidden,"),
        ("fused_linear_cross_entropy", {"bias": torch.ones(11)}, "bias is torch.float32; torch.float64, the type of"),
        ("fused_linear_cross_entropy", {"bias": W}, r"bias has shape \[8\]; \[V\], here \[11\],"),
        ("fused_linear_cross_entropy", {"target": T[1:]}, "target has 3 elements; one for each of hidden's 4 rows"),
    ],
)
def test_shapes_that_would_broadcast_and_types_that_do_not_mix(op, changed, message):
    """In float64, which no kernel serves."""
    function, given = GIVEN[op]
    function(**in_float64(given))
    mixed = "is torch.float32" in message
    with pytest.raises(ValueError, match=f"^{op}: {message}.* is needed$"):
        function(**{**in_float64(given), **(changed if mixed else in_float64(changed))})


@pytest.mark.parametrize("function", [rope, qk_norm_rope])
def test_heads_of_three_dimensions_that_kernels_would_serve(function):
    """As after a forgotten batch: broadcast, they gave numbers."""
    weights = (W, W) if function is qk_norm_rope else ()
    with pytest.raises(
        ValueError, match=rf"{function.__name__}: q has shape \[2, 4, 8\]; \[B, heads, S, D\] is needed"
    ):
        function(HEADS[0], HEADS[0], *weights, TABLE, TABLE)


def test_projections_name_it_as_a_linear_layer_does():
    for x, *weights in (([1.0], GATE, GATE), (X.clone().requires_grad_(), [1.0], GATE)):
        with pytest.raises(TypeError, match=r"linear\(\): argument .* must be Tensor, not list"):
            projections(x, *weights)
