"""Marks the parts of a model in a profile, without changing what it computes or which code it runs.

The marks are put on classes: code that asks whether a module has been tampered with looks at the module itself."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.profiler import record_function

from bastile.guards import is_ours, mark_as_ours
from bastile.profile.groups import REGION

# By the end of a class's name, as Transformers names its modules. Products within them are products all the same.
_CLASSES = {
    "RMSNorm": "norms",
    "LayerNorm": "norms",
    "RotaryEmbedding": "rotary",
    "MLP": "activation",
    "Experts": "activation",
    "Model": "other",
    "ForCausalLM": "loss",  # what it does outside its backbone and its head
}
_FUNCTIONS = {"apply_rotary_pos_emb": "rotary", "eager_attention_forward": "attention"}


def region(group: str) -> record_function:
    return record_function(REGION + group)


@contextmanager
def marked(model: nn.Module) -> Iterator[None]:
    """Within it, what the model's modules launch stands in a region of their group."""
    places: list[tuple[Any, str, str]] = []
    for cls in {type(module) for module in model.modules()}:
        group = next((group for end, group in _CLASSES.items() if cls.__name__.endswith(end)), None)
        if group is not None and "forward" in vars(cls):
            places.append((cls, "forward", group))
    own = sys.modules[type(model).__module__]
    places += [(own, name, group) for name, group in _FUNCTIONS.items() if hasattr(own, name)]
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in places]
    try:
        for (owner, name, group), (_, _, original) in zip(places, originals, strict=True):
            setattr(owner, name, _in_region(original, group))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _in_region(function: Callable[..., Any], group: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with region(group):
            return function(*args, **kwargs)

    # Fused operators look at what they would skip; they may skip this as they may skip what is marked.
    own = is_ours(function) or function.__module__.startswith("transformers.")
    return mark_as_ours(call) if own else call
