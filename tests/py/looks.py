"""A callback that looks at a model in training, and a model. In a file of their own, which says nothing of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaForCausalLM, TrainerCallback


class Looks(TrainerCallback):
    """At a trainer's model behind its first step."""

    def __init__(self, *looks: Callable[[Any], Any]) -> None:
        self.looks, self.seen = looks, []  # what each of them has returned
        self.has_looked = False

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self.has_looked:
            self.has_looked = True
            for look in self.looks:
                self.seen.append(look(model))


class AsksForItsType(LlamaForCausalLM):
    def as_it_is(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)
