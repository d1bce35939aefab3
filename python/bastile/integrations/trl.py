"""TRL's losses from hidden states and from logits on demand, by linear_logprobs and linear_divergence.

What TRL calls changed with its releases; each is known by its parameters, wherever a release has it:

    add_fused_lm_head                   1.15 and later: all of SFT, DPO, KTO, GRPO, RLOO (trl_head.py)
    ChunkedLogProbFunction.apply        what that calls, where it runs itself; 1.4 to 1.14, as
                                        _ChunkedLogProbFunction: asynchronous GRPO, in 1.14 also DPO, KTO and GRPO
    ChunkedDivergenceFunction.apply     1.16: distillation
    _chunked_cross_entropy_loss         1.4 to 1.14: SFT with loss_type="chunked_nll", its default from 1.7 on
    selective_log_softmax,              every release, of logits: served where these are logits on demand, as models
    entropy_from_logits,                return them after bastile.apply(); logits that are there are TRL's business
    selective_log_softmax_and_entropy
    generalized_jsd_loss                of GKD's and GOLD's trainers: of the student's logits on demand and the
                                        teacher's, which are there

What has other parameters runs TRL's own code, and is named: in a warning, and in bastile.report()."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from bastile.guards import stock_of
from bastile.integrations import trl_head
from bastile.integrations.functions import (
    DIVERGENCE,
    Defaults,
    Parameters,
    apply_site,
    function_site,
    given,
    release_of,
    static_site,
    why_not,
)
from bastile.integrations.hidden import divergence_from_hidden, log_probs_from_hidden
from bastile.models.logits import Logits, divergence_of, log_probs_of
from bastile.models.sites import ModelFile, Site
from bastile.ops.linear_divergence import Kind
from bastile.ops.linear_logprobs import NO_TARGET
from bastile.report import Tally

_log = logging.getLogger("bastile")
_FUNCTION = "ChunkedLogProbFunction"
_DISTILLATION = "ChunkedDivergenceFunction"
#: Modules of TRL's, what says that a module of this name is the one, and the function that it must have.
_HOMES = {
    "trl.trainer.utils": ("add_fused_lm_head", _FUNCTION),
    "trl.kernels.chunked_divergence": ("TOKEN_CHUNK_SIZE", _DISTILLATION),
}
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # of TRL's, after the log-probabilities


def sites(file: ModelFile) -> Iterator[Site]:
    """What TRL's module has."""
    sign, needed = _HOMES.get(file.name, ("", ""))
    if sign in file.scope and _missing(file, needed):
        _log.warning("TRL %s calls no %s that bastile can find: its losses stay stock", release_of("trl"), needed)
    for name, item in file.scope.items():
        if name.endswith(_FUNCTION) and getattr(item, "__module__", None) == file.name:
            yield apply_site(file, item, _FUNCTIONS, _log_prob_function)
        elif name == _DISTILLATION and getattr(item, "__module__", None) == file.name:
            yield apply_site(file, item, _DIVERGENCES, _divergence_function, DIVERGENCE)
        elif isinstance(item, type) and _JSD in vars(item) and item.__module__ == file.name:
            yield static_site(file, item, _JSD, _JSD_LOSSES, functools.partial(_of_logits, way=_jsd), DIVERGENCE)
        elif name in _LOSSES and (stock := stock_of(item)).__module__ == file.name:
            known, build = _LOSSES[name]
            for holder in _holders(name, stock):
                yield function_site(file, name, holder, known, build)


def _missing(file: ModelFile, needed: str) -> bool:
    return not any(name.endswith(needed) and isinstance(item, type) for name, item in file.scope.items())


def _holders(name: str, stock: Any) -> list[Any]:
    """The modules of TRL that call it by their own global: it is imported from where it is defined."""
    modules = [module for title, module in list(sys.modules.items()) if title.partition(".")[0] == "trl"]
    return [module for module in modules if stock_of(getattr(module, "__dict__", {}).get(name)) is stock]


# ---- by parameters ---------------------------------------------------------------------------------------------------

_REST = ("final_logit_softcapping", "logit_scale")
#: Of ChunkedLogProbFunction's forward, but for ctx.
_FUNCTIONS = (
    ("hidden", "weight", "bias", "targets", "temperature", "chunk_size", *_REST, "outputs"),  # from 1.15 on
    ("last_hidden", "weight", "bias", "targets", "temperature", "chunk_size", *_REST),  # 1.13
    ("last_hidden", "weight", "targets", "temperature", "chunk_size", *_REST),  # 1.6
    ("last_hidden", "weight", "targets", "temperature", "chunk_size", "logit_scale"),  # 1.4
)


