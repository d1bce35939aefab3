"""Linear layers and output heads."""

from bastile.models.known._form import Form, roles

_ADAPTED = "_check_forward_args disable_adapters merged base_layer"
_ADAPTER = "lora_B lora_dropout scaling _cast_input_dtype lora_variant merged_adapters get_base_layer lora_bias"
_ADAPTED_PARAMETER = (
    "disable_adapters merged base_layer __class__ active_adapters merged_adapters lora_A get_base_layer parameter_name "
    "num_experts lora_B"
)

FORMS: tuple[Form, ...] = (
    # ---- linear layers of classes of their own -----------------------------------------------------------------------
    Form("linear", "x @ weight.T + bias", roles("weight bias"), ("390f1a9ab032",), exact=True),
    Form("linear across", "bias + x @ weight", roles("nf bias weight"), ("9177a6c532a9",), exact=True),
    # ---- linear layers that are more than a weight: of PEFT 0.18 to 0.21, and of bitsandbytes ------------------------
    Form(
        "adapted linear",
        "base(x) + scale lora_B(lora_A(dropout(x))), the active adapters' in turn",
        roles(f"{_ADAPTED} _mixed_batch_forward lora_A active_adapters {_ADAPTER} fan_in_fan_out"),
        ("06a50533cd21", "3152c3694447"),
        exact=True,
    ),
    Form(
        "adapted linear",
        "the same of a base in 4 or 8 bits",
        roles(f"{_ADAPTED} active_adapters lora_A {_ADAPTER}"),
        ("7226307fd10b", "ecc7a59ff7d0"),
        exact=True,
    ),
    Form(
        "adapted parameter",
        "base(x) with scale A B of each expert added to a parameter, the active adapters' in turn",
        roles(f"{_ADAPTED_PARAMETER} _did_swap_in_out_features scaling"),
        ("d4b5d27bb0c6", "47c03801988c"),
        exact=True,
    ),
    Form(
        "adapted parameter",
        "the same of PEFT 0.18, which knows nothing of matrices as linear layers have them",
        roles(f"{_ADAPTED_PARAMETER} scaling"),
        ("85a95c5a278a",),
        exact=True,
    ),
    Form(
        "4-bit linear",
        "bitsandbytes.matmul_4bit(x, weight, bias)",
        roles("weight support_avx512bf16_for_cpu training compute_type_is_set compute_dtype bias"),
        ("1c4aaf1c7bd9",),
        exact=True,
    ),
    Form(
        "4-bit linear",
        "the same of bitsandbytes 0.49",
        roles("weight support_avx512bf16_for_cpu training bias compute_type_is_set compute_dtype"),
        ("8752534f5290",),
        exact=True,
    ),
    Form(
        "4-bit linear",
        "the same of bitsandbytes 0.46 to 0.48",
        roles("bias compute_type_is_set compute_dtype weight"),
        ("9bcdb6d957dc", "210ddd266e44"),
        exact=True,
    ),
    Form(
        "8-bit linear",
        "bitsandbytes.matmul(x, weight, bias, state)",
        roles("state training weight bias"),
        ("79d33821855e",),
        exact=True,
    ),
    # ---- output heads ------------------------------------------------------------------------------------------------
    Form(
        "head",
        "logits of the last states, loss_function(logits, labels, vocab_size)",
        roles("model lm_head loss_function config"),
        ("03927502174b", "ed25550da86c"),
    ),
    Form(
        "head",
        "the same, and the router's loss",
        roles("config model lm_head loss_function vocab_size num_experts num_experts_per_tok router_aux_loss_coef"),
        ("f37875b4bd6d", "cbf11dd0285f", "e1651e0a3ab1"),
        exact=True,
    ),
)
