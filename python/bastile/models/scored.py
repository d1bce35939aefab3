"""Which rows of hidden states heads of scores read, in models that have a causal backbone: that of sequences, reward
models' too, one row each, and that of tokens those that have a label. What else goes through the layers is padding that
nobody reads (models/padding.py)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from bastile.host_copies import on_host
from bastile.models.forms import is_known
from bastile.models.known_methods import KnownMethod
from bastile.models.padding import IGNORED, is_of_loss, read_by
from bastile.models.rebind import as_keywords, parameter_names

_TOKENS_LOSS = "ForTokenClassification"


def _reads(
    rows: Callable[[Any, dict[str, Any]], Any], is_alone: bool, original: Callable[..., Any], method: KnownMethod
) -> Callable[..., Any]:
    """rows: of a model and its arguments, labels of those that are read. is_alone: it returns nothing of the others."""
    names = parameter_names(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = rows(self, as_keywords(names, args, kwargs)) if method.is_in_force else None
        with read_by(found, is_alone):
            return original(self, *args, **kwargs)

    return forward


def _last_tokens(model: Any, given: dict[str, Any]) -> torch.Tensor | None:
    """Of each row the last token that is not the one for padding, as the model itself finds it."""
    ids, padding = given.get("input_ids"), getattr(model.config.get_text_config(), "pad_token_id", None)
    if type(ids) is not torch.Tensor or ids.dim() != 2 or not ids.numel() or padding is None:
        return None
    known = ids if ids.is_cpu else on_host(ids)
    ids = ids if known is None else known
    at = torch.arange(ids.shape[1], device=ids.device)
    last = (at * (ids != padding)).argmax(-1, keepdim=True)
    return torch.where(at == last, 0, IGNORED)


def _labelled_tokens(model: Any, given: dict[str, Any]) -> Any:
    return given.get("labels") if is_of_loss(model, given, _TOKENS_LOSS) else None


def _method(fingerprints: set[str], rows: Callable[[Any, dict[str, Any]], Any], is_alone: bool) -> KnownMethod:
    known = functools.partial(_is_one_of, frozenset(fingerprints))
    return KnownMethod("forward", known, functools.partial(_reads, rows, is_alone))


def _is_one_of(fingerprints: frozenset[str], method: Any) -> bool:
    return is_known(inspect.unwrap(method), fingerprints)


#: By class; their code in Transformers 5.0 and 5.24, and in both.
_METHODS = {
    "GenericForSequenceClassification": _method({"372b28a881cb", "4f5896dea52c"}, _last_tokens, True),
    "GenericForTokenClassification": _method({"0851d24cfd7a"}, _labelled_tokens, False),
}


def put_into(module: Any) -> None:
    for name, method in _METHODS.items():
        if isinstance(cls := getattr(module, name, None), type):
            method.put_into(cls)


def take_out_of(module: Any) -> None:
    for name, method in _METHODS.items():
        if isinstance(cls := getattr(module, name, None), type):
            method.take_out_of(cls)