def _log_prob_function(tally: Tally, original: Any, parameters: Parameters, defaults: Defaults) -> Callable[..., Any]:
    """Of ChunkedLogProbFunction.apply. Releases before 1.13, which have no bias, give no gradient to entropy."""
    all_outputs, has_gradient = "outputs" in parameters, "bias" in parameters

    def call(*args: Any, **kwargs: Any) -> Any:
        named = given(parameters, defaults, args, kwargs)
        hidden, weight = named[parameters[0]], named["weight"]
        reason = why_not(hidden, weight, named.get("bias"))
        if reason is not None:
            tally.step_aside(reason)
            return original(*args, **kwargs)
        asked = named.get("outputs", ("entropy",))
        found = log_probs_from_hidden(
            hidden,
            weight,
            named["targets"],
            bias=named.get("bias"),
            temperature=named["temperature"],
            logit_scale=named["logit_scale"],
            softcap=named.get("final_logit_softcapping"),
            ignore_index=None,
            outputs=tuple(name for name in _OUTPUTS if name in asked),
        )
        tally.count()
        if all_outputs:
            return found.log_probs, found.entropy, found.log_sum_sq_probs, found.mean_logits, found.is_top1
        assert found.entropy is not None
        return found.log_probs, found.entropy if has_gradient else found.entropy.detach()

    return call


_SIDES = tuple(f"{side}_{what}" for side in ("student", "teacher") for what in ("hidden", "weight", "bias"))
_MAPS = tuple(
    f"{side}_{what}" for side in ("student", "teacher") for what in ("logit_scale", "final_logit_softcapping")
)
#: Of ChunkedDivergenceFunction's forward, but for ctx.
_DIVERGENCES = ((*_SIDES, "beta", "temperature", *_MAPS),)


def _divergence_function(tally: Tally, original: Any, parameters: Parameters, defaults: Defaults) -> Callable[..., Any]:
    """Of ChunkedDivergenceFunction.apply, which gives the divergence and the student's entropy. A beta of 0 is
    KL(teacher || student), of 1 KL(student || teacher)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        named = given(parameters, defaults, args, kwargs)
        student, teacher = ([named[name] for name in _SIDES[first : first + 3]] for first in (0, 3))
        reason = why_not(*student) or why_not(*teacher)
        if reason is not None:
            tally.step_aside(reason)
            return original(*args, **kwargs)
        beta = named["beta"]
        found = divergence_from_hidden(
            *student[:2],
            *teacher[:2],
            bias=student[2],
            teacher_bias=teacher[2],
            kind="forward" if beta == 0.0 else "reverse" if beta == 1.0 else "jsd",
            beta=beta,
            temperature=named["temperature"],
            logit_scale=named["student_logit_scale"],
            softcap=named["student_final_logit_softcapping"],
            teacher_logit_scale=named["teacher_logit_scale"],
            teacher_softcap=named["teacher_final_logit_softcapping"],
            outputs=("entropy",),
        )
        tally.count()
        return found.divergence, found.entropy

    return call


def _chunked_cross_entropy(
    tally: Tally, original: Any, parameters: Parameters, defaults: Defaults
) -> Callable[..., Any]:
    """Of SFT's loss, which returns the loss, and sums for metrics: right ones, entropy, the number of targets."""

    def call(*args: Any, **kwargs: Any) -> Any:
        named = given(parameters, defaults, args, kwargs)
        hidden, weight, bias = named["hidden_states"], named["lm_head_weight"], named["lm_head_bias"]
        labels, shifted, items = named["labels"], named["shift_labels"], named["num_items_in_batch"]
        reason = why_not(hidden, weight, bias)
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
            logit_scale=named["logit_scale"],
            softcap=named["final_logit_softcapping"],
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


def _of_logits(tally: Tally, original: Any, parameters: Parameters, defaults: Defaults, way: Any) -> Any:
    """Of a function of logits: way(given, dtype) gives what is returned, in this type if it is of rows, NotImplemented
    where that needs the logits."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        named = given(parameters, defaults, args, kwargs)
        named.setdefault("logits", named.get("student_logits"))
        if isinstance(named["logits"], Logits) and not torch.compiler.is_compiling():
            result = way(named, _type_of(stock_of(original), named["logits"]))
            if result is not NotImplemented:
                tally.count()
                return result
        return original(*args, **kwargs)

    return call


def _type_of(stock: Any, logits: Logits) -> torch.dtype | None:
    """Where Triton is, releases from 1.14 on have kernels for GPUs, whose results are float32 whatever the logits are.
    None: as PyTorch's operators have it."""
    supports, kernel = map(stock.__globals__.get, ("_supports_trl_loss_kernel", "_fused_logprob_entropy"))
    if supports is None or kernel is None:
        return None
    shown = SimpleNamespace(**{name: getattr(logits, name) for name in ("device", "dtype", "shape")})
    shown.ndim, shown.stride = len(logits.shape), lambda dim: 1  # as they would lie, if they were made
    return torch.float32 if supports(shown) else None


