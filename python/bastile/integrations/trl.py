"""TRL's losses from hidden states and from logits on demand, by linear_logprobs.

What TRL calls changed with its releases; each is known by its parameters, wherever a release has it:

    ChunkedLogProbFunction.apply        1.15 and later: all of SFT, DPO, KTO, GRPO, RLOO; 1.4 to 1.14, as
                                        _ChunkedLogProbFunction: asynchronous GRPO, in 1.14 also DPO, KTO and GRPO
    _chunked_cross_entropy_loss         1.4 to 1.14: SFT with loss_type="chunked_nll", its default from 1.7 on
    selective_log_softmax,              every release, of logits: served where these are logits on demand, as models
    entropy_from_logits,                return them after bastile.apply(); logits that are there are TRL's business
    selective_log_softmax_and_entropy

What has other parameters runs TRL's own code, and is named: in a warning, and in bastile.report()."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from bastile.guards import stock_of
from bastile.integrations.hidden import log_probs_from_hidden
from bastile.models.logits import Logits, log_probs_of
from bastile.models.sites import ModelFile, Site
from bastile.ops._common import served
from bastile.report import Tally

_log = logging.getLogger("bastile")
_FUNCTION = "ChunkedLogProbFunction"
_OPERATOR = "fused_linear_cross_entropy"  # by whose name bastile.apply puts all losses from hidden states in
_TALLY = "linear_logprobs"  # what runs
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # of TRL's, after the log-probabilities

_Build = Callable[[Tally, Any], Callable[..., Any]]


def sites(file: ModelFile) -> Iterator[Site]:
    """What TRL's module has."""
    if file.name == "trl.trainer.utils" and "add_fused_lm_head" in file.scope and _missing(file):
        _log.warning("TRL %s calls no %s that bastile can find: its losses stay stock", _release(), _FUNCTION)
    for name, item in file.scope.items():
        if name.endswith(_FUNCTION) and getattr(item, "__module__", None) == file.name:
            build = _built(stock_of(vars(item)["forward"].__func__), _FUNCTIONS, _log_prob_function)
            yield _site(file, name, _apply_of(item), "apply", build)
        elif name in _LOSSES and (stock := stock_of(item)).__module__ == file.name:
            build = _built(stock, _LOSSES[name], _WAYS[name])
            for holder in _holders(name, stock):
                yield _site(file, name, holder, name, build)


def _missing(file: ModelFile) -> bool:
    return not any(name.endswith(_FUNCTION) and isinstance(item, type) for name, item in file.scope.items())


def _site(file: ModelFile, name: str, owner: Any, attribute: str, build: _Build) -> Site:
    made = functools.partial(build, Tally.of(_TALLY, f"{file.name}.{name}"))
    return Site(_OPERATOR, name, owner, attribute, made, (), made)


def _holders(name: str, stock: Any) -> list[Any]:
    """The modules of TRL that call it by their own global: it is imported from where it is defined."""
    modules = [module for title, module in list(sys.modules.items()) if title.partition(".")[0] == "trl"]
    return [module for module in modules if stock_of(getattr(module, "__dict__", {}).get(name)) is stock]


