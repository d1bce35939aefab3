"""The operators that go into models.

A new operator is a row here, its parameter in bastile.apply and, if one model can have it, bastile.apply_to_model, and
a module with `sites(file)`, which finds its places. What a piece of a model computes is known by its code:
models/known."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Operator:
    module: str  # of bastile.models, which finds its places
    summary: str  # what it does in a model, for help texts
    looks_like: str  # a pattern of names of classes and functions that may be its: for telling what stays stock
    reads: str = ""  # likewise, of an attribute that such code reads
    needs: tuple[str, ...] = ()  # the operators that it fuses: without them it is not put in
    of_a_model: bool = True  # whether one model can have it alone, by bastile.apply_to_model
    on_request: bool = False  # left out where it is not asked for: it gains something at the price of something else


# By the names that bastile.apply takes, in the order in which they are reported. Where two replace the same method of
# one model, the later one calls the earlier one for what it does not serve itself.
OPERATORS: dict[str, Operator] = {
    "rms_norm": Operator("norm", "RMSNorm", r"Norm$"),
    "swiglu": Operator("mlp", "the MLP, whose activation may have a gate", r"MLP$"),
    "rope": Operator("rotary", "rotary embedding of queries and keys", r"^apply_.*rotary"),
    "fused_linear_cross_entropy": Operator(
        "causal_lm", "output head and loss at once, without logits", r"ForCausalLM$"
    ),
    "qk_norm_rope": Operator(
        "attention",
        "norm and rotary embedding of queries and keys in one pass",
        r"Attention$",
        reads="norm",
        needs=("rms_norm", "rope"),
    ),
    "add_rms_norm": Operator(
        "decoder", "the residual's addition and the norm after it in one pass", r"DecoderLayer$", needs=("rms_norm",)
    ),
    "moe_experts": Operator(
        "experts", "the experts of a mixture of experts, sorted and multiplied in groups", r"Experts$"
    ),
    "sink_attention": Operator(
        "sinks", "attention with sinks, by PyTorch's flash attention", r"^eager_attention_forward$", reads="sinks"
    ),
    "masked_attention": Operator(
        "masked_attention",
        "attention of padded, packed and windowed batches, without a mask of all pairs of tokens",
        r"^masks of ",
    ),
    "causal_conv1d": Operator(
        "short_convolution", "the short convolution before a recurrence, with its SiLU", r"^causal_conv1d_fn$"
    ),
    "gated_delta_rule": Operator(
        "delta_rule", "linear attention by the gated delta rule, over chunks", r"^torch_chunk_gated_delta_rule$"
    ),
    "mamba2_scan": Operator("state_space", "Mamba-2's state space, over chunks", r"^mamba2_chunk_scan$"),
    "lora_linear": Operator(
        "adapters", "linear layers and experts with PEFT's LoRA adapters, on a base in 4 bits too", r"^Linear", "lora_A"
    ),
    "autocast_linear": Operator(
        "linear", "linear layers of float32 under autocast, with gradients in float32", r"^Linear$", of_a_model=False
    ),
    "layer_norm": Operator("layer_norm", "LayerNorm", r"LayerNorm$"),
    "gated_rms_norm": Operator(
        "gated_norm", "the RMSNorm with a gate of linear attention and of Mamba-2", r"NormGated$"
    ),
    "chunked_attention": Operator(
        "chunked_attention",
        "the attention of vision and audio towers, for all images or windows of one size at once",
        r"Attention$",
        reads="cu_seqlens",
    ),
    "adamw": Operator(
        "optimizer", "the AdamW that a Trainer makes, with its clipping in one pass", r"^Trainer$", of_a_model=False
    ),
    "frozen_bf16": Operator(
        "frozen_bf16",
        "frozen weights of float32 kept in bfloat16 while a Trainer trains, where that loses nothing",
        r"^Trainer$",
        needs=("autocast_linear",),
        of_a_model=False,
    ),
    "recompute": Operator("backbone", "activations made again in the backward pass instead of kept", r"Model$"),
    "offload_checkpoints": Operator(
        "offloading", "inputs of checkpointed layers kept in the host's memory", r"Model$", on_request=True
    ),
    "cuda_graphs": Operator(
        "graphs",
        "layers of a training step as CUDA graphs, and calls for one token of generated text",
        r"Model$",
    ),
    "padding_free": Operator(
        "padding_free",
        "batches without their padding, where nobody reads what layers make of it",
        r"Model$",
        needs=("masked_attention",),
    ),
}

#: Those that run all layers, and compute nothing of their own.
OF_BACKBONES = frozenset({"recompute", "offload_checkpoints", "cuda_graphs", "padding_free"})
#: Those that bastile.apply puts in where nothing else is said.
USUAL = tuple(name for name, operator in OPERATORS.items() if not operator.on_request)