def _found(named: dict[str, Any], dtype: torch.dtype | None, index: Any, outputs: tuple[str, ...]) -> Any:
    """LogProbs of logits; rows whose row_mask is zero are zero."""
    temperature, mask, ignored = named.get("temperature", 1.0), named.get("row_mask"), None
    if isinstance(mask, torch.Tensor):
        index, ignored = index.masked_fill(mask == 0, NO_TARGET), NO_TARGET
    return log_probs_of(named["logits"], index, temperature, ignored, outputs, dtype)


def _selected(named: dict[str, Any], dtype: torch.dtype | None) -> Any:
    found = _found(named, dtype, named["index"], ())
    return found if found is NotImplemented else found.log_probs


def _entropy(named: dict[str, Any], dtype: torch.dtype | None) -> Any:
    logits = named["logits"]
    found = _found(named, dtype, torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device), ("entropy",))
    return found if found is NotImplemented else found.entropy


def _selected_and_entropy(named: dict[str, Any], dtype: torch.dtype | None) -> Any:
    found = _found(named, dtype, named["index"], ("entropy",))
    if found is NotImplemented:
        return found
    return found.log_probs, found.entropy if named["entropy_requires_grad"] else found.entropy.detach()


def _jsd(named: dict[str, Any], _: torch.dtype | None) -> Any:
    """GKD's and GOLD's loss. A beta of 0 is KL(teacher || student), of 1 KL(student || teacher)."""
    labels, beta, items = named["labels"], named["beta"], named.get("num_items_in_batch")
    if named.get("logits_are_probs"):
        return NotImplemented
    mask = None if labels is None else labels != -100
    if named["reduction"] not in ("batchmean", "mean", "sum") and items is None:
        return NotImplemented  # a number for each class
    kind: Kind = "forward" if beta == 0 else "reverse" if beta == 1 else "jsd"
    logits = named["logits"]
    found = divergence_of(logits, named["teacher_logits"], mask, kind, beta, named["temperature"])
    if found is NotImplemented:
        return found
    rows: Any = found.numel() if mask is None else mask.sum()
    if items is not None:
        divisor = items.to(found.device) if isinstance(items, torch.Tensor) else items
    elif named["reduction"] == "batchmean":
        divisor = max(found.shape[0], 1) if mask is None else rows.clamp_min(1)
    else:
        divisor = rows * logits.shape[-1] if named["reduction"] == "mean" else 1
    return found.sum() / divisor


_JSD = "generalized_jsd_loss"
_OF_JSD = ("student_logits", "teacher_logits", "labels", "beta", "temperature", "reduction")
#: Its parameters: GKD's, GOLD's, and GKD's before a batch's number of targets was handed on.
_JSD_LOSSES = (
    (*_OF_JSD, "num_items_in_batch"),
    (*_OF_JSD, "logits_are_probs", "num_items_in_batch"),
    _OF_JSD,
)

_OF_SFT = ("hidden_states", "lm_head_weight", "chunk_size", "labels", "shift_labels", "num_items_in_batch")
_BOTH = ("logits", "index", "entropy_requires_grad", "temperature", "row_mask")
#: Functions: the parameters with which they are known, and what builds the replacement.
_LOSSES: dict[str, Any] = {
    "_chunked_cross_entropy_loss": (
        ((*_OF_SFT, "logit_scale", "final_logit_softcapping", "lm_head_bias"),),
        _chunked_cross_entropy,
    ),
    "selective_log_softmax": (
        (("logits", "index", "temperature", "row_mask"), ("logits", "index")),
        functools.partial(_of_logits, way=_selected),
    ),
    trl_head.NAME: (trl_head.KNOWN, trl_head.head),
    "entropy_from_logits": ((("logits", "chunk_size"),), functools.partial(_of_logits, way=_entropy)),
    "selective_log_softmax_and_entropy": ((_BOTH,), functools.partial(_of_logits, way=_selected_and_entropy)),
}
