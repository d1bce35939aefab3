"""The forms of code that operators serve. No model type has a name here: whoever has the code has the form.

An entry is a formula, how its attributes are called in the order in which the code reads them, and what the operator
has to be told. Its fingerprints are of the texts that it has had in Transformers since 5.0; `python tools/forms.py`
lists those of a release beside them. A new text of a formula is one more fingerprint, after `bastile support --check`
of a type that has it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Form:
    #: norm, layer norm, gated norm, mlp, rotary, attention, attention with sinks, short convolution, gated delta rule,
    #: state space, layer, experts, block of experts, router, experts of all tokens, linear, linear across, adapted
    #: linear, 4-bit linear, 8-bit linear, head
    kind: str
    formula: str
    roles: tuple[str, ...]  # attributes of self
    fingerprints: tuple[str, ...]
    variant: Mapping[str, Any] = field(default_factory=dict)  # what the operator is told
    exact: bool = False  # attributes must have the roles' names
    #: Of code that calls modules one after another and says no more: role -> a pattern of its attribute's name.
    called: Mapping[str, str] = field(default_factory=dict)


def _roles(names: str) -> tuple[str, ...]:
    return tuple(names.split())


def _rotary(**variant: Any) -> dict[str, Any]:
    """arguments: what it is given, in this order, "freqs" a complex table; heads: their axis where it is not told;
    partial: whether the first elements of a head turn alone, or "last", the last."""
    usual = {"layout": "halves", "partial": False, "table": "whole", "casts": False, "is_backward": False}
    return {**usual, "arguments": "q k cos sin", "heads": 1, **variant}


def _gated(**variant: Any) -> dict[str, Any]:
    return {"gate_first": False, "promote": False, **variant}


def _experts(**variant: Any) -> dict[str, Any]:
    """activation: None is the module's own; alpha, limit: the attributes that hold them."""
    return {"activation": None, "interleaved": False, "has_bias": False, "alpha": None, "limit": None, **variant}


def _mlp(formula: str, roles: str, *fingerprints: str, **variant: Any) -> Form:
    """With a gate. casts: what the last layer is given is cast to its weight's type."""
    return Form("mlp", formula, _roles(roles), fingerprints, variant)


def _plain(formula: str, roles: str, *fingerprints: str, **variant: Any) -> Form:
    """An MLP without a gate. behind: the role of what is called last, if that is no role of its own."""
    layer = r"(?i)^(?!.*(conv|drop|norm|sample))"
    called = {"activation": "act|gelu", "up": layer, "down": layer}
    return Form("mlp", formula, _roles(roles), fingerprints, variant, called=called)


_HEADS = "head_dim q_norm q_proj k_norm k_proj v_proj layer_idx config training attention_dropout scaling"
_HEADS_FIRST = "head_dim q_proj k_proj v_proj q_norm k_norm layer_idx config training attention_dropout scaling"
_LAYER = _roles("input_norm attention attention_norm mlp")
_ADAPTED = "_check_forward_args disable_adapters merged base_layer"
_ADAPTER = "lora_B lora_dropout scaling _cast_input_dtype lora_variant merged_adapters get_base_layer lora_bias"

