"""Three families, whose pieces the tests look at by name. Bastile itself knows no such name."""

from collections.abc import Iterable
from dataclasses import dataclass

from bastile.models.table import OPERATORS, USUAL

#: The field of Family that says where an operator goes. lora_linear, which goes into PEFT's classes, has none.
PLACES = {
    "rms_norm": "norm_class",
    "swiglu": "mlp_class",
    "rope": "rotary_function",
    "fused_linear_cross_entropy": "causal_lm_class",
    "qk_norm_rope": "q_norm",
    "add_rms_norm": "layer_class",
    "moe_experts": "experts_class",
    "sink_attention": "sinks_function",
    "masked_attention": "mask_function",
    "recompute": "backbone_class",
    "offload_checkpoints": "backbone_class",
    "cuda_graphs": "backbone_class",
    "padding_free": "unpadded_class",
}


@dataclass(frozen=True)
class Family:
    """Where a family's pieces are in Transformers, and which variant of each operator they compute."""

    model_type: str  # as in the model's config
    since: str  # the first Transformers release it is tested with
    module: str  # the module all names below are in
    norm_class: str
    attention_class: str  # its forward calls rotary_function by its global name
    rotary_function: str
    causal_lm_class: str
    backbone_class: str
    layer_class: str | None = None  # its forward is norm, attention, addition, norm, MLP, addition
    layer_mlp_is_tuple: bool = False  # the layer's MLP returns its output and something more
    mlp_class: str | None = None
    experts_class: str | None = None
    sinks_function: str | None = None  # what attends with sinks
    mask_function: str | None = "create_causal_mask"  # by which backbone_class makes its masks
    router_loss: bool = False  # its causal_lm_class adds a loss of the router's
    norm_eps: str = "variance_epsilon"  # the norm's attribute that holds epsilon
    q_norm: str | None = None  # the attention's attributes that norm each head of queries and keys
    k_norm: str | None = None
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    activation: str = "act_fn"
    backbone: str = "model"
    head: str = "lm_head"

    @property
    def unpadded_class(self) -> str | None:
        """The backbone, where batches can go through it without their padding."""
        return self.backbone_class if self.mask_function or self.sinks_function else None

    @property
    def operators(self) -> tuple[str, ...]:
        """The usual ones that have a place in this family."""
        return tuple(name for name in self._placed if name in USUAL)

    @property
    def _placed(self) -> tuple[str, ...]:
        return tuple(name for name in OPERATORS if name in PLACES and getattr(self, PLACES[name]) is not None)

    def patches(self, operators: Iterable[str] | None = None) -> list[str]:
        """The names of these operators' patches (None: of the usual ones) in this family, such as "rms_norm_qwen3"."""
        wanted = USUAL if operators is None else operators
        return [f"{op}_{self.model_type}" for op in self._placed if op in wanted]


def everywhere(patches: Iterable[str], family: str) -> list[str]:
    """These names of a family's patches, and of what bastile.apply() puts into PyTorch's linear layers beside."""
    have = {*patches, f"autocast_linear_{family}"}
    return [name for operator in OPERATORS if (name := f"{operator}_{family}") in have]


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            since="5.0.0",
            module="transformers.models.llama.modeling_llama",
            norm_class="LlamaRMSNorm",
            attention_class="LlamaAttention",
            rotary_function="apply_rotary_pos_emb",
            causal_lm_class="LlamaForCausalLM",
            backbone_class="LlamaModel",
            layer_class="LlamaDecoderLayer",
            mlp_class="LlamaMLP",
        ),
        Family(
            model_type="qwen3",
            since="5.0.0",
            module="transformers.models.qwen3.modeling_qwen3",
            norm_class="Qwen3RMSNorm",
            attention_class="Qwen3Attention",
            rotary_function="apply_rotary_pos_emb",
            causal_lm_class="Qwen3ForCausalLM",
            backbone_class="Qwen3Model",
            layer_class="Qwen3DecoderLayer",
            mlp_class="Qwen3MLP",
            q_norm="q_norm",
            k_norm="k_norm",
        ),
        Family(
            model_type="gpt_oss",
            since="5.0.0",
            module="transformers.models.gpt_oss.modeling_gpt_oss",
            norm_class="GptOssRMSNorm",
            attention_class="GptOssAttention",
            rotary_function="apply_rotary_pos_emb",
            causal_lm_class="GptOssForCausalLM",
            router_loss=True,
            backbone_class="GptOssModel",
            layer_class="GptOssDecoderLayer",
            layer_mlp_is_tuple=True,
            experts_class="GptOssExperts",
            sinks_function="eager_attention_forward",
            mask_function=None,
        ),
    )
}
