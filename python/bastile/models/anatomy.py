"""What a type's text model is made of, by the forms of its code: for what has to know the model's parts by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bastile.models import loading
from bastile.models.attention import sites as attention_sites
from bastile.models.norm import norms_of
from bastile.models.rotary import layout
from bastile.models.sites import Found, ModelFile, file_of, sites
from bastile.models.table import OPERATORS
from bastile.ops.rms_norm import Casting


@dataclass(frozen=True)
class Anatomy:
    """The names of a decoder's parts, of whose classes the file's first ones count."""

    model_type: str
    operators: tuple[str, ...]  # those that have a place
    backbone: str
    head: str
    norm_casting: Casting
    layer: dict[str, str] = field(default_factory=dict)  # input_norm, attention, attention_norm, mlp
    mlp: dict[str, str] = field(default_factory=dict)  # gate, up, down
    attention: dict[str, str] = field(default_factory=dict)  # q_norm, k_norm
    experts: Mapping[str, Any] = field(default_factory=dict)  # their form's variant
    #: How the operators read heads and tables: see models/rotary.py.
    rotary: dict[str, Any] = field(
        default_factory=lambda: {"layout": "halves", "half_tables": False, "keep_type": False}
    )


def anatomy(model_type: str) -> Anatomy | None:
    """Of a type that is a causal language model of layers whose code is known; None for any other."""
    try:
        names = loading.import_type(model_type)
    except ImportError:
        return None
    for name in names:
        file = file_of(name)
        head, layer = _first(file, "head"), _first(file, "layer")
        norms = norms_of(file)
        if head is None or layer is None or not norms:
            continue
        mlp, experts = _first(file, "mlp"), _first(file, "experts")
        rotary = next(file.functions("rotary"), None)
        placed = {site.operator for site in sites(file, OPERATORS)}
        has_heads_norm = any(True for _ in attention_sites(file))
        return Anatomy(
            model_type,
            tuple(operator for operator in OPERATORS if operator in placed),
            head.names["model"],
            head.names["lm_head"],
            norms[0].casting or "none",
            layer.names,
            {} if mlp is None else mlp.names,
            {"q_norm": "q_norm", "k_norm": "k_norm"} if has_heads_norm else {},
            {} if experts is None else experts.form.variant,
            **({} if rotary is None else {"rotary": layout(rotary)}),
        )
    return None


def _first(file: ModelFile, kind: str) -> Found | None:
    return next(file.forwards(kind), None)
