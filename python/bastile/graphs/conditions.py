"""Why a step may not be captured or replayed, by the state that the process and the model are in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint

from bastile.graphs.collected import collects
from bastile.graphs.recorder import CudaRecorder, Recorder
from bastile.graphs.sharded import Sharded
from bastile.guards import function_of, stock_of
from bastile.models.checkpoints import is_layer, unwrapped, wrapped_by_checkpoint
from bastile.models.structure import modules_of
from bastile.ops._common import PLAIN, in_transform
from bastile.ops._random import generator_of
from bastile.recompute import is_recomputing

_modes = torch._C._len_torch_dispatch_stack
_functions = torch._C._len_torch_function_stack
_function_at = torch._C._get_function_stack_at
_hooks = torch._C._autograd._top_saved_tensors_default_hooks
#: What libraries put on parameters whose weights they shard. (With ZeRO-1 and -2 these are whole.)
_SHARDED = ("ds_id", "_is_sharded", "_fsdp_flattened")


def against_this_step() -> str | None:
    """What changes from step to step."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph that someone else captures"
    if in_transform():
        return "a transform of torch.func, forward-mode derivatives or tracing"
    if torch.is_anomaly_enabled():
        return "anomaly mode, which looks at each operator's gradients"
    if _has_any_global_hook():
        return "hooks on all modules"
    if _modes() or any(type(_function_at(i)).__name__ != "DeviceContext" for i in range(_functions())):
        return "a mode that sees each operator's calls"
    if _hooks(False) is not None and not is_recomputing():
        return "hooks on saved tensors"
    return None


def against_these_layers(layers: Sequence[Any], how_sharded: Sharded | str | None = None) -> str | None:
    """What stays as it is as long as the layers do. how_sharded: their parameters, if they are, or why not as suits."""
    if not layers or len(set(layers)) < len(layers):
        return "no layers, or one that stands there twice"
    inner = list(map(unwrapped, layers))
    if not all(map(is_layer, inner)):
        return f"layers of the class {type(inner[0]).__qualname__}, which is none of Transformers' layers"
    if isinstance(how_sharded, str):
        return how_sharded
    if how_sharded is None and not all(map(is_, inner, layers)):
        return "layers within wrappers of PyTorch's, whose parameters are not sharded"
    # What is sharded is whole, and plain, where a layer has it.
    parameters = () if how_sharded is not None else [p for layer in layers for p in layer.parameters()]
    tensors = [*parameters, *[t for layer in layers for t in layer.buffers()]]
    reason = _against(tensors, layers, [module for layer in layers for module in layer.modules()])
    if reason is None and any(t.requires_grad and type(t) not in PLAIN for t in tensors if isinstance(t, nn.Parameter)):
        return "trained parameters of a tensor class of their own"
    return reason


def modules_within(model: nn.Module) -> list[nn.Module]:
    """What `model.modules()` yields, without a walk through the tree where nothing in it has come or gone."""
    return modules_of(model) or list(model.modules())


def against_this_model(model: nn.Module) -> str | None:
    """Against a call of the whole model whose results nobody differentiates. A forward of the model's own, as
    Accelerate's mixed precision puts there, is part of it."""
    modules = modules_within(model)
    # What a tree of two thousand modules has, without a walk through it for each kind.
    scopes = [vars(module) for module in modules]
    hooks = [hook for name in ("_forward_hooks", "_forward_pre_hooks") for s in scopes for hook in s[name].values()]
    if not all(map(_does_nothing_here, hooks)):
        return "hooks on the model or a module in it"
    tensors = [t for name in ("_parameters", "_buffers") for scope in scopes for t in scope[name].values()]
    return _against([t for t in tensors if t is not None], modules, modules[1:])


def _does_nothing_here(hook: Any) -> bool:
    """That of Transformers, PEFT and TRL on embeddings of models with frozen weights, where there are no gradients; and
    those that stay where hidden states were once asked for, as long as they are not."""
    of_embeddings = getattr(hook, "__qualname__", "").endswith(
        ("make_inputs_require_grads", "make_inputs_require_grad")
    )
    return of_embeddings or collects(hook)


