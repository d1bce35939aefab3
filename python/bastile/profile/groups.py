"""What part of a training step a kernel belongs to.

On a GPU many kernels have no name of their own: a norm of Transformers is a handful of elementwise kernels. They are
told by their context: the operators and regions (regions.py) that enclosed the launch and, in a backward pass, those
that enclosed the forward operator whose gradient is computed."""

import re
from collections.abc import Sequence

GROUPS = ("products", "attention", "norms", "rotary", "activation", "loss", "optimiser", "other")

#: What the names of regions begin with; the group follows.
REGION = "bastile.profile/"

# Kernels and operators of Bastile, by name; an operator's is bastile::<name>.
_OWN = [
    ("norms", r"(add_)?(rms_|layer_)?norm_\w+"),
    ("attention", r"segment_attention_\w+|token_attention(_sum)?"),
    ("rotary", r"(qk_norm_)?rope\w*"),  # that norm is computed in the rotation's pass over memory
    ("products", r"low_rank_(?!glu)\w+|moe_linear\w*"),
    ("activation", r"\w*glu_\w+|activation_\w+|moe_\w+"),
    ("loss", r"(linear_)?cross_entropy\w*|linear_(logprobs|divergence)\w*|scale_?"),
    ("optimiser", r"optim_\w+"),
]
_ATTENTION = (
    r"flash_(fwd|bwd)|flash::|FlashAttn|fmha|AttentionKernel|AttentionBackwardKernel|_sdpa_|\bsdpa|flash_attn|"
    r"flash_attention|flex_attention|efficient_attention|cudnn_attention|cudnn::fusion|scaled_dot_product|ScaledDotProduct"
)
_PRODUCT = (
    r"gemm|gemv|nvjet|splitKreduce|split_k_reduce|\bxmma|cutlass.*(tensorop|wgmma|simt|warpspecialized)|"
    r"cublas|GroupProblemShape|\baten::(addmm|mm|bmm|baddbmm|addmv|mv|dot|_scaled_mm|_grouped_mm|mkldnn_linear|linear|"
    r"matmul|addbmm|_addmm_activation)_?(out)?$|\bmkldnn::_linear|^(Mm|Addmm|Bmm|Baddbmm)Backward|^_Projections"
)
# Operators and, where nothing encloses a kernel, kernels that can belong to one group only.
_TELLING = [
    ("optimiser", r"Optimizer\.|multi_tensor_apply|_foreach_|_fused_adam|adam|clip_grad"),
    ("loss", r"cross_entropy|CrossEntropy|nll_loss|NllLoss|log_softmax|LogSoftmax|LogSoftMax"),
    ("activation", r"silu|Silu|gelu|Gelu|swiglu|GLU|GatedMLP|AdaptedMLP|_Experts"),
    ("norms", r"rms_?norm|RMSNorm|RmsNorm|layer_norm|LayerNorm"),
    ("rotary", r"rotary|rope\b|_rope_|Rope(Backward)?$"),
]

_own = [(group, re.compile(rf"(bastile::)?({pattern})")) for group, pattern in _OWN]
_attention = re.compile(_ATTENTION)
_product = re.compile(_PRODUCT)
_telling = [(group, re.compile(pattern)) for group, pattern in _TELLING]


def group_of(name: str, context: Sequence[str] = ()) -> str:
    """The group of a kernel (or, on CPU, an operator) of this name.

    context: the names of what enclosed it, innermost first. A product counts as one wherever it stands, but for those
    inside attention, which are attention's own."""
    if (own := _first_full(_own, name)) is not None:
        return own
    region = next((outer.removeprefix(REGION) for outer in context if outer.startswith(REGION)), None)
    if region == "attention" or any(_attention.search(each) for each in (name, *context)):
        return "attention"
    if _product.search(name):
        return "products"
    for outer in context:
        if outer.startswith(REGION):
            return outer.removeprefix(REGION)
        group = _first_full(_own, outer) or _first_part(outer)
        if group is not None:
            return group
    return _first_part(name) or "other"


def _first_full(patterns: list[tuple[str, re.Pattern[str]]], name: str) -> str | None:
    return next((group for group, pattern in patterns if pattern.fullmatch(name)), None)


def _first_part(name: str) -> str | None:
    return next((group for group, pattern in _telling if pattern.search(name)), None)


def short_name(name: str, longest: int = 60) -> str:
    """A kernel's name without its return type, namespaces, template and call arguments."""
    if name.startswith(("aten::", "bastile::", "autograd::")):
        return name
    plain, depth = [], 0
    for character in name.removeprefix("void ").replace("(anonymous namespace)::", ""):
        depth += character in "<("
        if depth == 0:
            plain.append(character)
        depth -= character in ">)"
    text = "".join(plain).replace("at::native::", "").strip() or name
    inner = re.findall(r"(?:direct_copy|\w+Functor\w*|\w+_kernel_cuda|\w+Ops?\b)", name)
    if inner and text in ("vectorized_elementwise_kernel", "unrolled_elementwise_kernel", "elementwise_kernel"):
        text += f" ({inner[-1]})"  # the innermost says what is computed
    return text if len(text) <= longest else text[: longest - 3] + "..."
