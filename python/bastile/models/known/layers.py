"""Decoder layers, and what they mix tokens by: attention, convolutions, recurrences."""

from bastile.models.known._form import Form, roles

_HEADS = "head_dim q_norm q_proj k_norm k_proj v_proj layer_idx config training attention_dropout scaling"
_HEADS_FIRST = "head_dim q_proj k_proj v_proj q_norm k_norm layer_idx config training attention_dropout scaling"
_LAYER = roles("input_norm attention attention_norm mlp")

FORMS: tuple[Form, ...] = (
    # ---- attention whose queries and keys are normed head by head and then turned ------------------------------------
    Form(
        "attention",
        "rotary(q_norm(q), k_norm(k)), the cache, attention with a window",
        roles(f"{_HEADS} sliding_window o_proj"),
        ("03d5b2e6db91", "ba2936cc0076", "4c4f2d415f16", "813694b4ee86"),
        exact=True,
    ),
    Form(
        "attention",
        "the same without a window",
        roles(f"{_HEADS} o_proj"),
        ("249a686ae47a", "84f32a50584e", "116a618bed38", "cc045bc3409d"),
        exact=True,
    ),
    Form(
        "attention",
        "the same, normed behind all projections, with a window",
        roles(f"{_HEADS_FIRST} sliding_window o_proj"),
        ("3c3340ff3483", "aa12e12d2d68", "ff989dde29f4", "c0f8b6d173d2"),
        exact=True,
    ),
    Form(
        "attention",
        "the same, normed behind all projections, without a window",
        roles(f"{_HEADS_FIRST} o_proj"),
        ("05db00e3e6cb", "c49f776879bb", "b04e302f7264", "1f503796d6cb"),
        exact=True,
    ),
    # ---- what attends with a sink, by the one name that it has in Transformers --------------------------------------
    Form(
        "attention with sinks",
        "softmax([scaling q k^T + mask, sinks]) without its last column, v",
        (),
        ("1d1d1bdaa110", "09b0983f4830", "77de5c2f7ab9"),
    ),
    Form(
        "attention with sinks",
        "the same as softmax(scaling q k^T + mask) sigmoid(lse - sinks), v",
        (),
        ("fb7003e82077",),
    ),
    # ---- what mixes neighbouring tokens before a recurrence ----------------------------------------------------------
    Form(
        "short convolution",
        "activation(conv1d(x, weight, bias)), of weight's type, in x's",
        (),
        ("bc2ec805c833",),
    ),
    Form(
        "gated delta rule",
        "S := exp(g) S, S := S + beta k (v - S^T k)^T, y = S^T q / sqrt(K), by chunks, in float32",
        (),
        ("96631ab16f62", "e7286ff9f928"),
    ),
    Form(
        "state space",
        "S := exp(dt A) S + dt B x^T, y = S^T C + D x, of dt = clamp(softplus(dt + bias)), by chunks, in float32",
        (),
        ("7e90737673ef", "a450b31b6a09"),
    ),
    Form("fused state space", "None: not without the package that has one kernel for it", (), ("52031a2ad3b7",)),
    # ---- decoder layers ----------------------------------------------------------------------------------------------
    Form("layer", "x + attention(norm(x)), then x + mlp(norm(x))", _LAYER, ("047e56b1298f",), {"is_tuple": False}),
    Form("layer", "the same of an MLP that returns a tuple", _LAYER, ("b142a2158fdb",), {"is_tuple": True}),
    Form(
        "layer",
        "x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))",
        roles("input_norm attention after_attention attention_norm mlp after_mlp"),
        ("670b4a254a83",),
        {"is_tuple": False},
    ),
)
