"""The table of families: one row per model type of Transformers. A new family is a row here; code only where its
modules compute something that no field below describes."""

from dataclasses import dataclass

# The operators that go into models, in the order in which they are reported.
OPERATORS = ("rms_norm", "swiglu", "rope", "fused_linear_cross_entropy", "recompute")


@dataclass(frozen=True)
class Family:
    """Where a family's pieces are in Transformers, and which variant of each operator they compute."""

    model_type: str  # as in the model's config
    since: str  # the first Transformers release it is tested with
    module: str  # the module all names below are in
    norm_class: str
    mlp_class: str
    attention_class: str  # its forward calls rotary_function by its global name
    rotary_function: str
    causal_lm_class: str
    norm_casting: str = "llama"  # as in bastile.ops.rms_norm.rms_norm
    norm_eps: str = "variance_epsilon"  # the norm's attribute that holds epsilon
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    activation: str = "act_fn"
    rotary_interleaved: bool = False
    backbone: str = "model"
    backbone_class: str | None = None  # None: causal_lm_class with Model in the place of ForCausalLM
    head: str = "lm_head"


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="qwen3",
            since="5.0.0",
            module="transformers.models.qwen3.modeling_qwen3",
            norm_class="Qwen3RMSNorm",
            mlp_class="Qwen3MLP",
            attention_class="Qwen3Attention",
            rotary_function="apply_rotary_pos_emb",
            causal_lm_class="Qwen3ForCausalLM",
        ),
    )
}