FORMS: tuple[Form, ...] = (
    # ---- norms: `casting` is that of bastile.ops.rms_norm ------------------------------------------------------------
    Form("norm", "weight * (x * rstd).to(x.dtype)", _roles("eps weight"), ("f563eea48f81",), {"casting": "llama"}),
    Form("norm", "(x * rstd).to(x.dtype) * weight", _roles("weight eps"), ("5c52b69882c0",), {"casting": "llama"}),
    Form(
        "norm",
        "weight * (x * rstd).to(weight.dtype)",
        _roles("eps weight"),
        ("2e1c34259597",),
        {"casting": "llama", "is_of_one_type": True},
    ),
    Form(
        "norm",
        "(x * rstd * (1 + weight)).to(x.dtype)",
        _roles("weight eps"),
        ("0d3caabf3fba", "69e2f4a34477"),
        {"casting": "gemma"},
    ),
    Form(
        "norm",
        "(weight * x * rstd).to(x.dtype)",
        _roles("eps weight"),
        ("a5638a92060e", "6fc35d370b78"),
        {"casting": "none"},
    ),
    Form(
        "norm",
        "(x * rstd * weight).to(x.dtype)",
        _roles("weight eps"),
        ("0c655a531f1e", "28159ca2cc34"),
        {"casting": "none"},
    ),
    Form(
        "norm",
        "(x * rstd * weight).to(x.dtype), or without weight",
        _roles("has_weight weight eps"),
        ("0dcc3719f45e",),
        {"casting": "none"},
    ),
    Form(
        "norm",
        "(x * rstd).to(x.dtype)",
        _roles("eps"),
        ("12cb1bda92f2", "ed705b2a1837", "80d5694c334b"),
        {"casting": "none"},
    ),
    Form(
        "norm",
        "(x * rstd).to(x.dtype) * weight, refusing other widths",
        _roles("width eps weight"),
        ("39f4c227c366",),
        {"casting": "llama"},
    ),
    Form(
        "norm",
        "torch.nn.functional.rms_norm(x, shape, weight, eps)",
        _roles("shape weight eps"),
        ("2ba3a3cb5009",),
        {"casting": "none", "is_of_one_type": True, "is_torchs": True},
    ),
    # ---- norms with a gate, silu where no attribute says it: before the norm or after it (gate_first), with a result
    # ---- of the input's type or of the promoted one of input and weight (promote)
    Form(
        "gated norm",
        "((weight * (x * rstd).to(x.dtype)) * activation(gate)).to(x.dtype)",
        _roles("eps weight activation"),
        ("9bf5d600b876",),
        _gated(),
    ),
    Form("gated norm", "the same with silu", _roles("eps weight"), ("4ebe39d462b4",), _gated()),
    Form(
        "gated norm",
        "(weight * (x * rstd) * activation(gate)).to(x.dtype)",
        _roles("eps weight activation"),
        ("a22571373f0d",),
        _gated(),
    ),
    Form(
        "gated norm",
        "u = x * silu(gate); weight * (u * rstd).to(x.dtype)",
        _roles("eps weight"),
        ("c61844a2f1ab",),
        _gated(gate_first=True, promote=True),
    ),
    Form(
        "gated norm",
        "the same in groups of columns",
        _roles("group eps weight"),
        ("340c4b51f8ca",),
        _gated(gate_first=True, promote=True),
    ),
    Form(
        "gated norm",
        "(weight * (x * rstd)).to(x.dtype), in so many groups of columns, silu(gate) before it or behind it",
        _roles("norm_first groups eps weight"),
        ("a087a4fbce11",),
        _gated(),
    ),
    Form(
        "gated norm",
        "the same, one position without its dimension",
        _roles("norm_first groups eps weight"),
        ("14ccd4a8b7f8",),
        _gated(squeezes=True),
    ),
    # ---- norms with a mean ------------------------------------------------------------------------------------------
    Form(
        "layer norm",
        "torch.nn.functional.layer_norm(x, shape, weight, bias, eps)",
        _roles("shape weight bias eps"),
        ("fe871c2b3c5c",),
        {"is_of_one_type": True, "is_torchs": True},
    ),
    Form("layer norm", "((x - mean) * rstd * weight).to(x.dtype)", _roles("eps weight"), ("bd4c57336900",)),
    Form(
        "layer norm",
        "torch.nn.functional.layer_norm(x.float(), shape, None, None, 1e-5).to(x.dtype)",
        _roles("shape"),
        ("d3fab12362eb",),
        {"fixed_eps": 1e-5},
    ),
    # ---- gated MLPs --------------------------------------------------------------------------------------------------
    Form(
        "mlp", "down(activation(gate(x)) * up(x))", _roles("down activation gate up"), ("953876bbcff7", "5d6e21c14783")
    ),
    Form("mlp", "down(activation(gate(x)) * up(x))", _roles("activation gate up down"), ("923f28481f32",)),
    Form("mlp", "down(silu(gate(x)) * up(x))", _roles("down gate up"), ("6c1021b3da3f",)),
    _mlp(
        "gate, up = gate_up(x).chunk(2); down(activation(gate) * up)",
        "gate_up activation down",
        "a1b728476cc8",
        "5355bea2a19f",
    ),
    _mlp("gate, up = gate_up(x).view(2, I); down(activation(gate) * up)", "gate_up activation down", "0d4e33447242"),
    _mlp("up, gate = up_gate(x).chunk(2); down(activation(gate) * up)", "up_gate activation down", "52072e911b9d"),
    _mlp("gate = activation(gate(x)); down(gate * up(x))", "activation gate down up", "22d8c7dbcdb5"),
    Form(
        "mlp",
        "dropout(down(activation(gate(x)) * up(x)))",
        _roles("down activation gate up dropout_out training"),
        ("0649a6c29cd3",),
    ),
    _mlp(
        "down(dropout(activation(gate(x)) * up(x)))", "activation gate up dropout down", "61a7b36c3b9a", "a9d285cac888"
    ),
    Form(
        "mlp",
        "down(dropout(activation(gate(x)) * up(x)).to(down.weight.dtype))",
        _roles("activation gate up dropout down"),
        ("df8b2f825e7f",),
        {"casts": True},
    ),
    Form("mlp", "down(norm(activation(gate(x)) * up(x)))", _roles("down norm activation gate up"), ("cb8d359dd80d",)),
    _mlp("scale * down(activation(gate(x)) * up(x))", "down activation gate up scale_out", "b0d8e4ef71f0"),
    Form(
        "mlp",
        "scale * down(up(x) * activation(scale * gate(x)))",
        _roles("up activation gate scale_gate down scale_out"),
        ("0f5c336ca802",),
    ),
    Form(
        "mlp",
        "down((activation(gate(x).float()) * up(x).float()).to(gate.dtype))",
        _roles("gate up activation down"),
        ("4c07feb5c727",),
    ),
    Form(
        "mlp",
        "gate, up = gate_up(x).chunk(2); down(dropout(activation(gate) * up))",
        _roles("gate_up down dropout activation"),
        ("9aa6d47f025e",),
    ),
    Form(
        "mlp",
        "down(activation(cut(gate(x)) where sparsity > 0) * up(x))",
        _roles("gate sparsity activation up down"),
        ("adb6a2f33b95",),
    ),
    Form(
        "mlp",
        "down(activation(min(gate(x), limit)) * clamp(up(x), limit))",
        _roles("gate limit up down activation"),
        ("36f68e0b613b",),
    ),
    Form(
        "mlp",
        "gate, up = gate_up(x).chunk(2), at most limit; down(gate * sigmoid(alpha * gate) * (up + 1))",
        _roles("gate_up limit alpha down"),
        ("1a353a3323c2",),
        {"activation": "swiglu_oai"},
    ),
    # ---- MLPs without a gate; drop, dropout_out: probabilities -------------------------------------------------------
    _plain("down(activation(up(x)))", "up activation down", "a826049cb143", "cc6bd33421fb"),
    _plain("down(activation(up(x)))", "down activation up", "8955bd60ffff"),
    _plain("down(activation(up(x)))", "activation up down", "0d49f3695a71"),
    _plain("behind(down(activation(up(x))))", "up activation down behind", "f57ec10addc0"),
    _plain("dropout(down(activation(up(x))))", "up activation down dropout_out training", "33fa2e284622"),
    _plain("down(dropout(activation(up(x))))", "down dropout activation up", "532d3e779787"),
    _plain("down(dropout(activation(up(x))))", "activation up drop training down", "1b74bf42a494"),
    _plain(
        "down(dropout(activation(up(x))).to(down.weight.dtype))",
        "up activation dropout down",
        "a78658cd145b",
        casts=True,
    ),
    _plain("behind(down(dropout(activation(up(x)))))", "up activation dropout down behind", "32470831e6d2"),
    _plain("dropout(down(dropout(activation(up(x)))))", "up activation dropout down", "adaf96ae40d1", behind="dropout"),
    _plain("dropout(down(dropout(...)))", "activation up drop training down dropout_out", "49df563a43e6"),
    _plain("dropout(down(dropout(...)))", "up activation drop training down dropout_out", "1006e1ef8d2c"),
    # ---- rotary functions: what pairs are (halves, or neighbours: interleaved), whether all of a head turns or its
    # ---- first elements do (partial), what the tables hold, whether the result gets the input's type (casts)
    Form("rotary", "x cos + rotate_half(x) sin", (), ("1a10a7e371ea",), _rotary()),
    Form(
        "rotary",
        "the same of the head's first elements",
        (),
        ("aeac68b5b6bb", "ecf24c4bd51e", "49646629cf91", "d1d2c5418127"),
        _rotary(partial=True),
    ),
    Form(
        "rotary",
        "(x cos + rotate_half(x) sin).to(x.dtype)",
        (),
        ("0fbc4d5b4e43", "1b2b1f044406", "434dc4b80705"),
        _rotary(casts=True),
    ),
    Form(
        "rotary",
        "halves a, b: a cos - b sin, b cos + a sin, of tables for half a head",
        (),
        ("dd1efc02b483", "48cd24c660ed"),
        _rotary(table="half"),
    ),
    Form("rotary", "neighbours", (), ("2eebd2cf32a8",), _rotary(layout="interleaved")),
    Form(
        "rotary",
        "neighbours of the head's first elements",
        (),
        ("21b2bc52edb4",),
        _rotary(layout="interleaved", partial=True),
    ),
    Form(
        "rotary",
        "neighbours, in the input's type",
        (),
        ("d08892ab3145", "1283e0ce1f6a"),
        _rotary(layout="interleaved", casts=True),
    ),
    Form(
        "rotary",
        "neighbours, each element of the tables' first half twice",
        (),
        ("b4c24cb4b8d5",),
        _rotary(layout="interleaved", table="first half, each twice"),
    ),
    Form(
        "rotary",
        "the same of the head's first elements",
        (),
        ("cf39a4d4d572",),
        _rotary(layout="interleaved", partial=True, table="first half, each twice"),
    ),
    Form(
        "rotary",
        "neighbours, each element of the tables' first half twice, in the input's type",
        (),
        ("598345d4c8f4",),
        _rotary(layout="interleaved", casts=True, table="first half, each twice"),
    ),
    Form(
        "rotary",
        "neighbours in, halves out, of the tables' first half",
        (),
        ("7584a7d61e01",),
        _rotary(layout="interleaved_to_halves", table="first half, each twice"),
    ),
    Form(
        "rotary",
        "neighbours in, halves out, of whole tables",
        (),
        ("6e6106f7c96e",),
        _rotary(layout="interleaved_to_halves"),
    ),
    Form("rotary", "of one tensor: x cos + rotate_half(x) sin", (), ("1906d80fd6ec",), _rotary(arguments="x cos sin")),
    Form(
        "rotary",
        "of one tensor: neighbours, of tables for half a head, with heads behind positions",
        (),
        ("e72c60944106",),
        _rotary(layout="interleaved", table="half", arguments="x sin cos", heads=2),
    ),
    Form(
        "rotary",
        "of one tensor: neighbours of the head's last elements, of tables for half of these, in the input's type",
        (),
        ("1a79c67e87bc",),
        _rotary(layout="interleaved", table="half", casts=True, partial="last", arguments="x cos sin"),
    ),
    Form(
        "rotary",
        "neighbours as complex numbers, in the input's type",
        (),
        ("622a2c7aaa83",),
        _rotary(layout="interleaved", table="half", casts=True, arguments="q k freqs"),
    ),
    Form(
        "rotary",
        "the same with heads behind positions",
        (),
        ("7a24db7a0fc1",),
        _rotary(layout="interleaved", table="half", casts=True, arguments="q k freqs", heads=2),
    ),
    Form(
        "rotary",
        "the other way round: x cos - rotate_half(x) sin",
        (),
        ("b5d05d020e10",),
        _rotary(is_backward=True),
    ),
    Form(
        "rotary",
        "(x cos + rotate_half(x) sin).to(x.dtype) of [positions, heads, dim]",
        (),
        ("4898c341a604",),
        _rotary(casts=True, heads=-2),
    ),
    # ---- attention whose queries and keys are normed head by head and then turned ------------------------------------
    Form(
        "attention",
        "rotary(q_norm(q), k_norm(k)), the cache, attention with a window",
        _roles(f"{_HEADS} sliding_window o_proj"),
        ("03d5b2e6db91", "ba2936cc0076", "4c4f2d415f16", "813694b4ee86"),
        exact=True,
    ),
    Form(
        "attention",
        "the same without a window",
        _roles(f"{_HEADS} o_proj"),
        ("249a686ae47a", "84f32a50584e", "116a618bed38", "cc045bc3409d"),
        exact=True,
    ),
    Form(
        "attention",
        "the same, normed behind all projections, with a window",
        _roles(f"{_HEADS_FIRST} sliding_window o_proj"),
        ("3c3340ff3483", "aa12e12d2d68", "ff989dde29f4", "c0f8b6d173d2"),
        exact=True,
    ),
    Form(
        "attention",
        "the same, normed behind all projections, without a window",
        _roles(f"{_HEADS_FIRST} o_proj"),
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
    # ---- decoder layers ----------------------------------------------------------------------------------------------
    Form("layer", "x + attention(norm(x)), then x + mlp(norm(x))", _LAYER, ("047e56b1298f",), {"is_tuple": False}),
    Form("layer", "the same of an MLP that returns a tuple", _LAYER, ("b142a2158fdb",), {"is_tuple": True}),
    Form(
        "layer",
        "x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))",
        _roles("input_norm attention after_attention attention_norm mlp after_mlp"),
        ("670b4a254a83",),
        {"is_tuple": False},
    ),
    # ---- experts -----------------------------------------------------------------------------------------------------
    Form(
        "experts",
        "down(activation(gate) * up), gate and up in halves",
        _roles("num_experts gate_up_proj act_fn down_proj"),
        ("277c042d149a", "f05fef7ce67c", "82cae0b6228e"),
        _experts(),
        exact=True,
    ),
    Form(
        "experts",
        "the same in float32",
        _roles("num_experts gate_up_proj down_proj act_fn"),
        ("20ada3649291",),
        _experts(),
        exact=True,
    ),
    Form(
        "experts",
        "the same, gate and up clamped",
        _roles("num_experts gate_up_proj down_proj limit act_fn"),
        ("810298f3655f", "95b76c12e590"),
        _experts(limit="limit"),
        exact=True,
    ),
    Form(
        "experts",
        "down(silu(gate) * up), gate and up in halves, both clamped",
        _roles("num_experts gate_up_proj down_proj swiglu_limit"),
        ("9bb31a2a1d89", "49668aa6a00e"),
        _experts(activation="silu", limit="swiglu_limit"),
        exact=True,
    ),
    Form(
        "experts",
        "gate and up in halves: (up + 1) gate sigmoid(alpha gate), both clamped",
        _roles("num_experts gate_up_proj down_proj swiglu_limit swiglu_alpha"),
        ("0a53d6c6f93d", "f6e5264210ab"),
        _experts(activation="swiglu_oai", limit="swiglu_limit", alpha="swiglu_alpha"),
        exact=True,
    ),
    Form(
        "experts",
        "biases, gate and up interleaved: (up + 1) gate sigmoid(alpha gate), both clamped",
        _roles("num_experts gate_up_proj gate_up_proj_bias down_proj down_proj_bias limit alpha"),
        ("7f2c6fd97455",),
        _experts(activation="swiglu_oai", interleaved=True, has_bias=True, limit="limit", alpha="alpha"),
        exact=True,
    ),
    Form(
        "experts",
        "the same, gate and up in halves",
        _roles("num_experts gate_up_proj gate_up_proj_bias down_proj down_proj_bias limit alpha"),
        ("f40196269ebd",),
        _experts(activation="swiglu_oai", has_bias=True, limit="limit", alpha="alpha"),
        exact=True,
    ),
    # ---- experts whose inputs are weighted: the block, its router, and the experts, who get all tokens ---------------
    Form(
        "block of experts",
        "shared(x) + sum over experts of experts(x score), with scores of zero where they are not chosen",
        _roles("hidden_dim router experts shared"),
        ("a8bb792eaef9",),
    ),
    Form("router", "sigmoid of the top_k logits, zero elsewhere", _roles("top_k"), ("010130494e95",)),
    Form(
        "experts of all tokens",
        "down(up * activation(gate)), gate and up in halves, in batched products",
        _roles("gate_up hidden_size activation down"),
        ("3bdf000152a4",),
    ),
    # ---- linear layers of classes of their own -----------------------------------------------------------------------
    Form("linear", "x @ weight.T + bias", _roles("weight bias"), ("390f1a9ab032",), exact=True),
    Form("linear across", "bias + x @ weight", _roles("nf bias weight"), ("9177a6c532a9",), exact=True),
    # ---- linear layers that are more than a weight: of PEFT 0.18 to 0.21, and of bitsandbytes ------------------------
    Form(
        "adapted linear",
        "base(x) + scale lora_B(lora_A(dropout(x))), the active adapters' in turn",
        _roles(f"{_ADAPTED} _mixed_batch_forward lora_A active_adapters {_ADAPTER} fan_in_fan_out"),
        ("06a50533cd21", "3152c3694447"),
        exact=True,
    ),
    Form(
        "adapted linear",
        "the same of a base in 4 or 8 bits",
        _roles(f"{_ADAPTED} active_adapters lora_A {_ADAPTER}"),
        ("7226307fd10b", "ecc7a59ff7d0"),
        exact=True,
    ),
    Form(
        "4-bit linear",
        "bitsandbytes.matmul_4bit(x, weight, bias)",
        _roles("weight support_avx512bf16_for_cpu training compute_type_is_set compute_dtype bias"),
        ("1c4aaf1c7bd9",),
        exact=True,
    ),
    Form(
        "4-bit linear",
        "the same of bitsandbytes 0.49",
        _roles("weight support_avx512bf16_for_cpu training bias compute_type_is_set compute_dtype"),
        ("8752534f5290",),
        exact=True,
    ),
    Form(
        "4-bit linear",
        "the same of bitsandbytes 0.46 to 0.48",
        _roles("bias compute_type_is_set compute_dtype weight"),
        ("9bcdb6d957dc", "210ddd266e44"),
        exact=True,
    ),
    Form(
        "8-bit linear",
        "bitsandbytes.matmul(x, weight, bias, state)",
        _roles("state training weight bias"),
        ("79d33821855e",),
        exact=True,
    ),
    # ---- output heads ------------------------------------------------------------------------------------------------
    Form(
        "head",
        "logits of the last states, loss_function(logits, labels, vocab_size)",
        _roles("model lm_head loss_function config"),
        ("03927502174b", "ed25550da86c"),
    ),
    Form(
        "head",
        "the same, and the router's loss",
        _roles("config model lm_head loss_function vocab_size num_experts num_experts_per_tok router_aux_loss_coef"),
        ("f37875b4bd6d", "cbf11dd0285f", "e1651e0a3ab1"),
        exact=True,
    ),
)

KNOWN: dict[str, Form] = {fingerprint: form for form in FORMS for fingerprint in form.fingerprints}
