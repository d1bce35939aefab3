"""Experts, and the blocks and routers around them."""

from typing import Any

from bastile.models.known._form import Form, roles


def _experts(**variant: Any) -> dict[str, Any]:
    """activation: None is the module's own; alpha, limit: the attributes that hold them."""
    return {"activation": None, "interleaved": False, "has_bias": False, "alpha": None, "limit": None, **variant}


FORMS: tuple[Form, ...] = (
    # ---- experts -----------------------------------------------------------------------------------------------------
    Form(
        "experts",
        "down(activation(gate) * up), gate and up in halves",
        roles("num_experts gate_up_proj act_fn down_proj"),
        ("277c042d149a", "f05fef7ce67c", "82cae0b6228e"),
        _experts(),
        exact=True,
    ),
    Form(
        "experts",
        "the same in float32",
        roles("num_experts gate_up_proj down_proj act_fn"),
        ("20ada3649291",),
        _experts(),
        exact=True,
    ),
    Form(
        "experts",
        "the same, gate and up clamped",
        roles("num_experts gate_up_proj down_proj limit act_fn"),
        ("810298f3655f", "95b76c12e590"),
        _experts(limit="limit"),
        exact=True,
    ),
    Form(
        "experts",
        "down(silu(gate) * up), gate and up in halves, both clamped",
        roles("num_experts gate_up_proj down_proj swiglu_limit"),
        ("9bb31a2a1d89", "49668aa6a00e"),
        _experts(activation="silu", limit="swiglu_limit"),
        exact=True,
    ),
    Form(
        "experts",
        "gate and up in halves: (up + 1) gate sigmoid(alpha gate), both clamped",
        roles("num_experts gate_up_proj down_proj swiglu_limit swiglu_alpha"),
        ("0a53d6c6f93d", "f6e5264210ab"),
        _experts(activation="swiglu_oai", limit="swiglu_limit", alpha="swiglu_alpha"),
        exact=True,
    ),
    Form(
        "experts",
        "biases, gate and up interleaved: (up + 1) gate sigmoid(alpha gate), both clamped",
        roles("num_experts gate_up_proj gate_up_proj_bias down_proj down_proj_bias limit alpha"),
        ("7f2c6fd97455",),
        _experts(activation="swiglu_oai", interleaved=True, has_bias=True, limit="limit", alpha="alpha"),
        exact=True,
    ),
    Form(
        "experts",
        "the same, gate and up in halves",
        roles("num_experts gate_up_proj gate_up_proj_bias down_proj down_proj_bias limit alpha"),
        ("f40196269ebd",),
        _experts(activation="swiglu_oai", has_bias=True, limit="limit", alpha="alpha"),
        exact=True,
    ),
    # ---- experts whose inputs are weighted: the block, its router, and the experts, who get all tokens ---------------
    Form(
        "block of experts",
        "shared(x) + sum over experts of experts(x score), with scores of zero where they are not chosen",
        roles("hidden_dim router experts shared"),
        ("a8bb792eaef9",),
    ),
    Form("router", "sigmoid of the top_k logits, zero elsewhere", roles("top_k"), ("010130494e95",)),
    Form(
        "experts of all tokens",
        "down(up * activation(gate)), gate and up in halves, in batched products",
        roles("gate_up hidden_size activation down"),
        ("3bdf000152a4",),
    ),
)