def _against(tensors: Sequence[torch.Tensor], called: Sequence[Any], within: Sequence[nn.Module]) -> str | None:
    parameters = [t for t in tensors if isinstance(t, nn.Parameter)]
    if any("DTensor" in (type(t).__name__, type(t.data).__name__) for t in tensors):
        return "sharded parameters (FSDP or tensor parallelism)"
    if any(hasattr(parameter, name) for parameter in parameters for name in _SHARDED):
        return "sharded parameters (FSDP or DeepSpeed)"
    if len({t.device for t in tensors}) > 1:
        return "layers on several devices"
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in called):
        return "layers that torch.compile has compiled"
    if not all(map(_runs_its_class, within)):
        return "a module of the layers that has a forward of its own"
    return None


def _runs_its_class(module: nn.Module) -> bool:
    """Or what Bastile has put in the place of its class's forward."""
    own = vars(module).get("forward")
    return own is None or stock_of(function_of(own)) is stock_of(type(module).forward)


def checkpoints(layer: Any) -> bool | None:
    """Whether the layer's next call is checkpointed; None where by a function that is not PyTorch's, or told more than
    how."""
    inner = unwrapped(layer)
    on = getattr(inner, "gradient_checkpointing", False) and inner.training
    if inner is not layer and (on or not wrapped_by_checkpoint(layer)):
        return None
    if not on and inner is layer:
        return False
    function = function_of_checkpoint(layer)
    if not isinstance(function, partial) or function.func is not checkpoint or function.args:
        return None
    return True if function.keywords.keys() <= {"use_reentrant", "preserve_rng_state", "determinism_check"} else None


def function_of_checkpoint(layer: Any) -> Any:
    """What checkpoints its call."""
    return layer.checkpoint_fn if wrapped_by_checkpoint(layer) else layer._gradient_checkpointing_func


def settings() -> tuple[Any, ...]:
    """What PyTorch's operators look at to choose their kernels."""
    cuda = torch.backends.cuda
    return (
        *_of_both_passes(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def of_backward(checkpoints: bool) -> tuple[Any, ...]:
    """Those of the settings that a backward pass looks at: attention's kernel follows from the forward pass's, unless
    layers are checkpointed, and run a second time."""
    return settings() if checkpoints else _of_both_passes()


def _of_both_passes() -> tuple[Any, ...]:
    matmul = torch.backends.cuda.matmul
    return (
        torch.are_deterministic_algorithms_enabled(),
        # Not get_float32_matmul_precision(), which raises once TrainingArguments(tf32=True) has set it the new way.
        matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )


def keeps_random_state(layer: Any) -> bool:
    """Whether the second run of a checkpointed layer draws the numbers of the first."""
    return bool(function_of_checkpoint(layer).keywords.get("preserve_rng_state", True))


def random_state(device: torch.device) -> Any:
    """Another one when random numbers have been drawn."""
    generator = generator_of(device)
    return generator.get_offset() if device.type == "cuda" else hash(generator.get_state().numpy().tobytes())


def host_random_state(device: torch.device) -> Any:
    """The same of numbers that the host draws, for a decision that a graph would repeat; None where what the device
    draws from is the host's."""
    return None if device.type == "cpu" else random_state(torch.device("cpu"))


def host_decides(module: nn.Module) -> bool:
    """Whether what the host has drawn within this may matter. PEFT's LoHa and LoKr draw for adapters that never are
    left out, too."""
    rates = [vars(each).get(name) for each in module.modules() for name in ("module_dropout", "rank_dropout")]
    known = [each for each in rates if isinstance(each, dict)]
    return not known or any(rate for each in known for rate in each.values())


def _recorder_for(device: torch.device) -> Recorder | None:
    return CudaRecorder(device) if device.type == "cuda" else None


#: What graphs are made by; None where there are none. Tests put another one here.
recorder_for: Callable[[torch.device], Recorder | None] = _recorder_for
