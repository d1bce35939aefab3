"""The moments of an optimiser in the types that they are kept in, and the state of a parameter in them."""

from __future__ import annotations

from typing import Any

import torch

#: Elements that share a scale, as OPTIM_BLOCK of src/ops/optim/optim_args.h.
BLOCK = 256
#: The largest codes, and the powers of a code that moments are of, as optim_math.h has them.
_LEVELS = {"exp_avg": 127, "exp_avg_sq": 255}
_POWERS = {"exp_avg": 2, "exp_avg_sq": 4}

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EIGHT_BITS = "8bit"
MOMENTS = tuple(_LEVELS)


def kind_of(moments: torch.dtype | str | None) -> torch.dtype | str | None:
    """float32, bfloat16, "8bit", or None: each parameter's type."""
    if moments is None or moments == EIGHT_BITS:
        return moments
    if moments in _NAMES.values():
        return moments
    if isinstance(moments, str) and moments in _NAMES:
        return _NAMES[moments]
    raise ValueError(f'AdamW: moments is {moments!r}; torch.float32, torch.bfloat16, "8bit" or None is needed')


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's shard of this process; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def decode(name: str, codes: torch.Tensor, scale: torch.Tensor, count: int) -> torch.Tensor:
    """Moments of 8 bits as float32 [count]."""
    code = (codes.view(torch.int8) if name == "exp_avg" else codes).to(torch.float32) / _LEVELS[name]
    power = code * code.abs() if name == "exp_avg" else code**4
    return (power * scale[:, None]).flatten()[:count]


def encode(name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 moments as codes [blocks, 256] and scales [blocks], to the nearest level of the code."""
    flat = values.to(torch.float32).flatten()
    blocks = -(-flat.numel() // BLOCK)
    flat = torch.nn.functional.pad(flat, (0, blocks * BLOCK - flat.numel())).view(blocks, BLOCK)
    scale = flat.abs().amax(1) if blocks else flat.new_zeros(0)
    share = flat.abs() / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    code = (share.pow(1 / _POWERS[name]) * _LEVELS[name]).round()
    if name == "exp_avg":
        return (code * flat.sign()).to(torch.int8).view(torch.uint8), scale
    return code.clamp_min(1).where(flat > 0, 0).to(torch.uint8), scale


def fresh(parameter: torch.Tensor, kind: torch.dtype | str | None, master: bool) -> dict[str, Any]:
    """The state of a parameter before its first step, as torch.optim.AdamW(fused=True) has it: step, exp_avg,
    exp_avg_sq. Of 8 bits: with their scales. master: and the parameter in float32."""
    here = local(parameter)
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device=here.device)}
    for name in MOMENTS:
        if kind == EIGHT_BITS:
            blocks = -(-here.numel() // BLOCK)
            state[name] = torch.zeros((blocks, BLOCK), dtype=torch.uint8, device=here.device)
            state[f"{name}_scale"] = torch.zeros(blocks, dtype=torch.float32, device=here.device)
        else:
            dtype = kind if isinstance(kind, torch.dtype) else parameter.dtype
            state[name] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
    if master and parameter.dtype != torch.float32:
        state["master"] = parameter.detach().to(torch.float32, memory_format=torch.preserve_format)
    return state


def loaded(
    parameter: torch.Tensor, given: dict[str, Any], kind: torch.dtype | str | None, master: bool
) -> dict[str, Any]:
    """A saved state, whoever saved it, in these types. What it does not have begins anew; what nobody here knows goes
    along as it is."""
    state = fresh(parameter, kind, master)
    step = given.get("step", 0.0)
    state["step"].fill_(step.to(state["step"].device) if isinstance(step, torch.Tensor) else float(step))
    for name in MOMENTS:
        if name not in given:
            continue
        value, scale = given[name], given.get(f"{name}_scale")
        if scale is not None and kind == EIGHT_BITS:
            state[name].copy_(value)
            state[f"{name}_scale"].copy_(scale)
            continue
        if scale is not None:
            here = local(state[name])
            local_value = decode(name, value.to(here.device), scale.to(here.device), here.numel())
            memory_order(here).copy_(local_value)
        elif kind == EIGHT_BITS:
            here = local(parameter)
            mine = torch.empty_like(here, dtype=torch.float32, memory_format=torch.preserve_format)
            mine.copy_(local(value))
            codes, scales = encode(name, memory_order(mine))
            state[name].copy_(codes)
            state[f"{name}_scale"].copy_(scales)
        else:
            state[name].copy_(value)
    if "master" in state and "master" in given:
        state["master"].copy_(given["master"])
    known = {"step", "master", *MOMENTS, *(f"{name}_scale" for name in MOMENTS)}
    return state | {name: value for name, value in given.items() if name not in known}


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without gaps as one dimension, in the order in which its elements lie in memory: the order of codes."""
    return tensor.as_strided((tensor.numel(),), (1,))
