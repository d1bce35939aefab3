"""Building a model with random weights, fast and on its device, the same for every implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from bastile.cli import model
from bastile.shapes import MODELS

_STD = 0.02


def build(name: str, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """The model, in training mode. Its memory is taken in its own type, on its own device, at once."""
    made = model.build(AutoConfig.for_model(**MODELS[name]), str(dtype).removeprefix("torch."), device)
    fill(made, seed)
    return made


def add_adapters(model: Any, rank: int, load_in_4bit: bool, seed: int) -> None:
    """LoRA on each linear layer but the head, in float32 as PEFT's users have it, both of its matrices random. The
    model then runs under autocast to its own type, where that has 16 bits, and nothing else of it is trained."""
    from peft import LoraConfig, inject_adapter_in_model

    if load_in_4bit:
        quantise(model)
    torch.manual_seed(seed)
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", init_lora_weights=False), model
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if model.dtype is not torch.float32:
        model.forward = torch.autocast(model.device.type, model.dtype)(model.forward)


def quantise(model: nn.Module) -> None:
    """Each linear layer but the head in NF4 with double quantisation, as a loaded QLoRA base has them, on its device
    and computing in its type. On "meta": on the CPU, of memory that nobody fills."""
    import bitsandbytes as bnb

    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is not nn.Linear or name == "lm_head":
                continue
            weight, bias = layer.weight, layer.bias is not None
            made = bnb.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=bias,
                compute_dtype=weight.dtype,
                quant_type="nf4",
                device="meta",  # else it draws random weights, on the CPU: a minute for 8B
            )
            options: dict[str, Any] = {"requires_grad": False, "quant_type": "nf4", "module": made}
            if weight.is_meta:
                options |= {"quant_state": _state_without_values(weight), "bnb_quantized": True}
                made.weight = bnb.nn.Params4bit(torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8), **options)
            else:
                made.weight = bnb.nn.Params4bit(weight.data.cpu(), **options)
            if bias:
                made.bias = layer.bias
            setattr(module, name, made if weight.is_meta else made.to(weight.device))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # which PEFT asks for
    if weight.is_cuda:
        torch.cuda.empty_cache()


def _state_without_values(weight: torch.Tensor) -> Any:
    """What bitsandbytes keeps beside a weight in NF4, doubly quantised, of its default blocks."""
    from bitsandbytes.functional import QuantState

    block, outer = 64, 256
    blocks = -(-weight.numel() // block)
    inner = QuantState(torch.empty(-(-blocks // outer)), code=torch.empty(256), blocksize=outer, dtype=torch.float32)
    return QuantState(
        torch.empty(blocks, dtype=torch.uint8),
        shape=weight.shape,
        code=torch.empty(16),
        blocksize=block,
        quant_type="nf4",
        dtype=weight.dtype,
        offset=torch.empty(()),
        state2=inner,
    )


def fill(module: nn.Module, seed: int) -> None:
    """Norms' weights one, all else normal: no zeros, which products would run faster on. Each parameter draws from a
    generator of its own, chosen by its name's place in the alphabet: what replaced a module before the model was built,
    or the order of modules, changes no weight."""
    for place, (name, parameter) in enumerate(sorted(module.named_parameters())):
        with torch.no_grad():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                generator = torch.Generator(parameter.device).manual_seed(seed * 1_000_003 + place)
                parameter.normal_(0.0, _STD, generator=generator)


def random_tokens(vocabulary: int, batch: int, length: int, device: torch.device, seed: int) -> torch.Tensor:
    """[batch, length]; the same on every device and for every implementation."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(device)
