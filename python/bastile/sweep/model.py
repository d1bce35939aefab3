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
