"""PEFT's adapters on the matrices of experts (`target_parameters`, and what `target_modules="all-linear"` becomes for
mixtures of experts). PEFT adds each expert's product of A and B to its matrices before each call: a second set of all
experts' weights, made anew in each pass, and kept for the backward pass. Here the experts are told of A and B, and
their operator multiplies by them.

Each adapted parameter has a module around the experts', one around the other. They hand themselves to the forward of
the experts (models/experts.py), which takes them or has PEFT add to the matrices after all."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from bastile.guards import forward_of, is_ours
from bastile.models.sites import Found, ModelFile, Site
from bastile.ops._common import FLOATS, PLAIN
from bastile.ops._modules import plain_linear
from bastile.ops.adapted_experts import ExpertAdapters, spread
from bastile.report import Tally

_FORM = "adapted parameter"
#: Parameters of experts, and what the operator calls their adapters.
_ADAPTED = {"gate_up_proj": "gate_up_adapters", "down_proj": "down_adapters"}

_handed = threading.local()


def sites(file: ModelFile) -> Iterator[Site]:
    for found in file.forwards(_FORM):
        yield file.forward_site("lora_linear", found.owner, partial(parameter_forward, found))


def parameter_forward(found: Found, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of the forward of PEFT's modules around a parameter."""

    @functools.wraps(original)
    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _adds_something(self, kwargs):
            return original(self, x, *args, **kwargs)
        why = _obstacle(self) if found.is_kept_by(self) else "the class adds another product than that of A and B"
        if why is not None:
            tally.step_aside(why)
            return original(self, x, *args, **kwargs)
        waiting, entry = _waiting(), (self, tally)
        waiting.append(entry)
        try:
            result = self.base_layer(x, *args, **kwargs)
        finally:
            was_left = entry in waiting
            if was_left:
                waiting.remove(entry)
        if was_left:  # something else than the experts' forward ran, without what is added
            tally.step_aside("its experts were called in another way than by their forward")
            return original(self, x, *args, **kwargs)
        return result

    return forward


def _waiting() -> list[tuple[Any, Tally]]:
    """Of this thread: modules around parameters whose experts are about to be called."""
    if not hasattr(_handed, "waiting"):
        _handed.waiting = []
    found: list[tuple[Any, Tally]] = _handed.waiting
    return found


def _adds_something(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it adds to the matrices of experts, rather than to one matrix, or nothing now."""
    is_on = not kwargs and not module.disable_adapters and not module.merged
    return is_on and module.num_experts > 1 and bool(_active(module))


def _active(module: Any) -> list[str]:
    return [name for name in module.active_adapters if name in module.lora_A]


def _obstacle(module: Any) -> str | None:
    """Why PEFT is to add to the matrices."""
    experts, active = module.get_base_layer(), _active(module)
    parameter = experts._parameters.get(module.parameter_name)
    if not is_ours(forward_of(experts)):
        return "it is around a parameter of a module that is no experts which Bastile computes"
    if len(active) > 1:
        return "several adapters are active at once"
    if active[0] in module.lora_variant:
        return f"the adapter is a {type(module.lora_variant[active[0]]).__name__}"
    if module.parameter_name not in _ADAPTED or parameter is None or parameter.dim() != 3:
        return "it is around a parameter that is no matrices, or is made of others"
    matrices = [layer[active[0]] for layer in (module.lora_A, module.lora_B)]
    if not all(map(plain_linear, matrices)):
        return "an adapter's matrices have biases, hooks or a forward of their own"
    tensors = [parameter, *[layer.weight for layer in matrices]]
    if any(type(t) not in PLAIN or t.dtype not in FLOATS or hasattr(t, "ds_id") for t in tensors):
        return "weights that are sharded, or of a type that Bastile does not compute in"
    return None


# ---- for the experts' forward ----------------------------------------------------------------------------------------


class Handed:
    """What was handed to one call of a module of experts."""

    def __init__(self, entries: list[tuple[Any, Tally]]) -> None:
        self._entries = entries

    def __bool__(self) -> bool:
        return bool(self._entries)

    @contextmanager
    def added_by_peft(self) -> Iterator[None]:
        """Within, PEFT adds to the matrices."""
        with ExitStack() as stack:
            for module, tally in self._entries:
                tally.step_aside("its experts are left to other code")
                stack.enter_context(module._activate_lora(module.active_adapters))
            yield

    def adapters(self, experts: Any) -> dict[str, ExpertAdapters]:
        """As `adapted_experts` takes them by name; counted as served."""
        for _, tally in self._entries:
            tally.count()
        return {_ADAPTED[module.parameter_name]: _adapters(module, experts) for module, _ in self._entries}


_NONE = Handed([])


def handed_to(experts: Any) -> Handed:
    """What modules around this one's parameters have handed to the call that begins."""
    if torch.compiler.is_compiling():
        return _NONE
    waiting = _waiting()
    found = [entry for entry in waiting if entry[0].get_base_layer() is experts] if waiting else []
    for entry in found:
        waiting.remove(entry)
    return Handed(found) if found else _NONE


def _adapters(module: Any, experts: Any) -> ExpertAdapters:
    """As products with the experts' rows take them. The dimension of the parameter that A is of is that of rows, but in
    releases of PEFT that know nothing of matrices as linear layers have them."""
    (name,) = _active(module)
    dtype = getattr(experts, module.parameter_name).dtype
    of_a, of_b = module.lora_A[name].weight, module.lora_B[name].weight
    a = of_a.reshape(module.num_experts, -1, of_a.shape[-1]).to(dtype).transpose(1, 2)
    b = spread(of_b, module.num_experts, dtype)
    is_turned = experts.is_transposed or getattr(module, "_did_swap_in_out_features", False)
    scale = float(module.scaling[name])
    return ExpertAdapters(a, b, scale) if is_turned else ExpertAdapters(b.transpose(1, 2), a.transpose(1, 2), scale)
