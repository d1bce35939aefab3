"""The forward of a module that holds all experts of a layer.

It serves what Transformers computes where nobody has chosen an implementation: whole experts, of one type, with the
unit that the class defines. All else the original does: an implementation that someone chose or registered, experts
spread over devices, another unit."""

import functools
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bastile.guards import mark_as_ours
from bastile.models import scored_inputs
from bastile.models.adapted_experts import handed_to
from bastile.models.mlp import activation_of, activations
from bastile.models.rebind import as_keywords, parameter_names
from bastile.models.sites import Found, ModelFile, Site
from bastile.ops._common import on_gpu, served, without_autocast
from bastile.ops.adapted_experts import adapted_experts
from bastile.ops.moe import MOST_EXPERTS, moe_experts
from bastile.report import Tally, noting

_log = logging.getLogger("bastile")
#: Classes whose frozen weights were float32 under autocast.
_wide: set[str] = set()

#: What an experts' module holds; the biases only where it has any.
PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")

#: What Transformers takes where nobody chose.
_DEFAULT = "grouped_mm"

#: What configurations call the number of a layer's experts.
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def sites(file: ModelFile) -> Iterator[Site]:
    for found in file.forwards("experts"):
        yield file.forward_site("moe_experts", found.owner, partial(experts_forward, found))
    yield from scored_inputs.sites(file)


def experts_forward(found: Found, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    # Not at the head of the file, which the commands read where Transformers is not installed; nor within what follows,
    # where torch.compile would meet it.
    from transformers.integrations import moe

    names, table, default = parameter_names(original), moe.ALL_EXPERTS_FUNCTIONS, moe.grouped_mm_experts_forward
    default_gate, variant, classes = moe._default_apply_gate, found.form.variant, activations()
    has_own_gate, limit, alpha = "_apply_gate" in found.methods, variant["limit"], variant["alpha"]

    def obstacle(self: Any, hidden: Any, indices: Any, weights: Any, activation: Any) -> str | None:
        if not has_own_gate and (type(self)._apply_gate is not default_gate or "_apply_gate" in vars(self)):
            return "the gate has been replaced by another"
        if not found.is_kept_by(self) or table[_DEFAULT] is not default:
            return "the gate, or Transformers' grouped products, have been replaced by others"
        chosen = getattr(getattr(self, "config", None), "_experts_implementation", None)
        if chosen != _DEFAULT:
            return f"the model's experts_implementation is {chosen!r}, not {_DEFAULT!r}"
        if not _are_whole(self):
            return "only a part of the experts is here: they are spread over devices"
        if activation is None:
            return "its activation is none that Bastile computes"
        return None if _serves(hidden, indices, weights, self) else "types or shapes that the operator does not take"

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = as_keywords(names, args, kwargs)
        hidden, indices, weights = [given.pop(name, None) for name in names[:3]]
        handed = handed_to(self)
        if given or len(args) > len(names):
            tally.step_aside("it was not called with states, indices and weights alone")
            with handed.added_by_peft():
                return original(self, *args, **kwargs)
        activation: Any = variant["activation"] or activation_of(getattr(self, "act_fn", None), classes)
        why = obstacle(self, hidden, indices, weights, activation)
        if why is not None:
            tally.step_aside(why)
            with handed.added_by_peft():
                return original(self, *args, **kwargs)
        tally.count()
        gate_up, gate_up_bias, down, down_bias = _parameters(self)
        if gate_up.dtype is torch.float32:
            _look_at_width(type(self).__name__, gate_up)
        # Grouped products are none that autocast casts: they have the type of the experts' weights.
        rows = hidden.to(gate_up.dtype)
        with without_autocast(hidden.device.type):
            adapters: Any = handed.adapters(self) if handed else {}
            operator: Any = partial(adapted_experts, **adapters) if adapters else moe_experts
            out: torch.Tensor = operator(
                rows,
                indices,
                weights,
                gate_up,
                gate_up_bias,
                down,
                down_bias,
                activation=activation,
                interleaved=variant["interleaved"],
                alpha=getattr(self, alpha) if alpha else 1.0,
                limit=getattr(self, limit) if limit else float("inf"),
            )
        return out.to(hidden.dtype)

    return mark_as_ours(forward)


def _look_at_width(name: str, gate_up: torch.Tensor) -> None:
    """Says once where a run takes many times as long as it might, for a type that nobody chose: TRL loads models that
    are given by their names in float32, and trains under autocast."""
    device = gate_up.device.type
    if torch.compiler.is_compiling() or gate_up.requires_grad or not on_gpu(gate_up) or name in _wide:
        return
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is not torch.float32:
        _wide.add(name)
        _log.warning("%s", note())


@noting
def note() -> str | None:
    """What the report says of it."""
    if not _wide:
        return None
    return (
        f"the frozen weights of {', '.join(sorted(_wide))} are float32, which autocast leaves grouped products in, "
        f"with Bastile and without: they take many times as long as in bfloat16, and twice the memory. Load the model "
        f'in bfloat16: dtype="bfloat16" in from_pretrained, model_init_kwargs={{"dtype": "bfloat16"}} in TRL\'s '
        f"configuration, --dtype bfloat16 on its command line"
    )


def _parameters(experts: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """gate_up [E, H, 2I], its bias, down [E, I, H], its bias. Turned weights are views."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if not experts.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if not experts.has_bias:
        return gate_up, None, down, None
    return gate_up, experts.gate_up_proj_bias, down, experts.down_proj_bias


def expert_counts(config: Any) -> set[int]:
    """How many experts the layers of this configuration have."""
    found = (getattr(config, name, None) for name in _COUNTS)
    return {count for of in found for count in (of if isinstance(of, (list, tuple)) else [of]) if count is not None}


def _are_whole(experts: Any) -> bool:
    """Whether this module has all experts of the configuration."""
    config: Any = getattr(experts, "config", None)
    return bool(not getattr(experts, "_is_expert_parallel", False) and experts.num_experts in expert_counts(config))


def _serves(hidden: Any, indices: Any, weights: Any, experts: Any) -> bool:
    parameters = [p for p in _parameters(experts) if p is not None]
    return bool(
        all(torch.is_tensor(t) for t in (hidden, indices, weights))
        and hidden.dim() == 2
        and indices.shape == weights.shape
        and served(hidden, weights, *parameters)
        and all(p.dtype == parameters[0].dtype for p in parameters)
        and parameters[0].shape[0] == experts.num_experts <= MOST_EXPERTS
    )