class _Apply:
    """The `apply` of an autograd function, which it inherits, as something that can be exchanged and given back."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls

    @property
    def apply(self) -> Any:
        own = vars(self.cls).get("apply")
        return self.cls.apply if own is None else own.__func__

    @apply.setter
    def apply(self, function: Any) -> None:
        if inspect.ismethod(function):  # the inherited one
            del self.cls.apply
        else:
            self.cls.apply = staticmethod(function)


@functools.cache
def _apply_of(cls: Any) -> _Apply:
    return _Apply(cls)


# ---- by parameters ---------------------------------------------------------------------------------------------------

_REST = ("final_logit_softcapping", "logit_scale")
#: Of ChunkedLogProbFunction's forward, but for ctx.
_FUNCTIONS = (
    ("hidden", "weight", "bias", "targets", "temperature", "chunk_size", *_REST, "outputs"),  # from 1.15 on
    ("last_hidden", "weight", "bias", "targets", "temperature", "chunk_size", *_REST),  # 1.13
    ("last_hidden", "weight", "targets", "temperature", "chunk_size", *_REST),  # 1.6
    ("last_hidden", "weight", "targets", "temperature", "chunk_size", "logit_scale"),  # 1.4
)
_OF_SFT = ("hidden_states", "lm_head_weight", "chunk_size", "labels", "shift_labels", "num_items_in_batch")
#: Of functions, by name: those that are known.
_LOSSES = {
    "_chunked_cross_entropy_loss": ((*_OF_SFT, "logit_scale", "final_logit_softcapping", "lm_head_bias"),),
    "selective_log_softmax": (("logits", "index", "temperature", "row_mask"), ("logits", "index")),
    "entropy_from_logits": (("logits", "chunk_size"),),
    "selective_log_softmax_and_entropy": (("logits", "index", "entropy_requires_grad", "temperature", "row_mask"),),
}


def _built(stock: Any, known: tuple[tuple[str, ...], ...], build: Any) -> _Build:
    """What builds the replacement of a function: by these parameters, if they are known ones."""
    parameters = dict(inspect.signature(stock).parameters)
    parameters.pop("ctx", None)
    if tuple(parameters) not in known:
        return functools.partial(_moved, tuple(parameters))
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}

    def builder(tally: Tally, original: Any) -> Callable[..., Any]:
        return build(tally, original, tuple(parameters), defaults)

    return builder


def _moved(parameters: tuple[str, ...], tally: Tally, original: Any) -> Callable[..., Any]:
    reason = f"TRL {_release()} has it with the parameters {', '.join(parameters)}, which this bastile does not know"

    def call(*args: Any, **kwargs: Any) -> Any:
        tally.step_aside(reason)
        return original(*args, **kwargs)

    return call


def _release() -> str:
    try:
        return version("trl")
    except PackageNotFoundError:
        return "of an unknown release"


def _log_prob_function(
    tally: Tally, original: Any, parameters: tuple[str, ...], defaults: dict[str, Any]
) -> Callable[..., Any]:
    """Of ChunkedLogProbFunction.apply. Releases before 1.13, which have no bias, give no gradient to entropy."""
    all_outputs, has_gradient = "outputs" in parameters, "bias" in parameters

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(parameters, args, strict=False)), **kwargs}
        hidden, weight = given[parameters[0]], given["weight"]
        reason = _why_not(hidden, weight, given.get("bias"))
        if reason is not None:
            tally.step_aside(reason)
            return original(*args, **kwargs)
        asked = given.get("outputs", ("entropy",))
        found = log_probs_from_hidden(
            hidden,
            weight,
            given["targets"],
            bias=given.get("bias"),
            temperature=given["temperature"],
            logit_scale=given["logit_scale"],
            softcap=given.get("final_logit_softcapping"),
            ignore_index=_NONE,
            outputs=tuple(name for name in _OUTPUTS if name in asked),
        )
        tally.count()
        if all_outputs:
            return found.log_probs, found.entropy, found.log_sum_sq_probs, found.mean_logits, found.is_top1
        assert found.entropy is not None
        return found.log_probs, found.entropy if has_gradient else found.entropy.detach()

    return call


#: An ignore_index that no target is: TRL hands over no others than those that count.
_NONE = -(1 << 31)


def _why_not(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    if not served(hidden, weight, bias):
        return (
            f"hidden states in {hidden.dtype} on {hidden.device.type} are not served, or the head's weight is sharded"
        )
    return None


def _chunked_cross_entropy(
    tally: Tally, original: Any, parameters: tuple[str, ...], defaults: dict[str, Any]
) -> Callable[..., Any]:
    """Of SFT's loss, which returns the loss, and sums for metrics: right ones, entropy, the number of targets."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(parameters, args, strict=False)), **kwargs}
        hidden, weight, bias = given["hidden_states"], given["lm_head_weight"], given["lm_head_bias"]
        labels, shifted, items = given["labels"], given["shift_labels"], given["num_items_in_batch"]
        reason = _why_not(hidden, weight, bias)
        if reason is not None or (labels is None and shifted is None):
            if reason is not None:
                tally.step_aside(reason)
            return original(*args, **kwargs)
        if shifted is None:
            hidden, shifted = hidden[..., :-1, :], labels[..., 1:]
        found = log_probs_from_hidden(
            hidden,
            weight,
            shifted,
            bias=bias,
            logit_scale=given["logit_scale"],
            softcap=given["final_logit_softcapping"],
            outputs=("entropy", "is_top1"),
        )
        tally.count()
        assert found.entropy is not None
        assert found.is_top1 is not None
        valid = (shifted != -100).sum()
        divisor = valid.clamp(min=1) if items is None else items
        divisor = divisor.to(hidden.device) if isinstance(divisor, torch.Tensor) else divisor
        return -found.log_probs.sum() / divisor, found.is_top1.sum().float(), found.entropy.sum(), valid

    return call


# ---- of logits on demand ---------------------------------------------------------------------------------------------


def _of_logits(tally: Tally, original: Any, parameters: tuple[str, ...], defaults: dict[str, Any], way: Any) -> Any:
    """Of a function of logits: way(given) gives what is returned, NotImplemented where that needs the logits."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(parameters, args, strict=False)), **kwargs}
        if isinstance(given.get("logits"), Logits) and not torch.compiler.is_compiling():
            result = way(given)
            if result is not NotImplemented:
                tally.count()
                return result
        return original(*args, **kwargs)

    return call


def _found(given: dict[str, Any], index: Any, outputs: tuple[str, ...]) -> Any:
    """LogProbs of logits; rows whose row_mask is zero are zero."""
    temperature, mask = given.get("temperature", 1.0), given.get("row_mask")
    if isinstance(mask, torch.Tensor):
        index = index.masked_fill(mask == 0, _NONE)
    return log_probs_of(given["logits"], index, temperature, _NONE, outputs)


def _selected(given: dict[str, Any]) -> Any:
    found = _found(given, given["index"], ())
    return found if found is NotImplemented else found.log_probs


def _entropy(given: dict[str, Any]) -> Any:
    logits = given["logits"]
    found = _found(given, torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device), ("entropy",))
    return found if found is NotImplemented else found.entropy


def _selected_and_entropy(given: dict[str, Any]) -> Any:
    found = _found(given, given["index"], ("entropy",))
    if found is NotImplemented:
        return found
    return found.log_probs, found.entropy if given["entropy_requires_grad"] else found.entropy.detach()


_WAYS: dict[str, Any] = {
    "_chunked_cross_entropy_loss": _chunked_cross_entropy,
    "selective_log_softmax": functools.partial(_of_logits, way=_selected),
    "entropy_from_logits": functools.partial(_of_logits, way=_entropy),
    "selective_log_softmax_and_entropy": functools.partial(_of_logits, way=_selected_and_entropy),
}
