"""Norms, with and without a mean or a gate."""

from typing import Any

from bastile.models.known._form import Form, roles


def _gated(**variant: Any) -> dict[str, Any]:
    return {"gate_first": False, "promote": False, **variant}


FORMS: tuple[Form, ...] = (
    # ---- norms: `casting` is that of bastile.ops.rms_norm ------------------------------------------------------------
    Form("norm", "weight * (x * rstd).to(x.dtype)", roles("eps weight"), ("f563eea48f81",), {"casting": "llama"}),
    Form("norm", "(x * rstd).to(x.dtype) * weight", roles("weight eps"), ("5c52b69882c0",), {"casting": "llama"}),
    Form(
        "norm",
        "weight * (x * rstd).to(weight.dtype)",
        roles("eps weight"),
        ("2e1c34259597",),
        {"casting": "llama", "is_of_one_type": True},
    ),
    Form(
        "norm",
        "(x * rstd * (1 + weight)).to(x.dtype)",
        roles("weight eps"),
        ("0d3caabf3fba", "69e2f4a34477"),
        {"casting": "gemma"},
    ),
    Form(
        "norm",
        "(weight * x * rstd).to(x.dtype)",
        roles("eps weight"),
        ("a5638a92060e", "6fc35d370b78"),
        {"casting": "none"},
    ),
    Form(
        "norm",
        "(x * rstd * weight).to(x.dtype)",
        roles("weight eps"),
        ("0c655a531f1e", "28159ca2cc34"),
        {"casting": "none"},
    ),
    Form(
        "norm",
        "(x * rstd * weight).to(x.dtype), or without weight",
        roles("has_weight weight eps"),
        ("0dcc3719f45e",),
        {"casting": "none"},
    ),
    Form(
        "norm",
        "(x * rstd).to(x.dtype)",
        roles("eps"),
        ("12cb1bda92f2", "ed705b2a1837", "80d5694c334b"),
        {"casting": "none"},
    ),
    Form(
        "norm",
        "(x * rstd).to(x.dtype) * weight, refusing other widths",
        roles("width eps weight"),
        ("39f4c227c366",),
        {"casting": "llama"},
    ),
    Form(
        "norm",
        "torch.nn.functional.rms_norm(x, shape, weight, eps)",
        roles("shape weight eps"),
        ("2ba3a3cb5009",),
        {"casting": "none", "is_of_one_type": True, "is_torchs": True},
    ),
    # ---- norms with a gate, silu where no attribute says it: before the norm or after it (gate_first), with a result
    # ---- of the input's type or of the promoted one of input and weight (promote)
    Form(
        "gated norm",
        "((weight * (x * rstd).to(x.dtype)) * activation(gate)).to(x.dtype)",
        roles("eps weight activation"),
        ("9bf5d600b876",),
        _gated(),
    ),
    Form("gated norm", "the same with silu", roles("eps weight"), ("4ebe39d462b4",), _gated()),
    Form(
        "gated norm",
        "(weight * (x * rstd) * activation(gate)).to(x.dtype)",
        roles("eps weight activation"),
        ("a22571373f0d",),
        _gated(),
    ),
    Form(
        "gated norm",
        "u = x * silu(gate); weight * (u * rstd).to(x.dtype)",
        roles("eps weight"),
        ("c61844a2f1ab",),
        _gated(gate_first=True, promote=True),
    ),
    Form(
        "gated norm",
        "the same in groups of columns",
        roles("group eps weight"),
        ("340c4b51f8ca",),
        _gated(gate_first=True, promote=True),
    ),
    Form(
        "gated norm",
        "(weight * (x * rstd)).to(x.dtype), in so many groups of columns, silu(gate) before it or behind it",
        roles("norm_first groups eps weight"),
        ("a087a4fbce11",),
        _gated(),
    ),
    Form(
        "gated norm",
        "the same, one position without its dimension",
        roles("norm_first groups eps weight"),
        ("14ccd4a8b7f8",),
        _gated(squeezes=True),
    ),
    # ---- norms with a mean ------------------------------------------------------------------------------------------
    Form(
        "layer norm",
        "torch.nn.functional.layer_norm(x, shape, weight, bias, eps)",
        roles("shape weight bias eps"),
        ("fe871c2b3c5c",),
        {"is_of_one_type": True, "is_torchs": True},
    ),
    Form("layer norm", "((x - mean) * rstd * weight).to(x.dtype)", roles("eps weight"), ("bd4c57336900",)),
    Form(
        "layer norm",
        "torch.nn.functional.layer_norm(x.float(), shape, None, None, 1e-5).to(x.dtype)",
        roles("shape"),
        ("d3fab12362eb",),
        {"fixed_eps": 1e-5},
    ),
)
