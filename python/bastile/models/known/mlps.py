"""MLPs, with a gate and without."""

from typing import Any

from bastile.models.known._form import Form, roles


def _mlp(formula: str, names: str, *fingerprints: str, **variant: Any) -> Form:
    """With a gate. casts: what the last layer is given is cast to its weight's type."""
    return Form("mlp", formula, roles(names), fingerprints, variant)


def _plain(formula: str, names: str, *fingerprints: str, **variant: Any) -> Form:
    """An MLP without a gate. behind: the role of what is called last, if that is no role of its own."""
    layer = r"(?i)^(?!.*(conv|drop|norm|sample))"
    called = {"activation": "act|gelu", "up": layer, "down": layer}
    return Form("mlp", formula, roles(names), fingerprints, variant, called=called)


FORMS: tuple[Form, ...] = (
    # ---- gated MLPs --------------------------------------------------------------------------------------------------
    Form(
        "mlp", "down(activation(gate(x)) * up(x))", roles("down activation gate up"), ("953876bbcff7", "5d6e21c14783")
    ),
    Form("mlp", "down(activation(gate(x)) * up(x))", roles("activation gate up down"), ("923f28481f32",)),
    Form("mlp", "down(silu(gate(x)) * up(x))", roles("down gate up"), ("6c1021b3da3f",)),
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
        roles("down activation gate up dropout_out training"),
        ("0649a6c29cd3",),
    ),
    _mlp(
        "down(dropout(activation(gate(x)) * up(x)))", "activation gate up dropout down", "61a7b36c3b9a", "a9d285cac888"
    ),
    Form(
        "mlp",
        "down(dropout(activation(gate(x)) * up(x)).to(down.weight.dtype))",
        roles("activation gate up dropout down"),
        ("df8b2f825e7f",),
        {"casts": True},
    ),
    Form("mlp", "down(norm(activation(gate(x)) * up(x)))", roles("down norm activation gate up"), ("cb8d359dd80d",)),
    _mlp("scale * down(activation(gate(x)) * up(x))", "down activation gate up scale_out", "b0d8e4ef71f0"),
    Form(
        "mlp",
        "scale * down(up(x) * activation(scale * gate(x)))",
        roles("up activation gate scale_gate down scale_out"),
        ("0f5c336ca802",),
    ),
    Form(
        "mlp",
        "down((activation(gate(x).float()) * up(x).float()).to(gate.dtype))",
        roles("gate up activation down"),
        ("4c07feb5c727",),
    ),
    Form(
        "mlp",
        "gate, up = gate_up(x).chunk(2); down(dropout(activation(gate) * up))",
        roles("gate_up down dropout activation"),
        ("9aa6d47f025e",),
    ),
    Form(
        "mlp",
        "down(activation(cut(gate(x)) where sparsity > 0) * up(x))",
        roles("gate sparsity activation up down"),
        ("adb6a2f33b95",),
    ),
    Form(
        "mlp",
        "down(activation(min(gate(x), limit)) * clamp(up(x), limit))",
        roles("gate limit up down activation"),
        ("36f68e0b613b",),
    ),
    Form(
        "mlp",
        "gate, up = gate_up(x).chunk(2), at most limit; down(gate * sigmoid(alpha * gate) * (up + 1))",
        roles("gate_up limit alpha down"),
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
)
